"""Hit-rate table: by kind and age, the hits that chunks promise for the time that they go on taking a slot.

                came back at this age         chance = came back / reached this age
    age         1    2    3   4-5  6-7 ...    promise of what has this age = the best, over all ages to wait for,
    once, 8-31  3   40   10    90   12                 of expected hits until then / time until then
    twice, 1   11   95   40    16    0

That is the Gittins index (J. C. Gittins, "Bandit processes and dynamic allocation indices", 1979). A kind whose hits
come after a pause promises little at first, and more as the pause draws to its end; and nothing, soon after.

What reached an age is what ended at it or later, by a use or because it was forgotten, and what is that old now. Where
little is known of a kind, its chance is that of all chunks of as many uses and the same hint, and where little is known
of these, that of all chunks of this hint, or of all. Of two kinds with the same gap and no hint the one with more uses
never promises less: it stands before the other in prompts.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from longshore.cache.eviction.spans import ROWS, Spans
from longshore.cache.eviction.uses import (
    AGE_BEGINS,
    AGES,
    GAPS,
    HINTED,
    HINTED_GAPS,
    HOW,
    KINDS,
    KINDS_OF,
    OLDEST,
    PLAIN,
    REQUEST,
    STATE,
    WEIGHTS,
)

_IMAGINED = 128.0
"""So many chunks are imagined at each level of what is known, with the chances of the level above."""

_CHANCE = 0.05
"""Before anything is known, so many are taken to come back at each age."""

_WIDTHS = np.diff([*AGE_BEGINS, 2 * OLDEST]).astype(float)
_LATER = np.triu(np.ones((AGES, AGES), bool))
"""Whether an age ends later than another begins."""
_NO_TIME = 1e-300

_WEIGHTS = np.array(WEIGHTS)

_HINTS = np.array([0, *range(PLAIN, KINDS, HINTED)])
"""The first kind of each hint, and of none."""

_USES = np.array(
    [0, *range(1, PLAIN, GAPS), *(each for at in _HINTS[1:] for each in (at, *range(at + 1, at + HINTED, HINTED_GAPS)))]
)
"""The first kind of each number of uses."""

_HINT_OF = np.searchsorted(_HINTS, _USES, "right") - 1
"""The hint of each of these."""

BECAME, FORGOTTEN, RETURNED = 0, 1 << 24, 3 << 24
_AGE, _ENDED, _BACK, _WHEN = 19, 24, 25, 26
"""Bits of an event: `BECAME` what it is by its last use, at this tick; forgotten at this age since then; or used."""

_Floats = npt.NDArray[np.float64]
_Numbers = npt.NDArray[np.intp]


def event(what: int, state: int, when: int, age: int = 0) -> int:
    """Something happened to a chunk of `state`, which was last used at tick `when`, when its age class was `age`."""
    return when << _WHEN | what | age << _AGE | state & STATE


class HitRates:
    """Counts of chunks that ended at an age, and that came back then, by kind and age; and those still waited for."""

    __slots__ = ("_back", "_ended", "_rank", "_reached", "_waiting", "events", "kinds")

    def __init__(self) -> None:
        self.kinds = PLAIN
        """How many kinds there are: those of hints only since there was one."""
        self._back, self._ended, self._reached = (np.zeros((PLAIN, AGES)) for _ in range(3))
        self._waiting = np.zeros((ROWS, PLAIN))
        self._rank = np.zeros(AGES * PLAIN, np.uint16)
        """The place of each age and kind, the oldest first, if all are ordered by what they promise."""
        self.events = array("q")
        """What has happened since `learn`: an event, and to how many chunks, by turns."""

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

    def note(self, what: int, count: int = 1) -> None:
        """This event happened to so many chunks."""
        self.events.extend((what, count))

    def forget(self, states: npt.NDArray[np.uint32], when: npt.NDArray[np.int32], ages: npt.NDArray[np.uint8]) -> None:
        """Nothing is known any more of these chunks, last used at ticks `when`; `ages` are classes of ages."""
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
        order = np.argsort(self.table().T[::-1].ravel(), kind="stable")
        self._rank = np.zeros(len(order), np.uint16)
        self._rank[order] = np.arange(len(order))

    def join(self, row: int, into: int) -> None:
        """What is in `row` is counted with that in an older one."""
        self._waiting[into] += self._waiting[row]
        self._waiting[row] = 0.0

    def fade(self) -> None:
        """Halve all counts, so that what comes counts for more than what was."""
        self._back /= 2
        self._ended /= 2

    def chances(self) -> _Floats:
        """For each kind and age the chance to be used again at this age, for what has reached it."""
        back, reached = self._back, np.maximum(self._reached, self._back)
        hints, uses = _HINTS[self.kinds > _HINTS], _USES[self.kinds > _USES]
        every = (back.sum(axis=0) + _IMAGINED * _CHANCE) / (reached.sum(axis=0) + _IMAGINED)
        by_hint = np.add.reduceat(back, hints) + _IMAGINED * every
        by_hint[0] += _IMAGINED * (_CHANCE - every)
        by_hint /= np.add.reduceat(reached, hints) + _IMAGINED
        by_uses = np.add.reduceat(back, uses) + _IMAGINED * by_hint[_HINT_OF[: len(uses)]]
        by_uses /= np.add.reduceat(reached, uses) + _IMAGINED
        usual = np.repeat(by_uses, np.diff([*uses, self.kinds]), axis=0)
        chances: _Floats = (back + _IMAGINED * usual) / (reached + _IMAGINED)
        return chances

    def table(self) -> _Floats:
        """For each kind and age what is promised: hits per tick."""
        still = np.ones((self.kinds, AGES + 1))  # not used again when an age begins
        np.cumprod(1.0 - self.chances(), axis=1, out=still[:, 1:])
        time = np.zeros((self.kinds, AGES + 1))  # to be spent from there on; from the end, exact where little is left
        time[:, :-1] = np.cumsum((still[:, :-1] * _WIDTHS)[:, ::-1], axis=1)[:, ::-1]
        spent = np.where(_LATER, time[:, :-1, None] - time[:, None, 1:], np.inf)
        np.maximum(spent, _NO_TIME, out=spent)
        promised: _Floats = ((still[:, :-1, None] - still[:, None, 1:]) / spent).max(axis=2)
        by_uses = promised[1:PLAIN].reshape(-1, GAPS, AGES)
        np.maximum.accumulate(by_uses, axis=0, out=by_uses)
        return promised

    def order(self, ages: _Numbers) -> _Numbers:
        """What has one of `ages`, the oldest first, and any kind, as `place in ages * kinds + kind`.

        The least promising comes first, as `learn` has found; of equals the oldest, then the least used.
        """
        return np.argsort(self._rank.reshape(AGES, self.kinds)[AGES - 1 - ages].ravel(), kind="stable")
