"""vLLM on the CPU with Longshore and without: python benchmarks/vllm_cpu.py [--json]

A Llama of about 100 million random weights, 20 sessions over a device cache for 4; what storing costs a vLLM that has
its own process; then the scheduler's own time for a prompt of 32,768 tokens. Needs an environment with vLLM (`make
vllm` sets one up) and two cores. What is measured stands in `longshore.bench.vllm_runs` and
`vllm_manager.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import vllm_manager
from longshore.bench import vllm_runs
from longshore.bench.harness import Case, machine_facts

BLOCK = 32
RESIDENT = 4
"""Sessions that the device has room for."""


def save_model(directory: Path) -> Path:
    """A Llama with random weights, large enough that prefill matters on two cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32_000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True)).save_pretrained(directory)
    return directory


def teller() -> Callable[[str], None]:
    """Prints lines with the seconds since now."""
    begun = time.monotonic()
    return lambda line: print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)


def cases(scratch: Path, sessions: int, blocks: list[int]) -> Iterator[Case]:
    """All figures, the scheduler's own time at last."""
    longest = 512 + 3 * 16 + 2 * 64
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": RESIDENT * -(-longest // BLOCK) + 1,
        "max_model_len": 1024,
        "max_num_seqs": 4,
    }
    tell = teller()
    model = save_model(scratch / "model")
    yield from vllm_runs.run_sessions(
        model, scratch, vllm_runs.SessionPlan(sessions=sessions, engine=engine), tell=tell
    )
    yield from storing(model, scratch, tell)
    for each in blocks:
        tell(f"the scheduler's own time, {each} tracked blocks")
        yield from vllm_manager.run(blocks=[each])


def storing(model: Path, scratch: Path, tell: Callable[[str], None]) -> Iterator[Case]:
    """What storing costs, with room for four prompts on the device."""
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 4 * 34 + 1,
        "max_model_len": 1088,
        "max_num_seqs": 4,
    }
    (scratch / "storing").mkdir()
    yield from vllm_runs.storing(model, scratch / "storing", vllm_runs.SessionPlan(engine=engine), tell=tell)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--sessions", type=int, default=20)
    options.add_argument("--blocks", default="100000,1000000", help="tracked blocks for the scheduler's time")
    options.add_argument("--storing", action="store_true", help="only what storing costs")
    options.add_argument("--dir", help="where model and file tier go, on the disk to measure; removed after")
    asked = options.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tempfile.TemporaryDirectory(prefix="longshore-bench-", dir=asked.dir) as scratch:
        taken: list[Case] = []
        try:
            where, blocks = Path(scratch).resolve(), [int(each) for each in asked.blocks.split(",")]
            only = storing(save_model(where / "model"), where, teller()) if asked.storing else None
            for case in only or cases(where, asked.sessions, blocks):
                taken.append(case)
                print(
                    f"measured {case.name}: {case.value:.2f} {case.unit}, {case.reference_value:.2f}", file=sys.stderr
                )
        finally:  # what was measured before an interrupt, or an engine's end, is told all the same
            show(taken, as_json=asked.json)


def show(taken: list[Case], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"machine": machine_facts(), "cases": [asdict(case) for case in taken]}))
        return
    for case in taken:
        figures = f"{case.value:10.2f} {case.unit:9} {case.reference_value:10.2f} {case.ratio:6.2f}"
        print(f"{case.name:16} {figures}  {case.reference}")


if __name__ == "__main__":
    main()
