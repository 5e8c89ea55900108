"""Quantities as people read them."""

import pytest

from longshore.report.units import escape, milliseconds, quantity, seconds, share, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.04214, "0.0421"),
        (4.2, "4.20"),
        (99.96, "100"),
        (421.4, "421"),
        (42_100, "42,100"),
        (-1.234, "-1.23"),
    ],
)
def test_a_quantity_has_three_digits(value: float, text: str) -> None:
    assert quantity(value) == text


def test_times_and_shares() -> None:
    assert (seconds(0.00421), seconds(0.9996), seconds(0.9994), seconds(1234.5)) == (
        "4.21 ms", "1.00 s", "999 ms", "1,234 s",
    )  # fmt: skip
    assert (seconds(0), seconds(None)) == ("0 s", "\u2013")
    assert (milliseconds(4.21), milliseconds(431.4), milliseconds(None)) == ("4.21 ms", "431 ms", "\u2013")
    assert (share(1, 8), share(0, 0), share(0, 9), share(1, 9000)) == ("12.5 %", "\u2013", "0.0 %", "< 0.1 %")
    assert (times(10, 4), times(None, 4), times(10, 0)) == ("2.50\u00d7", "\u2013", "\u2013")


def test_a_number_and_its_unit_stay_on_one_line() -> None:
    assert escape("12 ms & 4 GiB of it, 3 seconds") == "12\u00a0ms &amp; 4\u00a0GiB of it, 3 seconds"
