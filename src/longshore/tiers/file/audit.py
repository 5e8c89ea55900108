"""Every record of a tier directory, verified as a read would: what `longshore fsck` and `longshore inspect` know.

The directory is locked meanwhile, like that of a running tier. Nothing in it is changed, but for `Audit.repair`.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from longshore.checksums import checksum
from longshore.errors import FormatError, TierError
from longshore.tiers.arena import PAGE, align
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import SEGMENT, SUPERBLOCK, Directory
from longshore.tiers.file.index import Index
from longshore.tiers.file.index_format import Entries
from longshore.tiers.file.loading import load
from longshore.tiers.file.payload import Lane, make_lane
from longshore.tiers.file.system import patiently, write_all

_THREADS = 8
_AT_ONCE = 256
"""Slots that are handed out to threads at a time: bounds what is kept of those that are done."""


class Condition(enum.StrEnum):
    """What a slot is found to hold."""

    WHOLE = "whole"
    EMPTY = "empty"
    STALE = "stale"  # whole, but of an earlier generation: never served
    TORN_HEADER = "corrupt header"
    TORN_IMAGE = "corrupt image"
    MISPLACED = "misplaced"  # a header that does not belong to this slot
    SHORT = "cut off"  # the segment ends within it
    UNREADABLE = "unreadable"  # the operating system says no

    @property
    def is_damage(self) -> bool:
        """Whether this is not as a healthy tier leaves it."""
        return self not in (Condition.WHOLE, Condition.EMPTY, Condition.STALE)


class Finding(NamedTuple):
    """What is in a slot; `header` where there is one that can be read."""

    slot: int
    condition: Condition
    header: fmt.RecordHeader | None = None


class Audit:
    """A tier directory that nobody uses, to be looked through. A context manager.

    Attributes:
        superblock: Of the tier.
        slots: Those that the segment has, if only in part.
        missing: Those that it should have besides.
        bytes_on_disk: What it takes there.
    """

    def __init__(self, path: Path) -> None:
        """Lock it. Raises `TierError` for what is no tier directory, `TierInUseError`, or `FormatError`."""
        if not path.is_dir():
            what = "is not a directory" if path.exists() or path.is_symlink() else "does not exist"
            raise TierError(f"{path} {what}: expected the directory of a file tier")
        if not (path / SUPERBLOCK).is_symlink() and not (path / SUPERBLOCK).exists():
            raise TierError(f"{path} has no {SUPERBLOCK}: expected the directory of a file tier")
        self.path = path
        self._directory = Directory(path)
        self._fd = -1
        try:
            superblock = self._directory.read_superblock()
            if superblock is None:
                raise TierError(f"{path} has no {SUPERBLOCK}: expected the directory of a file tier")
            self.superblock = superblock
            self._io = self._directory.io
            self._fd = self._directory.open(SEGMENT)
            with self._directory.as_tier_errors(SEGMENT):
                status = self._io.fstat(self._fd)
                self._io.enable_direct(self._fd)
            self.bytes_on_disk = status.st_blocks * 512
            self.slots = min(superblock.slots, -(-status.st_size // self._stride))
            self.missing = superblock.slots - self.slots
            if superblock.image_bytes > status.st_size:  # a hostile one: no memory for what cannot be there
                raise TierError(f"{path}: images of {superblock.image_bytes} bytes, in a segment of {status.st_size}")
        except BaseException:
            self.close()
            raise
        self._lanes = threading.local()

    def entries(self) -> Entries | None:
        """What the index says of the slots, least recently used first; `None` where there is none that can be used."""
        return load(self._directory).entries

    def headers(self) -> Iterator[Finding]:
        """What the header of each slot says, in order of slots; images are not read."""
        return self._examine(self._header)

    def records(self) -> Iterator[Finding]:
        """The same with every image verified."""
        return self._examine(self._record)

    def repair(self, slots: Sequence[int]) -> None:
        """Empty `slots`: they hold nothing afterwards, and the index, if there is one, says so; on the medium."""
        with self._directory.as_tier_errors(SEGMENT):
            empty = make_lane(0).header
            for slot in slots:
                write_all(self._io, self._fd, empty, slot * self._stride)
            self._io.fsync(self._fd)
        epoch, entries = load(self._directory)
        if entries is not None and slots:
            kept = entries[~np.isin(entries["slot"], slots)]
            serial = fmt.sequence(self.superblock.opens, 0)
            Index(self._directory, self.superblock.slots, kept, epoch, serial).close()

    def close(self) -> None:
        """Let others use the directory. Idempotent."""
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def _stride(self) -> int:
        return PAGE + self.superblock.image_bytes

    def _examine(self, look: Callable[[int], Finding]) -> Iterator[Finding]:
        with ThreadPoolExecutor(_THREADS) as pool:
            for first in range(0, self.slots, _AT_ONCE):
                yield from pool.map(look, range(first, min(first + _AT_ONCE, self.slots)))

    def _header(self, slot: int) -> Finding:
        """Look at the header of `slot` alone."""
        lane = self._lane()
        try:
            if self._read(lane.header, slot * self._stride) < PAGE:
                return Finding(slot, Condition.SHORT)
        except OSError:
            return Finding(slot, Condition.UNREADABLE)
        page = bytes(lane.header)
        if fmt.is_empty(page):
            return Finding(slot, Condition.EMPTY)
        try:
            header = fmt.parse_header(page)
        except FormatError:
            return Finding(slot, Condition.TORN_HEADER)
        if header.slot != slot or header.length > self.superblock.image_bytes:
            return Finding(slot, Condition.MISPLACED, header)
        stale = header.generation < self.superblock.generation
        return Finding(slot, Condition.STALE if stale else Condition.WHOLE, header)

    def _record(self, slot: int) -> Finding:
        """Look at all of `slot`."""
        found = self._header(slot)
        if found.header is None or found.condition.is_damage:
            return found
        length = found.header.length
        body = self._lane().bounce[: align(length)]
        try:
            if self._read(body, slot * self._stride + PAGE) < length:
                return found._replace(condition=Condition.SHORT)
        except OSError:
            return found._replace(condition=Condition.UNREADABLE)
        if checksum(found.header.algorithm, body[:length]) != found.header.payload_checksum:
            return found._replace(condition=Condition.TORN_IMAGE)
        return found

    def _read(self, buffer: memoryview, offset: int) -> int:
        """Bytes that were read into `buffer`: fewer only where the file ends."""
        done = 0
        while done < len(buffer):
            moved = patiently(self._io.preadv, self._fd, [buffer[done:]], offset + done)
            if moved <= 0:
                break
            done += moved
        return done

    def _lane(self) -> Lane:
        """Memory of the calling thread's own."""
        lane: Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = make_lane(self.superblock.image_bytes)
        return lane
