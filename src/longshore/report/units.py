"""Quantities as reports write them: in one format, everywhere."""

from __future__ import annotations

import math
import re
from html import escape as escape_all

_UNIT = re.compile(r"(?<=[0-9]) (?=(?:%|[mu]?s|[KMGTP]?i?B|[KMGTP]i?B/s)(?![A-Za-z]))")


def escape(text: str) -> str:
    """`text` for HTML; a number and its unit stay on one line."""
    return _UNIT.sub("\u00a0", escape_all(text))


def quantity(value: float) -> str:
    """Three significant digits, or a whole number with separators: `"0.0421"`, `"4.21"`, `"421"`, `"42,100"`."""
    if not value or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    rounded = float(f"{value:.2e}")
    places = 2 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.0f}" if places <= 0 else f"{rounded:.{places}f}"


def seconds(value: float | None) -> str:
    """`"4.21 ms"`, `"431 ms"`, `"1.32 s"`; a dash for nothing measured."""
    if value is None:
        return "\u2013"
    return f"{quantity(1000 * value)} ms" if 0 < abs(value) < 0.9995 else f"{quantity(value)} s"


def milliseconds(value: float | None) -> str:
    """As `seconds`, of a time in milliseconds."""
    return seconds(None if value is None else value / 1000)


def share(part: float, whole: float) -> str:
    """`"37.5 %"`, `"< 0.1 %"`; a dash of nothing."""
    if not whole:
        return "\u2013"
    return "< 0.1 %" if 0 < part / whole < 0.0005 else f"{100 * part / whole:.1f} %"


def times(numerator: float | None, denominator: float | None) -> str:
    """How many times, in three digits; a dash where either is missing."""
    if numerator is None or not denominator:
        return "\u2013"
    return f"{quantity(numerator / denominator)}\u00d7"
