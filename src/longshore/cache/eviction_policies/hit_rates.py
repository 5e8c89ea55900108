"""Hit-rate table: expected hits per unit of time in a slot, by kind and age.

                came back at this age         chance = came back / reached this age
    age         1    2    3   4-5  6-7 ...    promise of what has this age = the best, over all ages to wait for,
    once, 8-31  3   40   10    90   12                 of expected hits until then / time until then
    twice, 1   11   95   40    16    0

That is the Gittins index (J. C. Gittins, "Bandit processes and dynamic allocation indices", 1979). A kind whose hits
come after a pause promises little at first, and more as the pause draws to its end; and nothing, soon after.

What reached an age is what ended at it or later, by a use or because it was forgotten, and what is that old now. Where
little is known of a kind, its chance is that of all chunks of as many uses, and where little is known of these, that of
all. Where little is known of a kind with a hint, its chance is that of all chunks used like it, whatever their hints,
times what the hint says at this age: how many chunks with it came back, of how many would have by their uses alone.
Where little is known of a hint, it counts a little: chunks with it are taken to come back twice as often in the time
that it says, and less often before that and after `ends`. Of two kinds with the same gap and hint the one with more
uses never promises less: it stands before the other in prompts.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.errors import CacheError

# Hints about when a request's chunks are used again, as small numbers for eviction policies.
#
#     0              nothing was said
#     1              `ends`: nobody will come back
#     2, 3, ... 7    `seconds`: back within 4, 16, 64, 256, 1,024 requests, or later; by the rate of the last requests
#     8, ... 11      a class of requests; those that were named after the first three share the last number
#     12, ... 15     back within 16, 64, 256 or 1,024 requests, and used before by a request that comes back later
#
# A hint is a kind of use, not an order: the policy learns for each number how long it takes until such chunks are used
# again, and whether they are. So a hint that has often been wrong says little, and does little.
ENDS, BACK, CLASS, SHARED, HINTS = 1, 2, 8, 12, 16
"""The number of `ends`, the first ones of times, of classes and of times of shared chunks, and how many there are."""

_WITHIN = [4**power for power in range(1, CLASS - BACK)]

_WINDOW = 256
"""The rate is that of the last one to two windows of so many requests."""

_REMEMBERED = 4096
"""Requests with a hint, of those that began last, whose hint is known when they go on."""


class ReuseHint(NamedTuple):
    """What the caller knows about when the chunks of a request are used again.

    Attributes:
        ends: They are not: nobody will come back.
        seconds: In so many seconds, from the first call on: a tool call is out, for example.
        of: Name of a class of requests whose chunks are used again after alike times.
    """

    ends: bool = False
    seconds: float | None = None
    of: str = ""


class ReuseHints:
    """Hints as numbers, by request; classes in the order in which they were named."""

    def __init__(self) -> None:
        self._classes: dict[str, int] = {}
        self._hints: dict[int, int] = {}
        self._marks: list[tuple[int, float]] = []
        """Ticks and times at which a window began: of the last two."""

    def begin(self, request: int, now: float, said: ReuseHint | None) -> int:
        """The request of this number begins, at `now` seconds; the number of its hint."""
        if not self._marks or request - self._marks[-1][0] >= _WINDOW:
            self._marks = [*self._marks[-1:], (request, now)]
        hint = 0 if said is None else self._number(request, now, said)
        if hint:
            self._hints[request] = hint
            if len(self._hints) > _REMEMBERED:
                del self._hints[next(iter(self._hints))]
        return hint

    def of(self, request: int) -> int:
        """The number of the hint of a request that goes on."""
        return self._hints.get(request, 0)

    def _number(self, request: int, now: float, said: ReuseHint) -> int:
        if said.ends:
            return ENDS
        (since, then) = self._marks[0]
        passed = now - then
        if said.seconds is not None and passed > 0:
            return BACK + bisect_right(_WITHIN, said.seconds * (request - since) / passed)
        if not said.of:
            return 0
        if said.of not in self._classes and len(self._classes) < SHARED - CLASS - 1:
            self._classes[said.of] = CLASS + len(self._classes)
        return self._classes.get(said.of, SHARED - 1)


def window(hint: int) -> tuple[float, float]:
    """From how many requests after their last use on chunks with this hint are to come back, and until when.

    Both are infinite for `ends`, and 0 for a class, which does not say it.
    """
    if hint == ENDS:
        return math.inf, math.inf
    if CLASS <= hint < SHARED:
        return 0, 0
    place, ends = hint - BACK if hint < CLASS else hint - SHARED + 1, [0, *_WITHIN, math.inf]
    return ends[place], ends[place + 1]


def sooner(old: int, passed: int, new: int) -> int:
    """The hint of a chunk with hint `old` that is used `passed` requests later by a request with hint `new`.

    That is `new`, unless another request is to come back sooner, and its time has not begun.
    """
    waits = BACK < old < new < CLASS and passed < _WITHIN[old - BACK - 1]
    return SHARED + old - BACK - 1 if waits else new


def check_reuse_hint(said: ReuseHint | None) -> None:
    """Raise `CacheError` for a hint that cannot be."""
    if said is None:
        return
    if not isinstance(said, ReuseHint) or not isinstance(said.ends, bool) or not isinstance(said.of, str):
        raise CacheError(f"expected a ReuseHint, got {said!r}")
    if said.seconds is not None and (said.ends or not 0 <= said.seconds < math.inf):
        raise CacheError(f"ReuseHint: seconds must be finite, >= 0, and not combined with ends; got {said}")


# How a node was used, in 20 bits; and what follows from them.
#
# bit    19      18 ... 14              13 ... 10           9 ... 3                               2 ... 0
#        held    bit length of the      its hint            0 out │ 1 ends a prompt, not used     gap before
#                request that used it   (`reuse_hint`)         since │ 2 once │ ... │ 65 often       its last use
#                last
OUT, LEAF, ONCE = (use << 3 for use in range(3))
MOST_USES = 64
GAP, USES, HOW, STATE, HELD = 0x7, 0x3F8, 0x3FFF, 0x7FFFF, 0x80000
"""Bits of the gap, of uses, of these and the hint, of all but whether it is held; and that one."""

HINT, REQUEST = 10, 14
"""The lowest bits of the hint, and of the request's length."""

GAPS = 6
"""Classes of gaps in requests: none, 1, 2 to 7, 8 to 31, 32 to 127, 128 and more."""

PLAIN = 1 + 8 * GAPS
"""Kinds without a hint. 0: ends a prompt, not used since; then by uses (1, 2, 3, 4 to 7, 8 to 15, 16 to 31, 32 to 63,
more) and gap."""

HINTED = 1 + 4 * GAPS
"""Kinds of each hint: the same by uses (1, 2 to 3, 4 to 15, more) and gap."""

KINDS = PLAIN + (HINTS - 1) * HINTED

AGES = 27
"""0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ... requests, two classes for each doubling; the last one is without end."""

AGE_BEGINS = (0, 1, *((2 + half) << level for level in range(12) for half in (0, 1)), 2 << 12)
OLDEST = AGE_BEGINS[-1]

WEIGHTS: Sequence[float] = [(64 / (0.75 * 2.0**bits)) ** 0.5 for bits in range(32)]
"""What a chunk counts for, by the bit length of its request: chunks of long requests come back together."""


def _kind_of(how: int) -> int:
    uses, gap, hint = ((how & USES) >> 3) - 1, min(how & GAP, GAPS - 1), min(how >> HINT, HINTS - 1)
    if not hint:
        return 0 if uses < 1 else 1 + GAPS * (uses - 1 if uses < 4 else min(uses.bit_length(), 7)) + gap
    first = PLAIN + (hint - 1) * HINTED
    return first if uses < 1 else first + 1 + GAPS * ((uses > 1) + (uses > 3) + (uses > 15)) + gap


KIND_OF = array("H", map(_kind_of, range(HOW + 1)))
"""The kind by the bits of `HOW`."""

KINDS_OF = np.frombuffer(KIND_OF, np.uint16)

AGAIN = array("H", [0] * 8 + [ONCE + 8 * min(max(how >> 3, 2) - 1, MOST_USES - 1) for how in range(8, USES + 8)])
"""The uses after another one, by the bits of uses and gap."""

AGE_OF = np.repeat(np.arange(AGES, dtype=np.uint8), np.diff([*AGE_BEGINS, OLDEST + 1])).tobytes()
"""The class of an age in requests, which is at most `OLDEST`."""

AGES_OF = np.frombuffer(AGE_OF, np.uint8)

GAP_OF = bytes(0 if not begin else 1 + sum(begin >= each for each in (2, 8, 32, 128)) for begin in AGE_BEGINS)
"""The class of a gap by its age class."""


ROWS = 64
"""Spans there can be at most: two neighbours grow by a quarter, from 1 to `_END` requests."""

_END = OLDEST
"""Spans that lie farther back are one."""


class Spans:
    """The spans of all requests until now, the oldest first: their rows, and their first requests.

        request  0 ───────────── 70 │ 71 ──── 85 │ 86 ── 92 │ 93 ─ 95 │ 96 │ 97        now = 97
        row      4                  │ 0          │ 7        │ 2       │ 5  │ 1

    Each span has a row of lists. Two neighbours become one when they are together no longer than a quarter of the
    time that they lie back, so that what is sorted by spans stays so at the cost of joining whole lists.
    """

    __slots__ = ("_due", "_free", "rows", "starts")

    def __init__(self) -> None:
        self.rows, self.starts = [0], [0]
        self._free = list(range(1, ROWS))
        self._due = list[int]()  # for each span but the last two, the request at which it and the next become one

    def row(self, request: int) -> int:
        """The row of the span of `request`."""
        return self.rows[bisect_right(self.starts, request) - 1]

    def rows_of(self, requests: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
        """`row` of many."""
        rows: npt.NDArray[np.intp] = np.array(self.rows)[np.searchsorted(self.starts, requests, "right") - 1]
        return rows

    def ages(self, now: int) -> npt.NDArray[np.intp]:
        """The age class of the last request of each span."""
        latest = np.array([*self.starts[1:], now + 1]) - 1
        ages: npt.NDArray[np.intp] = AGES_OF[np.minimum(now - latest, OLDEST)].astype(np.intp)
        return ages

    def begin(self, now: int) -> list[tuple[int, int]]:
        """A span begins with request `now`; which rows become a part of which older ones, in this order."""
        rows, starts, due, joined = self.rows, self.starts, self._due, []
        if starts[-1] == now:
            return []
        starts.append(now)
        due += map(self._due_after, range(len(due), len(starts) - 2))
        at = 0
        while at < len(due):
            if due[at] <= now or (at + 1 == len(due) and not self._free):
                joined.append((rows.pop(at + 1), rows[at]))
                del starts[at + 1], due[at]
                due[max(0, at - 1) : at + 1] = map(self._due_after, range(max(0, at - 1), min(at + 1, len(due))))
                self._free.append(joined[-1][0])
            else:
                at += 1
        rows.append(self._free.pop())
        return joined

    def _due_after(self, at: int) -> int:
        """The request at which the spans `at` and `at + 1` become one."""
        end = self.starts[at + 2]
        return end - 1 + min(_END, 4 * (end - self.starts[at]))


_IMAGINED = 128.0
"""So many chunks are imagined at each level of what is known, with the chances of the level above."""

_CHANCE = 0.05
"""Before anything is known, so many are taken to come back at each age."""

_WIDTHS = np.diff([*AGE_BEGINS, 2 * OLDEST]).astype(float)
_FROM, _UNTIL = np.triu_indices(AGES)
_FIRST = np.searchsorted(_FROM, range(AGES))
"""All pairs of ages, to wait from the begin of the one until the end of the other; and the first pair of each."""
_NO_TIME = 1e-300
_TOGETHER = 32
"""The rates of so many kinds are computed at once: large arrays take fresh memory each time, which is slow."""

_WEIGHTS = np.array(WEIGHTS)

_USES, _HINTED_USES = (np.array([0, *range(1, end, GAPS)]) for end in (PLAIN, HINTED))
"""The first kind of each number of uses, without a hint and of one hint."""

_AS_HINTED = np.zeros((HINTED, PLAIN))
"""1 where a kind without a hint has the uses and the gap of a kind of a hint."""
for _how in range(8, 8 * (MOST_USES + 2)):
    _AS_HINTED[KIND_OF[1 << HINT | _how] - PLAIN, KIND_OF[_how]] = 1

_SAID = np.array(
    [
        [0.7 if age < since else 2.0 if age < until else 1.0 for age in AGE_BEGINS]
        for since, until in map(window, range(1, HINTS))
    ]
)
"""How many times as often chunks of each hint are taken to come back at each age as others used alike, before anything
is known of the hint. Factors farther from 1 cost hits where a third of the hints are wrong."""

BECAME, FORGOTTEN, RETURNED = 0, 1 << 24, 3 << 24
_AGE, _ENDED, _BACK, _WHEN = 19, 24, 25, 26
"""Bits of an event: `BECAME` what it is by its last use, by this request; forgotten at this age since then; or used."""

_Floats = npt.NDArray[np.float64]
_Numbers = npt.NDArray[np.intp]


def _shrunk(back: _Floats, reached: _Floats, uses: _Numbers) -> _Floats:
    """Chances of kinds; those of few chunks are near to that of all with as many uses, and that to the one of all."""
    every = (back.sum(axis=0) + _IMAGINED * _CHANCE) / (reached.sum(axis=0) + _IMAGINED)
    by_uses = (np.add.reduceat(back, uses) + _IMAGINED * every) / (np.add.reduceat(reached, uses) + _IMAGINED)
    usual = np.repeat(by_uses, np.diff([*uses, len(back)]), axis=0)
    chances: _Floats = (back + _IMAGINED * usual) / (reached + _IMAGINED)
    return chances


class HitRates:
    """Counts of chunks that ended at an age, and that came back then, by kind and age; and those still waited for."""

    __slots__ = ("_average", "_back", "_ended", "_rank", "_reached", "_waiting", "events", "kinds")

    def __init__(self) -> None:
        self.kinds = PLAIN
        """How many kinds there are: those of hints only since there was one."""
        self._back, self._ended, self._reached = (np.zeros((PLAIN, AGES)) for _ in range(3))
        self._waiting = np.zeros((ROWS, PLAIN))
        self._rank = np.zeros(AGES * PLAIN, np.uint16)
        """The place of each age and kind, the oldest first, if all are ordered by what they promise."""
        self._average = np.zeros(AGES, np.uint16)
        """The place of what all that has reached an age promises on average, by age."""
        self.events = array("q")
        """What has happened since `learn`: an event, and to how many chunks, by requests."""

    def add_hints(self) -> bool:
        """From now on there are the kinds of hints, too; whether they are new."""
        more = KINDS - self.kinds
        if not more:
            return False
        self.kinds = KINDS
        grown = (np.pad(each, ((0, more), (0, 0))) for each in (self._back, self._ended, self._reached))
        self._back, self._ended, self._reached = grown
        self._waiting = np.pad(self._waiting, ((0, 0), (0, more)))
        self._rank_kinds()
        return True

    def record(self, what: int, state: int, when: int, age: int = 0, count: int = 1) -> None:
        """It happened to `count` chunks of `state`, last used by request `when`, when their age class was `age`."""
        self.events.extend((when << _WHEN | what | age << _AGE | state & STATE, count))

    def forget(self, states: npt.NDArray[np.uint32], when: npt.NDArray[np.int32], ages: npt.NDArray[np.uint8]) -> None:
        """Nothing is known any more of these chunks, last used by requests `when`; `ages` are classes of ages."""
        codes = np.ones((len(states), 2), np.int64)
        codes[:, 0] = when.astype(np.int64) << _WHEN | FORGOTTEN | states & np.uint32(STATE)
        codes[:, 0] |= ages.astype(np.int64) << _AGE
        self.events.frombytes(codes.tobytes())

    def learn(self, spans: Spans, now: int) -> None:
        """Count what has happened, and say anew what is promised."""
        (codes, counts), self.events = np.frombuffer(self.events, np.int64).reshape(-1, 2).T, array("q")
        kinds, weights = KINDS_OF[codes & HOW].astype(np.intp), _WEIGHTS[codes >> REQUEST & 31] * counts
        by_age, ended = kinds * AGES + (codes >> _AGE & 31), weights * (codes >> _ENDED & 1)
        by_row, shape = spans.rows_of(codes >> _WHEN) * self.kinds + kinds, self._back.shape
        self._waiting += np.bincount(by_row, weights - 2 * ended, ROWS * self.kinds).reshape(ROWS, self.kinds)
        self._ended += np.bincount(by_age, ended, self._ended.size).reshape(shape)
        self._back += np.bincount(by_age, weights * (codes >> _BACK & 1), self._back.size).reshape(shape)
        last = self._ended.copy()
        np.add.at(last.T, spans.ages(now), self._waiting[spans.rows])
        self._reached = np.cumsum(last[:, ::-1], axis=1)[:, ::-1]
        self._rank_kinds()

    def _rank_kinds(self) -> None:
        table = self.table()
        promised = table.T[::-1].ravel()
        order = np.argsort(promised, kind="stable")
        self._rank = np.zeros(len(order), np.uint16)
        self._rank[order] = np.arange(len(order))
        reached = self._reached + _NO_TIME
        average = (table * reached).sum(axis=0) / reached.sum(axis=0)
        self._average = np.searchsorted(promised[order], average).astype(np.uint16)

    def join(self, row: int, older: int) -> None:
        """What is in `row` is counted with that in an older one."""
        self._waiting[older] += self._waiting[row]
        self._waiting[row] = 0.0

    def fade(self, by: float) -> None:
        """Multiply all counts by this factor from now on, so that what comes counts for more than what was."""
        self._back *= by
        self._ended *= by

    def chances(self) -> _Floats:
        """For each kind and age the chance to be used again at this age, for what has reached it."""
        back, reached = self._back, np.maximum(self._reached, self._back)
        plain = _shrunk(back[:PLAIN], reached[:PLAIN], _USES)
        if self.kinds == PLAIN:
            return plain
        ours, there = (each[PLAIN:].reshape(-1, HINTED, AGES) for each in (back, reached))
        all_back, all_reached = (
            _AS_HINTED @ each[:PLAIN] + hinted.sum(axis=0) for each, hinted in ((back, ours), (reached, there))
        )
        alike = _shrunk(all_back, all_reached, _HINTED_USES)  # whatever the hint
        every = _IMAGINED * (all_back.sum(axis=0) + _IMAGINED * _CHANCE) / (all_reached.sum(axis=0) + _IMAGINED)
        says = (ours.sum(axis=1) + every * _SAID) / ((there * alike).sum(axis=1) + every)
        usual = np.minimum(1.0, says[:, None] * alike)
        hinted = (ours + _IMAGINED * usual) / (there + _IMAGINED)
        return np.concatenate([plain, hinted.reshape(-1, AGES)])

    def table(self) -> _Floats:
        """For each kind and age the expected hits per request."""
        still = np.ones((AGES + 1, self.kinds))  # not used again when an age begins
        np.cumprod(1.0 - self.chances().T, axis=0, out=still[1:])
        time = np.zeros((AGES + 1, self.kinds))  # to be spent from there on; from the end, exact where little is left
        time[:-1] = np.cumsum((still[:-1] * _WIDTHS[:, None])[::-1], axis=0)[::-1]
        promised = np.empty((self.kinds, AGES))
        for first in range(0, self.kinds, _TOGETHER):
            some, left = still[:, first : first + _TOGETHER], time[:, first : first + _TOGETHER]
            spent = np.maximum(left[_FROM] - left[_UNTIL + 1], _NO_TIME)
            rates = (some[_FROM] - some[_UNTIL + 1]) / spent
            promised[first : first + _TOGETHER] = np.maximum.reduceat(rates, _FIRST, axis=0).T
        for some, kinds in ((promised[:PLAIN], PLAIN), (promised[PLAIN:], HINTED)):
            by_uses = some.reshape(-1, kinds, AGES)[:, 1:].reshape(len(some) // kinds, kinds // GAPS, GAPS, AGES)
            np.maximum.accumulate(by_uses, axis=1, out=by_uses)
        return promised

    def promise_no_less(self, kinds: _Numbers, ages: _Numbers, than: int) -> npt.NDArray[np.bool_]:
        """Which chunks of these kinds and age classes promise at least the average of all of age class `than`; bool."""
        enough: npt.NDArray[np.bool_] = self._rank[(AGES - 1 - ages) * self.kinds + kinds] >= self._average[than]
        return enough

    def order(self, ages: _Numbers) -> _Numbers:
        """What has one of `ages`, the oldest first, and any kind, as `place in ages * kinds + kind`.

        The least promising comes first, as `learn` has found; of equals the oldest, then the least used.
        """
        return np.argsort(self._rank.reshape(AGES, self.kinds)[AGES - 1 - ages].ravel(), kind="stable")
