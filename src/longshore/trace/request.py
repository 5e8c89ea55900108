"""One request of a trace, whatever file format it came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """What a trace says of one request.

    Attributes:
        timestamp_ms: Arrival, in milliseconds since the trace began.
        input_length: Tokens of the prompt.
        output_length: Tokens of the answer.
        hash_ids: One id per block of the prompt, in order; the last block may be partial. Equal ids stand for
            equal content after an equal prefix.
        assumed_time: Whether the trace does not say when it arrived.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    assumed_time: bool = False
