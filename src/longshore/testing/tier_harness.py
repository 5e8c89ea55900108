"""Harness for tests of tiers: an open tier, an arena, known keys and images.

The arena of a test. Places are apart from each other, and start on a page:

    │ reserved_bytes │ guard │ image │ guard │ guard │ image │ guard │ ...
                             place 0                 place 1
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.boundary import DISK_PAGE, Key, Status
from longshore.tiers.arena import Arena
from longshore.tiers.base import BY_KEY, Op, Tier, TierOp, TierResult

Bytes = npt.NDArray[np.uint8]

TIMEOUT = 120.0
"""Seconds to wait for a result; far beyond what any operation takes."""

POISON = 0xCC
"""Content of destinations before a read."""

MISSES = frozenset({Status.MISMATCH, Status.CORRUPT, Status.SHORT, Status.NOT_FOUND})
"""Statuses of a read of another record than expected."""


def span(image_bytes: int) -> int:
    """Arena bytes of one place: an image between guard pages."""
    return image_bytes + 2 * DISK_PAGE


def key(number: int) -> Key:
    """The `number`th key of the tests."""
    return hashlib.sha256(b"key %d" % number).digest()


def image(number: int, length: int) -> Bytes:
    """The `number`th image of the tests: its first `length` bytes."""
    return np.random.default_rng(number).integers(0, 256, length, np.uint8)


class TierHarness:
    """An open tier, its arena, and helpers for tests.

    Attributes:
        tier: The tier; tests may put another one here, whose images are no larger.
        arena: Its arena, of which the first `reserved_bytes` belong to the tier.
    """

    def __init__(
        self, open_tier: Callable[[], Tier], arena: Arena, reserved_bytes: int = 0, *, by_key: bool = False
    ) -> None:
        self._open_tier = open_tier
        self._by_key = by_key
        self._reserved_bytes = reserved_bytes
        self._unclaimed: dict[int, TierResult] = {}
        self.arena = arena
        self.tier = open_tier()
        self._image_bytes = self.tier.image_bytes[0]

    def reopen(self) -> None:
        """Close the tier and open it again, as the next process would."""
        self.tier.close()
        self._unclaimed.clear()
        self.tier = self._open_tier()

    def offset(self, place: int) -> int:
        """Arena offset of `place`."""
        return self._reserved_bytes + place * span(self._image_bytes) + DISK_PAGE

    def op(self, op: Op, slot: int, number: int, place: int = 0, **changes: Any) -> TierOp:
        """`op` on `slot` with key `number`, a whole image, at `place`; `changes` replaces fields.

        A tier that is addressed by key has no slots; there, `slot` means nothing.
        """
        slot = BY_KEY if self._by_key else slot
        plain = TierOp(op, slot, key(number), None, self.offset(place), self._image_bytes, self.tier.generation)
        return plain._replace(**changes)

    def bytes_of(self, op: TierOp) -> Bytes:
        """The arena bytes of `op`, to look at and to change."""
        return self.arena.array[op.offset : op.offset + op.length]

    def wait(self, ticket: int) -> TierResult:
        """The result of `ticket`."""
        give_up = time.monotonic() + TIMEOUT
        while ticket not in self._unclaimed:
            assert time.monotonic() < give_up, f"no result for ticket {ticket} after {TIMEOUT} s"
            for result in self.tier.poll():
                assert result.ticket not in self._unclaimed, f"a second result for ticket {result.ticket}"
                self._unclaimed[result.ticket] = result
            time.sleep(0.0005)
        return self._unclaimed.pop(ticket)

    def run(self, *ops: TierOp, deadline: float = math.inf) -> tuple[Status, ...]:
        """The statuses of `ops`, submitted as one batch."""
        result = self.wait(self.tier.submit(ops, deadline))
        assert len(result.statuses) == len(ops), f"{len(result.statuses)} statuses for {len(ops)} operations"
        moved = sum(op.length for op, status in zip(ops, result.statuses, strict=True) if status is Status.OK)
        assert result.bytes == moved, f"{result.bytes} bytes reported, {moved} moved"
        return result.statuses

    def store(self, slot: int, number: int, **changes: Any) -> Bytes:
        """Write image `number` under key `number` to `slot`; the image."""
        op = self.op(Op.WRITE, slot, number, **changes)
        expected = image(number, op.length)
        self.bytes_of(op)[:] = expected
        (status,) = self.run(op)
        assert status is Status.OK, f"writing slot {slot} ended as {status}"
        return expected

    def load(self, slot: int, number: int, **changes: Any) -> tuple[Status, Bytes]:
        """Read key `number` from `slot` into a poisoned place; how it ended, and what lies there."""
        op = self.op(Op.READ, slot, number, **{"place": 1, **changes})
        self.bytes_of(op)[:] = POISON
        (status,) = self.run(op)
        return status, self.bytes_of(op).copy()

    def assert_serves(self, slot: int, number: int, **changes: Any) -> None:
        """`slot` serves image `number` under key `number`."""
        status, found = self.load(slot, number, **changes)
        assert status is Status.OK, f"reading slot {slot} ended as {status}"
        np.testing.assert_array_equal(found, image(number, len(found)))

    def assert_misses(self, slot: int, number: int, **changes: Any) -> None:
        """`slot` serves nothing under key `number`."""
        status, _ = self.load(slot, number, **changes)
        assert status in MISSES, f"reading slot {slot} ended as {status}, expected a miss"
