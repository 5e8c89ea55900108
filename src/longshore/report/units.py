"""Formatting of quantities."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Bytes: `"640 B"`, `"12.5 MiB"`."""
    value, step = float(count), 0
    while abs(value) >= 1024 and step < len(_BYTES) - 1:
        value, step = value / 1024, step + 1
    return f"{value:,.1f} {_BYTES[step]}" if step else f"{value:,.0f} B"


def milliseconds(value: float | None) -> str:
    """`"4.2 ms"`, `"431 ms"`; a dash for nothing measured."""
    if value is None:
        return "\u2013"
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def share(part: float, whole: float) -> str:
    """`"37.5 %"`; a dash of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "\u2013"


def times(numerator: float | None, denominator: float | None) -> str:
    """How many times, to one decimal; a dash where either is missing."""
    if numerator is None or not denominator:
        return "\u2013"
    return f"{numerator / denominator:.1f}\u00d7"
