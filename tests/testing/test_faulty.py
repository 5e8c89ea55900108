"""The tier that fails on purpose: it is a tier, its faults are as planned, and they really happen."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from longshore.boundary import Status
from longshore.errors import ConfigError, TierError
from longshore.testing import Fault, FaultPlan, FaultyTier, Rule, TierHarness, TierTests
from longshore.testing.tier_harness import image, span
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, Tier
from longshore.tiers.file import FileTier, capacity_for

IMAGE = TierTests.image_bytes
WITHOUT_END = FaultPlan((Rule(Op.READ, Fault.DELAY, 1.0, seconds=1e9), Rule(Op.WRITE, Fault.DELAY, 1.0, seconds=1e9)))


class OverFile(TierTests):
    persistent = True
    plan = FaultPlan()

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        capacity = capacity_for(self.slots, IMAGE)
        inner = FileTier(directory, capacity=capacity, image_bytes=IMAGE, arena=arena, scope=bytes(32))
        return FaultyTier(inner, self.plan, arena)


class TestWithoutFaults(OverFile):
    pass


class TestWithShortDelays(OverFile):
    plan = FaultPlan(
        (Rule(Op.READ, Fault.DELAY, 0.5, seconds=0.001), Rule(Op.WRITE, Fault.DELAY, 0.5, seconds=0.001)), seed=3
    )


@pytest.fixture
def harness_of(tmp_path: Path) -> Iterator[Callable[..., TierHarness]]:
    opened: list[TierHarness] = []

    def open_one(*rules: Rule, seed: int = 0) -> TierHarness:
        suite = OverFile()
        suite.plan = FaultPlan(rules, seed)
        arena = Arena(32 * span(IMAGE))
        opened.append(TierHarness(lambda: suite.open_tier(arena, tmp_path), arena))
        return opened[-1]

    yield open_one
    for harness in opened:
        harness.tier.close()


HarnessOf = Callable[..., TierHarness]


def fired(harness: TierHarness) -> dict[Fault, int]:
    assert isinstance(harness.tier, FaultyTier)
    return dict(harness.tier.fired)


def test_fail_does_not_call_the_inner_tier(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.WRITE, Fault.FAIL, nth=frozenset({2})))
    harness.store(0, 0)
    assert harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.IO_ERROR,)
    harness.assert_serves(0, 0)
    assert fired(harness) == {Fault.FAIL: 1}


def test_full_does_not_call_the_inner_tier(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.WRITE, Fault.FULL, nth=frozenset({2})))
    harness.store(0, 0)
    assert harness.run(harness.op(Op.WRITE, 0, 1)) == (Status.NO_SPACE,)
    harness.assert_serves(0, 0)
    assert fired(harness) == {Fault.FULL: 1}


def test_short_brings_only_a_part(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.READ, Fault.SHORT, nth=frozenset({1})))
    harness.store(0, 0)
    status, found = harness.load(0, 0)
    assert status is Status.SHORT
    np.testing.assert_array_equal(found[: IMAGE // 2], image(0, IMAGE)[: IMAGE // 2])
    assert set(found[IMAGE // 2 :].tolist()) == {0xCC}
    assert fired(harness) == {Fault.SHORT: 1}


def test_corrupt_scrambles_every_byte(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.READ, Fault.CORRUPT, nth=frozenset({1})))
    harness.store(0, 0)
    status, found = harness.load(0, 0)
    assert status is Status.CORRUPT
    assert (found != image(0, IMAGE)).all()
    assert fired(harness) == {Fault.CORRUPT: 1}
    harness.assert_serves(0, 0)


@pytest.mark.parametrize("length", [IMAGE, 1])
def test_silent_reports_wrong_bytes_as_right(harness_of: HarnessOf, length: int) -> None:
    harness = harness_of(Rule(Op.READ, Fault.SILENT, nth=frozenset({1})))
    harness.store(0, 0, length=length)
    status, found = harness.load(0, 0, length=length)
    assert status is Status.OK
    assert (found != image(0, length)).sum() == -(-length // 64)
    assert fired(harness) == {Fault.SILENT: 1}


def test_silent_changes_exponents_of_small_floats(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.READ, Fault.SILENT, 1.0))
    write = harness.op(Op.WRITE, 0, 0)
    harness.bytes_of(write).view(np.float32)[:] = 0.5
    harness.run(write)
    _, found = harness.load(0, 0)
    assert np.abs(found.view(np.float32)).max() > 1e30 or np.abs(found.view(np.float32)).min() < 1e-30


def test_a_fault_that_finds_nothing_to_harm_is_not_counted(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.READ, Fault.CORRUPT, 1.0))
    assert harness.load(0, 0)[0] is Status.MISMATCH
    assert fired(harness) == {}


def test_a_delay_holds_up_neither_submit_nor_poll_nor_others(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.WRITE, Fault.DELAY, nth=frozenset({1}), seconds=1e9))
    delayed = harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
    harness.store(1, 1)
    assert harness.tier.poll() == []
    assert fired(harness) == {Fault.DELAY: 1}
    harness.tier.cancel(delayed)
    assert harness.wait(delayed).statuses == (Status.CANCELLED,)
    harness.assert_misses(0, 0)


def test_a_delayed_operation_begins_in_the_end(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.WRITE, Fault.DELAY, 1.0, seconds=0.02))
    began = time.monotonic()
    harness.store(0, 0)
    assert time.monotonic() - began >= 0.02
    harness.assert_serves(0, 0)


def test_a_delay_beyond_the_deadline_ends_there(harness_of: HarnessOf) -> None:
    harness = harness_of(*WITHOUT_END.rules)
    ops = (harness.op(Op.WRITE, 0, 0), harness.op(Op.READ, 1, 1))
    assert harness.run(*ops, deadline=time.monotonic() + 0.01) == (Status.DEADLINE, Status.DEADLINE)


def test_close_ends_what_is_delayed(harness_of: HarnessOf) -> None:
    harness = harness_of(*WITHOUT_END.rules)
    ticket = harness.tier.submit([harness.op(Op.WRITE, 0, 0)], math.inf)
    harness.tier.close()
    assert harness.wait(ticket).statuses == (Status.TIER_OFF,)


def test_faults_strike_single_operations_of_a_batch(harness_of: HarnessOf) -> None:
    harness = harness_of(
        Rule(Op.WRITE, Fault.FAIL, nth=frozenset({2})),
        Rule(Op.WRITE, Fault.FULL, nth=frozenset({2, 4})),
        Rule(Op.WRITE, Fault.DELAY, nth=frozenset({5}), seconds=0.001),
    )
    statuses = harness.run(*[harness.op(Op.WRITE, slot, slot) for slot in range(6)])
    ok = Status.OK
    assert statuses == (ok, Status.IO_ERROR, ok, Status.NO_SPACE, ok, ok)
    assert fired(harness) == {Fault.FAIL: 1, Fault.FULL: 1, Fault.DELAY: 1}


def test_a_refused_batch_uses_up_no_faults(harness_of: HarnessOf) -> None:
    harness = harness_of(Rule(Op.WRITE, Fault.FAIL, nth=frozenset({1})))
    outside_the_arena = harness.op(Op.WRITE, 0, 0, offset=harness.arena.nbytes)
    with pytest.raises(TierError):
        harness.tier.submit([harness.op(Op.WRITE, 0, 0), outside_the_arena], math.inf)
    assert harness.tier.poll() == []
    assert fired(harness) == {}
    assert harness.run(harness.op(Op.WRITE, 0, 0)) == (Status.IO_ERROR,)


def test_fault_plan_repeats_and_differs_by_seed() -> None:
    def struck(seed: int) -> list[int]:
        plan = FaultPlan((Rule(Op.READ, Fault.FAIL, 0.2),), seed)
        return [number for number in range(1, 2001) if plan.rule(Op.READ, number)]

    assert struck(1) == struck(1) != struck(2)
    assert 300 < len(struck(1)) < 500
    assert FaultPlan((Rule(Op.READ, Fault.FAIL, 1.0),)).rule(Op.WRITE, 1) is None


@pytest.mark.parametrize(
    ("op", "fault", "changes"),
    [
        (Op.READ, Fault.FULL, {}),
        (Op.WRITE, Fault.SHORT, {}),
        (Op.WRITE, Fault.CORRUPT, {}),
        (Op.WRITE, Fault.SILENT, {}),
        (Op.READ, Fault.FAIL, {"probability": 1.5}),
        (Op.READ, Fault.FAIL, {"probability": math.nan}),
        (Op.READ, Fault.FAIL, {"nth": frozenset({0})}),
        (Op.READ, Fault.FAIL, {"seconds": 1.0}),
        (Op.READ, Fault.DELAY, {}),
    ],
)
def test_impossible_rules_are_refused(op: Op, fault: Fault, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Rule(op, fault, **changes)  # type: ignore[arg-type]
