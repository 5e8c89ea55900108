"""vLLM on the CPU with Longshore and without: python benchmarks/vllm_cpu.py [--json]

A Llama with about 100 million random weights, 20 sessions over a device cache for 4; the cost of storing for a vLLM in
a process of its own; the scheduler's time for a prompt of 32,768 tokens. With --remote URL instead: engines that share
a store. Needs an environment with vLLM (`make vllm` makes one) and two cores. The measurements are in
`longshore.bench.vllm_runs` and `vllm_manager.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import vllm_manager
from longshore.bench import vllm_runs
from longshore.bench.harness import Case, check_engine, machine_facts
from longshore.engines.kv_transfer_config import kv_transfer_config
from longshore.tiers.file.fsck import Fsck, inspect
from longshore.trace.workload import FIRST_TOKEN

BLOCK = 32
RESIDENT = 4
"""Sessions that the device has room for."""
PAIRS, PROMPT = 10, 1000
"""Batches of the case `storing`, and tokens of each of their prompts."""
SHARED, ANSWER = 12, 16
"""Prompts of the cases of a shared store, and tokens of each answer."""


def save_model(directory: Path, seed: int = 0) -> Path:
    """A Llama with random weights, large enough that prefill matters on two cores."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 32_000}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**shape, **heads, tie_word_embeddings=True)).save_pretrained(directory)
    return directory


def teller() -> Callable[[str], None]:
    """A function that prints lines with the seconds since this call."""
    begun = time.monotonic()
    return lambda line: print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)


def cases(scratch: Path, sessions: int, blocks: list[int]) -> Iterator[Case]:
    """All cases; the scheduler's time comes last."""
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
        tell(f"the scheduler's time, {each} tracked blocks")
        yield from vllm_manager.run(blocks=[each])


def storing(model: Path, scratch: Path, tell: Callable[[str], None]) -> Iterator[Case]:
    """The cost of storing: `PAIRS` batches of prompts without reuse, sent to both engines in turn.

    Each engine runs in a process of its own, as for a server, with room for four prompts on the device. Every chunk is
    written to its file at once (`backup` is `write_through`); the last case is the share of complete chunks that is in
    files at the end.
    """
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 4 * 34 + 1,
        "max_model_len": 1088,
        "max_num_seqs": 4,
    }
    scratch /= "storing"
    scratch.mkdir()
    check_engine("vLLM", model)
    plan = vllm_runs.SessionPlan(engine=engine, settings={"backup": "write_through"})
    dice = random.Random(PROMPT)  # noqa: S311 - text to measure with
    with ExitStack() as engines:
        theirs = engines.enter_context(
            vllm_runs.EngineProcess(model, plan.engine, scratch / "without.log", tell, own_process=True)
        )
        options = vllm_runs.with_longshore(plan, scratch)
        with vllm_runs.EngineProcess(model, options, scratch / "with.log", tell, own_process=True) as ours:
            both, said = vllm_runs.EnginePair(ours, theirs), []
            for each in range(PAIRS + 1):
                tell(f"prompts without reuse: pair {each} of {PAIRS}")
                top = theirs.facts["vocabulary"]
                batch = [[dice.randrange(FIRST_TOKEN, top) for _ in range(PROMPT)] for _ in range(vllm_runs.BATCH)]
                said.append(both.ask([batch, batch], plan.answer))
    said = said[1:]  # the first batch warms both engines up
    tokens = vllm_runs.BATCH * (PROMPT + plan.answer)
    yield from vllm_runs.costs("storing/speed", "storing/cpu", said, tokens)
    eligible = (PAIRS + 1) * vllm_runs.BATCH * (PROMPT // BLOCK)
    with Fsck(scratch / "tier") as fsck:
        records = inspect(fsck, iter(()), 0.0).records
    yield Case("storing/files", records, "chunks", "whole chunks of all prompts", eligible, records / eligible)


def sharing(model: Path, other: Path, url: str, scratch: Path, tell: Callable[[str], None]) -> Iterator[Case]:
    """A store under engines that share nothing else: one fills it, one has not seen the prompts, one has other weights.

    A fourth engine has no Longshore, and keeps all blocks on the device. Asked once it computes the prompts, which is
    the reference of times; asked again it reuses as much as the second engine, which is the reference of answers.
    """
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": BLOCK,
        "num_gpu_blocks_override": (SHARED + 2) * 34,
        "max_model_len": 1088,
        "max_num_seqs": 4,
    }
    ours = {**engine, "kv_transfer_config": kv_transfer_config({"host_size": "1GiB", "remote": url})}
    dice = random.Random(SHARED)  # noqa: S311 - text to measure with
    with ExitStack() as engines:

        def start(name: str, options: dict[str, Any], model: Path = model) -> Callable[[str], list[dict[str, Any]]]:
            process = engines.enter_context(vllm_runs.EngineProcess(model, options, scratch / f"{name}.log", tell))
            process.ask([[dice.randrange(FIRST_TOKEN, top) for _ in range(PROMPT)]], ANSWER)

            def ask_all(what: str) -> list[dict[str, Any]]:
                tell(f"{len(prompts)} prompts: {what}")
                return [process.ask([prompt], ANSWER)["answers"][0] for prompt in prompts]

            return ask_all

        top = 32_000
        prompts = [[dice.randrange(FIRST_TOKEN, top) for _ in range(PROMPT)] for _ in range(SHARED)]
        ask_resident = start("resident", engine)
        computed, resident = ask_resident("computed"), ask_resident("reused on the device")
        start("first", ours)("computed and stored")
        second = start("second", ours)("in an engine that has not seen them")
        third = start("other-weights", ours, other)("with other weights")
    times = [1e3 * statistics.median(each["ttft"] for each in side) for side in (second, computed)]
    yield Case("shared/ttft", times[0], "ms", "computed, without Longshore", times[1], times[1] / times[0])
    eligible = SHARED * (PROMPT // BLOCK) * BLOCK
    for name, side in (("shared/found", second), ("shared/other", third)):
        found = sum(each["cached"] for each in side)
        yield Case(name, found, "tokens", "tokens of complete blocks", eligible, found / eligible)
    equal = sum(mine["tokens"] == theirs["tokens"] for mine, theirs in zip(second, resident, strict=True))
    yield Case("shared/equal", equal, "answers", "of an engine that kept all blocks", SHARED, equal / SHARED)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_argument("--sessions", type=int, default=20, help="number of sessions (default 20)")
    options.add_argument(
        "--blocks",
        default="100000,1000000",
        help="tracked blocks for the scheduler's time, comma-separated (default 100000,1000000)",
    )
    options.add_argument("--storing", action="store_true", help="only the cost of storing")
    options.add_argument("--remote", metavar="URL", help="only engines that share the store at this URL")
    options.add_argument(
        "--dir", help="directory for the model and the file tier, on the disk to measure; both are removed at the end"
    )
    asked = options.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tempfile.TemporaryDirectory(prefix="longshore-bench-", dir=asked.dir) as scratch:
        taken: list[Case] = []
        try:
            where, blocks = Path(scratch).resolve(), [int(each) for each in asked.blocks.split(",")]
            if asked.remote:
                models = save_model(where / "model"), save_model(where / "other", seed=1)
                only = sharing(*models, asked.remote, where, teller())
            elif asked.storing:
                only = storing(save_model(where / "model"), where, teller())
            else:
                only = cases(where, asked.sessions, blocks)
            for case in only:
                taken.append(case)
                print(
                    f"measured {case.name}: {case.value:.2f} {case.unit}, {case.reference_value:.2f}", file=sys.stderr
                )
        finally:  # results before an interrupt or a failure of an engine are printed, too
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
