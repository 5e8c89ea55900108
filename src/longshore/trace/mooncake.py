"""Reader of the Mooncake trace format: JSON lines, one request each.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2354]}

`timestamp` is in milliseconds. `hash_ids` has one id per 512-token block of the prompt, the partial last
block included. Lines are read as a stream, so a trace may be larger than memory. What the host of a request knows about
its return may be there, too: `"ends": true`, `"returns_in": SECONDS`, `"class": NAME`. Other keys are ignored; an
invalid line is a `TraceError` that names the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path

from longshore.errors import TraceError
from longshore.trace.fields import MAX_HASH_ID, Fields
from longshore.trace.lines import Skip, in_order, parse_lines, read_lines
from longshore.trace.request import TraceRequest

TRACE_BLOCK_TOKENS = 512
"""Tokens per hash id."""

EXCERPT = "conversation_excerpt.jsonl"
"""The excerpt inside the package: lines of Mooncake's conversation trace (see `data/NOTICE`)."""


def read_mooncake(
    path: str | Path, *, block_tokens: int = TRACE_BLOCK_TOKENS, skip: Skip | None = None
) -> Iterator[TraceRequest]:
    """Yield the requests of the trace at `path`, in file order.

    Args:
        path: A file of JSON lines. Blank lines are skipped.
        block_tokens: Tokens per hash id, for traces of this format with other block sizes.
        skip: Called for invalid lines, which are then skipped.

    Raises:
        TraceError: The file cannot be read, or, without `skip`, a line is invalid or has an earlier timestamp than the
            one before it.
    """
    yield from read_lines(path, _request(block_tokens), skip)


def read_excerpt() -> Iterator[TraceRequest]:
    """Yield the requests of the excerpt that ships with the package."""
    with resources.files("longshore.trace").joinpath("data", EXCERPT).open("rb") as lines:
        yield from parse_mooncake(lines, source=EXCERPT)


def parse_mooncake(
    lines: Iterable[bytes],
    *,
    source: str = "trace",
    block_tokens: int = TRACE_BLOCK_TOKENS,
    skip: Skip | None = None,
) -> Iterator[TraceRequest]:
    """Yield one request per line that is not blank; `source` is for error messages."""
    yield from parse_lines(lines, source, _request(block_tokens), skip)


def _request(block_tokens: int) -> Callable[[str, bytes], TraceRequest]:
    if block_tokens < 1:
        raise TraceError(f"block_tokens: expected at least 1, got {block_tokens}")

    def request(where: str, line: bytes) -> TraceRequest:
        fields = Fields.parse(where, line)
        input_length = fields.integer("input_length", least=1)
        timestamp, output_length = fields.milliseconds("timestamp"), fields.integer("output_length", least=0)
        hash_ids = fields.integers("hash_ids", most=MAX_HASH_ID, one="hash id")
        fields.covers(len(hash_ids), input_length, block_tokens)
        return TraceRequest(timestamp, input_length, output_length, hash_ids, returns=fields.returns())

    return in_order(request)
