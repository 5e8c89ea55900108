"""Image sizes: one policy for each, since a slot of one size is of no use to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longshore.cache.eviction.base import EvictionPolicy, Names
from longshore.cache.eviction.parted import Parted


class Sized(Parted):
    """`policies` by pool; nodes go to those of `pools_of(nodes)`."""

    def __init__(
        self,
        slots: int,
        names: Names,
        policies: Sequence[EvictionPolicy],
        pools_of: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        super().__init__(slots, names, dict(enumerate(policies)))
        self._pools_of = pools_of

    def wanted(self, node: int) -> int:
        """The pool of `node`."""
        return self._pools_of((node,))[0]

    def all_wanted(self, nodes: Sequence[int]) -> bytes:
        """The pool of each of `nodes`."""
        return bytes(self._pools_of(nodes))

    def resize(self, slots: int, names: Names) -> None:
        """The tier has as many slots now as all its slabs have for the smallest size; each size's share follows."""
        before = self.slots
        EvictionPolicy.resize(self, slots, names)
        for policy in self._parts.values():
            policy.resize(policy.slots * slots // before if before else slots, names)

    def replace(self, make: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Put another policy in the place of each, made of it."""
        self._parts = {pool: make(policy) for pool, policy in self._parts.items()}
