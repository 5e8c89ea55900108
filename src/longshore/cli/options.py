"""Parsing of option values (sizes, rates, times, numbers), and checks against the machine."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from longshore.config import available_memory, format_bytes, parse_size
from longshore.errors import ConfigError

_NUMBER = re.compile(r"[0-9]*\.?[0-9]+")
_RATE = re.compile(rf"{_NUMBER.pattern}\s*[A-Za-z]+(/s)?")
_BITS_OR_BYTES = re.compile(rf"({_NUMBER.pattern})\s*([kKMGT])b(/s)?")
_LONGEST_TIME = 365 * 86_400.0
_MOST = 10**12


def size_of(text: str, option: str, least: int = 1) -> int:
    """Bytes of a size such as `64GiB`, at least `least`; raises `ConfigError`."""
    try:
        count = parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}, got {text[:80]!r}") from None
    if not count:
        raise ConfigError(f"{option}: expected a size above zero, such as 64GiB, got {text[:80]!r}")
    if count < least:
        hint = f"; did you mean {text.strip()}GiB?" if _NUMBER.fullmatch(text.strip()) else ""
        raise ConfigError(f"{option} {text[:80]}: expected at least {format_bytes(least)}, one block{hint}")
    return count


def rate_of(text: str, option: str) -> int:
    """Bytes per second of a rate with a unit, such as `50GB/s`. Raises `ConfigError`."""
    given = text.strip()
    if re.fullmatch(r"[0.]+[^0-9]*", given):
        raise ConfigError(f"{option}: expected a rate above zero, such as 50GB/s, got {text[:80]!r}")
    if _NUMBER.fullmatch(given):
        raise ConfigError(f"{option}: expected a unit, got {text[:80]!r}; did you mean {given[:80]}GB/s?")
    if found := _BITS_OR_BYTES.fullmatch(given):
        number, prefix, _ = found.groups()
        raise ConfigError(f"{option}: expected {number}{prefix}B/s (bytes) or {number}{prefix}bit/s, got {text[:80]!r}")
    if not _RATE.fullmatch(given):
        raise ConfigError(f"{option}: expected a rate such as 50GB/s or 25Gbit/s, got {text[:80]!r}")
    try:
        if rate := parse_size(given.removesuffix("/s")):
            return rate
    except ValueError as error:
        raise ConfigError(f"{option}: expected a rate such as 50GB/s, got {text[:80]!r}: {error}") from None
    raise ConfigError(f"{option}: expected at least one byte per second, got {text[:80]!r}")


def seconds_of(text: str, option: str) -> float:
    """Seconds of a time such as `500ms` or `2s`; raises `ConfigError`."""
    for unit, factor in (("us", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            try:
                seconds = float(text.removesuffix(unit)) * factor
            except ValueError:
                break
            if 0 < seconds <= _LONGEST_TIME:
                return seconds
            break
    raise ConfigError(f"{option}: expected a time such as 500ms or 2s, got {text[:80]!r}")


def counts_of(text: str, option: str, least: int) -> list[int]:
    """Comma-separated whole numbers of at least `least`, such as `10000,1000000`; raises `ConfigError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 20 and least <= int(part) < _MOST for part in parts):
        raise ConfigError(
            f"{option}: expected whole numbers of at least {least} with commas between, such as {max(least, 512)},"
            f"{4 * max(least, 512)}; got {text[:80]!r}"
        )
    return [int(part) for part in parts]


def settings_of(texts: Sequence[str]) -> dict[str, str]:
    """Settings from texts `KEY=VALUE`, not yet checked; the last of several for one key wins. Raises `ConfigError`."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text[:80]}: expected KEY=VALUE, as in --set offload=write_back")
        settings[key] = value
    return settings


def check_memory(needed: float, option: str, given: object, count: int, unit: str = "") -> None:
    """Raise `ConfigError` if the machine does not have `needed` bytes of memory.

    `needed` is proportional to `count`, the value `given` for `option`, as a number or in a `unit` of sizes.
    """
    _check(needed, available_memory(), "of memory", "available", option, given, count, unit)


def check_room(needed: float, directory: Path, option: str, given: object, count: int, unit: str = "") -> None:
    """Raise `ConfigError` if the file system of `directory` does not have `needed` bytes free; as `check_memory`."""
    free = shutil.disk_usage(directory).free
    _check(needed, free, "on disk", f"free at {directory}", option, given, count, unit)


def _check(needed: float, had: int, what: str, where: str, option: str, given: object, count: int, unit: str) -> None:
    if needed > had:
        most = int(count * (had / needed)) // (1 << 20 if unit == "MiB" else 1)
        raise ConfigError(
            f"{option} {given} needs {format_bytes(needed)} {what}, but only {format_bytes(had)} is {where}: "
            + (f"pass at most {option} {most}{unit}" if most else "this machine is too small for it")
        )


def existing(option: str, path: Path) -> Path:
    """`path`, which is a directory; raises `ConfigError`."""
    try:
        with os.scandir(path):
            return path
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path}: {getattr(error, 'strerror', None) or error}") from error
