"""Spans: every step lies in one of them, they are joined and never divided, and the old ones are long."""

from __future__ import annotations

from longshore.cache.eviction.spans import SPANS, joins, oldest_first, span_of

STEPS = 5000


def test_joins_bring_every_step_to_the_span_that_it_lies_in() -> None:
    spans: dict[int, list[int]] = {span: [] for span in range(SPANS)}
    for now in range(STEPS):
        for span, into in joins(now) if now else []:
            spans[into] += spans[span]
            spans[span] = []
        assert not spans[span_of(now, now)]
        spans[span_of(now, now)] = [now]
        for span in range(SPANS):
            assert {span_of(step, now) for step in spans[span]} <= {span}
        order, latest = oldest_first(now)
        assert sorted(order) == list(range(SPANS))
        assert [step for span in order for step in spans[span]] == list(range(now + 1))
        assert all(spans[span][-1] == last for span, last in zip(order, latest, strict=True) if spans[span])


def test_the_oldest_step_of_a_span_lies_less_than_twice_as_far_back_as_the_youngest() -> None:
    now, steps = STEPS, range(STEPS + 1)
    for span in range(SPANS - 1):
        back = [now + 1 - step for step in steps if span_of(step, now) == span]
        assert not back or max(back) < 2 * min(back)
    assert now + 1 - max(step for step in steps if span_of(step, now) == SPANS - 1) >= 1024
