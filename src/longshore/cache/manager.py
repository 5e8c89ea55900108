"""`TieredCache`: what is where, what moves, what is evicted.

    match ─► Hold ─► onboard ─► outcome ─► release          a prompt that returns
    commit (or offer)                                       blocks that are complete, or about to be evicted
    take() ─► commands            apply(results) ◄─         nothing else goes in or out

Sans I/O: no torch, no threads, no clock and no randomness of its own; the same calls give the same log. Every method
validates before it changes anything. This module is the interface; the books are kept in `store`, the transfers in
`flow`, and decided upon in `loading` and `storing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from longshore.boundary import DEVICE, Command, Key, ProbeResult, Result, Route, Slot, TransferResult
from longshore.cache.adopting import Found, adopt
from longshore.cache.beginnings import Text
from longshore.cache.device import DeviceBlocks
from longshore.cache.events import Event, EventKind
from longshore.cache.exchange import Exchange
from longshore.cache.flow import Flow
from longshore.cache.groups import Wanted
from longshore.cache.holds import Holds
from longshore.cache.jobs import Held, Load
from longshore.cache.joint import Joint
from longshore.cache.loading import Loading
from longshore.cache.moving import make_way
from longshore.cache.prefetching import Prefetching
from longshore.cache.resizing import resize
from longshore.cache.retention import Retention
from longshore.cache.retention import check as check_retention
from longshore.cache.settings import CacheSettings, TierSpec
from longshore.cache.store import Level, Store
from longshore.cache.storing import Storing
from longshore.cache.types import (
    Counters,
    GroupMatch,
    Hold,
    Loan,
    Match,
    MissReason,
    Offload,
    Onboarding,
    Outcome,
    Part,
    Presence,
    Resident,
    Run,
    TierStats,
)
from longshore.cache.waiting import PrefetchPolicy, seconds
from longshore.errors import CacheError


class TieredCache:
    """The control plane of one engine: an index over `tiers`, warmest first, below the engine's own device cache."""

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
        self._flow = Flow(self._store, self.settings, generation)
        self._loading = Loading(self._flow)
        self._prefetching = Prefetching(self._flow)
        self._storing = Storing(self._flow, rules[: len(names)])
        self._exchange = Exchange(self._flow, theirs, rules[len(names) :])
        self._holds = Holds(self._store)
        self._joint = Joint(self._flow, self._holds)
        self._device = DeviceBlocks(self.settings.device_blocks)

    @property
    def generation(self) -> int:
        """How many resets there were, over all processes that shared the persistent tier."""
        return self._flow.generation

    # ------------------------------------------------------------------ reading

    def match(
        self,
        keys: Sequence[Key],
        now: float,
        *,
        start: int = 0,
        request: str | None = None,
        text: Text | None = None,
        group: int = 0,
    ) -> Match:
        """The longest run of ready chunks among `keys[start:]`, and a hold on it.

        `keys` is the path from the first chunk of the prompt; chunks before `start` are the engine's own. Every chunk
        behind the run is counted as a miss. The run is found by bisection, in microseconds whatever its length: a key
        names its whole prefix, so only some are looked at. `CacheError` is raised where one of these is out of place.
        What is not known of foreign tiers is asked for, and never waited for.

        With the `text` behind the keys, which are of `group`, the chunk behind the run is looked for that begins as it
        should; what `onboard` is then given another block for.
        """
        self._check_first(keys, start)
        size = 0 if text is None else self.settings.group(group)[1]
        text = text and text.checked()
        index = self._store.index
        end = index.reachable_prefix(keys, start)
        for position in {start, max(start, end - 1), end} - {len(keys)}:
            index.check_link(keys, position)
        self._advance(now)
        foreign, probes = self._exchange.look(keys, end) if self._exchange else (0, ())
        self._store.count_misses(keys, end, foreign)
        if self._store.log.on:
            asked, found = tuple(keys), end - start
            self._store.log.record(EventKind.REQUEST, request=request, keys=asked, start=start, length=found)
        partial = None if text is None else self._store.beginnings.closest(keys, end, text, size)
        path = keys[start:end] if partial is None or partial.device else [*keys[start:end], partial.key]
        if not path:
            return Match(start, 0, None, foreign, probes, partial)
        if self._exchange:
            self._exchange.found(keys[start:end])
        held = Held(path, range(start, start + len(path)), (self._store.pin(index.get(path[-1])),))
        hold = self._holds.take(self._flow.new_id(), (held,), request)
        return Match(start, end - start, hold, foreign, probes, partial)

    def match_groups(self, wanted: Sequence[Wanted], now: float, *, request: str | None = None) -> GroupMatch:
        """The longest prefix at which every KV cache group is served, and a hold on what the tiers are to bring.

        `wanted` says of each group of `CacheSettings.groups`, in order, which keys the request has, and which of these
        chunks the device has. The length is a multiple of the chunks of all groups, and no longer than the keys of any.
        Chunks that the last token would need, behind what was found, are counted as misses; the events have a request
        for each group, `request/0`, `request/1` and so on. With `Wanted.text` in all of them the length may be any: the
        first tokens of a chunk serve, too. Raises `CacheError` where a key is out of place.
        """
        paths = self._joint.paths(wanted)
        self._advance(now)
        return self._joint.match(paths, request)

    def fetch(self, keys: Sequence[Key], now: float, *, start: int = 0, group: int = 0) -> tuple[int, ...]:
        """Bring what foreign tiers are known to have behind the ready prefix of `keys` into the warmest tier; the jobs.

        What has arrived is found by the next match. What is on its way already is joined, what is not known is asked
        for, and nothing that is not backed up makes way. Fetches outlive the request that wanted them. The keys are of
        one KV cache group; chunks of a group that stand alone are a `CacheError`, as nobody knows which are wanted.
        """
        self._check_first(keys, start)
        if self.settings.stands_alone(group):
            raise CacheError(f"chunks of group {group} stand alone: they are no path to be fetched")
        end = self._store.index.reachable_prefix(keys, start)
        path = self._store.index.follow(keys, end)
        self._advance(now)
        return self._exchange.fetch(keys, end, path, self.settings.pool_of(group))

    def runs(self, hold: Hold) -> tuple[Run, ...]:
        """Where the held chunks are, as runs by the warmest tier that has them; those that were lost are left out."""
        return self._store.runs(self._holds.get(hold).keys)

    def slots(self, hold: Hold) -> list[Slot]:
        """The slot that each held chunk can be read from, the warmest; fewer than held if some were lost."""
        return self._store.warmest_slots(self._holds.get(hold).nodes(self._store.index))

    def peek(self, key: Key) -> Presence:
        """Where `key` is, for hosts that ask key by key. What is ready stays so until `end_step`.

        A chunk that could not be reached yet, because one before it is still on its way, is in flight itself.
        """
        index = self._store.index
        node = index.get(key)
        if not node:
            return Presence.ABSENT
        if not index.reachable[node]:
            return Presence.IN_FLIGHT
        self._holds.protect(node)
        return Presence.READY if index.is_ready(node, 0) else Presence.COLDER

    def knows(self, key: Key) -> bool:
        """Whether a tier has `key`, or will have. Neither a use, nor a hold."""
        return bool(self._store.index.get(key))

    def onboard(
        self,
        hold: Hold,
        blocks: Sequence[int],
        *,
        skip: int = 0,
        group: int = 0,
        tokens: int | None = None,
        by_layer: bool = False,
        timeout: float | None = None,
    ) -> Onboarding:
        """Order the held chunks into device `blocks`; ends with `outcome(hold)`.

        Args:
            hold: From `match`; serves one onboarding.
            blocks: Device blocks in logical order. The first is sub-block `skip` of the first held chunk; the last
                may be any sub-block of a held chunk.
            skip: Leading sub-blocks of the first chunk that the device has already.
            group: The KV cache group that the keys and blocks are of.
            tokens: Leading tokens to load of the last block, as a partial match says; `None` loads all.
            by_layer: Have each job go layer after layer, so that compute may begin before all have arrived.
            timeout: Seconds after which what has arrived is the outcome, at the next `tick`, whatever the movers do
                meanwhile; `settings.load_timeout` if it is `None`.

        Chunks for which the host tier cannot make room now are left out, and counted as misses.
        """
        record = self._holds.to_load(hold)
        (part,), per_chunk = record.parts, self.settings.blocks_per_chunk
        chunks, held = -(-(skip + len(blocks)) // per_chunk), len(part.keys)
        if not 0 <= skip < per_chunk or not blocks or chunks > held:
            raise CacheError(f"{len(blocks)} blocks after {skip} of {per_chunk} do not lie within {held} held chunks")
        self._device.check(blocks)
        self._store.check_pool([part.pins[0].node], self.settings.pool_of(group))
        longest = seconds(timeout, self.settings.load_timeout)
        first_block, tail = part.positions[0] * per_chunk + skip, part.pins[0].node
        record.load = self._loading.load(
            part.keys[:chunks],
            blocks,
            first_block,
            timeout=longest,
            tail=tail,
            held=held,
            group=group,
            by_layer=by_layer,
            tokens=tokens,
        )
        record.load.asked = [(record.request, part.keys[:chunks])]
        return self._ordered(record.load)

    def onboard_groups(
        self, hold: Hold, blocks: Sequence[Sequence[int]], *, by_layer: bool = False, timeout: float | None = None
    ) -> Onboarding:
        """Order all that a hold of `match_groups` keeps into the device, by one job; ends with `outcome(hold)`.

        `blocks` has for each group the device blocks of the chunks in `Need.load`, in order, and of as many blocks of a
        partial match as its tokens take; the last of these comes whole. `by_layer` has the layers of all groups travel
        in the model's order. It is all or nothing: chunks for which the host tier cannot make room
        now are counted as misses, and the others with them.
        """
        record = self._holds.to_load(hold, joint=True)
        sections = self._joint.sections(record, blocks)
        for each in blocks:
            self._device.check(each)
        nodes, longest = record.nodes(self._store.index), seconds(timeout, self.settings.load_timeout)
        record.load = self._loading.load_together(nodes, record.keys, sections, timeout=longest, by_layer=by_layer)
        name = record.request
        record.load.asked = [(name and f"{name}/{part.group}", part.keys) for part in record.parts]
        return self._ordered(record.load)

    def prefetch(
        self, hold: Hold, *, policy: PrefetchPolicy | None = None, timeout: float | None = None
    ) -> tuple[int, ...]:
        """Bring the held chunks into the warmest tier while their request waits; returns the jobs, which may be none.

        `prefetched` says when the request need not wait any longer: by `policy`, `settings.prefetch` if it is `None`,
        and `timeout` seconds, which only a policy of `TIMEOUT` has. Nothing that is not backed up makes way. What is on
        its way for others is joined, as `onboard` joins this; what nobody else waits for is called off when the time
        is over, or the hold is let go of. A second call takes the place of the first.
        """
        return tuple(sorted(self._prefetching.prefetch(self._holds.get(hold), policy, timeout).jobs))

    def prefetched(self, hold: Hold) -> int | None:
        """How many of the held chunks lead that are in the warmest tier; `None` while the request is to wait for more.

        It is to wait as long as the policy of its last `prefetch` says, and jobs of that are in flight.
        """
        return self._prefetching.progress(self._holds.get(hold))

    def outcome(self, hold: Hold) -> Outcome | None:
        """How the onboarding of `hold` ended; `None` while it has not. Raises `HoldError` if none was ordered."""
        return self._holds.load(hold).outcome

    def give_up(self, hold: Hold) -> Outcome:
        """The deadline has come: what has arrived is the outcome, what has not is a miss by deadline, and cancelled.

        Device blocks of parts that are still `in_flight` must not be reused before those have ended.
        """
        load = self._holds.load(hold)
        if load.outcome is None:
            self._flow.abandon(load)
            self._conclude(load, MissReason.DEADLINE)
        return load.outcome or Outcome(0, ())

    def release(self, hold: Hold) -> None:
        """Let go of a match. Loads onto the device that have not ended are cancelled. Twice is a `HoldError`."""
        record = self._holds.get(hold)
        if record.load is not None and record.load.outcome is None:
            self._flow.abandon(record.load)
            self._conclude(record.load, MissReason.CANCELLED)
        if record.prefetch is not None:
            self._flow.leave(record.prefetch)
        self._holds.drop(hold)

    def abort(self, request: str) -> int:
        """Release every hold that was taken for `request`, at any moment; says how many there were."""
        held = self._holds.of(request)
        for hold in held:
            self.release(hold)
        return len(held)

    def in_flight(self, job: int) -> bool:
        """Whether `job` has not ended, so that its device blocks may still be read or written; or a probe has not."""
        return job in self._flow.jobs or self._exchange.is_asking(job)

    # ------------------------------------------------------------------ writing

    def copy_inside(
        self, sources: Sequence[Slot], blocks: Sequence[int], *, tokens: int | None = None, group: int = 0
    ) -> int:
        """Order copies of device blocks into other device `blocks`, layer by layer; returns the job.

        For partial reuse: `tokens` are the leading tokens to copy of the last block, `None` all. `sources` are slots
        of the group's device pool, one for each block. The tiers have no part in it; the job keeps its place and its
        deadline among all others, and whether it succeeded is known to the mover's `wait_layer`.
        """
        if len(sources) != len(blocks) or not blocks or any(source.tier != DEVICE for source in sources):
            raise CacheError(f"expected a device slot to copy from for each of {len(blocks)} blocks, got {sources}")
        self._device.check(blocks)
        return self._flow.copy_inside(sources, blocks, tokens, group)

    def commit(
        self,
        keys: Sequence[Key],
        blocks: Sequence[int],
        *,
        first: int = 0,
        evicting: bool = False,
        prompt: int | None = None,
        retention: Sequence[Retention] = (),
        group: int = 0,
        text: Text | None = None,
    ) -> Offload:
        """Chunks `keys[first:]` are complete on the device, in `blocks`, or about to be evicted from it.

        The write policy decides whether they are offloaded now; their blocks must stay unchanged until the job has
        ended. `keys` is the path from the first chunk of the prompt; what a tier has already is not written again.
        Chunks from position `prompt` on are of the answer. `retention` says what is worth keeping, and `text` which
        tokens the chunks have, for partial matches (`settings.partial`).
        """
        check_retention(retention)
        self._check_first(keys, first)
        expected = (len(keys) - first) * self.settings.blocks_per_chunk
        if len(blocks) != expected:
            raise CacheError(f"{len(keys) - first} chunks have {expected} blocks, got {len(blocks)}")
        self._device.check(blocks)
        return self._storing.store(
            keys, first, blocks, evicting=evicting, prompt=prompt, retention=retention, group=group, text=text
        )

    def offer(
        self, keys: Sequence[Key], *, first: int = 0, retention: Sequence[Retention] = (), group: int = 0
    ) -> Offload:
        """Which of the chunks `keys[first:]` to store, and where; the host moves the bytes, and reports the job.

        A host that will not move them after all must say so, by `withdraw`.
        """
        check_retention(retention)
        self._check_first(keys, first)
        return self._storing.store(keys, first, None, evicting=True, retention=retention, group=group)

    def keep(self, keys: Sequence[Key], *, group: int = 0, request: str | None = None) -> Hold:
        """A hold on chunks that stand alone, for hosts that have found them by `peek`.

        Raises `CacheError` unless a tier has each of them ready.
        """
        return self._holds.take(self._flow.new_id(), [self._asked(keys, group)], request)

    def lend(self, keys: Sequence[Key], *, group: int = 0) -> Loan:
        """The host reads chunks that stand alone from the warmest tier itself, and reports the job.

        Their slots stay as they are until every rank has. One that will not be read is given back by `withdraw`.
        Raises `CacheError` unless each of them is ready there.
        """
        held = self._asked(keys, group)
        try:
            return self._loading.lend(held)
        finally:
            for pin in held.pins:
                self._store.unpin(pin)

    def _asked(self, keys: Sequence[Key], group: int) -> Held:
        """Chunks that stand alone, pinned."""
        if not keys or not self.settings.stands_alone(group):
            raise CacheError(f"expected chunks of a group that stand alone, got {len(keys)} of group {group}")
        index = self._store.index
        nodes = index.find_alone(keys)
        lacking = [
            key.hex()[:12] for key, node in zip(keys, nodes, strict=True) if not (node and index.reachable[node])
        ]
        if lacking:
            raise CacheError(f"{len(lacking)} of {len(keys)} chunks are not ready in any tier: {lacking[0]} ...")
        pins = [self._store.pin(node) for node in nodes]
        return Held(keys, range(len(keys)), pins, group, alone=True)

    def withdraw(self, job: int) -> None:
        """The host will not move what it was offered or lent, on any rank that has not reported."""
        self._flow.withdraw(job)

    def discard(self, keys: Iterable[Key], tier: str) -> int:
        """Remove the copies of a path in `tier` that nothing holds, reads or needs to be reached; says how many."""
        return self._store.discard(list(keys), self._tier(tier))

    def flush(self) -> bool:
        """Order backups of all that only the host tier has; says whether there is nothing left to order or wait for."""
        self._storing.clean(all_of_host=True)
        return not self._flow.jobs

    # ------------------------------------------------------------------ life

    def adopt(self, tier: str, found: Iterable[Found | tuple[int, Key, Key | None]]) -> int:
        """Take in what a persistent tier holds at start: (slot, key, parent, pool), oldest first; says how many.

        Chunks whose parents are gone cannot be reached: their slots stay free. Two chunks in one slot, or two of one
        key, are a `CacheError`, and nothing is taken in.
        """
        return adopt(self._store, self._tier(tier), [Found(*each) for each in found])

    def sleep(self) -> bool:
        """The device's memory is about to be freed: cancel what touches it, and take no orders that would.

        Says whether nothing touches it any more; until then it must stay, and this is to be asked again when results
        have been applied. The tiers keep what they have; to forget that too, `reset`.
        """
        self._device.asleep = True
        return self._flow.leave_device()

    def wake(self) -> None:
        """The device's memory is back, and empty."""
        self._device.asleep = False

    def resize(self, tier: str, slots: int, *, discard: bool = False, move: bool = False) -> int | None:
        """Have `slots` slots (slabs, where images have several sizes) in `tier`; the caller gives or takes the memory.

        What lies in slots above the new size is in the way: that is a `CapacityError`, unless it is to be discarded,
        and nothing works on it, holds it, or needs it to be reached. Nothing has changed after an error.

        With `move` it is copied to lower slots instead, by one job, which is returned: ask again when that has ended.
        `None` says that the tier has its new size. What could not be copied stays, and is in the way as before.
        """
        at = self._tier(tier)
        if move and discard:
            raise CacheError("what is in the way is moved, or discarded, not both")
        job = make_way(self._flow, at, slots) if move and slots >= 0 else None
        if job is None:
            resize(self._store, at, slots, discard=discard)
        return job

    def reset(self) -> int:
        """Forget everything, here and after a restart; returns the new generation.

        Jobs in flight are cancelled; they own their slots until their results come, and change nothing else. Nothing
        that was onboarded before counts as arrived.
        """
        for record in self._holds:
            if record.load is not None:
                self._count_misses(record.load, record.load.revoke())
        self._flow.forget()
        self._exchange.clear()
        return self.generation

    def end_step(self) -> None:
        """The engine's step is over: what `peek` protected no longer is, and pending backups are ordered."""
        self._holds.end_step()
        self._order_writes()

    def tick(self, now: float) -> None:
        """Time has passed: order what is due, and end the waits whose deadline has come.

        Their movers are told, and own their slots until they end.
        """
        self._advance(now)
        self._order_writes()

    def take(self) -> list[Command]:
        """Commands since the last call, in order, each exactly once."""
        commands, self._flow.outbox = self._flow.outbox, []
        return commands

    def apply(self, results: Sequence[Result], now: float) -> None:
        """What became of earlier commands.

        A job or probe that is not in flight, or reported twice by a rank, is a `JobError`, and nothing is applied.
        """
        answers = [result for result in results if isinstance(result, ProbeResult)]
        self._exchange.check(answers)
        loads = self._flow.apply([result for result in results if isinstance(result, TransferResult)])
        self._advance(now)
        self._exchange.hear(answers)
        for load in loads:
            if load.outcome is None and not load.pending:
                self._conclude(load, MissReason.CANCELLED)
        self._order_writes()

    # ------------------------------------------------------------------ watching

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        return self._store.stats()

    def residents(self) -> list[Resident]:
        """Every chunk that has a slot and can be found, or soon can, once for each tier that it is in."""
        return self._store.residents()

    def events(self, limit: int | None = None) -> list[Event]:
        """What happened since the last call, in order, as far as it was kept (`CacheSettings.events`).

        At most `limit` events, and one more that says how many are missing, if some are; what is left comes next time.
        """
        if limit is not None and limit < 1:
            raise CacheError(f"a limit of events is at least 1, got {limit}")
        return self._store.log.pull(limit)

    @property
    def held(self) -> int:
        """Holds that were not released, those of `peek` included."""
        return len(self._holds)

    @property
    def jobs_in_flight(self) -> int:
        """Jobs whose results have not come."""
        return len(self._flow.jobs)

    def check_integrity(self) -> None:
        """Walk every structure; raise `CacheError` where two of them disagree."""
        self._store.check_integrity()
        self._flow.check_integrity()
        self._holds.check_integrity()
        self._exchange.check_integrity()

    # ------------------------------------------------------------------ inside

    def _advance(self, now: float) -> None:
        self._flow.now = self._store.log.now = max(self._flow.now, now)
        if self._store.retention.used:
            self._store.retention.expire(self._flow.now)
        for wait in self._flow.waits.due(self._flow.now):
            if wait.load is not None and wait.load.outcome is None:
                self._flow.abandon(wait.load)
                self._conclude(wait.load, MissReason.DEADLINE)
            self._flow.leave(wait)

    def _ordered(self, load: Load) -> Onboarding:
        """What was ordered of `load`; nothing at all is an outcome already."""
        if not load.parts:
            self._conclude(load, MissReason.CANCELLED)
        parts = tuple(Part(job.transfer.job, len(job.statuses)) for job in load.parts)
        return Onboarding(sum(part.chunks for part in parts), parts)

    def _order_writes(self) -> None:
        self._storing.clean()
        if self._exchange:
            self._exchange.proceed()

    def _conclude(self, load: Load, unfinished: MissReason) -> None:
        self._count_misses(load, load.conclude(unfinished))
        if load.outcome is not None:
            self.counters.hits.update(load.outcome.sources)
        self._flow.waits.close(load.wait)

    def _count_misses(self, load: Load, misses: Sequence[MissReason]) -> None:
        self.counters.misses.update(misses)
        if self._store.log.on and load.outcome is not None:
            self._store.log.loaded(load.asked, load.outcome.chunks, misses)

    def _tier(self, name: str) -> int:
        for tier, level in enumerate(self._store.levels):
            if level.name == name:
                return tier
        raise CacheError(f"no tier is called {name!r}; there are {[level.name for level in self._store.levels]}")

    def _check_first(self, keys: Sequence[Key], first: int) -> None:
        if not 0 <= first <= len(keys):
            raise CacheError(f"the first chunk lies in [0, {len(keys)}], got {first}")
