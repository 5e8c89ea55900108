"""Recovery at start: the chunks of a persistent tier enter index, slots and policy, in order of age, by array
operations.

Of several tiers, the coldest has to be recovered first, because chunks of a warmer one may be behind chunks of a colder
one.

found       slot 0: b, after a     slot 1: a     slot 2: d, after c         c is missing: d is an orphan
recovered   a, b, d                                                         FREE -> READY

Parents are positions among the chunks found. Ancestors are found by pointer doubling: 2, 4, 8 steps up. A chunk counts
as used as recently as its newest descendant, so that tails are evicted before heads. Recovery counts no uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key, StoredChunk, StoredChunks
from longshore.cache.columns import as_i32
from longshore.cache.nodes import ORPHANS, ROOT
from longshore.cache.state import CacheState
from longshore.errors import CacheError

_Numbers = npt.NDArray[np.int64]

_TOP, _LOST = -2, -1
"""Positions of parents: no parent is needed; the parent cannot be recovered. The last two of an array."""


Chunk = tuple[int, Key, Key | None, int]
"""A chunk found at start: slot, key, parent key, size class of the slot."""


def adopt(state: CacheState, tier: int, found: StoredChunks | Sequence[Chunk]) -> int:
    """Recover chunks found in slots of `tier`, oldest first; returns how many.

    Raises `CacheError`, with nothing changed, for two chunks in one slot, two of one key, or a chunk that is in the
    index with another parent.
    """
    try:
        chunks = found if isinstance(found, StoredChunks) else StoredChunks.of(found)
    except (TypeError, ValueError, OverflowError) as error:
        raise CacheError(f"expected chunks as (slot, key, parent, size class): {error}") from None
    if state.several_sizes:
        chunks = chunks.where(_of_the_last_size(chunks.slots // state.pools[tier].slabs.stride, chunks.size_classes))
    keys = chunks.keys.tolist() if len(state.index) else []
    known = np.array(state.index.find(keys), np.int64) if keys else np.zeros(len(chunks), np.int64)
    parent_rows, parent_nodes = _parents(state, tier, chunks, known)
    rows = _newest_first(parent_rows)
    shared = rows[known[rows] > 0]
    _check(state, tier, [chunks[row] for row in shared.tolist()])
    state.pools[tier].claim(chunks.slots[rows[::-1]], chunks.size_classes[rows[::-1]])  # the newest last
    nodes = _enter(state, tier, rows, chunks, known, parent_rows, parent_nodes)
    if state.log.on:
        state.log.recovered(state.tier_names[tier], chunks.where(rows[known[rows] == 0]))
        state.log.arrived(state.index, state.tier_names, known[shared].tolist(), tier)
    _insert(state, tier, nodes, known[shared].tolist())
    return len(nodes)


def _of_the_last_size(slabs: _Numbers, size_classes: _Numbers) -> npt.NDArray[np.bool_]:
    """Which chunks have the present size of their slab, that of its newest chunk."""
    each, slab = np.unique(slabs, return_inverse=True)
    last = np.empty(len(each), np.int64)
    last[slab] = size_classes  # the last chunk of a slab decides
    kept: npt.NDArray[np.bool_] = last[slab] == size_classes
    return kept


def _parents(
    state: CacheState, tier: int, found: StoredChunks, known: _Numbers
) -> tuple[_Numbers, npt.NDArray[np.int32]]:
    """The position in `found` of the parent of each chunk, or `_TOP` or `_LOST`; and its node if it is in the index.

    The node is `ORPHANS` for orphans. A chunk with a parent of another size is lost.
    """
    index, count, size_classes = state.index, len(found), found.size_classes
    parent_rows = np.where(found.has_parent, _positions(found.keys, found.parents), _TOP)
    inside = parent_rows >= 0
    parent_rows[inside] = np.where(
        size_classes[parent_rows[inside]] == size_classes[inside], parent_rows[inside], _LOST
    )
    parent_nodes = np.full(count, ROOT, np.int32)
    for row in np.flatnonzero(~inside & (parent_rows == _LOST)).tolist():
        node = index.get(bytes(found.parents[row]))
        accepted = not node or index.accepts(node, tier)
        if (node and index.size_class_of(node) != size_classes[row]) or (not accepted and known[row]):
            continue
        parent_rows[row], parent_nodes[row] = _TOP, node if node and accepted else ORPHANS
    return parent_rows, parent_nodes


def _positions(keys: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> _Numbers:
    """The position of each of `wanted` among `keys`, `_LOST` if it is not there. Raises `CacheError` for equal keys.

    Digests differ in their first eight bytes, by which they are sorted; other keys need a dictionary.
    """
    count, width = len(keys), keys.itemsize
    if not count or keys.dtype == object or width % 8:
        return _positions_by_name(keys, wanted)
    ours, theirs = (
        np.ascontiguousarray(np.ascontiguousarray(each).view("<u8")[:: width // 8]) for each in (keys, wanted)
    )
    order = np.argsort(ours)
    ours = ours[order]
    if (ours[1:] == ours[:-1]).any():
        return _positions_by_name(keys, wanted)
    asked = np.argsort(theirs)  # a search in order is several times faster
    found = np.empty(count, np.int64)
    found[asked] = order[np.minimum(np.searchsorted(ours, theirs[asked]), count - 1)]
    found[keys[found] != wanted] = _LOST
    return found


def _positions_by_name(keys: npt.NDArray[Any], wanted: npt.NDArray[Any]) -> _Numbers:
    count, places = len(keys), dict(zip(keys.tolist(), range(len(keys)), strict=True))
    if len(places) < count:
        raise CacheError(f"expected {count} chunks with distinct keys, got {len(places)}")
    return np.fromiter(map(places.get, wanted.tolist(), repeat(_LOST)), np.int64, count)


def _newest_first(before: _Numbers) -> _Numbers:
    """The positions of all loadable chunks: the newest with its ancestors, head first, then the next newest."""
    count = len(before)
    up = np.concatenate([before % (count + 2), [count, count + 1]])
    depth, newest = np.ones(count + 2, np.int64), np.arange(count + 2)
    depth[count:] = 0
    for _ in range(count.bit_length()):  # a chunk that has not reached the root by then is in a cycle
        if (up >= count).all():
            break
        np.maximum.at(newest, up, newest.copy())
        depth += depth[up]
        up = up[up]
    reached = np.flatnonzero(up[:count] == count)
    return reached[np.lexsort((depth[reached], -newest[reached]))]


def _check(state: CacheState, tier: int, known: Sequence[StoredChunk]) -> None:
    """Raise `CacheError` where the index has another parent than the chunk found, or a copy in the tier."""
    index = state.index
    for _, key, parent, size_class in known:
        node = index.get(key)
        state.check_size_class([node], size_class)
        if index.slot[tier][node] >= 0 or index.parent_keys((node,))[0] != parent:
            raise CacheError(f"chunk {key.hex()[:12]} is in the index already, in tier {tier} or with another parent")


def _enter(
    state: CacheState,
    tier: int,
    rows: _Numbers,
    found: StoredChunks,
    known: _Numbers,
    parent_rows: _Numbers,
    parent_nodes: npt.NDArray[np.int32],
) -> list[int]:
    """Nodes of the chunks at `rows`, parents first, each with its copy."""
    index, new, slots = state.index, rows[known[rows] == 0], found.slots.astype(np.int32)
    shared = rows[known[rows] > 0]
    index.add_copies(known[shared].tolist(), tier, slots[shared].tolist())
    index.mark_loadable(known[shared].tolist())
    place, parent = np.full(len(found) + 2, -1), parent_rows[new]  # position among the new chunks
    place[new] = np.arange(len(new))
    outside = np.where(parent >= 0, np.append(known, [ROOT, ROOT])[parent], parent_nodes[new]).astype(np.int32)
    nodes = known.copy()
    nodes[new] = index.link_trees(found.keys[new], place[parent], outside, tier, slots[new])
    for row in new[parent_nodes[new] == ORPHANS].tolist():
        index.add_orphan(int(nodes[row]), bytes(found.parents[row]))
    adopted: list[int] = nodes[rows].tolist()
    if index.orphans and (adrift := [node for node in adopted if index.depth[node] < 0]):
        state.priorities.mark_orphans(adrift)
    return adopted


def _insert(state: CacheState, tier: int, nodes: list[int], known: Sequence[int]) -> None:
    """Enter the copies of `nodes`, the newest first, in policies and backlog; other tiers have `known`."""
    if tier < state.coldest or not state.coldest_ranks_all:
        state.policies[tier].insert(nodes[::-1])
    state.rank(as_i32(nodes[::-1]), tier)
    state.windows.mark_ready(nodes, tier)
    state.changes += 1
    if state.coldest:
        # A chunk that only the coldest tier has is not dirty, and no other chunk waits for it.
        news = known if tier == state.coldest else nodes[::-1]
        state.backlog.arrived(news)
        if tier and news:
            state.backlog.backed_up(news, tier)
        state.recheck_evictable(as_i32(known), apart_from=tier)
    state.attach_orphans(nodes)
