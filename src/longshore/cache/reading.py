"""Calls of `TieredCache` for a prompt: match, hold, onboard, outcome, release."""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key, Slot, Slots
from longshore.cache.beginnings import Text
from longshore.cache.columns import leading, marks
from longshore.cache.core import Core
from longshore.cache.events import EventKind
from longshore.cache.groups import Wanted
from longshore.cache.jobs import Held
from longshore.cache.nodes import ROOT
from longshore.cache.sight import Sight, nodes_of
from longshore.cache.states import READY
from longshore.cache.types import (
    GroupMatch,
    Hold,
    Match,
    MissReason,
    Onboarding,
    Outcome,
    Run,
)
from longshore.cache.waiting import PrefetchPolicy, seconds
from longshore.errors import CacheError


class Reading(Core):
    """What a prompt asks for, and gets."""

    def match(
        self,
        keys: Sequence[Key],
        now: float,
        *,
        start: int = 0,
        request: str | None = None,
        text: Text | None = None,
        group: int = 0,
        count: bool = True,
        turn: int | None = None,
    ) -> Match:
        """The longest run of ready chunks among `keys[start:]`, and a hold on it.

        `keys` is the path from the first chunk of the prompt; chunks before `start` are the engine's own. Every chunk
        behind the run is counted as a miss. The run is found by bisection, in microseconds whatever its length: a key
        names its whole prefix, so only some are looked at. `CacheError` is raised where one of these is out of place.
        What is not known of foreign tiers is asked for, and never waited for. An engine whose scheduler asks again and
        again for a request that waits passes `count=False`, and calls `count_request` once. A request that was matched
        before passes the `turn` that it drew then (`Match.turn`): chunks that it uses several times count once.

        With the `text` behind the keys, which are of `group`, the chunk behind the run is looked for that begins as it
        should; what `onboard` is then given another block for.
        """
        self._check_time(now)
        self._check_first(keys, start)
        self._store.check_turn(turn)
        size = 0 if text is None else self.settings.group(group)[1]
        if text is not None and self.settings.stands_alone(group):
            raise CacheError(f"chunks of group {group} stand alone: none of them follows a path")
        text = text and text.checked()
        index = self._store.index
        end = index.reachable_prefix(keys, start)
        for position in {start, max(start, end - 1), end} - {len(keys)}:
            index.check_link(keys, position)
        # Foreign tiers are asked for each key behind these; else looking at some of them is enough here, too.
        known = end + len(index.follow(keys, end)) if self._exchange else index.known_prefix(keys, end)
        partial = None if text is None else self._store.beginnings.closest(keys, end, text, size)
        self._advance(now)
        if turn is None:
            turn = self._store.begin(keys, end)
        self._store.serve(turn)
        foreign, probes = self._exchange.look(keys, known) if self._exchange else (0, ())
        if count:
            self._count(keys, start, end, known, foreign, request)
        path = keys[start:end] if partial is None or partial.device else [*keys[start:end], partial.key]
        if not path:
            return Match(start, 0, None, foreign, probes, partial, turn)
        if self._exchange:
            self._exchange.found(keys[start:end])
        held = Held(path, range(start, start + len(path)), (self._store.pin(index.get(path[-1])),))
        hold = self._holds.take(self._flow.new_id(), (held,), request)
        return Match(start, end - start, hold, foreign, probes, partial, turn)

    def begin(self, keys: Sequence[Key] | Sight) -> int:
        """A request for `keys` begins, for hosts that ask key by key; the turn that its calls are to name."""
        mine, at = nodes_of(self._store.index, keys)
        return self._store.begin(mine, leading(at != ROOT))

    def count_request(self, keys: Sequence[Key], match: Match, *, request: str | None = None) -> None:
        """Count what `match`, which was not counted, left of `keys` as misses; the events have the request from here.

        To be called before `onboard`, where something is loaded.
        """
        self._check_first(keys, match.start + match.length)
        end = match.start + match.length
        known = self._store.index.known_prefix(keys, end)
        self._count(keys, match.start, end, known, min(match.foreign, len(keys) - known), request)

    def _count(self, keys: Sequence[Key], start: int, end: int, known: int, foreign: int, request: str | None) -> None:
        self._store.watching.count_misses(keys, end, known, foreign)
        if self._store.log.on:
            asked, found = tuple(keys), end - start
            self._store.log.record(EventKind.REQUEST, request=request, keys=asked, start=start, length=found)

    def match_groups(
        self, wanted: Sequence[Wanted], now: float, *, request: str | None = None, turn: int | None = None
    ) -> GroupMatch:
        """The longest prefix at which every KV cache group is served, and a hold on what the tiers are to bring.

        `wanted` says of each group of `CacheSettings.groups`, in order, which keys the request has, and which of these
        chunks the device has. The length is a multiple of the chunks of all groups, and no longer than the keys of any.
        Chunks that the last token would need, behind what was found, are counted as misses; the events have a request
        for each group, `request/0`, `request/1` and so on. With `Wanted.text` in all of them the length may be any: the
        first tokens of a chunk serve, too. What is not known of foreign tiers is asked for, and never waited for.
        A request that was matched before passes its `turn`, as in `match`. Raises `CacheError` where a key is out of
        place.
        """
        self._check_time(now)
        self._store.check_turn(turn)
        plan = self._joint.plan(wanted)
        self._advance(now)
        if turn is None:
            turn = self.begin([key for each in wanted for key in each.keys])
        self._store.serve(turn)
        return self._joint.match(plan, wanted, request)

    def fetch(self, keys: Sequence[Key], now: float, *, start: int = 0, group: int = 0) -> tuple[int, ...]:
        """Bring what foreign tiers are known to have behind the ready prefix of `keys` into the warmest tier; the jobs.

        What has arrived is found by the next match. What is on its way already is joined, what is not known is asked
        for, and nothing that is not backed up makes way. Fetches outlive the request that wanted them. The keys are of
        one KV cache group; of one whose chunks stand alone each of `keys[start:]` is wanted for itself.
        """
        self._check_time(now)
        self._check_first(keys, start)
        if self.settings.stands_alone(group):
            nodes = self._store.index.find_alone(keys[start:])
            self._store.check_pool(nodes, self.settings.pool_of(group))
            self._advance(now)
            return self._exchange.fetch_alone(keys[start:], nodes, self.settings.pool_of(group))
        end = self._store.index.reachable_prefix(keys, start)
        path, pool = self._store.index.follow(keys, end), self.settings.pool_of(group)
        self._store.check_pool([*path[:1], self._store.index.get(keys[end - 1]) if end else 0], pool)
        self._advance(now)
        return self._exchange.fetch(keys, end, path, pool)

    def fetch_groups(self, wanted: Sequence[Wanted], now: float) -> tuple[int, ...]:
        """The same for all groups of a request, `wanted` as in `match_groups`: what the longest prefix needs of each.

        That is the longest at which all of them can be served when it is there. Of what there is no room for, the
        request does without.
        """
        self._check_time(now)
        self._joint.check(wanted)
        self._advance(now)
        return self._joint.fetch(wanted)

    def runs(self, hold: Hold) -> tuple[Run, ...]:
        """Where the held chunks are, as runs by the warmest tier that has them; those that were lost are left out."""
        return self._store.watching.runs(self._holds.get(hold).nodes(self._store.index))

    def slots(self, hold: Hold) -> list[Slot]:
        """The slot that each held chunk can be read from, the warmest; fewer than held if some were lost."""
        return self._store.watching.warmest_slots(self._holds.get(hold).nodes(self._store.index))

    def peek(self, keys: Sequence[Key]) -> Sight:
        """Where each of `keys` is, for hosts that ask key by key. What is ready, or colder, stays so until `end_step`.

        A chunk that could not be reached yet, because one before it is still on its way, is in flight itself.
        """
        sight = Sight.take(self._store.index, keys)
        readable = marks(self._store.index.reachable)[sight.at] != 0
        self._holds.protect(sight.at[readable & (sight.at != ROOT)])
        return sight

    def in_place(self, keys: Sequence[Key]) -> Slots | None:
        """The slots of the warmest tier that `keys` are ready in, if all books agree on each; `None` otherwise.

        Changes nothing. For reading what was found before the control plane failed: nothing is written there since.
        """
        index, pool, slots = self._store.index, self._store.pools[0], list[int]()
        for key in keys:
            node = index.get(key)
            slot = index.slot[0][node] if node else -1
            if slot < 0 or pool.state[slot] != READY or pool.node[slot] != node or index.key[node] != key:
                return None
            slots.append(slot)
        return Slots(self._store.levels[0].name, pool.pool_of(slots[0]) if slots else 0, tuple(slots))

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
        self._check_tokens(tokens, group)
        longest = seconds(timeout, self.settings.load_timeout)
        self._store.serve(record.turn)
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
        self._store.serve(record.turn)
        nodes, longest = record.nodes(self._store.index), seconds(timeout, self.settings.load_timeout)
        record.load = self._loading.load_together(nodes, record.keys, sections, timeout=longest, by_layer=by_layer)
        name = record.request
        record.load.asked = [(name and f"{name}/{part.group}", part.keys) for part in record.parts]
        return self._ordered(record.load)

    def prefetch(
        self, hold: Hold, *, policy: PrefetchPolicy | None = None, timeout: float | None = None
    ) -> tuple[int, ...]:
        """Bring the held chunks into the warmest tier while their request waits; returns the first jobs, perhaps none.

        `prefetched` says when the request need not wait any longer: by `policy`, `settings.prefetch` if it is `None`,
        and `timeout` seconds, which only a policy of `TIMEOUT` has. Nothing that is not backed up makes way: a
        policy that waits has more backed up where room is short, and takes turns with other such prefetches. What is on
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
            self._prefetching.leave(record.prefetch)
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
