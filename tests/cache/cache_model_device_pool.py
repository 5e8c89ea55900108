"""A device that the engine hands over: requests that take blocks of a `DevicePool`, compute, store and go.

Who has how many references, and what lies in which block, is kept beside it. A block that was handed out while a job
still read or wrote it would show: the job would find, or leave, another chunk's bytes.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence

from cache_kit import chunks
from cache_model_groups import Groups
from cache_movers import Job, Tag, places

from longshore.boundary import DEVICE, Key
from longshore.cache import Found, GroupKeys, Lease
from longshore.cache.device_pool import FoundOnDevice
from longshore.errors import CacheError, CapacityError


class Visit:
    """A request on the device: the `blocks` of its `keys`, of which the first chunks were `found` there."""

    def __init__(self, keys: Sequence[Key], blocks: list[int], found: int, hold: Lease | None, generation: int) -> None:
        self.keys = list(keys)
        self.blocks = blocks
        self.found = found
        self.hold = hold
        self.generation = generation
        self.is_stored = False


class HandedOver(Groups):
    """A world whose device blocks are a `DevicePool`."""

    VIA = "pool."

    def begin_visits(self) -> None:
        self.visits: list[Visit] = []
        self.extra: list[int] = []
        """Blocks with one more reference, taken by `hold`."""
        self.found: tuple[int, ...] = ()
        """What the last lookup has found, until its request has it."""

    def look(self) -> None:
        if not hasattr(self, "visits"):
            self.begin_visits()
        super().look()

    # ------------------------------------------------------------------ requests

    def call_lookup(self, keys: Sequence[Key], start: int, request: str | None) -> Found:
        found: FoundOnDevice = self.call("pool.lookup", keys, self.now, request=request)
        assert len(found.blocks) == start * self.setup.per_chunk
        self.found = found.blocks
        return found.below

    def arrive(self, path: str, request: str | None) -> Visit | None:
        """A request takes what the device has, what is below, and blocks for the rest; or there are too few."""
        keys, per_chunk = chunks(path), self.setup.per_chunk
        known = self.on_device(keys)
        hold = self.lookup(path, known, request)
        assert [self.holds_chunk(block) for block in self.found] == [
            Tag(each, self.generation, sub) for each in keys[:known] for sub in range(per_chunk)
        ]
        visit = Visit(keys, list(self.found), known, hold, self.generation)
        self.visits.append(visit)
        self.found = ()
        if not self.allocate(visit, (len(keys) - known) * per_chunk):
            self.leave(visit)
            self.call("pool.make_way", len(keys) * per_chunk)
            self.settle()
            return None
        if hold is not None and not self.asleep:
            self.load(hold, len(self.holds[hold].keys), 0, 0)
        self.settle()
        return visit

    def on_device(self, keys: Sequence[Key]) -> int:
        """How many chunks lead that the device has."""
        found = self.call("pool.find", keys)
        return next((at for at, blocks in enumerate(found) if blocks is None), len(keys))

    def holds_chunk(self, block: int) -> object:
        """What lies in a block, the same on all ranks."""
        (what,) = {rank[block] for rank in self.movers.device}
        return what

    def allocate(self, visit: Visit, count: int) -> bool:
        """`count` blocks more, all or none; what is nobody's, and no job works on."""
        before, taken = pickle.dumps(self.pool._references), self.references()
        try:
            blocks = self.call("pool.allocate", count)
        except CapacityError as error:
            assert pickle.dumps(self.pool._references) == before
            self.answers.append(f"CapacityError: {error}")
            return False
        assert len(set(blocks)) == len(blocks) == count
        assert not set(blocks) & (set(taken) | self.touched_blocks()), "a block was handed out that is in use"
        visit.blocks += blocks
        return True

    def take_blocks(self, count: int) -> list[int]:
        """Blocks to load into: those of the request that came last, behind what was found."""
        visit = self.visits[-1]
        start = visit.found * self.setup.per_chunk
        return visit.blocks[start : start + count]

    def give_blocks(self, blocks: Sequence[int]) -> None:
        """They are their request's until it goes."""

    def compute(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        assert not set(blocks) & self.touched_blocks()
        super().compute(keys, blocks)

    def finish_visit(self, visit: Visit, evicting: bool) -> None:
        """What did not come from below is computed, and all of it is stored."""
        model = self.holds.get(visit.hold) if visit.hold is not None else None
        arrived = model.outcome.chunks if model is not None and model.outcome is not None else 0
        start = (visit.found + arrived) * self.setup.per_chunk
        own = visit.blocks[visit.found * self.setup.per_chunk :]
        if self.asleep or visit.generation != self.generation or set(own) & self.touched_blocks():
            return
        if model is not None and model.outcome is None:
            return
        self.compute(visit.keys[visit.found + arrived :], visit.blocks[start:])
        wanted = self.setup.offload != "write_back" or evicting
        before = self.before_store(visit.keys, 0, wanted=wanted)
        offload = self.call("pool.store", GroupKeys(visit.keys), tuple(visit.blocks), evicting=evicting)
        assert (self.after_store(before, offload.accepted) if wanted else 0) == len(offload.accepted)
        visit.is_stored = True
        assert None not in self.call("pool.find", visit.keys)
        self.settle()

    def leave(self, visit: Visit) -> None:
        """The request is over, whatever is under way for it."""
        if visit.hold in self.holds:
            self.release(visit.hold)
        self.visits.remove(visit)
        self.call("pool.release", tuple(visit.blocks))
        self.settle()

    def hold_more(self, visit: Visit) -> None:
        """Somebody else uses the blocks of a request for a while."""
        self.call("pool.hold", tuple(visit.blocks))
        self.extra += visit.blocks
        self.check()

    def let_go_of_more(self) -> None:
        self.call("pool.release", tuple(self.extra))
        self.extra.clear()
        self.settle()

    def copy_between(self, source: int, visit: Visit) -> None:
        """Partial reuse: a block is copied over one of a request that nobody can find yet."""
        target = visit.blocks[-1]
        if self.asleep or visit.is_stored or visit.found == len(visit.keys) or target in self.touched_blocks():
            return
        job = self.call("pool.copy", [source], [target], tokens=1)
        self.carry()
        assert self.jobs[job].transfer.sections[0].blocks == (target,)
        self.check()

    # ------------------------------------------------------------------ life

    def sleep(self) -> None:
        if self.references():
            self.refused(CacheError, "pool.sleep")
        else:
            super().sleep()

    def drain(self) -> None:
        while self.visits:
            self.leave(self.visits[-1])
        self.let_go_of_more()
        super().drain()

    # ------------------------------------------------------------------ checks

    def references(self) -> Counter[int]:
        return Counter([*self.found, *self.extra, *(block for visit in self.visits for block in visit.blocks)])

    def touched_blocks(self) -> set[int]:
        """Blocks that a job in flight reads or writes."""
        return {block for job in self.jobs.values() for block in self.blocks_of(job)}

    def blocks_of(self, job: Job) -> list[int]:
        t = job.transfer
        sources = [item.source.index for item in t.items if item.source and item.source.tier == DEVICE]
        return [*sources, *(place.block for place in places(t, self.setup.per_chunk))]

    def check(self) -> None:
        self.pool.check_integrity()
        references, stats = self.references(), self.pool.stats()
        assert {block: count for block, count in enumerate(self.pool._references) if count} == references
        assert (stats.used, stats.references) == (len(references), references.total())
        super().check()

    def to_be_heard(self) -> set[tuple[Key, str]]:
        return super().to_be_heard() | {(each, DEVICE) for each in self.pool._known}

    def check_device_is_free(self) -> None:
        stats = self.pool.stats()
        assert (stats.used, stats.references, stats.free + stats.idle + stats.parked) == (0, 0, stats.blocks)
