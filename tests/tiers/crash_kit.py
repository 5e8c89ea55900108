"""Stories on a simulated disk, and what is asked of the tier that opens after a crash in the midst of one."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from longshore.boundary import Key, Slabs, Status
from longshore.testing.disk import Image, SimulatedDisk
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_of

NUMBERS = 6
SCOPE = bytes(range(32))


@dataclass(frozen=True, slots=True)
class Shape:
    """The slabs of a tier, and the places in them that a story writes to: (slot, pool)."""

    slabs: Slabs
    places: tuple[tuple[int, int], ...]

    def image_bytes(self, place: int) -> int:
        return self.slabs.image_bytes[self.places[place][1]] - DISK_PAGE

    def meet(self, one: int, other: int) -> bool:
        """Whether to write to one of two places takes the other's slab from its pool, or is to overwrite it."""
        (slot, pool), (another, of) = self.places[one], self.places[other]
        return slot == another or (self.slabs.slab_of(slot) == self.slabs.slab_of(another) and pool != of)


def one_size(pages: int = 1) -> Shape:
    """Two slots."""
    return Shape(Slabs.of_one_size((1 + pages) * DISK_PAGE, 2), ((0, 0), (1, 0)))


APART = Shape(Slabs.of_one_size(2 * DISK_PAGE, 3), ((0, 0), (2, 0)))
"""Two places that are no neighbours: records that are written together are two pieces."""

TWO_SIZES = Shape(Slabs(4 * DISK_PAGE, (2 * DISK_PAGE, 4 * DISK_PAGE), 1), ((0, 0), (1, 0), (0, 1)))
"""One slab: places 0 and 1 are for images of a page each, place 2, over both, for one of three pages."""


def key(number: int) -> Key:
    return bytes([number]) * 32


@dataclass(frozen=True, slots=True)
class Judged:
    """What a tier that was opened after a crash listed, and served: (place, number); and its generation."""

    listed: frozenset[tuple[int, int]]
    served: frozenset[tuple[int, int]]
    generation: int


class Story:
    """A tier of a few slots on a simulated disk, what was done to it, and when that was reported as done.

    An image differs from others in its first and last sector alone, so that all mixtures of two records are few.
    """

    def __init__(
        self,
        image: Image | None = None,
        *,
        kind: type[FileTier] = FileTier,
        shape: Shape | None = None,
        remember: bool = True,
    ) -> None:
        self.disk = SimulatedDisk(image, remember=remember)
        self.shape = shape or one_size()
        self._room = self.shape.slabs.slab_bytes
        self.arena = Arena(len(self.shape.places) * NUMBERS * self._room)
        self.reported: list[tuple[int, dict[int, int], int]] = []
        self._holds: dict[int, int] = {}
        self.tier = kind(
            Path("/simulated"),
            capacity=capacity_of(self.shape.slabs),
            image_bytes=[nbytes - DISK_PAGE for nbytes in self.shape.slabs.image_bytes],
            arena=self.arena,
            scope=SCOPE,
            threads=1,
            io=self.disk,
        )
        assert self.tier.slabs == self.shape.slabs
        self._report()

    def write(self, place: int, number: int) -> None:
        self.write_together({place: number})

    def write_together(self, images: dict[int, int]) -> None:
        """Places and numbers, as one batch."""
        batch = [self._op(Op.WRITE, *pair, position) for position, pair in enumerate(images.items())]
        for op, pair in zip(batch, images.items(), strict=True):
            self.arena.array[op.offset : op.offset + op.length] = self._bytes(*pair)
        assert set(self._run(batch)) == {Status.OK}
        for place in images:
            self._holds = {each: held for each, held in self._holds.items() if not self.shape.meet(place, each)}
        self._holds.update(images)
        self._report()

    def write_side_by_side(self, images: dict[int, int]) -> None:
        """Places and numbers, a batch each, all of which are under way before one has ended."""
        batches = [[self._op(Op.WRITE, *pair, position)] for position, pair in enumerate(images.items())]
        for (op,), pair in zip(batches, images.items(), strict=True):
            self.arena.array[op.offset : op.offset + op.length] = self._bytes(*pair)
        with self.tier._executor._lock:  # nothing is taken meanwhile
            for batch in batches:
                self.tier.submit(batch, math.inf)
        left = len(batches)
        while left:
            results = self.tier.poll()
            assert all(result.statuses == (Status.OK,) for result in results)
            left -= len(results)
            time.sleep(0.0001)
        self._holds.update(images)
        self._report()

    def drop(self, place: int) -> None:
        self.tier.delete_records([self.shape.places[place][0]])
        del self._holds[place]
        self._report()

    def checkpoint(self) -> None:
        self.tier._index.checkpoint()
        self._report()

    def reset(self) -> None:
        self.tier.reset(self.tier.generation + 1)
        self._holds = {}
        self._report()

    def close(self) -> None:
        self.tier.close()
        self._report()
        self.arena.close()

    def judge(self) -> Judged:
        """Read every key from every place: what is served must be what was written under that key."""
        places = self.shape.places
        listed = [(places.index((chunk.slot, chunk.size_class)), chunk.key[0]) for chunk in self.tier.recover()]
        pairs = [(place, number) for place in range(len(places)) for number in range(1, NUMBERS)]
        reads = [self._op(Op.READ, *pair, position) for position, pair in enumerate(pairs)]
        self.arena.array[:] = 0xCC
        statuses = self._run(reads)
        served = set()
        for pair, read, status in zip(pairs, reads, statuses, strict=True):
            if status is Status.OK:
                served.add(pair)
                found = self.arena.array[read.offset : read.offset + read.length]
                if not np.array_equal(found, self._bytes(*pair)):
                    raise WrongBytesError(f"place {pair[0]} served something else as {pair[1]}")
            else:
                assert status in {Status.CORRUPT, Status.MISMATCH}, status
        assert len({number for _, number in listed}) == len(listed)
        assert not any(self.shape.meet(one, other) for (one, _), (other, _) in itertools.combinations(listed, 2))
        return Judged(frozenset(listed), frozenset(served), self.tier.generation)

    def _report(self) -> None:
        self.reported.append((len(self.disk.moments), dict(self._holds), self.tier.generation))

    def _bytes(self, place: int, number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        image = np.zeros(self.shape.image_bytes(place), np.uint8)
        image[0] = image[-1] = number
        return image

    def _op(self, op: Op, place: int, number: int, position: int) -> TierOp:
        (slot, pool), nbytes = self.shape.places[place], self.shape.image_bytes(place)
        return TierOp(op, slot, key(number), None, position * self._room, nbytes, self.tier.generation, pool)

    def _run(self, batch: list[TierOp]) -> tuple[Status, ...]:
        self.tier.submit(batch, math.inf)
        while not (results := self.tier.poll()):
            time.sleep(0.0001)
        return results[0].statuses


class WrongBytesError(AssertionError):
    """The one thing that must not happen."""


def after(image: Image, kind: type[FileTier] = FileTier, shape: Shape | None = None) -> Judged:
    """What the next process lists and serves."""
    story = Story(image, kind=kind, shape=shape, remember=False)
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
