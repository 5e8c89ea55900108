"""Chunks that only stores of replicas have: asked for once for each request, and fetched while it waits.

    lookup, some chunks are in no tier ─► ask ─(the probe ends)─► gate ─► fetch into host memory ─► lookup: HIT
                                              MISS: not there, or quicker to compute, or not in time

Nothing here waits. vLLM asks about a request again in each step; the answer is `HIT_PENDING` until then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile

from vllm.v1.kv_offload.base import OffloadKey

from longshore.boundary import FILE, HOST, PEERS, REMOTE
from longshore.cache import Gate, GroupKeys, Presence, Run, TieredCache, Until
from longshore.engines.vllm.requests import GROUP_BYTES, ChunkGroups, RequestState, residency
from longshore.runtime.loop import Runtime
from longshore.runtime.remote_fetch import patience, worth_asking
from longshore.tiers.remote.peers import PeerTier

_ABSENT = Presence.ABSENT
_TIER = {Presence.READY: HOST, Presence.IN_FLIGHT: HOST, Presence.COLDER: FILE, _ABSENT: ""}


def tiers_of(found: Sequence[Presence]) -> list[str]:
    """The tier that chunks found so are read from; empty for none."""
    return [_TIER[presence] for presence in found]


def load_limit(
    gate: Gate | None,
    ends: Mapping[OffloadKey, int],
    tiers: Sequence[str],
    first: OffloadKey,
    now: float,
) -> float:
    """The gate: up to which token of a prompt, computed up to the chunk `first`, loading is faster than computing.

    vLLM asks chunk by chunk, and loads the longest prefix that it was promised, so chunks behind this token are not
    promised. Chunks of the group that vLLM asks for first stand for those of all groups. Infinity without a `gate`.

    Args:
        ends: For each chunk, in order, the token that it ends with.
        tiers: Where each of them is read from; empty for nowhere.
    """
    if gate is None or first not in ends:
        return math.inf
    group = first[-GROUP_BYTES:]
    mine = sorted(
        (end, tier) for (key, end), tier in zip(ends.items(), tiers, strict=True) if key[-GROUP_BYTES:] == group
    )
    computed = ends[first] - mine[0][0]
    chain = list(takewhile(lambda chunk: chunk[1], (chunk for chunk in mine if chunk[0] > computed)))
    runs = [Run(tier, len(list(same))) for tier, same in groupby(tier for _, tier in chain)]
    count = gate.worth_loading(computed, runs, now)
    return chain[count - 1][0] if count else computed


class RemoteFetches:
    """Asks stores about the chunks of requests, and fetches, for one manager."""

    def __init__(self, runtime: Runtime, groups: ChunkGroups, peers: PeerTier | None = None) -> None:
        self._runtime = runtime
        self._peers = peers
        self._groups = groups

    def look(
        self, request: RequestState, ends: Mapping[OffloadKey, int], found: Sequence[Presence], first: OffloadKey
    ) -> Sequence[Presence]:
        """`found`, in which chunks that a store is asked for, or sends, are on their way.

        Args:
            request: Whose chunks they are.
            ends: vLLM's keys of all chunks that it has named, in order, each with the token that it ends with.
            found: Where each of them is.
            first: The chunk that vLLM asks for.
        """
        if request.fetches_end or REMOTE not in request.hints.load:
            return found
        absent = [key for key, presence in zip(ends, found, strict=True) if presence is Presence.ABSENT]
        now = self._runtime.clock()
        with self._runtime.control() as cache:
            asked = {0: GroupKeys(request.ours(absent))}
            asks = self._worth_asking(ends, absent, first) if request.probes is None else []
            if self._peers is not None and request.source is not None:
                self._peers.route(asked[0].names, request.source)
            elif PEERS in asks:
                asks.remove(PEERS)
            known = cache.lookup(asked, now, until=Until.NOTHING, each=True, asks=asks)
            if request.probes is None:
                request.probes = known.probes
            if not all(cache.progress(probe).is_over for probe in request.probes):
                return _on_their_way(found, ends, set(absent))
            if self._peers is not None and request.source is not None and self._peers.are_coming(asked[0].names):
                request.probes = None  # the peer is asked again, until this request has waited for too long
                return _on_their_way(found, ends, set(absent))
            request.fetches_end = True
            names = dict(zip(absent, known.remote_sources.get(0, [""] * len(absent)), strict=True))
            if not any(names.values()):
                return found
            tiers = [names.get(key) or tier for key, tier in zip(ends, tiers_of(found), strict=True)]
            sent = Counter(names[key] for key in absent if names[key] and key[-GROUP_BYTES:] == first[-GROUP_BYTES:])
            longest = patience(self._runtime, cache, [Run(*each) for each in sent.items()], now)
            request.load_limit = load_limit(self._runtime.gate, ends, tiers, first, now)
            coming = self._fetch(cache, request, ends, {key for key in absent if names[key]}, now, longest)
        request.origins.update((key, names[key]) for key in coming)
        return _on_their_way(found, ends, coming)

    def _worth_asking(
        self, ends: Mapping[OffloadKey, int], absent: Sequence[OffloadKey], first: OffloadKey
    ) -> list[str]:
        """The stores to wait for; chunks of the group that vLLM asks for first stand for those of all groups."""
        group = first[-GROUP_BYTES:]
        mine = [ends[key] for key in absent if key[-GROUP_BYTES:] == group and ends[key] >= ends[first]]
        tokens = self._groups.tokens[self._groups.of(first)]
        # A chunk may be named before it is full.
        return worth_asking(self._runtime, (mine[0] - 1) // tokens * tokens, len(mine)) if mine else []

    def _fetch(
        self,
        cache: TieredCache,
        request: RequestState,
        ends: Mapping[OffloadKey, int],
        there: set[OffloadKey],
        now: float,
        longest: float | None,
    ) -> set[OffloadKey]:
        """Order those chunks that stores have, up to the load limit; which are on their way now."""
        keys = list(ends)
        has = {
            key for key, each in zip(keys, self._presences(cache, request, keys), strict=True) if each is not _ABSENT
        }
        reach, parts = request.load_limit or 0.0, self._groups.split(keys)
        for group, mine in parts:  # a prefix is served as far as each group without a window reaches
            if self._groups.windows[group] is None:
                whole = ends[mine[0]] == self._groups.tokens[group]  # from the first chunk on
                known = takewhile(lambda key: key in there or key in has, mine if whole else ())
                reach = min(reach, max((ends[key] for key in known), default=0))
        for group, mine in parts:
            window, tokens = self._groups.windows[group], self._groups.tokens[group]
            wanted = [key for key in mine if ends[key] <= reach]
            if window is not None:
                wanted = [key for key in wanted if ends[key] > reach - (window + 1) * tokens and key in there]
            if wanted:
                cache.prefetch({group: GroupKeys(request.ours(wanted))}, now, timeout=longest)
        asked = [key for key in keys if key in there]
        now_has = self._presences(cache, request, asked)
        return {key for key, each in zip(asked, now_has, strict=True) if each is not _ABSENT}

    @staticmethod
    def _presences(cache: TieredCache, request: RequestState, keys: Sequence[OffloadKey]) -> Sequence[Presence]:
        return residency(cache, request.ours(keys)).presences


def _on_their_way(
    found: Sequence[Presence], ends: Mapping[OffloadKey, int], keys: set[OffloadKey]
) -> Sequence[Presence]:
    return [Presence.IN_FLIGHT if key in keys else presence for key, presence in zip(ends, found, strict=True)]
