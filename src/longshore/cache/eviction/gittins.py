"""Evicts what promises the fewest hits for its slot, by how often and how long ago it was used.

    kind, age     once, 8-15 │ once, 4-7 │ ends a prompt, 0 │ twice, 8-15 │ ...     least promising first
                  f ─► e ─► d  c ─► b      h                  g                     lists, the oldest first
                  ▲
                  goes next

Each pair of a kind and an age has one list. Time is counted in uses; a step of the clock is an eighth as many as there
are slots. At each step lists hand over to the next age what has got so old, and `promise` says anew which order is the
best, from what came back until now. So the policy finds out by itself how long a pause to wait for, and which chunks
are worth it, and there is nothing to set. Why this way: `docs/eviction.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.chains import LISTS, Chains
from longshore.cache.columns import column, marks, numbers, zeros
from longshore.cache.eviction.base import FEW, EvictionPolicy, Names, check_in, check_new, unknown
from longshore.cache.eviction.departed import Departed
from longshore.cache.eviction.promise import AGES, KINDS, MOST_USES, Promises, age_of, ages_of, kind_of
from longshore.errors import CacheError

_STEPS, _SHORTEST_STEP = 8, 64
"""A step of the clock is slots / `_STEPS` uses long, and not shorter than the other."""

_REMEMBERED = 6
"""Departures to remember, for each slot."""

_FADE = 512
"""Steps after which counts are halved."""

_SHORT = 256
"""A path of fewer nodes is sooner walked along than used by whole arrays."""

# How a node was used, and whether it is held, is one byte.
_OUT, _LEAF, _ONCE = range(3)
_MOST = _ONCE + MOST_USES - 1
_HELD = 64

_KIND = bytes([0, kind_of(0), *map(kind_of, range(1, MOST_USES + 1))])
_MORE = bytes([_OUT, _ONCE + 1, *(min(use + 1, _MOST) for use in range(_ONCE, _MOST + 1))])


def _of_byte(table: bytes) -> bytes:
    """`table` for nodes that may be held, to translate bytes by."""
    return (table.ljust(_HELD, b"\0") * 4)[:256]


_KINDS, _MORES = _of_byte(_KIND), _of_byte(_MORE)
_MORES_KINDS = _of_byte(_MORE.translate(_KINDS))

_BYTES = [bytes((each,)) for each in range(KINDS * AGES)]

_Nodes = npt.NDArray[np.int32]
_Bytes = npt.NDArray[np.uint8]
_Bools = npt.NDArray[np.bool_]


class Gittins(EvictionPolicy):
    """Evicts from the list that promises least. O(1) for each node, amortised; 13 bytes per node.

    Six chunks for each slot are remembered after they have left, at about 20 bytes each.
    """

    def __init__(self, slots: int, names: Names) -> None:
        super().__init__(slots, names)
        self._promises = Promises()
        self._chains = Chains()
        self._place = bytearray(LISTS)
        self._used = zeros(LISTS)
        self._count = 0
        self._now = 0
        """Steps of the clock until now."""
        self._first = 0
        """All lists before this one in the order are empty."""
        self._rank_lists()
        self._fit()

    def resize(self, slots: int, names: Names) -> None:
        """The tier has `slots` slots now. If that is another number, what left before is forgotten."""
        same = slots == self.slots
        super().resize(slots, names)
        if not same:
            self._fit()

    def grow(self, nodes: int) -> None:
        """Nodes may now have any number below `nodes`."""
        self._chains.grow(nodes)
        more = max(0, nodes - len(self._place))
        self._place.extend(bytes(more))
        self._used.extend(zeros(more))

    def insert(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """`nodes` became resident: used as often as is remembered, and once more."""
        check_new(self._place, nodes)
        use = _LEAF if leaf else _ONCE
        for some in self._steps(nodes):
            if len(some) < FEW:
                for node in some:
                    self._insert_one(node, use)
                    use = _ONCE
            else:
                self._insert_all(some, use)
                use = _ONCE
            self._count += len(some)

    def touch(self, nodes: Sequence[int]) -> None:
        """`nodes` were used once more. Neighbours in one list that go to the same one move together."""
        check_in(self._place, nodes)
        for some in self._steps(nodes):
            if len(some) < _SHORT:
                self._touch_few(some)
            else:
                self._touch_all(some)

    def hold(self, node: int) -> None:
        """`node` cannot go at present."""
        use = self._place[node]
        if use == _OUT:
            raise unknown(node)
        if use < _HELD:
            self._chains.drop(node)
            self._place[node] = use | _HELD

    def release(self, nodes: Sequence[int]) -> None:
        """Those of `nodes` that are held may go again, each as the first of its list."""
        check_in(self._place, nodes)
        if len(nodes) < FEW:
            for node in nodes:
                if self._place[node] >= _HELD:
                    self._place[node] -= _HELD
                    which = _KIND[self._place[node]] * AGES + age_of(self._now - self._used[node])
                    self._chains.chill(which, node)
                    self._look_at(which)
        else:
            self._release_all(numbers(nodes))

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` left; how it was used is remembered if it was evicted."""
        use = self._place[node]
        if use == _OUT:
            raise unknown(node)
        if use < _HELD:
            self._chains.drop(node)
        if evicted is not None:
            self._departed.add(evicted, self._used[node], use & ~_HELD)
        self._place[node] = _OUT
        self._count -= 1

    def leave(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """These, the first of one list, left; how they were used is remembered."""
        self._chains.drop_coldest(self._order[self._first], nodes[-1])
        self._count -= len(nodes)
        if len(nodes) < FEW:
            for node, key in zip(nodes, keys, strict=True):
                self._departed.add(key, self._used[node], self._place[node])
                self._place[node] = _OUT
        else:
            at, place = numbers(nodes), marks(self._place)
            self._departed.add_all(keys, column(self._used)[at], place[at])
            place[at] = _OUT

    def keep(self, nodes: Sequence[int]) -> None:
        """These, the first of one list, cannot go at present."""
        self._chains.drop_coldest(self._order[self._first], nodes[-1])
        marks(self._place)[numbers(nodes)] |= _HELD

    def ahead(self, count: int) -> list[int]:
        """The oldest nodes of the list that promises least."""
        return self._chains.coldest_few(self._order[self._first], count) if self.coldest() else []

    def coldest(self) -> int:
        """The oldest node of the list that promises least; 0 without one."""
        after, order = self._chains.after, self._order
        for at in range(self._first, len(order)):
            node = after[order[at]]
            if node != order[at]:
                self._first = at
                return node
        return 0

    def order(self) -> Iterator[int]:
        """Nodes, the least promising first."""
        for which in self._order:
            yield from self._chains.walk(which)

    def is_held(self, node: int) -> bool:
        """Whether `node` is in, and held."""
        return self._place[node] >= _HELD

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._place) and self._place[node] != _OUT

    def __len__(self) -> int:
        return self._count

    def check_integrity(self) -> None:
        """Raise `CacheError` where lists, marks, ages, counts and departures disagree."""
        ordered: set[int] = set()
        for which in self._order:
            self._chains.check_integrity(which)
            for node in self._chains.walk(which):
                age = age_of(self._now - self._used[node])
                if _KIND[self._place[node]] != which // AGES or age < which % AGES:
                    raise CacheError(f"node {node}, used {self._place[node]}, of age {age}, is in list {which}")
                ordered.add(node)
        marked = {node for node, use in enumerate(self._place) if _OUT < use < _HELD}
        held = sum(use >= _HELD for use in self._place)
        if ordered != marked or len(marked) + held != self._count:
            raise CacheError(
                f"lists have {len(ordered)} nodes, {len(marked)} and {held} held are marked of {self._count}"
            )
        if any(self._chains.after[which] != which for which in self._order[: self._first]):
            raise CacheError("a list that is passed over has a node")
        self._departed.check_integrity()

    def _fit(self) -> None:
        self._step, self._ticks = max(_SHORTEST_STEP, self.slots // _STEPS), 0
        self._departed = Departed(_REMEMBERED * self.slots)

    def _insert_one(self, node: int, use: int) -> None:
        if left := self._departed.take(self.names[node]):
            self._came_back(*left)
            use = _MORE[left[1]]
        kind = _KIND[use]
        self._promises.became.append(kind)
        self._place[node], self._used[node] = use, self._now
        self._chains.warm(kind * AGES, node)
        self._look_at(kind * AGES)

    def _insert_all(self, nodes: Sequence[int], first: int) -> None:
        at = numbers(nodes)
        uses = bytearray((_ONCE,)) * len(nodes)
        uses[0] = first
        for i, when, used in self._departed.take_all(self.names[at].tolist()):
            self._came_back(when, used)
            uses[i] = _MORE[used]
        self._note(at, uses)
        kinds = uses.translate(_KINDS)
        self._promises.became += kinds
        for kind in set(kinds):
            self._chains.warm_all(kind * AGES, at[np.frombuffer(kinds, np.uint8) == kind])
            self._look_at(kind * AGES)

    def _touch_few(self, nodes: Sequence[int]) -> None:
        """Neighbours that were used alike move as one."""
        place, used, after, now, promises = self._place, self._used, self._chains.after, self._now, self._promises
        at, count = 0, len(nodes)
        while at < count:
            begin, first = at, nodes[at]
            last, was, when = first, place[first], used[first]
            more = _MORES[was]
            place[first], used[first] = more, now
            at += 1
            while was < _HELD and at < count and after[last] == (node := nodes[at]):
                if place[node] != was or used[node] != when:
                    break
                place[node], used[node] = more, now
                last = node
                at += 1
            kind = _KIND[more]
            promises.came_back += _BYTES[_KINDS[was] * AGES + age_of(now - when)] * (at - begin)
            promises.became += _BYTES[kind] * (at - begin)
            self._put(first, last, kind * AGES, held=was >= _HELD)

    def _touch_all(self, nodes: Sequence[int]) -> None:
        at = numbers(nodes)
        was = marks(self._place)[at].tobytes()
        ages = ages_of(self._now - column(self._used)[at])
        before, kinds = (np.frombuffer(was.translate(each), np.uint8) for each in (_KINDS, _MORES_KINDS))
        self._promises.came_back += (before * np.uint8(AGES) + ages).tobytes()
        self._promises.became += kinds.tobytes()
        self._move(nodes, at, kinds, np.frombuffer(was, np.uint8) >= _HELD)
        self._note(at, was.translate(_MORES))

    def _release_all(self, at: _Nodes) -> None:
        place = marks(self._place)
        held = at[place[at] >= _HELD]
        uses = place[held] - np.uint8(_HELD)
        place[held] = uses
        kinds = np.frombuffer(uses.tobytes().translate(_KINDS), np.uint8)
        lists = kinds * np.uint8(AGES) + ages_of(self._now - column(self._used)[held])
        for which in set(lists.tobytes()):
            self._chains.chill_all(which, held[lists == which])
            self._look_at(which)

    def _came_back(self, when: int, use: int) -> None:
        """What was used like this, the last time at step `when`, is used again."""
        self._promises.came_back.append(_KIND[use] * AGES + age_of(self._now - when))

    def _note(self, at: _Nodes, uses: bytes | bytearray) -> None:
        """Nodes `at` are used now, and have been used like this."""
        marks(self._place)[at], column(self._used)[at] = np.frombuffer(uses, np.uint8), self._now

    def _move(self, nodes: Sequence[int], at: _Nodes, kinds: _Bytes, held: _Bools) -> None:
        """Put `nodes` into the lists of what was used now, those that are neighbours already as one."""
        behind = column(self._chains.after)[at[:-1]]
        apart = (behind != at[1:]) | (kinds[:-1] != kinds[1:]) | held[:-1] | held[1:]
        lasts = [*np.flatnonzero(apart).tolist(), len(nodes) - 1]
        first = 0
        for last in lasts:
            which = int(kinds[first]) * AGES
            self._put(nodes[first], nodes[last], which, held=bool(held[first]))
            first = last + 1

    def _put(self, first: int, last: int, which: int, *, held: bool) -> None:
        """Put `first` to `last`, which follow one another, or one that is held, at the hot end of list `which`."""
        if held:
            self._chains.warm(which, first)
        else:
            self._chains.move(first, last, which)
        self._look_at(which)

    def _look_at(self, which: int) -> None:
        """List `which` is empty no more."""
        self._first = min(self._first, self._rank[which])

    def _steps(self, nodes: Sequence[int]) -> Iterator[Sequence[int]]:
        """`nodes`, which are used, in parts, so that no step of the clock falls into one; the clock goes on."""
        start = 0
        while start < len(nodes):
            some = nodes[start : start + self._step - self._ticks]
            yield some
            start += len(some)
            self._ticks += len(some)
            if self._ticks == self._step:
                self._ticks = 0
                self._turn()

    def _turn(self) -> None:
        """A step of the clock."""
        self._now += 1
        self._promises.learn()
        if self._now % _FADE == 0:
            self._promises.fade()
        self._pass_on()
        self._rank_lists()

    def _rank_lists(self) -> None:
        """Order the lists by what has been learned."""
        self._order = self._promises.order()
        self._rank: list[int] = np.argsort(self._order).tolist()
        self._first = 0

    def _pass_on(self) -> None:
        """Lists hand on what has become too old for them, from the oldest list on, so that nothing moves twice."""
        filled = np.flatnonzero(column(self._chains.after)[: KINDS * AGES] != np.arange(KINDS * AGES))
        for which in filled[::-1].tolist():
            if which % AGES < AGES - 1:
                self._pass_on_from(which, which % AGES)

    def _pass_on_from(self, which: int, age: int) -> None:
        after, before, used = self._chains.after, self._chains.before, self._used
        first, last = after[which], before[which]
        latest = self._now - (1 << age)  # used then, a node has just become too old
        if used[last] > latest:
            last, node = which, first
            while used[node] <= latest:
                last, node = node, after[node]
        if last != which:
            self._chains.move(first, last, which + 1)
