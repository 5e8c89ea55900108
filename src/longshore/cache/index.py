"""Who is where: one small number ("node") per key, its family, and the slot it has in each tier.

Invariant 6, "a child never outlives its parents", is kept for every tier and all colder ones together: the chunks
that have a copy in tier `t` or colder are closed under "parent of", for every `t`.

    host   A ── B ── C ── D        {A..D} in host or file is closed: every match can reach its end
    file   A ── B ── C             {A..C} in file is closed: so it is after a restart, too

`reach[t][node]` counts the children with a copy in `t` or colder, so that "may this copy go?" is one comparison. A
node is *reachable* when it and all its ancestors have a ready copy. Reachable nodes are closed as well, so the longest
ready prefix of a path is found by bisection, whatever its length.

Chunks that are of use without those before them, as in sliding-window groups, stand *alone*: each is a child of the
root, so nothing needs it to be reached, and it may outlive whatever came before it.

Nodes live in arrays (24 bytes each, and 8 for each tier): a million of them are some twenty objects, not a million,
which is what the garbage collector and the memory bill see. Keys find their node in 256 dictionaries, by their first
byte (keys are digests), so that none of them ever takes long to grow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.chains import LISTS
from longshore.cache.columns import column, marks, zeros
from longshore.cache.family import Family
from longshore.cache.pool import SlotPool
from longshore.cache.states import READY
from longshore.errors import CacheError

ROOT = 0
"""The parent of every first chunk; also "no node"."""

NONE = -1
"""No slot."""

_SHARDS = 256


class Index:
    """Nodes by key over the slots of `pools`, warmest tier first, kept closed over prefixes."""

    __slots__ = (
        "_count",
        "_family",
        "_free",
        "_others",
        "_shards",
        "children",
        "depth",
        "key",
        "parent",
        "path",
        "pools",
        "reach",
        "reachable",
        "size",
        "slot",
        "tiers",
    )

    def __init__(self, pools: Sequence[SlotPool]) -> None:
        self.pools = list(pools)
        self.tiers = range(len(pools))
        self._others = [tuple(t for t in reversed(self.tiers) if t != tier) for tier in self.tiers]
        self.size = LISTS + sum(pool.capacity for pool in pools)
        """Numbers below this one may be nodes. Nodes begin at `LISTS`, so that policies can name lists below."""
        # One place for each slot there is, from the start: columns that grew would have to be copied now and then.
        self.key = np.empty(self.size, object)
        self._family = Family(self.size)
        self.parent, self.children, self.path = self._family.parent, self._family.children, self._family.path
        self.depth = zeros(self.size)
        self.slot = [array("i", [NONE]) * self.size for _ in pools]
        self.reach = [zeros(self.size) for _ in pools]
        self.reachable = bytearray(self.size)
        self.depth[ROOT] = -1
        self.reachable[ROOT] = 1
        self._free = array("i", range(self.size - 1, LISTS - 1, -1))
        self._shards: tuple[dict[Key, int], ...] = tuple({} for _ in range(_SHARDS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """All nodes, in order of their numbers."""
        return (node for node in range(LISTS, self.size) if self.key[node] is not None)

    def get(self, key: Key) -> int:
        """The node of `key`; `ROOT` if no tier has it. Raises `CacheError` for what cannot be a key."""
        try:
            return self._shards[key[0]].get(key, ROOT)
        except (IndexError, TypeError):
            raise _no_key(key) from None

    # ------------------------------------------------------------------ one node

    def coldest(self, node: int) -> int:
        """The coldest tier with a live copy; -1 without one."""
        for tier in reversed(self.tiers):
            if self.slot[tier][node] >= 0:
                return tier
        return -1

    def coldest_without(self, node: int, tier: int) -> int:
        """The coldest tier that `node` is in, apart from `tier`; -1 without one."""
        for other in self._others[tier]:
            if self.slot[other][node] >= 0:
                return other
        return -1

    def is_ready(self, node: int, tier: int) -> bool:
        """Whether `node` has a ready copy in `tier`."""
        slot = self.slot[tier][node]
        return slot >= 0 and self.pools[tier].state[slot] == READY

    def pool_of(self, node: int) -> int:
        """The pool that the slots of `node` are in, in whatever tier."""
        for tier in self.tiers:
            slot = self.slot[tier][node]
            if slot >= 0:
                return self.pools[tier].pool_of(slot)
        raise CacheError(f"node {node} has no slot")

    def warmest_ready(self, node: int) -> int:
        """The warmest tier with a ready copy; -1 without one."""
        for tier in self.tiers:
            if self.is_ready(node, tier):
                return tier
        return -1

    # ------------------------------------------------------------------ a path of keys

    def reachable_prefix(self, keys: Sequence[Key], first: int) -> int:
        """How many of `keys` lead without a gap to the deepest that can be read, but at least `first`; by bisection.

        Raises `CacheError` if what is found shows that `keys` is no path.
        """
        low, high, reachable = first, len(keys), self.reachable
        while low < high:
            middle = (low + high) // 2
            node = self._at(keys, middle)
            if node and reachable[node]:
                low = middle + 1
            else:
                high = middle
        return low

    def known_prefix(self, keys: Sequence[Key], first: int) -> int:
        """The same for chunks that some tier has, or will have."""
        low, high = first, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._at(keys, middle):
                low = middle + 1
            else:
                high = middle
        return low

    def follow(self, keys: Sequence[Key], first: int) -> list[int]:
        """Nodes of the leading chunks of `keys[first:]` that some tier has, or will have.

        Raises `CacheError` unless these follow one another, and the key before them, and the rest is new and distinct.
        """
        try:
            before = self._at(keys, first - 1) if first else ROOT
            end = self.known_prefix(keys, first)
            path = self.path(self.get(keys[end - 1]), end - first)[::-1] if end > first else []
            rest, shards = keys[end:], self._shards
            for key in rest:
                if key in shards[key[0]]:
                    raise _broken(keys, keys.index(key, first))
        except (IndexError, TypeError):
            raise CacheError("the keys of a path are digests in bytes") from None
        if path and (self.parent[path[0]] != before or self.key[path].tolist() != list(keys[first:end])):
            raise _broken(keys, first)
        if len(set(rest)) != len(rest):
            raise CacheError(f"the {len(rest)} new keys of a path differ, only {len(set(rest))} do")
        return path

    def readable(self, keys: Sequence[Key]) -> list[int]:
        """Nodes of the leading chunks of `keys` that can be read, or that can be once a copy on its way has arrived."""
        shards, reachable = self._shards, self.reachable
        path: list[int] = []
        for key in keys:
            node = shards[key[0]].get(key, ROOT)
            if not node or not reachable[node]:
                break
            path.append(node)
        return path

    def is_readable(self, key: Key) -> bool:
        """Whether `key`, and all that it needs to be reached, can be read."""
        return bool(self.reachable[node] if (node := self.get(key)) else 0)

    def find_alone(self, keys: Sequence[Key]) -> list[int]:
        """The node of each of `keys`, which stand alone; `ROOT` for those that no tier has, or will have.

        Raises `CacheError` if they are not distinct, or one is known as the child of another.
        """
        nodes = [self.get(key) for key in keys]
        if len(set(keys)) != len(keys):
            raise CacheError(f"the {len(keys)} keys of a path differ, only {len(set(keys))} do")
        child = next((key for key, node in zip(keys, nodes, strict=True) if self.parent[node]), None)
        if child is not None:
            raise CacheError(f"chunk {child.hex()[:12]} was stored behind another, and does not stand alone")
        return nodes

    def check_link(self, keys: Sequence[Key], position: int) -> int:
        """The node of `keys[position]`; raises `CacheError` if it does not follow the key before it."""
        node = self._at(keys, position)
        if node and position and self.key[self.parent[node]] != keys[position - 1]:
            raise _broken(keys, position)
        return node

    def _at(self, keys: Sequence[Key], position: int) -> int:
        key = keys[position]
        node = self.get(key)
        if node and self.depth[node] != position:
            raise _broken(keys, position)
        return node

    # ------------------------------------------------------------------ changes

    def accepts(self, parent: int, tier: int) -> bool:
        """Whether a child of `parent` may get a copy in `tier` without becoming an orphan."""
        return parent == ROOT or self.coldest(parent) >= tier

    def extend(self, parent: int, keys: Sequence[Key], tier: int, slots: Sequence[int]) -> list[int]:
        """New nodes for `keys`, a path that follows `parent`, in `slots` of `tier`; none of them ready.

        Raises `CacheError` for a key that is known, or for orphans, before anything has changed.
        """
        if not self.accepts(parent, tier):
            raise CacheError(f"chunk {keys[0].hex()[:12]} has no parent in tier {tier} or colder")
        for key in keys:
            if self.get(key):
                raise CacheError(f"chunk {key.hex()[:12]} is known already")
        return self.link(parent, keys, tier, slots)

    def link(self, parent: int, keys: Sequence[Key], tier: int, slots: Sequence[int]) -> list[int]:
        """`extend` for keys of which `follow` has said that they are new, behind a parent that accepts them."""
        nodes = self._numbers(len(keys))
        if not nodes:
            return []
        self._family.append(parent, nodes)
        at, depth = self._enter(keys, nodes, tier, slots), self.depth[parent] + 1
        column(self.depth)[at] = np.arange(depth, depth + len(at))
        for each in range(tier + 1):
            self.reach[each][parent] += 1
            column(self.reach[each])[at[:-1]] = 1
        return nodes

    def link_alone(self, keys: Sequence[Key], tier: int, slots: Sequence[int]) -> list[int]:
        """New nodes, which stand alone, for `keys` that `find_alone` did not find."""
        nodes = self._numbers(len(keys))
        if not nodes:
            return []
        self._family.append_firsts(nodes)
        at = self._enter(keys, nodes, tier, slots)
        column(self.depth)[at] = 0
        for each in range(tier + 1):
            self.reach[each][ROOT] += len(nodes)
        return nodes

    def graft(
        self,
        keys: Sequence[Key],
        before: npt.NDArray[np.int64],
        above: npt.NDArray[np.int32],
        tier: int,
        slots: Sequence[int],
    ) -> npt.NDArray[np.int32]:
        """New nodes for `keys`, paths that branch as they like, parents first, in `slots` of `tier`, which are ready.

        Each follows the key at position `before`, int64, shape `(len(keys),)`; or, where that is -1, the node `above`,
        int32 and of the same shape, which accepts it. The caller has seen to it that all keys are new and distinct.
        """
        at = self._enter(keys, self._numbers(len(keys)), tier, slots)
        if not len(at):
            return at
        parents = np.where(before >= 0, at[before], above)
        self._family.graft(parents, at)
        for reach in self.reach[: tier + 1]:
            np.add.at(column(reach), parents, 1)
        depth, reachable = self.depth, self.reachable
        for node, parent in zip(at.tolist(), parents.tolist(), strict=True):
            depth[node] = depth[parent] + 1
            reachable[node] = reachable[parent]
        return at

    def add_copy(self, node: int, tier: int, slot: int) -> None:
        """Another copy of `node`, in `slot` of `tier`. Raises `CacheError` for a second one, or an orphan."""
        if self.slot[tier][node] >= 0:
            raise CacheError(f"chunk {self.key[node].hex()[:12]} already has a copy in tier {tier}")
        if not self.accepts(self.parent[node], tier):
            raise CacheError(f"chunk {self.key[node].hex()[:12]} has no parent in tier {tier} or colder")
        before = self.coldest(node)
        self.slot[tier][node] = slot
        self.pools[tier].node[slot] = node
        parent = self.parent[node]
        for each in range(before + 1, tier + 1):
            self.reach[each][parent] += 1

    def drop_copies(self, at: npt.NDArray[np.int32], tier: int) -> None:
        """The same as `drop_copy` for nodes that a colder tier has; keeps their slots' nodes."""
        column(self.slot[tier])[at] = NONE

    def drop_leaves(self, at: npt.NDArray[np.int32], keys: Sequence[Key], tier: int = 0) -> list[int]:
        """The same as `drop_copy` for nodes `at`, with these keys, of which only `tier` has a copy.

        Keeps their slots' nodes. None has a child when those before it have gone, and then only the one right before
        it. Returns the parents that have lost a child, and are left.
        """
        shards = self._shards
        for key in keys:
            del shards[key[0]][key]
        above = column(self.parent)[at]
        tops = np.ones(len(at), bool)
        np.not_equal(above[:-1], at[1:], out=tops[:-1])
        parents: list[int] = above[tops].tolist()
        for node, parent in zip(at[tops].tolist(), parents, strict=True):
            for reach in self.reach[: tier + 1]:
                reach[parent] -= 1
            self._family.leave(node, parent)
        column(self.slot[tier])[at] = NONE
        for reach in self.reach[: tier + 1]:
            column(reach)[at] = 0
        self.key[at] = None
        marks(self.reachable)[at] = 0
        self._free.frombytes(at.tobytes())
        self._count -= len(at)
        return parents

    def drop_copy(self, node: int, tier: int) -> bool:
        """Take a copy out of its node; says whether it was the last, and the node is gone. Keeps the slot's state."""
        after = self.coldest_without(node, tier)
        slots = self.slot[tier]
        self.pools[tier].node[slots[node]] = ROOT
        slots[node] = NONE
        parent = self.parent[node]
        for each in range(after + 1, tier + 1):
            self.reach[each][parent] -= 1
        if after >= 0:
            return False
        self._forget(node, self.key[node], parent)
        return True

    def reveal(self, nodes: Sequence[int]) -> None:
        """`nodes`, parents first, have a ready copy: those with a reachable parent are, too, and what waits behind."""
        reachable, parent, child, older = self.reachable, self.parent, self._family.child, self._family.older
        if nodes and reachable[parent[nodes[0]]] and self._family.is_line(nodes):
            marks(reachable)[np.array(nodes, np.int32)] = 1
            return
        for i, node in enumerate(nodes, 1):
            if reachable[node] or not reachable[parent[node]]:
                continue
            reachable[node] = 1
            below = child[node]
            if below and (older[below] or i == len(nodes) or below != nodes[i]):
                self.reveal([c for c in self.children(node) if self.warmest_ready(c) >= 0])

    def orphaned_by(self, node: int, left: int) -> list[tuple[int, int]]:
        """Live copies (node, tier) of descendants that are out of reach once `node` reaches down to tier `left` only.

        Parents come before children; `left` is -1 when nothing remains of `node`.
        """
        lost: list[tuple[int, int]] = []
        queue = [(node, left)]
        for each, limit in queue:  # what is left of `each` reaches down to tier `limit`
            for child in self.children(each):
                if self.coldest(child) <= limit:
                    continue
                lost += [(child, t) for t in self.tiers[limit + 1 :] if self.slot[t][child] >= 0]
                warm = [t for t in range(limit + 1) if self.slot[t][child] >= 0]
                queue.append((child, warm[-1] if warm else -1))
        return lost

    def _enter(
        self, keys: Sequence[Key], nodes: Sequence[int], tier: int, slots: Sequence[int]
    ) -> npt.NDArray[np.int32]:
        """`nodes` are those of `keys`, in `slots` of `tier`."""
        shards = self._shards
        for key, node in zip(keys, nodes, strict=True):
            shards[key[0]][key] = node
        at = np.array(nodes, np.int32)
        self.key[at] = keys
        column(self.slot[tier])[at] = slots
        column(self.pools[tier].node)[slots] = at
        self._count += len(nodes)
        return at

    def _numbers(self, count: int) -> list[int]:
        free = self._free
        if len(free) < count:
            raise CacheError(f"the index has room for {self.size - LISTS} chunks, one for each slot")
        if count == 0:
            return []
        nodes = free[-count:].tolist()[::-1]
        del free[-count:]
        return nodes

    def _forget(self, node: int, key: Key, parent: int) -> None:
        del self._shards[key[0]][key]
        self._family.leave(node, parent)
        self.key[node] = None
        self.reachable[node] = 0
        self._free.append(node)
        self._count -= 1

    # ------------------------------------------------------------------ checks

    def resize(self) -> None:
        """The pools have other sizes now: make room for as many chunks, keeping the numbers of those that are here."""
        more = max(0, LISTS + sum(pool.capacity for pool in self.pools) - self.size)
        self.key = np.concatenate([self.key, np.empty(more, object)])
        self._family.grow(more)
        for numbers in (self.depth, *self.reach):
            numbers.extend(zeros(more))
        for slots in self.slot:
            slots.extend(array("i", [NONE]) * more)
        self.reachable.extend(bytes(more))
        self._free = array("i", range(self.size + more - 1, self.size - 1, -1)) + self._free
        self.size += more

    def check_integrity(self) -> None:
        """Raise `CacheError` unless family links, reach counts and closure hold everywhere."""
        nodes = list(self)
        if len(nodes) != self._count or sum(map(len, self._shards)) != self._count:
            raise CacheError(f"the index counts {self._count} chunks, has {len(nodes)}")
        for node in (*nodes, ROOT):
            self._check_node(node)

    def _check_node(self, node: int) -> None:
        if node != ROOT:
            name = self.key[node].hex()[:12]
            parent = self.parent[node]
            if self.get(self.key[node]) != node or self.coldest(node) < 0:
                raise CacheError(f"chunk {name} has no copy, or is not found")
            younger = self._family.younger[node]
            if (parent and self.key[parent] is None) or node != (
                self._family.older[younger] if younger else self._family.child[parent]
            ):
                raise CacheError(f"chunk {name} outlived its parent")
            if parent and self.coldest(parent) < self.coldest(node):
                raise CacheError(f"chunk {name} lies colder than its parent")
            if self.reachable[node] != (self.reachable[parent] and self.warmest_ready(node) >= 0):
                raise CacheError(f"chunk {name} is wrongly marked as reachable or not")
            for tier in self.tiers:
                slot = self.slot[tier][node]
                if slot >= 0 and self.pools[tier].node[slot] != node:
                    raise CacheError(f"chunk {name} holds another's slot in tier {tier}")
        for tier in self.tiers:
            counted = sum(self.coldest(c) >= tier for c in self.children(node))
            if counted != self.reach[tier][node]:
                raise CacheError(f"node {node} counts {self.reach[tier][node]} children in tier {tier}, has {counted}")


def _no_key(key: object) -> CacheError:
    return CacheError(f"a key is a digest in bytes, got {key!r}")


def _broken(keys: Sequence[Key], position: int) -> CacheError:
    return CacheError(f"key {position} of a path, {keys[position].hex()[:12]}, does not follow the one before it")
