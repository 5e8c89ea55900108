"""Hints about when a request's chunks are used again, as small numbers for eviction policies.

    0              nothing was said
    1              `ends`: nobody will come back
    2, 3, ... 7    `seconds`: back within 4, 16, 64, 256, 1,024 requests, or later; by the rate of the last requests
    8, ... 11      a class of requests; those that were named after the first three share the last number

A hint is a kind of use, not an order: the policy learns for each number how long it takes until such chunks are used
again, and whether they are. So a hint that is often wrong says little, and does little.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

from longshore.errors import CacheError

ENDS, BACK, CLASS, HINTS = 1, 2, 8, 12
"""The number of `ends`, the first ones of times and of classes, and how many there are."""

_WITHIN = [4**power for power in range(1, CLASS - BACK)]

_WINDOW = 256
"""The rate is that of the last one to two windows of so many requests."""

_REMEMBERED = 4096
"""Requests with a hint, of those that began last, whose hint is known when they go on."""


class Return(NamedTuple):
    """What the host of a request knows about when its chunks are used again.

    Attributes:
        ends: They are not: nobody will come back.
        seconds: In so many seconds, from the first call on: a tool call is out, for example.
        of: Name of a class of requests whose chunks are used again after alike times.
    """

    ends: bool = False
    seconds: float | None = None
    of: str = ""


class Returns:
    """Hints as numbers, by turn; classes in the order in which they were named."""

    def __init__(self) -> None:
        self._classes: dict[str, int] = {}
        self._hints: dict[int, int] = {}
        self._marks: list[tuple[int, float]] = []
        """Turns and times at which a window began: of the last two."""

    def begin(self, turn: int, now: float, said: Return | None) -> int:
        """The request of this turn begins, at `now` seconds; the number of its hint."""
        if not self._marks or turn - self._marks[-1][0] >= _WINDOW:
            self._marks = [*self._marks[-1:], (turn, now)]
        hint = 0 if said is None else self._number(turn, now, said)
        if hint:
            self._hints[turn] = hint
            if len(self._hints) > _REMEMBERED:
                del self._hints[next(iter(self._hints))]
        return hint

    def of(self, turn: int) -> int:
        """The number of the hint of a request that goes on."""
        return self._hints.get(turn, 0)

    def _number(self, turn: int, now: float, said: Return) -> int:
        if said.ends:
            return ENDS
        (since, then) = self._marks[0]
        passed = now - then
        if said.seconds is not None and passed > 0:
            return BACK + bisect_right(_WITHIN, said.seconds * (turn - since) / passed)
        if not said.of:
            return 0
        if said.of not in self._classes and len(self._classes) < HINTS - CLASS - 1:
            self._classes[said.of] = CLASS + len(self._classes)
        return self._classes.get(said.of, HINTS - 1)


def check(said: Return | None) -> None:
    """Raise `CacheError` for a hint that cannot be."""
    if said is None:
        return
    if not isinstance(said, Return) or not isinstance(said.ends, bool) or not isinstance(said.of, str):
        raise CacheError(f"expected a Return, got {said!r}")
    if said.seconds is not None and (said.ends or not 0 <= said.seconds < math.inf):
        raise CacheError(f"chunks are used again in a finite number of seconds, or never, got {said}")
