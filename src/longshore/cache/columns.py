"""Columns: arrays with one number for each node or slot, which the garbage collector does not traverse.

A column is a `memoryview` of a numpy array: the one is fast for single elements, the other (`i32_view`) for many at
once. A column that grows is replaced by a larger one. Stacks of free numbers (`FreeList`), linked lists (`LinkedLists`)
and a hash table (`KeyTable`) are made of columns.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from mmap import MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.ma  # np.unique imports it at its first call, in 20 ms that a request would wait
import numpy.typing as npt

from longshore.boundary import Key
from longshore.errors import CacheError, IntegrityError

_INT32 = np.dtype(np.int32)  # a constant, because `np.dtype` costs as much as an array

Column: TypeAlias = "memoryview[int]"

I32 = npt.NDArray[np.int32]
"""Nodes or slots, shape `(n,)`."""

FEW, _FEW_KEYS = 48, 24
"""Below this number of nodes, or of keys, a loop is faster than array operations."""

_RUN = 128
"""So many linked numbers are found faster by one comparison than one by one."""


def filled(count: int, value: int = 0, dtype: npt.DTypeLike = _INT32) -> Column:
    """A column of `count` elements of `dtype`, all of them `value`. Its memory is allocated at once."""
    return np.full(count, value, dtype).data


def resized(numbers: Column, size: int, value: int = 0) -> Column:
    """The first `size` elements of a column, as another one; those that it lacks are `value`."""
    kept: npt.NDArray[Any] = numbers.obj[:size]  # type: ignore[index]  # a numpy array, as of all columns
    return np.concatenate([kept, np.full(size - len(kept), value, kept.dtype)]).data


def sparse(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros of `dtype`, shape `(count,)`, whose memory is allocated by small pages when first written.

    numpy's zeros are allocated by huge pages: the first writes at random positions took 67 ms for a million chunks.
    """
    memory = mmap(-1, max(1, count * np.dtype(dtype).itemsize), MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count)


def grown(numbers: Column, size: int, dtype: npt.DTypeLike = _INT32) -> Column:
    """The column of `dtype` extended with zeros to `size` elements, allocated when first written."""
    if size <= len(numbers):
        return numbers
    larger = sparse(size, dtype).data
    if np.asarray(numbers).any():
        larger[: len(numbers)] = numbers
    return larger


def i32_view(numbers: Column) -> npt.NDArray[np.int32]:
    """The numpy array of a column of signed 32-bit numbers."""
    return numbers.obj  # type: ignore[return-value]


def u8_view(numbers: Column) -> npt.NDArray[np.uint8]:
    """The numpy array of a column of bytes."""
    return numbers.obj  # type: ignore[return-value]


def u32_view(numbers: Column) -> npt.NDArray[np.uint32]:
    """The numpy array of a column of unsigned 32-bit numbers."""
    return numbers.obj  # type: ignore[return-value]


def as_i32(numbers: Sequence[int] | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """32-bit numbers as a numpy array; faster than `np.array`."""
    if isinstance(numbers, np.ndarray):
        return numbers
    return np.frombuffer(array("i", numbers), _INT32) if len(numbers) else np.empty(0, np.int32)


def as_list(numbers: Sequence[int] | npt.NDArray[np.int32]) -> Sequence[int]:
    """32-bit numbers as a sequence of `int`; a loop over an array is slower."""
    return numbers.tolist() if isinstance(numbers, np.ndarray) else numbers


def has_duplicates(numbers: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> bool:
    """Whether `numbers` has duplicates."""
    if len(numbers) < FEW:
        return len(set(numbers.tolist())) < len(numbers)
    if (ascending := np.count_nonzero(numbers[1:] > numbers[:-1])) in (0, len(numbers) - 1):  # often sorted already
        return not ascending and bool(np.count_nonzero(numbers[1:] == numbers[:-1]))
    ordered = np.sort(numbers)
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))


def unique(numbers: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """`numbers` without duplicates; the first of equal numbers stays."""
    if len(numbers) < 2 or not has_duplicates(numbers):
        return numbers
    return numbers[np.sort(np.unique(numbers, return_index=True)[1])]


def count_leading(true: npt.NDArray[np.bool_]) -> int:
    """The number of leading true elements."""
    first = int(true.argmin()) if len(true) else 0
    return len(true) if not len(true) or true[first] else first


def follow(links: Column, number: int, end: int, most: int) -> I32:
    """`number`, its link, the link of that and so on, before `end`, at most `most` numbers.

    Chunks that were stored together have consecutive numbers, and mostly are linked so, the higher one to the lower
    one. What looks like a run, because it begins like one and goes on like one, is found by one comparison.
    """
    found, size = array("i"), _RUN
    while number != end and (left := most - len(found)) > 0:
        far = number - _RUN
        if left >= _RUN and far >= 0 and links[number] == number - 1 and links[far + 1] == far:
            run = np.arange(number, max(number - min(left, size), end if end < number else 0), -1, dtype=np.int32)
            count = 1 + count_leading(i32_view(links)[run[:-1]] == run[1:])
            found.frombytes(run[:count].tobytes())
            number = links[number - count + 1]
            size = 8 * size if count == len(run) else _RUN
            continue
        some = list[int]()
        for _ in range(min(left, _RUN)):
            if number == end:
                break
            some.append(number)
            number = links[number]
        found.fromlist(some)
    return as_i32(found)


def runs(numbers: npt.NDArray[Any]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Where runs of equal numbers begin in `numbers`, of which there are some, and how long they are."""
    begins = np.empty(len(numbers) + 1, bool)
    begins[0] = begins[-1] = True
    np.not_equal(numbers[1:], numbers[:-1], out=begins[1:-1])
    edges = begins.nonzero()[0]
    return edges[:-1], edges[1:] - edges[:-1]


def runs_of(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers in the ascending `positions`: start and end index of each."""
    if not positions:
        return
    if positions[-1] - positions[0] == len(positions) - 1:
        yield 0, len(positions)
        return
    ends = np.flatnonzero(np.diff(positions) != 1) + 1
    starts = [0, *ends.tolist(), len(positions)]
    yield from pairwise(starts)


class FreeList:
    """A stack of free numbers. The array never shrinks, because moving a million elements takes 2 ms."""

    def __init__(self, numbers: array[int]) -> None:
        self._numbers = numbers
        self._count = len(numbers)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers[: self._count])

    def take(self, count: int) -> array[int]:
        """Pop `count` numbers, in stack order. There must be as many."""
        before, self._count = self._count, self._count - count
        return self._numbers[self._count : before]

    def give(self, numbers: array[int]) -> None:
        """Push `numbers`."""
        end = self._count + len(numbers)
        self._numbers[self._count : end] = numbers
        self._count = end


LISTS = 27_200
"""Numbers below this one are lists, not elements."""


class LinkedLists:
    """`LISTS` doubly linked lists over the numbers from `LISTS` on, in two arrays. 8 bytes per number.

        numbers   0 .. LISTS-1        the lists themselves: list `l` is a ring through element `l`
                  LISTS ..            elements; each is in at most one list at a time

        cold end                hot end
           l ──► 17 ──► 9 ──► 4 ──► l            `after[l]` is the coldest, `before[l]` the hottest

    Every operation on one element is O(1), about 100 ns.
    """

    __slots__ = ("after", "before")

    def __init__(self, size: int = LISTS) -> None:
        self.after: Column = np.arange(LISTS, dtype=np.int32).data
        self.before: Column = np.arange(LISTS, dtype=np.int32).data
        self.grow(size)

    def grow(self, size: int) -> None:
        """Make room for numbers below `size`. New numbers are in no list."""
        self.after, self.before = grown(self.after, size), grown(self.before, size)

    def append(self, which: int, number: int) -> None:
        """Put `number`, which is in no list, at the hot end of list `which`."""
        after, before = self.after, self.before
        last = before[which]
        after[last] = before[which] = number
        after[number] = which
        before[number] = last

    def extend(self, which: int, elements: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Put `elements`, which are distinct and in no list, at the hot end of list `which`, the last the hottest."""
        if not len(elements):
            return
        numbers, after, before = np.asarray(elements, np.int32), i32_view(self.after), i32_view(self.before)
        last = before[which]
        after[numbers[:-1]], before[numbers[1:]] = numbers[1:], numbers[:-1]
        after[last], before[numbers[0]] = numbers[0], last
        after[numbers[-1]], before[which] = which, numbers[-1]

    def first_few(self, which: int, count: int) -> list[int]:
        """The first elements of list `which`, at most `count`."""
        found: list[int] = follow(self.after, self.after[which], which, count).tolist()
        return found

    def drop_first(self, which: int, last: int) -> None:
        """Remove the first elements of list `which`, up to `last`, which is in it."""
        ahead = self.after[last]
        self.after[which], self.before[ahead] = ahead, which

    def prepend(self, which: int, number: int) -> None:
        """Put `number`, which is in no list, at the cold end of list `which`."""
        after, before = self.after, self.before
        first = after[which]
        before[first] = after[which] = number
        after[number], before[number] = first, which

    def prepend_all(self, which: int, elements: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Put `elements`, which are distinct and in no list, at the cold end of list `which`, the last the coldest."""
        if not len(elements):
            return
        numbers, after, before = np.asarray(elements, np.int32), i32_view(self.after), i32_view(self.before)
        first = after[which]
        before[numbers[:-1]], after[numbers[1:]] = numbers[1:], numbers[:-1]
        before[first], after[numbers[0]] = numbers[0], first
        before[numbers[-1]], after[which] = which, numbers[-1]

    def move_to_end(self, first: int, last: int, which: int) -> None:
        """Move the adjacent elements from `first` to `last` of any list to the hot end of list `which`."""
        after, before = self.after, self.before
        behind, ahead = before[first], after[last]
        after[behind], before[ahead] = ahead, behind
        hottest = before[which]
        after[hottest], before[first] = first, hottest
        after[last], before[which] = which, last

    def remove(self, number: int) -> None:
        """Remove `number` from its list."""
        after, before = self.after, self.before
        behind, ahead = before[number], after[number]
        after[behind] = ahead
        before[ahead] = behind

    def remove_all(self, elements: npt.NDArray[np.int32]) -> None:
        """Remove the distinct `elements` from their lists; adjacent elements in one step."""
        if not len(elements):
            return
        after, before, numbers = self.after, self.before, elements.tolist()
        first = 0
        for last in [*np.flatnonzero(i32_view(after)[elements[:-1]] != elements[1:]).tolist(), len(numbers) - 1]:
            behind, ahead = before[numbers[first]], after[numbers[last]]
            after[behind], before[ahead] = ahead, behind
            first = last + 1

    def first(self, which: int) -> int:
        """The first element of list `which`; `which` if it is empty."""
        return self.after[which]

    def last(self, which: int) -> int:
        """The last element of list `which`; `which` if it is empty."""
        return self.before[which]

    def walk(self, which: int) -> Iterator[int]:
        """The elements of list `which`, coldest first. The lists must not change during the iteration.

        Raises `IntegrityError` if the list does not lead back to its beginning.
        """
        number = self.after[which]
        for _ in range(len(self.after)):
            if number == which:
                return
            yield number
            number = self.after[number]
        raise IntegrityError(f"list {which} does not lead back to its beginning: damaged links")

    def check_integrity(self, which: int) -> None:
        """Raise `CacheError` unless list `which` has the same elements in both directions."""
        last = which
        for number in self.walk(which):
            if self.before[number] != last or number < LISTS:
                raise CacheError(f"list {which}: {number} follows {last}, but links back to {self.before[number]}")
            last = number
        if self.before[which] != last:
            raise CacheError(f"list {which} ends with {last}, but links back to {self.before[which]}")


class KeyTable:
    """Keys by node, for nodes below `size`; reads like an array of them, with `None` for nodes without.

        hash(key) ─► bucket ─ first ─► node 17 ─ following ─► node 9        `before` is the reverse link
                                       rows[17], the key                    before[17] is ~bucket

    A hash table. A key of 32 bytes takes 44 to 48 bytes, about a third of what an entry of a dictionary takes with its
    key and number. Nothing grows: there are as many rows as nodes. Digests have one length; keys of several lengths
    are separate objects.
    """

    __slots__ = ("_before", "_count", "_first", "_following", "_mask", "_missing", "_rows")

    def __init__(self, size: int) -> None:
        self._rows: npt.NDArray[Any] = np.empty(size, "V1")
        self._following, self._before = filled(size), filled(size)
        """The next and the previous node of the same bucket; the first one has `~bucket`, nodes without a key 0."""
        self._count = 0
        self._begin(size)

    def _begin(self, size: int) -> None:
        self._mask = (1 << (size - 1).bit_length()) - 1
        self._missing: tuple[Sequence[Key], npt.NDArray[Any], npt.NDArray[np.int64]] | None = None
        """The keys that were looked up last, also as an array, and their buckets, if no node has one of them: a store
        looks up the keys that it inserts."""
        self._first = filled(self._mask + 1)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, which: int) -> Any: ...
    @overload
    def __getitem__(self, which: Sequence[int] | npt.NDArray[np.integer[Any]]) -> npt.NDArray[Any]: ...
    def __getitem__(self, which: Any) -> Any:
        """The key of a node, or `None`; the keys of several nodes, which have one, as an array (`tolist`: bytes)."""
        if isinstance(which, (int, np.integer)):
            return self._rows.item(which) if self._before[which] else None
        return self._rows.take(np.asarray(which, np.intp))

    def are(self, nodes: I32, keys: Sequence[Key]) -> bool:
        """Whether `keys` are the keys of `nodes`, which have one, in this order."""
        rows = self._rows.take(nodes)
        if rows.dtype == object or _length(keys) != rows.itemsize:
            return bool(list(keys) == rows.tolist())
        return b"".join(keys) == rows.tobytes()

    def has(self, nodes: I32) -> npt.NDArray[np.bool_]:
        """Whether each of `nodes` has a key."""
        found: npt.NDArray[np.bool_] = i32_view(self._before)[nodes] != 0
        return found

    def nodes(self, begin: int = 0, end: int | None = None) -> I32:
        """The nodes from `begin` to before `end` that have a key, all by default, ascending."""
        return (np.flatnonzero(i32_view(self._before)[begin:end]) + begin).astype(np.int32)

    def get(self, key: Key) -> int:
        """The node of `key`; 0 for none. Raises `CacheError` if it is not bytes."""
        try:
            node = self._first[hash(key) & self._mask]
        except TypeError:
            raise not_a_key(key) from None
        item = self._rows.item
        while node and item(node) != key:
            node = self._following[node]
        if not node and (not key or not isinstance(key, bytes)):
            raise not_a_key(key)
        return node

    def find(self, keys: Sequence[Key]) -> list[int]:
        """`get` for many."""
        if len(keys) < _FEW_KEYS:
            return list(map(self.get, keys))
        found: list[int] = self.find_all(keys).tolist()
        return found

    def find_all(self, keys: Sequence[Key]) -> I32:
        """`get` for many, as an array."""
        length = 0 if len(keys) < _FEW_KEYS else _length(keys)
        if not length:
            return np.array(list(map(self.get, keys)), np.int32)
        wanted, buckets = self._column(keys, length), self._buckets(keys)
        found = i32_view(self._first).take(buckets)
        left = found.nonzero()[0]  # positions whose node is not known to be the right one
        if wanted.dtype != self._rows.dtype:
            found, left = np.zeros(len(keys), np.int32), left[:0]
        while len(left) >= _FEW_KEYS:
            nodes = found.take(left)
            left = left[self._rows.take(nodes) != wanted.take(left)]
            nodes = found[left] = i32_view(self._following).take(found.take(left))
            left = left[nodes > 0]
        for position in left.tolist():
            found[position] = self.get(keys[position])
        self._missing = None if np.count_nonzero(found) else (list(keys), wanted, buckets)
        return found

    def insert(self, nodes: I32, keys: Sequence[Key] | npt.NDArray[Any]) -> None:
        """Give each of `nodes`, which have none, its key. They are distinct, and in no table."""
        listed = keys.tolist() if isinstance(keys, np.ndarray) else keys
        missing, self._missing = self._missing, None
        new = keys if isinstance(keys, np.ndarray) else None
        if missing is not None and missing[0] == listed:
            new, buckets = missing[1:]
        else:
            buckets = self._buckets(listed)
        length = _length(listed) if new is None or new.dtype == object else new.itemsize
        if not self._count and length:
            if length != self._rows.itemsize or self._rows.dtype == object:
                self._rows = np.empty(len(self._rows), f"V{length}")
        elif self._rows.dtype != object and len(nodes) and length != self._rows.itemsize:
            self._rows = self._rows.astype(object)
        same = new is not None and new.dtype == self._rows.dtype
        self._rows[nodes] = new if same else self._column(listed, self._rows.itemsize)
        self._count += len(nodes)
        self._link(nodes, buckets)

    def _column(self, keys: Sequence[Key], length: int) -> npt.NDArray[Any]:
        """`keys` as an array of what the table has, for digests of this `length`."""
        if self._rows.dtype != object:
            with suppress(TypeError):
                same = self._rows.itemsize == length
                return np.frombuffer(b"".join(keys), self._rows.dtype if same else f"V{length}")
        if wrong := [key for key in keys if not isinstance(key, bytes)]:
            raise not_a_key(wrong[0])
        of = np.empty(len(keys), object)
        of[:] = keys
        return of

    def _buckets(self, keys: Sequence[Key]) -> npt.NDArray[np.int64]:
        try:
            return np.fromiter(map(hash, keys), np.int64, len(keys)) & self._mask
        except TypeError:
            raise not_a_key(next(key for key in keys if not isinstance(key, bytes))) from None

    def _link(self, nodes: I32, buckets: npt.NDArray[np.int64]) -> None:
        if len(nodes) >= _FEW_KEYS:
            # One of each bucket together, the others one by one.
            after = i32_view(self._first).take(buckets)
            i32_view(self._first)[buckets] = nodes
            last = i32_view(self._first).take(buckets) == nodes
            i32_view(self._following)[nodes], i32_view(self._before)[nodes] = after, ~buckets
            linked = (last & (after > 0)).nonzero()[0]
            i32_view(self._before)[after.take(linked)] = nodes.take(linked)
            other = (~last).nonzero()[0]
            nodes, buckets = nodes.take(other), buckets.take(other)
        first, following, before = self._first, self._following, self._before
        for node, bucket in zip(nodes.tolist(), buckets.tolist(), strict=True):
            after = following[node] = first[bucket]
            before[node] = ~bucket
            first[bucket] = node
            if after:
                before[after] = node

    def remove(self, nodes: Sequence[int]) -> None:
        """Remove the keys of `nodes`, which have one."""
        first, following, before = self._first, self._following, self._before
        for node in nodes:
            above, after = before[node], following[node]
            if above > 0:
                following[above] = after
            else:
                first[~above] = after
            if after:
                before[after] = above
            before[node] = 0
        self._count -= len(nodes)

    def grow(self, size: int) -> None:
        """Make room for nodes below `size`."""
        more = size - len(self._rows)
        if more <= 0:
            return
        self._rows = np.concatenate([self._rows, np.empty(more, self._rows.dtype)])
        self._following, self._before = resized(self._following, size), resized(self._before, size)
        if size > len(self._first):
            nodes = self.nodes()
            self._begin(size)
            self._link(nodes, self._buckets(self._rows.take(nodes).tolist()))

    def check_integrity(self) -> None:
        """Raise `CacheError` unless each node with a key is found in its bucket, and only there."""
        nodes = self.nodes()
        following, before = i32_view(self._following)[nodes], i32_view(self._before)[nodes]
        is_first = before < 0
        above = np.where(
            is_first, i32_view(self._first)[~before * is_first], i32_view(self._following)[before * ~is_first]
        )
        linked = following > 0
        behind = i32_view(self._before)[following[linked]]
        if len(nodes) != self._count or (above != nodes).any() or (behind != nodes[linked]).any():
            raise CacheError(f"the table of keys has {len(nodes)} nodes, counts {self._count}, or has damaged links")
        if (found := self.find_all(self._rows.take(nodes).tolist())).tolist() != nodes.tolist():
            node = nodes[found != nodes][0]
            raise CacheError(f"chunk {self[int(node)].hex()[:12]} is not found by its key")


def _length(keys: Sequence[Key]) -> int:
    """The length of each of `keys`; 0 if they have several, or there are none."""
    try:
        lengths = list(map(len, keys))
    except TypeError:
        raise not_a_key(next(key for key in keys if not isinstance(key, bytes))) from None
    return lengths[0] if lengths and lengths.count(lengths[0]) == len(lengths) else 0


def not_a_key(key: object) -> CacheError:
    """The error for a value that is not a key."""
    return CacheError(f"expected a key as a digest (non-empty bytes), got {key!r}")


def not_in_policy(node: int) -> IntegrityError:
    """The error for a node that is not in the policy."""
    return IntegrityError(f"node {node} is not in the policy")


def in_policy_already(node: int) -> IntegrityError:
    """The error for a node that is in the policy already."""
    return IntegrityError(f"node {node} is already in the policy, or is below {LISTS}, the first number of a node")


def check_new(states: Column, nodes: Sequence[int], out: int = 0) -> None:
    """Raise `IntegrityError` if one of `nodes` is in the policy already, given twice, or no number of a node.

    `states` is the policy's column: that of a node that is not in the policy is `out`.
    """
    if not nodes:
        return
    if len(nodes) < FEW:
        there = map(states.__getitem__, nodes)
        good = len(set(nodes)) == len(nodes) and min(nodes) >= LISTS and (list(there).count(out) == len(nodes))
    else:
        ids = as_i32(nodes)
        good = ids.min() >= LISTS and (np.asarray(states)[ids] == out).all() and not has_duplicates(ids)
    if not good:
        raise in_policy_already(
            next(node for i, node in enumerate(nodes) if node < LISTS or states[node] != out or node in nodes[:i])
        )


def check_in(states: Column, nodes: Sequence[int] | npt.NDArray[np.int32]) -> None:
    """Raise `IntegrityError` if one of `nodes` is not in the policy, by its element of `states`."""
    if not all(map(states.__getitem__, nodes) if len(nodes) < FEW else (np.asarray(states)[as_i32(nodes)].all(),)):
        raise not_in_policy(next(node for node in nodes if not states[node]))
