"""Messages between the engine's process and a tier host, the process of one tier: packed numbers, a few of them JSON.

    engine                                            tier host
    OPEN       what to open (JSON)             ──►
                                               ◄──    OPENED     what is there, and all chunks found; of a store nothing
                                               ◄──    REFUSED    why it cannot be opened (JSON), and the end
    SUBMIT     ticket, deadline, operations    ──►
    CANCEL     ticket                          ──►
                                               ◄──    RESULT     ticket, bytes, seconds, statuses: one for each SUBMIT
    ASK        ticket, deadline, keys          ──►                                                       (stores only)
                                               ◄──    ANSWER     ticket, what is there; nothing: not known
    RESET      generation, scope or namespace  ──►
                                               ◄──    RESET_DONE why it could not be done; nothing if it was
                                               ◄──    FAILURES   counts by reason (JSON), whenever they change
                                               ◄──    ALIVE      operations carried out until now; each second, if busy
    end of file                                ──►    it finishes what it has begun, and ends

No request is sent before OPENED. Both sides run the same version, which OPEN names. Clocks are `CLOCK_MONOTONIC`, which
all processes share. Nothing is pickled, and every answer is validated: `WireError`.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from longshore.boundary import Key, Slabs, Status, StoredChunks
from longshore.errors import LayoutError, PlanError
from longshore.tiers.base import KEY_BYTES, Op, TierOp, TierResult

NUMBER = struct.Struct("<Q")
"""The body of CANCEL, a ticket; and of ALIVE, the number of operations carried out."""

RESET = struct.Struct("<Q32s")
"""The body of RESET: generation, and scope or namespace."""

_HEAD = struct.Struct("<BQ")
_SUBMIT = struct.Struct("<Qd")
_OP = struct.Struct("<BBHIqQQQ32s32s")  # kind, has a parent, size class, 0, slot, offset, length, generation, keys
_ASK = struct.Struct("<QQd")
_RESULT = struct.Struct("<QQdd")
_FOUND = np.dtype([("slot", "<u8"), ("size_class", "<u2"), ("has_parent", "?"), ("key", "V32"), ("parent", "V32")])

_OPS = tuple(Op)
_OP_NUMBERS = {op: number for number, op in enumerate(_OPS)}
_STATUSES = tuple(Status)
_STATUS_NUMBERS = {status: number for number, status in enumerate(_STATUSES)}
_NO_PARENT = bytes(32)


class WireError(ValueError):
    """Invalid bytes from a tier host."""


class Kind(enum.IntEnum):
    """Kind of a frame."""

    OPEN = 1
    SUBMIT = 2
    CANCEL = 3
    RESET = 4
    OPENED = 5
    REFUSED = 6
    RESULT = 7
    RESET_DONE = 8
    FAILURES = 9
    DELETE_RECORDS = 10
    ALIVE = 11
    ASK = 12
    ANSWER = 13


AWAY = "away"
"""Beside the counts of a store's failures: whether it is left alone at present."""

_KINDS = frozenset(Kind)

_MOST_BYTES = 1 << 40
"""Largest frame in bytes; OPENED lists all chunks."""


class OpenedReply(NamedTuple):
    """A tier host's tier: as in `Tier`, with the chunks found and the slots with records of other scopes."""

    slabs: Slabs
    generation: int
    fallbacks: dict[str, int]
    failures: dict[str, int]
    found: StoredChunks
    other_scope_slots: list[int]


class Frames:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[tuple[Kind, bytes]]:
        """The frames that `data` completes. Raises `WireError` for an unknown kind."""
        self._pending += data
        begin, frames = 0, []
        while len(self._pending) - begin >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._pending, begin)
            if kind not in _KINDS or length > _MOST_BYTES:
                raise WireError(f"invalid frame of kind {kind} with {length} bytes")
            end = begin + _HEAD.size + length
            if len(self._pending) < end:
                break
            frames.append((Kind(kind), bytes(self._pending[begin + _HEAD.size : end])))
            begin = end
        del self._pending[:begin]
        return frames


@contextlib.contextmanager
def checked(what: str) -> Iterator[None]:
    """Context manager that turns parsing errors in a message (`what`) into `WireError`."""
    try:
        yield
    except (struct.error, ValueError, TypeError, LookupError, OverflowError, RecursionError, LayoutError) as error:
        raise WireError(f"{what}: {error}") from error


def frame(kind: Kind, body: bytes = b"") -> bytes:
    """One frame."""
    return _HEAD.pack(kind, len(body)) + body


def pack_json(value: Any) -> bytes:
    """The body of OPEN, REFUSED and FAILURES."""
    return json.dumps(value).encode()


def pack_submit(ticket: int, deadline: float, ops: Sequence[TierOp]) -> bytes:
    """The body of SUBMIT, for validated operations."""
    parts = [_SUBMIT.pack(ticket, deadline)]
    for op, slot, key, parent, offset, length, generation, size_class in ops:
        parent_bytes, has_parent = (_NO_PARENT, 0) if parent is None else (parent, 1)
        number = _OP_NUMBERS[op]
        parts.append(_OP.pack(number, has_parent, size_class, 0, slot, offset, length, generation, key, parent_bytes))
    return b"".join(parts)


def parse_submit(body: bytes) -> tuple[int, float, list[TierOp]]:
    """Ticket, deadline and operations."""
    ticket, deadline = _SUBMIT.unpack_from(body)
    ops = [
        TierOp(_OPS[op], slot, key, above if has_parent else None, offset, length, generation, size_class)
        for op, has_parent, size_class, _, slot, offset, length, generation, key, above in _OP.iter_unpack(
            memoryview(body)[_SUBMIT.size :]
        )
    ]
    return ticket, deadline, ops


def pack_ask(ticket: int, generation: int, deadline: float, keys: Sequence[Key]) -> bytes:
    """The body of ASK."""
    return _ASK.pack(ticket, generation, deadline) + b"".join(keys)


def parse_ask(body: bytes) -> tuple[int, int, float, list[Key]]:
    """Ticket, generation, deadline and keys."""
    ticket, generation, deadline = _ASK.unpack_from(body)
    return ticket, generation, deadline, [body[at : at + KEY_BYTES] for at in range(_ASK.size, len(body), KEY_BYTES)]


def pack_answer(ticket: int, present: tuple[bool, ...] | None) -> bytes:
    """The body of ANSWER."""
    return NUMBER.pack(ticket) + (b"" if present is None else b"\1" + bytes(present))


def parse_answer(body: bytes) -> tuple[int, tuple[bool, ...] | None]:
    """The ticket, and which keys are there; `None` if that is not known."""
    with checked("ANSWER"):
        (ticket,) = NUMBER.unpack_from(body)
        said = body[NUMBER.size :]
        if said and (said[0] != 1 or max(said) > 1):
            raise WireError(f"expected a byte of 0 or 1 for each key, got {said[:8]!r}")
        return int(ticket), tuple(map(bool, said[1:])) if said else None


def parse_counts(body: bytes, known: Iterable[str]) -> dict[str, int]:
    """The counts in FAILURES, for exactly the `known` reasons."""
    with checked("FAILURES"):
        return _counts(json.loads(body), known)


def parse_refused(body: bytes) -> tuple[str, str]:
    """The name of an error, and its message."""
    with checked("REFUSED"):
        name, message = json.loads(body)
        if not isinstance(name, str) or not isinstance(message, str):
            raise WireError(f"expected a name and a message, got {name!r}, {message!r}")
        return name, message


def pack_result(result: TierResult) -> bytes:
    """The body of RESULT."""
    numbers = _RESULT.pack(result.ticket, result.bytes, result.seconds, result.queued_seconds)
    return numbers + bytes(_STATUS_NUMBERS[status] for status in result.statuses)


def parse_result(body: bytes) -> TierResult:
    """How a batch ended."""
    with checked("RESULT"):
        ticket, nbytes, seconds, queued = _RESULT.unpack_from(body)
        if not (math.isfinite(seconds) and math.isfinite(queued)):
            raise WireError(f"expected finite times, got {seconds} s moving and {queued} s queued")
        return TierResult(ticket, tuple(_STATUSES[number] for number in body[_RESULT.size :]), nbytes, seconds, queued)


def pack_opened(opened: OpenedReply) -> bytes:
    """The body of OPENED: a JSON object, followed by a table of the chunks."""
    slabs = opened.slabs
    about = pack_json(
        {
            "slabs": [slabs.slab_bytes, slabs.image_bytes, slabs.slabs],
            "generation": opened.generation,
            "fallbacks": opened.fallbacks,
            "failures": opened.failures,
            "other_scope_slots": len(opened.other_scope_slots),
        }
    )
    other_scope_slots = np.array(opened.other_scope_slots, "<u8").tobytes()
    return NUMBER.pack(len(about)) + about + other_scope_slots + _pack_found(opened.found)


def parse_opened(body: bytes, known: Iterable[str]) -> OpenedReply:
    """The content of OPENED; its counts are for the `known` reasons."""
    with checked("OPENED"):
        (length,) = NUMBER.unpack_from(body)
        end = NUMBER.size + length
        about = json.loads(body[NUMBER.size : end])
        slab_bytes, image_bytes, count = about["slabs"]
        slabs = Slabs(_whole(slab_bytes), tuple(map(_whole, image_bytes)), _whole(count))
        fallbacks = _counts(about["fallbacks"], about["fallbacks"])
        behind = end + 8 * _whole(about["other_scope_slots"])
        other_scope_slots = np.frombuffer(body[end:behind], "<u8").tolist()
        found = _parse_found(body[behind:])
        if max(other_scope_slots, default=0) >= max(slabs.indices, 1):
            raise WireError(f"expected slots below {slabs.indices}, got {max(other_scope_slots)}")
        try:
            for size_class in np.unique(found.size_classes).tolist():
                slabs.offsets(size_class, found.slots[found.size_classes == size_class])
        except PlanError as error:
            raise WireError(str(error)) from None
        return OpenedReply(
            slabs, _whole(about["generation"]), fallbacks, _counts(about["failures"], known), found, other_scope_slots
        )


def _whole(number: Any) -> int:
    if not isinstance(number, int) or not 0 <= number < 2**64:
        raise WireError(f"expected a whole number below 2**64, got {number!r}")
    return number


def _counts(counts: Any, known: Iterable[str]) -> dict[str, int]:
    if not isinstance(counts, dict) or counts.keys() != set(known):
        raise WireError(f"expected counts of {sorted(known)}, got {counts!r}")
    return {name: _whole(count) for name, count in counts.items()}


def _pack_found(found: StoredChunks) -> bytes:
    table = np.zeros(len(found), _FOUND)
    if len(found):
        table["slot"], table["size_class"], table["has_parent"] = found.slots, found.size_classes, found.has_parent
        table["key"], table["parent"] = found.keys, found.parents
        table["parent"][~found.has_parent] = np.void(_NO_PARENT)
    return table.tobytes()


def _parse_found(body: bytes) -> StoredChunks:
    table = np.frombuffer(body, _FOUND)
    keys, parents = (np.ascontiguousarray(table[name]) for name in ("key", "parent"))
    slots, size_classes = (table[name].astype(np.int64) for name in ("slot", "size_class"))
    return StoredChunks(slots, keys, parents, table["has_parent"] != 0, size_classes)
