"""Parts of the machine that tries all sequences of calls: a file tier that moves when told to, jobs, drawn calls."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey
from vllm.v1.request import Request
from vllm_kit import PAGE

from longshore.boundary import FILE, Slabs, Status
from longshore.engines.vllm.worker import JobPart
from longshore.runtime.rank_reports import FAILED
from longshore.tiers.base import Op, OpBatch, Tier, TierOp, TierResult, check_batch

BLOCKS = 4096
WINDOW = 40
POISON = 0x55
Spare = tuple[int, int, list[int], list[int]]
"""What a rank has yet to report: ticket, rank, slots filled and slots failed."""


SEEN: Counter[str] = Counter()
"""How often what is to be tried has happened."""


class SlowTier(Tier):
    """A file tier in memory, whose operations end when they are told to."""

    name = FILE
    is_stalled = is_unavailable = False

    def __init__(self, slabs: Slabs, image_bytes: tuple[int, ...], arena: Any) -> None:
        self.slabs, self.image_bytes, self._arena = slabs, image_bytes, arena
        self.at_once = False
        self._records: dict[tuple[int, int], tuple[bytes, int, bytes]] = {}
        self._queue: list[tuple[OpBatch, int]] = []
        self._done: list[TierResult] = []
        self._oldest = self._tickets = 0

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        nbytes = self._arena.array.nbytes
        check_batch(batch, deadline, slabs=self.slabs, image_bytes=self.image_bytes, arena_bytes=nbytes)
        self._tickets += 1
        books = OpBatch(self._tickets, batch, deadline, 0.0)
        self._queue += [(books, at) for at in range(len(books.ops))]
        return self._tickets

    def move(self, count: int, status: Status = Status.OK, *, last_first: bool = False) -> None:
        """End so many operations."""
        for _ in range(min(count, len(self._queue))):
            self._end(*self._queue.pop(-1 if last_first else 0), status)

    def _end(self, batch: OpBatch, at: int, status: Status) -> None:
        op = batch.ops[at]
        place, image = (op.size_class, op.slot), self._arena.array[op.offset : op.offset + op.length]
        if op.op is Op.WRITE:
            self._records.pop(place, None)
            if status is Status.OK:
                self._records[place] = (op.key, op.generation, image.tobytes())
        elif status is Status.OK:
            key, generation, content = self._records.get(place, (b"", -1, b""))
            if (key, generation) == (op.key, op.generation) and generation >= self._oldest:
                image[:] = np.frombuffer(content, np.uint8)
                SEEN["reads of files"] += 1
            else:
                status = Status.MISMATCH
        if op.op is Op.READ and status is not Status.OK:
            image[:] = POISON
        batch.end(at, status, 0.0)
        if batch.ended:
            self._done.append(batch.result())

    def poll(self) -> list[TierResult]:
        if self.at_once:
            self.move(len(self._queue))
        done, self._done = self._done, []
        return done

    def cancel(self, ticket: int) -> None:
        for each in [each for each in self._queue if each[0].ticket == ticket]:
            self._queue.remove(each)
            self._end(*each, Status.CANCELLED)

    def close(self) -> None:
        while self._queue:
            self._end(*self._queue.pop(), Status.TIER_OFF)

    def reset(self, generation: int) -> None:
        self._oldest = generation

    @property
    def failures(self) -> dict[str, int]:
        return {}


@dataclass
class Asked:
    """A request as the engine sees it: the blocks of each group, 0 for those that its window has left behind."""

    request: Request
    answer: int
    blocks: list[list[int]]
    state: str = "waiting"
    """`waiting`, `loading`, `loaded`, `running`, or `finished`."""
    announced: bool = False

    @property
    def name(self) -> str:
        return str(self.request.request_id)

    def each_block(self) -> Iterator[tuple[int, int, int]]:
        """Group, place and number of each block that is there."""
        for group, mine in enumerate(self.blocks):
            for at, block in enumerate(mine):
                if block:
                    yield group, at, block


@dataclass
class Loading:
    """A load that is under way: blocks by key, what was stored by then under each, and ranks that have not ended."""

    asked: Asked
    blocks: dict[OffloadKey, int]
    valid: dict[OffloadKey, set[str]]
    ranks: int
    failed: bool = False
    in_parts: bool = False


@dataclass
class Job:
    """A transfer that a rank has not made, or the next `part` of one."""

    number: int
    rank: int
    transfer: Any
    is_store: bool
    part: JobPart | None = None


@dataclass
class DelayedReports:
    """Reports that are kept back."""

    reports: Any
    kept: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reports, name)

    def stored(self, ticket: int, rank: int, good: list[int], bad: list[int], failure: int = FAILED) -> None:
        self.kept.append((ticket, rank, good, bad))


class Calls:
    """What the machine may do next, each as likely as the others: Hypothesis leaves rules out of half of all runs."""

    def __init__(self) -> None:
        self.made: list[st.SearchStrategy[tuple[str, dict[str, Any]]]] = []

    def of(self, **arguments: st.SearchStrategy[Any]) -> Callable[[Any], Any]:
        def add(method: Any) -> Any:
            self.made.append(st.tuples(st.just(method.__name__), st.fixed_dictionaries(arguments)))
            return method

        return add


def nowhere(blocks: GPULoadStoreSpec) -> GPULoadStoreSpec:
    """As many blocks as these that the device does not have."""
    sizes = {"group_sizes": blocks.group_sizes, "block_indices": blocks.block_indices}
    return GPULoadStoreSpec([BLOCKS] * len(blocks.block_ids), **sizes)


def content(key: OffloadKey, salt: str, rank: int, layer: int) -> Any:
    """What a layer of a rank has of a block."""
    digest = hashlib.shake_128(key + f"{salt} {rank} {layer}".encode()).digest(PAGE - 8)
    return np.frombuffer(digest, np.uint8)


def write_block(views: Sequence[Any], block: int, key: OffloadKey, salt: str, ranks: Sequence[int]) -> None:
    """Give a device block the content that these ranks have under `key`."""
    for rank in ranks:
        for layer, view in enumerate(views[rank]):
            view[block, : PAGE - 8] = content(key, salt, rank, layer)


def holds(views: Sequence[Any], block: int, key: OffloadKey, salt: str) -> bool:
    """Whether a device block has the content of `key` on all ranks."""
    return all(
        np.array_equal(view[block, : PAGE - 8], content(key, salt, rank, layer))
        for rank, tensors in enumerate(views)
        for layer, view in enumerate(tensors)
    )


@contextmanager
def delayed_reports(worker: Any, late: list[Spare] | None, good: Sequence[int] | None = None) -> Iterator[list[Spare]]:
    """What `worker` reports of stores meanwhile: it comes afterwards, or is added to `late`.

    It says well of no other slots than `good`.
    """
    reports, kept = worker.reports, DelayedReports(worker.reports)
    worker.reports = kept
    yield kept.kept
    worker.reports = reports
    for ticket, rank, well, bad in kept.kept:
        failed = [] if good is None else [slot for slot in well if slot not in good]
        said = (ticket, rank, [slot for slot in well if slot not in failed], [*bad, *failed])
        if late is None:
            reports.stored(*said)
        else:
            late.append(said)
