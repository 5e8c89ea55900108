"""Requests over several KV cache groups, and independent chunks: what they ask of the cache, and must get.

Which prefix is served is found here by trying one length after the other, the longest first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cache_kit import GROUPS, LOAD, chunks, group_of, letters
from cache_model_leases import ModelHold
from cache_model_lifecycle import Life
from cache_movers import places

from longshore.boundary import DEVICE, HOST, Item, Key, Route, Transfer
from longshore.cache import GroupKeys, GroupMatch, Lease, MissReason, ScheduledStore
from longshore.errors import CacheError


class Groups(Life):
    """A world of as many KV cache groups as its setup says."""

    # ------------------------------------------------------------------ match

    def needed(self, group: int, end: int) -> range:
        """The chunks that the token behind the first `end` chunks of a group sees."""
        kind = GROUPS[group]
        size = kind.block_size * self.setup.per_chunk
        seen = 1 if kind.recurrent else kind.window or end * size
        return range(min((at for at in range(end) if (at + 1) * size > end * size - seen), default=end), end)

    def lookup_groups(self, path: str, device: Sequence[Sequence[bool]], request: str | None) -> Lease | None:
        """A request for `path`, of which the `device` has some chunks of each group, is served as far as can be."""
        keys, there = self.wanted(path, device)
        end, needs = self.longest(keys, there), []
        for group, (mine, has) in enumerate(zip(keys, there, strict=True)):
            needed = self.needed(group, end // letters(group))
            load = tuple(at for at in needed if not has[at])
            needs.append(GroupMatch(needed.start, needed.stop, load))
            self.miss_of_group(group, mine, needed.stop)
        found = self.call("lookup", self.paths(keys, there), self.now, request=request)
        per_letter = GROUPS[0].block_size * self.setup.per_chunk
        assert (found.tokens, found.remote, found.probes) == (end * per_letter, 0, ())
        assert found.matches == tuple(needs)
        loads = [mine[at] for mine, need in zip(keys, needs, strict=True) for at in need.load]
        self.held(found.lease, ModelHold(loads, request, joint=True))
        self.carry()
        self.check()
        return found.lease

    def wanted(self, path: str, device: Sequence[Sequence[bool]]) -> tuple[list[list[Key]], list[list[bool]]]:
        """The keys of each group, and for each of these whether the device has it."""
        keys = [chunks(path, group) for group in range(self.setup.groups)]
        return keys, [[*has, *[False] * len(mine)][: len(mine)] for has, mine in zip(device, keys, strict=False)]

    @staticmethod
    def paths(keys: Sequence[Sequence[Key]], there: Sequence[Sequence[bool]]) -> dict[int, GroupKeys]:
        """What is asked for, by group."""
        both = zip(keys, there, strict=True)
        return {group: GroupKeys(mine, device=tuple(has)) for group, (mine, has) in enumerate(both)}

    def miss_of_group(self, group: int, keys: Sequence[Key], end: int) -> None:
        """What is missing behind the first `end` chunks of a group is counted."""
        for each in keys[max(end, self.needed(group, len(keys)).start) if group else end :]:
            self.misses[self.reason(each)] += 1

    def prefetch_remote_independent(self, path: str, group: int) -> None:
        """Of independent chunks each is fetched for itself."""
        keys = chunks(path, group)
        coming, lacking = self.apart(keys)
        self.prefetched_remote(self.call("prefetch", {group: GroupKeys(keys)}, self.now), coming, lacking)

    def longest(self, keys: Sequence[Sequence[Key]], there: Sequence[Sequence[bool]]) -> int:
        """The longest prefix, in letters, of which every group has all that is needed."""
        served = [{each for each in mine if self.is_rooted(each)} for mine in keys]
        served[0] |= self.behind_device(keys[0], there[0], served[0])
        unit = math.lcm(*map(letters, range(self.setup.groups)))
        ends = [len(mine) * letters(group) for group, mine in enumerate(keys)]
        for end in range(min(ends) // unit * unit, 0, -unit):
            if all(
                has[at] or mine[at] in served[group]
                for group, (mine, has) in enumerate(zip(keys, there, strict=True))
                for at in self.needed(group, end // letters(group))
            ):
                return end
        return 0

    def behind_device(self, keys: Sequence[Key], has: Sequence[bool], served: set[Key]) -> set[Key]:
        """Orphans that can be used, as the device has all that is before them."""
        end = next((at for at, each in enumerate(keys) if not (has[at] or each in served)), len(keys))
        return set(keys[end : self.ready_end(keys, end)]) if end and all(has[:end]) else set()

    def load_groups(self, hold: Lease, by_layer: bool, timeout: float | None = None) -> None:
        """All that is held is ordered by one job, or nothing is."""
        model, per_chunk = self.holds[hold], self.setup.per_chunk
        mine = self.take_blocks(len(model.keys) * per_chunk)
        if not mine:
            return
        blocks, left = {}, list(mine)
        for group in range(self.setup.groups):
            count = sum(group_of(each) == group for each in model.keys) * per_chunk
            blocks[group] = tuple(left[:count])
            left = left[count:]
        lost = len(self.left_of(model)) < len(model.keys)
        sources = [] if lost else [self.warmest(each) for each in model.keys]
        reasons = [self.reason(each) for each in model.keys]
        before, free = dict(self.resident), self.free(HOST)
        self.load_timeout = timeout or LOAD
        model.deadline = self.now + self.load_timeout
        answer = self.call("load", hold, blocks, by_layer=by_layer, timeout=timeout)
        model.has_load, model.blocks = True, mine
        self.loads.append(model)
        self.carry()
        if answer.jobs:
            assert [part.num_chunks for part in answer.jobs] == [len(model.keys)]
            model.parts, model.sources = [self.jobs[answer.jobs[0].job]], sources
            self.check_sections(model.parts[0].transfer, model.keys, mine, by_layer)
        else:
            cold = [each for each in model.keys if (each, HOST) not in before]
            assert lost or self.setup.slabs or free < len(cold), "nothing was ordered although there was room"
            no_room = [MissReason.NO_ROOM if each in cold else MissReason.AFTER_MISS for each in model.keys]
            model.cut = reasons if lost else no_room
            self.conclude(model, MissReason.CANCELLED)
        self.check()

    def check_sections(self, t: Transfer, keys: Sequence[Key], blocks: Sequence[int], by_layer: bool) -> None:
        """The blocks of each group go to its chunks, in order."""
        assert [item.key for item in t.items] == list(keys)
        assert [place.block for place in places(t, self.setup.per_chunk)] == list(blocks)
        assert t.by_layer == by_layer

    # ------------------------------------------------------------------ independent chunks

    def store_independent(self, path: str, group: int, first: int, before_eviction: bool) -> None:
        """Independent chunks of a group are complete: each is stored for itself, the last window first."""
        keys, per_chunk = chunks(path, group), self.setup.per_chunk
        blocks = self.take_blocks((len(keys) - first) * per_chunk)
        if not blocks:
            return
        self.compute(keys[first:], blocks)
        wanted = self.setup.offload != "write_back" or before_eviction
        fresh, drops, free = self.fresh(keys, first), self.drops(), self.free(HOST)
        offload = self.call(
            "store", {group: GroupKeys(keys, first)}, {group: tuple(blocks)}, before_eviction=before_eviction
        )[group]
        if wanted:
            self.check_independent(keys, first, fresh, offload, self.drops() - drops, free)
        else:
            assert offload == ScheduledStore(None)
        self.settle()
        if offload.job is None:
            self.give_blocks(blocks)
            return
        job = self.jobs[offload.job]
        job.blocks = blocks
        assert tuple(item.destination for item in job.transfer.items) == tuple(offload.slots)
        for place in places(job.transfer, per_chunk):
            assert place.block == blocks[(place.chunk - first) * per_chunk + place.sub]

    def store_independent_by_host(self, path: str, group: int, first: int) -> None:
        """The same, of which the host moves the bytes."""
        keys = chunks(path, group)
        fresh, drops, free = self.fresh(keys, first), self.drops(), self.free(HOST)
        offload = self.call("store", {group: GroupKeys(keys, first)})[group]
        self.check_independent(keys, first, fresh, offload, self.drops() - drops, free)
        self.note_host_store(keys, offload)
        self.settle()

    def fresh(self, keys: Sequence[Key], first: int) -> list[int]:
        return [at for at in range(first, len(keys)) if self.is_absent(keys[at])]

    def drops(self) -> int:
        return self.cache.counters.drops[HOST].total()

    def check_independent(
        self, keys: Sequence[Key], first: int, fresh: list[int], offload: ScheduledStore, dropped: int, free: int
    ) -> None:
        """What was new was accepted, from the end on, or dropped and counted."""
        taken = list(offload.positions)
        often = self.setup.offload == "write_through_selective"
        assert taken == (sorted(set(taken).intersection(fresh)) if often else fresh[len(fresh) - len(taken) :])
        assert dropped == len(fresh) - len(taken)
        allowed = len(fresh) <= self.setup.max_writes - self.writing(Route(DEVICE, HOST))
        assert not dropped or self.setup.slabs or often or free < len(fresh) or not allowed
        self.look()
        had = [at for at in range(first, len(keys)) if not self.is_absent(keys[at])]
        assert sorted([*offload.already_stored, *taken]) == had
        assert offload.stored_prefix == next((at for at in range(first, len(keys)) if at not in had), len(keys))

    def lease_each(self, keys: Sequence[Key], group: int, request: str | None) -> None:
        """Those of the chunks that are ready are leased, each by itself."""
        ready = [each for each in keys if self.is_readable(each)]
        found = self.call("lookup", {group: GroupKeys(keys)}, self.now, independent=True, request=request)
        assert found.num_chunks == len(ready)
        self.held(found.lease, ModelHold(ready, request))
        self.settle()

    def load_by_host(self, keys: Sequence[Key], group: int) -> None:
        """The host reads chunks from the host tier, if all are ready there."""
        warm = all(self.is_readable(each) and self.is_ready(each, HOST) for each in keys)
        if not keys or not warm:
            self.refused(CacheError, "load", {group: GroupKeys(keys)})
            return
        (loan,) = self.call("load", {group: GroupKeys(keys)}).jobs
        self.host_reads.add(loan.job)
        assert list(loan.slots) == [self.resident[each, HOST].slot for each in keys]
        items = tuple(Item(each, None, slot, None) for each, slot in zip(keys, loan.slots, strict=True))
        self.note_host_job(
            Transfer(loan.job, Route(HOST, DEVICE), items, generation=self.generation, ranks=self.setup.ranks)
        )
        self.settle()
