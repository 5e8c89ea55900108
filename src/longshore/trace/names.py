"""Errors for unknown names, with suggestions."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from longshore.errors import TraceError


def unknown(what: str, name: str, known: Iterable[str]) -> TraceError:
    """The error for a `name` that is not in `known`, with all known names and the most similar one."""
    names = list(known)
    nearest = get_close_matches(name.lower(), names, 1)
    guess = f"; did you mean {nearest[0]}?" if nearest else ""
    return TraceError(f"expected {what} out of {', '.join(names)}, got {name!r}{guess}")
