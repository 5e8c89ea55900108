"""Evicts what promises the fewest hits for its slot, by how often and how long ago it was used.

    kind, age     once, 8-15 │ once, 4-7 │ ends a prompt, 0 │ twice, 8-15 │ ...     least promising first
                  f ─► e ─► d  c ─► b      h                  g                     lists, the oldest first
                  ▲
                  goes next

Time is counted in uses; a step of the clock is an eighth as many as there are slots. Each kind has one list for each
span of steps (`spans`), so that growing older moves whole lists, and never looks at what is in them. At each step
`promise` says anew which order of the lists is the best, from what came back until now. So the policy finds out by
itself how long a pause to wait for, and which chunks are worth it, and there is nothing to set. Why this way:
`docs/eviction.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.chains import LISTS, Chains
from longshore.cache.columns import Column, column, grown, marks, numbers, zeros
from longshore.cache.eviction.base import FEW, EvictionPolicy, Names, check_in, check_new, unknown
from longshore.cache.eviction.departed import Departed
from longshore.cache.eviction.promise import AGES, KINDS, Promises, age_of, ages_of
from longshore.cache.eviction.spans import SPANS, joins, oldest_first, span_of
from longshore.cache.eviction.uses import HELD, KIND_OF, KINDS_AGAIN, KINDS_OF, LEAF, ONCE, OUT, USED_AGAIN, USES_AGAIN
from longshore.errors import CacheError

_STEPS, _SHORTEST_STEP = 8, 64
"""A step of the clock is slots / `_STEPS` uses long, and not shorter than the other."""

_REMEMBERED = 6
"""Departures to remember, for each slot."""

_FADE = 512
"""Steps after which counts are halved."""

_SHORT = 256
"""A path of fewer nodes is sooner walked along than used by whole arrays."""

_FIRSTS = range(0, KINDS * SPANS, SPANS)
"""The list of each kind for span 0."""

_LISTS = np.add.outer(np.arange(SPANS), _FIRSTS)
"""All lists, by span and kind."""

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
        self._used: Column = zeros(LISTS)
        self._count = 0
        self._now = 0
        """Steps of the clock until now."""
        self._first = 0
        """All lists before this one in the order are empty."""
        self._named: list[tuple[int, int]] = []
        """What `ahead` has named last: lists, and how many of all come from them and from those before."""
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
        self._place.extend(bytes(max(0, nodes - len(self._place))))
        self._used = grown(self._used, nodes)

    def insert(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """`nodes` became resident: used as often as is remembered, and once more."""
        check_new(self._place, nodes)
        use = LEAF if leaf else ONCE
        for some in self._steps(nodes):
            if len(some) < FEW:
                for node in some:
                    self._insert_one(node, use)
                    use = ONCE
            else:
                self._insert_all(some, use)
                use = ONCE
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
        if use == OUT:
            raise unknown(node)
        if use < HELD:
            self._chains.drop(node)
            self._place[node] = use | HELD

    def hold_all(self, nodes: Sequence[int]) -> None:
        """`nodes` cannot go at present."""
        at = numbers(nodes)
        check_in(self._place, at)
        place = marks(self._place)
        self._chains.drop_all(at[place[at] < HELD])
        place[at] |= HELD

    def release(self, nodes: Sequence[int]) -> None:
        """Those of `nodes` that are held may go again, each as the first of its list."""
        if len(nodes) >= FEW:
            self._release_all(numbers(nodes))
            return
        check_in(self._place, nodes)
        for node in nodes:
            if self._place[node] >= HELD:
                self._place[node] -= HELD
                which = self._list_of(self._place[node], self._used[node])
                self._chains.chill(which, node)
                self._look_at(which)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """`node` left; how it was used is remembered if it was evicted."""
        use = self._place[node]
        if use == OUT:
            raise unknown(node)
        if use < HELD:
            self._chains.drop(node)
        if evicted is not None:
            self._departed.add(evicted, self._used[node], use & ~HELD)
        self._place[node] = OUT
        self._count -= 1

    def remove_all(self, nodes: Sequence[int]) -> None:
        """`nodes` left."""
        at = numbers(nodes)
        check_in(self._place, at)
        place = marks(self._place)
        self._chains.drop_all(at[place[at] < HELD])
        place[at] = OUT
        self._count -= len(at)

    def leave(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """These, the first of all and held ones among them, left; how they were used is remembered."""
        at, place = numbers(nodes), marks(self._place)
        uses = place[at]
        held = uses >= HELD
        self._take_out(at[~held].tolist() if np.count_nonzero(held) else nodes)
        uses &= HELD - 1
        if len(nodes) < FEW:
            for key, node, use in zip(keys, nodes, uses.tolist(), strict=True):
                self._departed.add(key, self._used[node], use)
        else:
            self._departed.add_all(keys, column(self._used)[at], uses)
        place[at] = OUT
        self._count -= len(nodes)

    def keep(self, nodes: Sequence[int]) -> None:
        """These, the first of all, cannot go at present."""
        self._take_out(nodes)
        marks(self._place)[numbers(nodes)] |= HELD

    def ahead(self, count: int) -> list[int]:
        """The oldest nodes of the list that promises least, and of those that come next."""
        found, after, order = list[int](), self._chains.after, self._order
        self._named.clear()
        if self.coldest():
            for at in range(self._first, len(order)):
                which = order[at]
                if after[which] != which:
                    found += self._chains.coldest_few(which, count - len(found))
                    self._named.append((which, len(found)))
                    if len(found) == count:
                        break
        return found

    def following(self, node: int, held: Sequence[int]) -> int:
        """How many of `held` lead whose lists come no later in the order than that of `node`."""
        place, used, rank = self._place, self._used, self._rank
        last = rank[self._list_of(place[node], used[node])]
        was: tuple[int, int] | None = None
        for count, each in enumerate(held):
            how = place[each] & ~HELD, used[each]
            if how != was and rank[self._list_of(*how)] > last:
                return count
            was = how
        return len(held)

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
        return self._place[node] >= HELD

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._place) and self._place[node] != OUT

    def resident(self, nodes: int) -> npt.NDArray[np.bool_]:
        """For each node below `nodes` whether it is in, held or not."""
        there: npt.NDArray[np.bool_] = marks(self._place)[:nodes] != OUT
        return there

    def __len__(self) -> int:
        return self._count

    def check_integrity(self) -> None:
        """Raise `CacheError` where lists, marks, steps, counts and departures disagree."""
        ordered: set[int] = set()
        for which in self._order:
            self._chains.check_integrity(which)
            for node in self._chains.walk(which):
                use, when = self._place[node], self._used[node]
                if which != self._list_of(use, when):
                    raise CacheError(f"node {node}, used {use}, at step {when} of {self._now}, is in list {which}")
                ordered.add(node)
        marked = {node for node, use in enumerate(self._place) if OUT < use < HELD}
        held = sum(use >= HELD for use in self._place)
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
            use = USED_AGAIN[left[1]]
        kind = KIND_OF[use]
        self._promises.became.append(kind)
        self._place[node], self._used[node] = use, self._now
        self._chains.warm(kind * SPANS + self._fresh, node)
        self._look_at(kind * SPANS + self._fresh)

    def _insert_all(self, nodes: Sequence[int], first: int) -> None:
        at = numbers(nodes)
        uses = bytearray((ONCE,)) * len(nodes)
        uses[0] = first
        for i, when, used in self._departed.take_all(self.names[at].tolist()):
            self._came_back(when, used)
            uses[i] = USED_AGAIN[used]
        self._note(at, uses)
        kinds = uses.translate(KINDS_OF)
        self._promises.became += kinds
        for kind in set(kinds):
            self._chains.warm_all(kind * SPANS + self._fresh, at[np.frombuffer(kinds, np.uint8) == kind])
            self._look_at(kind * SPANS + self._fresh)

    def _touch_few(self, nodes: Sequence[int]) -> None:
        """Neighbours that were used alike move as one."""
        place, used, after, now, promises = self._place, self._used, self._chains.after, self._now, self._promises
        at, count = 0, len(nodes)
        while at < count:
            begin, first = at, nodes[at]
            last, was, when = first, place[first], used[first]
            more = USES_AGAIN[was]
            place[first], used[first] = more, now
            at += 1
            while was < HELD and at < count and after[last] == (node := nodes[at]):
                if place[node] != was or used[node] != when:
                    break
                place[node], used[node] = more, now
                last = node
                at += 1
            kind = KIND_OF[more]
            promises.came_back += _BYTES[KINDS_OF[was] * AGES + age_of(now - when)] * (at - begin)
            promises.became += _BYTES[kind] * (at - begin)
            self._put(first, last, kind * SPANS + self._fresh, held=was >= HELD)

    def _touch_all(self, nodes: Sequence[int]) -> None:
        at = numbers(nodes)
        was = marks(self._place)[at].tobytes()
        ages = ages_of(self._now - column(self._used)[at])
        before, kinds = (np.frombuffer(was.translate(each), np.uint8) for each in (KINDS_OF, KINDS_AGAIN))
        self._promises.came_back += (before * np.uint8(AGES) + ages).tobytes()
        self._promises.became += kinds.tobytes()
        self._move(nodes, at, kinds, np.frombuffer(was, np.uint8) >= HELD)
        self._note(at, was.translate(USES_AGAIN))

    def _release_all(self, at: _Nodes) -> None:
        check_in(self._place, at)
        place = marks(self._place)
        held = at[place[at] >= HELD]
        if not len(held):
            return
        uses = place[held] - np.uint8(HELD)
        place[held] = uses
        kinds = np.frombuffer(uses.tobytes().translate(KINDS_OF), np.uint8)
        lists = kinds * np.uint8(SPANS) + self._spans_of(column(self._used)[held])
        for which in set(lists.tobytes()):
            self._chains.chill_all(which, held[lists == which])
            self._look_at(which)

    def _spans_of(self, steps: npt.NDArray[np.int32]) -> _Bytes:
        """The span that each of `steps` lies in, which mostly are all the same."""
        first = int(steps[0])
        if (steps == first).all():
            return np.full(len(steps), span_of(first, self._now), np.uint8)
        several: list[int] = steps.tolist()
        spans = {step: span_of(step, self._now) for step in set(several)}
        return np.frombuffer(bytes(map(spans.__getitem__, several)), np.uint8)

    def _came_back(self, when: int, use: int) -> None:
        """What was used like this, the last time at step `when`, is used again."""
        self._promises.came_back.append(KIND_OF[use] * AGES + age_of(self._now - when))

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
            which = int(kinds[first]) * SPANS + self._fresh
            self._put(nodes[first], nodes[last], which, held=bool(held[first]))
            first = last + 1

    def _put(self, first: int, last: int, which: int, *, held: bool) -> None:
        """Put `first` to `last`, which follow one another, or one that is held, at the hot end of list `which`."""
        if held:
            self._chains.warm(which, first)
        else:
            self._chains.move(first, last, which)
        self._look_at(which)

    def _take_out(self, nodes: Sequence[int]) -> None:
        """Take the first nodes out of their lists, as `ahead` has named them."""
        begin = 0
        for which, end in self._named:
            if begin < len(nodes):
                self._chains.drop_coldest(which, nodes[min(end, len(nodes)) - 1])
            begin = end

    def _list_of(self, use: int, when: int) -> int:
        """The list for what was used like this, the last time at step `when`."""
        return KIND_OF[use] * SPANS + span_of(when, self._now)

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
        spans, latest = oldest_first(self._now)
        order = self._promises.order([age_of(self._now - step) for step in latest])
        ordered = _LISTS[spans].ravel()[order]
        self._order: list[int] = ordered.tolist()
        self._rank: list[int] = np.argsort(ordered).tolist()
        self._fresh, self._first = span_of(self._now, self._now), 0

    def _pass_on(self) -> None:
        """Lists whose span becomes a part of another are joined to that one's."""
        after, before = self._chains.after, self._chains.before
        for span, into in joins(self._now):
            for kind in _FIRSTS:
                if after[kind + span] != kind + span:
                    self._chains.move(after[kind + span], before[kind + span], kind + into)
