"""What a persistent tier holds at start: taken in whole, parents first, and put in order of age.

Where there are several, the coldest comes first: what lies in a warmer one may be behind a chunk of a colder one.

found    slot 0: b, after a     slot 1: a     slot 2: d, after c         c is gone: d cannot be reached
taken    a, b                                                            FREE -> READY
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key
from longshore.cache.index import ROOT
from longshore.cache.store import Store
from longshore.errors import CacheError

Found = tuple[int, Key, Key | None]
"""A chunk found at start: its slot, its key, and its parent's."""


def adopt(store: Store, tier: int, found: Sequence[Found]) -> int:
    """Take in chunks found in slots of `tier`, oldest first, all that can be reached or none; says how many.

    Raises `CacheError` for two chunks in one slot, two of one key, or one that is known otherwise.
    """
    reachable = _parents_first(store, tier, found)
    _check(store, tier, reachable)
    store.pools[tier].claim([slot for slot, _, _ in reachable])
    index = store.index
    for slot, key, parent in reachable:
        node = index.get(key)
        if node:
            index.add_copy(node, tier, slot)
        else:
            (node,) = index.extend(ROOT if parent is None else index.get(parent), [key], tier, [slot])
        store.settle_in([node], tier)
    adopted = {key for _, key, _ in reachable}
    _age(store, tier, [key for _, key, _ in found if key in adopted])
    return len(adopted)


def _check(store: Store, tier: int, found: Sequence[Found]) -> None:
    index = store.index
    for _, key, parent in found:
        node = index.get(key)
        if node and (index.slot[tier][node] >= 0 or index.key[index.parent[node]] != parent):
            raise CacheError(f"chunk {key.hex()[:12]} is known already, in tier {tier} or as another's child")
    if len({key for _, key, _ in found}) != len(found):
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
    """`found` in an order in which `tier` can adopt it; orphans are left out."""
    children: dict[Key | None, list[tuple[int, Key]]] = {}
    for slot, key, parent in found:
        children.setdefault(parent, []).append((slot, key))
    reachable: list[Found] = []
    known = ((key, store.index.get(key)) for key in children if key is not None)
    queue: list[Key | None] = [None, *(key for key, node in known if node and store.index.accepts(node, tier))]
    for parent in queue:
        ours = children.pop(parent, [])
        reachable += [(slot, key, parent) for slot, key in ours]
        queue += [key for _, key in ours]
    return reachable
