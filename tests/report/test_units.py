"""Quantities as people read them."""

from longshore.report.units import milliseconds, share, times


def test_times_and_shares() -> None:
    assert (milliseconds(4.21), milliseconds(431.4), milliseconds(None)) == ("4.2 ms", "431 ms", "\u2013")
    assert (share(1, 8), share(0, 0)) == ("12.5 %", "\u2013")
    assert (times(10, 4), times(None, 4), times(10, 0)) == ("2.5\u00d7", "\u2013", "\u2013")
