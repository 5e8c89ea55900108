"""One cache under test, on a stage: every call is recorded, its commands go to simulated movers, and after each call
it is checked that what the cache says it has really is there.

Calls and expected answers are in `cache_model_lookup`, `cache_model_store` and `cache_model_groups`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from cache_kit import IMAGE_BYTES, LOAD, WRITE, Call, Setup, above, depth, group_of, key, parent, residency
from cache_model_leases import ModelHold
from cache_movers import BAD, Job, Movers, Tag, places
from object_state import state_of

from longshore.boundary import (
    DEVICE,
    HOST,
    Cancel,
    Command,
    Item,
    Key,
    Probe,
    Reset,
    Route,
    Slot,
    Status,
    Transfer,
    TransferResult,
    Urgency,
)
from longshore.cache import Lease, MissReason, Presence, SlotState
from longshore.cache.events import Announcements
from longshore.errors import CacheError
from residents import Resident, residents_of


class Stage:
    """A cache, the movers below it, and what it has been told."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.cache = setup.build()
        self.calls: list[Call] = []
        self.answers: list[Any] = []
        self.now = 0.0
        self.generation = setup.generation
        self.sizes = setup.sizes
        self.free_blocks = list(range(setup.device_blocks))
        self.movers = Movers(setup)
        self.jobs, self.ended, self.results = self.movers.jobs, self.movers.ended, self.movers.results
        self.secret, self.fault = self.movers.secret, self.movers.fault
        self.runnable, self.on = self.movers.runnable, self.movers.on
        self.loads: list[ModelHold] = []  # holds whose device blocks are in use
        self.holds: dict[Lease, ModelHold] = {}
        self.seen_in_step: dict[Key, bool] = {}
        """Chunks that were looked at in this step, and whether they may be gone all the same."""
        self.warm: set[Key] = set()
        """Chunks that a lookup has found in the host tier, which they do not leave in this step."""
        self.misses: Counter[MissReason] = Counter()
        self.hits: Counter[str] = Counter()
        self.host_reads: set[int] = set()
        """Jobs by which the host reads chunks itself: each is a hit or a miss in the end."""
        self.last_job = 0
        self.load_timeout = LOAD
        self.resident: dict[tuple[Key, str], Resident] = {}
        self.orphans: dict[Key, Key] = {}
        """Chunks that came when no tier had the chunk before them, and still wait for it; and that chunk."""
        self.sound = True
        """Whether the last check went well, so that there is a point in going on."""
        self.look()

    # ------------------------------------------------------------------ calls

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the cache, and record it."""
        self.sound = False
        self.calls.append(Call(method, args, kwargs))
        answer = getattr(self.cache, method)(*args, **kwargs)
        self.answers.append(answer)
        return answer

    def refused(self, error: type[CacheError], method: str, *args: Any, **kwargs: Any) -> None:
        """Call the cache, which must raise `error` and change nothing at all."""
        self.sound = False
        before = state_of(self.cache)
        self.calls.append(Call(method, args, kwargs))
        with pytest.raises(error) as info:
            getattr(self.cache, method)(*args, **kwargs)
        assert info.value.args[0], "an error says what was expected and what came"
        assert state_of(self.cache) == before, f"{method} raised {info.value!r} and changed something"
        self.answers.append(f"{type(info.value).__name__}: {info.value}")
        self.sound = True

    def settle(self) -> None:
        """Take the commands of the last call, and check everything."""
        self.carry()
        self.check()

    def carry(self) -> None:
        """Take the commands of the last call to the movers."""
        self.look()
        for command in self.call("take_commands"):
            self.receive(command)
        self.look()

    # ------------------------------------------------------------------ commands

    def receive(self, command: Command, *, commanded: bool = True) -> None:
        """A command of the cache: checked, and under way."""
        match command:
            case Cancel():
                assert 0 < command.job <= self.last_job
                self.check_cancel(command.job)
            case Reset():
                assert command.generation == self.generation
            case Transfer():
                self.check_transfer(command, commanded)
                self.movers.begin(command)
            case Probe():
                self.ask(command)

    def ask(self, probe: Probe) -> None:
        """A question to a remote tier."""
        raise AssertionError(f"there is no remote tier, and it is asked {probe}")

    def check_cancel(self, job: int) -> None:
        """Nobody waits for what is called off, unless it is of an earlier generation."""
        if job in self.jobs and self.jobs[job].transfer.generation == self.generation:
            assert not any(model.wants(job, self.now) for model in self.holds.values())

    def check_transfer(self, t: Transfer, commanded: bool) -> None:
        assert t.job not in self.jobs
        self.last_job = max(self.last_job, t.job)
        assert (t.generation, t.ranks) == (self.generation, self.setup.ranks)
        if t.route == (DEVICE, DEVICE):
            assert (t.deadline, t.by_layer, len(t.sections)) == (self.now + LOAD, True, 1)
            return
        writing = t.urgency is Urgency.WRITE
        assert writing == self.check_route(t.route)
        if commanded:
            assert t.deadline == self.now + self.timeout(t.route, writing)
            assert bool(t.sections) == (DEVICE in t.route)
        assert t.items
        for place in places(t, self.setup.per_chunk):
            of = t.items[place.item].key
            assert (place.group, place.chunk) == (group_of(of), depth(of))
        for item in t.items:
            assert item.parent == parent(item.key)
            self.check_side(item.key, item.source, t.route.source)
            self.check_side(item.key, item.destination, t.route.destination)
            self.check_order(t, item)
        if writing and t.route.source != DEVICE:
            assert not any(self.is_adrift(item.key) for item in t.items), "an orphan is written down"
        if writing:
            assert len(t.items) + self.writing(t.route) <= self.setup.max_writes

    def check_route(self, route: Route) -> bool:
        """There is such a route, and it is counted; says whether it leads down."""
        order = (DEVICE, *self.sizes)
        if route.source == route.destination:
            assert route.source in self.sizes
            return False
        assert str(route) in self.cache.counters.routes
        if route.source in self.setup.remote or route.destination in self.setup.remote:
            assert HOST in route
            return route.source == HOST
        down, up = pairwise(order), ((HOST, DEVICE), *((tier, HOST) for tier in order[2:]))
        assert route in (*down, *up)
        return order.index(route.source) < order.index(route.destination)

    def timeout(self, route: Route, writing: bool) -> float:
        """Seconds that a transfer has."""
        if writing or route.source == route.destination:
            return WRITE
        if route.source in self.setup.remote:
            return LOAD
        return self.load_timeout if route.destination == DEVICE else math.inf

    def check_side(self, of: Key, slot: Slot | None, tier: str) -> None:
        assert (slot is None) == (tier == DEVICE or tier in self.setup.remote)
        if slot is not None:
            assert (slot.tier, slot.size_class) == (tier, self.size_class_of(of))
            assert slot.index in self.setup.indices(self.sizes[tier])

    def check_order(self, t: Transfer, item: Item) -> None:
        """Invariant 4: whoever writes a slot is alone with it, unless the other comes first by `after`."""
        for other in self.jobs.values():
            for theirs in other.transfer.items:
                clash = any(self.overlap(item.destination, each) for each in (theirs.source, theirs.destination))
                clash |= self.overlap(theirs.destination, item.source)
                assert not clash or other.transfer.job in t.after, f"{t} and {other.transfer} share a slot"

    def overlap(self, one: Slot | None, other: Slot | None) -> bool:
        """Whether two slots have bytes in common."""
        if one is None or other is None or one.tier != other.tier:
            return False
        return not set(self.setup.units(one)).isdisjoint(self.setup.units(other))

    def size_class_of(self, of: Key) -> int:
        """The pool that a chunk's images are in."""
        return int(self.setup.slabs and group_of(of) == 1)

    def writing(self, route: Route) -> int:
        return sum(
            len(job.told)
            for job in self.jobs.values()
            if job.transfer.route == route and job.transfer.urgency is Urgency.WRITE
        )

    # ------------------------------------------------------------------ results

    def deliver(self, job: Job, rank: int, wanted: Sequence[Status]) -> None:
        """One rank of `job` ends, item by item as `wanted`, if possible. The result waits for `apply_results`."""
        self.sound = False
        self.movers.deliver(job, rank, wanted)
        self.sound = True

    def end(self, job: Job, *statuses: Status) -> None:
        """All ranks of `job` end, item by item as `statuses` (which repeat), and the cache hears of it."""
        for rank in sorted(job.moving):
            self.deliver(job, rank, statuses or (Status.OK,))
        self.apply([result for result in self.results if result.job == job.transfer.job])

    def apply(self, results: Sequence[TransferResult]) -> None:
        """Tell the cache."""
        for result in results:
            self.results.remove(result)
        self.call("apply_results", tuple(results), self.now)
        for result in results:
            job = self.jobs[result.job]
            if job.tell(result):
                self.finish(job)
        for model in self.holds.values():
            if model.parts and model.outcome is None and not any(part.untold for part in model.parts):
                self.conclude(model, MissReason.CANCELLED)
        self.reclaim()
        self.settle()

    def finish(self, job: Job) -> None:
        """All ranks have been told of."""
        t = job.transfer
        del self.jobs[t.job]
        self.ended[t.job] = job
        for i, item in enumerate(t.items):
            if item.source is not None:
                at = (item.source.tier, item.source.index)
                if job.told[i] is Status.OK and at in self.fault:
                    job.told[i] = self.fault[at]  # what was read is known to be bad
                elif self.movers.reads_slot(t) and job.told[i].invalidates_source:
                    self.excuse(item.key)
                    if any((*at, rank) in self.secret for rank in range(self.setup.ranks)):
                        self.fault.setdefault(at, job.told[i])
                    self.secret -= {(*at, rank) for rank in range(self.setup.ranks)}
            elif job.told[i] is not Status.OK:
                self.excuse(item.key)
        if t.job in self.host_reads:
            self.hits[HOST] += job.told.count(Status.OK)
            self.misses.update(MissReason.of(status) for status in job.told if status is not Status.OK)
        self.give_blocks(job.blocks)

    def excuse(self, lost: Key) -> None:
        """Bytes of `lost` are known to be unusable: what is held through it may go."""
        for model in self.holds.values():
            model.excused |= lost in model.needs
        self.seen_in_step = {each: excused or lost in above(each) for each, excused in self.seen_in_step.items()}
        self.warm = {each for each in self.warm if lost not in above(each)}

    def conclude(self, model: ModelHold, unfinished: MissReason) -> None:
        """The outcome is due: what it claims must lie in the device blocks."""
        self.misses.update(model.conclude(unfinished))
        self.hits.update(model.outcome.sources)
        before = 0
        for part in model.parts:
            for place in places(part.transfer, self.setup.per_chunk):
                if before + place.item < model.outcome.num_chunks:
                    tag = Tag(part.transfer.items[place.item].key, self.generation, place.sub)
                    assert all(rank[place.block] == tag for rank in self.movers.device)
            before += len(part.told)
        self.reclaim()

    def reclaim(self) -> None:
        """Device blocks come back when the outcome is known and no job writes them any more."""
        for model in list(self.loads):
            if model.outcome is not None and not any(part.untold for part in model.parts):
                self.give_blocks(model.blocks)
                self.loads.remove(model)

    # ------------------------------------------------------------------ what the cache says it has

    def look(self) -> None:
        residents, before = residents_of(self.cache), {each for each, _ in self.resident}
        self.resident = {(r.key, r.slot.tier): r for r in residents}
        assert len(self.resident) == len(residents)
        for each in dict.fromkeys(r.key for r in residents if r.parent is not None and self.is_absent(r.parent)):
            if each not in before:
                self.orphans[each] = parent(each) or b""
        self.orphans = {each: waits for each, waits in self.orphans.items() if not self.is_absent(each)}
        while landed := [each for each in self.orphans if self.lands(each)]:
            for each in landed:
                del self.orphans[each]
        for model in self.holds.values():
            model.lost |= {each for each in model.keys if group_of(each) and self.is_absent(each)}
        self.seen_in_step = {
            each: excused for each, excused in self.seen_in_step.items() if not excused or not self.is_absent(each)
        }

    def is_ready(self, of: Key, tier: str | None = None) -> bool:
        tiers = self.sizes if tier is None else (tier,)
        return any((r := self.resident.get((of, t))) is not None and r.state is SlotState.READY for t in tiers)

    def is_readable(self, of: Key) -> bool:
        """Whether `of`, and all that it needs to be reached, is ready; from an orphan on, if it is behind one."""
        return all(map(self.is_ready, self.line(of)))

    def is_rooted(self, of: Key) -> bool:
        """Whether `of` can be read, and is behind no orphan."""
        return self.is_readable(of) and not self.is_adrift(of)

    def is_adrift(self, of: Key) -> bool:
        """Whether `of` is an orphan, or behind one."""
        return self.line(of)[0] in self.orphans

    def line(self, of: Key) -> list[Key]:
        """`of` and all before it, head first: from an orphan on, if there is one."""
        path = above(of)
        return path[max((at for at, each in enumerate(path) if each in self.orphans), default=0) :]

    def lands(self, orphan: Key) -> bool:
        """Whether what an orphan waits for can be read, and is ready as far down as the orphan lies."""
        tiers, waits = list(self.sizes), self.orphans[orphan]
        copies = [(at, tier) for at, tier in enumerate(tiers) if (orphan, tier) in self.resident]
        # Once it follows its parent, it may be under way to a colder tier before anyone looks.
        coldest = max([at for at, tier in copies if self.is_ready(orphan, tier)] or [at for at, _ in copies])
        return self.is_readable(waits) and any(self.is_ready(waits, tier) for tier in tiers[coldest:])

    def ready_end(self, keys: Sequence[Key], start: int) -> int:
        """The first position from `start` on of what cannot be read, by an engine that has what is before."""
        end = next((at for at in range(start, len(keys)) if not self.is_rooted(keys[at])), len(keys))
        if not 0 < start == end:
            return end
        adrift = (at for at in range(start, len(keys)) if not (self.is_adrift(keys[at]) and self.is_readable(keys[at])))
        return next(adrift, len(keys))

    def warmest(self, of: Key) -> str:
        """The warmest tier in which `of`, which is ready, is."""
        return next(tier for tier in self.sizes if self.is_ready(of, tier))

    def is_absent(self, of: Key) -> bool:
        return not any((of, tier) in self.resident for tier in self.sizes)

    def where(self, path: str) -> dict[str, str]:
        """States of the chunk at the end of `path`, by tier."""
        return {t: r.state.value for t in self.sizes if (r := self.resident.get((key(path), t))) is not None}

    def reason(self, of: Key) -> MissReason:
        if self.is_absent(of):
            return MissReason.ABSENT
        return MissReason.AFTER_MISS if self.is_ready(of) else MissReason.IN_FLIGHT

    def free(self, tier: str) -> int:
        stats = next(s for s in self.cache.stats() if s.name == tier)
        return stats.slots - stats.used

    def take_blocks(self, count: int) -> list[int]:
        """Device blocks, in no particular order; none if there are not enough."""
        if count < 1 or len(self.free_blocks) < count:
            return []
        return [self.free_blocks.pop((7 * i) % len(self.free_blocks)) for i in range(count)]

    def give_blocks(self, blocks: Sequence[int]) -> None:
        """Nobody uses these device blocks any more."""
        self.free_blocks += blocks

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Everything that holds after each call."""
        self.cache.check_integrity()
        self.check_residents()
        self.check_capacity()
        self.check_books()
        self.sound = True

    def check_residents(self) -> None:
        for (each, tier), r in self.resident.items():
            self.check_side(each, r.slot, tier)
            assert r.parent == parent(each)
            if (
                r.parent is not None and each not in self.orphans
            ):  # invariant 6, for this tier and all colder ones together
                order = list(self.sizes)
                assert any((r.parent, colder) in self.resident for colder in order[order.index(tier) :])
            if r.state is SlotState.READY:  # invariant 1
                for rank, memory in enumerate(self.movers.memory):
                    there = memory.read(r.slot)
                    known = self.cache._state.pools[list(self.sizes).index(tier)].invalid  # lost when the step ends
                    assert there == Tag(each, self.generation) or (
                        there == BAD and ((tier, r.slot.index, rank) in self.secret or r.slot.index in known)
                    )
            else:
                assert r.state is SlotState.FILLING
        found = residency(self.cache, [each for each, _ in self.resident])
        assert Presence.ABSENT not in found.presences
        for at, ((_, tier), r) in enumerate(self.resident.items()):
            if tier == next(iter(self.sizes)):
                assert found.part(at, at + 1).slots() == ([r.slot.index] if r.state is SlotState.READY else None)
        for model in self.holds.values():
            assert model.excused or all(map(self.is_readable, model.keys)), "a held chunk is gone"
        for each, excused in self.seen_in_step.items():
            assert excused or self.is_ready(each), "a chunk that a lookup of this step has found is gone"
        assert all(self.is_ready(each, HOST) for each in self.warm), "a chunk that was said to be ready is not"

    def check_capacity(self) -> None:
        """Invariant 7: what is taken is what is resident, or touched by a job in flight; no byte of it twice."""
        taken: dict[str, set[Slot]] = {tier: set() for tier in self.sizes}
        for r in self.resident.values():
            taken[r.slot.tier].add(r.slot)
        for job in self.jobs.values():
            for item in job.transfer.items:
                for slot in (item.source, item.destination):
                    if slot is not None and slot.tier != DEVICE:
                        taken[slot.tier].add(slot)
        copies = [(tier, each) for (each, tier), r in self.resident.items() if r.state is SlotState.READY]
        announced: Announcements[None] = Announcements()
        announced.restart()
        held = set[tuple[str, Key]]()
        while not announced.is_current:
            held |= {(tier, each) for each, tiers in self.cache.reconcile(announced) for tier in tiers}
        assert held == {*copies}
        ready = Counter(tier for tier, _ in copies)
        for stats in self.cache.stats():
            slots, theirs = len(self.setup.indices(self.sizes[stats.name])), taken[stats.name]
            assert (stats.slots, stats.used) == (slots, len(theirs))
            assert stats.ready == ready[stats.name]
            units = [unit for slot in theirs for unit in self.setup.units(slot)]
            assert len(set(units)) == len(units), "two images have bytes in common"
            assert stats.used_bytes == len(units) * IMAGE_BYTES <= stats.nbytes

    def check_books(self) -> None:
        assert self.cache.jobs_in_flight == len(self.jobs)
        assert not any(self.cache.progress(job).is_over for job in self.jobs)
        assert (self.cache.leases, self.cache.protected) == (len(self.holds), len(self.seen_in_step))
        ready = {each for each, r in self.resident.items() if r.state is SlotState.READY}
        alone = sum(tier == HOST and {t for k, t in ready if k == key} == {HOST} for key, tier in ready)
        assert 0 <= self.cache.backups_needed <= alone
        misses, hits = +self.cache.counters.misses, +self.cache.counters.hits
        assert misses == +self.misses, f"{misses - self.misses} too many, {self.misses - misses} too few"
        assert hits == +self.hits
        for job in self.jobs.values():
            if job.transfer.urgency is Urgency.WRITE:
                assert self.writing(job.transfer.route) <= self.setup.max_writes

    # ------------------------------------------------------------------ the end

    def settle_all(self) -> None:
        """Every job in flight ends well, and whatever that brings about."""
        for _ in range(100):
            for job, rank in self.runnable():
                self.deliver(job, rank, [Status.OK])
            if self.results:
                self.apply(list(self.results))
            elif not self.jobs:
                return
        raise AssertionError(f"the cache orders more and more: {list(self.jobs.values())[-1].transfer}")
