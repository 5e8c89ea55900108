"""Verification of records that were read: a torn, corrupt or foreign record is a miss, and its bytes are never served.

    segment ──► header page ──► its own checksum ──► key, scope, slot, size class, generation and length as expected?
            └─► image       ──► its checksum, by the algorithm that the header names ──► equal to the header's?

| what was read | status |
|---|---|
| fewer bytes than a record has (`Executor`) | `SHORT` |
| a header page with a wrong checksum: a torn or damaged header | `CORRUPT` |
| an image with another checksum than the header's: a torn write, a changed bit | `CORRUPT` |
| a valid header of another record, or none: an overwritten, moved, or never written slot | `MISMATCH` |

Each read is verified, so nothing is verified when files are opened after a crash. The tier then discards the record
(`RecordIndex.delete_record`), and the cache recomputes the chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from longshore.boundary import Key, Status
from longshore.checksums import XXH3_64
from longshore.errors import FormatError
from longshore.tiers.file.format import is_empty, parse_header


class ExpectedRecord(NamedTuple):
    """The record that a reader expects."""

    key: Key
    scope: bytes
    slot: int
    size_class: int
    generation: int
    length: int


class HeaderCheck(NamedTuple):
    """Result of `check_header` for a header page; the payload's checksum is valid only if `status` is OK."""

    status: Status
    payload_checksum: int = 0
    algorithm: int = XXH3_64


def check_header(page: bytes, wanted: ExpectedRecord) -> HeaderCheck:
    """Compare the header in `page` with `wanted`. Does not verify the image."""
    if is_empty(page):
        return HeaderCheck(Status.MISMATCH)
    try:
        header = parse_header(page)
    except FormatError:
        return HeaderCheck(Status.CORRUPT)
    found = (header.key, header.scope, header.slot, header.size_class, header.generation, header.length)
    return HeaderCheck(Status.OK if found == wanted else Status.MISMATCH, header.payload_checksum, header.algorithm)


class RecordVerifier(NamedTuple):
    """Verifies the records of one task.

    Attributes:
        expected: The record that is expected at an index of the task, when it has been read; `None` if its slot
            belongs to another size class by then.
    """

    expected: Callable[[int], ExpectedRecord | None]

    def check_header(self, index: int, page: memoryview) -> HeaderCheck:
        """Verify the header in `page`, of the record at `index` of the task."""
        wanted = self.expected(index)
        return HeaderCheck(Status.MISMATCH) if wanted is None else check_header(bytes(page), wanted)

    def check_image(self, header: HeaderCheck, computed: int) -> Status:
        """Verify an image whose checksum, by the algorithm of `header`, is `computed`: `OK` or `CORRUPT`."""
        return Status.OK if computed == header.payload_checksum else Status.CORRUPT
