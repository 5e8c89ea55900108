"""One engine of vLLM in a process of its own: python serving.py ORDERS, where ORDERS is a file of JSON.

{"model": DIRECTORY, "extra": {...}, "blocks": 64, "steps": [["ask", [TOKENS]], ["reset"], ["flip"], ...]}

With "plain" instead of "extra" the engine has `PlainSpec`, with neither no connector.

Prints one line of JSON, the last: what each step gave, and the counters of the tiers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "MKL_CBWR": "COMPATIBLE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
MARK = "SERVED "


class Engine:
    """vLLM with the tiers that `orders` ask for, or without any."""

    def __init__(self, orders: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.refused = 0
        options = dict(orders.get("options", {}))
        if orders.get("plain") is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "PlainSpec",
                    "spec_module_path": "plain_spec",
                    **orders["plain"],
                },
            }
        if orders.get("extra") is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                **orders.get("connector", {}),
                "kv_connector_extra_config": {
                    "spec_name": "LongshoreSpec",
                    "spec_module_path": "longshore.engines.vllm",
                    **orders["extra"],
                },
            }
        self.llm = LLM(
            model=orders["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype=orders.get("dtype", "float32"),
            block_size=orders.get("block_size", 32),
            num_gpu_blocks_override=orders["blocks"],
            max_model_len=1024,
            max_num_seqs=8,
            enable_prefix_caching=True,
            **options,
        )
        self.sampling = SamplingParams(temperature=0, max_tokens=6, logprobs=4, detokenize=False, ignore_eos=True)

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        """Answer one prompt alone."""
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], self.sampling, use_tqdm=False)
        answer = output.outputs[0]
        return {
            "tokens": list(answer.token_ids),
            "logprobs": [sorted((token, each.logprob) for token, each in step.items()) for step in answer.logprobs],
            "cached": output.num_cached_tokens,
        }

    def reset(self) -> None:
        """Forget what the device has."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache was not reset")

    def settle(self) -> None:
        """Wait until all that was stored is safe in every tier."""
        self.manager._runtime.flush(30.0)

    def drop_host(self) -> None:
        """Evict all that the host tier has, so that the file tier must serve."""
        self.settle()
        with self.manager._runtime.control() as cache:
            keys = {resident.key for resident in cache.residents() if resident.slot.tier == "host"}
            if cache.discard(sorted(keys), "host") != len(keys):
                raise RuntimeError("not all could be evicted")

    def kill_tier_host(self) -> None:
        """Stop the process that reads files, and kill it a little later: while it reads, if anything is to be read.

        There is no other one until `revive_tier_host`.
        """
        watch = self.file._watch
        watch._pause = 1e9
        os.kill(watch.process.pid, signal.SIGSTOP)
        threading.Timer(0.5, os.kill, (watch.process.pid, signal.SIGKILL)).start()

    def revive_tier_host(self) -> None:
        """Have another tier host started, once the first one has died, and wait for it."""
        runtime = self.manager._runtime
        if not runtime._wait(lambda: self.file._watch.deaths, 30.0):
            raise RuntimeError("the tier host lives")
        self.file._watch._restart_at = 0.0
        if not runtime._wait(lambda: self.file._is_open, 60.0):
            raise RuntimeError("there is no other tier host")

    def learn_that_files_are_slow(self) -> None:
        """The gate has seen that a MiB takes a quarter of an hour to read, and next to no time onto the device."""
        from longshore.boundary import DEVICE, FILE, HOST, Route, Status, TransferResult

        for route, seconds in ((Route(FILE, HOST), 1000.0), (Route(HOST, DEVICE), 1e-6)):
            self.manager._runtime.saw_loads(route, [TransferResult(0, (Status.OK,), 1 << 20, seconds)])

    def refuse_loads(self) -> None:
        """From now on nothing can be copied onto the device."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from longshore.boundary import DEVICE
        from longshore.errors import QueueFullError

        worker = get_kv_transfer_group().connector_worker.worker
        submit = worker.engine.submit

        def refuse(transfer: Any) -> None:
            if transfer.route.destination == DEVICE:
                self.refused += 1
                raise QueueFullError("refused by the test")
            submit(transfer)

        worker.engine.submit = refuse

    def flip(self) -> None:
        """Change one bit in each page of the host tier."""
        self.settle()
        self.manager._store.arena.array[3::4096] ^= 64

    @property
    def file(self) -> Any:
        """The file tier."""
        (file,) = self.manager._runtime._tiers
        return file

    @property
    def manager(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler.connector.connector_scheduler.manager

    def counters(self) -> dict[str, Any]:
        """What the tiers have counted."""
        manager = self.manager
        with manager._runtime.observe() as cache:
            cache.check_integrity()
            counters = cache.counters
            return {
                "hits": dict(counters.hits),
                "misses": {reason.value: count for reason, count in counters.misses.items()},
                "lost": dict(counters.lost),
                "failed": {route: totals.failed for route, totals in counters.routes.items()},
                "troubles": {each.name: dict(each.troubles) for each in manager._runtime._tiers},
                "arrived": {route: totals.chunks for route, totals in counters.routes.items()},
                "held": cache.held,
                "image_bytes": [each.image_bytes for each in cache.stats()[0].sizes],
                "refused": self.refused,
                "recomputed": 0 if manager._runtime.weighing is None else manager._runtime.weighing.refused,
            }


def main(make: type[Engine] = Engine) -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    os.environ |= orders.get("environment", {})
    engine = make(orders)
    results = []
    for step, *arguments in orders["steps"]:
        results.append(getattr(engine, step)(*arguments))
    counters = engine.counters() if orders.get("extra") is not None else None
    engine.llm.llm_engine.engine_core.shutdown()
    print(MARK + json.dumps({"results": results, "counters": counters}), flush=True)


if __name__ == "__main__":
    main()
