"""Quantities as people read them."""

import pytest

from longshore.report.page import milliseconds, share, size, times


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 50, "5,120.0 TiB")],
)
def test_size(count: int, text: str) -> None:
    assert size(count) == text


def test_the_rest() -> None:
    assert (milliseconds(4.21), milliseconds(431.4), milliseconds(None)) == ("4.2 ms", "431 ms", "\u2013")
    assert (share(1, 8), share(0, 0)) == ("12.5 %", "\u2013")
    assert (times(10, 4), times(None, 4), times(10, 0)) == ("2.5\u00d7", "\u2013", "\u2013")
