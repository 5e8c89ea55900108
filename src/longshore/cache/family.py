"""Who is whose child: links between nodes, in columns.

    parent ─ child ─► youngest ─ older ─► ... ─ older ─► eldest          `younger` leads back, so that any may leave

A node's number is 1 or more; 0 is nobody, and the parent of all first ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from longshore.cache.columns import column, zeros
from longshore.errors import IntegrityError

_NOBODY = 0


class Family:
    """Parents and children of nodes below `size`. 16 bytes each."""

    __slots__ = ("child", "older", "parent", "younger")

    def __init__(self, size: int) -> None:
        self.parent, self.child, self.older, self.younger = (zeros(size) for _ in range(4))

    def grow(self, more: int) -> None:
        """Make room for `more` nodes."""
        for links in (self.parent, self.child, self.older, self.younger):
            links.extend(zeros(more))

    def children(self, node: int) -> Iterator[int]:
        """The nodes right behind `node`, youngest first. The family must not be changed meanwhile."""
        each = self.child[node]
        for _ in range(len(self.older)):
            if not each:
                return
            yield each
            each = self.older[each]
        raise IntegrityError(f"the children of node {node} go round without an end: damaged links")

    def all_children(self, nodes: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The nodes right behind any of `nodes`, in their order; of each the youngest first."""
        child = column(self.child)[nodes]
        youngest: npt.NDArray[np.int32] = child[child != _NOBODY]
        if not column(self.older)[youngest].any():  # none has a sibling
            return youngest
        found, older = array("i"), self.older
        for first in youngest.tolist():
            each = first
            while each:
                found.append(each)
                each = older[each]
                if len(found) > len(older):
                    raise IntegrityError(f"the siblings of node {first} go round without an end: damaged links")
        return column(found)

    def path(self, node: int, length: int) -> list[int]:
        """`node` and its ancestors, at most `length` in all, tail first."""
        parent, found = self.parent, list[int]()
        for _ in range(length):
            if node == _NOBODY:
                break
            found.append(node)
            node = parent[node]
        return found

    def is_line(self, at: npt.NDArray[np.int32]) -> bool:
        """Whether each of the nodes `at` is the only child of the one before it, and the last has none."""
        child = column(self.child)
        following = child[at[:-1]]
        apart = (following != at[1:]) | (column(self.older)[following] > 0)
        return not child[at[-1]] and not np.count_nonzero(apart)

    def append(self, parent: int, at: npt.NDArray[np.int32]) -> None:
        """The nodes `at`, which are new, follow `parent`, one after the other."""
        elder, head, tail = self.child[parent], int(at[0]), int(at[-1])
        column(self.parent)[at[1:]] = at[:-1]
        column(self.child)[at[:-1]] = at[1:]
        column(self.older)[at] = column(self.younger)[at] = _NOBODY
        self.parent[head], self.child[tail], self.older[head] = parent, _NOBODY, elder
        if elder:
            self.younger[elder] = head
        self.child[parent] = head

    def append_firsts(self, at: npt.NDArray[np.int32]) -> None:
        """The nodes `at`, which are new, follow nobody."""
        elder, first, last = self.child[_NOBODY], int(at[0]), int(at[-1])
        column(self.parent)[at] = column(self.child)[at] = _NOBODY
        column(self.older)[at[:-1]] = at[1:]
        column(self.younger)[at[1:]] = at[:-1]
        self.older[last], self.younger[first] = elder, _NOBODY
        if elder:
            self.younger[elder] = last
        self.child[_NOBODY] = first

    def graft(self, parents: npt.NDArray[np.integer], nodes: npt.NDArray[np.int32]) -> None:
        """Each of `nodes`, which are new, follows that of `parents`; of siblings the first is the youngest."""
        order = np.argsort(parents, kind="stable")
        at, above = nodes[order], parents[order]
        first = np.concatenate([[True], above[1:] != above[:-1]])
        youngest, eldest = at[first], at[np.concatenate([first[1:], [True]])]
        child, older, younger = column(self.child), column(self.older), column(self.younger)
        column(self.parent)[at], child[at] = above, _NOBODY
        older[at[:-1]], younger[at[1:]] = at[1:], at[:-1]
        elders = child[above[first]]
        older[eldest], younger[youngest] = elders, _NOBODY
        younger[elders[elders > 0]] = eldest[elders > 0]
        child[above[first]] = youngest

    def siblings(
        self, at: npt.NDArray[np.int32], parents: npt.NDArray[np.int32]
    ) -> Iterator[tuple[int, int, int, int]]:
        """The nodes `at`, children of `parents`, in runs, each from one to the next younger sibling.

        Of each run: the eldest, the youngest, their parent, and how many they are. What has been told of may leave
        before the next is asked for.
        """
        last = np.ones(len(at), bool)
        np.not_equal(column(self.younger)[at[:-1]], at[1:], out=last[:-1])
        ends = np.flatnonzero(last)
        begins = np.concatenate([[0], ends[:-1] + 1])
        runs = (at[begins], at[ends], parents[ends], ends - begins + 1)
        return zip(*(each.tolist() for each in runs), strict=True)

    def move(self, node: int, parent: int) -> None:
        """`node` and all behind it follow `parent` from now on."""
        self.leave(node, self.parent[node])
        elder = self.child[parent]
        self.parent[node], self.older[node], self.younger[node] = parent, elder, _NOBODY
        if elder:
            self.younger[elder] = node
        self.child[parent] = node

    def leave(self, node: int, parent: int) -> None:
        """`node` is no child of `parent` any more."""
        self.leave_together(node, node, parent)

    def leave_together(self, eldest: int, youngest: int, parent: int) -> None:
        """Nor are siblings that follow one another, from `eldest` to `youngest`."""
        older, younger = self.older[eldest], self.younger[youngest]
        if younger:
            self.older[younger] = older
        else:
            self.child[parent] = older
        if older:
            self.younger[older] = younger
