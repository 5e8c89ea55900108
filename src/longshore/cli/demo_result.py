"""Results of the three runs of `longshore demo`, as plain data.

tiered      small device cache, host and file tiers
resident    a device cache that never evicts, matches cut to tiered's lengths: what tiered must equal
recompute   the small device cache and no tiers: what tiered must beat
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

SOURCES = ("device", "host", "file", "computed")
"""Sources of a prompt's tokens, warmest first."""

RESTORING = ("host", "file")
"""The tiers that blocks are restored from."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request of one run.

    Attributes:
        index: Position in the workload.
        prompt_tokens: Length of the prompt; the four counts below add up to it.
        device_tokens: Of them, found on the device.
        host_tokens: Restored from the host tier.
        file_tokens: Restored from the file tier.
        computed_tokens: Computed.
        ttft_ms: Time to first token.
        returning: Whether earlier prompts left more to reuse than what all requests share.
        tokens: Generated token ids.
        logprobs: Of those tokens, one each.
    """

    index: int
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    file_tokens: int
    computed_tokens: int
    ttft_ms: float
    returning: bool
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    def tokens_from(self, source: str) -> int:
        """Prompt tokens from one of `SOURCES`."""
        counts = (self.device_tokens, self.host_tokens, self.file_tokens, self.computed_tokens)
        return counts[SOURCES.index(source)]


@dataclass(frozen=True, slots=True)
class OccupancySample:
    """Bytes in each tier at one moment: `seconds` into the run, after `request`."""

    seconds: float
    request: int
    device_bytes: int
    host_bytes: int
    file_bytes: int

    def bytes_in(self, tier: str) -> int:
        """Bytes in `"device"`, `"host"` or `"file"`."""
        counts = (self.device_bytes, self.host_bytes, self.file_bytes)
        return counts[SOURCES.index(tier)]


@dataclass(frozen=True, slots=True)
class RouteTotal:
    """Bytes transferred on one route, and seconds spent transferring."""

    bytes: int
    seconds: float

    @property
    def gbps(self) -> float:
        """10**9 bytes per second; zero when nothing moved."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run over the workload.

    Attributes:
        name: `"tiered"`, `"resident"` or `"recompute"`.
        requests: In order.
        occupancy: In order of time.
        routes: By `"source->destination"`.
        restored_blocks: By tier.
        misses: By reason.
        seconds: The whole run.
    """

    name: str
    requests: tuple[RequestRecord, ...]
    occupancy: tuple[OccupancySample, ...]
    routes: Mapping[str, RouteTotal]
    restored_blocks: Mapping[str, int]
    misses: Mapping[str, int]
    seconds: float

    def tokens_from(self, source: str) -> int:
        """Prompt tokens of all requests from one of `SOURCES`."""
        return sum(request.tokens_from(source) for request in self.requests)

    def ttft(self, percent: float) -> float | None:
        """Percentile of TTFT over returning requests, in milliseconds; `None` without any."""
        return percentile([request.ttft_ms for request in self.requests if request.returning], percent)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The three runs.

    Attributes:
        setup: Facts about machine, model and workload, in display order.
        tiered: With tiers.
        resident: What `tiered` must equal.
        recompute: What `tiered` must beat.
        capacities: Bytes by tier, in the tiered run.
    """

    setup: Mapping[str, str]
    tiered: RunRecord
    resident: RunRecord
    recompute: RunRecord
    capacities: Mapping[str, int]

    @property
    def first_difference(self) -> tuple[int, int] | None:
        """Request index and position in its answer where tiered and resident first differ.

        A token without a log-probability counts as a difference.
        """
        for number, (ours, theirs) in enumerate(zip_longest(self.tiered.requests, self.resident.requests)):
            if ours is None or theirs is None:
                return number, 0
            if ours.index != theirs.index:
                return ours.index, 0
            position = _first_difference(ours, theirs)
            if position is not None:
                return ours.index, position
        return None

    @property
    def differences(self) -> tuple[int, int]:
        """How many tokens, and how many log-probabilities, differ between tiered and resident."""
        pairs = list(zip(self.tiered.requests, self.resident.requests, strict=False))
        tokens = [zip_longest(ours.tokens, theirs.tokens) for ours, theirs in pairs]
        logprobs = [zip_longest(map(_bits, ours.logprobs), map(_bits, theirs.logprobs)) for ours, theirs in pairs]
        ours, theirs = (sum(a != b for a, b in chain.from_iterable(each)) for each in (tokens, logprobs))
        return ours, theirs

    @property
    def bit_exact(self) -> bool:
        """Whether every token and log-probability of tiered equals resident's, to the bit.

        Runs without generated tokens are not equal.
        """
        return any(request.tokens for request in self.tiered.requests) and self.first_difference is None

    @property
    def restored(self) -> dict[str, int]:
        """Blocks that tiered restored, by tier; zero for one that never served."""
        return {tier: self.tiered.restored_blocks.get(tier, 0) for tier in RESTORING}

    @property
    def generated_tokens(self) -> int:
        """Tokens that tiered generated: how many were compared."""
        return sum(len(request.tokens) for request in self.tiered.requests)

    def as_json(self) -> dict[str, object]:
        """The facts that `longshore demo --json` prints, ready for `json.dumps`."""
        return {
            "bit_exact": self.bit_exact,
            "requests": len(self.tiered.requests),
            "restored_blocks": self.restored,
            "ttft_ms": {run.name: {"p50": run.ttft(50), "p95": run.ttft(95)} for run in (self.recompute, self.tiered)},
            "tokens": {source: self.tiered.tokens_from(source) for source in SOURCES},
            "routes": {name: {"bytes": total.bytes, "gbps": total.gbps} for name, total in self.tiered.routes.items()},
            "misses": dict(self.tiered.misses),
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the nearest ranks; `None` of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def _first_difference(ours: RequestRecord, theirs: RequestRecord) -> int | None:
    """Position of the first token that differs, in itself or in its log-probability."""
    answers = (ours.tokens, ours.logprobs, theirs.tokens, theirs.logprobs)
    shortest = min(len(answer) for answer in answers)
    for position in range(shortest):
        if ours.tokens[position] != theirs.tokens[position]:
            return position
        if _bits(ours.logprobs[position]) != _bits(theirs.logprobs[position]):
            return position
    return shortest if any(len(answer) != shortest for answer in answers) else None


def _bits(value: float) -> bytes:
    """A float as its bytes: NaN equals itself, and negative zero differs from zero."""
    return struct.pack("<d", value)
