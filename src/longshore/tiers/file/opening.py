"""How a file tier begins: from what is in its directory to files that fit, and an index of what they hold.

    capacity, image sizes ──► slabs       as many as fit, the books beside them included
    ──► all files reserved                whatever fails up to here leaves the directory as it was
    ──► superblock, and its copy          from here on the geometry is the new one
                                          also where something fails after this
    superblock, index ──► entries ──► index   what is left; without a usable index, every header is read
    ──► files trimmed                     what is beyond the new ends

Where images have other sizes than before, the superblock also begins a generation: so all that is older, records and
entries, counts for nothing, and none can stand under a geometry that is not its own.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from longshore.errors import FormatError, TierError
from longshore.slabs import Slabs
from longshore.tiers.arena import PAGE
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import SEGMENT, Directory
from longshore.tiers.file.index import Index, index_files
from longshore.tiers.file.recovery import recover
from longshore.tiers.file.segment import Segment
from longshore.tiers.file.superblock import FILES, Superblocks
from longshore.tiers.ops import MAX_GENERATION

_log = logging.getLogger(__name__)

OVERHEAD = 2 * PAGE + sum(FILES.values())
"""Bytes of a tier's capacity that are neither slots nor index: the directory, the lock, superblock, copy and reset."""

_ENOUGH = 16
"""Slabs for each image size at which those of a directory are not too large to be kept."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The files of a tier, open."""

    superblock: fmt.Superblock
    superblocks: Superblocks
    segment: Segment
    index: Index


def capacity_for(slots: int, image_bytes: int) -> int:
    """The least `capacity` of a `FileTier` with `slots` slots for images of one size, in bytes."""
    return capacity_of(Slabs.of_one_size(PAGE + image_bytes, slots))


def capacity_of(slabs: Slabs) -> int:
    """The least `capacity` of a `FileTier` with these slabs, in bytes; their images include a header page each."""
    return OVERHEAD + sum(index_files(slabs.indices).values()) + slabs.nbytes


def slabs_within(capacity: int, image_bytes: Sequence[int], slab_bytes: int | None = None) -> Slabs:
    """The slabs that `capacity` bytes have room for, of `slab_bytes`, if that is said.

    Raises `TierError` if there is none, or for image sizes that cannot be.
    """
    sizes = tuple(image_bytes)
    if not sizes or list(sizes) != sorted(set(sizes)) or len(sizes) >= fmt.SIZES_LIMIT:
        raise TierError(f"image_bytes must be different sizes, ascending, fewer than {fmt.SIZES_LIMIT}, got {sizes}")
    if sizes[0] <= 0 or any(size % PAGE for size in sizes):
        raise TierError(f"image_bytes must be a positive multiple of {PAGE}, got {sizes}")
    slots = tuple(PAGE + size for size in sizes)
    slabs = Slabs.within(max(0, capacity), slots) if slab_bytes is None else Slabs(slab_bytes, slots, 0)
    few, many = 0, max(0, capacity) // slabs.slab_bytes + 1
    while many - few > 1:
        some = (few + many) // 2
        few, many = (some, many) if capacity_of(replace(slabs, slabs=some)) <= capacity else (few, some)
    if few == 0:
        least = capacity_of(replace(slabs, slabs=1))
        raise TierError(f"expected a capacity of at least {least} bytes, for one image of {sizes[-1]}, got {capacity}")
    if few * slabs.stride > fmt.SLOTS_LIMIT:
        raise TierError(f"expected at most {fmt.SLOTS_LIMIT} slots, {capacity} bytes are {few * slabs.stride}")
    return replace(slabs, slabs=few)


def open_files(directory: Directory, capacity: int, image_bytes: Sequence[int]) -> Opened:
    """Open the files in `directory` for images of `image_bytes`, and keep what they hold of that."""
    superblocks = Superblocks(directory)
    before = superblocks.read()
    for name, why in superblocks.damaged.items():
        _log.warning("%s: %s is damaged; rewriting it from the other copy: %s", directory.path, name, why)
    superblock = _next_superblock(directory, before, capacity, image_bytes, superblocks)
    slabs = superblock.geometry
    files = {**index_files(slabs.indices), **FILES}
    held = 0 if before is None else min(before.slabs, slabs.slabs, directory.length(SEGMENT) // slabs.slab_bytes)
    if before is None and directory.length(SEGMENT):
        directory.trim(SEGMENT, 0)  # nobody knows which generation is the last
    directory.reserve_all({SEGMENT: slabs.nbytes, **files})
    directory.sync()
    with contextlib.ExitStack() as undo:
        segment = Segment(directory, slabs.nbytes)
        undo.callback(segment.close)
        undo.callback(superblocks.close)
        superblocks.open()
        superblocks.write(superblock)
        entries, epoch = recover(directory, segment, superblock, held)
        index = Index(directory, slabs, entries, epoch, fmt.sequence(superblock.opens, 0))
        undo.callback(index.close)
        for name, nbytes in {**files, SEGMENT: slabs.nbytes}.items():
            directory.trim(name, nbytes)
        undo.pop_all()
    return Opened(superblock, superblocks, segment, index)


def _next_superblock(
    directory: Directory,
    before: fmt.Superblock | None,
    capacity: int,
    image_bytes: Sequence[int],
    superblocks: Superblocks,
) -> fmt.Superblock:
    sizes = tuple(image_bytes)
    fresh = slabs_within(capacity, sizes)
    if before is None:
        return fmt.Superblock(fresh.slabs, fresh.slab_bytes, sizes, superblocks.reset(), opens=1)
    if before.opens + 1 >= fmt.OPENS_LIMIT:
        raise FormatError(f"{directory.path} was opened {before.opens} times, the most it can be; remove the directory")
    if before.image_bytes == sizes:
        enough = max(fresh.slab_bytes, capacity // (_ENOUGH * len(sizes)))
        if before.slab_bytes <= enough:
            kept = slabs_within(capacity, sizes, before.slab_bytes)
            return before._replace(slabs=kept.slabs, opens=before.opens + 1)
    if before.generation >= MAX_GENERATION:
        raise FormatError(f"{directory.path} was reset too often for other image sizes; remove the directory")
    _log.warning(
        "%s held images of %s bytes, in slabs of %d; it starts empty, for images of %s bytes",
        directory.path,
        _listed(before.image_bytes),
        before.slab_bytes,
        _listed(sizes),
    )
    return fmt.Superblock(fresh.slabs, fresh.slab_bytes, sizes, before.generation + 1, before.opens + 1)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))
