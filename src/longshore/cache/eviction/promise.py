"""What chunks promise, by kind and age: how many hits for the time that they go on taking a slot, learned from others.

            came back at this age                   chance = came back / had got so far
    age     0    1   2-3  4-7  8-15 ...             promise of what has this age = the best, over all ages to wait for,
    once    3   40   210   90    12                         of expected hits until then / expected time until then
    twice  11   95   400  160    60

That is the Gittins index (J. C. Gittins, "Bandit processes and dynamic allocation indices", 1979). A kind whose hits
come after a pause promises little at first, and more as the pause draws to its end; and nothing, soon after.

Of two kinds the one that was used more often never promises less, and the end of a prompt never more than what was used
once. Chunks before others in a prompt are used at least as often, and what stands behind a chunk that went is of no use
any more; so it could not go before what is behind it, either.
But where hardly any of a kind come back, it cannot be what stands before those of fewer uses that do: it promises only
a part of what they do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

KINDS = 8
"""0: ends a prompt, not used since; then by uses: once, twice, three times, 4 to 7, 8 to 15, 16 to 31, more."""

AGES = 12
"""0, 1, 2-3, 4-7, ... steps of the clock since the last use; the last one is without end."""

MOST_USES = 32

_WIDTHS = np.array([0.5, *(2.0**i for i in range(AGES - 1))])
_ONWARD = np.tril(np.ones((AGES, AGES)))[:, None]
"""1 for the ages that are still to come at each age: by the one to come, and by the age to begin with."""

_ONWARD_WIDTHS, _HALF_WIDTHS = _ONWARD * _WIDTHS[:, None, None], _WIDTHS[:, None, None] / 2
_NO_TIME = 1e-300

_IMAGINED = 32.0
_CHANCE = 0.1
"""Before a kind is known, it is taken for one of which a tenth comes back at each age, as if so many had been seen."""


def kind_of(uses: int) -> int:
    """The kind of what was used so often; 0 uses stand for the end of a prompt."""
    return uses if uses < 4 else min(uses.bit_length() + 1, KINDS - 1)


def age_of(steps: int) -> int:
    """The age of what was used `steps` ago."""
    return min(steps.bit_length(), AGES - 1)


_RARER = 4.0
"""What comes back so many times more rarely than what was used less often is not what stands before it."""

_LAST_BEGINS = 1 << AGES - 2
_AGE_OF = np.array([age_of(steps) for steps in range(_LAST_BEGINS + 1)], np.uint8)


def ages_of(steps: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """`age_of` for many."""
    return _AGE_OF[np.minimum(steps, _LAST_BEGINS)]


class Promises:
    """Counts of chunks by kind, and of those that came back, by kind and age."""

    __slots__ = ("_back", "_seen", "became", "came_back")

    def __init__(self) -> None:
        self._seen = np.zeros(KINDS)
        self._back = np.zeros(KINDS * AGES)
        self.became = bytearray()
        """The kind that a chunk has become, for each use since `learn`."""
        self.came_back = bytearray()
        """What it was before, as `kind * AGES + age`, for each use that was not the first one."""

    def learn(self) -> None:
        """Count what has happened."""
        self._seen += np.bincount(np.frombuffer(self.became, np.uint8), minlength=KINDS)
        self._back += np.bincount(np.frombuffer(self.came_back, np.uint8), minlength=KINDS * AGES)
        self.became, self.came_back = bytearray(), bytearray()

    def fade(self) -> None:
        """Halve all counts, so that what comes counts for more than what was."""
        self._seen /= 2
        self._back /= 2

    def chances(self) -> npt.NDArray[np.float64]:
        """For each kind and age the chance to be used again at this age, for what has reached it."""
        back = self._back.reshape(KINDS, AGES)
        sooner = np.cumsum(back, axis=1) - back
        reached = np.maximum(self._seen[:, None] - sooner, back)
        return (back + _IMAGINED * _CHANCE) / (reached + _IMAGINED)

    def shares(self) -> npt.NDArray[np.float64]:
        """For each kind from twice on, what part it promises at least of what kinds of fewer uses do: 1, or less."""
        back = self._back.reshape(KINDS, AGES).sum(axis=1)
        likely = (back + _IMAGINED * _CHANCE) / (np.maximum(self._seen, back) + _IMAGINED)
        shares: npt.NDArray[np.float64] = np.minimum(1.0, _RARER * likely[2:] / np.maximum.accumulate(likely[1:-1]))
        return shares

    def table(self) -> npt.NDArray[np.float64]:
        """For each kind and age what is promised: hits per step of the clock."""
        chances = self.chances().T[:, :, None] * _ONWARD  # by age to come, kind, and age to begin with
        stay = 1.0 - chances
        still = np.cumprod(stay, axis=0)
        still /= stay  # not yet used when an age begins
        hits = np.cumsum(still * chances, axis=0)
        time = np.cumsum(still * (_ONWARD_WIDTHS - chances * _HALF_WIDTHS), axis=0)
        promised: npt.NDArray[np.float64] = (hits / np.maximum(time, _NO_TIME)).max(axis=0)
        shares = self.shares()
        if shares.min() >= 1.0:
            np.maximum.accumulate(promised[1:], axis=0, out=promised[1:])
        else:
            for kind, share in enumerate(shares.tolist(), 2):
                np.maximum(promised[kind], share * promised[1:kind].max(axis=0), out=promised[kind])
        np.minimum(promised[0], promised[1], out=promised[0])
        return promised

    def order(self, ages: Sequence[int]) -> npt.NDArray[np.intp]:
        """What has one of `ages`, the oldest first, and any kind, as `place in ages * KINDS + kind`.

        The least promising comes first; of equals the oldest, then the least used.
        """
        return np.argsort(self.table().T[ages].ravel(), kind="stable")
