"""Lookups: which chunks of a prompt the tiers have, and leases on them.

    path       one KV cache group: the longest run of ready chunks
    chunks     single chunks, whatever is before them
    groups     all groups of a request: the longest prefix that every one of them serves. One lease keeps the chunks of
               all groups. Its load is one job with a section for each run of chunks, so that a layer-wise copy has
               the layers of all groups in the model's order
    fetch      the longest prefix with the chunks of remote tiers; those that it needs are read from there

A prefix is of use for all groups or for none: if one chunk is not available, nothing is loaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key, Section
from longshore.cache.columns import column, has_duplicates, leading, marks, numbers, once
from longshore.cache.events import EventKind
from longshore.cache.eviction.hit_rates import Return
from longshore.cache.groups import UNTOLD, GroupKeys, GroupSearch, Need, check_distinct, longest_served, runs_of
from longshore.cache.index import At, Residency, nodes_of
from longshore.cache.nodes import ROOT
from longshore.cache.remote import RemoteTiers
from longshore.cache.state import CacheState, Pin
from longshore.cache.transfers import LeasedChunks, Transfers
from longshore.cache.transfers import LeaseRecord as Record
from longshore.cache.types import Found, Lease, MissReason, Until
from longshore.errors import CacheError, LeaseError


class Leases:
    """The leases on one `CacheState`, by number."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._records: dict[int, Record] = {}
        self._step = array("i")
        """Nodes protected in this step, each once; some may have been removed since."""

    def __len__(self) -> int:
        """Number of leases not released, and of chunks protected until the end of the step."""
        return len(self._records) + int(np.count_nonzero(marks(self._state.seen)[np.unique(column(self._step))]))

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())

    def take(
        self, identity: int, parts: Sequence[LeasedChunks], request: str | None, *, is_multi_group: bool = False
    ) -> Lease:
        """A new lease on `parts`, whose nodes are pinned."""
        self._records[identity] = Record(parts, request, self._state.served, is_multi_group=is_multi_group)
        return Lease(identity)

    def get(self, lease: Lease) -> Record:
        """The record of `lease`. Raises `LeaseError` if it was released, or is no lease of this cache."""
        record = self._records.get(lease.id) if isinstance(lease, Lease) else None
        if record is None:
            raise LeaseError(f"expected a lease of this cache that was not released, got {lease!r}")
        return record

    def to_load(self, lease: Lease) -> Record:
        """The record of `lease`, to load it. Raises `LeaseError` if it was loaded, or is of single chunks."""
        record = self.get(lease)
        if not record.is_multi_group and record.parts[0].alone:
            raise LeaseError(f"lease {lease.id} is of single chunks, not of a path: load these by their keys")
        if record.load is not None:
            raise LeaseError(f"lease {lease.id} was loaded before; a lease serves one load")
        return record

    def drop(self, lease: Lease) -> None:
        """Remove `lease`, and record a use of its chunks by its request."""
        record = self._records.pop(lease.id)
        self._state.serve(record.tick)
        for part in record.parts:
            nodes = [node for pin in part.pins if (node := pin.node)]
            if part.alone:
                self._state.windows.serve(nodes)
            elif nodes:
                nodes = self._state.index.path(nodes[0], part.positions[-1] - part.positions[0] + 1)
            self._state.touch(nodes if not part.alone else nodes[::-1])
            for pin in part.pins:
                self._state.unpin(pin)

    def of(self, request: str) -> list[Lease]:
        """The leases of `request`."""
        return [Lease(identity) for identity, record in self._records.items() if record.request == request]

    def protect(self, at: npt.NDArray[np.int32]) -> None:
        """Protect the nodes `at` from eviction until `end_step`, those in the warmest tier in that tier."""
        seen = marks(self._state.seen)
        fresh = once(at[seen[at] == 0])
        seen[fresh] = 1
        self._step.frombytes(fresh.tobytes())

    @property
    def protects(self) -> bool:
        """Whether nodes are protected until the end of the step."""
        return bool(self._step)

    def forget_step(self) -> None:
        """The cache was cleared: nothing is protected any more."""
        self._step = array("i")

    def end_step(self) -> None:
        """The step has ended: remove all protections."""
        if self._step:
            at, self._step = column(self._step), array("i")
            marks(self._state.seen)[at] = 0
            self._state.reconsider(at)
        self._state.invalidate_quarantined()

    def check_integrity(self) -> None:
        """Raise `CacheError` unless all pins are those of leases, and all marks those of protected nodes."""
        held = [pin for record in self for part in record.parts for pin in part.pins]
        ours = {pin for pin in held if pin.node}
        theirs = {pin for pins in self._state.pins.values() for pin in pins}
        if ours != theirs:
            raise CacheError(f"the cache has {len(theirs)} pins, the leases {len(ours)}")
        seen = set(np.flatnonzero(marks(self._state.seen)).tolist())
        if not seen <= set(self._step):
            raise CacheError(f"{len(seen)} nodes are marked as protected, expected {len(set(self._step))}")


class MultiGroupPrefix(NamedTuple):
    """The longest prefix that the `paths` of all groups serve, in `tokens`, and what each needs of it."""

    paths: Sequence[GroupSearch]
    tokens: int
    needs: tuple[Need, ...]


class Lookups:
    """Lookups on one `Transfers`. `advance` sets its time, after all arguments were checked."""

    def __init__(
        self, transfers: Transfers, leases: Leases, remote: RemoteTiers, advance: Callable[[float], None]
    ) -> None:
        self._transfers = transfers
        self._state = transfers.state
        self._leases = leases
        self._remote = remote
        self._advance = advance

    # ------------------------------------------------------------------ one group

    def path(
        self,
        group: int,
        path: GroupKeys,
        now: float,
        until: Until,
        request: str | None,
        tick: int | None,
        said: Return | None,
        *,
        count: bool,
        asks: bool,
    ) -> Found:
        """`TieredCache.lookup` of one `path` of `group`; `asks`: remote tiers, for what is missing."""
        keys, start, text, index = path.names, path.first, path.text, self._state.index
        before: Sequence[Key] = ()
        if start == UNTOLD and keys:
            before = index.path_to(keys[0])[:-1]
            keys, start = [*before, *keys], len(before)
        check_first(keys, start)
        self._transfers.settings.pool_of(group)
        if self._transfers.settings.groups:
            self._transfers.settings.group(group)
        size = 0 if text is None else self._transfers.settings.group(group)[1]
        if text is not None and self._transfers.settings.stands_alone(group):
            raise CacheError(f"expected no text with group {group}, whose chunks stand alone")
        text = text and text.checked()
        end = index.reachable_prefix(keys, start)
        index.find(keys[start - 1 : start] if start else ())
        for position in {start, max(start, end - 1), end} - {len(keys)}:
            index.check_link(keys, position)
        # Remote tiers are asked for each key behind these, so their order is checked; else a bisection suffices.
        known = end + len(index.follow(keys, end)) if self._remote.tiers else index.known_prefix(keys, end)
        partial = None if text is None else self._state.partials.closest(keys, end, text, size)
        self._advance(now)
        tick = self._serve(tick, keys, until, end, said=said)
        remote, probes = 0, tuple[int, ...]()
        if self._remote.tiers:
            remote, probes = self._remote.look(keys, known, asks=asks)
        if count:
            self._state.count_misses(keys, end, known, remote)
            if self._state.log.on:
                asked, found = tuple(keys), end - start
                self._state.log.record(EventKind.REQUEST, request=request, keys=asked, start=start, length=found)
        leased = keys[start:end] if partial is None or partial.device else [*keys[start:end], partial.key]
        lease = None
        if until is Until.STEP:
            self._leases.protect(numbers(index.find(leased)))
        elif leased and until is Until.RELEASE:
            if self._remote.tiers:
                self._remote.found(keys[start:end])
            pins = (self._state.pin(index.get(leased[-1])),)
            held = LeasedChunks(leased, range(start, start + len(leased)), pins, group)
            lease = self._leases.take(self._transfers.new_id(), (held,), request)
        return Found(lease, end - start, partial=partial, remote=remote, probes=probes, tick=tick, before=before)

    def chunks(
        self,
        paths: Mapping[int, GroupKeys],
        now: float,
        until: Until,
        request: str | None,
        tick: int | None,
        said: Return | None,
        *,
        asks: Collection[str] = (),
    ) -> Found:
        """`TieredCache.lookup` with `each`."""
        if any(path.first or path.device is not None for path in paths.values()):
            raise CacheError("expected no `first` and no `device` in a lookup with `each`")
        found = {group: self._residency(path.keys) for group, path in paths.items()}
        index, parts = self._state.index, list[tuple[int, Residency, list[int]]]()
        if until is Until.RELEASE:
            for group, here in found.items():
                there = np.flatnonzero(index.are_reachable(here.at)).tolist()
                self._check_chunks(group, here.at[there])
                parts.append((group, here, there))
        self._advance(now)
        if until is Until.NOTHING:
            probes = self._remote.ask([key for here in found.values() for key in here.keys], asks) if asks else ()
            theirs = found if self._remote.tiers else {}
            sources = {group: self._remote.sources(here.keys) for group, here in theirs.items()}
            return Found(probes=probes, tick=tick, residency=found, remote_sources=sources)
        if tick is None:
            asked = [key for here in found.values() for key in here.keys]
            head = next((here.at for here in found.values()), np.zeros(0, np.int32))
            tick = self._state.begin(asked, leading(head != ROOT), said)
        self._state.serve(tick)
        if until is Until.STEP:
            for here in found.values():
                self._leases.protect(here.at[index.are_reachable(here.at)])
            return Found(tick=tick, residency=found)
        held = [
            LeasedChunks(
                [here.keys[position] for position in there],
                there,
                [self._state.pin(node) for node in here.at[there].tolist()],
                group,
                alone=True,
            )
            for group, here, there in parts
            if there
        ]
        lease = self._leases.take(self._transfers.new_id(), held, request) if held else None
        return Found(lease, sum(len(part.keys) for part in held), tick=tick, residency=found)

    def fetch_path(self, group: int, path: GroupKeys, now: float, longest: float) -> tuple[int, ...]:
        """Read chunks behind the ready prefix of one path from remote tiers that have them; as `fetch`."""
        keys, start = path.names, path.first
        check_first(keys, start)
        pool, index = self._transfers.settings.pool_of(group), self._state.index
        if self._transfers.settings.stands_alone(group):
            nodes = index.find_alone(keys[start:])
            self._state.check_pool(nodes, pool)
            self._advance(now)
            return self._remote.fetch_alone(keys[start:], nodes, pool, self._transfers.now + longest)
        end = index.reachable_prefix(keys, start)
        nodes = index.follow(keys, end)
        self._state.check_pool([*nodes[:1], index.get(keys[end - 1]) if end else 0], pool)
        self._advance(now)
        return self._remote.fetch(keys, end, nodes, pool, self._transfers.now + longest)

    def warm(self, keys: Sequence[Key] | Residency, group: int) -> tuple[Sequence[Key], At]:
        """Keys and nodes of chunks of `group`. Raises `CacheError` unless all are ready in the warmest tier."""
        index = self._state.index
        mine, at = nodes_of(index, keys)
        if not len(at):
            raise CacheError(f"expected chunks of group {group}, got none")
        lacking = np.flatnonzero((at == ROOT) | (marks(index.reachable)[at] == 0)).tolist()
        if lacking:
            name = mine[lacking[0]].hex()[:12]
            raise CacheError(f"{len(lacking)} of {len(at)} chunks are not ready in any tier, the first is {name}")
        self._check_chunks(group, at)
        if not index.are_ready(at, 0).all():
            raise CacheError(f"not all of {len(at)} chunks are ready in the warmest tier: prefetch them first")
        return mine, at

    # ------------------------------------------------------------------ all groups

    def groups(
        self,
        paths: Mapping[int, GroupKeys],
        now: float,
        until: Until,
        request: str | None,
        tick: int | None,
        said: Return | None,
        *,
        count: bool,
        asks: bool,
    ) -> Found:
        """`TieredCache.lookup` of all groups; `asks` as for `path`."""
        wanted = self._of_all_groups(paths)
        plan = self._checked_plan(wanted)
        self._advance(now)
        tick = self._serve(tick, [key for path in wanted for key in path.names], until, said=said)
        return self._found(plan, wanted, request, tick, until, count=count, asks=asks)

    def _checked_plan(self, wanted: Sequence[GroupKeys]) -> MultiGroupPrefix:
        """The longest prefix that all groups serve. Raises `CacheError` for invalid keys, also behind it."""
        plan = self._plan(self._paths(wanted))
        self._check(plan)
        self._check_all(wanted)  # keys that are not found are checked, too
        return plan

    def _check_all(self, wanted: Sequence[GroupKeys]) -> None:
        """Raise `CacheError` unless all keys are valid, whatever the prefix."""
        index, keys = self._state.index, list[Key]()
        for group, path in enumerate(self._paths(wanted)):
            keys += path.keys
            ready = 0 if path.group.alone else index.reachable_prefix(path.keys, 0)
            nodes = index.find_alone(path.keys) if path.group.alone else index.follow(path.keys, ready)
            head = [index.get(path.keys[ready - 1])] if ready else []
            self._state.check_pool([*head, *nodes], self._transfers.settings.pool_of(group))
        check_distinct(keys)

    def _paths(self, wanted: Sequence[GroupKeys], *, with_remote: bool = False) -> list[GroupSearch]:
        state, settings = self._state, self._transfers.settings
        has = self._remote.has if with_remote else None
        return [
            GroupSearch(state.index, state.partials, *settings.group(group), each, has_remote=has)
            for group, each in enumerate(wanted)
        ]

    @staticmethod
    def _plan(paths: Sequence[GroupSearch]) -> MultiGroupPrefix:
        tokens = longest_served(paths)
        return MultiGroupPrefix(paths, tokens, tuple(path.need(tokens) for path in paths))

    def _could_be(self, wanted: Sequence[GroupKeys]) -> MultiGroupPrefix:
        """The longest prefix with the chunks that remote tiers are known to have, and those in flight."""
        return self._plan(self._paths([each._replace(text=None) for each in wanted], with_remote=True))

    def _found(
        self,
        plan: MultiGroupPrefix,
        wanted: Sequence[GroupKeys],
        request: str | None,
        tick: int | None,
        until: Until,
        *,
        count: bool,
        asks: bool,
    ) -> Found:
        """The result for `plan`, with a lease on the chunks that it needs."""
        paths, tokens, needs = plan
        probes = tuple(
            probe
            for group, (path, need) in enumerate(zip(paths, needs, strict=True))
            for probe in self._note(request and f"{request}/{group}", path, need, count=count, asks=asks)
        )
        needed = [
            (group, path, need)
            for group, (path, need) in enumerate(zip(paths, needs, strict=True))
            if need.load or (need.partial and not need.partial.device)
        ]
        lease = None
        if until is Until.STEP:
            for _, path, need in needed:
                self._leases.protect(numbers(self._state.index.find(self._leased(path, need)[0])))
        elif until is Until.RELEASE and needed:
            parts = [self._hold(*each) for each in needed]
            lease = self._leases.take(self._transfers.new_id(), parts, request, is_multi_group=True)
        more = self._could_be(wanted).tokens if self._remote.tiers else 0
        remote = max(0, more - tokens)
        return Found(lease, tokens=tokens, needs=needs, remote=remote, probes=probes, tick=tick)

    def fetch(self, paths: Mapping[int, GroupKeys], now: float, longest: float) -> tuple[int, ...]:
        """Read from remote tiers what the longest prefix needs and no own tier has, for at most `longest` seconds;
        returns its jobs, and those in flight.

        No chunk that the prefix needs is evicted for the others.
        """
        wanted = self._of_all_groups(paths)
        self._check_all(wanted)
        self._advance(now)
        state, plan, jobs = self._state, self._could_be(wanted), dict[int, None]()
        pins = [state.pin(node) for node in self._needed(plan)]
        for group, (path, need) in enumerate(zip(plan.paths, plan.needs, strict=True)):
            index, pool = state.index, self._transfers.settings.pool_of(group)
            if path.group.alone:
                lacking = [path.keys[at] for at in need.load]
                found = self._remote.fetch_alone(
                    lacking, index.find_alone(lacking), pool, self._transfers.now + longest
                )
            else:
                keys = path.keys[: need.end]
                end = index.reachable_prefix(keys, 0)
                found = self._remote.fetch(keys, end, index.follow(keys, end), pool, self._transfers.now + longest)
            jobs.update(dict.fromkeys(found))
        for pin in pins:
            state.unpin(pin)
        return tuple(jobs)

    def _needed(self, plan: MultiGroupPrefix) -> list[int]:
        """The nodes to pin for the prefix of `plan`: of a path only the last one, which keeps its ancestors."""
        index, nodes = self._state.index, list[int]()
        for path, need in zip(plan.paths, plan.needs, strict=True):
            if path.group.alone:
                nodes += index.find_alone([path.keys[at] for at in need.load])
            elif end := index.known_prefix(path.keys[: need.end], 0):
                nodes.append(index.get(path.keys[end - 1]))
        return [node for node in nodes if node]

    def sections(self, record: Record, blocks: Sequence[Sequence[int]]) -> list[Section]:
        """The sections that load the leased chunks into `blocks`, by group. Raises `CacheError` for a wrong number."""
        per_chunk, held = self._transfers.settings.blocks_per_chunk, {part.group: part.blocks for part in record.parts}
        counts = [held.get(group, 0) for group in range(len(self._transfers.settings.groups))]
        if [len(each) for each in blocks] != counts:
            raise CacheError(f"expected {counts} blocks for the chunks of each group, got {[len(b) for b in blocks]}")
        return [
            Section(
                part.group,
                part.positions[start] * per_chunk,
                tuple(blocks[part.group][start * per_chunk : end * per_chunk]),
            )
            for part in record.parts
            for start, end in runs_of(part.positions)
        ]

    def _check(self, plan: MultiGroupPrefix) -> None:
        """Raise `CacheError` for invalid keys among the chunks to load, before anything has changed."""
        index, (paths, _, needs) = self._state.index, plan
        for path, need in zip(paths, needs, strict=True):
            if path.group.alone:
                index.find_alone([path.keys[at] for at in need.load])
            else:
                for at in {*need.load[:1], *need.load[-1:]}:
                    index.check_link(path.keys, at)
                index.known_prefix(path.keys, need.end)  # as when misses are counted
        keys = [path.keys[at] for path, need in zip(paths, needs, strict=True) for at in need.load]
        check_distinct([*keys, *(n.partial.key for n in needs if n.partial and not n.partial.device)])

    def _leased(self, path: GroupSearch, need: Need) -> tuple[list[Key], list[int]]:
        """The chunks to lease for `need`, and their positions."""
        positions = list(need.load)
        in_a_row = bool(positions) and positions[-1] - positions[0] < len(positions)
        keys = list(path.keys[positions[0] : positions[-1] + 1]) if in_a_row else [path.keys[at] for at in positions]
        if need.partial and not need.partial.device:
            keys.append(need.partial.key)
            positions.append(need.end)
        return keys, positions

    def _hold(self, group: int, path: GroupSearch, need: Need) -> LeasedChunks:
        state, (keys, positions) = self._state, self._leased(path, need)
        blocks = len(need.load) * self._transfers.settings.blocks_per_chunk
        if need.partial and not need.partial.device:
            blocks += -(-need.partial.tokens // path.group.block_size)
        pinned = keys if path.group.alone else keys[-1:]
        pins: list[Pin] = [state.pin(state.index.get(key)) for key in pinned]
        return LeasedChunks(keys, positions, pins, group, alone=path.group.alone, blocks=blocks)

    def _note(self, request: str | None, path: GroupSearch, need: Need, *, count: bool, asks: bool) -> tuple[int, ...]:
        """With `asks`, probe remote tiers for missing chunks; with `count`, count misses and the request."""
        state, misses = self._state, list[MissReason]()
        if path.group.alone:
            theirs = self._remote.tiers
            probes = self._remote.ask(path.unserved(need.end)) if theirs and asks else ()
            for key in path.keys[max(need.end, path.last_window) :]:
                reason = state.miss(key)
                is_remote = theirs and reason is MissReason.ABSENT and self._remote.has(key)
                misses.append(MissReason.REMOTE if is_remote else reason)
            state.counters.misses.update(misses if count else ())
        else:
            known = state.index.known_prefix(path.keys, need.end)
            remote, probes = self._remote.look(path.keys, known, asks=asks) if self._remote.tiers else (0, ())
            if count:
                state.count_misses(path.keys, need.end, known, remote)
        if count and state.log.on:
            asked: tuple[Key, ...] = tuple(path.keys[need.first :])
            state.log.record(EventKind.REQUEST, request=request, keys=asked, length=need.end - need.first)
        return probes

    # ------------------------------------------------------------------ inside

    def _serve(
        self,
        tick: int | None,
        keys: Sequence[Key],
        until: Until,
        known: int | None = None,
        *,
        said: Return | None,
    ) -> int | None:
        """Set the request that the following uses are counted for: that of `tick`, or a new one for `keys`."""
        if tick is None and until is not Until.NOTHING:
            if known is None:
                known = leading(nodes_of(self._state.index, keys)[1] != ROOT)
            tick = self._state.begin(keys, known, said)
        if until is not Until.NOTHING:
            self._state.serve(tick)
        return tick

    def _residency(self, keys: Sequence[Key] | Residency) -> Residency:
        if isinstance(keys, Residency):
            keys = keys.keys
        return Residency.take(self._state.index, self._state.pools[0], keys)

    def _check_chunks(self, group: int, at: At) -> None:
        """Raise `CacheError` unless the nodes `at` are distinct, and of `group`."""
        if has_duplicates(at):
            raise CacheError(f"expected {len(at)} distinct chunks, got {len(np.unique(at))}")
        if self._transfers.settings.stands_alone(group):
            self._state.index.check_alone(at)
        self._state.check_pool(
            at.tolist() if self._state.several_sizes else (), self._transfers.settings.pool_of(group)
        )

    def _of_all_groups(self, paths: Mapping[int, GroupKeys]) -> list[GroupKeys]:
        """`paths` in order of group. Raises `CacheError` unless there is one of each."""
        groups = range(len(self._transfers.settings.groups))
        if not groups or set(paths) != set(groups):
            raise CacheError(f"expected the keys of one group, or of all {len(groups)}, got groups {sorted(paths)}")
        if any(path.first for path in paths.values()):
            raise CacheError("expected `device` in a lookup of all groups, got `first`")
        return [paths[group] for group in groups]


def check_first(keys: Sequence[Key], first: int) -> None:
    """Raise `CacheError` unless `first` is a position in `keys`, or their number."""
    if not 0 <= first <= len(keys):
        raise CacheError(f"first: expected a position in [0, {len(keys)}], got {first}")
