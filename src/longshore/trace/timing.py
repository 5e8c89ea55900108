"""Durations in virtual time: prefill on the device, and transfers on each route.

    prefill of n tokens behind c others      step + alpha * n + beta * n * (2 * c + n) / 2
    a transfer                               fixed + bytes / bandwidth, one after the other on each route

A profile has the speeds of a machine and their source; each of them can be replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from longshore.boundary import DEVICE, FILE, HOST, Route
from longshore.errors import TraceError
from longshore.trace.geometry import Geometry
from longshore.trace.names import unknown
from longshore.trace.remote import REMOTE


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine. Bandwidths are in bytes per second, for one direction.

    Attributes:
        flops: Operations per second of prefill.
        step: Fixed seconds per step.
        link: Between device and host memory.
        file_read: From files to host memory.
        file_write: From host memory to files.
        remote_read: From a remote store to host memory.
        remote_write: From host memory to a remote store.
        fixed: Fixed seconds per transfer.
        remote_delay: Latency of the remote store in seconds, for lookups and transfers.
        source: Where the figures come from.
    """

    flops: float
    step: float
    link: float
    file_read: float
    file_write: float
    remote_read: float
    remote_write: float
    fixed: float
    remote_delay: float
    source: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_fine = field.name in ("step", "fixed", "remote_delay") and value == 0
            if field.name != "source" and not least_is_fine and not (math.isfinite(value) and value > 0):
                raise TraceError(f"{field.name}: expected a positive number, got {value}")


_REMOTE = "a store behind 25 Gbit/s Ethernet, 90 % of which are reached, that answers within 0.5 ms (assumed)"

PROFILES = {
    "h100": Profile(
        0.4 * 989e12, 0.005, 50e9, 6.8e9, 4.0e9, 2.8e9, 2.8e9, 1e-4, 5e-4,
        "H100: data sheet, 989 TFLOPS dense in 16 bits of which 40 % are reached (assumed); PCIe 5.0 x16 measured by "
        "others at 50-52 GB/s; one data-centre NVMe on PCIe 4.0 x4 by its data sheet, 6.8 GB/s read and 4.0 write; "
        + _REMOTE,
    ),
    "a100": Profile(
        0.5 * 312e12, 0.005, 25e9, 6.8e9, 4.0e9, 2.8e9, 2.8e9, 1e-4, 5e-4,
        "A100: data sheet, 312 TFLOPS dense in 16 bits of which 50 % are reached (assumed); PCIe 4.0 x16 at 25 GB/s; "
        "one data-centre NVMe on PCIe 4.0 x4 by its data sheet, 6.8 GB/s read and 4.0 write; " + _REMOTE,
    ),
}  # fmt: skip


def profile_named(name: str) -> Profile:
    """A built-in profile; raises `TraceError` for an unknown name."""
    if name not in PROFILES:
        raise unknown("a profile", name, PROFILES)
    return PROFILES[name]


def with_changes(profile: Profile, changes: Mapping[str, float | None], source: str) -> Profile:
    """`profile` with the `changes` that are not `None`, from `source`."""
    given = {name: value for name, value in changes.items() if value is not None}
    if not given:
        return profile
    return replace(profile, source=f"{profile.source}; {', '.join(given)} {source}", **given)


_MEASURED = {"read": "file_read", "write": "file_write", "onboard": "link", "prefill": "flops"}
"""Prefix of a case's name, and the field of a profile that it measures."""

_UNITS = {"GB/s": 1e9, "TFLOPS": 1e12}


def with_bench(profile: Profile, path: Path) -> Profile:
    """`profile` with the results of `longshore bench file`, `copy` or `prefill`, whose JSON is in the file at `path`.

    Of several sizes the largest counts: files from the cases `read/SIZE` and `write/SIZE`, the link from `onboard/SIZE`
    or from what `copy --device cuda --calibrate` says of its own choices, operations from `prefill/TOKENS`. Raises
    `TraceError` for a file without any of these.
    """
    expected = f"{path}: expected what `longshore bench file, copy or prefill --json` prints"
    try:
        report = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{expected}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(report, dict) or not {"cases", "chosen"} & report.keys():
        raise TraceError(f"{expected}, a JSON object with a field 'cases' or 'chosen'")
    try:
        found = _measured(report)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        least = "each of 'cases' has a name, a value and a unit; each of 'chosen' a direction and gb_per_s"
        raise TraceError(f"{expected}: {least}") from error
    if not found:
        names = ", ".join(f"{name}/..." for name in _MEASURED)
        raise TraceError(f"{path}: expected cases {names}, or a calibration, found none of them")
    return with_changes(profile, found, f"by {path.name}")


def _measured(report: Any) -> dict[str, float]:
    """What of a profile a benchmark's JSON says; of each what comes last, which is the largest size."""
    if "chosen" in report:
        rates = [float(line["gb_per_s"]) for line in report["chosen"] if line["direction"] == "onboard"]
        return {"link": 1e9 * max(rates)} if rates else {}
    cases = [(*case["name"].split("/"), case) for case in report["cases"]]
    return {
        _MEASURED[kind]: _UNITS[case["unit"]] * float(case["value"])
        for kind, *_, case in cases
        if kind in _MEASURED and case["unit"] in _UNITS
    }


class RouteSpeed(NamedTuple):
    """Speed of a route: fixed seconds per transfer, and bytes per second."""

    fixed: float
    rate: float

    def seconds(self, nbytes: int) -> float:
        """Seconds to transfer a number of bytes, without waiting."""
        return self.fixed + nbytes / self.rate


def prefill_operations(geometry: Geometry, context: int, tokens: int) -> float:
    """Operations to compute `tokens` after `context` other tokens."""
    pairs = tokens * (2 * context + tokens) / 2
    return 2 * geometry.parameters * tokens + 4 * geometry.attention_width * pairs


@dataclass(frozen=True, slots=True)
class Timing:
    """A model on a machine."""

    geometry: Geometry
    profile: Profile

    @property
    def alpha(self) -> float:
        """Seconds per token."""
        return 2 * self.geometry.parameters / self.profile.flops

    @property
    def beta(self) -> float:
        """Seconds per pair of tokens."""
        return 4 * self.geometry.attention_width / self.profile.flops

    def prefill(self, context: int, tokens: int) -> float:
        """Seconds to compute `tokens` after `context` other tokens."""
        return self.profile.step + prefill_operations(self.geometry, context, tokens) / self.profile.flops

    @property
    def paces(self) -> dict[Route, RouteSpeed]:
        """Speed of each route."""
        of, delay = self.profile, self.profile.fixed + self.profile.remote_delay
        return {
            Route(DEVICE, HOST): RouteSpeed(of.fixed, of.link),
            Route(HOST, DEVICE): RouteSpeed(of.fixed, of.link),
            Route(HOST, FILE): RouteSpeed(of.fixed, of.file_write),
            Route(FILE, HOST): RouteSpeed(of.fixed, of.file_read),
            Route(HOST, REMOTE): RouteSpeed(delay, of.remote_write),
            Route(REMOTE, HOST): RouteSpeed(delay, of.remote_read),
        }
