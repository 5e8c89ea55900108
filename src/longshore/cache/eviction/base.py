"""The seam for eviction policies.

A policy knows the chunks of one tier by small numbers ("nodes"), and the order in which they should go; it knows
nothing of slots, states or prefixes. Whether a chunk may go is the cache's business: `evict` offers candidates in
order, and what the cache will not part with now is *held*, out of the order, until `release` puts it back at the
cold end, or a use at the hot end. So a chunk that cannot go costs once, not at each eviction.

    insert ──► in order ──► evicted
                │     ▲
       refused  ▼     │ release, touch
               held ──┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import LISTS, has_twins, numbers
from longshore.errors import IntegrityError

Names = npt.NDArray[np.object_]
"""The key of each node: for policies that remember what has left."""

FEW = 48
"""Fewer nodes are sooner looked at one by one than by whole arrays."""


class EvictionPolicy(ABC):
    """An order of eviction over the resident chunks of one tier, which has `slots` slots.

    `insert` of a node that is in, `touch`, `hold`, `release` and `remove` of one that is not, are a `CacheError`.
    A node that a call names twice counts once: the last mention of what was used, the first of all else. Only `insert`
    refuses it.
    """

    refuses = False
    """Whether `admit` may refuse chunks."""

    def __init__(self, slots: int, names: Names) -> None:
        self.slots = slots
        self.names = names

    def begin(  # noqa: B027 - for those with a clock
        self, turn: int, length: int = 0, last: int = 0, keys: Sequence[Key] = (), hint: int = 0
    ) -> None:
        """The request of this turn begins, or goes on: all uses until the next call are its uses, and have one age.

        Turns are drawn one after the other. A request begins with a turn that is later than all before: for a path of
        `length` chunks, of which `last` is the node of the last one of those that lead and are resident, and `keys`
        are those of all behind it. With an earlier turn a request goes on: what it has used is not counted again.
        `hint` is the number of what its host has said about its return (`longshore.cache.eviction.hit_rates`).
        """

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int], *, copies: bool = False) -> tuple[int, int]:
        """How many lead of `keys`, a part of a path, that are to become resident, and how many are refused.

        Those are refused that promise less than what has to go for them. For what is neither there is no room at
        present. `make_room(count)` makes room for at most `count` of `keys`, and says for how many. The keys are used
        now, by the request that is served, unless they are `copies` of what another tier has.
        A policy that does not know what chunks promise refuses none.
        """
        return make_room(len(keys)), 0

    def record_uses(self, nodes: Sequence[int], *, leaf: bool = False) -> None:  # noqa: B027 - for those that remember
        """`nodes`, a part of a path, tail first, were used where another tier has them; this one does not.

        With `leaf`, a prompt ends with the first of them, as for `insert`.
        """

    @abstractmethod
    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """`nodes` became resident: a part of a path, tail first, so that heads stay longest.

        With `leaf`, nothing is known to follow the first of them: a prompt ends there. `continues` says that what
        was last named to `insert` or `touch` follows it in the path of the request.
        """

    def insert_copies(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """`nodes` became resident as copies of what a warmer tier has: `record_uses` has told of their uses."""
        self.insert(nodes, leaf=leaf)

    @abstractmethod
    def touch(self, nodes: Sequence[int]) -> None:
        """`nodes` were used: a part of a path, tail first. Held ones are so no longer."""

    @abstractmethod
    def hold(self, node: int) -> None:
        """`node` cannot go at present. Holding what is held changes nothing."""

    def hold_all(self, nodes: Sequence[int]) -> None:
        """`hold` for many."""
        for node in nodes:
            self.hold(node)

    @abstractmethod
    def release(self, nodes: Sequence[int]) -> None:
        """Those of `nodes` that are held may go again, and first."""

    @abstractmethod
    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` left; for want of room if its key is `evicted`, which a policy may remember."""

    def remove_all(self, nodes: Sequence[int]) -> None:
        """`remove` for many, which leave for other reasons than want of room."""
        for node in dict.fromkeys(nodes):
            self.remove(node)

    @abstractmethod
    def victim(self) -> int:
        """The node that should go first, of those that are not held; 0 without one."""

    @abstractmethod
    def order(self) -> Iterator[int]:
        """All nodes that are not held, the first to go first. For tests and diagnosis: O(n)."""

    @abstractmethod
    def is_held(self, node: int) -> bool:
        """Whether `node` is in, and held."""

    @abstractmethod
    def __contains__(self, node: object) -> bool:
        """Whether `node` is in, held or not."""

    def resident(self, nodes: int) -> npt.NDArray[np.bool_]:
        """For each node below `nodes` whether it is in, held or not. Shape `(nodes,)`."""
        return np.array([node in self for node in range(nodes)], bool)

    @abstractmethod
    def __len__(self) -> int:
        """Nodes that are in, held ones included."""

    @abstractmethod
    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `CacheError` where the policy's own books disagree."""

    def resize(self, slots: int, names: Names) -> None:
        """The tier has `slots` slots now, and the keys of nodes are in `names`."""
        self.slots = slots
        self.names = names

    @abstractmethod
    def next_victims(self, count: int) -> list[int]:
        """The nodes that would go next, first to go first, if each of them went: at least one, at most `count`.

        None only if there is none. There may be fewer, where what goes next depends on what has gone before.
        """

    @abstractmethod
    def remove_victims(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """These leading nodes of what `next_victims` has just named, and held ones among them, left for want of room.

        Their keys are `keys`.
        """

    @abstractmethod
    def hold_victims(self, nodes: Sequence[int]) -> None:
        """These leading nodes of what `next_victims` has just named cannot go at present: hold them."""

    def victims_after(self, node: int, held: Sequence[int]) -> int:
        """How many leading nodes of `held`, once released, would be evicted right after `node`, a victim just named.

        A policy that cannot tell cheaply returns 0.
        """
        return 0

    def evict(self, count: int, let_go: Callable[[int], bool]) -> int:
        """Offer nodes to `let_go`, first to go first, until `count` have gone; says how many did.

        `let_go` either takes leave of the node (calling `remove`, and `release` for what can go now) and says so, or
        changes nothing; the node is then held.
        """
        gone, victim, hold = 0, self.victim, self.hold
        while gone < count and (node := victim()):
            if let_go(node):
                gone += 1
            else:
                hold(node)
        return gone


def unknown(node: int) -> IntegrityError:
    """The error for a node that should have been in."""
    return IntegrityError(f"node {node} is not in the policy")


def known(node: int) -> IntegrityError:
    """The error for a node that should not have been in."""
    return IntegrityError(f"node {node} is already in the policy, or no node (these begin at {LISTS})")


def check_new(place: bytearray | array[int], nodes: Sequence[int], out: int = 0) -> None:
    """Raise `CacheError` if one of `nodes` is in already, or twice among them, or no node.

    What is not in is marked `out` in `place`.
    """
    if not nodes:
        return
    if len(nodes) == 1:
        good = nodes[0] >= LISTS and place[nodes[0]] == out
    else:
        at = numbers(nodes)
        good = at.min() >= LISTS and (np.asarray(memoryview(place))[at] == out).all() and not has_twins(at)
    if not good:
        raise known(
            next(node for i, node in enumerate(nodes) if node < LISTS or place[node] != out or node in nodes[:i])
        )


def check_in(place: bytearray | array[int], nodes: Sequence[int] | npt.NDArray[np.int32]) -> None:
    """Raise `CacheError` if one of `nodes` is not in, by its mark in `place`."""
    if not all(
        map(place.__getitem__, nodes) if len(nodes) < FEW else (np.asarray(memoryview(place))[numbers(nodes)].all(),)
    ):
        raise unknown(next(node for node in nodes if not place[node]))
