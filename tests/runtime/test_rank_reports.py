"""Reports of ranks: none on a load that has not ended is overwritten by one on a later load."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from longshore.runtime.rank_reports import RankReports


@pytest.fixture
def reports() -> Iterator[RankReports]:
    made = RankReports.make(slots=1, world=2, ranks=2)
    yield made
    made.close()


def begun(reports: RankReports, tickets: Iterator[int]) -> int:
    """The ticket of the next load."""
    return next(ticket for ticket in islice(tickets, RankReports.LOADS) if reports.begin_load(ticket))


def test_a_slow_rank_does_not_lose_the_reports_of_others(reports: RankReports) -> None:
    tickets = count(1)
    slow = begun(reports, tickets)
    reports.loaded(slow, 0, good=False)
    for _ in range(3 * RankReports.LOADS):
        quick = begun(reports, tickets)
        for rank in range(2):
            reports.loaded(quick, rank, good=True)
        assert reports.load_has_ended(quick)
        reports.end_load(quick)
        assert not reports.load_has_ended(slow)
        assert reports.load_has_failed(slow)
    reports.loaded(slow, 1, good=True)
    assert reports.load_has_ended(slow)
    assert not reports.begin_load(slow + RankReports.LOADS), "nobody has read that it failed"
    reports.end_load(slow)
    assert reports.begin_load(slow + RankReports.LOADS)
