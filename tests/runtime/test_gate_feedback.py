"""Load or recompute, as the loop decides it: from what loads took, and what computing took."""

from __future__ import annotations

import itertools

import pytest

from longshore.boundary import DEVICE, FILE, HOST, Route, Status, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Lease, RecomputeGate, Run, TieredCache, TierSpec, WritePolicy
from longshore.runtime import Runtime
from scripted import Scripted

IMAGE, TOKENS = 4096, 16
KEYS = [bytes([i + 1]) * 32 for i in range(4)]


class Slow(Scripted):
    """What it brings up takes so many seconds a chunk."""

    seconds = 0.0

    def poll(self) -> list[TransferResult]:
        return [
            TransferResult(each.job, each.statuses, each.bytes, self.seconds * len(each.statuses))
            for each in super().poll()
        ]


class Rig:
    """Four chunks; all in the file tier, `at_hand` of them in host memory, too."""

    def __init__(self, *, gated: bool = True) -> None:
        self.now = 1.0
        self.device = Slow(Route(DEVICE, HOST), Route(HOST, DEVICE))
        self.files = Slow(Route(HOST, FILE), Route(FILE, HOST))
        self.cache = TieredCache(
            [TierSpec(HOST, 8, IMAGE), TierSpec(FILE, 8, IMAGE)], CacheSettings(backup=WritePolicy.THROUGH)
        )
        gate = RecomputeGate([HOST, FILE], TOKENS, IMAGE) if gated else None
        self.runtime = Runtime(self.cache, [self.device, self.files], gate=gate, clock=lambda: self.now)
        with self.runtime.batch() as cache:
            cache.store({0: GroupKeys(KEYS)}, {0: range(4)})
        self._end_all()

    def _end_all(self) -> None:
        while self.device.open or self.files.open:
            for mover in (self.device, self.files):
                while mover.open:
                    mover.end()
            self.runtime.pump()

    def drop(self, at_hand: int) -> None:
        """All but the first `at_hand` chunks leave host memory."""
        with self.runtime.batch() as cache:
            assert cache.discard(KEYS[at_hand:], HOST) == 4 - at_hand

    def lookup(self) -> Lease:
        with self.runtime.batch() as cache:
            hold = cache.lookup({0: GroupKeys(KEYS)}, self.now).lease
            assert hold is not None
            return hold

    def load(self) -> None:
        """All four chunks come up, and are let go."""
        hold = self.lookup()
        with self.runtime.batch() as cache:
            cache.load(hold, {0: range(4)})
        self._end_all()
        with self.runtime.batch() as cache:
            assert cache.progress(hold).outcome is not None
            cache.release(hold)


def learned(per_chunk: float, *, at_hand: int = 0, gated: bool = True) -> Rig:
    """Files take `per_chunk` seconds a chunk; computing takes 10 ms a chunk."""
    rig = Rig(gated=gated)
    rig.files.seconds, rig.device.seconds = per_chunk, 1e-6
    rig.drop(0)
    rig.load()
    rig.drop(at_hand)
    for chunks in range(1, 9):
        rig.runtime.observe_prefill(0, chunks * TOKENS, 0.01 * chunks)
    return rig


def test_blocks_slower_to_read_are_computed_and_counted() -> None:
    rig = learned(1.0)
    assert rig.runtime.worth_loading(rig.lookup(), 0) == 0
    assert rig.runtime.gate.recomputed == 4


def test_prefetch_is_neither_counted_nor_tried_by_the_gate() -> None:
    rig = learned(1.0)
    assert [rig.runtime.worth_loading(rig.lookup(), 0, for_prefetch=True) for _ in range(1000)] == [0] * 1000
    assert rig.runtime.gate.recomputed == 0
    assert 1 in [rig.runtime.worth_loading(rig.lookup(), 0) for _ in range(10_000)], "a try"


def test_what_was_ordered_before_is_loaded_whatever_the_gate_says() -> None:
    rig = learned(1.0)
    assert rig.runtime.worth_loading(rig.lookup(), 0, least=3) == 3
    assert rig.runtime.worth_loading(rig.lookup(), 0, least=9) == 4
    assert rig.runtime.gate.recomputed == 1


def test_what_is_quicker_to_read_is_loaded() -> None:
    rig = learned(0.001)
    assert rig.runtime.worth_loading(rig.lookup(), 0) == 4
    assert rig.runtime.gate.recomputed == 0


def test_host_memory_is_loaded_whatever_is_behind_it() -> None:
    rig = learned(1.0, at_hand=3)
    assert rig.runtime.worth_loading(rig.lookup(), 0) == 3
    rig = learned(1.0, at_hand=4)
    rig.device.seconds = 5.0
    rig.load()
    assert rig.runtime.worth_loading(rig.lookup(), 0) == 4


def test_a_gate_that_knows_nothing_yet_loads() -> None:
    rig = Rig()
    rig.drop(0)
    assert rig.runtime.worth_loading(rig.lookup(), 0) == 4


def test_without_a_gate_all_is_loaded() -> None:
    rig = learned(1.0, gated=False)
    assert rig.runtime.worth_loading(rig.lookup(), 0) == 4


@pytest.mark.parametrize(("source", "destination"), list(itertools.permutations((DEVICE, HOST, FILE), 2)))
def test_only_what_brings_chunks_up_is_learned_from(source: str, destination: str) -> None:
    gate = RecomputeGate([HOST, FILE], TOKENS, IMAGE)
    gate.observe_prefill(0, TOKENS, 1.0)
    for tier in (HOST, FILE):
        up_from = Route(tier, HOST if tier == FILE else DEVICE)
        gate.observe_transfer(up_from, TransferResult(1, (Status.OK,), IMAGE, 0.1), 0.0)
    for _ in range(400):
        gate.observe_transfer(Route(source, destination), TransferResult(1, (Status.OK,), IMAGE, 10.0), 0.0)
    up = (source, destination) in ((FILE, HOST), (HOST, DEVICE), (FILE, DEVICE))
    assert gate.worth_loading(0, [Run(FILE, 1)], 0.0) == (0 if up else 1)
