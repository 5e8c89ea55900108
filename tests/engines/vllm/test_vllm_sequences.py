"""All sequences of calls that vLLM's scheduler makes leave the right bytes, and nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from sequence_machine import Sequences
from sequences_kit import SEEN
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.base import OffloadKey

from longshore.cache.evictor import Evictor

MOST_ONE_BY_ONE = 64
"""The largest batch that some part of the cache handles one by one: `nodes._MANY`."""


class Parts(Sequences):
    """One whose files have prompts longer than its host memory, which come again and again."""

    @initialize(
        world=st.sampled_from([1, 2]),
        slides=st.booleans(),
        host=st.sampled_from([12, 4, 6, 9]),
        file=st.sampled_from([400, 60]),
        backup=st.sampled_from(["write_through", "write_back"]),
        eviction=st.sampled_from(["gittins", "lru", "arc"]),
    )
    def start(self, **drawn: Any) -> None:
        super().start(**drawn, streams=True)
        for chunks in range(drawn["host"], 31, drawn["host"]):
            self.arrive(0, 300, 0, chunks, 1, None)
            self.flow(12)


class Large(Sequences):
    """One with room for more chunks at once than the cache handles one by one anywhere, full of such prompts."""

    @initialize(
        world=st.sampled_from([1, 2]),
        slides=st.booleans(),
        file=st.sampled_from([400, 0]),
        backup=st.sampled_from(["write_back", "write_through"]),
        eviction=st.sampled_from(["gittins", "lru", "arc"]),
    )
    def start(self, **drawn: Any) -> None:
        super().start(**drawn, host=320)
        prepare = self.manager.prepare_store

        def watched(keys: Collection[OffloadKey], context: Any) -> Any:
            said = prepare(keys, context)
            SEEN["offered again"] += said is None
            SEEN["stores of more than 64 chunks"] += said is not None and len(said.keys_to_store) > MOST_ONE_BY_ONE
            return said

        self.manager.prepare_store = watched
        for family in range(2):
            self.arrive(family, 300, 0, 300, 1, None)
            self.step(400, 0, True, None, 1)


@pytest.fixture
def machine() -> Iterator[Sequences]:
    """One to call by hand."""
    init_none_hash(sha256)
    made = Sequences()
    made.start(world=1, slides=True, host=320, file=0, backup="write_back", eviction="lru")
    yield made
    made.teardown()


@pytest.mark.parametrize("preempt", [None, 0])
def test_blocks_outside_the_window_are_not_stored_after_a_reset(machine: Sequences, preempt: int | None) -> None:
    """vLLM offers a request again from its first chunk on, though its first blocks are another's by now."""
    machine.arrive(0, 0, 0, 14, 60, None)
    for _ in range(4):
        machine.step(3, 0, True, None, 1)
    machine.arrive(1, 0, 0, 8, 60, None)
    machine.step(3, 0, True, None, 1)
    machine.reset("connector")
    machine.step(400, 0, True, preempt, 1)
    machine.step(400, 0, True, None, 1)
    windows = [key for key in machine.stored if key.endswith(b"\0\0\0\1")]
    assert len(windows) >= (14 if preempt == 0 else 5), "what was computed since is stored"


def test_any_call_sequence_serves_right_bytes_and_leaks_nothing() -> None:
    init_none_hash(sha256)
    SEEN.clear()
    run_state_machine_as_test(Sequences, settings=settings(max_examples=60, stateful_step_count=50))
    for what in ("chunks loaded", "failed loads", "reads of files", "late store", "part store", "preemptions"):
        assert SEEN[what], what
    assert SEEN["resets with loads"] + SEEN["resets with stores"]


def test_any_call_sequence_with_large_batches_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(evict: Callable[..., None]) -> Callable[..., None]:
        def call(self: Evictor, nodes: Sequence[int], *rest: Any) -> None:
            SEEN["evictions of more than 64 chunks"] += len(nodes) > MOST_ONE_BY_ONE
            evict(self, nodes, *rest)

        return call

    for name in ("_drop_copies", "_drop_leaves"):
        monkeypatch.setattr(Evictor, name, watched(getattr(Evictor, name)))
    init_none_hash(sha256)
    SEEN.clear()
    run_state_machine_as_test(Large, settings=settings(max_examples=20, stateful_step_count=30))
    for what in ("loads", "stores", "evictions"):
        assert SEEN[f"{what} of more than 64 chunks"], what
    for what in ("flushes", "offered again"):
        assert SEEN[what], what


def test_any_call_sequence_with_long_prompts_leaks_nothing() -> None:
    init_none_hash(sha256)
    SEEN.clear()
    run_state_machine_as_test(Parts, settings=settings(max_examples=60, stateful_step_count=40))
    for what in ("loads in parts", "parts of loads", "ends of loads", "whole loads in parts", "resets with parts"):
        assert SEEN[what], what
    for what in ("stores in parts", "parts of stores", "ends of stores", "flushes of stores in parts"):
        assert SEEN[what], what
    for how in ("bad", "late"):
        assert SEEN[f"{how} part of a store"]
    assert SEEN["bad part of a load"]
