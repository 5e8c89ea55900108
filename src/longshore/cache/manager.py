"""`TieredCache`: the control plane. It decides what is stored in which tier, what is copied and what is evicted.

    lookup ─► LookupResult ─► prefetch, load ─► progress ─► release    a prompt that was computed before
    store                                                       blocks that are complete, or about to be evicted
    take_commands() ─►              apply_results() ◄─          the only input and output

Sans I/O: no torch, threads, clock or randomness. The same calls give the same log. Each method first validates its
arguments. `state` holds the state of the tiers, `transfers` the jobs in flight; `lookups`, `load` (with prefetches),
`offload` and `remote` decide what is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, cast

from longshore.boundary import (
    DEVICE,
    Cancel,
    Command,
    DeleteRecords,
    Key,
    ProbeResult,
    Result,
    Route,
    StoredChunk,
    StoredChunks,
    TransferResult,
)
from longshore.cache.adoption import Chunk, adopt
from longshore.cache.events import Announcements, Contents, Event
from longshore.cache.eviction_policies.hit_rates import ReuseHint, check_reuse_hint
from longshore.cache.load import Loader, Prefetcher
from longshore.cache.lookups import Leases, LookupCall, Lookups, check_start
from longshore.cache.offload import Offloader
from longshore.cache.remote import RemoteTiers
from longshore.cache.settings import CacheSettings, DeviceBlocks, PrefetchPolicy, TierSpec, check_retention, timeout_of
from longshore.cache.state import CacheState, OwnedTier
from longshore.cache.transfers import Load, Transfers
from longshore.cache.types import (
    Counters,
    DeviceCopy,
    GroupKeys,
    Lease,
    LoadJob,
    LookupResult,
    MissReason,
    Progress,
    Protection,
    ScheduledLoad,
    ScheduledStore,
    TierStats,
    check_blocks,
    check_distinct,
    check_paths,
    check_time,
    origins_of,
)
from longshore.errors import CacheError


class TieredCache:
    """The control plane of one engine: an index over `tiers`, warmest first, below the engine's own device cache.

    The first one, host memory or, with GPUDirect Storage, files, is called the host tier. Calls name chunks by
    `GroupKeys`, by KV cache group. Times are seconds. Invalid arguments raise `CacheError`.
    """

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        settings: CacheSettings | None = None,
        *,
        remote: Sequence[str] = (),
        generation: int = 0,
    ) -> None:
        names, theirs = tuple(tier.name for tier in tiers), tuple(remote)
        if not names or len({DEVICE, *names, *theirs}) != 1 + len(names) + len(theirs):
            raise CacheError(f"expected one tier or more, with different names; got tiers {names}, remote {theirs}")
        self.settings = settings or CacheSettings()
        self.constructor_arguments = tuple(tiers), self.settings, theirs, generation
        """Arguments of the constructor, for the call log of a fault."""
        rules = self.settings.rules(names, theirs)
        # Copies go down by one tier at a time, and up into the host tier directly: all tiers can access host memory.
        down, up = pairwise((DEVICE, *names)), ((name, names[0] if tier else DEVICE) for tier, name in enumerate(names))
        to_and_fro = [route for name in theirs for route in ((names[0], name), (name, names[0]))]
        self.counters = Counters.zero(names, tuple(str(Route(*route)) for route in (*down, *up, *to_and_fro)), theirs)
        owned = [OwnedTier(tier.name, tier.make_pool(), tier.policy) for tier in tiers]
        sizes = {len(each.pool.slabs.image_bytes) for each in owned}
        if len(sizes) > 1 or any(not 0 <= each < min(sizes) for each in self.settings.size_classes):
            counts = f"tiers with {sorted(sizes)} image sizes"
            raise CacheError(f"expected image sizes for the size classes {self.settings.size_classes}, got {counts}")
        thresholds = [rule.threshold if rule.selective else 0 for rule in rules[1 : len(names)]]
        self._state = CacheState(owned, self.counters, self.settings, thresholds)
        self._transfers = Transfers(self._state, self.settings, generation)
        self._loader = Loader(self._transfers)
        shared = bool(theirs) or self.settings.is_served
        self._offloader = Offloader(self._transfers, rules[: len(names)], is_shared=shared)
        self._remote = RemoteTiers(self._transfers, theirs, rules[len(names) :])
        self._leases = Leases(self._state)
        self._prefetcher = Prefetcher(self._transfers, self._offloader, self._leases)
        self._lookups = Lookups(self._transfers, self._leases, self._remote, self._advance)
        self._device = DeviceBlocks(self.settings.device_blocks)
        self._changes_backed_up = -1
        """`CacheState.changes` when backups were scheduled last, so that their own changes cause another look."""

    @property
    def generation(self) -> int:
        """Number of resets, over all processes that have used the persistent tier."""
        return self._transfers.generation

    @property
    def leases(self) -> int:
        """Number of leases not released."""
        return len(self._leases)

    @property
    def protected(self) -> int:
        """Number of chunks that lookups protect until the end of the step."""
        return self._leases.protected

    @property
    def backups_needed(self) -> int:
        """Number of chunks of the host tier that are to be copied down."""
        return self._state.backlog.counts[0]

    @property
    def jobs_in_flight(self) -> int:
        """Number of jobs without a result."""
        return len(self._transfers.jobs)

    def lookup(
        self,
        paths: Mapping[int, GroupKeys],
        now: float,
        *,
        protect: Protection = Protection.LEASE,
        independent: bool = False,
        remote_tiers: Collection[str] | None = None,
        request: str | None = None,
        request_number: int | None = None,
        reuse_hint: ReuseHint | None = None,
        count: bool = True,
    ) -> LookupResult:
        """Find how much of a prompt the tiers have, and protect it from eviction as long as `protect` says.

        With one path: the longest run of ready chunks from its `start` on. Bisection finds it in microseconds, whatever
        its length, because a key identifies its whole prefix. Chunks from an orphan on, whose parent is in no tier, are
        found only if `start` is one of them. With the paths of all groups, or with a path that has a `device`: the
        longest prefix that every group can serve. With `independent`, each key is looked up by itself; they need not
        form a path, and no misses are counted. A chunk is in flight if it or one before it is.

        Remote tiers are asked for chunks that they are not known to have or lack, by lookups of one path and with
        `independent`. A lookup does not wait for them.

        Args:
            paths: Keys by group.
            now: Seconds.
            protect: How long found chunks are not evicted. `NONE` begins no request, and asks only `remote_tiers`.
            independent: Look up each chunk by itself.
            remote_tiers: Those to ask for chunks that they are not known to have or lack: by name, only with
                `independent` and `Protection.NONE`; `()` for none. `None`: a lookup of paths that protects asks all.
            request: Name of the request, for events.
            request_number: As an earlier lookup of this request returned it, so that its uses of a chunk count once.
            reuse_hint: Hint about when its chunks are used again, with the first lookup of a request.
            count: Count misses, and record the request as an event: once for a request that is looked up repeatedly.
        """
        check_time(now)
        self._state.check_request_number(request_number)
        check_paths(paths)
        check_reuse_hint(reuse_hint)
        if not isinstance(protect, Protection):
            raise CacheError(f"protect: expected one of {list(Protection)}, got {protect!r}")
        if remote_tiers and (not independent or protect is not Protection.NONE):
            raise CacheError("remote_tiers requires independent=True and protect=NONE: other lookups ask all or none")
        probes_remote = remote_tiers is None and protect is not Protection.NONE
        call = LookupCall(now, protect, request, request_number, reuse_hint, count, probes_remote)
        if independent:
            return self._lookups.chunks(paths, call, remote_tiers or ())
        if len(paths) == 1 and next(iter(paths.values())).device is None:
            return self._lookups.path(*next(iter(paths.items())), call)
        return self._lookups.groups(paths, call)

    def prefetch(
        self,
        what: Lease | Mapping[int, GroupKeys],
        now: float,
        *,
        policy: PrefetchPolicy | None = None,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """Copy chunks into the host tier while their request waits; returns the first jobs, possibly none.

        Of a lease: its chunks that only colder tiers have. `progress` says when the request may go on: by `policy`,
        `settings.prefetch` if `None`, and after `timeout` seconds, which only `TIMEOUT` has. No dirty chunk is evicted
        for it: a policy that waits schedules backups where room is short, and such prefetches get room one after the
        other. Reads that are in flight for other requests are joined. Reads that no request waits for any more are
        cancelled at the deadline, or when the lease is released. Another call replaces the first.

        Of a path of one group: chunks after the ready prefix that remote tiers are known to have, from `start` on. The
        next lookup finds what has arrived. Remote tiers are asked for chunks of which they have not answered. These
        reads are not cancelled with the request; they end within `timeout` seconds, `settings.load_timeout` if `None`.
        """
        check_time(now)
        if not isinstance(what, Mapping):
            record = self._leases.get(what)
            policy, timeout = self._prefetcher.check(policy, timeout)
            self._advance(now)
            return tuple(sorted(self._prefetcher.prefetch(record, policy, timeout).jobs))
        if policy is not None:
            raise CacheError("expected a `policy` only with a lease")
        timeout = timeout_of(timeout, self.settings.load_timeout)
        check_paths(what)
        if len(what) != 1 or next(iter(what.values())).device is not None:
            raise CacheError(f"expected a lease, or the keys of one group without `device`, got groups {sorted(what)}")
        return self._lookups.fetch(*next(iter(what.items())), now, timeout)

    def load(
        self,
        what: Lease | Mapping[int, GroupKeys] | Mapping[int, DeviceCopy],
        blocks: Mapping[int, Sequence[int]] | None = None,
        *,
        skip: int = 0,
        tokens: int | None = None,
        by_layer: bool = False,
        timeout: float | None = None,
        request_number: int | None = None,
        origins: Mapping[Key, str] | None = None,
        count: bool = True,
    ) -> ScheduledLoad:
        """Load chunks onto the device, by group, as far as the host tier has room now. A lease serves one load.

        Args:
            what: A lease of a lookup; or chunks that are ready in the host tier, which the inference engine reads
                itself: their slots are not written until every rank has reported the job, or it was released; or device
                blocks to copy.
            blocks: Device blocks, by group, in logical order; `None` if the inference engine moves the bytes. For one
                path, the first is block `skip` of the first chunk, and the last may be any block of a chunk.
                For a lease on all groups, the blocks of `GroupMatch.load`, and those that the tokens of a partial match
                take.
            skip: Leading blocks of the first chunk that the device has already.
            tokens: Leading tokens to load of the last block of a lease on one path, as a partial match says; `None`
                loads all.
            by_layer: Copy layer by layer, in the model's order over all groups, so that compute may begin before all
                layers have arrived.
            timeout: Seconds until the load ends with the chunks that have arrived, at the next `apply_results`;
                `settings.load_timeout` if `None`.
            request_number: Number of the request, for chunks without a lease.
            origins: The tiers that chunks were brought up from for this request before, by key. They are hits of these
                tiers; others are hits of the tier that they are read from.
            count: Whether a read of chunks without a lease is a use by a request, and hits: that of a peer is neither.

        Chunks of one path for which the host tier has no room, and those after them, are not loaded, and counted as
        misses. A load of all groups loads all chunks or none.
        """
        self.counters.check_origins(origins)
        if isinstance(what, Mapping):
            if skip or tokens is not None or by_layer or timeout is not None:
                raise CacheError("expected `skip`, `tokens`, `by_layer` and `timeout` only with a lease")
            copies = {group: copy for group, copy in what.items() if isinstance(copy, DeviceCopy)}
            if copies:
                if len(copies) < len(what):
                    raise CacheError("expected chunks or device blocks to load, got both")
                return self._copy_inside(copies, check_blocks({} if blocks is None else blocks, copies))
            paths = cast("Mapping[int, GroupKeys]", what)
            check_paths(paths)
            if blocks is not None or any(path.start for path in paths.values()):
                raise CacheError("expected no `blocks` and no `start` with chunks that the engine reads itself")
            self._device.check(())
            self._state.check_request_number(request_number)
            in_host = [self._lookups.in_host(path.chunks, group) for group, path in paths.items()]
            for keys, _ in in_host:
                self._remote.found(keys)
            lease_slots, pairs = self._loader.lease_slots, zip(paths, in_host, strict=True)
            jobs = tuple(
                LoadJob(*lease_slots(*found, request_number, origins, is_first=not group, count=count))
                for group, found in pairs
            )
            return ScheduledLoad(sum(job.num_chunks for job in jobs), jobs)
        record, timeout = self._leases.to_load(what), timeout_of(timeout, self.settings.load_timeout)
        blocks = check_blocks({} if blocks is None else blocks, [each.group for each in record.groups])
        if record.is_multi_group:
            if skip or tokens is not None:
                raise CacheError("expected `skip` and `tokens` only with a lease on one group")
            mine = [blocks.get(group, ()) for group in range(len(self.settings.groups))]
            sections = self._lookups.sections(record, mine)
            for each in mine:
                self._device.check(each)
            self._state.set_request(record.request_number)
            nodes, keys = record.nodes(self._state.index), record.keys
            record.load = self._loader.load_together(nodes, keys, sections, timeout=timeout, by_layer=by_layer)
            name, load = record.request, record.load
            load.requests = [(name and f"{name}/{each.group}", each.keys) for each in record.groups]
            load.first_group_chunks = sum(len(each.positions) for each in record.groups if not each.group)
            return self._scheduled(load, origins)
        (leased,), size = record.groups, self.settings.blocks_per_chunk
        group, ours = leased.group, blocks.get(leased.group, ())
        chunks, most = -(-(skip + len(ours)) // size), len(leased.positions)
        if not 0 <= skip < size or not ours or chunks > most:
            raise CacheError(f"expected blocks of {most} chunks of {size} blocks, got {len(ours)} with skip={skip}")
        self._device.check(ours)
        self._state.check_size_class([leased.refs[0].node], self.settings.size_class_of(group))
        self.settings.check_tokens(tokens, group)
        self._state.set_request(record.request_number)
        record.load = self._loader.load(record, ours, skip, timeout=timeout, by_layer=by_layer, tokens=tokens)
        return self._scheduled(record.load, origins)

    def _copy_inside(self, copies: Mapping[int, DeviceCopy], blocks: Mapping[int, Sequence[int]]) -> ScheduledLoad:
        """Schedule copies between device blocks, which no tier takes part in, in order with all other jobs."""
        for group, (sources, tokens) in copies.items():
            mine = blocks.get(group, ())
            if len(sources) != len(mine) or not mine or any(source.tier != DEVICE for source in sources):
                raise CacheError(f"expected a device slot to copy from for each of {len(mine)} blocks, got {sources}")
            self._device.check(mine)
            self._device.check(list({source.index for source in sources}))
            self.settings.check_tokens(tokens, group)
        copy = self._transfers.copy_inside
        jobs = (LoadJob(copy(read, blocks[group], tokens, group), 0) for group, (read, tokens) in copies.items())
        return ScheduledLoad(0, tuple(jobs))

    def progress(self, of: Lease | int) -> Progress:
        """The progress of a lease, job or probe. A job that is over does not use its device blocks any more."""
        if isinstance(of, int):
            return Progress(of not in self._transfers.jobs and not (self._remote.tiers and self._remote.is_asking(of)))
        record = self._leases.get(of)
        if record.load is not None:
            return Progress(record.load.outcome is not None, record.load.outcome)
        if record.prefetch is not None and self._prefetcher.is_waiting(record):
            return Progress(is_over=False, lacks_room=record.prefetch.lacks_room and not record.prefetch.jobs)
        return Progress(is_over=True, runs=self._state.runs(record.nodes(self._state.index)))

    def release(self, what: Lease | int) -> None:
        """Release a lease, or a job that the engine carries out itself.

        Loads onto the device in flight are cancelled; they end when their movers report them. Raises `LeaseError` for a
        lease that was released before, `JobError` for a number that is no open job.
        """
        if isinstance(what, int):
            self._transfers.withdraw(what)
            return
        record = self._leases.get(what)
        self._give_up(record.load, MissReason.CANCELLED)
        if record.prefetch is not None:
            self._prefetcher.cancel(record.prefetch)
        self._leases.release(what)

    def store(
        self,
        paths: Mapping[int, GroupKeys],
        blocks: Mapping[int, Sequence[int]] | None = None,
        *,
        before_eviction: bool = False,
        all_or_retry: bool = False,
        defer_rest: bool = False,
        request_number: int | None = None,
    ) -> dict[int, ScheduledStore]:
        """Store chunks from `start` on of each path that are complete on the device, or about to be evicted.

        Chunks that a tier has are not written again. Where room is short, heads are stored before tails. Chunks after
        one that is in no tier are orphans: they take free slots only, and are evicted first.

        Args:
            paths: By group; each from the first chunk of the prompt.
            blocks: Device blocks of the chunks from `start` on, by group, not to be changed until the job has ended.
                `None` if the inference engine moves the bytes into the returned slots, and reports or releases the job.
            before_eviction: Whether the blocks are about to leave the device. The write policy may wait for that.
            all_or_retry: While room for all chunks of a path is being made, store none yet (`ScheduledStore.retry`).
            defer_rest: Drop no chunks for which room is being made: they can be given again (`ScheduledStore.later`).
            request_number: Number of the request; `None` for that of the last request that began.
        """
        self._state.check_request_number(request_number)
        check_paths(paths)
        blocks = None if blocks is None else check_blocks(blocks, paths)
        for group, path in paths.items():
            check_retention(path.retention)
            check_start(path.keys, path.start)
            if path.past_window and not self.settings.is_independent(group):
                raise CacheError(f"expected `past_window` only for groups with a window, got it for group {group}")
            self._state.index.find_independent(path.past_window)
            mine = () if blocks is None else blocks.get(group, ())
            chunks = len(path.keys) - path.start
            expected = 0 if blocks is None else chunks * self.settings.blocks_per_chunk
            if len(mine) != expected:
                raise CacheError(f"expected {expected} blocks of {chunks} chunks, got {len(mine)}")
            self._device.check(mine)
        if len(paths) > 1:
            check_distinct([key for path in paths.values() for keys in (path.keys, path.past_window) for key in keys])
        nodes = {group: self._offloader.check(path, group) for group, path in paths.items()}
        scheduled = dict[int, ScheduledStore]()
        for group, path in paths.items():
            if scheduled:  # those before may have evicted some
                nodes[group] = self._offloader.check(path, group)
            ours = None if blocks is None else blocks.get(group, ())
            scheduled[group] = self._offloader.store(
                path,
                nodes[group],
                ours,
                group,
                before_eviction=before_eviction or blocks is None,
                all_or_retry=all_or_retry,
                defer_rest=defer_rest,
                request_number=request_number,
            )
            if path.past_window and not scheduled[group].retry:
                self._state.windows.slide(list(filter(None, self._state.index.find_independent(path.past_window))))
        return scheduled

    def discard(self, keys: Iterable[Key], tier: str) -> int:
        """Remove copies of a path in `tier` that are not leased, read or needed by descendants; returns how many."""
        return self._transfers.evictor.discard(list(keys), self._tier(tier))

    def evict(self, tier: str, most: int) -> int:
        """Evict at most `most` copies from `tier` that nothing leases, reads or descends from; returns how many."""
        number, evictor, left = self._tier(tier), self._transfers.evictor, max(0, most)
        for size_class in range(len(self._state.pools[number].slabs.image_bytes)):
            left -= evictor.evict(number, left, size_class, clean_only=False)
        return max(0, most) - left

    def back_up_all(self) -> bool:
        """Schedule backups of all chunks that only the host tier has; returns whether no mover has a job in flight."""
        self._offloader.back_up(all_of_host=True)
        return not any(job.commanded for job in self._transfers.jobs.values())

    # ------------------------------------------------------------------ commands and results

    def take_commands(self) -> list[Command]:
        """Commands since the last call, in order, each exactly once."""
        commands, self._transfers.commands = self._transfers.commands, []
        for tier in self._state.tiers:
            if tier.pool.freed and (slots := tier.pool.take_freed()):
                commands.append(DeleteRecords(tier.name, slots))
        return commands

    def apply_results(self, results: Sequence[Result], now: float) -> None:
        """Take the results of earlier commands, and end waits whose deadline has passed at `now`.

        Jobs that no request waits for any more are cancelled, and own their slots until they end. Raises `JobError`,
        with nothing applied, for a job or probe that is not in flight, or that a rank reports twice.
        """
        check_time(now)
        answers = [result for result in results if isinstance(result, ProbeResult)]
        if answers:
            self._remote.check(answers)
        ended = [result for result in results if isinstance(result, TransferResult)]
        loads = self._transfers.apply(ended) if ended else []
        self._advance(now)
        if answers:
            self._remote.apply(answers)
        for load in loads:
            if load.outcome is None and not load.pending:
                self._conclude(load, MissReason.CANCELLED)
        self._proceed()

    def end_step(self) -> None:
        """End the engine's step: chunks protected for the step may be evicted, and backups are scheduled."""
        self._leases.end_step()
        self._proceed()

    # ------------------------------------------------------------------ start, sleep, resize, reset

    def adopt(self, tier: str, found: Iterable[Chunk], other_scope_slots: Sequence[int] = ()) -> int:
        """Recover the chunks of a persistent tier: (slot, key, parent, size class), oldest first; returns how many.

        `other_scope_slots` have records that this cache cannot use, least useful first: they are allocated after all
        empty slots. Chunks whose parents were not found are orphans. Raises `CacheError`, with nothing recovered, for
        two chunks in one slot, or with one key.
        """
        number = self._tier(tier)
        self._state.pools[number].check_slots(other_scope_slots)
        chunks = found if isinstance(found, StoredChunks) else [StoredChunk(*each) for each in found]
        adopted = adopt(self._state, number, chunks)
        self._state.pools[number].give_last(other_scope_slots)
        return adopted

    def replace_device(self, blocks: int) -> None:
        """Another, empty device pool of `blocks` blocks takes the place of the one before.

        Raises `CacheError` while a job uses that one.
        """
        if busy := sum(DEVICE in job.transfer.route for job in self._transfers.jobs.values()):
            raise CacheError(f"the device pool cannot be replaced: {busy} jobs in flight read or write its blocks")
        self._device = DeviceBlocks(blocks)

    def resize(self, tier: str, slots: int, *, discard: bool = False) -> None:
        """Resize `tier` to `slots` slots (slabs, if images have several sizes); the caller adds or frees the memory.

        Raises `CapacityError`, with nothing changed, if slots above the new size have chunks; with `discard`, only if
        one of these is leased, in use by a job, or needed by descendants.
        """
        self._transfers.evictor.resize(self._tier(tier), slots, discard=discard)

    def reset(self, *, keep: Sequence[str] = (), weights: bool = False) -> int:
        """Remove all chunks, also for later processes; returns the new generation.

        Jobs in flight are cancelled. They own their slots until their results arrive, which have no other effect. No
        load before the reset counts as arrived.

        Args:
            keep: The coldest tiers, warmest first, that keep their ready chunks. The generation does not change then.
            weights: Whether weights have changed. Chunks stored from now on are then not served after a restart.

        Raises `CacheError` if `keep` are not the coldest tiers, or with both `keep` and `weights`.
        """
        names = tuple(self._state.tier_names)
        first = len(names) - len(keep)
        if tuple(keep) != names[first:] or (keep and weights):
            raise CacheError(
                f"keep: expected the coldest of the tiers {names}, or none if weights have changed; got {tuple(keep)}"
                f"{' with weights=True' * weights}"
            )
        for record in self._leases:
            if record.load is not None:
                self._count_misses(record.load, record.load.revoke())
        if keep:
            self._leases.end_step()
        self._prefetcher.clear()
        self._transfers.reset(first, weights=weights)
        if not keep:
            self._leases.forget_step()
            self._remote.clear()
        return self.generation

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        return self._state.stats()

    def reconcile(self, announced: Announcements[Any]) -> list[tuple[Key, tuple[str, ...]]]:
        """The next batch of a comparison for a reader that has missed events: see `Announcements.compare`."""
        state, stores = self._state, {tier.name: tier.announced for tier in self._remote.tiers}
        return announced.compare(Contents(state.log, state.index, state.tier_names, stores))

    def events(self, limit: int | None = None) -> list[Event]:
        """Events since the last call, in order, at most `limit`; the others are returned by the next call.

        One more event says how many are missing: those beyond `CacheSettings.events`; chunks recovered without `limit`.
        """
        if limit is not None and limit < 1:
            raise CacheError(f"limit: expected at least 1 event, got {limit}")
        return self._state.log.pull(limit)

    def check_integrity(self) -> None:
        """Check all data structures; raises `CacheError` where two of them are inconsistent."""
        self._state.check_integrity()
        self._transfers.check_integrity()
        self._leases.check_integrity()
        self._remote.check_integrity()

    def _advance(self, now: float) -> None:
        self._transfers.now = self._state.log.now = max(self._transfers.now, now)
        if self._state.priorities.used:
            self._state.priorities.expire(self._transfers.now)
        for waiter in self._transfers.waiters.due(self._transfers.now) if self._transfers.waiters.open else ():
            self._give_up(waiter.load, MissReason.DEADLINE)
            self._transfers.cancel_wait(waiter)

    def _scheduled(self, load: Load, origins: Mapping[Key, str] | None) -> ScheduledLoad:
        """The jobs of `load`, whose chunks have these `origins`. A load without jobs ends at once."""
        load.sources = origins_of(chain.from_iterable(keys for _, keys in load.requests), load.sources, origins)
        if not load.jobs:
            self._conclude(load, MissReason.CANCELLED)
        jobs = tuple(LoadJob(job.transfer.job, len(job.statuses)) for job in load.jobs)
        return ScheduledLoad(sum(job.num_chunks for job in jobs), jobs)

    def _proceed(self) -> None:
        """Schedule prefetches that have waited for room, then backups."""
        if self._prefetcher.queue:
            self._prefetcher.proceed()
        changed, self._changes_backed_up = self._changes_backed_up != self._state.changes, self._state.changes
        if self._state.index.wanted_by_orphans or (changed and any(self._state.backlog.counts)):
            self._offloader.back_up()
        if self._remote.tiers:
            self._remote.proceed()

    def _give_up(self, load: Load | None, reason: MissReason) -> None:
        """End `load`, unless it has ended: cancel its copies onto the device. Reads into the host tier go on."""
        if load is not None and load.outcome is None:
            self._transfers.commands += [Cancel(job.transfer.job) for job in load.pending]
            self._conclude(load, reason)

    def _conclude(self, load: Load, unfinished: MissReason) -> None:
        self._count_misses(load, load.conclude(unfinished))
        hidden = self._state.log.hidden
        if load.outcome is not None and all(len(keys) != 1 or keys[0] != hidden for _, keys in load.requests):
            sources = load.outcome.sources
            self.counters.count_hits(sources, sources[: load.first_group_chunks], self.settings.first_tokens)
            self.counters.observe_load(sources, self._transfers.now - load.began, load.requests)
        self._transfers.waiters.close(load.waiter)

    def _count_misses(self, load: Load, misses: Sequence[MissReason]) -> None:
        self.counters.misses.update(misses)
        if self._state.log.on and load.outcome is not None:
            self._state.log.loaded(load.requests, load.outcome.num_chunks, misses)

    def _tier(self, name: str) -> int:
        if name not in self._state.tier_names:
            raise CacheError(f"expected a tier of {self._state.tier_names}, got {name!r}")
        return self._state.tier_names.index(name)
