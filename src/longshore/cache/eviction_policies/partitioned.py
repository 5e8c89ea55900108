"""Several policies for the chunks of one tier, by priority or image size; each chunk is in one of them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import FEW, I32, as_i32, as_list, check_new, not_in_policy, u8_view, unique
from longshore.cache.eviction_policies.base import EvictionPolicy, NodeKeys
from longshore.errors import CacheError

OUT = 255
"""No policy has the node."""


class PartitionedPolicy(EvictionPolicy):
    """Policies by number, from 0 to 254, in the order of eviction; a node goes to that of `wanted(node)`."""

    def __init__(self, slots: int, keys: NodeKeys, parts: Mapping[int, EvictionPolicy], nodes: int = 0) -> None:
        """`nodes`: there are nodes below this number in the parts already."""
        super().__init__(slots, keys)
        self._parts = dict(parts)
        self._request = self._hint = 0
        part = np.zeros(0, np.uint8)
        for number, policy in parts.items() if nodes else ():  # in few passes: there may be ten million nodes
            ours = policy.resident(nodes).view(np.uint8)
            ours *= np.uint8(number ^ OUT)
            part = part + ours if len(part) else ours
        self._part_of: memoryview[int] = part.data
        """The number of the policy that each node is in, xor `OUT`: zeroed memory is in none."""

    @abstractmethod
    def wanted(self, node: int) -> int:
        """The number of the policy for the new `node`."""

    def all_wanted(self, nodes: Sequence[int]) -> bytes:
        """`wanted` for many nodes, one byte each."""
        return bytes(map(self.wanted, nodes))

    def part(self, number: int) -> EvictionPolicy:
        """The policy with this number."""
        return self._parts[number]

    def resize(self, slots: int, keys: NodeKeys) -> None:
        """Resize to `slots` slots."""
        super().resize(slots, keys)
        for policy in self._parts.values():
            policy.resize(slots, keys)

    def grow(self, nodes: int) -> None:
        """Make room for node numbers below `nodes`."""
        if nodes > len(self._part_of):
            part = np.zeros(nodes, np.uint8)
            part[: len(self._part_of)] = self._part_of
            self._part_of = part.data
        for policy in self._parts.values():
            policy.grow(nodes)

    def begin(self, request: int, length: int = 0, last: int = 0, keys: Sequence[Key] = (), hint: int = 0) -> None:
        """A request begins or continues, for all policies."""
        self._request, self._hint = request, hint
        for policy in self._parts.values():
            policy.begin(request, length, last, keys, hint)

    def record_uses(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """Record uses of `nodes`, which are not in the policy."""
        for number, ours in self._split(nodes, self.all_wanted(nodes)):
            self.part(number).record_uses(ours, leaf=leaf and ours[0] == nodes[0])

    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """Insert `nodes`, each into the policy that `wanted` names."""
        check_new(self._part_of, nodes)
        for number, ours in self._split(nodes, self.all_wanted(nodes)):
            self.part(number).insert(ours, leaf=leaf and ours[0] == nodes[0])
            u8_view(self._part_of)[as_i32(ours)] = number ^ OUT

    def insert_copies(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """As `insert`, for copies."""
        check_new(self._part_of, nodes)
        for number, ours in self._split(nodes, self.all_wanted(nodes)):
            self.part(number).insert_copies(ours, leaf=leaf and ours[0] == nodes[0])
            u8_view(self._part_of)[as_i32(ours)] = number ^ OUT

    def touch(self, nodes: Sequence[int] | I32) -> None:
        """Record uses of `nodes`."""
        for policy, ours in self._by_policy(as_list(nodes)):
            policy.touch(ours)

    def hold(self, node: int) -> None:
        """Hold `node`: it cannot be evicted until it is released."""
        self._of(node).hold(node)

    def hold_all(self, nodes: Sequence[int]) -> None:
        """Hold these nodes."""
        for policy, ours in self._by_policy(nodes):
            policy.hold_all(ours)

    def release(self, nodes: Sequence[int]) -> None:
        """Release those of `nodes` that are held: they are evicted next in their policies."""
        for policy, ours in self._by_policy(nodes):
            policy.release(ours)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """Remove `node`."""
        self._of(node).remove(node, evicted=evicted)
        self._part_of[node] = 0

    def remove_all(self, nodes: Sequence[int]) -> None:
        """Remove these nodes."""
        for policy, ours in self._by_policy(nodes):
            policy.remove_all(ours)
        u8_view(self._part_of)[as_i32(nodes)] = 0

    def remove_victims(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """Remove these nodes, all of one policy."""
        self._of(nodes[0]).remove_victims(nodes, keys)
        u8_view(self._part_of)[as_i32(nodes)] = 0

    def hold_victims(self, nodes: Sequence[int]) -> None:
        """Hold these nodes, all of one policy."""
        self._of(nodes[0]).hold_victims(nodes)

    def next_victims(self, count: int) -> list[int]:
        """The next victims of the first policy that has any."""
        return next((nodes for policy in self._parts.values() if (nodes := policy.next_victims(count))), [])

    def victims_after(self, node: int, held: Sequence[int]) -> int:
        """How many leading nodes of `held` are of the policy of `node`, and next victims after it there."""
        part = self._part_of[node]
        ours = next((count for count, each in enumerate(held) if self._part_of[each] != part), len(held))
        return self._of(node).victims_after(node, held[:ours])

    def victim(self) -> int:
        """The next victim of the first policy that has one; 0 if there is none."""
        for policy in self._parts.values():
            node = policy.victim()
            if node:
                return node
        return 0

    def order(self) -> Iterator[int]:
        """Nodes, one policy after the other."""
        for policy in self._parts.values():
            yield from policy.order()

    def is_held(self, node: int) -> bool:
        """Whether `node` is in the policy, and held."""
        return self._part_of[node] > 0 and self._of(node).is_held(node)

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._part_of) and self._part_of[node] > 0

    def resident(self, nodes: int) -> npt.NDArray[np.bool_]:
        """For each node below `nodes`, whether it is in the policy, held or not."""
        there: npt.NDArray[np.bool_] = u8_view(self._part_of)[:nodes] > 0
        return there

    def __len__(self) -> int:
        return sum(map(len, self._parts.values()))

    def check_integrity(self) -> None:
        """Raise `CacheError` unless each node is in the policy that it is marked with, and in no other."""
        for number, policy in self._parts.items():
            policy.check_integrity()
            ours = u8_view(self._part_of) == number ^ OUT
            count = np.count_nonzero(ours)
            if len(policy) != count or not policy.resident(len(ours))[ours].all():
                raise CacheError(f"policy {number} has {len(policy)} nodes, {count} are marked")

    def _of(self, node: int) -> EvictionPolicy:
        number = self._part_of[node] ^ OUT
        if number == OUT:
            raise not_in_policy(node)
        return self._parts[number]

    def _by_policy(self, nodes: Sequence[int]) -> Iterator[tuple[EvictionPolicy, Sequence[int]]]:
        parts = self._parts_of(nodes)
        if OUT in parts:
            raise not_in_policy(nodes[parts.index(OUT)])
        return ((self._parts[number], ours) for number, ours in self._split(nodes, parts))

    def _parts_of(self, nodes: Sequence[int]) -> bytes:
        """The number of the policy that each of `nodes` is in, or `OUT`."""
        return self._numbers(as_i32(nodes)).tobytes()

    def _numbers(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        return u8_view(self._part_of)[at] ^ np.uint8(OUT)

    @staticmethod
    def _split(nodes: Sequence[int], parts: bytes) -> list[tuple[int, Sequence[int]]]:
        """`nodes` by policy, in their order."""
        if parts.count(parts[:1]) == len(parts):
            return [(parts[0], nodes)] if parts else []
        if len(nodes) < FEW:
            return [(number, list(compress(nodes, map(number.__eq__, parts)))) for number in dict.fromkeys(parts)]
        at, of = as_i32(nodes), np.frombuffer(parts, np.uint8)
        return [(number, at[of == number].tolist()) for number in dict.fromkeys(parts)]


class PartitionedBySize(PartitionedPolicy):
    """One policy for each image size, because a slot of one size cannot hold an image of another.

    `policies` are by size class; nodes go to those of `size_classes_of(nodes)`.
    """

    def __init__(
        self,
        slots: int,
        keys: NodeKeys,
        policies: Sequence[EvictionPolicy],
        size_classes_of: Callable[[Sequence[int]], Sequence[int]],
    ) -> None:
        super().__init__(slots, keys, dict(enumerate(policies)))
        self._size_classes_of = size_classes_of

    def wanted(self, node: int) -> int:
        """The size class of `node`."""
        return self._size_classes_of((node,))[0]

    def all_wanted(self, nodes: Sequence[int]) -> bytes:
        """The size class of each of `nodes`."""
        return bytes(self._size_classes_of(nodes))

    def resize(self, slots: int, keys: NodeKeys) -> None:
        """Resize to `slots`, the slots of all slabs at the smallest size; each size gets its share."""
        before = self.slots
        EvictionPolicy.resize(self, slots, keys)
        for policy in self._parts.values():
            policy.resize(policy.slots * slots // before if before else slots, keys)

    def replace(self, make: Callable[[EvictionPolicy], EvictionPolicy]) -> None:
        """Replace each policy by one made from it."""
        self._parts = {size_class: make(policy) for size_class, policy in self._parts.items()}


class PartitionedByPriority(PartitionedPolicy):
    """Policies by priority, made by `make` as they are needed; `first` is that of `priority`, and may have nodes."""

    def __init__(
        self,
        slots: int,
        keys: NodeKeys,
        make: Callable[[int, NodeKeys], EvictionPolicy],
        first: EvictionPolicy,
        priority: int,
        priorities: memoryview[int],
        request: int = 0,
        hint: int = 0,
    ) -> None:
        """`priorities`: those that nodes are to have, by node, xor `priority`. They may be replaced.

        Whoever changes one calls `move`. Request number `request` is served, with this `hint`; `first` has been told.
        """
        super().__init__(slots, keys, {priority: first}, len(priorities))
        self.rejects, self._usual = first.rejects, first
        self._request, self._hint = request, hint
        self._make = make
        self.priorities, self._priority = priorities, priority

    def wanted(self, node: int) -> int:
        """The priority that `node` is to have."""
        return self.priorities[node] ^ self._priority

    def all_wanted(self, nodes: Sequence[int]) -> bytes:
        """The priority that each of `nodes` is to have."""
        return self._wanted_of(as_i32(nodes)).tobytes()

    def _wanted_of(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
        return u8_view(self.priorities)[at] ^ np.uint8(self._priority)

    def part(self, number: int) -> EvictionPolicy:
        """The policy of a priority, made if there is none yet."""
        if number not in self._parts:
            policy = self._make(self.slots, self.keys)
            policy.grow(len(self._part_of))
            policy.begin(self._request, hint=self._hint)
            self._parts = dict(sorted([*self._parts.items(), (number, policy)]))
        return self._parts[number]

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int], *, least: int = 1) -> int:
        """As the first policy, as long as all others are of what goes before its nodes; they say so by `rejects`."""
        if not self.rejects:
            return super().admit(keys, make_room, least=least)
        return self._usual.admit(keys, make_room, least=least)

    def move(self, at: npt.NDArray[np.int32]) -> None:
        """Those of the nodes `at`, a part of a path, parents first, that are in get the priority they are to have.

        Each goes first among those of that priority, the last of them before the others.
        """
        at = unique(at)
        part, wanted = self._numbers(at), self._wanted_of(at)
        moving = (part != OUT) & (part != wanted)
        at, part, wanted = at[moving], part[moving], wanted[moving]
        for number in sorted(set(part.tobytes())):
            self._parts[number].remove_all(at[part == number].tolist())
        for number in sorted(set(wanted.tobytes())):
            policy, ours = self.part(number), at[wanted == number].tolist()
            policy.insert(ours)
            policy.hold_all(ours)
            policy.release(ours)
        u8_view(self._part_of)[at] = wanted ^ np.uint8(OUT)
