"""The interface of eviction policies.

A policy knows the chunks of one tier by small integers ("nodes") and keeps them in eviction order. It does not know
slots, states or prefixes: the cache decides whether a chunk may be evicted. `next_victims` names the next victims in
order; the cache then calls `remove_victims` for those that it evicts, and `hold_victims` for those that it cannot evict
now. Such a node is *held*: it leaves the order until `release` puts it at the cold end, or a use at the hot end. So a
chunk that cannot be evicted costs time once, not at each eviction.

    insert ──► in order ──► evicted
                │     ▲
      rejected  ▼     │ release, touch
               held ──┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import I32, KeyTable

NodeKeys: TypeAlias = "npt.NDArray[np.object_] | KeyTable"
"""The key of each node, for policies with a ghost list."""


class EvictionPolicy(ABC):
    """An order of eviction over the resident chunks of one tier, which has `slots` slots.

    `insert` of a node that is in the policy, and `touch`, `hold`, `release` and `remove` of one that is not, raise
    `CacheError`. A node that is given twice in one call counts once: at its last position in `touch`, at its first
    elsewhere. `insert` raises `CacheError` for it.
    """

    rejects = False
    """Whether `admit` may reject chunks."""

    def __init__(self, slots: int, keys: NodeKeys) -> None:
        self.slots = slots
        self.keys = keys

    def begin(  # noqa: B027 - for policies that count time
        self, request: int, length: int = 0, last: int = 0, keys: Sequence[Key] = (), hint: int = 0
    ) -> None:
        """The request of this number begins or continues: uses until the next call are its uses, and have one age.

        Numbers ascend. One above all earlier ones begins a request for a path of `length` chunks: `last` is the node
        of the last chunk of its resident prefix, `keys` are the keys after it. An earlier number continues a request,
        and chunks that it has used already are not counted again. `hint` is the number of its reuse hint
        (`longshore.cache.eviction_policies.hit_rates`).
        """

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int], *, least: int = 1) -> int:
        """How many leading chunks of `keys`, a part of a path, to store.

        The others are rejected: their expected hits are fewer than those of the chunks to evict for them, or there is
        no room. `make_room(count)` makes room for at most `count` of `keys`, and returns for how many. The keys count
        as used by the current request. The first `least` are stored if they get room. A policy without expected hits
        rejects nothing.
        """
        return make_room(len(keys))

    def outrank(self, nodes: Sequence[int], age: int) -> npt.NDArray[np.bool_]:
        """Which of `nodes` are expected to bring at least the hits of all chunks last used `age` requests ago; bool.

        That is the mean of these, for the time that they occupy a slot. A policy without expected hits says all.
        """
        return np.ones(len(nodes), bool)

    def record_uses(self, nodes: Sequence[int], *, leaf: bool = False) -> None:  # noqa: B027 - for ghost lists
        """Record uses of `nodes`, a part of a path, tail first, that another tier has and this one does not.

        With `leaf`, a prompt ends with the first of them, as for `insert`.
        """

    @abstractmethod
    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """`nodes` became resident: a part of a path, tail first, so that heads are evicted last.

        With `leaf`, no chunk follows the first of them: a prompt ends there. With `continues`, the nodes of the last
        `insert` or `touch` follow them in the path of the request.
        """

    def insert_copies(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """`nodes` became resident as copies of chunks of a warmer tier; `record_uses` has recorded their uses."""
        self.insert(nodes, leaf=leaf)

    @abstractmethod
    def touch(self, nodes: Sequence[int] | I32) -> None:
        """`nodes`, a part of a path, tail first, were used. Those that were held are released."""

    @abstractmethod
    def hold(self, node: int) -> None:
        """`node` cannot be evicted at present. Idempotent."""

    def hold_all(self, nodes: Sequence[int]) -> None:
        """`hold` for many."""
        for node in nodes:
            self.hold(node)

    @abstractmethod
    def release(self, nodes: Sequence[int]) -> None:
        """The held nodes among `nodes` can be evicted again, before all others."""

    @abstractmethod
    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` was removed. If it was `evicted`, that is its key, which the policy may put on a ghost list."""

    def remove_all(self, nodes: Sequence[int]) -> None:
        """`remove` for many nodes that were not evicted."""
        for node in dict.fromkeys(nodes):
            self.remove(node)

    @abstractmethod
    def victim(self) -> int:
        """The next victim among the nodes that are not held; 0 if there is none."""

    @abstractmethod
    def order(self) -> Iterator[int]:
        """All nodes that are not held, in eviction order. For tests and diagnosis: O(n)."""

    @abstractmethod
    def is_held(self, node: int) -> bool:
        """Whether `node` is in the policy, and held."""

    def are_held(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """`is_held` for the nodes `at`; bool, of the same shape."""
        return np.array([self.is_held(node) for node in at.tolist()], bool)

    @abstractmethod
    def __contains__(self, node: object) -> bool:
        """Whether `node` is in the policy, held or not."""

    def resident(self, nodes: int) -> npt.NDArray[np.bool_]:
        """For each node below `nodes` whether it is in the policy, held or not; bool, shape `(nodes,)`."""
        return np.array([node in self for node in range(nodes)], bool)

    @abstractmethod
    def __len__(self) -> int:
        """Number of nodes, held ones included."""

    @abstractmethod
    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise `CacheError` if the policy's data structures are inconsistent."""

    def resize(self, slots: int, keys: NodeKeys) -> None:
        """The tier has `slots` slots now, and the keys of nodes are in `keys`."""
        self.slots = slots
        self.keys = keys

    @abstractmethod
    def next_victims(self, count: int) -> list[int]:
        """The next victims in eviction order: at most `count`, and at least one unless all nodes are held.

        There may be fewer where the order of later victims depends on these.
        """

    @abstractmethod
    def remove_victims(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """Leading nodes of the last `next_victims`, with `keys`, were evicted, and held nodes among them, or held ones
        alone.

        Those that were removed or held since then do not count: the next ones lead.
        """

    @abstractmethod
    def hold_victims(self, nodes: Sequence[int]) -> None:
        """Hold leading nodes of the last `next_victims`, as in `remove_victims`: they cannot be evicted at present."""

    def victims_after(self, node: int, held: Sequence[int]) -> int:
        """How many leading nodes of `held`, once released, would be evicted right after `node`, a victim just named.

        A policy that cannot tell cheaply returns 0.
        """
        return 0
