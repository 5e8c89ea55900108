"""Stories on a simulated disk, and what is asked of the tier that opens after a crash in the midst of one."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longshore.boundary import Key, Status
from longshore.testing.simulated_disk import Image, SimulatedDisk
from longshore.tiers.arena import PAGE, Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_for

SLOTS, NUMBERS = 2, 6
SCOPE = bytes(range(32))


def key(number: int) -> Key:
    return bytes([number]) * 32


@dataclass(frozen=True, slots=True)
class Judged:
    """What a tier that was opened after a crash listed, and served: (slot, number); and its generation."""

    listed: frozenset[tuple[int, int]]
    served: frozenset[tuple[int, int]]
    generation: int


class Story:
    """A tier of two slots on a simulated disk, what was done to it, and when that was reported as done.

    An image differs from others in its first and last sector alone, so that all mixtures of two records are few.
    """

    def __init__(
        self, image: Image | None = None, *, kind: type[FileTier] = FileTier, pages: int = 1, remember: bool = True
    ) -> None:
        self.disk = SimulatedDisk(image, remember=remember)
        self.arena = Arena(SLOTS * NUMBERS * pages * PAGE)
        self.reported: list[tuple[int, dict[int, int], int]] = []
        self._image_bytes = pages * PAGE
        self._holds: dict[int, int] = {}
        self.tier = kind(
            Path("/simulated"),
            capacity=capacity_for(SLOTS, pages * PAGE),
            image_bytes=pages * PAGE,
            arena=self.arena,
            scope=SCOPE,
            threads=1,
            io=self.disk,
        )
        self._report()

    def write(self, slot: int, number: int) -> None:
        self.write_together({slot: number})

    def write_together(self, images: dict[int, int]) -> None:
        """Slots and numbers, as one batch."""
        batch = [self._op(Op.WRITE, slot, number, place) for place, (slot, number) in enumerate(images.items())]
        for op, number in zip(batch, images.values(), strict=True):
            self.arena.array[op.offset : op.offset + op.length] = self._bytes(number)
        assert set(self._run(batch)) == {Status.OK}
        self._holds.update(images)
        self._report()

    def checkpoint(self) -> None:
        self.tier.checkpoint()
        self._report()

    def forget(self) -> None:
        self.tier.forget(self.tier.generation + 1)
        self._holds = {}
        self._report()

    def close(self) -> None:
        self.tier.close()
        self._report()
        self.arena.close()

    def judge(self) -> Judged:
        """Read every key from every slot: what is served must be what was written under that key."""
        listed = [(chunk.slot, chunk.key[0]) for chunk in self.tier.recover()]
        pairs = [(slot, number) for slot in range(SLOTS) for number in range(1, NUMBERS)]
        reads = [self._op(Op.READ, slot, number, place) for place, (slot, number) in enumerate(pairs)]
        self.arena.array[:] = 0xCC
        statuses = self._run(reads)
        served = set()
        for pair, read, status in zip(pairs, reads, statuses, strict=True):
            if status is Status.OK:
                served.add(pair)
                found = self.arena.array[read.offset : read.offset + read.length]
                if not np.array_equal(found, self._bytes(pair[1])):
                    raise WrongBytesError(f"slot {pair[0]} served something else as {pair[1]}")
            else:
                assert status in {Status.CORRUPT, Status.MISMATCH}, status
        assert len({number for _, number in listed}) == len({slot for slot, _ in listed}) == len(listed)
        return Judged(frozenset(listed), frozenset(served), self.tier.generation)

    def _report(self) -> None:
        self.reported.append((len(self.disk.moments), dict(self._holds), self.tier.generation))

    def _bytes(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        image = np.zeros(self._image_bytes, np.uint8)
        image[0] = image[-1] = number
        return image

    def _op(self, op: Op, slot: int, number: int, place: int) -> TierOp:
        nbytes = self._image_bytes
        return TierOp(op, slot, key(number), None, place * nbytes, nbytes, self.tier.generation)

    def _run(self, batch: list[TierOp]) -> tuple[Status, ...]:
        self.tier.submit(batch, math.inf)
        while not (results := self.tier.poll()):
            time.sleep(0.0001)
        return results[0].statuses


class WrongBytesError(AssertionError):
    """The one thing that must not happen."""


def after(image: Image, kind: type[FileTier] = FileTier, pages: int = 1) -> Judged:
    """What the next process lists and serves."""
    story = Story(image, kind=kind, pages=pages, remember=False)
    try:
        return story.judge()
    finally:
        story.close()


@dataclass(slots=True)
class Distinct:
    """Each image once, however often it comes."""

    seen: set[bytes] = field(default_factory=set)

    def __call__(self, images: Iterable[Image]) -> Iterator[Image]:
        for image in images:
            digest = hashlib.blake2b(digest_size=16)
            for name, data in sorted(image.items()):
                if name != "lock":
                    digest.update(name.encode() + b"\0" + data)
            if digest.digest() not in self.seen:
                self.seen.add(digest.digest())
                yield image
