"""One request of a trace, whatever file format it came from."""

from __future__ import annotations

from dataclasses import dataclass

from longshore.cache.eviction.hit_rates import Return


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: Arrival, in milliseconds since the trace began.
        input_length: Tokens of the prompt.
        output_length: Tokens of the answer.
        hash_ids: One id per block of the prompt, in order; the last block may be partial. Equal ids mean equal content
            after an equal prefix.
        assumed_time: Whether the trace has no timestamp for it.
        returns: What its host knows about when its blocks are used again, if the trace says so.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    assumed_time: bool = False
    returns: Return | None = None
