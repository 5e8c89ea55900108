"""Steps of a clock, in spans that are the longer the farther back they lie: nobody needs old dates exactly.

    step     0 ───────────────── 7 │ 8 ─── 11 │ 12 ── 13 │ 14 │ 15          now = 15
    span     level 3               │ level 2  │ level 1  │ level 0

Two neighbours of one level become one of the next as they get twice as far away. So what was sorted by spans stays so
at the cost of a few joins of whole lists at each step, as digits are carried in a binary number, and never has to be
looked at one by one. Of each level there are two at most, an even one and an odd one; the last level has one, without
end. The oldest step of a span lies less than four times as far back as the youngest.
"""

from __future__ import annotations

_LAST = 10
SPANS = 2 * _LAST + 1
"""Spans are numbered: 2 * level, and 1 more for an odd one."""


def span_of(step: int, now: int) -> int:
    """The span that `step` lies in at step `now`, which is no earlier."""
    level = (now + 1 - step).bit_length() - 1
    if now + 2 - (((step >> level) + 1) << level) < 1 << level:  # the level's span that it lies in is not yet joined
        level -= 1
    return 2 * level + (step >> level & 1) if level < _LAST else 2 * _LAST


def joins(now: int) -> list[tuple[int, int]]:
    """What becomes of spans when step `now` begins: each that is named, in this order, becomes a part of another."""
    level, joined = 0, []
    while level < _LAST and not (now + 2) & ((2 << level) - 1):
        into = 2 * (level + 1) + ((now + 2) >> (level + 1) & 1) if level + 1 < _LAST else 2 * _LAST
        joined += [(2 * level + 1, into), (2 * level, into)]
        level += 1
    return joined[::-1]


def oldest_first(now: int) -> tuple[list[int], list[int]]:
    """All spans at step `now`, the oldest first, and the last step of each, 0 for what was before all time.

    Those that are empty now are said to end where they did when they last were not.
    """
    spans, latest = [2 * _LAST], [((now + 2 >> _LAST) - 1 << _LAST) - 1]
    for level in range(_LAST - 1, -1, -1):
        youngest = (now + 2 >> level) - 2
        for each in (youngest - 1, youngest):
            spans.append(2 * level + (each & 1))
            latest.append((each + 1 << level) - 1)
    return spans, [max(0, step) for step in latest]
