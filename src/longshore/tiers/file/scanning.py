"""What the headers of all records say: the index of a tier whose own was lost.

A slab may have been given from one image size to another, so a header is looked for wherever one of any size could
stand. What is found there may be left of a former size, or of a record that was dropped since: `one_size_a_slab` ends
most of that, and reading verifies.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from longshore.errors import FormatError
from longshore.slabs import Slabs
from longshore.tiers.arena import PAGE
from longshore.tiers.file import format as fmt
from longshore.tiers.file.index_format import ENTRY, Entries, pack_entry
from longshore.tiers.file.segment import Segment

_log = logging.getLogger(__name__)

_THREADS = 16


def scan(segment: Segment, slabs: Slabs) -> Entries:
    """Entries for all records whose headers are whole, and stand in their places; least recently written first.

    Of one slot there is only the record that was written last.
    """

    def headers(some: range) -> list[fmt.RecordHeader]:
        page = memoryview(mmap.mmap(-1, PAGE))
        return [
            header
            for slab in some
            for slot, pool in places(slabs, slab)
            if (header := _header(segment, slabs, slot, pool, page)) is not None
        ]

    ranges = [range(first, slabs.slabs, _THREADS) for first in range(_THREADS)]
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            found = [header for some in threads.map(headers, ranges) for header in some]
    except RuntimeError as error:
        _log.warning("recovery: no threads, so record headers are read one by one: %s", error)
        found = headers(range(slabs.slabs))
    found.sort(key=lambda header: header.sequence)
    newest = {header.slot: header for header in found}
    return np.frombuffer(b"".join(pack_entry(each, 0) for each in found if newest[each.slot] is each), ENTRY)


def places(slabs: Slabs, slab: int) -> Iterator[tuple[int, int]]:
    """Slots and pools: all the records that could be in `slab`."""
    for pool in range(len(slabs.images)):
        for slot in slabs.slots_of(slab, pool):
            yield slot, pool


def _header(segment: Segment, slabs: Slabs, slot: int, pool: int, page: memoryview) -> fmt.RecordHeader | None:
    """The header of the record in `slot` of `pool`, read into `page`; `None` where none is, or it is torn or rotten."""
    try:
        whole = segment.read_page(page, slabs.offset(pool, slot))
        header = fmt.parse_header(bytes(page)) if whole and not fmt.is_empty(bytes(page)) else None
    except FormatError:
        return None
    except OSError as error:
        _log.warning("recovery: record of slot %d skipped, its header cannot be read: %s", slot, error)
        return None
    return header if header is not None and (header.slot, header.pool) == (slot, pool) else None
