"""What tests of remote tiers share: probes, waits, and traffic among faults."""

import math
import time
from collections.abc import Callable

import numpy as np

from longshore.boundary import Status
from longshore.testing import FaultyProxy, TierHarness, TierTests, WireFault
from longshore.testing.tier_harness import image, key
from longshore.tiers.base import Op
from longshore.tiers.remote import ClusterTier, RemoteTier

IMAGE = TierTests.image_bytes
PLACES = 32
TIMEOUT = 30.0
PATIENT = "connect_timeout=20s&probe_timeout=20s&fetch_timeout=20s&write_timeout=20s"
"""Deadlines that a busy machine does not miss, for tests of other things."""


def remote(harness: TierHarness) -> RemoteTier | ClusterTier:
    assert isinstance(harness.tier, RemoteTier | ClusterTier)
    return harness.tier


def ask(harness: TierHarness, *numbers: int) -> tuple[bool, ...] | None:
    tier, give_up = remote(harness), time.monotonic() + TIMEOUT
    ticket = tier.ask([key(number) for number in numbers], tier.generation, math.inf)
    while not (answers := tier.answers()):
        assert time.monotonic() < give_up
        time.sleep(0.001)
    assert [each for each, _ in answers] == [ticket]
    return answers[0][1]


def until(what: Callable[[], bool]) -> None:
    give_up = time.monotonic() + TIMEOUT
    while not what():
        assert time.monotonic() < give_up
        time.sleep(0.01)


COMMON = [WireFault.FLIP, WireFault.TRUNCATE, WireFault.OTHER, WireFault.ERROR, WireFault.EXTRA, WireFault.JUNK]
"""Faults that happen often in `moved_among_faults`."""


def moved_among_faults(
    harness: TierHarness, proxy: FaultyProxy, commands: set[bytes], *, faults: int, hits: int
) -> None:
    """Write and read images at random until `faults` have happened and `hits` were served: none has a wrong byte."""
    chance = np.random.default_rng(7)
    kinds = [
        *COMMON * 8,
        *[WireFault.HALF] * 8,
        *[WireFault.LENGTH] * 4,
        WireFault.FULL,
        WireFault.STALL,
        WireFault.SLOW,
    ]

    def plan(name: bytes, number: int) -> WireFault | None:
        if name not in commands or chance.random() > 0.6:
            return None
        fault = kinds[chance.integers(len(kinds))]
        rarely = fault in {WireFault.STALL, WireFault.SLOW}
        return None if rarely and chance.random() > 0.1 else fault

    proxy.plan = plan
    images = [image(number, IMAGE) for number in range(96)]
    served = wrong = 0
    ended: dict[Status, int] = {}
    bad, late = {Status.CORRUPT, Status.MISMATCH, Status.SHORT}, {Status.DEADLINE, Status.UNAVAILABLE}
    wanted, give_up = bad | late | {Status.IO_ERROR}, time.monotonic() + 120

    def is_enough() -> bool:
        return sum(proxy.fired.values()) >= faults and served >= hits

    while not (is_enough() and all(proxy.fired[each] for each in WireFault) and wanted <= set(ended)):
        if is_enough() and time.monotonic() > give_up:  # rare faults and outcomes have their time, too
            break
        numbers = chance.integers(0, len(images), PLACES)
        writes = chance.random(PLACES) < 0.25
        ops = [
            harness.op(Op.WRITE if write else Op.READ, 0, int(number), place)
            for place, (number, write) in enumerate(zip(numbers, writes, strict=True))
        ]
        for op, number in zip(ops, numbers, strict=True):
            harness.bytes_of(op)[:] = images[number] if op.op is Op.WRITE else 0xCC
        tickets = [harness.tier.submit(ops[start : start + 4], math.inf) for start in range(0, PLACES, 4)]
        statuses = [status for ticket in tickets for status in harness.wait(ticket).statuses]
        for op, number, status in zip(ops, numbers, statuses, strict=True):
            ended[status] = ended.get(status, 0) + 1
            if op.op is Op.READ and status is Status.OK:
                served += 1
                wrong += not np.array_equal(harness.bytes_of(op), images[number])
    print(served, dict(proxy.fired), ended)
    assert wrong == 0
    assert {fault for fault in WireFault if not proxy.fired[fault]} == set()
    assert wanted <= set(ended)
    assert sum(proxy.fired.values()) >= faults
    assert served >= hits
