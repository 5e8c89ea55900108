"""A plain model of what `TieredCache` promises.

The model knows nothing of eviction orders, reach counts or copies. From the commands and results alone, and from what
the simulated movers have in place, it says what every outcome, miss count and in-flight count must be, and it checks
after each call that what the cache calls ready really is there.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from cache_movers import BAD, POISON, Job, Movers, Tag
from cache_setup import FRESH, LOAD, PREFETCH, WRITE, Call, Setup, above, chunks, depth, key, parent, path_of

from longshore.boundary import (
    DEVICE,
    HOST,
    Cancel,
    Command,
    Forget,
    Item,
    Key,
    Route,
    Section,
    Slot,
    Status,
    Transfer,
    TransferResult,
    Urgency,
)
from longshore.cache import (
    DropReason,
    Hold,
    MissReason,
    Onboarding,
    Outcome,
    PrefetchPolicy,
    Resident,
    Retention,
    State,
)
from longshore.cache.retention import DEFAULT_PRIORITY, priority_of
from longshore.errors import CacheError


class ModelHold:
    """What the model expects of one hold."""

    def __init__(self, keys: Sequence[Key], start: int, request: str | None) -> None:
        self.keys = list(keys)
        self.start = start
        self.request = request
        self.excused = False
        self.onboarded = False
        self.parts: list[Job] = []
        self.blocks: list[int] = []
        self.skip = 0
        self.sources: list[str] = []
        self.cut: list[MissReason] = []
        self.outcome: Outcome | None = None
        self.deadline = 0.0
        self.reading: tuple[int, ...] = ()
        self.reading_until = 0.0
        self.patient = False

    def wants(self, read: int, now: float) -> bool:
        """Whether this still waits for a job that reads into the host tier."""
        joined = self.parts and self.outcome is None and now < self.deadline
        return (read in self.reading and now < self.reading_until) or bool(
            joined and any(read in part.transfer.after for part in self.parts)
        )

    def conclude(self, unfinished: MissReason) -> list[MissReason]:
        """Fix the outcome; the misses."""
        arrived, misses = 0, []
        for part in self.parts:
            for status in part.told:
                if part.untold:
                    reason: MissReason | None = unfinished
                else:
                    reason = None if status is Status.OK else MissReason(status.value)
                if reason is None and not misses:
                    arrived += 1
                elif misses and reason in (None, MissReason.CANCELLED):
                    misses.append(MissReason.BEHIND)
                else:
                    assert reason is not None
                    misses.append(reason)
        self.outcome = Outcome(arrived, tuple(self.sources[:arrived]))
        return misses + self.cut


class World:
    """One cache under test, the movers below it, and the model beside it."""

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
        self.lenders: list[ModelHold] = []  # holds whose device blocks are in use
        self.holds: dict[Hold, ModelHold] = {}
        self.peeks: list[tuple[Key, bool]] = []
        self.misses: Counter[MissReason] = Counter()
        self.hits: Counter[str] = Counter()
        self.last_job = 0
        self.load_timeout = LOAD
        self.offers: list[Job] = []
        self.sightings: Counter[Key] = Counter()
        """How often chunks that no tier had were offered."""
        self.resident: dict[tuple[Key, str], Resident] = {}
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
        before = pickle.dumps(self.cache)
        self.calls.append(Call(method, args, kwargs))
        with pytest.raises(error) as info:
            getattr(self.cache, method)(*args, **kwargs)
        assert info.value.args[0], "an error says what was expected and what came"
        assert pickle.dumps(self.cache) == before, f"{method} raised {info.value!r} and changed something"
        self.answers.append(f"{type(info.value).__name__}: {info.value}")
        self.sound = True

    def settle(self) -> None:
        """Take the commands of the last call, and check everything."""
        self.carry()
        self.check()

    def carry(self) -> None:
        """Take the commands of the last call to the movers."""
        for command in self.call("take"):
            self.receive(command)
        self.look()

    def match(self, path: str, start: int, request: str | None) -> Hold | None:
        keys = chunks(path)
        length = 0
        while start + length < len(keys) and all(map(self.is_ready, above(keys[start + length]))):
            length += 1
        self.misses.update(self.reason(each) for each in keys[start + length :])
        found = self.call("match", keys, self.now, start=start, request=request)
        assert (found.start, found.length) == (start, length)
        if length:
            assert [run.tier for run in self.call("runs", found.hold) for _ in range(run.chunks)] == [
                self.warmest(each) for each in keys[start : start + length]
            ]
            slots = [self.resident[each, self.warmest(each)].slot for each in keys[start : start + length]]
            assert self.call("slots", found.hold) == slots
            assert found.hold not in self.holds
            self.holds[found.hold] = ModelHold(keys[start : start + length], start, request)
        else:
            assert found.hold is None
        self.settle()
        return found.hold

    def peek(self, of: Key) -> str:
        (found,) = self.call("peek", [of]).presences
        answer = str(found.value)
        if all(map(self.is_ready, above(of))):
            self.peeks.append((of, False))
            assert answer == ("ready" if self.is_ready(of, HOST) else "colder")
        else:
            assert answer == ("absent" if self.is_absent(of) else "in_flight")
        self.settle()
        return answer

    def onboard(self, hold: Hold, count: int, skip: int, short: int, timeout: float | None = None) -> None:
        """Onboard the leading `count` chunks, without `skip` sub-blocks at the front and `short` at the end."""
        model, per_chunk = self.holds[hold], self.setup.per_chunk
        blocks = self.take_blocks(count * per_chunk - skip - short)
        if not blocks:
            return
        keys = model.keys[:count]
        readable = [all(map(self.is_ready, above(each))) for each in keys]
        leading = next((i for i, each in enumerate(readable) if not each), count)
        sources = [self.warmest(each) for each in keys[:leading]]
        before, free = dict(self.resident), self.free(HOST)
        self.load_timeout = timeout or LOAD
        model.deadline = self.now + self.load_timeout
        answer: Onboarding = self.call("onboard", hold, tuple(blocks), skip=skip, timeout=timeout)
        assert answer.chunks == sum(part.chunks for part in answer.parts) <= leading
        for each in keys[answer.chunks : leading]:
            model.cut.append(MissReason.BEHIND if (each, HOST) in before else MissReason.NO_ROOM)
        model.cut += [self.reason(each) for each in keys[leading:]]
        cold = [each for each in keys[:leading] if (each, HOST) not in before]
        assert answer.chunks == leading or free < len(cold), "chunks were left out although there was room"
        model.onboarded, model.blocks, model.skip = True, blocks, skip
        model.sources = sources[: answer.chunks]
        self.lenders.append(model)
        self.carry()
        model.parts = [self.jobs[part.job] for part in answer.parts]
        for part, job in zip(answer.parts, model.parts, strict=True):
            assert len(job.transfer.items) == part.chunks
        assert [i.key for job in model.parts for i in job.transfer.items] == keys[: answer.chunks]
        used = [b for job in model.parts for s in job.transfer.sections for b in s.blocks]
        assert used == blocks[: max(0, answer.chunks * per_chunk - skip)]
        if not model.parts:
            self.conclude(model, MissReason.CANCELLED)
        self.check()

    def prefetch(
        self, hold: Hold, policy: PrefetchPolicy | None = None, timeout: float | None = None
    ) -> tuple[int, ...]:
        """Held chunks come up from colder tiers, what only these have, and nothing else. What is coming is joined."""
        model = self.holds[hold]
        cold = [each for each in model.keys if (each, HOST) not in self.resident]
        coming = {each for each in model.keys if self.is_coming(each)}
        before = set(self.jobs)
        jobs: tuple[int, ...] = self.call("prefetch", hold, policy=policy, timeout=timeout)
        model.reading, model.reading_until = jobs, self.now + (timeout or PREFETCH)
        if policy is not PrefetchPolicy.TIMEOUT:
            model.reading_until = self.now + LOAD
        model.patient = policy in (PrefetchPolicy.WAIT, PrefetchPolicy.TIMEOUT)
        self.carry()
        ordered = [item.key for job in jobs if job not in before for item in self.jobs[job].transfer.items]
        joined = {item.key for job in jobs if job in before for item in self.jobs[job].transfer.items}
        assert sorted(ordered, key=depth) == cold[: len(ordered)]
        assert coming <= joined
        assert all(self.jobs[job].transfer.urgency is Urgency.PREFETCH for job in jobs if job not in before)
        self.check()
        return jobs

    def is_coming(self, of: Key) -> bool:
        """Whether `of` could be read, and is on its way into the host tier."""
        return all(map(self.is_ready, above(of))) and not self.is_ready(of, HOST) and (of, HOST) in self.resident

    def give_up(self, hold: Hold) -> None:
        model = self.holds[hold]
        answer = self.call("give_up", hold)
        if model.outcome is None:
            self.conclude(model, MissReason.DEADLINE)
        assert answer == model.outcome
        self.settle()

    def release(self, hold: Hold) -> None:
        self.call("release", hold)
        self.let_go(hold)
        self.settle()

    def abort(self, request: str) -> None:
        mine = [hold for hold, model in self.holds.items() if model.request == request]
        assert self.call("abort", request) == len(mine)
        for hold in mine:
            self.let_go(hold)
        self.settle()

    def let_go(self, hold: Hold) -> None:
        model = self.holds.pop(hold)
        if model.onboarded and model.outcome is None:
            self.conclude(model, MissReason.CANCELLED)

    def commit(
        self,
        path: str,
        first: int,
        evicting: bool,
        retention: Sequence[Retention] = (),
        prompt: int | None = None,
    ) -> None:
        keys, per_chunk = chunks(path), self.setup.per_chunk
        blocks = self.take_blocks((len(keys) - first) * per_chunk)
        if not blocks:
            return
        for i, block in enumerate(blocks):
            for rank in self.movers.device:
                rank[block] = Tag(keys[first + i // per_chunk], self.generation, i % per_chunk)
        wanted = self.setup.offload != "write_back" or evicting
        before = self.before_store(keys, first, retention, prompt, wanted)
        offload = self.call(
            "commit", keys, tuple(blocks), first=first, evicting=evicting, retention=retention, prompt=prompt
        )
        accepted = self.after_store(before, offload.accepted) if wanted else 0
        if not wanted:
            assert (offload.job, offload.accepted) == (None, ())
        self.settle()
        if offload.job is None:
            self.free_blocks += blocks
            return
        job = self.jobs[offload.job]
        known = before.known - first
        mine = blocks[known * per_chunk : (known + accepted) * per_chunk]
        assert job.transfer.sections == (Section(0, before.known * per_chunk, tuple(mine)),)
        assert tuple(item.destination for item in job.transfer.items) == tuple(p.slot for p in offload.accepted)
        job.blocks = blocks

    def offer(self, path: str, first: int) -> None:
        keys = chunks(path)
        before = self.before_store(keys, first)
        offload = self.call("offer", keys, first=first)
        self.after_store(before, offload.accepted)
        if offload.job is not None:  # the host moves the bytes: the cache gives no command for it
            items = tuple(Item(keys[p.position], parent(keys[p.position]), None, p.slot, 0) for p in offload.accepted)
            self.receive(
                Transfer(
                    offload.job,
                    Route(DEVICE, HOST),
                    items,
                    urgency=Urgency.WRITE,
                    deadline=self.now + WRITE,
                    generation=self.generation,
                    ranks=self.setup.ranks,
                ),
                commanded=False,
            )
            self.offers.append(self.jobs[offload.job])
        self.settle()

    def withdraw(self, job: Job) -> None:
        """The host will not write what it was offered."""
        self.call("withdraw", job.transfer.job)
        job.moving.clear()
        for rank in sorted(job.untold):
            statuses = (Status.CANCELLED,) * len(job.told)
            job.happened[rank] = statuses
            if job.tell(TransferResult(job.transfer.job, statuses, rank=rank)):
                self.finish(job)
        self.settle()

    class Before(NamedTuple):
        keys: list[Key]
        known: int
        orphan: bool
        must: bool
        drops: Counter[DropReason]
        left: Counter[DropReason]

    def before_store(
        self,
        keys: list[Key],
        first: int,
        retention: Sequence[Retention] = (),
        prompt: int | None = None,
        wanted: bool = True,
    ) -> World.Before:
        known = first
        while known < len(keys) and not self.is_absent(keys[known]):
            known += 1
        left, end = self.left_out(keys, known, retention, prompt) if wanted else (Counter[DropReason](), len(keys))
        fresh = end - known
        orphan = fresh > 0 and known > 0 and self.is_absent(keys[known - 1])
        allowed = fresh <= self.setup.max_writes - self.writing(Route(DEVICE, HOST))
        must = not orphan and allowed and fresh <= self.room_for(keys[:known])
        return World.Before(keys[:end], known, orphan, must, self.cache.counters.drops[HOST].copy(), left)

    def left_out(
        self, keys: list[Key], known: int, retention: Sequence[Retention], prompt: int | None
    ) -> tuple[Counter[DropReason], int]:
        """What the write policy does not take of what no tier has, by reason; and where that begins."""
        ends = [len(keys)] * 2
        if self.setup.prompt_only and prompt is not None:
            ends[1] = max(known, min(prompt, len(keys)))
        low = (i for i in range(known, ends[-1]) if priority_of(retention, i) < self.setup.priority_floor)
        ends.append(next(low, ends[-1]))
        if self.setup.offload == "write_through_selective":
            fresh = keys[known : ends[-1]]
            self.sightings.update(fresh)
            seldom = (known + i for i, each in enumerate(fresh) if self.sightings[each] < self.setup.threshold)
            ends.append(next(seldom, ends[-1]))
        reasons = (DropReason.ANSWER, DropReason.PRIORITY, DropReason.SELDOM)
        return Counter({why: a - b for why, (a, b) in zip(reasons, pairwise(ends), strict=False) if a > b}), ends[-1]

    def after_store(self, before: World.Before, accepted: Sequence[Any]) -> int:
        """What was accepted is the leading part of what no tier had; the rest is counted, for the right reason."""
        count, fresh = len(accepted), len(before.keys) - before.known
        assert [p.position for p in accepted] == list(range(before.known, before.known + count))
        dropped = self.cache.counters.drops[HOST] - before.drops
        assert {why: dropped[why] for why in before.left} == before.left
        dropped -= before.left
        assert dropped.total() == fresh - count
        assert not before.must or count == fresh, "chunks were dropped although there was room"
        if before.orphan:
            assert count == 0
            assert set(dropped) == {DropReason.ORPHAN}
        elif count < fresh:
            assert set(dropped) <= {DropReason.NO_ROOM, DropReason.BACKPRESSURE}
        return count

    def discard(self, path: str, tier: str) -> int:
        before = set(self.resident)
        removed = self.call("discard", chunks(path), tier)
        self.settle()
        gone = before - set(self.resident)
        assert removed == len({(each, where) for each, where in gone if where == tier})
        assert all(each in chunks(path) for each, where in gone if where == tier)
        return int(removed)

    def reset(self) -> None:
        self.generation += 1
        assert self.call("reset") == self.generation
        for model in self.holds.values():
            model.excused = True
            if model.onboarded and model.outcome is None:
                self.misses.update([MissReason.CANCELLED] * sum(len(job.told) for job in model.parts) + model.cut)
            if model.onboarded:
                model.outcome = Outcome(0, ())
            model.reading = ()
        self.peeks = [(each, True) for each, _ in self.peeks]
        assert not self.cache.residents()
        self.settle()
        assert self.cache.generation == self.generation

    def end_step(self) -> None:
        self.call("end_step")
        self.peeks.clear()
        self.settle()

    def flush(self) -> bool:
        done = self.call("flush")
        self.settle()
        assert done == (not self.jobs)
        return bool(done)

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes. Whoever's time is over has what has arrived, whatever is still under way."""
        self.now += seconds
        self.call("tick", self.now)
        for model in self.holds.values():
            if model.onboarded and model.outcome is None and model.deadline <= self.now:
                self.conclude(model, MissReason.DEADLINE)
        self.settle()

    # ------------------------------------------------------------------ movers

    def receive(self, command: Command, *, commanded: bool = True) -> None:
        """A command of the cache: checked, and under way."""
        match command:
            case Cancel():
                assert 0 < command.job <= self.last_job
                self.check_cancel(command.job)
            case Forget():
                assert command.generation == self.generation
            case Transfer():
                self.check_transfer(command, commanded)
                self.movers.begin(command)

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
        order = (DEVICE, *self.sizes)
        down, up = pairwise(order), ((HOST, DEVICE), *((tier, HOST) for tier in order[2:]))
        assert t.route in (*down, *up)
        assert writing == (order.index(t.route.source) < order.index(t.route.destination))
        assert str(t.route) in self.cache.counters.routes
        timeout = WRITE if writing else self.load_timeout if t.route.destination == DEVICE else math.inf
        assert t.deadline == self.now + timeout
        assert t.items
        if commanded:
            assert len(t.sections) == (1 if DEVICE in t.route else 0)
        for section in t.sections:
            assert section.first_block // self.setup.per_chunk == depth(t.items[0].key)
        for item in t.items:
            assert item.parent == parent(item.key)
            self.check_side(item.source, t.route.source)
            self.check_side(item.destination, t.route.destination)
            self.check_order(t, item)
        if writing:
            assert len(t.items) + self.writing(t.route) <= self.setup.max_writes

    def check_side(self, slot: Slot | None, tier: str) -> None:
        assert (slot is None) == (tier == DEVICE)
        if slot is not None:
            assert (slot.tier, slot.pool) == (tier, 0)
            assert 0 <= slot.index < self.sizes[tier]

    def check_order(self, t: Transfer, item: Item) -> None:
        """Invariant 4: whoever writes a slot is alone with it, unless the other comes first by `after`."""
        for other in self.jobs.values():
            for theirs in other.transfer.items:
                slots = {s for s in (theirs.source, theirs.destination) if s is not None}
                clash = item.destination in slots or (
                    theirs.destination is not None and theirs.destination == item.source
                )
                assert not clash or other.transfer.job in t.after, f"{t} and {other.transfer} share a slot"

    def writing(self, route: Route) -> int:
        return sum(
            len(job.told)
            for job in self.jobs.values()
            if job.transfer.route == route and job.transfer.urgency is Urgency.WRITE
        )

    def deliver(self, job: Job, rank: int, wanted: Sequence[Status]) -> None:
        """One rank of `job` ends; item by item as `wanted`, as far as possible. The result waits for `apply`."""
        self.sound = False
        self.movers.deliver(job, rank, wanted)
        self.sound = True

    def end(self, job: Job, *statuses: Status) -> None:
        """All ranks of `job` end, item by item as `statuses` (which repeat), and the cache hears of it."""
        for rank in sorted(job.moving):
            self.deliver(job, rank, statuses or (Status.OK,))
        self.apply([result for result in self.results if result.job == job.transfer.job])

    def where(self, path: str) -> dict[str, str]:
        """States of the chunk at the end of `path`, by tier."""
        return {t: r.state.value for t in self.sizes if (r := self.resident.get((key(path), t))) is not None}

    def apply(self, results: Sequence[TransferResult]) -> None:
        """Tell the cache."""
        for result in results:
            self.results.remove(result)
        self.call("apply", tuple(results), self.now)
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
                elif self.movers.reads_slot(t) and job.told[i].condemns_source:
                    self.excuse(item.key)
                    if any((*at, rank) in self.secret for rank in range(self.setup.ranks)):
                        self.fault.setdefault(at, job.told[i])
                    self.secret -= {(*at, rank) for rank in range(self.setup.ranks)}
            elif job.told[i] is not Status.OK:
                self.excuse(item.key)
        self.free_blocks += job.blocks

    def excuse(self, lost: Key) -> None:
        """Bytes of `lost` are known to be unusable: what is held through it may go."""
        for model in self.holds.values():
            model.excused |= lost in above(model.keys[-1])
        self.peeks = [(each, excused or lost in above(each)) for each, excused in self.peeks]

    # ------------------------------------------------------------------ checks

    def look(self) -> None:
        """What the cache says it has."""
        residents = self.cache.residents()
        self.resident = {(r.key, r.slot.tier): r for r in residents}
        assert len(self.resident) == len(residents)

    def is_ready(self, of: Key, tier: str | None = None) -> bool:
        tiers = self.sizes if tier is None else (tier,)
        return any((r := self.resident.get((of, t))) is not None and r.state is State.READY for t in tiers)

    def warmest(self, of: Key) -> str:
        """The warmest tier in which `of`, which is ready, is."""
        return next(tier for tier in self.sizes if self.is_ready(of, tier))

    def is_absent(self, of: Key) -> bool:
        return not any((of, tier) in self.resident for tier in self.sizes)

    def reason(self, of: Key) -> MissReason:
        if self.is_absent(of):
            return MissReason.ABSENT
        return MissReason.BEHIND if self.is_ready(of) else MissReason.IN_FLIGHT

    def room_for(self, path: Sequence[Key]) -> int:
        """Host slots that chunks behind `path` can count on: with one tier, all that nothing needs."""
        if self.setup.file is not None:
            return self.free(HOST)
        needed = set(path)
        needed.update(each for model in self.holds.values() for each in above(model.keys[-1]))
        needed.update(each for peeked, _ in self.peeks for each in above(peeked))
        for job in self.jobs.values():
            needed.update(each for item in job.transfer.items for each in above(item.key))
        return self.free(HOST) + sum(each not in needed for each, _ in self.resident)

    def free(self, tier: str) -> int:
        stats = next(s for s in self.cache.stats() if s.name == tier)
        return stats.slots - stats.used

    def take_blocks(self, count: int) -> list[int]:
        """Device blocks, in no particular order; none if there are not enough."""
        if count < 1 or len(self.free_blocks) < count:
            return []
        return [self.free_blocks.pop((7 * i) % len(self.free_blocks)) for i in range(count)]

    def conclude(self, model: ModelHold, unfinished: MissReason) -> None:
        """The outcome is due: what it claims must lie in the device blocks."""
        self.misses.update(model.conclude(unfinished))
        assert model.outcome is not None
        self.hits.update(model.outcome.sources)
        position = model.skip
        for block in model.blocks:
            chunk, sub = divmod(position, self.setup.per_chunk)
            if chunk < model.outcome.chunks:
                for rank in self.movers.device:
                    assert rank[block] == Tag(model.keys[chunk], self.generation, sub)
            position += 1
        self.reclaim()

    def reclaim(self) -> None:
        """Device blocks come back when the outcome is known and no job writes them any more."""
        for model in list(self.lenders):
            if model.outcome is not None and not any(part.untold for part in model.parts):
                self.free_blocks += model.blocks
                self.lenders.remove(model)

    def check(self) -> None:
        """Everything that holds after each call."""
        self.cache.check_integrity()
        self.check_residents()
        self.check_capacity()
        self.check_books()
        self.sound = True

    def check_residents(self) -> None:
        for (each, tier), r in self.resident.items():
            assert 0 <= r.slot.index < self.sizes[tier]
            assert r.parent == parent(each)
            if r.parent is not None:  # invariant 6, for this tier and all colder ones together
                order = list(self.sizes)
                assert any((r.parent, colder) in self.resident for colder in order[order.index(tier) :])
            if r.state is State.READY:  # invariant 1
                for rank in range(self.setup.ranks):
                    at = (tier, r.slot.index, rank)
                    there = self.movers.content.get(at, POISON)
                    assert there == Tag(each, self.generation) or (there == BAD and at in self.secret)
            else:
                assert r.state is State.FILLING
        assert all(self.cache.knows(each) for each, _ in self.resident)
        for model in self.holds.values():
            assert model.excused or all(map(self.is_ready, model.keys)), "a held chunk is gone"
        for each, excused in self.peeks:
            assert excused or self.is_ready(each), "a chunk that was peeked at is gone"

    def check_capacity(self) -> None:
        """Invariant 7: what is taken is exactly what is resident, or touched by a job in flight."""
        taken: dict[str, set[int]] = {tier: set() for tier in self.sizes}
        for r in self.resident.values():
            taken[r.slot.tier].add(r.slot.index)
        for job in self.jobs.values():
            for item in job.transfer.items:
                for slot in (item.source, item.destination):
                    if slot is not None and slot.tier != DEVICE:
                        taken[slot.tier].add(slot.index)
        ready = Counter(tier for (_, tier), r in self.resident.items() if r.state is State.READY)
        for stats in self.cache.stats():
            assert (stats.slots, stats.used) == (self.sizes[stats.name], len(taken[stats.name]))
            assert stats.ready == ready[stats.name]

    def check_books(self) -> None:
        assert self.cache.jobs_in_flight == len(self.jobs)
        assert all(map(self.cache.in_flight, self.jobs))
        assert self.cache.held == len(self.holds) + len(self.peeks)
        misses, hits = +self.cache.counters.misses, +self.cache.counters.hits
        assert misses == +self.misses, f"{misses - self.misses} too many, {self.misses - misses} too few"
        assert hits == +self.hits
        for hold, model in self.holds.items():
            if model.onboarded:
                assert self.cache.outcome(hold) == model.outcome
            waits = model.patient and self.now < model.reading_until and any(job in self.jobs for job in model.reading)
            warm = [self.is_ready(each, HOST) and all(map(self.is_ready, above(each))) for each in model.keys]
            leading = next((i for i, each in enumerate(warm) if not each), len(warm))
            assert self.cache.prefetched(hold) == (None if waits else leading)
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

    def drain(self) -> None:
        """Let go of everything, wait for everything: then nothing is held, and all slots are free or ready."""
        for hold in list(self.holds):
            self.release(hold)
        self.end_step()
        self.settle_all()
        while not self.flush():
            self.settle_all()
        assert (self.cache.held, self.cache.jobs_in_flight) == (0, 0)
        assert sorted(self.free_blocks) == list(range(self.setup.device_blocks))
        for stats in self.cache.stats():
            assert stats.used == stats.ready, "a slot is neither free nor ready"

    def evict_all(self) -> None:
        """Nothing is held: then all of it can make way."""
        leaves = {path_of(each) for each, _ in self.resident}
        for tier in self.sizes:
            for leaf in sorted(leaves, key=lambda path: (-len(path), path)):
                self.discard(leaf, tier)
            assert self.free(tier) == self.sizes[tier], f"something in the {tier} tier cannot be evicted"
        if self.setup.priority_floor > DEFAULT_PRIORITY:
            return
        for _ in range(self.setup.threshold if self.setup.offload == "write_through_selective" else 1):
            self.offer(FRESH[: self.sizes[HOST]], 0)
        self.settle_all()
        assert not self.resident or self.cache.stats()[0].ready == min(self.sizes[HOST], self.setup.max_writes)
