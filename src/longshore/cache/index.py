"""The index: one small integer ("node") per key, its parent and children, and its slot in each tier.

The rule of prefixes: no chunk outlives its parent. It holds for each tier together with all colder ones. For every `t`,
the set of chunks with a copy in tier `t` or colder contains the parent of each of its chunks.

    host   A ── B ── C ── D        {A..D} in host or file is closed: all of it can be read from the first chunk on
    file   A ── B ── C             {A..C} in file is closed: so it is after a restart

`num_children[t][node]` is the number of children with a copy in `t` or colder, so that one comparison decides whether a
copy is needed by a descendant. The parent of a loadable node is loadable, so bisection finds the longest ready prefix
of a path.

Chunks that can be used without those before them, as in sliding-window groups, are *independent*: each is a child of
the root, no other chunk needs it, and it may outlive the chunks before it.

An *orphan* is a child of `ORPHANS` and has the key of its missing parent. It is attached to that chunk when the chunk
is loadable, and in a tier that is as cold. Descendants of `ORPHANS` are closed under "parent of", too; no lookup from
the first chunk returns them.

Both ends of a path are found by bisection. Chunks after an orphan are checked one by one; only a request that has the
chunks before the orphan can use these.

    indexed     in a tier, or on its way into one             A ── B ── C ── D ── E
    ready       all bytes are in a tier                       A ── B ── C ── E
    loadable    ready, like all chunks before it              A ── B ── C
                up to the first one, or up to an orphan

`Residency` says in which tiers single keys are. Node numbers are valid until a node is removed: a `Residency` holds the
number of removals at its creation, and searches by key after the next one.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import FEW, I32, as_i32, i32_view, u8_view
from longshore.cache.nodes import NONE, ORPHANED, ORPHANS, ROOT, ROOTED, Nodes
from longshore.cache.pool import READY, SlotPool
from longshore.errors import CacheError, IntegrityError


class Index(Nodes):
    """Nodes by key over the slots of `pools`, warmest tier first, kept closed over prefixes."""

    __slots__ = ()

    # ------------------------------------------------------------------ paths of keys

    def loadable_prefix(self, keys: Sequence[Key], first: int) -> int:
        """The number of leading chunks of `keys` that are loadable, at least `first`; by bisection, the last first.

        An orphan at `first` and its descendants count, because the caller has the chunks before it. Raises
        `CacheError` if a chunk found shows that `keys` is no path.
        """
        low, high, find, loadable, depth = first, len(keys), self.get, self.loadable, self.depth
        middle = high - 1
        while low < high:
            node = find(keys[middle])
            if node and depth[node] != middle and depth[node] >= 0:
                raise _broken(keys, middle)
            if node and loadable[node] == ROOTED:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        if self.orphans and low == first:
            while low < len(keys) and loadable[node := self.get(keys[low])] == ORPHANED:
                self.check_link(keys, low)
                low += 1
        return low

    def indexed_prefix(self, keys: Sequence[Key], first: int) -> int:
        """As `loadable_prefix`, for chunks in a tier or on their way into one, without orphans."""
        low, high, find, depth = first, len(keys), self.get, self.depth
        while low < high:
            middle = (low + high) // 2
            node = find(keys[middle])
            if node and depth[node] >= 0:
                if depth[node] != middle:
                    raise _broken(keys, middle)
                low = middle + 1
            else:
                high = middle
        return low

    def follow(self, keys: Sequence[Key], first: int) -> I32:
        """Nodes of the leading chunks of `keys[first:]` that are in a tier, or on their way into one.

        Raises `CacheError` unless each is the child of the key before it, and the other keys are new and distinct.
        """
        try:
            before = self._at(keys, first - 1) if first else ROOT
            end = self.indexed_prefix(keys, first)
            path = self.path(self.get(keys[end - 1]), end - first)[::-1] if end > first else as_i32(())
            if len(path) and (self.parent[path[0]] != before or not self.key.are(path, keys[first:end])):
                raise _broken(keys, first)
            if self.orphans:
                path = np.concatenate([path, as_i32(self._follow_orphans(keys, end))])
                end = first + len(path)
            rest = keys[end:]
            found = self.key.find_all(rest)
            for node in found.tolist() if np.count_nonzero(found) else ():
                if node and self.depth[node] >= 0:
                    raise _broken(keys, keys.index(self.key[node], first))
        except TypeError:
            raise CacheError("expected the keys of a path as digests (non-empty bytes)") from None
        if len(set(rest)) != len(rest):
            raise CacheError(f"expected {len(rest)} distinct new keys of a path, got {len(set(rest))}")
        return path

    def _follow_orphans(self, keys: Sequence[Key], first: int) -> list[int]:
        """Nodes of the leading chunks of `keys[first:]`, all of them orphans or after one.

        Raises `CacheError` if one of `keys[first:]` is not the child of the key before it.
        """
        nodes = self.find(keys[first:])
        for position, node in enumerate(nodes, first):
            if node:
                self.check_link(keys, position)
        return list(takewhile(bool, nodes))

    def locate(self, keys: Sequence[Key]) -> I32:
        """The node of each of `keys`; `ROOT` for those in no tier and not on their way into one.

        Of keys that begin with chunks which follow one another, these are found by their links.
        """
        find, depth = self.get, self.depth
        head = find(keys[0]) if len(keys) >= FEW else ROOT
        low, high, first = 0, len(keys) if head else 0, depth[head]
        middle = high - 1
        while low < high:
            if (node := find(keys[middle])) and depth[node] == first + middle:
                low = middle + 1
            else:
                high = middle
            middle = (low + high) // 2
        path = self.path(find(keys[low - 1]), low)[::-1] if low else as_i32(())
        ours = keys if low == len(keys) else keys[:low]
        if len(path) < low or not set(map(type, ours)) <= {bytes} or not self.key.are(path, ours):
            return self.key.find_all(keys)
        return path if low == len(keys) else np.concatenate([path, self.key.find_all(keys[low:])])

    def loadable_nodes(self, keys: Sequence[Key]) -> list[int]:
        """Nodes of the leading chunks of `keys` that are loadable, from the first chunk or from an orphan."""
        find, loadable = self.get, self.loadable
        path: list[int] = []
        for key in keys:
            node = find(key)
            if not node or not loadable[node]:
                break
            path.append(node)
        return path

    def ancestor_keys(self, node: int) -> list[Key]:
        """Keys of the chunks before `node`: from the first of its path on, or from the last one that no tier has."""
        found: list[Key] = []
        while node:
            depth = self.depth[node]
            line = self.path(node, depth - self.depth[ROOT if depth >= 0 else ORPHANS])
            found += self.key[line[1:]].tolist()
            before = self.orphans.get(int(line[-1]))
            if before is None:
                break
            found.append(before)
            node = self.get(before)
        return found[::-1]

    def is_loadable(self, key: Key) -> bool:
        """Whether `key` is loadable from the first chunk."""
        return self.loadable[node] == ROOTED if (node := self.get(key)) else False

    def find_independent(self, keys: Sequence[Key]) -> list[int]:
        """The node of each of `keys`, which are independent; `ROOT` for those in no tier and not on their way into one.

        Raises `CacheError` if they are not distinct, or one is the child of another chunk.
        """
        nodes = self.find(keys)
        if len(set(keys)) != len(keys):
            raise CacheError(f"expected {len(keys)} distinct keys of a path, got {len(set(keys))}")
        self.check_independent(as_i32(nodes))
        return nodes

    def check_independent(self, nodes: npt.NDArray[np.int32]) -> None:
        """Raise `CacheError` if one of `nodes` is the child of another."""
        children = nodes[i32_view(self.parent)[nodes] != ROOT].tolist()
        if children:
            name = self.key[children[0]].hex()[:12]
            raise CacheError(f"expected independent chunks, got {name}, which is the child of another chunk")

    def check_link(self, keys: Sequence[Key], position: int) -> int:
        """The node of `keys[position]`; raises `CacheError` if it does not follow the key before it."""
        node = self._at(keys, position)
        before = self.orphans.get(node) if self.orphans else None
        if node and (before or self.key[self.parent[node]]) != (keys[position - 1] if position else None):
            raise _broken(keys, position)
        return node

    def _at(self, keys: Sequence[Key], position: int) -> int:
        key = keys[position]
        node = self.get(key)
        if node and self.depth[node] != position and self.depth[node] >= 0:
            raise _broken(keys, position)
        return node

    # ------------------------------------------------------------------ changes

    def are_loadable(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Whether each of `nodes` is loadable, also from an orphan; false for `ROOT`. Shape of `nodes`."""
        found: npt.NDArray[np.bool_] = (nodes != ROOT) & (u8_view(self.loadable)[nodes] != 0)
        return found

    def accepts(self, parent: int, tier: int) -> bool:
        """Whether a child of `parent` may get a copy in `tier` without becoming an orphan."""
        return parent <= ORPHANS or self.coldest_tier(parent) >= tier

    def link(self, parent: int, keys: Sequence[Key], tier: int, slots: Sequence[int]) -> list[int]:
        """New nodes for `keys`, a path after `parent`, in `slots` of `tier`, none of them ready.

        The caller has checked that they are new (`follow`), and that `parent` accepts them.
        """
        if not keys:
            return []
        nodes, depth = self._numbers(len(keys)), self.depth[parent] + 1
        self._tree.append(parent, nodes)
        i32_view(self.depth)[nodes] = np.arange(depth, depth + len(nodes))
        for each in range(tier + 1):
            self.num_children[each][parent] += 1
            i32_view(self.num_children[each])[nodes[:-1]] = 1
        return self._enter(keys, nodes, tier, slots)

    def link_independent(self, keys: Sequence[Key], tier: int, slots: Sequence[int]) -> list[int]:
        """New independent nodes, for `keys` that `find_independent` did not find."""
        if not keys:
            return []
        nodes = self._numbers(len(keys))
        self._tree.link_trees(np.zeros_like(nodes), nodes)
        i32_view(self.depth)[nodes] = 0
        for each in range(tier + 1):
            self.num_children[each][ROOT] += len(keys)
        return self._enter(keys, nodes, tier, slots)

    def link_trees(
        self,
        keys: npt.NDArray[Any],
        parent_rows: npt.NDArray[np.int64],
        parent_nodes: npt.NDArray[np.int32],
        tier: int,
        slots: npt.NDArray[np.int32],
    ) -> npt.NDArray[np.int32]:
        """New nodes for `keys`, a forest of paths, parents first, in `slots` of `tier`, which are ready.

        Each follows the key at position `parent_rows`, int64, shape `(len(keys),)`; or, where that is -1, the node
        `parent_nodes`, int32 and of the same shape, which accepts it. The caller has checked that all keys are new
        and distinct.
        """
        nodes = self._numbers(len(keys))
        if not len(nodes):
            return nodes
        self._enter(keys, nodes, tier, slots)
        parents = np.where(parent_rows >= 0, nodes[parent_rows], parent_nodes)
        self._tree.link_trees(parents, nodes)
        for reach in self.num_children[: tier + 1]:
            np.add.at(i32_view(reach), parents, 1)
        # Steps up to the first of its path, and that one's position, by pointer doubling.
        up, steps = np.where(parent_rows >= 0, parent_rows, np.arange(len(nodes))), (parent_rows >= 0).astype(np.int32)
        while steps.any() and not np.array_equal(above_up := up[up], up):
            steps += steps[up]
            up = above_up
        tops = parents[up]
        i32_view(self.depth)[nodes] = i32_view(self.depth)[tops] + 1 + steps
        u8_view(self.loadable)[nodes] = u8_view(self.loadable)[tops]
        return nodes

    def add_copies(self, nodes: Sequence[int], tier: int, slots: Sequence[int]) -> None:
        """Add copies of distinct `nodes`, parents first, in `slots` of `tier`.

        Raises `IntegrityError`, with nothing changed, if one has a copy there, or its parent has none there or colder.
        """
        ids, columns = as_i32(nodes), [i32_view(slot) for slot in self.slot]
        second = columns[tier][ids] >= 0
        parents = i32_view(self.parent)[ids]
        orphans = parents > ORPHANS
        orphans[1:] &= parents[1:] != ids[:-1]
        for colder in columns[tier:]:
            orphans &= colder[parents] < 0
        if np.count_nonzero(orphans):
            orphans[orphans] = ~np.isin(parents[orphans], ids)
        invalid = second | orphans
        if np.count_nonzero(invalid):
            name = self.key[nodes[int(invalid.argmax())]].hex()[:12]
            raise IntegrityError(
                f"{self.pools[tier].where}chunk {name} has a copy in tier {tier} already, or no parent there or in a "
                "colder one"
            )
        reaching = np.zeros(len(ids), bool)
        for each in reversed(self.tiers):
            reaching |= columns[each][ids] >= 0
            if each <= tier:
                np.add.at(i32_view(self.num_children[each]), parents[~reaching], 1)
        columns[tier][ids] = slots
        i32_view(self.pools[tier].node)[slots] = ids

    def all_children(self, nodes: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The children of all `nodes`, in order of parent, the youngest first."""
        return self._tree.all_children(as_i32(nodes))

    def drop_copies(self, nodes: npt.NDArray[np.int32], tier: int) -> None:
        """`drop_copy` for nodes that a colder tier has; keeps the nodes of their slots."""
        i32_view(self.slot[tier])[nodes] = NONE

    def drop_leaves(self, nodes: npt.NDArray[np.int32], tier: int = 0) -> list[int]:
        """`drop_copy` for `nodes`, of which only `tier` has a copy.

        Keeps the nodes of their slots. The only child that one of `nodes` may have is the one before it. Returns the
        parents that have lost a child, each once.
        """
        self.key.remove(nodes.tolist())
        parent_nodes = i32_view(self.parent)[nodes]
        tops = np.ones(len(nodes), bool)
        np.not_equal(parent_nodes[:-1], nodes[1:], out=tops[:-1])
        if self.orphans:
            for node in nodes[parent_nodes == ORPHANS].tolist():
                self._remove_orphan(node)
        parents: dict[int, None] = {}
        for eldest, youngest, parent, count in self._tree.siblings(nodes[tops], parent_nodes[tops]):
            for reach in self.num_children[: tier + 1]:
                reach[parent] -= count
            self._tree.unlink_siblings(eldest, youngest, parent)
            parents[parent] = None
        i32_view(self.slot[tier])[nodes] = NONE
        for reach in self.num_children[: tier + 1]:
            i32_view(reach)[nodes] = 0
        u8_view(self.loadable)[nodes] = 0
        self._free.give(array("i", nodes.tobytes()))
        self.removed += len(nodes)
        return list(parents)

    def drop_copy(self, node: int, tier: int) -> bool:
        """Remove a copy from its node; returns whether that removed the node. Does not change the state of the slot."""
        after = self.other_coldest_tier(node, tier)
        slots = self.slot[tier]
        self.pools[tier].node[slots[node]] = ROOT
        slots[node] = NONE
        parent = self.parent[node]
        for each in range(after + 1, tier + 1):
            self.num_children[each][parent] -= 1
        if after >= 0:
            return False
        self._forget(node, parent)
        return True

    def mark_loadable(self, nodes: Sequence[int]) -> Sequence[int]:
        """`nodes`, parents first, have a ready copy: mark them and ready descendants, if their parent is loadable.

        Returns all nodes that may have become loadable.
        """
        if not nodes:
            return nodes
        loadable, parent, child, older = self.loadable, self.parent, self._tree.child, self._tree.older
        ids = as_i32(nodes)
        mark = loadable[parent[nodes[0]]]
        if mark and self._tree.is_line(ids):
            u8_view(loadable)[ids] = mark
            return nodes
        if mark and self._are_last(ids):
            u8_view(loadable)[ids] = u8_view(loadable)[i32_view(parent)[ids]]
            return nodes
        queue = list(nodes)
        for i, node in enumerate(queue, 1):  # grows by ready descendants
            if loadable[node] or not loadable[parent[node]]:
                continue
            loadable[node] = loadable[parent[node]]
            below = child[node]
            if below and (older[below] or i == len(queue) or below != queue[i]):
                queue += [c for c in self.children(node) if self.warmest_ready(c) >= 0]
        return queue

    def attach_orphans(self, nodes: Sequence[int]) -> list[int]:
        """Attach orphans to parents among `nodes` that are loadable and as cold; returns those no longer orphans."""
        found: list[int] = []
        for node in nodes if self.orphans_by_parent else ():
            if self.loadable[node]:
                for orphan in tuple(self.orphans_by_parent.get(self.key[node], ())):
                    if not any(self.is_ready(node, tier) for tier in self.tiers[self.coldest_tier(orphan) :]):
                        self.wanted_by_orphans.add(node)
                    elif self.top(node) != orphan:  # else the links would form a cycle
                        found += self._attach_orphan(orphan, node)
        return found

    def top(self, node: int) -> int:
        """The orphan that `node` is or descends from; for other nodes the first chunk of the path."""
        while self.parent[node] > ORPHANS:
            node = self.parent[node]
        return node

    def is_orphan(self, node: int) -> bool:
        """Whether `node` is `ROOT`, or an orphan whose parent is in no tier, or descends from one."""
        return not node or (self.depth[node] < 0 and not self.get(self.orphans[self.top(node)]))

    def _attach_orphan(self, orphan: int, parent: int) -> list[int]:
        """Attach `orphan` and its descendants to `parent`; returns those no longer orphans, parents first."""
        self._remove_orphan(orphan)
        self._tree.move(orphan, parent)
        for reach in self.num_children[: self.coldest_tier(orphan) + 1]:
            reach[ORPHANS] -= 1
            reach[parent] += 1
        shift, mark, moved = self.depth[parent] + 1 - self.depth[orphan], self.loadable[parent], [orphan]
        for node in moved:  # grows
            self.depth[node] += shift
            if self.loadable[node]:
                self.loadable[node] = mark
            moved += self.children(node)
        return moved if mark == ROOTED else []

    def _are_last(self, nodes: npt.NDArray[np.int32]) -> bool:
        """Whether `nodes` have no children, and all their parents are loadable."""
        parents = i32_view(self.parent)[nodes]
        return bool(u8_view(self.loadable)[parents].all() and not i32_view(self._tree.child)[nodes].any())

    def orphaned_by(self, node: int, left: int) -> list[tuple[int, int]]:
        """Copies (node, tier) of descendants that can no longer be loaded when `left` is the coldest tier of `node`.

        Parents come before children; `left` is -1 if no copy of `node` remains.
        """
        lost: list[tuple[int, int]] = []
        queue = [(node, left)]
        for each, limit in queue:  # `limit` is the coldest tier that still has `each`
            for child in self.children(each):
                if self.coldest_tier(child) <= limit:
                    continue
                lost += [(child, t) for t in self.tiers[limit + 1 :] if self.slot[t][child] >= 0]
                warm = [t for t in range(limit + 1) if self.slot[t][child] >= 0]
                queue.append((child, warm[-1] if warm else -1))
        return lost

    def check_integrity(self) -> None:
        """Raise `CacheError` unless parent and child links, numbers of children and closure hold everywhere."""
        live = self.all_nodes()
        self.key.check_integrity()
        self._tree.check_integrity(live)
        parent, coldest, is_ready = i32_view(self.parent)[live], np.full(self.size, NONE), np.zeros(self.size, bool)
        for tier in self.tiers:
            slots = i32_view(self.slot[tier])
            coldest[slots >= 0] = tier
            is_ready[live] |= self.are_ready(live, tier)
            has = live[slots[live] >= 0]
            self._check_none(
                has[i32_view(self.pools[tier].node)[slots[has]] != has], f"has another's slot in tier {tier}"
            )
        self._check_none(live[coldest[live] < 0], "has no copy")
        has_parent = parent > ORPHANS
        self._check_none(live[has_parent & ~self.key.has(parent)], "has outlived its parent")
        is_apart = (has_parent & (coldest[parent] < coldest[live])) | (
            i32_view(self.depth)[live] != i32_view(self.depth)[parent] + 1
        )
        self._check_none(live[is_apart], "is in a colder tier than its parent, or has a wrong depth")
        loadable = u8_view(self.loadable)
        is_wrong = loadable[live] != np.where(is_ready[live], loadable[parent], 0)
        self._check_none(live[is_wrong], "is wrongly marked as loadable or not")
        for tier in self.tiers:
            counted = np.bincount(parent[coldest[live] >= tier], minlength=self.size)
            nodes = np.concatenate([live, as_i32((ROOT, ORPHANS))])
            for node in nodes[counted[nodes] != i32_view(self.num_children[tier])[nodes]].tolist():
                count = self.num_children[tier][node]
                where = self.pools[tier].where
                raise CacheError(f"{where}children of node {node}: counted {count}, found {counted[node]}")
        waiting = {node: key for key, nodes in self.orphans_by_parent.items() for node in nodes}
        if not waiting == self.orphans or set(waiting) != set(self.children(ORPHANS)):
            raise CacheError(f"there are {len(self.orphans)} orphans, but {len(waiting)} are listed by parent")

    def _check_none(self, wrong: npt.NDArray[np.int32], why: str) -> None:
        for node in wrong.tolist():
            raise CacheError(f"chunk {self.key[node].hex()[:12]} {why}")


def _broken(keys: Sequence[Key], position: int) -> CacheError:
    return CacheError(f"key {position} of a path, {keys[position].hex()[:12]}, is not the child of the key before it")


class Presence(enum.Enum):
    """Where a chunk is."""

    ABSENT = "absent"
    IN_FLIGHT = "in_flight"
    HOST = "host"  # in the host tier (the first one): can be loaded at once
    COLDER = "colder"  # in a colder tier only


_PRESENCES = (Presence.ABSENT, Presence.IN_FLIGHT, Presence.HOST, Presence.COLDER)
_ABSENT, _IN_FLIGHT, _HOST, _COLDER = range(len(_PRESENCES))


@dataclass(frozen=True, slots=True)
class Residency:
    """Where each of `keys` was, in `presences`. As `keys` of a `GroupKeys` it saves another search."""

    keys: Sequence[Key]
    presences: Sequence[Presence]
    nodes: I32 = field(compare=False, repr=False)
    index: Index = field(compare=False, repr=False)
    pool: SlotPool = field(compare=False, repr=False)
    removed: int = field(compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.keys)

    def part(self, begin: int, end: int) -> Residency:
        """The residency of the keys `[begin, end)`."""
        here = slice(begin, end)
        return Residency(self.keys[here], self.presences[here], self.nodes[here], self.index, self.pool, self.removed)

    def pick(self, positions: Sequence[int]) -> Residency:
        """The residency of the keys at `positions`."""
        keys, presences = [self.keys[each] for each in positions], [self.presences[each] for each in positions]
        return Residency(keys, presences, self.nodes[list(positions)], self.index, self.pool, self.removed)

    def slots(self) -> list[int] | None:
        """The slots of the chunks in the host tier; `None` unless index and pool agree that all of them are ready.

        Used to read chunks that were found before the control plane failed: no slot is written after that.
        """
        index, pool, slots = self.index, self.pool, list[int]()
        if index.removed < 0:
            return None  # all chunks were removed since
        for key in self.keys:
            node = index.get(key)
            slot = index.slot[0][node] if node else -1
            if slot < 0 or pool.state[slot] != READY or pool.node[slot] != node or index.key[node] != key:
                return None
            slots.append(slot)
        return slots

    @classmethod
    def take(cls, index: Index, pool: SlotPool, keys: Sequence[Key]) -> Residency:
        """Look up `keys`; `pool` is that of the host tier. Raises `CacheError` for a key that is not bytes."""
        nodes = index.locate(keys)
        loadable = u8_view(index.loadable)[nodes] != 0
        presences = np.where(loadable, np.where(index.are_ready(nodes, 0), _HOST, _COLDER), _IN_FLIGHT)
        presences[nodes == ROOT] = _ABSENT
        if (presences == _HOST).all():
            return cls(keys, [Presence.HOST] * len(keys), nodes, index, pool, index.removed)
        return cls(keys, [_PRESENCES[each] for each in presences.tolist()], nodes, index, pool, index.removed)


def nodes_of(index: Index, keys: Sequence[Key] | Residency) -> tuple[Sequence[Key], I32]:
    """Keys and their nodes, `ROOT` for keys in no tier. Raises `CacheError` for a key that is not bytes."""
    if not isinstance(keys, Residency):
        return keys, index.locate(keys)
    if keys.index is index and keys.removed == index.removed:
        return keys.keys, keys.nodes
    return nodes_of(index, keys.keys)
