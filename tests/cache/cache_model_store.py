"""What an engine hands over, and what must become of it: store, discard, flush."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from cache_kit import Setup, above, chunks, parent, text_of
from cache_model_base import Stage
from cache_movers import Job, Tag

from longshore.boundary import DEVICE, HOST, Item, Key, Route, Section, Status, Transfer, TransferResult, Urgency
from longshore.cache import DropReason, GroupKeys, Retention, ScheduledStore, SlotState
from longshore.cache.settings import DEFAULT_PRIORITY
from residents import Resident


class Storing(Stage):
    """Blocks that are complete, or about to be evicted from the device."""

    def __init__(self, setup: Setup) -> None:
        self.host_stores: list[Job] = []
        self.sightings: Counter[Key] = Counter()
        """How often chunks that no tier had were offered."""
        self.retained = False
        """Whether a priority was told."""
        self.told: set[Key] = set()
        """Chunks that some tier has, or is getting, and of which the cache was told the tokens."""
        super().__init__(setup)

    def look(self) -> None:
        super().look()
        self.told = {each for each in self.told if not self.is_absent(each)}

    def store(
        self,
        path: str,
        first: int,
        before_eviction: bool,
        retention: Sequence[Retention] = (),
        prompt: int | None = None,
    ) -> None:
        keys, per_chunk = chunks(path), self.setup.per_chunk
        blocks = self.take_blocks((len(keys) - first) * per_chunk)
        if not blocks:
            return
        self.compute(keys[first:], blocks)
        wanted = self.setup.offload != "write_back" or before_eviction
        before = self.before_store(keys, first, retention, prompt, wanted)
        text = text_of(path, per_chunk) if self.setup.partial else None
        asked = GroupKeys(keys, first, prompt_tokens=text, prompt_end=prompt, retention=retention)
        offload = self.call("store", {0: asked}, {0: tuple(blocks)}, before_eviction=before_eviction)[0]
        accepted = self.after_store(before, offload.positions) if wanted else 0
        if not wanted:
            assert (offload.job, list(offload.positions)) == (None, [])
        self.settle()
        if self.setup.partial and wanted:
            self.told.update(each for each in keys[first:] if not self.is_absent(each))
        if offload.job is None:
            self.give_blocks(blocks)
            return
        job = self.jobs[offload.job]
        runs: list[list[int]] = []
        for at in before.fresh[:accepted]:
            if not runs or runs[-1][-1] + 1 < at:
                runs.append([])
            runs[-1].append(at)
        mine = [blocks[(run[0] - first) * per_chunk : (run[-1] + 1 - first) * per_chunk] for run in runs]
        expected = (Section(0, run[0] * per_chunk, tuple(each)) for run, each in zip(runs, mine, strict=True))
        assert job.transfer.sections == tuple(expected)
        assert tuple(item.destination for item in job.transfer.items) == tuple(offload.slots)
        job.blocks = blocks

    def store_by_host(self, path: str, first: int) -> None:
        keys = chunks(path)
        before = self.before_store(keys, first)
        offload = self.call("store", {0: GroupKeys(keys, first)})[0]
        self.after_store(before, offload.positions)
        self.note_host_store(keys, offload)
        self.settle()

    def compute(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """The engine has computed these chunks in these blocks."""
        for i, block in enumerate(blocks):
            chunk, sub = divmod(i, self.setup.per_chunk)
            for rank in self.movers.device:
                rank[block] = Tag(keys[chunk], self.generation, sub)

    def note_host_store(self, keys: Sequence[Key], offload: ScheduledStore) -> None:
        """The host moves what was accepted; the cache gives no command for it."""
        if offload.job is None:
            return
        items = tuple(
            Item(keys[at], parent(keys[at]), None, slot)
            for at, slot in zip(offload.positions, offload.slots, strict=True)
        )
        write = Transfer(offload.job, Route(DEVICE, HOST), items, urgency=Urgency.WRITE)
        self.note_host_job(replace(write, generation=self.generation, ranks=self.setup.ranks))

    def note_host_job(self, transfer: Transfer) -> None:
        """The host moves bytes itself."""
        self.receive(transfer, commanded=False)
        self.host_stores.append(self.jobs[transfer.job])

    def release_job(self, job: Job) -> None:
        """The host will not move what it was told to."""
        self.call("release", job.transfer.job)
        job.moving.clear()
        for rank in sorted(job.untold):
            statuses = (Status.CANCELLED,) * len(job.told)
            job.happened[rank] = statuses
            if job.tell(TransferResult(job.transfer.job, statuses, rank=rank)):
                self.finish(job)
        self.settle()

    class Before(NamedTuple):
        keys: list[Key]
        fresh: list[int]
        adrift: set[Key]
        orphan: bool
        least: int
        resident: dict[tuple[Key, str], Resident]
        drops: Counter[DropReason]
        left: Counter[DropReason]

    def before_store(
        self,
        keys: list[Key],
        first: int,
        retention: Sequence[Retention] = (),
        prompt: int | None = None,
        wanted: bool = True,
    ) -> Storing.Before:
        known = first
        while known < len(keys) and not self.is_absent(keys[known]):
            known += 1
        fresh, left = [at for at in range(known, len(keys)) if self.is_absent(keys[at])], Counter[DropReason]()
        if wanted:
            left, fresh = self.left_out(keys, fresh, max(known, prompt or known), retention, prompt)
        count = len(fresh)
        orphan = count > 0 and known > 0 and self.has_no_parent(keys[known - 1])
        allowed = count <= self.setup.max_writes - self.writing(Route(DEVICE, HOST))
        fits = not orphan and allowed and not self.setup.slabs and count <= self.room_for(keys)
        least = min(count, max(1, self.free(HOST))) if self.may_reject else count
        drops, self.retained = self.cache.counters.drops[HOST].copy(), self.retained or bool(retention)
        adrift = {each for each, _ in self.resident if self.is_adrift(each)}
        return Storing.Before(keys, fresh, adrift, orphan, least if fits else 0, dict(self.resident), drops, left)

    def has_no_parent(self, of: Key) -> bool:
        """Whether what follows `of` is an orphan, or behind one whose parent no tier has."""
        waits = self.orphans.get(self.line(of)[0])
        return self.is_absent(of) or (waits is not None and self.is_absent(waits))

    @property
    def may_reject(self) -> bool:
        """Whether new chunks of a path may be worth less than all for which others would have to go, but for one."""
        return self.setup.policy == "gittins" and self.setup.file is None and not self.setup.remote

    @staticmethod
    def priority(retention: Sequence[Retention], position: int) -> int:
        """The priority of the chunk at `position`."""
        said = [each for each in retention if each.first <= position and (each.end is None or position < each.end)]
        return max((each.priority for each in said), default=DEFAULT_PRIORITY)

    def left_out(
        self, keys: list[Key], fresh: list[int], end: int, retention: Sequence[Retention], prompt: int | None
    ) -> tuple[Counter[DropReason], list[int]]:
        """What the write policy does not take of the `fresh` chunks, by reason; and which it takes.

        Those at `end` and behind are of the answer, if that is told.
        """
        ends = [len(fresh)] * 2
        if self.setup.prompt_only and prompt is not None:
            ends[1] = sum(at < end for at in fresh)
        low = (i for i in range(ends[-1]) if self.priority(retention, fresh[i]) < self.setup.priority_floor)
        ends.append(next(low, ends[-1]))
        if self.setup.offload == "write_through_selective":
            worth = [keys[at] for at in fresh[: ends[-1]]]
            self.sightings.update(worth)
            seldom = (i for i, each in enumerate(worth) if self.sightings[each] < self.setup.threshold)
            ends.append(next(seldom, ends[-1]))
        reasons = (DropReason.GENERATED, DropReason.PRIORITY, DropReason.BELOW_THRESHOLD)
        left = Counter({why: a - b for why, (a, b) in zip(reasons, pairwise(ends), strict=False) if a > b})
        return left, fresh[: ends[-1]]

    def after_store(self, before: Storing.Before, accepted: Sequence[int]) -> int:
        """What was accepted is the leading part of what no tier had; the rest is counted, for the right reason."""
        count, fresh = len(accepted), len(before.fresh)
        assert list(accepted) == before.fresh[:count]
        dropped = self.cache.counters.drops[HOST] - before.drops
        assert {why: dropped[why] for why in before.left} == before.left
        dropped -= before.left
        assert dropped.total() == fresh - count
        assert count >= before.least, "chunks were dropped although there was room"
        self.check_evicted(before)
        if before.orphan:
            assert set(dropped) <= {DropReason.NO_PARENT}
        elif count < fresh:
            asks = self.setup.policy == "gittins" and self.setup.file is not None
            assert set(dropped) <= {DropReason.NO_ROOM, DropReason.BACKPRESSURE, *[DropReason.ADMISSION] * asks}
        return count

    def check_evicted(self, before: Storing.Before) -> None:
        """Nothing makes way for an orphan; nor anything else while an orphan could, if no priority was told."""
        self.look()
        gone = {each for each, tier in before.resident.keys() - self.resident.keys() if tier == HOST}
        assert not (before.orphan and gone)
        if self.retained or self.setup.slabs or gone <= before.adrift:
            return
        needed = {each for model in self.holds.values() for each in model.needs}.union(self.seen_in_step, before.keys)
        needed.update(item.key for job in self.jobs.values() for item in job.transfer.items)
        parents = {parent(each) for each, _ in self.resident}
        for (each, tier), r in self.resident.items():
            if tier == HOST and self.is_adrift(each) and r.state is SlotState.READY and each not in needed | parents:
                alone = sum(key == each for key, _ in self.resident) == 1
                assert not alone, f"{each!r} is an orphan, and stays, while {gone} made way"

    def discard(self, path: str, tier: str, group: int = 0) -> int:
        before, keys = set(self.resident), chunks(path, group)
        removed = self.call("discard", keys, tier)
        self.settle()
        gone = before - set(self.resident)
        assert removed == len({(each, where) for each, where in gone if where == tier})
        assert all(each in keys for each, where in gone if where == tier)
        return int(removed)

    def evict(self, tier: str, most: int) -> None:
        before = set(self.resident)
        removed = self.call("evict", tier, most)
        self.settle()
        assert removed == sum(where == tier for _, where in before - set(self.resident)) <= most

    def room_for(self, path: Sequence[Key]) -> int:
        """Host slots that chunks behind `path` can count on: with one tier, all that nothing needs."""
        if self.setup.file is not None:
            return self.free(HOST)
        needed = set(path)
        needed.update(each for model in self.holds.values() for each in model.needs)
        needed.update(each for seen in self.seen_in_step for each in above(seen))
        for job in self.jobs.values():
            needed.update(each for item in job.transfer.items for each in above(item.key))
        return self.free(HOST) + sum(each not in needed for each, _ in self.resident)
