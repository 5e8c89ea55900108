"""What a persistent tier holds at start: taken in whole, parents first, and put in order of age.

Where there are several, the coldest comes first: what lies in a warmer one may be behind a chunk of a colder one.

found    slot 0: b, after a     slot 1: a     slot 2: d, after c         c is gone: d cannot be reached
taken    a, b                                                            FREE -> READY
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from longshore.boundary import Key
from longshore.cache.index import ROOT
from longshore.cache.store import Store
from longshore.errors import CacheError


class Found(NamedTuple):
    """A chunk found at start: its slot, its key, its parent's, and the pool of the slot."""

    slot: int
    key: Key
    parent: Key | None
    pool: int = 0


def adopt(store: Store, tier: int, found: Sequence[Found]) -> int:
    """Take in chunks found in slots of `tier`, oldest first, all that can be reached or none; says how many.

    Raises `CacheError` for two chunks in one slot, two of one key, or one that is known otherwise.
    """
    reachable = _parents_first(store, tier, _of_one_size(store.pools[tier].slabs.stride, found))
    _check(store, tier, reachable)
    store.pools[tier].claim([each.slot for each in reachable], [each.pool for each in reachable])
    index = store.index
    for path in _paths(store, reachable):
        _, key, parent, _ = path[0]
        node, slots = index.get(key), [each.slot for each in path]
        if node:
            index.add_copy(node, tier, slots[0])
            nodes = [node]
        else:
            above = ROOT if parent is None else index.get(parent)
            nodes = index.extend(above, [each.key for each in path], tier, slots)
        store.settle_in(nodes, tier)
    adopted = {each.key for each in reachable}
    _age(store, tier, [each.key for each in found if each.key in adopted])
    return len(adopted)


def _of_one_size(stride: int, found: Sequence[Found]) -> list[Found]:
    """`found` without what is left of the former size of a slab: that of its newest chunk is the last."""
    pools = {each.slot // stride: each.pool for each in found}
    return [each for each in found if pools[each.slot // stride] == each.pool]


def _check(store: Store, tier: int, found: Sequence[Found]) -> None:
    index = store.index
    for _, key, parent, pool in found:
        node = index.get(key)
        store.check_pool([node], pool)
        if node and (index.slot[tier][node] >= 0 or index.key[index.parent[node]] != parent):
            raise CacheError(f"chunk {key.hex()[:12]} is known already, in tier {tier} or as another's child")
    if len({each.key for each in found}) != len(found):
        raise CacheError(f"the {len(found)} chunks to adopt have different keys, two of these have the same")


def _age(store: Store, tier: int, keys: Sequence[Key]) -> None:
    """Put adopted chunks in order of age, oldest first; but tails before heads, as `touch` does."""
    newest_first: dict[int, None] = {}
    for key in reversed(keys):
        path: list[int] = []
        node = store.index.get(key)
        while node and node not in newest_first:
            path.append(node)
            node = store.index.parent[node]
        newest_first.update(dict.fromkeys(reversed(path)))
    slots = store.index.slot[tier]
    store.policies[tier].touch([node for node in reversed(newest_first) if slots[node] >= 0])


def _parents_first(store: Store, tier: int, found: Sequence[Found]) -> list[Found]:
    """`found` in an order in which `tier` can adopt it; orphans are left out, and a parent of another size is none."""
    children: dict[tuple[Key | None, int], list[Found]] = {}
    for each in found:
        children.setdefault((each.parent, each.pool), []).append(each)
    reachable: list[Found] = []
    tops = [(key, pool) for key, pool in children if key is None or _is_parent(store, tier, key, pool)]
    next_ones = [each for top in tops for each in children.pop(top)]
    while next_ones:
        each = next_ones.pop()
        reachable.append(each)
        next_ones += children.pop((each.key, each.pool), [])
    return reachable


def _paths(store: Store, found: Sequence[Found]) -> Iterator[list[Found]]:
    """`found`, parents first, as paths of chunks that are all new; one that is known is a path by itself."""
    path: list[Found] = []
    for each in found:
        known = bool(store.index.get(each.key))
        if path and (known or each.parent != path[-1].key or bool(store.index.get(path[-1].key))):
            yield path
            path = []
        path.append(each)
    if path:
        yield path


def _is_parent(store: Store, tier: int, key: Key, pool: int) -> bool:
    """Whether `key` is known, and can have children of `pool` in `tier`."""
    node = store.index.get(key)
    return bool(node) and store.index.accepts(node, tier) and store.index.pool_of(node) == pool
