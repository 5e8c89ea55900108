"""An engine of vLLM in processes of its own, which waits for what comes: python engine_to_kill.py MODEL DIRECTORY

Prints one line of JSON, the numbers of the engine's process, of its workers and of its tier host; ends when its input
does.
"""

from __future__ import annotations

import json
import os
import sys

import psutil

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    from vllm import LLM, SamplingParams

    extra = {
        "spec_name": "LongshoreSpec",
        "spec_module_path": "longshore.engines.vllm",
        "host_size": "16MiB",
        "file_path": sys.argv[2],
        "file_size": "32MiB",
        "backup": "write_through",
    }
    llm = LLM(
        model=sys.argv[1],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        num_gpu_blocks_override=64,
        max_model_len=1024,
        kv_transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    )
    sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
    llm.generate([{"prompt_token_ids": list(range(3, 403))}], sampling, use_tqdm=False)
    (host,) = [each for each in psutil.Process().children(recursive=True) if is_tier_host(each)]
    workers = [each.pid for each in host.parent().children() if each.name() == "VLLM::Worker"]
    print(json.dumps({"engine": host.ppid(), "workers": workers, "tier host": host.pid}), flush=True)
    sys.stdin.read()
    os._exit(0)


def is_tier_host(process: psutil.Process) -> bool:
    return "longshore.runtime.tier_host.child" in process.cmdline()


if __name__ == "__main__":
    main()
