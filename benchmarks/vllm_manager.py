"""The scheduler's own time for a prompt of 32,768 tokens, beside vLLM's manager of CPU blocks driven by the same calls.

    load     all lookups, prepare_load, the end of the step, complete_load, the end of the request      ms per prompt
    store    prepare_store and complete_store, of prompts for which others must make way               us per block
    pause    the longest single call outside eviction                                                  ms

The reference is vLLM's ARC manager. All is measured in processor time of the calling thread. Keys are new objects in
each request, as vLLM's own are.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from longshore.bench.cache_sides import AdmitsAll
from longshore.bench.harness import Case
from longshore.config import Config
from longshore.errors import BenchError

PROMPT = 2048
"""Blocks of 16 tokens."""

_REFERENCE = "vLLM's ARC manager"
_STEP = SimpleNamespace(new_req_ids=(), preempted_req_ids=())


class Driven:
    """A manager, called as vLLM's scheduler calls it, and the longest call until now."""

    def __init__(self, manager: Any, report: Callable[[Any], None]) -> None:
        from vllm.v1.kv_offload import base

        self._base = base
        self._manager = manager
        self._report = report
        self.longest = 0.0
        self._taken = 0.0

    def store(self, prompt: Sequence[bytes]) -> float:
        """Store a prompt of which nothing is known; the seconds that it took."""
        keys, request = self._request(prompt)
        self._taken = 0.0
        output = self._call(self._manager.prepare_store, keys, request)
        if output is None or len(output.keys_to_store) != len(keys):
            raise BenchError(f"not all of {len(keys)} blocks were stored")
        self._report(output.store_spec)
        self._call(self._manager.complete_store, set(output.keys_to_store), request)
        self._call(self._manager.on_request_finished, request)
        return self._taken

    def load(self, prompt: Sequence[bytes]) -> float:
        """Load a prompt of which all is there; the seconds that it took."""
        keys, request = self._request(prompt)
        lookup, hit = self._manager.lookup, self._base.LookupResult.HIT
        self._taken = 0.0
        if self._call(lambda: [lookup(key, request) for key in keys]).count(hit) != len(keys):
            raise BenchError("a prompt that was stored was not found")
        self._call(self._manager.prepare_load, keys, request)
        self._call(self._manager.on_schedule_end, _STEP)
        self._call(self._manager.complete_load, set(keys), request)
        self._call(self._manager.on_request_finished, request)
        return self._taken

    def _request(self, prompt: Sequence[bytes]) -> tuple[list[Any], Any]:
        """A new request, and its keys."""
        request = self._base.ReqContext(req_id=str(random.getrandbits(64)))
        self._manager.on_new_request(request)
        keys = [self._base.make_offload_key(digest, 0) for digest in prompt]
        for position, key in enumerate(keys):
            request.set_offload_key_position(key, 16 * (position + 1))
        return keys, request

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        begun = time.thread_time()
        answer = method(*arguments)
        taken = time.thread_time() - begun
        self._taken += taken
        self.longest = max(self.longest, taken)
        return answer


def ours(blocks: int) -> Driven:
    """`LongshoreManager` over a host tier of so many blocks, whose workers are quick."""
    from longshore.engines.vllm.manager import LongshoreManager
    from longshore.engines.vllm.scheduler_replay import open_tiers

    store = open_tiers(blocks, Config.make(), AdmitsAll)
    return Driven(
        LongshoreManager(store, [0], 60.0), lambda spec: store.reports.stored(spec.ticket, 0, spec.indices, [])
    )


def theirs(blocks: int, policy: str) -> Driven:
    """vLLM's manager of so many CPU blocks."""
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    return Driven(CPUOffloadingManager(blocks, cache_policy=policy), lambda spec: None)


def run(*, blocks: Sequence[int] = (100_000,), repeats: int = 15) -> Iterator[Case]:
    """All cases, for each number of tracked blocks."""
    for size in blocks:
        if size < 4 * PROMPT:
            raise BenchError(f"a number of blocks is at least {4 * PROMPT}, got {size}")
        yield from _sized(size, repeats)


def _sized(size: int, repeats: int) -> Iterator[Case]:
    dice = random.Random(size)  # noqa: S311 - keys to measure with, not to keep
    prompts = [[dice.randbytes(32) for _ in range(PROMPT)] for _ in range(size // PROMPT)]
    gc.collect()
    gc.freeze()  # as engines do at their start
    sides = [ours(size), theirs(size, "arc")]
    for side in sides:
        for prompt in prompts:
            side.store(prompt)
        gc.collect()
        gc.freeze()  # nobody shall pay for walking over what another one keeps
    loads: list[list[float]] = [[], []]
    stores: list[list[float]] = [[], []]
    for repeat in range(repeats):
        prompt = dice.choice(prompts)
        for at in (repeat % 2, 1 - repeat % 2):
            loads[at].append(sides[at].load(prompt))
    longest = [side.longest for side in sides]
    for repeat in range(repeats):
        prompt = [dice.randbytes(32) for _ in range(PROMPT)]
        for at in (repeat % 2, 1 - repeat % 2):
            stores[at].append(sides[at].store(prompt))
    for name, taken, unit, scale in (("load", loads, "ms", 1e3), ("store", stores, "us", 1e6 / PROMPT)):
        mine, other = (scale * statistics.median(each) for each in taken)
        yield Case(f"{name}/{size}", mine, unit, _REFERENCE, other, other / mine)
    yield Case(f"pause/{size}", 1e3 * longest[0], "ms", _REFERENCE, 1e3 * longest[1], longest[1] / longest[0])
