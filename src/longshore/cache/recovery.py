"""What a persistent tier holds at start: taken in at once, by whole arrays, and put in order of age.

Where there are several, the coldest comes first: what lies in a warmer one may be behind a chunk of a colder one.

found    slot 0: b, after a     slot 1: a     slot 2: d, after c         c is gone: d is an orphan
taken    a, b, d                                                         FREE -> READY

Parents are positions in what was found, so ancestors are found by doubling: who stands two before each, four, eight.
A chunk is as new as the newest that is behind it: tails go before heads. Nothing counts as used: a policy learns what
comes back from what does come back.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, repeat
from operator import itemgetter
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.nodes import ORPHANS, ROOT
from longshore.cache.store import Store
from longshore.errors import CacheError

_Numbers = npt.NDArray[np.int64]

_TOP, _LOST = -2, -1
"""The position of a parent: a chunk needs none that was found; it is not to be had. The last two of an array."""


Chunk = tuple[int, Key, Key | None, int]
"""A chunk found at start: its slot, its key, its parent's, and the pool of the slot."""


class Recovered(NamedTuple):
    """The same with names; pool 0 unless said."""

    slot: int
    key: Key
    parent: Key | None
    pool: int = 0


def adopt(store: Store, tier: int, found: Sequence[Chunk]) -> int:
    """Take in chunks found in slots of `tier`, oldest first, all that can be reached or none; says how many.

    Raises `CacheError` for two chunks in one slot, two of one key, or one that is known otherwise.
    """
    slots, pools = (_numbers(map(itemgetter(field), found)) for field in (0, 3))
    if store.several_sizes:
        last = _of_the_last_size(slots // store.pools[tier].slabs.stride, pools)
        found, slots, pools = list(compress(found, last)), slots[last], pools[last]
    known = _numbers(store.index.find([key for _, key, _, _ in found]))
    before, above = _parents(store, tier, found, pools, known)
    rows = _newest_first(before)
    shared = rows[known[rows] > 0]
    _check(store, tier, [found[row] for row in shared.tolist()])
    store.pools[tier].claim(slots[rows[::-1]].tolist(), pools[rows[::-1]].tolist())  # the newest last
    nodes = _enter(store, tier, rows, found, slots, known, before, above)
    _insert(store, tier, nodes, known[shared].tolist())
    return len(nodes)


def _numbers(numbers: Iterable[int]) -> _Numbers:
    """`numbers` as int64. Raises `CacheError` for what is none."""
    try:
        return np.frombuffer(array("q", numbers), np.int64)
    except (TypeError, OverflowError) as error:
        raise CacheError(f"slots and pools are integers: {error}") from None


def _of_the_last_size(slabs: _Numbers, pools: _Numbers) -> npt.NDArray[np.bool_]:
    """Which chunks are not left of the former size of their slab: that of its newest chunk is the last."""
    each, slab = np.unique(slabs, return_inverse=True)
    last = np.empty(len(each), np.int64)
    last[slab] = pools  # of several about one slab, the last one stays
    kept: npt.NDArray[np.bool_] = last[slab] == pools
    return kept


def _parents(
    store: Store, tier: int, found: Sequence[Chunk], pools: _Numbers, known: _Numbers
) -> tuple[_Numbers, npt.NDArray[np.int32]]:
    """The position in `found` of the parent of each chunk, or `_TOP` or `_LOST`; and the node of one that is known.

    That is `ORPHANS` for orphans. What has a parent of another size is lost.
    """
    index, count = store.index, len(found)
    places: dict[Key | None, int] = dict(zip(map(itemgetter(1), found), range(count), strict=True))
    if len(places) < count:
        raise CacheError(f"the {count} chunks to adopt have different keys, only {len(places)} differ")
    places[None] = _TOP
    try:
        before = np.fromiter(map(places.get, map(itemgetter(2), found), repeat(_LOST)), np.int64, count)
    except TypeError as error:
        raise CacheError(f"a parent is a digest in bytes: {error}") from None
    inside = before >= 0
    before[inside] = np.where(pools[before[inside]] == pools[inside], before[inside], _LOST)
    above = np.full(count, ROOT, np.int32)
    for row in np.flatnonzero(~inside & (before == _LOST)).tolist():
        _, _, parent, pool = found[row]
        node = index.get(parent)  # type: ignore[arg-type]  # which is not None here, as that has a place
        accepted = not node or index.accepts(node, tier)
        if (node and index.pool_of(node) != pool) or (not accepted and known[row]):
            continue
        before[row], above[row] = _TOP, node if node and accepted else ORPHANS
    return before, above


def _newest_first(before: _Numbers) -> _Numbers:
    """The positions of all that can be reached: the newest with what is before it, head first, and so on."""
    count = len(before)
    up = np.concatenate([before % (count + 2), [count, count + 1]])
    depth, newest = np.ones(count + 2, np.int64), np.arange(count + 2)
    depth[count:] = 0
    for _ in range(count.bit_length()):  # whoever has not arrived by then goes in a circle
        if (up >= count).all():
            break
        np.maximum.at(newest, up, newest.copy())
        depth += depth[up]
        up = up[up]
    reached = np.flatnonzero(up[:count] == count)
    return reached[np.lexsort((depth[reached], -newest[reached]))]


def _check(store: Store, tier: int, known: Sequence[Chunk]) -> None:
    """Raise `CacheError` where what is known of chunks is not what was found."""
    index = store.index
    for _, key, parent, pool in known:
        node = index.get(key)
        store.check_pool([node], pool)
        if index.slot[tier][node] >= 0 or index.before((node,))[0] != parent:
            raise CacheError(f"chunk {key.hex()[:12]} is known already, in tier {tier} or as another's child")


def _enter(
    store: Store,
    tier: int,
    rows: _Numbers,
    found: Sequence[Chunk],
    slots: _Numbers,
    known: _Numbers,
    before: _Numbers,
    above: npt.NDArray[np.int32],
) -> list[int]:
    """Nodes of the chunks at `rows`, parents first, each with its copy."""
    index, new = store.index, rows[known[rows] == 0]
    for row in rows[known[rows] > 0].tolist():
        node = int(known[row])
        index.add_copy(node, tier, int(slots[row]))
        index.reveal([node])
    place, parent = np.full(len(found) + 2, -1), before[new]  # of each among those that are new
    place[new] = np.arange(len(new))
    outside = np.where(parent >= 0, np.append(known, [ROOT, ROOT])[parent], above[new]).astype(np.int32)
    keys = [found[row][1] for row in new.tolist()]
    nodes = known.copy()
    nodes[new] = index.link_trees(keys, place[parent], outside, tier, slots[new].tolist())
    for row in new[above[new] == ORPHANS].tolist():
        index.wait(int(nodes[row]), cast("Key", found[row][2]))
    adopted: list[int] = nodes[rows].tolist()
    if index.orphans and (adrift := [node for node in adopted if index.depth[node] < 0]):
        store.priorities.mark_orphans(adrift)
    return adopted


def _insert(store: Store, tier: int, nodes: list[int], known: Sequence[int]) -> None:
    """Tell all books of the copies of `nodes`, the newest first, of which other tiers have `known`."""
    if store.log.on:
        store.log_arrivals(nodes, tier)
    store.policies[tier].insert(nodes[::-1])
    store.windows.mark_ready(nodes, tier)
    if store.last:
        # What only the coldest tier has is not dirty, and nothing waits for it.
        store.update_backlog(known if tier == store.last else nodes[::-1], tier)
        store.reconsider(np.array(known, np.int32), apart_from=tier)
    store.attach_orphans(nodes)
