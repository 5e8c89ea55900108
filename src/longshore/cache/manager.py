"""`TieredCache`: what is where, what moves, what is evicted.

    lookup ─► Found ─► prefetch, load ─► progress ─► release    a prompt that returns
    store                                                       blocks that are complete, or about to be evicted
    take() ─► commands              apply(results) ◄─           nothing else goes in or out

Sans I/O: no torch, no threads, no clock and no randomness of its own; the same calls give the same log. Every method
validates before it changes anything. `store` holds the state of the tiers, `transfers`
the jobs in flight; `lookups`, `load` (with prefetches), `offload` and `remote` decide what is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import cast

from longshore.boundary import DEVICE, Command, Discard, Key, ProbeResult, Result, Route, TransferResult
from longshore.cache import inspect
from longshore.cache.events import Event
from longshore.cache.eviction.hit_rates import Return
from longshore.cache.eviction.hit_rates import check as check_return
from longshore.cache.groups import GroupKeys, check_blocks, check_distinct, check_paths
from longshore.cache.load import Loader, Prefetcher
from longshore.cache.lookups import Leases, Lookups, check_first
from longshore.cache.offload import Offloader
from longshore.cache.recovery import Chunk, Recovered, adopt
from longshore.cache.remote import Exchange
from longshore.cache.settings import CacheSettings, DeviceBlocks, PrefetchPolicy, TierSpec, seconds
from longshore.cache.settings import check as check_retention
from longshore.cache.store import Level, Store
from longshore.cache.transfers import Load, Transfers
from longshore.cache.types import (
    Counters,
    DeviceCopy,
    Found,
    Lease,
    LoadOrder,
    MissReason,
    Part,
    Progress,
    Resident,
    StoreOrder,
    TierStats,
    Until,
)
from longshore.errors import CacheError


class TieredCache:
    """The control plane of one engine: an index over `tiers`, warmest first, below the engine's own device cache.

    Calls name chunks by `Mapping`s from the number of a KV cache group to `GroupKeys`; an engine with one group has
    `{0: GroupKeys(keys)}`. Times are seconds on the caller's clock. What cannot be is a `CacheError`.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        settings: CacheSettings | None = None,
        *,
        foreign: Sequence[str] = (),
        generation: int = 0,
    ) -> None:
        names, theirs = tuple(tier.name for tier in tiers), tuple(foreign)
        if not names or len({DEVICE, *names, *theirs}) != 1 + len(names) + len(theirs):
            raise CacheError(f"there is one tier or more below the device, of different names; got {names}, {theirs}")
        self.settings = settings or CacheSettings()
        self.made_of = tuple(tiers), self.settings, theirs, generation
        """Arguments of the constructor, for the log of a fault."""
        rules = self.settings.rules(names, theirs)
        # Down from neighbour to neighbour, up straight into the host tier: all tiers reach its memory.
        down, up = pairwise((DEVICE, *names)), ((name, names[0] if tier else DEVICE) for tier, name in enumerate(names))
        to_and_fro = [route for name in theirs for route in ((names[0], name), (name, names[0]))]
        routes = tuple(str(Route(*route)) for route in (*down, *up, *to_and_fro))
        self.counters = Counters.zero(names, routes, theirs)
        levels = [Level(tier.name, tier.make_pool(), tier.policy) for tier in tiers]
        sizes = {len(level.pool.slabs.image_bytes) for level in levels}
        if len(sizes) > 1 or any(not 0 <= pool < min(sizes) for pool in self.settings.pools):
            raise CacheError(f"all tiers have the pools of {self.settings.pools}, got {sorted(sizes)} image sizes")
        thresholds = [rule.threshold if rule.selective else 0 for rule in rules[1 : len(names)]]
        events, width = self.settings.events, self.settings.token_width
        self._store = Store(levels, self.counters, thresholds=thresholds, events=events, token_width=width)
        self._store.log.hidden = self.settings.self_test_key
        self._transfers = Transfers(self._store, self.settings, generation)
        self._loader = Loader(self._transfers)
        self._offloader = Offloader(self._transfers, rules[: len(names)], is_only=len(names) == 1 and not theirs)
        self._exchange = Exchange(self._transfers, theirs, rules[len(names) :])
        self._leases = Leases(self._store)
        self._prefetcher = Prefetcher(self._transfers, self._offloader, self._leases)
        self._lookups = Lookups(self._transfers, self._leases, self._exchange, self._advance)
        self._device = DeviceBlocks(self.settings.device_blocks)

    @property
    def generation(self) -> int:
        """How many resets there were, over all processes that shared the persistent tier."""
        return self._transfers.generation

    @property
    def held(self) -> int:
        """Leases that were not released, and chunks that are kept until the step ends."""
        return len(self._leases)

    @property
    def jobs_in_flight(self) -> int:
        """Jobs whose results have not come."""
        return len(self._transfers.jobs)

    # ------------------------------------------------------------------ a prompt that returns

    def lookup(
        self,
        paths: Mapping[int, GroupKeys],
        now: float,
        *,
        until: Until = Until.RELEASE,
        each: bool = False,
        request: str | None = None,
        turn: int | None = None,
        returns: Return | None = None,
        count: bool = True,
    ) -> Found:
        """How much of a prompt the tiers have, kept from eviction `until` then.

        With one path, the longest run of ready chunks from its `first` on. It is found by bisection, in microseconds
        whatever its length, as a key names its whole prefix. Behind an orphan, a chunk whose parent no tier has, it is
        found only from a `first` there, one chunk after the other. With the paths of all groups, or one that says what
        the `device` has, the longest prefix at which every group is served. With `each`, where each chunk is by itself:
        then the keys need not follow one another, and nothing counts as a miss. A chunk that cannot be reached yet,
        because one before it is on its way, is in flight itself.

        What is not known of foreign tiers is asked for, and never waited for.

        Args:
            paths: By group.
            now: Seconds.
            until: `NOTHING` also draws no turn, and asks no foreign tier.
            each: Look at each chunk by itself.
            request: Its name, for events and `release`.
            turn: What an earlier lookup for the request has said; chunks that it uses several times count once.
            returns: What is known about when the request's chunks are used again; of the first lookup for a request.
            count: Count what was not found as misses, and have the request among the events. An engine whose scheduler
                asks again and again while a request waits does so once.
        """
        self._check_time(now)
        self._store.check_turn(turn)
        check_paths(paths)
        check_return(returns)
        if not isinstance(until, Until):
            raise CacheError(f"a lookup keeps what it found for one of {list(Until)}, got {until!r}")
        if each:
            return self._lookups.chunks(paths, now, until, request, turn, returns)
        if len(paths) == 1 and next(iter(paths.values())).device is None:
            ((group, path),) = paths.items()
            return self._lookups.path(group, path, now, until, request, turn, returns, count=count)
        return self._lookups.groups(paths, now, until, request, turn, returns, count=count)

    def path_to(self, key: Key) -> list[Key]:
        """The keys from the first chunk of a prompt to `key`, for hosts that do not say what is before it.

        None if no tier has, or will have, the chunk; or if no tier has the chunk before it.
        """
        return self._store.index.path_to(key)

    def prefetch(
        self,
        what: Lease | Mapping[int, GroupKeys],
        now: float,
        *,
        policy: PrefetchPolicy | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Bring chunks into the warmest tier while their request waits; returns the first jobs, perhaps none.

        Of a lease what colder tiers have of it. `progress` says when the request need not wait any longer: by `policy`,
        `settings.prefetch` if it is `None`, and `timeout` seconds, which only a policy of `TIMEOUT` has. Nothing that
        is not backed up makes way: a policy that waits has more backed up where room is short, and takes turns with
        other such prefetches. What is on its way for others is joined, as a load joins this; what nobody else waits for
        is called off when the time is over, or the lease is released. A second call takes the place of the first.

        Of paths what foreign tiers are known to have behind the ready prefix, from `first` on; with the paths of all
        groups what the longest prefix needs of each. What has arrived is found by the next lookup. What is not known is
        asked for. These outlive the request.
        """
        self._check_time(now)
        if not isinstance(what, Mapping):
            record = self._leases.get(what)
            policy, longest = self._prefetcher.check(policy, timeout)
            self._advance(now)
            return tuple(sorted(self._prefetcher.prefetch(record, policy, longest).jobs))
        if policy is not None or timeout is not None:
            raise CacheError("a policy and a timeout are of the prefetch of a lease")
        check_paths(what)
        if len(what) == 1 and next(iter(what.values())).device is None:
            ((group, path),) = what.items()
            return self._lookups.fetch_path(group, path, now)
        return self._lookups.fetch(what, now)

    def load(
        self,
        what: Lease | Mapping[int, GroupKeys] | Mapping[int, DeviceCopy],
        blocks: Mapping[int, Sequence[int]] | None = None,
        *,
        skip: int = 0,
        tokens: int | None = None,
        by_layer: bool = False,
        timeout: float | None = None,
        turn: int | None = None,
    ) -> LoadOrder:
        """Order chunks onto the device, by group, as far as the host tier can make room now. A lease serves one load.

        Args:
            what: A lease of a lookup; or chunks that are ready in the warmest tier, which the host reads itself: their
                slots stay as they are until every rank has reported the job, or it was released; or device blocks to
                copy.
            blocks: Device blocks, by group, in logical order; `None` where the host moves the bytes. Of a lease on one
                path, the first is sub-block `skip` of the first chunk, and the last may be any sub-block of any. Of a
                lease on all groups those of `Need.load`, and of as many blocks of a partial match as its tokens take.
            skip: Leading sub-blocks of the first chunk that the device has already.
            tokens: Leading tokens to load of the last block of a lease on one path, as a partial match says; `None`
                loads all.
            by_layer: Have each job go layer after layer, those of all groups in the model's order, so that compute may
                begin before all have arrived.
            timeout: Seconds after which what has arrived is the outcome, at the next `apply`, whatever the movers do
                meanwhile; `settings.load_timeout` if it is `None`.
            turn: Of the request, for chunks without a lease.

        Chunks of one path for which there is no room are left out, and counted as misses, with those behind them. Of
        all groups it is all or nothing.
        """
        if isinstance(what, Mapping):
            if skip or tokens is not None or by_layer or timeout is not None:
                raise CacheError("`skip`, `tokens`, `by_layer` and `timeout` are of the load of a lease")
            copies = {group: copy for group, copy in what.items() if isinstance(copy, DeviceCopy)}
            if copies:
                if len(copies) < len(what):
                    raise CacheError("a load is of chunks, or of device blocks, not of both")
                return self._copy_inside(copies, check_blocks({} if blocks is None else blocks, copies))
            paths = cast("Mapping[int, GroupKeys]", what)
            check_paths(paths)
            if blocks is not None or any(path.first for path in paths.values()):
                raise CacheError("chunks without a lease are read by the host: they have no blocks, and no `first`")
            self._device.check(())
            self._store.check_turn(turn)
            warm = [self._lookups.warm(path.keys, group) for group, path in paths.items()]
            lent = [(len(keys), self._loader.lease_slots(keys, at, turn)) for keys, at in warm]
            return LoadOrder(sum(count for count, _ in lent), tuple(Part(job, n, slots) for n, (job, slots) in lent))
        record, longest = self._leases.to_load(what), seconds(timeout, self.settings.load_timeout)
        blocks = check_blocks({} if blocks is None else blocks, [part.group for part in record.parts])
        if record.is_multi_group:
            if skip or tokens is not None:
                raise CacheError(
                    "`skip` and `tokens` are of the load of one group; `Need` says what to load of several"
                )
            mine = [blocks.get(group, ()) for group in range(len(self.settings.groups))]
            sections = self._lookups.sections(record, mine)
            for each in mine:
                self._device.check(each)
            self._store.serve(record.turn)
            nodes, keys = record.nodes(self._store.index), record.keys
            record.load = self._loader.load_together(nodes, keys, sections, timeout=longest, by_layer=by_layer)
            name = record.request
            record.load.asked = [(name and f"{name}/{part.group}", part.keys) for part in record.parts]
            return self._ordered(record.load)
        (part,), per_chunk = record.parts, self.settings.blocks_per_chunk
        group, into = part.group, blocks.get(part.group, ())
        chunks, held = -(-(skip + len(into)) // per_chunk), len(part.keys)
        if not 0 <= skip < per_chunk or not into or chunks > held:
            raise CacheError(f"{len(into)} blocks after {skip} of {per_chunk} do not lie within {held} leased chunks")
        self._device.check(into)
        self._store.check_pool([part.pins[0].node], self.settings.pool_of(group))
        self._check_tokens(tokens, group)
        self._store.serve(record.turn)
        record.load = self._loader.load(
            part.keys[:chunks],
            into,
            part.positions[0] * per_chunk + skip,
            timeout=longest,
            tail=part.pins[0].node,
            held=held,
            group=group,
            by_layer=by_layer,
            tokens=tokens,
        )
        record.load.asked = [(record.request, part.keys[:chunks])]
        return self._ordered(record.load)

    def _copy_inside(self, copies: Mapping[int, DeviceCopy], blocks: Mapping[int, Sequence[int]]) -> LoadOrder:
        """Copies between device blocks: the tiers have no part in it, the jobs keep their place among all others."""
        for group, (sources, tokens) in copies.items():
            into = blocks.get(group, ())
            if len(sources) != len(into) or not into or any(source.tier != DEVICE for source in sources):
                raise CacheError(f"expected a device slot to copy from for each of {len(into)} blocks, got {sources}")
            self._device.check(into)
            self._device.check(list({source.index for source in sources}))
            self._check_tokens(tokens, group)
        parts = [
            Part(self._transfers.copy_inside(sources, blocks[group], tokens, group), 0)
            for group, (sources, tokens) in copies.items()
        ]
        return LoadOrder(0, tuple(parts))

    def progress(self, of: Lease | int) -> Progress:
        """How far a lease, a job or a probe has come. A job that has ended no longer touches its device blocks."""
        if isinstance(of, int):
            return Progress(
                of not in self._transfers.jobs and not (self._exchange.tiers and self._exchange.is_asking(of))
            )
        record = self._leases.get(of)
        if record.load is not None:
            return Progress(record.load.outcome is not None, record.load.outcome)
        if self._prefetcher.is_waiting(record):
            return Progress(is_over=False)
        return Progress(is_over=True, runs=self._store.runs(record.nodes(self._store.index)))

    def release(self, what: Lease | str | int) -> int:
        """Let go of a lease, of all leases of a request, or of a job whose bytes the host will not move; how many.

        Loads onto the device that have not ended are cancelled, and end when their movers say so. A lease that was
        released before is a `LeaseError`, a job that is none a `JobError`.
        """
        if isinstance(what, int):
            self._transfers.withdraw(what)
            return 1
        leases = self._leases.of(what) if isinstance(what, str) else [what]
        for lease in leases:
            record = self._leases.get(lease)
            if record.load is not None and record.load.outcome is None:
                self._transfers.cancel_load(record.load)
                self._conclude(record.load, MissReason.CANCELLED)
            if record.prefetch is not None:
                self._prefetcher.cancel(record.prefetch)
            self._leases.drop(lease)
        return len(leases)

    # ------------------------------------------------------------------ blocks that are complete

    def store(
        self,
        paths: Mapping[int, GroupKeys],
        blocks: Mapping[int, Sequence[int]] | None = None,
        *,
        evicting: bool = False,
        patient: bool = False,
        turn: int | None = None,
    ) -> dict[int, StoreOrder]:
        """Chunks from `first` on of each path are complete on the device, or about to be evicted; what is taken.

        What a tier has already is not written again; heads are taken before tails. Chunks behind one that no tier has
        are orphans: they take free slots only, and go first.

        Args:
            paths: By group; each from the first chunk of the prompt.
            blocks: Device blocks of the chunks from `first` on, by group; they stay unchanged until the job has ended.
                `None` where the host moves the bytes, into the slots that it is told: it reports the job, or releases
                it.
            evicting: Whether the blocks are about to be evicted: the write policy decides what is stored when.
            patient: Take the chunks of a path together, or not yet (`StoreOrder.again`), as long as room is being made
                that all of them fit into.
            turn: Of the request; without one it is that of the last request that began.
        """
        self._store.check_turn(turn)
        check_paths(paths)
        blocks = None if blocks is None else check_blocks(blocks, paths)
        for group, path in paths.items():
            check_retention(path.retention)
            check_first(path.names, path.first)
            if path.slid and not self.settings.stands_alone(group):
                raise CacheError(f"no window slides past chunks of group {group}: they do not stand alone")
            self._store.index.find_alone(path.slid)
            mine = () if blocks is None else blocks.get(group, ())
            expected = 0 if blocks is None else (len(path.names) - path.first) * self.settings.blocks_per_chunk
            if len(mine) != expected:
                raise CacheError(f"{len(path.names) - path.first} chunks have {expected} blocks, got {len(mine)}")
            self._device.check(mine)
        if len(paths) > 1:
            check_distinct([key for path in paths.values() for keys in (path.names, path.slid) for key in keys])
        nodes = {group: self._offloader.check(path, group) for group, path in paths.items()}
        orders = dict[int, StoreOrder]()
        for group, path in paths.items():
            if orders:  # which may have evicted some
                nodes[group] = self._offloader.check(path, group)
            into = None if blocks is None else blocks.get(group, ())
            orders[group] = self._offloader.store(
                path, nodes[group], into, group, evicting=evicting or blocks is None, patient=patient, turn=turn
            )
            if path.slid and not orders[group].again:
                self._store.windows.slide([node for node in self._store.index.find_alone(path.slid) if node])
        return orders

    def discard(self, keys: Iterable[Key], tier: str) -> int:
        """Remove the copies of a path in `tier` that nothing holds, reads or needs to be reached; says how many."""
        return self._transfers.evictor.discard(list(keys), self._tier(tier))

    def flush(self) -> bool:
        """Order backups of all that only the host tier has; says whether there is nothing left to order or wait for."""
        self._offloader.clean(all_of_host=True)
        return not self._transfers.jobs

    # ------------------------------------------------------------------ commands and results

    def take(self) -> list[Command]:
        """Commands since the last call, in order, each exactly once."""
        commands, self._transfers.outbox = self._transfers.outbox, []
        for level in self._store.levels:
            if level.pool.freed and (slots := level.pool.take_freed()):
                commands.append(Discard(level.name, slots))
        return commands

    def apply(self, results: Sequence[Result], now: float) -> None:
        """What became of earlier commands, and that time has passed, which ends the waits whose deadline has come.

        Their movers are told, and own their slots until they end. A job or probe that is not in flight, or reported
        twice by a rank, is a `JobError`, and nothing is applied.
        """
        self._check_time(now)
        answers = [result for result in results if isinstance(result, ProbeResult)]
        if answers:
            self._exchange.check(answers)
        ended = [result for result in results if isinstance(result, TransferResult)]
        loads = self._transfers.apply(ended) if ended else []
        self._advance(now)
        if answers:
            self._exchange.hear(answers)
        for load in loads:
            if load.outcome is None and not load.pending:
                self._conclude(load, MissReason.CANCELLED)
        self._proceed()

    def end_step(self) -> None:
        """The engine's step is over: what lookups kept until here is not kept any more, and backups are ordered."""
        self._leases.end_step()
        self._proceed()

    # ------------------------------------------------------------------ life

    def adopt(self, tier: str, found: Iterable[Chunk | tuple[int, Key, Key | None]], others: Sequence[int] = ()) -> int:
        """Take in what a persistent tier holds at start: (slot, key, parent, pool), oldest first; says how many.

        Slots of `others` hold what is not for this cache, least useful first: they are given out after all empty ones.
        Chunks whose parents are gone are orphans, and wait for these. Two chunks in one slot, or two of one
        key, are a `CacheError`, and nothing is taken in.
        """
        at, chunks = self._tier(tier), list(found)
        self._store.pools[at].check_slots(others)
        named = set(map(len, chunks)) <= {4}  # as from a tier, where there may be half a million of them
        whole = cast("list[Chunk]", chunks) if named else [Recovered(*each) for each in chunks]
        adopted = adopt(self._store, at, whole)
        self._store.pools[at].give_last(others)
        return adopted

    def sleep(self) -> bool:
        """The device's memory is about to be freed: cancel what touches it, and take no orders that would.

        Says whether nothing touches it any more; until then it must stay, and this is to be asked again when results
        have been applied. The tiers keep what they have; to forget that too, `reset`.
        """
        self._device.asleep = True
        return self._transfers.cancel_device_jobs()

    def wake(self, blocks: int | None = None) -> None:
        """The device's memory is back, and empty: a pool of so many `blocks`, or of as many as before.

        Raises `CacheError` if `blocks` are named while a job works on the pool before it.
        """
        if blocks is not None:
            routes = [job.transfer.route for job in self._transfers.jobs.values()]
            if busy := sum(DEVICE in (route.source, route.destination) for route in routes):
                raise CacheError(
                    f"{busy} jobs in flight read or write blocks of the device pool: it cannot be replaced"
                )
            self._device = DeviceBlocks(blocks)
        self._device.asleep = False

    def resize(self, tier: str, slots: int, *, discard: bool = False) -> None:
        """Have `slots` slots (slabs, where images have several sizes) in `tier`; the caller gives or takes the memory.

        What lies in slots above the new size is in the way: that is a `CapacityError`, unless it is to be discarded,
        and nothing works on it, holds it, or needs it to be reached. Nothing has changed after an error.
        """
        self._transfers.evictor.resize(self._tier(tier), slots, discard=discard)

    def reset(self, *, keep: Sequence[str] = (), weights: bool = False) -> int:
        """Forget everything, here and after a restart; returns the new generation.

        Jobs in flight are cancelled; they own their slots until their results come, and change nothing else. Nothing
        that was loaded before counts as arrived.

        Args:
            keep: The coldest tiers, warmest of them first, whose ready chunks stay: the generation does, too.
            weights: Weights have changed: what is stored from now on is not for engines that start later.

        Raises `CacheError` if `keep` are not the coldest tiers, or if `weights` have changed, and something is kept.
        """
        names = tuple(level.name for level in self._store.levels)
        first = len(names) - len(keep)
        if tuple(keep) != names[first:] or (keep and weights):
            raise CacheError(
                f"a reset keeps the coldest of the tiers {names}, and nothing of other weights; got {tuple(keep)}"
                f"{' for new weights' * weights}"
            )
        for record in self._leases:
            if record.load is not None:
                self._count_misses(record.load, record.load.revoke())
        if keep:
            self._leases.end_step()
        self._prefetcher.clear()
        self._transfers.forget(first, weights=weights)
        if not keep:
            self._leases.forget_step()
            self._exchange.clear()
        return self.generation

    # ------------------------------------------------------------------ watching

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        return inspect.stats(self._store)

    def residents(self) -> list[Resident]:
        """Every chunk that has a slot and can be found, or soon can, once for each tier that it is in."""
        return inspect.residents(self._store)

    def events(self, limit: int | None = None) -> list[Event]:
        """What happened since the last call, in order, as far as it was kept (`CacheSettings.events`).

        At most `limit` events, and one more that says how many are missing, if some are; what is left comes next time.
        """
        if limit is not None and limit < 1:
            raise CacheError(f"a limit of events is at least 1, got {limit}")
        return self._store.log.pull(limit)

    def check_integrity(self) -> None:
        """Walk every structure; raise `CacheError` where two of them disagree."""
        inspect.check_integrity(self._store)
        self._transfers.check_integrity()
        self._leases.check_integrity()
        self._exchange.check_integrity()

    # ------------------------------------------------------------------ inside

    def _advance(self, now: float) -> None:
        self._transfers.now = self._store.log.now = max(self._transfers.now, now)
        if self._store.priorities.used:
            self._store.priorities.expire(self._transfers.now)
        for wait in self._transfers.waits.due(self._transfers.now) if self._transfers.waits.open else ():
            if wait.load is not None and wait.load.outcome is None:
                self._transfers.cancel_load(wait.load)
                self._conclude(wait.load, MissReason.DEADLINE)
            self._transfers.cancel_wait(wait)

    def _ordered(self, load: Load) -> LoadOrder:
        """What was ordered of `load`; nothing at all is an outcome already."""
        if not load.parts:
            self._conclude(load, MissReason.CANCELLED)
        parts = tuple(Part(job.transfer.job, len(job.statuses)) for job in load.parts)
        return LoadOrder(sum(part.chunks for part in parts), parts)

    def _proceed(self) -> None:
        """Order what was waiting for room or for its time: prefetches, then writes."""
        if self._prefetcher.queue:
            self._prefetcher.proceed()
        if self._store.index.called or any(self._store.backlog.counts):
            self._offloader.clean()
        if self._exchange.tiers:
            self._exchange.proceed()

    def _conclude(self, load: Load, unfinished: MissReason) -> None:
        self._count_misses(load, load.conclude(unfinished))
        hidden = self._store.log.hidden
        if load.outcome is not None and all(len(keys) != 1 or keys[0] != hidden for _, keys in load.asked):
            self.counters.hits.update(load.outcome.sources)
        self._transfers.waits.close(load.wait)

    def _count_misses(self, load: Load, misses: Sequence[MissReason]) -> None:
        self.counters.misses.update(misses)
        if self._store.log.on and load.outcome is not None:
            self._store.log.loaded(load.asked, load.outcome.chunks, misses)

    def _tier(self, name: str) -> int:
        for tier, level in enumerate(self._store.levels):
            if level.name == name:
                return tier
        raise CacheError(f"no tier is called {name!r}; there are {[level.name for level in self._store.levels]}")

    def _check_tokens(self, tokens: int | None, group: int) -> None:
        """Raise `CacheError` unless a block of `group`, whose size is known if there are `groups`, has `tokens`."""
        most = self.settings.group(group)[0].block_size if self.settings.groups else tokens
        if tokens is not None and not 0 < tokens <= (most or 0):
            raise CacheError(f"of a block of group {group} 1 to {most} tokens are moved, not {tokens}")

    @staticmethod
    def _check_time(now: float) -> None:
        """Raise `CacheError` for what is no clock's reading: time never comes back from infinity."""
        if not isinstance(now, int | float) or not math.isfinite(now):
            raise CacheError(f"a time is a finite number of seconds, got {now!r}")
