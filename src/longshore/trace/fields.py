"""One JSON object of a trace and its position, for error messages."""

from __future__ import annotations

import json
import math
from typing import NoReturn

from longshore.cache.eviction.hit_rates import Return
from longshore.errors import TraceError

MAX_HASH_ID = 2**64 - 1


class Fields:
    """Typed access to the fields of an object; a wrong type or a missing field is a `TraceError`."""

    def __init__(self, where: str, fields: object) -> None:
        self.where = where
        if not isinstance(fields, dict):
            self.refuse("expected a JSON object", fields)
        self._fields: dict[str, object] = fields

    @classmethod
    def parse(cls, where: str, text: bytes) -> Fields:
        """Parse the JSON object in `text`, in UTF-8."""

        def constant(name: str) -> NoReturn:
            raise TraceError(f"{where}: expected JSON numbers, got {name}")

        try:
            return cls(where, json.loads(text.decode("utf-8"), parse_constant=constant))
        except TraceError:
            raise
        except (ValueError, RecursionError) as error:  # also bad UTF-8, and integers of absurd length
            raise TraceError(f"{where}: expected a JSON object in UTF-8: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def get(self, name: str) -> object:
        """The value of a field."""
        if name not in self._fields:
            raise TraceError(f"{self.where}: expected a field {name!r}, got {sorted(self._fields)}")
        return self._fields[name]

    def integer(self, name: str, *, least: int, default: int | None = None) -> int:
        """An integer of at least `least`."""
        if default is not None and name not in self._fields:
            return default
        value = self.get(name)
        if type(value) is not int or value < least:  # bool is an int, and no length
            self.refuse(f"expected {name!r} to be an integer of at least {least}", value)
        return value

    def milliseconds(self, name: str, *, default: float | None = None, unit: str = "milliseconds") -> float:
        """A time, in `unit`."""
        if default is not None and name not in self._fields:
            return default
        value = self.get(name)
        expected = f"expected {name!r} to be {unit}, a finite number of at least 0"
        if type(value) is not int and type(value) is not float:
            self.refuse(expected, value)
        try:
            found = float(value)
        except OverflowError:
            self.refuse(expected, value)
        if not math.isfinite(found) or found < 0:
            self.refuse(expected, value)
        return found

    def items(self, name: str) -> list[object]:
        """A list."""
        value = self.get(name)
        if not isinstance(value, list):
            self.refuse(f"expected {name!r} to be a list", value)
        return value

    def integers(self, name: str, *, most: int, one: str) -> tuple[int, ...]:
        """A list of integers from 0 to `most`; error messages call an element `one`."""
        value = self.items(name)
        for item in value:
            if type(item) is not int or not 0 <= item <= most:
                self.refuse(f"expected every {one} to be an integer from 0 to {most}", item)
        return tuple(value)  # type: ignore[arg-type]  # all are integers

    def returns(self) -> Return | None:
        """What the optional fields `ends`, `returns_in` (seconds) and `class` say about the request's return."""
        if not any(name in self._fields for name in ("ends", "returns_in", "class")):
            return None
        ends, kind = self._fields.get("ends", False), self._fields.get("class", "")
        if not isinstance(ends, bool):
            self.refuse("expected 'ends' to be true or false", ends)
        if not isinstance(kind, str):
            self.refuse("expected 'class' to be text", kind)
        seconds = self.milliseconds("returns_in", default=-1.0, unit="seconds")
        if ends and seconds >= 0:
            self.refuse("expected 'ends' or 'returns_in', got both", (ends, seconds))
        return Return(ends, None if seconds < 0 else seconds, kind)

    def covers(self, hashes: int, tokens: int, block_tokens: int) -> None:
        """Raise unless `hashes` is the number of blocks for `tokens`."""
        blocks = -(-tokens // block_tokens)
        if hashes != blocks:
            raise TraceError(
                f"{self.where}: expected {blocks} hash ids for {tokens} tokens of input "
                f"in blocks of {block_tokens}, got {hashes}"
            )

    def refuse(self, expected: str, value: object) -> NoReturn:
        """Raise `TraceError`, showing the value found."""
        shown = repr(value) if not isinstance(value, int) else _short_integer(value)
        raise TraceError(f"{self.where}: {expected}, got {shown[:80]}")


def _short_integer(value: int) -> str:
    """`repr`, without the limit on digits that Python sets."""
    return repr(value) if value.bit_length() < 256 else f"an integer of {value.bit_length()} bits"
