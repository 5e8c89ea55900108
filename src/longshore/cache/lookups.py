"""Lookups: which chunks of a prompt the tiers have, and leases on them.

    path       one KV cache group: the longest run of ready chunks
    chunks     single chunks, whatever is before them
    groups     all groups of a request: the longest prefix that is available in every one. One lease keeps the chunks of
               all groups. Its load is one job with a section for each run of chunks, so that a layer-wise copy has
               the layers of all groups in the model's order
    fetch      chunks of one group that remote tiers have

A prefix is of use for all groups or for none: if one chunk is not available, nothing is loaded.

                          prefix end ─┐
    full attention   ■ ■ ■ ■ ■ ■ ■ ■ ■ │       every chunk
    sliding window               ■ ■ ■ │       the chunks of the last `window` tokens; older ones may be missing
    recurrent                        ■ │       the last one, which has the state at its end

A chunk is available if the device has it, or it can be loaded from a tier. With full attention, that implies its
ancestors, so bisection finds the end. In other groups the search goes backwards: a missing chunk excludes every length
that needs it, so the next length to try ends before it, and no key is looked up twice.

    Lease       what a request has: none of its chunks is evicted until it is released
    NodeRef     a reference on one node, which keeps that chunk and those before it from eviction; a lease has some
    protected   a chunk that a lookup with `Protection.STEP` has found: not evicted until `end_step`
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key, Section
from longshore.cache.columns import I32, as_i32, count_leading, has_duplicates, runs_of, u8_view, unique
from longshore.cache.events import EventKind
from longshore.cache.eviction_policies.hit_rates import ReuseHint
from longshore.cache.index import Index, Residency, nodes_of
from longshore.cache.nodes import ROOT
from longshore.cache.partial import Partial, PartialPrefixes
from longshore.cache.remote import RemoteTiers
from longshore.cache.settings import CacheGroup
from longshore.cache.state import CacheState, NodeRef
from longshore.cache.transfers import Load, Transfers, Waiter
from longshore.cache.types import UNKNOWN_START, GroupKeys, GroupMatch, Lease, LookupResult, Protection, check_distinct
from longshore.errors import CacheError, LeaseError


@dataclass(slots=True, eq=False)
class LeasedChunks:
    """Leased chunks of one KV cache group: those at `positions` of `path`, kept by references to nodes.

    `path` is what the caller has passed, not a copy of it: to copy thousands of keys takes longer than to find them. A
    reference to the last chunk keeps a path. Chunks that are `independent` have one each. `blocks` is the number of
    device blocks of a load, where the lookup has determined it.
    """

    path: Sequence[Key]
    positions: Sequence[int]
    refs: Sequence[NodeRef]
    group: int = 0
    independent: bool = field(default=False, kw_only=True)
    blocks: int = field(default=0, kw_only=True)
    _last: Key = field(init=False)

    def __post_init__(self) -> None:
        self._last = self.path[self.positions[-1]]

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of the chunks."""
        if isinstance(self.positions, range):
            return self.path[self.positions.start : self.positions.stop]
        return [self.path[position] for position in self.positions]

    def check_unchanged(self) -> None:
        """Raise `LeaseError` if the last key is another one than when it was looked up."""
        last = self.positions[-1]
        if len(self.path) <= last or self.path[last] != self._last:
            raise LeaseError(
                "the keys that were looked up have changed since: pass a list that nothing is removed from"
            )

    def nodes(self, index: Index) -> list[int]:
        """The nodes of the chunks, head first, up to the first one that was removed."""
        if self.independent:
            return list(takewhile(bool, (ref.node for ref in self.refs)))
        tail = self.refs[0].node
        if not tail:
            return index.loadable_nodes(self.keys)
        last = self.positions[-1]
        path = index.path(tail, last - self.positions[0] + 1)
        nodes: list[int] = (
            path[::-1] if len(path) == len(self.positions) else path[last - np.asarray(self.positions)]
        ).tolist()
        return nodes


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """What the control plane knows of a lease: the leased chunks, of one or several groups, its load and prefetch."""

    groups: Sequence[LeasedChunks]
    request: str | None
    request_number: int
    is_multi_group: bool = field(kw_only=True)
    load: Load | None = None
    prefetch: Waiter | None = None

    @property
    def keys(self) -> list[Key]:
        """The keys of all groups, one group after the other."""
        return [key for chunks in self.groups for key in chunks.keys]

    def nodes(self, index: Index) -> list[int]:
        """The nodes of all groups, of each up to the first one that was removed."""
        return [node for chunks in self.groups for node in chunks.nodes(index)]


class Leases:
    """The leases on one `CacheState`, by number."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._records: dict[int, LeaseRecord] = {}
        self._step = array("i")
        """Nodes protected in this step, each once; some may have been removed since."""

    def __len__(self) -> int:
        """Number of leases not released."""
        return len(self._records)

    @property
    def protected(self) -> int:
        """Number of chunks that lookups protect until the end of the step."""
        return int(np.count_nonzero(u8_view(self._state.protected)[np.unique(as_i32(self._step))]))

    def __iter__(self) -> Iterator[LeaseRecord]:
        return iter(self._records.values())

    def take(
        self, identity: int, groups: Sequence[LeasedChunks], request: str | None, *, is_multi_group: bool = False
    ) -> Lease:
        """A new lease on `groups`, whose nodes are referenced."""
        self._records[identity] = LeaseRecord(
            groups, request, self._state.current_request, is_multi_group=is_multi_group
        )
        return Lease(identity)

    def get(self, lease: Lease) -> LeaseRecord:
        """The record of `lease`. Raises `LeaseError` if it was released, or is no lease of this cache."""
        record = self._records.get(lease.id) if isinstance(lease, Lease) else None
        if record is None:
            raise LeaseError(f"expected a lease of this cache that was not released, got {lease!r}")
        return record

    def to_load(self, lease: Lease) -> LeaseRecord:
        """The record of `lease`, to load it. Raises `LeaseError` if it was loaded, or is of single chunks."""
        record = self.get(lease)
        if not record.is_multi_group and record.groups[0].independent:
            raise LeaseError(f"lease {lease.id} is of single chunks, not of a path: load these by their keys")
        if record.load is not None:
            raise LeaseError(f"lease {lease.id} was loaded before; a lease serves one load")
        for chunks in record.groups:
            chunks.check_unchanged()
        return record

    def release(self, lease: Lease) -> None:
        """Remove `lease`, and record a use of its chunks by its request."""
        record = self._records.pop(lease.id)
        self._state.set_request(record.request_number)
        for chunks in record.groups:
            nodes = [node for ref in chunks.refs if (node := ref.node)]
            if chunks.independent:
                self._state.windows.mark_used(nodes)
                self._state.touch(nodes[::-1])
            elif nodes:
                length = chunks.positions[-1] - chunks.positions[0] + 1
                self._state.touch(self._state.index.path(nodes[0], length))
            for ref in chunks.refs:
                self._state.remove_ref(ref)

    def protect(self, nodes: npt.NDArray[np.int32]) -> None:
        """Protect `nodes` from eviction until `end_step`, those in the host tier in that tier."""
        seen = u8_view(self._state.protected)
        fresh = unique(nodes[seen[nodes] == 0])
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
            nodes, self._step = as_i32(self._step), array("i")
            u8_view(self._state.protected)[nodes] = 0
            self._state.recheck_evictable(nodes)
        self._state.discard_invalid_copies()

    def check_integrity(self) -> None:
        """Raise `CacheError` unless all references are those of leases, and all marks those of protected nodes."""
        refs = [ref for record in self for chunks in record.groups for ref in chunks.refs]
        ours = {ref for ref in refs if ref.node}
        theirs = {ref for refs in self._state.refs.values() for ref in refs}
        if ours != theirs:
            raise CacheError(f"the index has {len(theirs)} references to nodes, the leases have {len(ours)}")
        seen = set(np.flatnonzero(u8_view(self._state.protected)).tolist())
        if not seen <= set(self._step):
            raise CacheError(f"{len(seen)} nodes are marked as protected, expected {len(set(self._step))}")


class GroupSearch:
    """The search for the longest available prefix in one group, whose chunks have `chunk_tokens` tokens each."""

    def __init__(
        self, index: Index, partials: PartialPrefixes, group: CacheGroup, chunk_tokens: int, wanted: GroupKeys
    ) -> None:
        self.keys, device = wanted.keys, () if wanted.device is None else wanted.device
        if len(device) > len(self.keys):
            raise CacheError(f"device: expected at most {len(self.keys)} values, one for each key, got {len(device)}")
        self.prompt_tokens = None if wanted.prompt_tokens is None else wanted.prompt_tokens.checked()
        self.group = group
        self.chunk_tokens = chunk_tokens
        self.last_window = group.first_needed(len(self.keys) * chunk_tokens, chunk_tokens)
        """The first chunk that would be needed if all of them were available."""
        self._index = index
        self._partials = partials
        self._device = np.zeros(len(self.keys), bool)
        self._device[: len(device)] = np.asarray(device, bool)
        self._clear = len(self.keys)  # chunks from here on that were examined are available

    def longest(self, tokens: int) -> int:
        """An upper bound of the longest available prefix, at most `tokens`; equal to that if it is available."""
        end = tokens // self.chunk_tokens
        missing = self._missing(self.group.first_needed(tokens, self.chunk_tokens), end)
        return tokens if missing is None else missing * self.chunk_tokens

    def beyond(self, tokens: int, most: int) -> int:
        """How many tokens after an available prefix of `tokens` are, too, with a partial chunk; at most `most`."""
        if self.prompt_tokens is None or self.group.recurrent:
            return 0
        at, size = tokens // self.chunk_tokens, self.chunk_tokens
        while at * size < tokens + most and self._is_available(at):
            at += 1
        near = self._partials.closest(self.keys, at, self.prompt_tokens, size) if at <= len(self.keys) else None
        return min(most, at * size - tokens + (near.tokens if near else 0))

    def match(self, tokens: int) -> GroupMatch:
        """What an available prefix of `tokens` tokens consists of in this group."""
        first, end = self.group.first_needed(tokens, self.chunk_tokens), tokens // self.chunk_tokens
        load = first + np.flatnonzero(~self._device[first:end])
        return GroupMatch(first, end, tuple(load.tolist()), self._partial(end, tokens % self.chunk_tokens))

    def _partial(self, at: int, tokens: int) -> Partial | None:
        """Where the first `tokens` tokens of the chunk at `at` come from, if any are needed."""
        if not tokens or self.prompt_tokens is None:
            return None
        if self._is_available(at):
            return Partial(self.keys[at], tokens, bool(self._device[at]))
        near = self._partials.closest(self.keys, at, self.prompt_tokens, self.chunk_tokens)
        return near and near._replace(tokens=tokens)

    def _is_available(self, at: int) -> bool:
        """Whether the chunk at `at` is on the device, or can be read from a tier."""
        return at < len(self.keys) and bool(self._device[at] or self._index.is_loadable(self.keys[at]))

    def _missing(self, first: int, end: int) -> int | None:
        """The last chunk of `[first, end)` that is not available, of those examined; `None` if all are."""
        if not self.group.is_independent:
            ready = self._index.loadable_prefix(self.keys[:end], 0)
            ready += count_leading(self._device[ready:end])
            if self._index.orphans and 0 < ready < end and self._device[:ready].all():
                ready = self._index.loadable_prefix(self.keys[:end], ready)
                ready += count_leading(self._device[ready:end])
            return None if ready >= end else ready
        at = min(self._clear, end)
        while at > first and self._is_available(at - 1):
            at -= 1
        self._clear = at
        return None if at <= first else at - 1


def longest_available(paths: Sequence[GroupSearch]) -> int:
    """The longest prefix, in tokens, that is available in every one of `paths`.

    It is a multiple of the chunk sizes of all groups, plus, for partial matches, fewer tokens than another multiple.
    """
    unit = math.lcm(*(path.chunk_tokens for path in paths))
    tokens = min(len(path.keys) * path.chunk_tokens for path in paths) // unit * unit
    while True:
        shorter = tokens
        for path in paths:
            shorter = path.longest(shorter) // unit * unit
        if shorter == tokens:
            return tokens + min(path.beyond(tokens, unit - 1) for path in paths)
        tokens = shorter


class LookupCall(NamedTuple):
    """Arguments of `TieredCache.lookup`, checked. `probes_remote`: whether a lookup of a path asks remote tiers."""

    now: float
    protect: Protection
    request: str | None
    request_number: int | None
    reuse_hint: ReuseHint | None
    counts: bool
    probes_remote: bool


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

    def path(self, group: int, path: GroupKeys, call: LookupCall) -> LookupResult:
        """`TieredCache.lookup` of one `path` of `group`."""
        keys, start, prompt_tokens, index = path.keys, path.start, path.prompt_tokens, self._state.index
        settings = self._transfers.settings
        ancestor_keys: Sequence[Key] = ()
        if start == UNKNOWN_START and keys:
            ancestor_keys = index.ancestor_keys(index.get(keys[0]))
            keys, start = [*ancestor_keys, *keys], len(ancestor_keys)
        check_start(keys, start)
        settings.size_class_of(group)
        if settings.groups:
            settings.group(group)
        size = 0 if prompt_tokens is None else settings.group(group)[1]
        if prompt_tokens is not None and settings.is_independent(group):
            raise CacheError(f"expected no `prompt_tokens` with group {group}, whose chunks are independent")
        prompt_tokens = prompt_tokens and prompt_tokens.checked()
        end = index.loadable_prefix(keys, start)
        if start:
            index.get(keys[start - 1])
        for position in {start, max(start, end - 1), end} - {len(keys)}:
            index.check_link(keys, position)
        # Remote tiers are asked for each key after these, so their order is checked; else a bisection suffices.
        known = end + len(index.follow(keys, end)) if self._remote.tiers else index.indexed_prefix(keys, end)
        partial = None if prompt_tokens is None else self._state.partials.closest(keys, end, prompt_tokens, size)
        self._advance(call.now)
        request_number = self._set_request(call, keys, end)
        remote: int = 0
        probes: tuple[int, ...] = ()
        if self._remote.tiers:
            remote, probes = self._remote.known_after(keys, known, probe=call.probes_remote)
        if call.counts:
            if end < len(keys):
                self._state.count_misses(keys, end, known, remote)
            if self._state.log.on:
                asked, found = tuple(keys), end - start
                self._state.log.record(EventKind.REQUEST, request=call.request, keys=asked, start=start, length=found)
        leased, stop = (keys, end) if partial is None or partial.device else ([*keys[:end], partial.key], end + 1)
        lease = None
        if call.protect is Protection.STEP:
            self._leases.protect(index.locate(leased[start:stop]))
        elif stop > start and call.protect is Protection.LEASE:
            if self._remote.tiers:
                self._remote.found(keys[start:end])
            refs = (self._state.add_ref(index.get(leased[stop - 1])),)
            chunks = LeasedChunks(leased, range(start, stop), refs, group)
            lease = self._leases.take(self._transfers.new_id(), (chunks,), call.request)
        return LookupResult(
            lease,
            end - start,
            partial=partial,
            remote=remote,
            probes=probes,
            request_number=request_number,
            ancestor_keys=ancestor_keys,
        )

    def chunks(self, paths: Mapping[int, GroupKeys], call: LookupCall, tiers: Collection[str]) -> LookupResult:
        """`TieredCache.lookup` with `independent`, which asks the remote `tiers`."""
        if any(path.start or path.device is not None for path in paths.values()):
            raise CacheError("expected no `start` and no `device` in a lookup with `independent`")
        index, ready = self._state.index, list[tuple[int, Residency, list[int]]]()
        residency = {group: Residency.take(index, self._state.pools[0], path.keys) for group, path in paths.items()}
        if call.protect is Protection.LEASE:
            for group, here in residency.items():
                there = np.flatnonzero(index.are_loadable(here.nodes)).tolist()
                self._check_chunks(group, here.nodes[there])
                ready.append((group, here, there))
        self._advance(call.now)
        if call.protect is Protection.NONE:
            probes = self._remote.ask([key for here in residency.values() for key in here.keys], tiers) if tiers else ()
            theirs = residency if self._remote.tiers else {}
            sources = {group: self._remote.sources(here.keys) for group, here in theirs.items()}
            return LookupResult(
                probes=probes, request_number=call.request_number, residency=residency, remote_sources=sources
            )
        request_number = call.request_number
        if request_number is None:
            asked = [key for here in residency.values() for key in here.keys]
            head = next((here.nodes for here in residency.values()), np.zeros(0, np.int32))
            request_number = self._state.begin_request(asked, count_leading(head != ROOT), call.reuse_hint)
        self._state.set_request(request_number)
        if call.protect is Protection.STEP:
            for here in residency.values():
                self._leases.protect(here.nodes[index.are_loadable(here.nodes)])
            return LookupResult(request_number=request_number, residency=residency)
        leased = [
            LeasedChunks(
                here.keys,
                there,
                [self._state.add_ref(node) for node in here.nodes[there].tolist()],
                group,
                independent=True,
            )
            for group, here, there in ready
            if there
        ]
        lease = self._leases.take(self._transfers.new_id(), leased, call.request) if leased else None
        return LookupResult(
            lease, sum(len(each.positions) for each in leased), request_number=request_number, residency=residency
        )

    def fetch(self, group: int, path: GroupKeys, now: float, timeout: float) -> tuple[int, ...]:
        """Read chunks after the ready prefix of `path` from remote tiers that have them, for at most `timeout`
        seconds; returns its jobs, and those in flight.
        """
        keys, start = path.keys, path.start
        check_start(keys, start)
        size_class, index = self._transfers.settings.size_class_of(group), self._state.index
        if self._transfers.settings.is_independent(group):
            nodes = index.find_independent(keys[start:])
            self._state.check_size_class(nodes, size_class)
            self._advance(now)
            return self._remote.fetch_independent(keys[start:], nodes, size_class, self._transfers.now + timeout)
        end = index.loadable_prefix(keys, start)
        nodes = index.follow(keys, end).tolist()
        self._state.check_size_class([*nodes[:1], index.get(keys[end - 1]) if end else 0], size_class)
        self._advance(now)
        return self._remote.fetch(keys, end, nodes, size_class, self._transfers.now + timeout)

    def in_host(self, keys: Sequence[Key] | Residency, group: int) -> tuple[Sequence[Key], I32]:
        """Keys and nodes of chunks of `group`. Raises `CacheError` unless all are ready in the host tier."""
        index = self._state.index
        mine, nodes = nodes_of(index, keys)
        if not len(nodes):
            raise CacheError(f"expected chunks of group {group}, got none")
        lacking = np.flatnonzero((nodes == ROOT) | (u8_view(index.loadable)[nodes] == 0)).tolist()
        if lacking:
            name = mine[lacking[0]].hex()[:12]
            raise CacheError(f"{len(lacking)} of {len(nodes)} chunks are not ready in any tier, the first is {name}")
        self._check_chunks(group, nodes)
        if not index.are_ready(nodes, 0).all():
            name = self._state.tier_names[0]
            raise CacheError(f"not all of {len(nodes)} chunks are ready in the {name} tier: prefetch them first")
        return mine, nodes

    # ------------------------------------------------------------------ all groups

    def groups(self, paths: Mapping[int, GroupKeys], call: LookupCall) -> LookupResult:
        """`TieredCache.lookup` of all groups. Remote tiers are not asked."""
        state, settings, groups = self._state, self._transfers.settings, range(len(self._transfers.settings.groups))
        if not groups or set(paths) != set(groups):
            raise CacheError(f"expected the keys of one group, or of all {len(groups)}, got groups {sorted(paths)}")
        if any(path.start for path in paths.values()):
            raise CacheError("expected `device` in a lookup of all groups, got `start`")
        searches = [GroupSearch(state.index, state.partials, *settings.group(group), paths[group]) for group in groups]
        tokens = longest_available(searches)
        matches = tuple(search.match(tokens) for search in searches)
        both = list(zip(searches, matches, strict=True))
        self._check_searches(both)
        self._advance(call.now)
        request_number = self._set_request(call, [key for search in searches for key in search.keys])
        for group, (search, matched) in enumerate(both) if call.counts else ():
            self._count(call.request and f"{call.request}/{group}", search, matched)
        leased = [(group, search, *_leased(search, matched)) for group, (search, matched) in enumerate(both)]
        leased = [each for each in leased if each[2]]
        lease = None
        if call.protect is Protection.STEP:
            for _, _, keys, _ in leased:
                self._leases.protect(state.index.locate(keys))
        elif call.protect is Protection.LEASE and leased:
            mine = [self._lease(matches[each[0]], *each) for each in leased]
            lease = self._leases.take(self._transfers.new_id(), mine, call.request, is_multi_group=True)
        return LookupResult(lease, tokens=tokens, matches=matches, request_number=request_number)

    def sections(self, record: LeaseRecord, blocks: Sequence[Sequence[int]]) -> list[Section]:
        """The sections that load the leased chunks into `blocks`, by group. Raises `CacheError` for a wrong number."""
        per_chunk, leased = (
            self._transfers.settings.blocks_per_chunk,
            {chunks.group: chunks.blocks for chunks in record.groups},
        )
        counts = [leased.get(group, 0) for group in range(len(self._transfers.settings.groups))]
        if [len(each) for each in blocks] != counts:
            raise CacheError(f"expected {counts} blocks for the chunks of each group, got {[len(b) for b in blocks]}")
        return [
            Section(
                chunks.group,
                chunks.positions[start] * per_chunk,
                tuple(blocks[chunks.group][start * per_chunk : end * per_chunk]),
            )
            for chunks in record.groups
            for start, end in runs_of(chunks.positions)
        ]

    def _check_searches(self, both: Sequence[tuple[GroupSearch, GroupMatch]]) -> None:
        """Raise `CacheError` for invalid keys, also for those that are not found, before anything has changed."""
        index = self._state.index
        for group, (search, matched) in enumerate(both):
            keys = search.keys
            if search.group.is_independent:
                nodes = index.find_independent(keys)
            else:
                for position in {*matched.load[:1], *matched.load[-1:]}:
                    index.check_link(keys, position)
                index.indexed_prefix(keys, matched.end)  # as when misses are counted
                ready = index.loadable_prefix(keys, 0)
                nodes = [index.get(keys[ready - 1]) if ready else ROOT, *index.follow(keys, ready)]
            self._state.check_size_class(nodes, self._transfers.settings.size_class_of(group))
        check_distinct([key for search, _ in both for key in search.keys])
        check_distinct([key for each in both for key in _leased(*each)[0]])

    def _count(self, request: str | None, search: GroupSearch, matched: GroupMatch) -> None:
        state, keys = self._state, search.keys
        if search.group.is_independent:
            state.counters.misses.update(map(state.miss_reason, keys[max(matched.end, search.last_window) :]))
        else:
            state.count_misses(keys, matched.end, state.index.indexed_prefix(keys, matched.end))
        if state.log.on:
            asked = tuple(keys[matched.first :])
            state.log.record(EventKind.REQUEST, request=request, keys=asked, length=matched.end - matched.first)

    def _lease(
        self, matched: GroupMatch, group: int, search: GroupSearch, keys: Sequence[Key], positions: Sequence[int]
    ) -> LeasedChunks:
        state, kind = self._state, search.group
        blocks = len(matched.load) * self._transfers.settings.blocks_per_chunk
        if matched.partial and not matched.partial.device:
            blocks += -(-matched.partial.tokens // kind.block_size)
        refs = [state.add_ref(state.index.get(key)) for key in (keys if kind.is_independent else keys[-1:])]
        path = search.keys if len(keys) == len(matched.load) else [*search.keys[: matched.end], *keys[-1:]]
        return LeasedChunks(path, positions, refs, group, independent=kind.is_independent, blocks=blocks)

    # ------------------------------------------------------------------ inside

    def _set_request(self, call: LookupCall, keys: Sequence[Key], known: int | None = None) -> int | None:
        """Set the request that the following uses are counted for: that of the call, or a new one for `keys`."""
        request_number = call.request_number
        if call.protect is not Protection.NONE:
            if request_number is None:
                if known is None:
                    known = count_leading(nodes_of(self._state.index, keys)[1] != ROOT)
                request_number = self._state.begin_request(keys, known, call.reuse_hint)
            self._state.set_request(request_number)
        return request_number

    def _check_chunks(self, group: int, nodes: I32) -> None:
        """Raise `CacheError` unless `nodes` are distinct, and of `group`."""
        if has_duplicates(nodes):
            raise CacheError(f"expected {len(nodes)} distinct chunks, got {len(np.unique(nodes))}")
        if self._transfers.settings.is_independent(group):
            self._state.index.check_independent(nodes)
        self._state.check_size_class(
            nodes.tolist() if self._state.several_sizes else (), self._transfers.settings.size_class_of(group)
        )


def _leased(search: GroupSearch, matched: GroupMatch) -> tuple[list[Key], list[int]]:
    """The chunks to lease for `matched`, and their positions."""
    keys, positions = [search.keys[position] for position in matched.load], list(matched.load)
    if matched.partial and not matched.partial.device:
        keys.append(matched.partial.key)
        positions.append(matched.end)
    return keys, positions


def check_start(keys: Sequence[Key], start: int) -> None:
    """Raise `CacheError` unless `start` is a position in `keys`, or their number."""
    if not 0 <= start <= len(keys):
        raise CacheError(f"start: expected a position in [0, {len(keys)}], got {start}")
