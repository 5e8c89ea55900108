"""Verification and statistics of all records in a tier directory, for `longshore fsck` and `longshore inspect`.

A slab that the index lists records in has the slots of their image size; another, those of the record written last.
A slot that the index does not list is free space, whatever it contains: no process will read it. Without an
index, of several records of one key the one written last counts, as it would for the next process.

The directory is locked meanwhile, like that of a running tier, or looked at while a process has it. Nothing in it is
changed, but by `Fsck.repair` and `Fsck.remove`.
"""

from __future__ import annotations

import enum
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from longshore.boundary import DISK_PAGE, Key, align
from longshore.checksums import checksum
from longshore.errors import FormatError, PlanError, TierError, TierInUseError
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import COPIES, LOCK, RESET, SEGMENT, SUPERBLOCK, Directory, Superblocks
from longshore.tiers.file.format import Entries, Superblock, fits_geometry
from longshore.tiers.file.index import RecordIndex, index_files
from longshore.tiers.file.io import read_into, write_all
from longshore.tiers.file.recovery import drop_former_sizes, load, slots_of_slab
from longshore.tiers.file.segment import Staging, make_staging

_THREADS = 8
_LOOKS, _PAUSE = 5, 0.1
"""Attempts to read the index of a directory in use, and seconds between them."""

_BATCH_SLABS = 256
"""Slabs given to threads at once; bounds the results kept."""


class Condition(enum.StrEnum):
    """Condition of a slot."""

    WHOLE = "whole"
    EMPTY = "empty"
    STALE = "stale"  # whole, but of an earlier generation: never served
    LEFT_OVER = "left over"  # of what was dropped, or of a former size of the slab: free space
    TORN_HEADER = "corrupt header"
    TORN_IMAGE = "corrupt image"
    MISPLACED = "misplaced"  # a header that does not belong to this slot
    SHORT = "cut off"  # the segment ends within it
    UNREADABLE = "unreadable"  # the operating system says no

    @property
    def is_damage(self) -> bool:
        """Whether it indicates damage."""
        return self not in (Condition.WHOLE, Condition.EMPTY, Condition.STALE, Condition.LEFT_OVER)


class Finding(NamedTuple):
    """Condition of a slot, and its header if that is valid."""

    slot: int
    size_class: int
    condition: Condition
    header: fmt.RecordHeader | None = None


class Fsck:
    """A tier directory under fsck. A context manager.

    Attributes:
        live: Whether another process has it open; then it is not locked, and must not be changed.
        superblock: Of the tier.
        superblocks: Its copies.
        slabs: Those that the segment has, if only in part.
        missing: How many it should have besides.
        bytes_on_disk: What it takes there.
    """

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Lock the directory. Raises `TierError` if it is no tier directory, `TierInUseError`, or `FormatError`.

        With `shared`, a directory that a process has open is read, too: as of some moment.
        """
        if not os.path.isdir(path):  # noqa: PTH112 - `Path` raises where a name is too long
            what = "is not a directory" if os.path.lexists(path) else "does not exist"
            raise TierError(f"{path} {what}: expected the directory of a file tier")
        if not any(os.path.lexists(path / name) for name in COPIES):
            raise TierError(f"{path} has no {SUPERBLOCK}: expected the directory of a file tier")
        self.path = path
        self.live = False
        try:
            self._directory = Directory(path)
        except TierInUseError:
            if not shared:
                raise
            self._directory = Directory(path, unlocked=True)
            self.live = True
        self.superblocks = Superblocks(self._directory)
        self._fd = -1
        self._newest: dict[tuple[bytes, Key], int] = {}
        try:
            superblock = self.superblocks.read()
            if superblock is None:
                raise TierError(f"{path} has no {SUPERBLOCK}: expected the directory of a file tier")
            self.superblock = superblock
            self._io = self._directory.io
            self._fd = self._directory.open(SEGMENT)
            with self._directory.as_tier_errors(SEGMENT):
                status = self._io.fstat(self._fd)
                self._io.enable_direct(self._fd)
            self.bytes_on_disk = status.st_blocks * 512
            geometry = superblock.geometry
            if geometry.slab_bytes > status.st_size:  # a hostile one: no memory for what cannot be there
                raise TierError(
                    f"{path}/{SEGMENT} was cut to {status.st_size} bytes, less than one slab of "
                    f"{geometry.slab_bytes}: nothing in it can be used; remove the directory to start with an empty one"
                )
            self.slabs = replace(geometry, slabs=min(superblock.slabs, -(-status.st_size // geometry.slab_bytes)))
            self.missing = superblock.slabs - self.slabs.slabs
            self._entries = self._load()
            self._listed = None if self._entries is None else set(self._entries["slot"].tolist())
        except BaseException:
            self.close()
            raise
        self._stagings = threading.local()

    def entries(self) -> Entries | None:
        """The entries of the index, least recently used first; `None` if it cannot be used."""
        return self._entries

    @property
    def most(self) -> int:
        """Upper bound of slots to check."""
        return self.slabs.indices

    def headers(self) -> Iterator[Finding]:
        """Check the header of each slot, in order; does not read images."""
        self._find_newest()
        return self._examine(self._header)

    def records(self) -> Iterator[Finding]:
        """Check the header and image of each slot, in order."""
        self._find_newest()
        return self._examine(self._record)

    def repair(self, damaged: Sequence[Finding], whole: Sequence[fmt.RecordHeader] = ()) -> None:
        """Empty these slots durably, in files and index, and rewrite a damaged copy of the superblock.

        Without a usable index, one is made from the records that are `whole`.
        """
        if self.superblocks.damaged:
            for name in COPIES:
                self._io.close(self._directory.reserve(name, DISK_PAGE))
            self.superblocks.open()
            self.superblocks.write(self.superblock)
        entries = self._entries
        if entries is None:
            entries = fmt.entries_of(sorted(whole, key=lambda header: header.sequence))
        elif not damaged:
            return
        self._empty([(slot, size_class) for slot, size_class, *_ in damaged])
        self._index(entries[~np.isin(entries["slot"], [finding.slot for finding in damaged])])

    def remove(self, scopes: Collection[bytes]) -> bool:
        """Remove the records of these scopes; if none are left, the tier's files, and the directory. Says which.

        Raises `TierError` for a directory that a process has open, or without an index that can be used.
        """
        if self.live or self._entries is None:
            raise TierError(f"{self.path}: a process has it open, or its index is damaged: nothing was removed")
        theirs = np.isin(self._entries["scope"], np.array(sorted(scopes), "V32"))
        kept = self._entries[~theirs & (self._entries["generation"] >= self.superblock.generation)]
        if len(kept):
            gone = self._entries[theirs]
            self._empty(list(zip(gone["slot"].tolist(), gone["size_class"].tolist(), strict=True)))
            self._index(kept)
            return False
        names = [*COPIES, RESET, SEGMENT, *index_files(0), LOCK]
        with self._directory.as_tier_errors():
            for name in names:  # the superblocks first: if this is interrupted, the next process finds no records
                self.path.joinpath(name).unlink(missing_ok=True)
            if not any(self.path.iterdir()):
                self.path.rmdir()
        return True

    def _empty(self, places: Sequence[tuple[int, int]]) -> None:
        """Empty slots, each with its size class, durably."""
        with self._directory.as_tier_errors(SEGMENT):
            empty = make_staging(0).header
            for slot, size_class in places:
                write_all(self._io, self._fd, empty, self.slabs.offset(size_class, slot))
            self._io.fsync(self._fd)

    def _index(self, entries: Entries) -> None:
        """Rewrite the index with these records."""
        serial = fmt.sequence(self.superblock.opens, 0)
        RecordIndex(self._directory, self.superblock.geometry, entries, self._epoch, serial).close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1
        self.superblocks.close()
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _load(self) -> Entries | None:
        """Load entries from the index; sets the epoch of the next checkpoint."""
        for _ in range(_LOOKS if self.live else 1):
            self._epoch, entries = load(self._directory, self.slabs.stride)
            if entries is not None:
                break
            time.sleep(_PAUSE if self.live else 0.0)
        if entries is None:
            return None
        return drop_former_sizes(entries[fits_geometry(entries, self.superblock.geometry)], self.slabs.stride)

    def _find_newest(self) -> None:
        """Without an index: the newest record of each key."""
        if self._entries is None and not self._newest:
            newest: dict[tuple[bytes, Key], int] = {}
            for found in self._examine(self._header):
                if found.header is not None and found.condition is Condition.WHOLE:
                    name = found.header.scope, found.header.key
                    newest[name] = max(newest.get(name, 0), found.header.sequence)
            self._newest = newest

    def _examine(self, look: Callable[[int, int], Finding]) -> Iterator[Finding]:
        size_classes = self._size_classes()
        with ThreadPoolExecutor(_THREADS) as threads:
            for first in range(0, self.slabs.slabs, _BATCH_SLABS):
                slabs = range(first, min(first + _BATCH_SLABS, self.slabs.slabs))
                classes = map(size_classes.get, slabs)
                yield from chain.from_iterable(threads.map(self._slab, slabs, classes, repeat(look)))

    def _size_classes(self) -> dict[int, int]:
        """The size class of each slab that the index lists records in."""
        if len(self.slabs.images) == 1:
            return dict.fromkeys(range(self.slabs.slabs), 0)
        if self._entries is None:
            return {}
        slabs = self._entries["slot"] // self.slabs.stride
        return dict(zip(slabs.tolist(), self._entries["size_class"].tolist(), strict=True))

    def _slab(self, slab: int, size_class: int | None, look: Callable[[int, int], Finding]) -> list[Finding]:
        """Check the slots of a slab. The newest header decides the size class of a slab that is not in the index."""
        if size_class is None:
            found = [self._header(*place) for place in slots_of_slab(self.slabs, slab)]
            owners = [
                (head.sequence, each.size_class)
                for each in found
                if (head := each.header) and head.size_class == each.size_class and not each.condition.is_damage
            ]
            if not owners:
                return [each for each in found if each.size_class == 0]
            _, size_class = max(owners)
        return [look(slot, size_class) for slot in self.slabs.slots_of(slab, size_class)]

    def _header(self, slot: int, size_class: int) -> Finding:
        staging, free = self._staging(), self._listed is not None and slot not in self._listed
        try:
            if read_into(self._io, self._fd, staging.header, self.slabs.offset(size_class, slot)) < DISK_PAGE:
                return Finding(slot, size_class, Condition.SHORT)
        except OSError:
            return Finding(slot, size_class, Condition.UNREADABLE)
        page = bytes(staging.header)
        if fmt.is_empty(page):
            return Finding(slot, size_class, Condition.EMPTY)
        try:
            header = fmt.parse_header(page)
        except FormatError:
            free |= len(self.slabs.images) > 1 and not page.startswith(fmt.RECORD_MAGIC)  # within another's image
            return Finding(slot, size_class, Condition.LEFT_OVER if free else Condition.TORN_HEADER)
        if not self._belongs(header, slot, size_class):
            return Finding(slot, size_class, Condition.LEFT_OVER if free else Condition.MISPLACED, header)
        if header.generation < self.superblock.generation:
            return Finding(slot, size_class, Condition.STALE, header)
        free |= header.size_class != size_class or header.sequence < self._newest.get((header.scope, header.key), 0)
        return Finding(slot, size_class, Condition.LEFT_OVER if free else Condition.WHOLE, header)

    def _belongs(self, header: fmt.RecordHeader, slot: int, size_class: int) -> bool:
        """Whether `header` belongs to the slot it was found in."""
        try:
            place = self.slabs.offset(header.size_class, header.slot)
        except PlanError:
            return False
        room = self.slabs.image_bytes[header.size_class] - DISK_PAGE
        return place == self.slabs.offset(size_class, slot) and header.length <= room

    def _record(self, slot: int, size_class: int) -> Finding:
        found = self._header(slot, size_class)
        if found.header is None or found.condition is not Condition.WHOLE:
            return found
        length = found.header.length
        body = self._staging().bounce[: align(length)]
        try:
            if read_into(self._io, self._fd, body, self.slabs.offset(size_class, slot) + DISK_PAGE) < length:
                return found._replace(condition=Condition.SHORT)
        except OSError:
            return found._replace(condition=Condition.UNREADABLE)
        if checksum(found.header.algorithm, body[:length]) != found.header.payload_checksum:
            return found._replace(condition=Condition.TORN_IMAGE)
        return found

    def _staging(self) -> Staging:
        staging: Staging | None = getattr(self._stagings, "staging", None)
        if staging is None:
            staging = self._stagings.staging = make_staging(self.superblock.image_bytes[-1])
        return staging


_HOUR, _DAY = 3600, 24 * 3600
_AGES = ((_HOUR, "in the last hour"), (_DAY, "in the last day"), (7 * _DAY, "in the last week"))


@dataclass(frozen=True, slots=True)
class ScopeUsage:
    """The records of one scope.

    Attributes:
        scope: Its fingerprint, in hexadecimal.
        bytes: Of their images.
        reads: How often they were served; as of the last checkpoint.
        written: Seconds of Unix time when the newest was written; 0 where that is not known.
        current: Whether the record written last is of this scope.
    """

    scope: str
    records: int
    bytes: int
    reads: int
    written: int
    current: bool


@dataclass(frozen=True, slots=True)
class SizeUsage:
    """The records of one image size.

    Attributes:
        image_bytes: Of the longest image of such a slot.
        per_slab: How many such slots a slab has.
        slabs: How many have records of this size.
    """

    image_bytes: int
    per_slab: int
    slabs: int
    records: int


@dataclass(frozen=True, slots=True)
class AgeUsage:
    """How many records were written when."""

    written: str
    records: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a directory holds.

    Attributes:
        slabs: How many there are, `slab_bytes` large.
        generation: Nothing older is served.
        opens: How many processes have opened it.
        bytes_on_disk: What the segment takes there.
        from_index: Whether this is from the index; without one, reads and ages are unknown.
        stale: Records of earlier generations: free space.
        records: Of the others.
        full: What part of the slabs these take; from 0 to 1.
        live: Whether a process has the directory open.
    """

    slabs: int
    slab_bytes: int
    generation: int
    opens: int
    bytes_on_disk: int
    from_index: bool
    records: int
    stale: int
    full: float
    live: bool
    sizes: tuple[SizeUsage, ...]
    scopes: tuple[ScopeUsage, ...]
    ages: tuple[AgeUsage, ...]

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return asdict(self)


def inspect(fsck: Fsck, headers: Iterable[Finding], now: float) -> Inspection:
    """Summarise the directory of `fsck`, at `now` in Unix time; `headers` are read only without an index."""
    found = fsck.entries()
    entries = _from_headers(headers) if found is None else found
    live = entries[entries["generation"] >= fsck.superblock.generation]
    geometry = fsck.superblock.geometry
    return Inspection(
        slabs=fsck.superblock.slabs,
        slab_bytes=fsck.superblock.slab_bytes,
        generation=fsck.superblock.generation,
        opens=fsck.superblock.opens,
        bytes_on_disk=fsck.bytes_on_disk,
        from_index=found is not None,
        records=len(live),
        stale=len(entries) - len(live),
        full=float(np.array(geometry.image_bytes)[live["size_class"]].sum()) / geometry.nbytes,
        live=fsck.live,
        sizes=_sizes(live, fsck.superblock),
        scopes=_scopes(live),
        ages=_ages(live, now),
    )


def _from_headers(headers: Iterable[Finding]) -> Entries:
    counted = (Condition.WHOLE, Condition.STALE)
    return fmt.entries_of(each.header for each in headers if each.header is not None and each.condition in counted)


def _sizes(entries: Entries, superblock: Superblock) -> tuple[SizeUsage, ...]:
    geometry, sizes = superblock.geometry, []
    for size_class, image_bytes in enumerate(superblock.image_bytes):
        slots = entries["slot"][entries["size_class"] == size_class]
        sizes.append(
            SizeUsage(image_bytes, geometry.images[size_class], len(np.unique(slots // geometry.stride)), len(slots))
        )
    return tuple(sizes)


def _scopes(entries: Entries) -> tuple[ScopeUsage, ...]:
    """By scope, the largest first."""
    last = entries["scope"][entries["sequence"].argmax()].item().hex() if len(entries) else ""
    names = np.array([scope.hex() for scope in entries["scope"].tolist()], dtype=str)
    scopes = []
    for name in np.unique(names).tolist():
        own = entries[names == name]
        nbytes, reads = int(own["length"].sum()), int(own["hits"].sum(dtype=np.int64))
        scopes.append(ScopeUsage(name, len(own), nbytes, reads, int(own["written_at"].max()), name == last))
    return tuple(sorted(scopes, key=lambda scope: (-scope.bytes, scope.scope)))


def _ages(entries: Entries, now: float) -> tuple[AgeUsage, ...]:
    known = entries["written_at"] > 0
    age = now - entries["written_at"].astype(np.int64)
    left, ages = known, []
    for limit, name in _AGES:
        ages.append(AgeUsage(name, int((left & (age <= limit)).sum())))
        left = left & (age > limit)
    ages.append(AgeUsage("longer ago", int(left.sum())))
    if not known.all():
        ages.append(AgeUsage("not known", int((~known).sum())))
    return tuple(ages)
