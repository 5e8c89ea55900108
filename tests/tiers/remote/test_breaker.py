"""When a server is left alone, by readings of a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.tiers.remote.breaker import LONGEST_PAUSE, STABLE, CircuitBreaker


def open_it(breaker: CircuitBreaker, now: float) -> None:
    assert [breaker.failed(now) for _ in range(3)] == [False, False, True]


def test_three_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker()
    for _ in range(5):
        assert not breaker.failed(0.0)
        assert not breaker.failed(0.0)
        breaker.succeeded()
    open_it(breaker, 1.0)
    assert breaker.is_open
    assert not breaker.failed(1.0)
    assert breaker.opened == 1


def test_first_answer_closes_the_breaker_within_a_second() -> None:
    breaker = CircuitBreaker()
    open_it(breaker, 10.0)
    assert breaker.check_due(10.0) == pytest.approx(1.0)
    assert not breaker.checked(11.0, answers=False)
    assert breaker.check_due(11.0) == pytest.approx(1.0)
    assert breaker.checked(12.0, answers=True)
    assert not breaker.is_open


def test_old_requests_that_succeed_do_not_close_it() -> None:
    breaker = CircuitBreaker()
    open_it(breaker, 0.0)
    breaker.succeeded()
    assert breaker.is_open


def test_a_server_that_flaps_pauses_for_longer_each_time() -> None:
    breaker, now, pauses = CircuitBreaker(), 0.0, []
    for _ in range(9):
        open_it(breaker, now)
        opened = now
        while breaker.is_open:
            now += max(0.0, breaker.check_due(now))
            breaker.checked(now, answers=True)
        pauses.append(now - opened)
        now += 0.5
    assert pauses == pytest.approx([1, 1, 2, 4, 8, 16, LONGEST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE])
    now += STABLE
    open_it(breaker, now)
    assert breaker.checked(now + 1, answers=True)


@given(st.lists(st.tuples(st.sampled_from(["fail", "ok", "check", "no"]), st.floats(0, 5))))
def test_a_server_that_answers_is_back_within_the_longest_pause(events: list[tuple[str, float]]) -> None:
    breaker, now = CircuitBreaker(), 0.0
    for event, seconds in events:
        now += seconds
        if event == "fail":
            breaker.failed(now)
        elif event == "ok":
            breaker.succeeded()
        elif breaker.is_open:
            breaker.checked(now, answers=event == "check")
    last = now
    while breaker.is_open:
        now += max(0.0, breaker.check_due(now))
        breaker.checked(now, answers=True)
    assert now - last <= LONGEST_PAUSE + 1
