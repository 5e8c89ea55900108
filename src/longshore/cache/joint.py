"""One match, and one transfer, for all KV cache groups of a request.

    match     how far are all of them served?         what each needs from the tiers is held, by one hold
    onboard   into these device blocks                one job with a section for each run of chunks, so that with
                                                      `by_layer` the groups' layers travel in the model's order
    fetch     how far could they be, by what foreign tiers have as well?       what is lacking for that is fetched

A prefix is of use to all groups or to none: when one chunk cannot be had, nothing is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from longshore.boundary import Key, Section
from longshore.cache.events import EventKind
from longshore.cache.exchange import Exchange
from longshore.cache.flow import Flow
from longshore.cache.groups import Need, Path, Wanted, longest_served, runs_of
from longshore.cache.holds import Holds
from longshore.cache.jobs import Held
from longshore.cache.jobs import Hold as Record
from longshore.cache.store import Pin
from longshore.cache.types import GroupMatch, MissReason
from longshore.errors import CacheError


class Plan(NamedTuple):
    """How far the `paths` of all groups are served, in `tokens`, and what each needs for that."""

    paths: Sequence[Path]
    tokens: int
    needs: tuple[Need, ...]


class Joint:
    """Matches and loads of several groups on one `Flow`."""

    def __init__(self, flow: Flow, holds: Holds, exchange: Exchange) -> None:
        self._flow = flow
        self._store = flow.store
        self._holds = holds
        self._exchange = exchange

    def plan(self, wanted: Sequence[Wanted]) -> Plan:
        """How far what is wanted of each group is served.

        Raises `CacheError` unless there is something wanted of each, and the keys are what they should be.
        """
        plan = self._plan(self._paths(wanted))
        self._check(plan)
        if self._exchange:  # which is asked for all that our tiers lack, not only for what is needed
            self.check(wanted)
        return plan

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Raise `CacheError` unless all keys are what they should be, for whatever prefix."""
        index, keys = self._store.index, list[Key]()
        for group, path in enumerate(self._paths(wanted)):
            keys += path.keys
            ready = 0 if path.group.alone else index.reachable_prefix(path.keys, 0)
            nodes = index.find_alone(path.keys) if path.group.alone else index.follow(path.keys, ready)
            head = [index.get(path.keys[ready - 1])] if ready else []
            self._store.check_pool([*head, *nodes], self._flow.settings.pool_of(group))
        self._check_distinct(keys)

    def _paths(self, wanted: Sequence[Wanted], *, abroad: bool = False) -> list[Path]:
        store, settings = self._store, self._flow.settings
        if not wanted or len(wanted) != len(settings.groups):
            raise CacheError(f"a match is for each of the {len(settings.groups)} groups, got {len(wanted)}")
        has = self._exchange.has if abroad else None
        return [
            Path(store.index, store.beginnings, *settings.group(group), each, abroad=has)
            for group, each in enumerate(wanted)
        ]

    @staticmethod
    def _plan(paths: Sequence[Path]) -> Plan:
        tokens = longest_served(paths)
        return Plan(paths, tokens, tuple(path.need(tokens) for path in paths))

    def _could_be(self, wanted: Sequence[Wanted]) -> Plan:
        """How far it could be served with what foreign tiers are known to have, and what is on its way."""
        return self._plan(self._paths([each._replace(text=None) for each in wanted], abroad=True))

    def match(self, plan: Plan, wanted: Sequence[Wanted], request: str | None) -> GroupMatch:
        """The prefix of `plan`, and a hold on what it needs."""
        paths, tokens, needs = plan
        probes = tuple(
            probe
            for group, (path, need) in enumerate(zip(paths, needs, strict=True))
            for probe in self._note(request and f"{request}/{group}", path, need)
        )
        parts = [
            self._hold(group, path, need)
            for group, (path, need) in enumerate(zip(paths, needs, strict=True))
            if need.load or (need.partial and not need.partial.device)
        ]
        hold = self._holds.take(self._flow.new_id(), parts, request, joint=True) if parts else None
        more = self._could_be(wanted).tokens if self._exchange else 0
        return GroupMatch(tokens, needs, hold, max(0, more - tokens), probes, self._store.served)

    def fetch(self, wanted: Sequence[Wanted]) -> tuple[int, ...]:
        """Order what only foreign tiers have of what the longest prefix needs; those jobs, and what is under way.

        None of what it needs makes way for the rest.
        """
        store, plan, jobs = self._store, self._could_be(wanted), dict[int, None]()
        pins = [store.pin(node) for node in self._needed(plan)]
        for group, (path, need) in enumerate(zip(plan.paths, plan.needs, strict=True)):
            index, pool = store.index, self._flow.settings.pool_of(group)
            if path.group.alone:
                lacking = [path.keys[at] for at in need.load]
                found = self._exchange.fetch_alone(lacking, index.find_alone(lacking), pool)
            else:
                keys = path.keys[: need.end]
                end = index.reachable_prefix(keys, 0)
                found = self._exchange.fetch(keys, end, index.follow(keys, end), pool)
            jobs.update(dict.fromkeys(found))
        for pin in pins:
            store.unpin(pin)
        return tuple(jobs)

    def _needed(self, plan: Plan) -> list[int]:
        """The nodes of what the prefix of `plan` needs and our tiers have; of a path the last alone, which keeps it."""
        index, nodes = self._store.index, list[int]()
        for path, need in zip(plan.paths, plan.needs, strict=True):
            if path.group.alone:
                nodes += index.find_alone([path.keys[at] for at in need.load])
            elif end := index.known_prefix(path.keys[: need.end], 0):
                nodes.append(index.get(path.keys[end - 1]))
        return [node for node in nodes if node]

    def sections(self, record: Record, blocks: Sequence[Sequence[int]]) -> list[Section]:
        """`blocks`, in order of group, as they belong to the held chunks. Raises `CacheError` if they do not fit."""
        per_chunk, held = self._flow.settings.blocks_per_chunk, {part.group: part.blocks for part in record.parts}
        counts = [held.get(group, 0) for group in range(len(self._flow.settings.groups))]
        if [len(each) for each in blocks] != counts:
            raise CacheError(f"the held chunks of each group have {counts} blocks, got {[len(b) for b in blocks]}")
        return [
            Section(
                part.group,
                part.positions[start] * per_chunk,
                tuple(blocks[part.group][start * per_chunk : end * per_chunk]),
            )
            for part in record.parts
            for start, end in runs_of(part.positions)
        ]

    def _check(self, plan: Plan) -> None:
        """Raise `CacheError` where what is to be loaded is not what it should be, before anything has changed."""
        index, (paths, _, needs) = self._store.index, plan
        for path, need in zip(paths, needs, strict=True):
            if path.group.alone:
                index.find_alone([path.keys[at] for at in need.load])
            else:
                for at in {*need.load[:1], *need.load[-1:]}:
                    index.check_link(path.keys, at)
                index.known_prefix(path.keys, need.end)  # as for the misses
        keys = [path.keys[at] for path, need in zip(paths, needs, strict=True) for at in need.load]
        self._check_distinct([*keys, *(n.partial.key for n in needs if n.partial and not n.partial.device)])

    @staticmethod
    def _check_distinct(keys: Sequence[Key]) -> None:
        if len(set(keys)) != len(keys):
            raise CacheError(f"the groups of a request have different keys, only {len(set(keys))} of {len(keys)} are")

    def _hold(self, group: int, path: Path, need: Need) -> Held:
        store, positions = self._store, list(need.load)
        in_a_row = bool(positions) and positions[-1] - positions[0] < len(positions)
        keys = list(path.keys[positions[0] : positions[-1] + 1]) if in_a_row else [path.keys[at] for at in positions]
        blocks = len(keys) * self._flow.settings.blocks_per_chunk
        if need.partial and not need.partial.device:
            keys.append(need.partial.key)
            positions.append(need.end)
            blocks += -(-need.partial.tokens // path.group.block_size)
        pinned = keys if path.group.alone else keys[-1:]
        pins: list[Pin] = [store.pin(store.index.get(key)) for key in pinned]
        return Held(keys, positions, pins, group, alone=path.group.alone, blocks=blocks)

    def _note(self, request: str | None, path: Path, need: Need) -> tuple[int, ...]:
        """Count what is missing, ask for what is not known of that, and record the request; the probes about it."""
        store = self._store
        if path.group.alone:
            unserved = path.unserved(need.end) if self._exchange else []
            probes = self._exchange.ask(unserved)
            for key in path.keys[max(need.end, path.last_window) :]:
                reason = store.watching.miss(key)
                abroad = reason is MissReason.ABSENT and self._exchange.has(key)
                store.counters.misses[MissReason.FOREIGN if abroad else reason] += 1
        else:
            known = store.index.known_prefix(path.keys, need.end)
            foreign, probes = self._exchange.look(path.keys, known) if self._exchange else (0, ())
            store.watching.count_misses(path.keys, need.end, known, foreign)
        if store.log.on:
            asked: tuple[Key, ...] = tuple(path.keys[need.first :])
            store.log.record(EventKind.REQUEST, request=request, keys=asked, length=need.end - need.first)
        return probes
