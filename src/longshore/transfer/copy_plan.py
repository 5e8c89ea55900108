"""Plans copies: validates the ids of a transfer, and lays its blocks out over chunks, aligned to them or not.

A section that begins or ends within a chunk is unaligned. It is laid out as rectangles of chunks and blocks, so that a
partial first or last chunk is a rectangle of its own (`chunk_rectangles`). Here 9 blocks from logical block 3 on,
4 blocks to a chunk:

    chunk 0   chunk 1   chunk 2
    · · · 0   1 2 3 4   5 6 7 8          [0, 1) x [3, 4)    [1, 3) x [0, 4)

A last block with fewer tokens is a rectangle with narrower pages (`split_off_last`, `page_widths`).

Copies inside the device serve partial reuse: a request that shares the first tokens of another request's block gets its
own block, with the pages of those tokens copied. The source block may be in flight; the copy then waits for it, like
any other job.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from longshore.boundary import DEVICE, HOST, I64, Item, Items, Section, Slabs, Slot, Slots, Transfer
from longshore.errors import PlanError
from longshore.layout.model import U64, KVLayout
from longshore.transfer.pieces import CopyBatch, CopyPart


class CopyPlan(NamedTuple):
    """The pages that one transfer moves.

    Attributes:
        batch: All pages, as one batch. Bytes arrive item by item, in order.
        images: int64, shape `(items,)`: byte offset of each item's image in host memory.
        sections: Group and number of items of each section, in order.
    """

    batch: CopyBatch
    images: I64
    sections: tuple[tuple[int, int], ...]

    @property
    def item_bytes(self) -> I64:
        """int64, shape `(items,)`: bytes that move of each item."""
        item_bytes = np.zeros(len(self.images), dtype=np.int64)
        for part in self.batch.parts:
            item_bytes[part.item : part.item + len(part.images)] += part.chunk_bytes
        return item_bytes

    def blocks(self) -> dict[int, I64]:
        """The device blocks that move, by pool; of copies inside the device, those that are written."""
        return self._by_pool((part.group, part.blocks) for part in self.batch.parts)

    def sources(self) -> dict[int, I64]:
        """For copies inside the device, the source blocks, by pool."""
        return self._by_pool((part.group, part.sources) for part in self.batch.parts if part.sources is not None)

    def _by_pool(self, blocks: Iterable[tuple[int, I64]]) -> dict[int, I64]:
        pools: dict[int, list[I64]] = {}
        for group, some in blocks:
            pools.setdefault(self.batch.layout.pools[group], []).append(some.ravel())
        return {pool: np.concatenate(found) for pool, found in pools.items()}


def plan_copy(
    layout: KVLayout,
    sections: Sequence[Section],
    images: Sequence[int] | I64,
    *,
    destination: str,
    host_address: int,
    host_bytes: int,
    tokens: int | None = None,
    room: I64 | None = None,
) -> CopyPlan:
    """Validate all ids, and plan which pages move.

    Args:
        layout: Where pages lie.
        sections: Device blocks per group; sections may be empty, and groups may be missing.
        images: Byte offset in host memory of each item's image, in the order of the sections' chunks.
        destination: The tier that is written, `DEVICE` or `HOST`; written blocks or images must be distinct.
        host_address: Address of the host memory.
        host_bytes: Size of the host memory.
        tokens: Leading tokens to move of the last block of the last non-empty section. `None`, zero or less, and the
            block size or more mean the whole block; so do pages that cannot be split.
        room: int64, shape `(items,)`: bytes of the slot of each image; `None`: large enough.

    Raises:
        PlanError: Ids out of range, repeated where written, or not consumed exactly by both sides; a slot that is too
            small.
        FreedLayoutError: The device memory is gone.
    """
    layout.check_live()
    if destination not in (HOST, DEVICE):
        raise PlanError(f"expected destination {DEVICE!r} or {HOST!r}, got {destination!r}")
    items = _items_per_section(layout, sections)
    offsets = _integers(images, "image offsets")
    if sum(items) != len(offsets):
        raise PlanError(
            f"expected {sum(items)} items, as the sections have blocks for {items} chunks; got {len(offsets)} items"
        )
    parts: list[CopyPart] = []
    for section, taken, widths in _sections(layout, sections, items, tokens):
        _check_images(offsets, taken, layout.image_bytes_of(section.group), host_bytes, room)
        per_chunk = layout.groups[section.group].blocks_per_chunk
        parts += _parts(layout, section, widths, per_chunk, offsets[taken], taken.start)
    batch = CopyBatch(layout, layout.generation, destination, host_address, tuple(parts))
    groups = [section.group for section in sections]
    plan = CopyPlan(batch, offsets, tuple(zip(groups, items, strict=True)))
    if destination == DEVICE:
        _check_blocks_differ(plan)
    else:
        # Images that do not overlap are apart by the length of one: they differ in the bits above that.
        shift = layout.least_image_bytes.bit_length() - 1
        twice = repeated(offsets >> shift, (host_bytes >> shift) + 1)
        if twice is not None:
            offset = offsets[offsets >> shift == twice][0]
            raise PlanError(f"the image at offset {offset} of host memory would be written twice")
    return plan


def _sections(
    layout: KVLayout,
    sections: Sequence[Section],
    items: Sequence[int],
    tokens: int | None,
) -> Iterator[tuple[Section, slice, tuple[PageWidths, PageWidths | None]]]:
    """For each section with blocks: the section, its items, whose numbers are in `items`, and the widths of pages."""
    last = max((index for index, count in enumerate(items) if count), default=-1)
    start = 0
    for index, (section, count) in enumerate(zip(sections, items, strict=True)):
        if count:
            widths = page_widths(layout, section.group, tokens if index == last else None)
            yield section, slice(start, start + count), widths
        start += count


class PageWidths(NamedTuple):
    """Bytes that move of each page of a block; `split`: of each piece of a page, for leading tokens."""

    widths: U64
    split: bool = False


def check_sections(layout: KVLayout, sections: Sequence[Section]) -> None:
    """Raise `PlanError` unless each section has a valid group and first block."""
    for index, section in enumerate(sections):
        if not 0 <= section.group < len(layout.groups):
            raise PlanError(f"section {index}: group {section.group} does not lie in [0, {len(layout.groups)})")
        if section.first_block < 0:
            raise PlanError(f"section {index}: first_block must not be negative, got {section.first_block}")


def _items_per_section(layout: KVLayout, sections: Sequence[Section]) -> list[int]:
    check_sections(layout, sections)
    items = []
    for section in sections:
        per_chunk = layout.groups[section.group].blocks_per_chunk
        items.append(chunks_of(len(section.blocks), section.first_block % per_chunk, per_chunk))
    return items


def page_widths(layout: KVLayout, group: int, tokens: int | None) -> tuple[PageWidths, PageWidths | None]:
    """Bytes that move of every block of `group`, and of a partial last block; arguments as for `plan_copy`."""
    table = layout.table(group)
    whole = PageWidths(table.page)
    if tokens is None or not 0 < tokens < layout.groups[group].block_size or not table.token.any():
        return whole, None
    table = layout.table(group, split=True)
    return whole, PageWidths(np.where(table.token > 0, table.token * np.uint64(tokens), table.page), split=True)


def _parts(
    layout: KVLayout,
    section: Section,
    widths: tuple[PageWidths, PageWidths | None],
    per_chunk: int,
    images: I64,
    item: int,
    sources: I64 | None = None,
) -> Iterator[CopyPart]:
    """The parts of one section, whose first chunk is `item`, in chunks of `per_chunk` blocks."""
    whole, leading = widths
    blocks = block_ids(section, layout.num_blocks)
    skip = section.first_block % per_chunk
    rectangles = chunk_rectangles(len(blocks), skip, per_chunk)
    last = divmod(skip + len(blocks) - 1, per_chunk)
    if leading is not None:
        rectangles = split_off_last(rectangles, *last)
    if not len(whole.widths):
        return
    for box in rectangles:
        chunks, subs = box.stop - box.first, box.high - box.low
        shape, start = (chunks, subs), box.first * per_chunk + box.low - skip
        moved = slice(start, start + chunks * subs)
        is_last = (box.stop - 1, box.high - 1) == last
        pages = leading if is_last and leading is not None else whole
        yield CopyPart(
            section.group,
            0,
            pages.widths,
            blocks[moved].reshape(shape),
            images[box.first : box.stop],
            box.low,
            item + box.first,
            None if sources is None else sources[moved].reshape(shape),
            pages.split,
        )


def block_ids(section: Section, num_blocks: int) -> I64:
    """The section's blocks, int64, shape `(blocks,)`; `PlanError` when one does not exist."""
    ids = _integers(section.blocks, f"block ids of group {section.group}")
    if _largest(ids) >= num_blocks:
        low, high = int(ids.min()), int(ids.max())
        raise PlanError(f"block ids of group {section.group} must lie in [0, {num_blocks}), got {low} to {high}")
    return ids


def _integers(values: Sequence[int] | I64, what: str) -> I64:
    """`values` as int64, shape `(len(values),)`; `PlanError` for what is not an integer of 64 bits."""
    if isinstance(values, np.ndarray):
        if values.dtype.kind not in "iu" or values.ndim != 1:
            raise PlanError(f"expected {what} as a vector of integers, got {values.dtype} of shape {values.shape}")
        return np.asarray(values, dtype=np.int64)
    if not len(values):
        return np.empty(0, dtype=np.int64)
    try:
        packed = struct.pack(f"{len(values)}q", *values)  # twice as fast as numpy's own conversion
    except struct.error as error:
        raise PlanError(f"expected {what} as 64-bit integers: {error}") from error
    return np.frombuffer(packed, dtype=np.int64)


def _largest(values: I64) -> int:
    """The largest of `values` as unsigned integers: negative values count as larger than all others."""
    unsigned = values.view(np.uint64)
    return int(unsigned[unsigned.argmax()])  # several times as fast as `max`


def _check_images(offsets: I64, items: slice, image_bytes: int, host_bytes: int, room: I64 | None) -> None:
    """That the images of `items`, all of one group, lie within their slots, and within the host memory."""
    images = offsets[items]
    most = host_bytes - image_bytes
    if most < 0 or _largest(images) > most:
        bad = int(np.argmax((images < 0) | (images > most)))
        raise PlanError(
            f"item {items.start + bad}: an image of {image_bytes} bytes at offset {images[bad]} does not fit "
            f"into {host_bytes} bytes of host memory"
        )
    if room is not None and room[items].min() < image_bytes:
        bad = int(np.argmax(room[items] < image_bytes))
        raise PlanError(
            f"item {items.start + bad}: {image_bytes} image bytes exceed a slot of {room[items][bad]} bytes"
        )


def _check_blocks_differ(plan: CopyPlan) -> None:
    """That no device block is written twice."""
    for pool, blocks in plan.blocks().items():
        twice = repeated(blocks, plan.batch.layout.num_blocks)
        if twice is not None:
            raise PlanError(f"block {twice} of device pool {pool} would be written twice")


def repeated(values: I64, limit: int) -> int | None:
    """One of `values`, within `[0, limit)`, that occurs more than once."""
    if limit <= 64 * len(values):  # flags are ten times as fast as sorting, unless most values are absent
        found = np.zeros(limit, dtype=np.bool_)
        found[values] = True
        if np.count_nonzero(found) == len(values):
            return None
    ordered = np.sort(values)
    same = ordered[1:] == ordered[:-1]
    return int(ordered[int(same.argmax())]) if same.any() else None


def plan_copy_inside(
    layout: KVLayout,
    sections: Sequence[Section],
    items: Sequence[Item],
    *,
    tokens: int | None = None,
) -> CopyPlan:
    """Validate all ids, and plan which pages move.

    Args:
        layout: Where pages lie.
        sections: Blocks that are written, per group.
        items: One per block, in order; its source is the device slot to copy from: the group's pool, and a block.
        tokens: As for `plan_copy`.

    Raises:
        PlanError: Ids out of range or not consumed exactly, a block written twice, or both written and read.
        FreedLayoutError: The device memory is gone.
    """
    layout.check_live()
    check_sections(layout, sections)
    given = sum(len(section.blocks) for section in sections)
    if given != len(items):
        raise PlanError(f"expected one item per block: the sections have {given} blocks, got {len(items)} items")
    counts = [len(section.blocks) for section in sections]
    images = np.zeros(given, dtype=np.int64)
    parts: list[CopyPart] = []
    for section, taken, widths in _sections(layout, sections, counts, tokens):
        own = enumerate(items[taken], taken.start)
        sources = np.array([_source(layout, section.group, item, index) for index, item in own])
        parts += _parts(layout, section._replace(first_block=0), widths, 1, images[taken], taken.start, sources)
    batch = CopyBatch(layout, layout.generation, DEVICE, 0, tuple(parts))
    groups = [section.group for section in sections]
    plan = CopyPlan(batch, images, tuple(zip(groups, counts, strict=True)))
    _check_blocks_differ(plan)
    read = plan.sources()
    for pool, blocks in plan.blocks().items():
        both = np.intersect1d(blocks, read[pool])
        if len(both):
            raise PlanError(f"block {both[0]} of device pool {pool} would be both written and read")
    return plan


def _source(layout: KVLayout, group: int, item: Item, index: int) -> int:
    slot, pool = item.source, layout.pools[group]
    if not isinstance(slot, Slot) or (slot.tier, slot.size_class) != (DEVICE, pool) or item.destination is not None:
        raise PlanError(
            f"item {index}: expected a slot of device pool {pool} to copy from, got {slot} into {item.destination}"
        )
    if not isinstance(slot.index, int) or not 0 <= slot.index < layout.num_blocks:
        raise PlanError(f"item {index}: block {slot.index} does not lie in [0, {layout.num_blocks})")
    return slot.index


class Rectangle(NamedTuple):
    """Chunks `[first, stop)` of a section, positions `[low, high)` of each; several chunks only if complete."""

    first: int
    stop: int
    low: int
    high: int


def chunks_of(count: int, skip: int, per_chunk: int) -> int:
    """Number of chunks of `count` blocks, if the first `skip` positions of the first chunk are skipped."""
    return -(-(skip + count) // per_chunk) if count else 0


def chunk_rectangles(count: int, skip: int, per_chunk: int) -> list[Rectangle]:
    """Lay out `count` blocks over chunks of `per_chunk`; unaligned ones skip the first `skip` positions of a chunk."""
    if not count:
        return []
    rectangles = []
    first = 0
    if skip:
        rectangles.append(Rectangle(0, 1, skip, min(per_chunk, skip + count)))
        first = 1
    whole, rest = divmod(skip + count, per_chunk)
    if whole > first:
        rectangles.append(Rectangle(first, whole, 0, per_chunk))
    if rest and whole >= first:
        rectangles.append(Rectangle(whole, whole + 1, 0, rest))
    return rectangles


def split_off_last(rectangles: Sequence[Rectangle], chunk: int, position: int) -> list[Rectangle]:
    """`rectangles` with the last position of the last chunk split off."""
    apart: list[Rectangle] = []
    for box in rectangles:
        if (box.stop - 1, box.high - 1) != (chunk, position):
            apart.append(box)
            continue
        if box.stop - box.first > 1:
            apart.append(box._replace(stop=chunk))
        if box.high - box.low > 1:
            apart.append(Rectangle(chunk, chunk + 1, box.low, position))
        apart.append(Rectangle(chunk, chunk + 1, position, position + 1))
    return apart


class HostMemory(Protocol):
    """One piece of host memory; `longshore.tiers.arena.Arena` is one."""

    @property
    def address(self) -> int:
        """Address of its first byte."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


class HostSlots(Protocol):
    """Slots for chunk images in host memory; `longshore.tiers.host.HostSlabs` is one."""

    @property
    def arena(self) -> HostMemory:
        """Where the slots are."""

    @property
    def slabs(self) -> Slabs:
        """Numbering and image sizes of the slots, one after the other from the start of the arena."""


class HostImages(NamedTuple):
    """The images of one transfer in host memory.

    Attributes:
        offsets: int64, shape `(items,)`: bytes from the start of the arena to each image.
        room: int64, shape `(items,)`: bytes of the slot of each image.
        overlap_units: int64: host slots that they overlap, as in `Slabs.overlap_units`.
    """

    offsets: I64
    room: I64
    overlap_units: I64


def memory_of(host: HostSlots) -> object:
    """An object that keeps the memory of `host` mapped while it is referenced, even if the arena is closed.

    Raises `TierClosedError` if the arena is closed already.
    """
    return getattr(host.arena, "array", host.arena)


def images_of(transfer: Transfer, host: HostSlots) -> HostImages:
    """Offsets of the items' images; `PlanError` for an item that is not between a host slot and the device."""
    by_class = _slots_by_size_class(transfer)
    items = transfer.items
    offsets, room = np.empty(len(items), np.int64), np.empty(len(items), np.int64)
    overlap_units = [np.empty(0, np.int64)]
    for size_class, (positions, indices) in by_class.items():
        offsets[positions] = host.slabs.offsets(size_class, indices)
        room[positions] = host.slabs.image_bytes[size_class]
        overlap_units.append(host.slabs.overlap_units(size_class, indices))
    together = np.concatenate(overlap_units)
    twice = repeated(together, host.slabs.indices) if len(by_class) > 1 else None
    if twice is not None:
        raise PlanError(f"slots of different image sizes overlap in one slab, near slot {twice}")
    return HostImages(offsets, room, together)


def _slots_by_size_class(transfer: Transfer) -> dict[int, tuple[slice | list[int], Sequence[int]]]:
    """By size class, the positions of the items that are in it, and the indices of their slots."""
    into_host = transfer.route.destination == HOST
    if isinstance(transfer.items, Items):
        sides = (transfer.items.destination, transfer.items.source)
        slots, device = sides if into_host else sides[::-1]
        if device is not None or not isinstance(slots, Slots) or slots.tier != HOST:
            raise PlanError(f"expected items between the device and host slots, got {device} and {slots}")
        if len(slots.indices) != len(transfer.items):
            raise PlanError(f"expected a slot for each of {len(transfer.items)} items, got {len(slots.indices)}")
        return {slots.size_class: (slice(None), slots.indices)}
    by_class: dict[int, tuple[list[int], list[int]]] = {}
    for position, item in enumerate(transfer.items):
        both = (item.destination, item.source)
        slot, other = both if into_host else both[::-1]
        if other is not None or not isinstance(slot, Slot) or slot.tier != HOST or not isinstance(slot.index, int):
            raise PlanError(f"item {position}: expected the device and a host slot, got {other} and {slot}")
        items, indices = by_class.setdefault(slot.size_class, ([], []))
        items.append(position)
        indices.append(slot.index)
    return {size_class: (items, indices) for size_class, (items, indices) in by_class.items()}


def zero_padding(plan: CopyPlan, zero: Callable[[int, int], None]) -> None:
    """Call `zero` (address, bytes) for the padding of the images that are written, which may have old bytes."""
    layout = plan.batch.layout
    begin = 0
    for index, items in plan.sections:
        group = layout.groups[index]
        padding = group.part_bytes - group.used_bytes
        if padding:
            first = plan.batch.host_address + layout.rank * group.part_bytes + group.used_bytes
            for image in plan.images[begin : begin + items].tolist():
                zero(first + image, padding)
        begin += items
