"""Evicts the chunk with the lowest expected hit rate, by number, regularity and age of its uses (Gittins index).

    kind, age     once, 8-11 │ once, 4-5 │ ends a prompt, 0 │ twice, 8-11 │ ...     lowest rate first
                  f ─► e ─► d  c ─► b      h                  g                     lists, oldest first
                  ▲
                  next victim

Time is counted in requests: each has a number (`begin`), and a use is as old as its request. Each kind has one list
for each span of requests (`Spans`), so that ageing moves whole lists. From time to time, between requests,
`hit_rates` orders the lists by the hit rates measured so far. There are no parameters. Reasons: `docs/eviction.md`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import (
    FEW,
    I32,
    LISTS,
    Column,
    LinkedLists,
    as_i32,
    as_list,
    check_in,
    check_new,
    grown,
    has_duplicates,
    i32_view,
    not_in_policy,
    sparse,
    u32_view,
    unique,
)
from longshore.cache.eviction_policies.base import EvictionPolicy, NodeKeys
from longshore.cache.eviction_policies.ghosts import GhostList, Keys
from longshore.cache.eviction_policies.hit_rates import (
    AGAIN,
    AGE_OF,
    AGES_OF,
    BECAME,
    FORGOTTEN,
    GAP,
    GAP_OF,
    HELD,
    HINT,
    HOW,
    KIND_OF,
    KINDS,
    KINDS_OF,
    LEAF,
    OLDEST,
    ONCE,
    OUT,
    REQUEST,
    RETURNED,
    STATE,
    USES,
    HitRates,
    Spans,
    sooner,
)
from longshore.errors import CacheError

_SPAN, _LEARNED, _LEAST = 32, 16, 64
"""A span ends after slots / `_SPAN` uses, and uses are learned from after slots / `_LEARNED`, not after fewer than
`_LEAST`."""

_MOST = 16_384
"""With so many numbers noted, or slots / `_LEARNED`, it is learned from them at the next span."""

_GHOSTS = 4
"""Evicted chunks to remember, for each slot."""

_FADE = 64
"""Counts lose half of their weight in so many uses for each slot, little by little."""

_EMPTY = np.arange(LISTS, dtype=np.int32)
"""What follows each list that is empty: itself."""

_States = npt.NDArray[np.uint32]


class Gittins(EvictionPolicy):
    """Evicts from the list with the lowest expected hit rate. O(1) for each node, amortised; 16 bytes per node.

    About four evicted chunks for each slot are in a ghost list, at 8 bytes each.
    """

    rejects = True

    def __init__(self, slots: int, keys: NodeKeys) -> None:
        super().__init__(slots, keys)
        self._hit_rates, self._spans, self._linked = HitRates(), Spans(), LinkedLists()
        self._state: Column = sparse(LISTS, np.uint32).data
        self._used: Column = sparse(LISTS, np.int32).data
        self._count = 0
        self._now = self._request = 0
        """The number of the last request, and of the one that is served."""
        self._fresh = 0
        """The first list of what the current request uses."""
        self._length = self._hint = self._pause = self._last = 0
        """Bits of a state: the length of the last request, the hint of the one that is served, the gap since the path
        of the last one was used, and what was named last."""
        self._since = self._new = 0
        """Uses since a span began, and until then since the last that was learned from."""
        self._due = False
        """Whether another span begins with the next use, or before the next eviction."""
        self._stale = True
        """Whether the lists must be ordered again before the next eviction."""
        self._filled = 0
        """A bit for each place in the order; lists at all others are empty."""
        self._limit = LISTS
        """The last place in the order whose nodes may be evicted now."""
        self._named: list[tuple[int, int]] = []
        """Lists of what `next_victims` has named last, and how many of each; what was taken out is removed."""
        self._ghosts = GhostList(_GHOSTS * slots)
        self._order, self._rank = array("H"), array("H")

    def resize(self, slots: int, keys: NodeKeys) -> None:
        """Resize to `slots` slots; another number clears the ghost list."""
        same = slots == self.slots
        super().resize(slots, keys)
        if not same:
            self._forget(*self._ghosts.everything())
            self._ghosts = GhostList(_GHOSTS * slots)

    def grow(self, nodes: int) -> None:
        """Make room for node numbers below `nodes`."""
        self._linked.grow(nodes)
        self._state = grown(self._state, nodes, np.uint32)
        self._used = grown(self._used, nodes)

    def begin(self, request: int, length: int = 0, last: int = 0, keys: Sequence[Key] = (), hint: int = 0) -> None:
        """The request of this number begins or continues."""
        self._hint = hint << HINT
        if hint and self._hit_rates.add_hints():
            self._stale = True
        if request > self._now:
            self._now = request
            self._due = self._since >= max(_LEAST, self.slots // _SPAN)
            when = self._ghosts.latest(keys) if keys else None
            if when is None and self._state[last]:
                when = self._used[last]
            self._length = min(length.bit_length(), 31) << REQUEST
            self._pause = 0 if when is None else GAP_OF[AGE_OF[min(request - when, OLDEST)]]
        self._request, self._last = request, self._pause
        self._fresh = self._spans.row(request) * KINDS

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int], *, least: int = 1) -> int:
        """Leading `keys` with at least the expected hit rate of their victims; room is made by runs of one rate."""
        self._rank_lists()
        self._last, tail, count = self._pause, list(keys[::-1]), 0
        end, limit, rooms = 0, LISTS, dict[int, int]()
        for some, state, used in reversed(self._use_new(tail, leaf=True, noted=False)):
            end, limit = end + some, min(limit, self._rank[self._list_of(state, used)])
            rooms[limit] = end
        try:
            for self._limit, end in rooms.items():
                count = make_room(end)
                if count < end:
                    break
        finally:
            self._limit = LISTS
        count = count or (make_room(least) if least else 0)
        if gone := tail[: len(tail) - count]:
            self._remember(gone, leaf=True)
            self._since += len(gone)
        return count

    def outrank(self, nodes: Sequence[int], age: int) -> npt.NDArray[np.bool_]:
        """Which of `nodes` have at least the mean expected hit rate of all chunks of this age."""
        at = as_i32(nodes)
        ages = AGES_OF[np.minimum(self._now - i32_view(self._used)[at], OLDEST)].astype(np.intp)
        kinds = KINDS_OF[u32_view(self._state)[at] & np.uint32(HOW)].astype(np.intp)
        return self._hit_rates.promise_no_less(kinds, ages, AGE_OF[min(age, OLDEST)])

    def record_uses(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """Record uses of `nodes`, which are not in the policy, in the ghost list."""
        self._last = self._pause
        self._remember(self.keys[as_i32(nodes)], leaf=leaf)

    def _remember(self, keys: Keys, *, leaf: bool) -> None:
        """Record uses of `keys`, tail first, which are not in the policy, by the current request."""
        if self._due:
            self._begin_span()
        counts, states, when = np.array(self._use_new(keys, leaf=leaf)).T
        when, states = when.repeat(counts).astype(np.int32), states.repeat(counts).astype(np.uint32)
        self._forget(*self._ghosts.insert_all(keys, when, states))

    def insert(self, nodes: Sequence[int], *, leaf: bool = False, continues: bool = False) -> None:
        """Insert `nodes`: with the uses that the ghost list has of them, and one more.

        A node that is not in the ghost list gets the uses of the node that follows it, whose requests use it, too.
        """
        self._insert(nodes, leaf=leaf, continues=continues)

    def insert_copies(self, nodes: Sequence[int], *, leaf: bool = False) -> None:
        """Insert `nodes` with the uses that the ghost list has of them."""
        self._insert(nodes, leaf=leaf, copies=True)

    def _insert(self, nodes: Sequence[int], *, leaf: bool, continues: bool = False, copies: bool = False) -> None:
        check_new(self._state, nodes)
        if self._due:
            self._begin_span()
        if not continues:
            self._last = self._pause
        at, first = as_i32(nodes), 0
        for count, state, when in self._use_new(self.keys[at], leaf=leaf, copies=copies):
            which = self._list_of(state, when)
            if count < FEW:
                some = nodes[first : first + count]
                self._mark(some, state, when)
                for node in some:
                    self._linked.append(which, node)
            else:
                self._mark(at[first : first + count], state, when)
                self._linked.extend(which, at[first : first + count])
            self._look_at(which)
            self._last = state
            first += count
        self._count += len(nodes)
        self._since += len(nodes)
        if len(self._hit_rates.events) >= max(_MOST, self.slots // _LEARNED):  # of a caller that reports no requests
            self._learn()

    def touch(self, nodes: Sequence[int] | I32) -> None:
        """Record uses of `nodes`, at most one for each request. Adjacent nodes that go to one list move together."""
        if len(nodes) < FEW:
            nodes = as_list(nodes)
            check_in(self._state, nodes)
            if len(set(nodes)) < len(nodes):
                nodes = list(dict.fromkeys(reversed(nodes)))[::-1]
        else:
            nodes = as_i32(nodes)
            check_in(self._state, nodes)
            if has_duplicates(nodes):
                nodes = unique(nodes[::-1])[::-1]
        if self._due:
            self._begin_span()
        ends = self._alike(nodes)
        if len(ends) * FEW > len(nodes):  # most runs are short
            nodes = as_list(nodes)
        first = 0
        for end in ends:
            head = int(nodes[first])
            state, when = self._state[head], self._used[head]
            new, now = self._use(state, when, end - first), max(when, self._request)
            self._mark(nodes[first:end], new, now)
            which = self._list_of(new, now)
            if state >= HELD:
                self._linked.append(which, head)
            else:
                self._linked.move_to_end(head, int(nodes[end - 1]), which)
            self._look_at(which)
            first = end
        if first:
            self._last = self._state[nodes[-1]]
        self._since += len(nodes)

    def hold(self, node: int) -> None:
        """Hold `node`: it cannot be evicted until it is released."""
        state = self._state[node]
        if state == OUT:
            raise not_in_policy(node)
        if state < HELD:
            self._linked.remove(node)
            self._state[node] = state | HELD

    def hold_all(self, nodes: Sequence[int]) -> None:
        """Hold `nodes`."""
        at, state = unique(as_i32(nodes)), u32_view(self._state)
        check_in(self._state, at)
        self._linked.remove_all(at[state[at] < HELD])
        state[at] |= HELD

    def release(self, nodes: Sequence[int]) -> None:
        """Release those of `nodes` that are held, each to the cold end of its list."""
        if len(nodes) < FEW:
            check_in(self._state, nodes)
        else:
            at, state = as_i32(nodes), u32_view(self._state)
            check_in(self._state, at)
            held = unique(at[state[at] >= HELD])
            state[held] &= STATE
            lists = self._lists(state[held], i32_view(self._used)[held])
            for which in np.unique(lists).tolist():
                self._linked.prepend_all(which, held[lists == which])
                self._look_at(which)
            return
        for node in nodes:
            if self._state[node] >= HELD:
                self._state[node] -= HELD
                which = self._list_of(self._state[node], self._used[node])
                self._linked.prepend(which, node)
                self._look_at(which)

    def remove(self, node: int, *, evicted: Key | None = None) -> None:
        """Remove `node`; its uses enter the ghost list if it was evicted."""
        state, when = self._state[node], self._used[node]
        if state == OUT:
            raise not_in_policy(node)
        if state < HELD:
            self._linked.remove(node)
        left = (when, state) if evicted is None else self._ghosts.insert(evicted, when, state & STATE)
        if left:
            self._hit_rates.record(FORGOTTEN, left[1], left[0], AGE_OF[min(self._now - left[0], OLDEST)])
        self._state[node] = OUT
        self._count -= 1

    def remove_all(self, nodes: Sequence[int]) -> None:
        """Remove `nodes`."""
        at, state = unique(as_i32(nodes)), u32_view(self._state)
        check_in(self._state, at)
        self._linked.remove_all(at[state[at] < HELD])
        self._forget(i32_view(self._used)[at], state[at])
        state[at] = OUT
        self._count -= len(at)

    def remove_victims(self, nodes: Sequence[int], keys: Sequence[Key]) -> None:
        """Remove the first nodes of the order, and held ones among them; their uses enter the ghost list."""
        at, state = unique(as_i32(nodes)), u32_view(self._state)
        if len(at) < len(nodes):
            nodes, keys = at.tolist(), list(dict.fromkeys(keys))
        states = state[at]
        held = states >= HELD
        self._take_out(at[~held].tolist() if np.count_nonzero(held) else nodes)
        self._forget(*self._ghosts.insert_all(keys, i32_view(self._used)[at], states & np.uint32(STATE)))
        state[at] = OUT
        self._count -= len(nodes)

    def hold_victims(self, nodes: Sequence[int]) -> None:
        """Hold the first nodes of the order."""
        at = unique(as_i32(nodes))
        self._take_out(at.tolist())
        u32_view(self._state)[at] |= HELD

    def next_victims(self, count: int) -> list[int]:
        """The oldest nodes of the list with the lowest hit rate, and of the next ones."""
        found, after = list[int](), self._linked.after
        self._named.clear()
        if count and self.victim():
            order, filled = self._order, self._filled
            while filled and len(found) < count:
                first = filled & -filled
                if first.bit_length() > self._limit + 1:
                    break
                which = order[first.bit_length() - 1]
                if after[which] != which:
                    some = self._linked.first_few(which, count - len(found))
                    found += some
                    self._named.append((which, len(some)))
                filled ^= first
        self._named.reverse()
        return found

    def victims_after(self, node: int, held: Sequence[int]) -> int:
        """How many of `held` lead whose lists come no later in the order than that of `node`."""
        self._rank_lists()
        last = self._rank[self._list_of(self._state[node], self._used[node])]
        was: tuple[int, int] | None = None
        for count, each in enumerate(held):
            how = self._state[each] & HOW, self._used[each]
            if how != was and self._rank[self._list_of(*how)] > last:
                return count
            was = how
        return len(held)

    def victim(self) -> int:
        """The oldest node of the list with the lowest hit rate; 0 if there is none."""
        self._rank_lists()
        after, order = self._linked.after, self._order
        while self._filled:
            first = self._filled & -self._filled
            if first.bit_length() > self._limit + 1:
                break
            which = order[first.bit_length() - 1]
            if (node := after[which]) != which:
                return node
            self._filled ^= first
        return 0

    def order(self) -> Iterator[int]:
        """Nodes, lowest expected hit rate first."""
        self._rank_lists()
        for which in self._order:
            yield from self._linked.walk(which)

    def is_held(self, node: int) -> bool:
        """Whether `node` is in the policy, and held."""
        return self._state[node] >= HELD

    def are_held(self, at: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which of the nodes `at` are in the policy, and held."""
        held: npt.NDArray[np.bool_] = u32_view(self._state).take(at) >= HELD
        return held

    def __contains__(self, node: object) -> bool:
        return isinstance(node, int) and node < len(self._state) and self._state[node] != OUT

    def resident(self, nodes: int) -> npt.NDArray[np.bool_]:
        """For each node below `nodes`, whether it is in the policy, held or not."""
        there: npt.NDArray[np.bool_] = u32_view(self._state)[:nodes] != OUT
        return there

    def __len__(self) -> int:
        return self._count

    def check_integrity(self) -> None:
        """Raise `CacheError` unless lists, marks, requests and counts agree."""
        ordered: set[int] = set()
        heads = i32_view(self._linked.after)[:LISTS]
        for which in np.flatnonzero(heads != np.arange(LISTS)).tolist():
            self._linked.check_integrity(which)
            for node in self._linked.walk(which):
                state, when = self._state[node], self._used[node]
                if which != self._list_of(state, when):
                    raise CacheError(f"node {node}, of state {state} at {when}, is in list {which}")
                ordered.add(node)
            if not self._stale and not self._filled >> self._rank[which] & 1:
                raise CacheError(f"internal error: Gittins: list {which} is marked as empty, but has a node")
        states = u32_view(self._state)
        marked = set(np.flatnonzero((states > OUT) & (states < HELD)).tolist())
        held = int(np.count_nonzero(states >= HELD))
        if ordered != marked or len(marked) + held != self._count:
            found = f"{len(ordered)} in lists, {len(marked)} marked and {held} held"
            raise CacheError(f"internal error: Gittins: counted {self._count} nodes, found {found}")

    def _use_new(
        self, keys: Keys, *, leaf: bool, noted: bool = True, copies: bool = False
    ) -> list[tuple[int, int, int]]:
        """What new chunks, tail first, become by a use now, in runs: how many, their state, their last use.

        Unless it is `noted`, nobody has used them yet, and they stay in the ghost list. `copies` stay as they are.
        """
        runs, last = list[tuple[int, int, int]](), self._last
        for count, when, left in self._ghosts.take_all(keys, forget=noted):
            if left and copies:
                last = left
                runs.append((count, left, when))
                continue
            if left:
                last = self._use(left, when, count, noted=noted)
                runs.append((count, last, max(when, self._request)))
                continue
            ends = leaf and not runs
            for some, uses in ((ends, LEAF), (count - ends, max(ONCE, 0 if ends else last & USES))):
                if some:
                    last = uses | last & GAP | self._hint | self._length
                    runs.append((some, last, self._request))
                    if noted:
                        self._hit_rates.record(BECAME, last, self._request, count=some)
        return runs

    def _use(self, state: int, when: int, count: int = 1, *, noted: bool = True) -> int:
        """What `count` chunks of `state`, last used at `when`, become by a use of the current request; not held."""
        if when >= self._request:
            return state & STATE
        age = AGE_OF[min(self._request - when, OLDEST)]
        hint = self._hint
        if hint and (old := (state & HOW) >> HINT):
            hint = sooner(old, self._request - when, hint >> HINT) << HINT
        new = AGAIN[state & (USES | GAP)] | GAP_OF[age] | hint | self._length
        if noted:
            self._hit_rates.record(RETURNED, state, when, age, count)
            self._hit_rates.record(BECAME, new, self._request, count=count)
        return new

    def _alike(self, nodes: Sequence[int] | I32) -> list[int]:
        """Where runs of nodes end that follow one another in a list and were used alike; what is held is alone."""
        if len(nodes) >= FEW:
            at = as_i32(nodes)
            after, state, used = i32_view(self._linked.after)[at], u32_view(self._state)[at], i32_view(self._used)[at]
            apart = (after[:-1] != at[1:]) | (state[:-1] != state[1:]) | (used[:-1] != used[1:]) | (state[:-1] >= HELD)
            return [*(np.flatnonzero(apart) + 1).tolist(), len(nodes)]
        next_, how, when = self._linked.after, self._state, self._used
        return [
            end
            for end, (one, two) in enumerate(zip_longest(nodes, nodes[1:], fillvalue=0), 1)
            if next_[one] != two or how[one] != how[two] or when[one] != when[two] or how[one] >= HELD
        ]

    def _mark(self, nodes: Sequence[int] | I32, state: int, when: int) -> None:
        """Set state and last use of `nodes`."""
        if len(nodes) >= FEW:
            at = as_i32(nodes)
            u32_view(self._state)[at], i32_view(self._used)[at] = state, when
            return
        states, used = self._state, self._used
        for node in nodes:
            states[node], used[node] = state, when

    def _forget(self, when: I32, states: _States) -> None:
        """Discard the state of these nodes."""
        self._hit_rates.forget(states, when, AGES_OF[np.minimum(self._now - when, OLDEST)])

    def _take_out(self, nodes: Sequence[int]) -> None:
        """Take the first nodes out of their lists, as `next_victims` has named them."""
        if (named := sum(count for _, count in self._named)) < len(nodes):
            raise CacheError(f"internal error: Gittins: {len(nodes)} victims, but next_victims named {named}")
        out = 0
        while out < len(nodes):
            which, count = self._named.pop()
            if (left := out + count - len(nodes)) > 0:
                self._named.append((which, left))
            out = min(out + count, len(nodes))
            self._linked.drop_first(which, nodes[out - 1])

    def _list_of(self, state: int, when: int) -> int:
        """The list of what is of this state, and was last used then."""
        first = self._fresh if when == self._request else self._spans.row(when) * KINDS
        return first + KIND_OF[state & HOW]

    def _lists(self, states: _States, when: I32) -> npt.NDArray[np.intp]:
        """`_list_of` many."""
        lists: npt.NDArray[np.intp] = self._spans.rows_of(when) * KINDS + KINDS_OF[states & np.uint32(HOW)]
        return lists

    def _look_at(self, which: int) -> None:
        """List `which` is not empty any more."""
        if not self._stale:
            self._filled |= 1 << self._rank[which]

    def _begin_span(self) -> None:
        """Begin another span with the last request."""
        self._due = False
        self._new += self._since
        self._since = 0
        if len(self._hit_rates.events) >= max(_MOST, self.slots // _LEARNED):
            self._learn()
        after, before = i32_view(self._linked.after), i32_view(self._linked.before)
        for row, older in self._spans.begin(self._now):
            self._hit_rates.join(row, older)
            first, end = row * KINDS, (row + 1) * KINDS
            for kind in (after[first:end] != _EMPTY[first:end]).nonzero()[0].tolist():
                which = first + kind
                self._linked.move_to_end(int(after[which]), int(before[which]), older * KINDS + kind)
        self._fresh = self._spans.row(self._request) * KINDS
        self._stale = True

    def _learn(self) -> None:
        """Update the hit-rate table with the uses since the last update."""
        self._hit_rates.learn(self._spans, self._now)
        self._hit_rates.fade(0.5 ** (self._new / (_FADE * max(1, self.slots))))
        self._new = 0

    def _rank_lists(self) -> None:
        """Order the lists by the hit-rate table, if it has changed."""
        if self._due:
            self._begin_span()
        if not self._stale:
            return
        self._stale = False
        if self._new >= max(_LEAST, self.slots // _LEARNED):
            self._learn()
        kinds = self._hit_rates.kinds
        lists = np.add.outer(np.array(self._spans.rows) * KINDS, np.arange(kinds)).ravel()
        ordered = lists[self._hit_rates.order(self._spans.ages(self._now))].astype(np.uint16)
        rank = np.zeros(LISTS, np.uint16)
        rank[ordered] = np.arange(len(ordered))
        filled = i32_view(self._linked.after)[ordered] != ordered
        self._order, self._rank = array("H", ordered.tobytes()), array("H", rank.tobytes())
        self._filled = int.from_bytes(np.packbits(filled, bitorder="little").tobytes(), "little")
