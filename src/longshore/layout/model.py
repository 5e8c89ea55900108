"""`KVLayout`: the positions of the pages of a block, on the device and in the chunk image.

A chunk image, or image for short, is the serialized KV of one chunk: the bytes of all pages of its blocks in one piece,
the same in host memory, files and stores.

    on the device, per reference             in the image of a chunk of 2 blocks

    block 0   block 1   block 2              ┌ rank 0 ─────────────────────────┐┌ rank 1 ──
    ├ page ┤··├ page ┤··├ page ┤··           │ ref 0  ref 0 │ ref 1  ref 1 │···0││ ref 0 ...
    └ stride ─┘                              │ blk 0  blk 1 │ blk 0  blk 1 │   0││
                                             └ 4 KiB-aligned ──────────────────┘└─────────

A rank's part has the pages of each reference together, without padding, in the order of the references, so that a range
of layers is a range of bytes. It is padded with zeros to a multiple of 4 KiB.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from longshore.boundary import DISK_PAGE, I64, align
from longshore.errors import FreedLayoutError, LayoutError

# Dtypes whose elements are smaller than a byte, or no bytes at all: element_size() and stride() do not tell
# where such an element lies.
_UNPLACEABLE = re.compile(r"u?int[1-7]|quint4x2|quint2x4|object")

# Dtypes that pack several tokens' worth into one byte, or scale a block of elements at once.
_UNSPLITTABLE = re.compile(r"float4_.*|float8_e8m0fnu|bits.*")


class Storage(Protocol):
    """The allocation behind a tensor."""

    def data_ptr(self) -> int:
        """Address of its first byte."""

    def nbytes(self) -> int:
        """Its size in bytes."""


class DeviceTensor(Protocol):
    """The part of `torch.Tensor` that a layout needs: this package does not import torch."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements per axis."""

    @property
    def dtype(self) -> object:
        """Type of an element; its name is part of the layout's fingerprint."""

    @property
    def device(self) -> object:
        """Device of the memory."""

    def data_ptr(self) -> int:
        """Address of element 0."""

    def element_size(self) -> int:
        """Bytes per element."""

    def stride(self) -> Sequence[int]:
        """Elements between neighbours, per axis."""

    def untyped_storage(self) -> Storage:
        """The allocation that the tensor is a view of."""


def dtype_name(tensor: DeviceTensor) -> str:
    """Name of the tensor's element type, for instance `bfloat16`; `LayoutError` if it is not byte-addressable."""
    name = str(tensor.dtype).removeprefix("torch.")
    if _UNPLACEABLE.fullmatch(name) or tensor.element_size() <= 0:
        raise LayoutError(f"elements of dtype {name} are not byte-addressable; pass a view as torch.uint8")
    return name


def splits_by_token(tensor: DeviceTensor) -> bool:
    """Whether the first tokens of a page of this dtype can be copied alone."""
    return not _UNSPLITTABLE.fullmatch(dtype_name(tensor))


def byte_strides(tensor: DeviceTensor) -> tuple[int, ...]:
    """Bytes between neighbours, per axis."""
    size = tensor.element_size()
    return tuple(stride * size for stride in tensor.stride())


class FlatPages(NamedTuple):
    """All references of a layout, flat. Each array has shape `(references,)`.

    Attributes:
        base: Address of block 0's page.
        stride: Bytes between the pages of consecutive blocks.
        page: Bytes of a page.
        group: Index of the group.
    """

    base: I64
    stride: I64
    page: I64
    group: I64


class _Shared(NamedTuple):
    """How the pages of one reference meet those of others; boolean arrays, one element per other reference."""

    same_block: npt.NDArray[np.bool_]
    other_block: npt.NDArray[np.bool_]


def pools_of(pages: FlatPages, num_blocks: int, names: Sequence[str]) -> tuple[int, ...]:
    """The pool of each group; `LayoutError` for invalid overlaps.

    `names` are the groups' names. Pools are numbered from 0 in the order of their first group.
    """
    pool = list(range(len(names)))
    order = np.argsort(pages.base, kind="stable")
    pages = FlatPages(*(column[order] for column in pages))
    end = pages.base + (num_blocks - 1) * pages.stride + pages.page
    candidates = np.searchsorted(pages.base, end, side="left")
    for first, stop in enumerate(candidates.tolist()):
        if stop <= first + 1:
            continue
        others = slice(first + 1, stop)
        shared = _shared(pages, first, others, num_blocks)
        same_group = pages.group[others] == pages.group[first]
        bad = shared.other_block | (shared.same_block & same_group)
        if bad.any():
            second = first + 1 + int(np.argmax(bad))
            raise LayoutError(_complaint(pages, first, second, names))
        for group in np.unique(pages.group[others][shared.same_block]).tolist():
            _join(pool, int(pages.group[first]), group)
    numbers = {root: number for number, root in enumerate(dict.fromkeys(pool))}
    return tuple(numbers[root] for root in pool)


def _shared(pages: FlatPages, first: int, others: slice, num_blocks: int) -> _Shared:
    """Which of `others` (at higher addresses than `first`) have a page that meets one of `first`."""
    stride = int(pages.stride[first])
    gap = pages.base[others] - pages.base[first]
    # With one stride s, page m of the other starts gap + (m - n) * s bytes after page n of the first. No page is
    # longer than its stride, so only two shifts m - n can bring them together: to the right of it, and to the left.
    # The first of them always has its two blocks, because the other starts before our last page ends.
    shift, right = -(gap // stride), gap % stride
    meets_right = right < pages.page[first]
    meets_left = (stride - right < pages.page[others]) & (shift - 1 > -num_blocks)
    same = meets_right & (shift == 0)
    other = (meets_right & (shift != 0)) | meets_left
    for index in np.flatnonzero(pages.stride[others] != stride).tolist():
        same[index], other[index] = _shared_at_two_strides(pages, first, others.start + index, num_blocks)
    return _Shared(same, other)


def _shared_at_two_strides(pages: FlatPages, first: int, second: int, num_blocks: int) -> tuple[bool, bool]:
    blocks = np.arange(num_blocks, dtype=np.int64)
    start = pages.base[first] + blocks * pages.stride[first]
    other = pages.base[second] + blocks * pages.stride[second]
    low = np.searchsorted(other + pages.page[second], start, side="right")
    high = np.searchsorted(other, start + pages.page[first], side="left")
    meets = high > low
    same = meets & (low <= blocks) & (blocks < high)
    more_than_same = (high - low) > same
    return bool(same.any()), bool((meets & more_than_same).any())


def _join(pool: list[int], first: int, second: int) -> None:
    keep, drop = sorted((pool[first], pool[second]))
    pool[:] = [keep if root == drop else root for root in pool]


def _complaint(pages: FlatPages, first: int, second: int, names: Sequence[str]) -> str:
    described = " and ".join(
        f"{int(pages.page[i])} bytes at {int(pages.base[i]):#x} every {int(pages.stride[i])} "
        f"(group {names[int(pages.group[i])]!r})"
        for i in (first, second)
    )
    return f"pages overlap: {described}; only pages of one block, in different groups, may share bytes"


U64 = npt.NDArray[np.uint64]

_IMAGE_FORMAT = 1


class PageRef(NamedTuple):
    """One page of each block: the bytes of a block in one layer's buffer, or in a part of it.

    Attributes:
        tensor: Index into the layout's tensors.
        offset: Bytes from the tensor's element 0 to block 0's page.
        stride: Bytes between the pages of consecutive blocks.
        page_bytes: Bytes of a page, without padding.
        token_bytes: Bytes per token, if the first tokens of a block can be copied alone: the token axis is the
            outermost of each piece. `None` if only whole pages can be copied.
        layer: Model layer, the unit of layer ranges; not decreasing within a group. `None`: its position in the group.
        inner: Axes of the page in memory order, for instance `token:16,head:8,dim:128`. Part of the fingerprint, to
            distinguish pages of one size with different orders.
        pieces: Number of equal consecutive parts of a page, each with all tokens: the heads, if they are outermost.
    """

    tensor: int
    offset: int
    stride: int
    page_bytes: int
    token_bytes: int | None = None
    layer: int | None = None
    inner: str = ""
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class KVGroup:
    """The layers that share one block table.

    Attributes:
        name: For messages and tables.
        block_size: Tokens per block.
        blocks_per_chunk: Blocks per chunk, hence per chunk image.
        refs: The pages of a block, in image order.
    """

    name: str
    block_size: int
    blocks_per_chunk: int
    refs: tuple[PageRef, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all references, without padding."""
        return sum(ref.page_bytes for ref in self.refs)

    @property
    def used_bytes(self) -> int:
        """Bytes of one rank's part of an image, before its padding."""
        return self.block_bytes * self.blocks_per_chunk

    @property
    def part_bytes(self) -> int:
        """Bytes of one rank's part of an image, with its padding."""
        return align(self.used_bytes)

    @property
    def layers(self) -> tuple[int, ...]:
        """Model layer of each reference."""
        return tuple(i if ref.layer is None else ref.layer for i, ref in enumerate(self.refs))


class RefTable(NamedTuple):
    """The references of one group as arrays of shape `(references,)`, for whole-array planning.

    Attributes:
        base: uint64, address of block 0's page.
        stride: uint64, bytes between the pages of consecutive blocks.
        page: uint64, bytes of a page.
        image: uint64, bytes from the start of the image to the reference's first page, in this rank's part.
        token: uint64, bytes per token; 0 if pages cannot be split.
        layer: int64, model layer, never decreasing.
        image_offsets: uint64, shape `(references, blocks_per_chunk)`: bytes from the start of the image to each page.
        starts: uint64, shape `(2, references, blocks_per_chunk)`: `base`, repeated, and `image_offsets`, to compute
            both sides of a copy at once.
        pitch: The stride of all references; `None` if they differ.
        seams: Every `a - b` for which block a's page in one reference may end where block b's page in the next begins.
            `None` if unknown.
        alignment: The largest power of two that divides every address of a page, on the device and in an image.
        token_alignment: The same if only the first tokens of pages move.
        longest: Bytes of the longest page.
    """

    base: U64
    stride: U64
    page: U64
    image: U64
    token: U64
    layer: npt.NDArray[np.int64]
    image_offsets: U64
    starts: U64
    pitch: np.uint64 | None
    seams: frozenset[int] | None
    alignment: int
    token_alignment: int
    longest: int


class KVLayout:
    """The KV cache of one rank: groups of pages in tensors on one device.

    Attributes:
        groups: The KV cache groups; their order is the `group` of a `Section`.
        num_blocks: Number of blocks; ids are in `[0, num_blocks)` in every group.
        ranks: Number of ranks with a part of an image.
        rank: The number of this rank.
        device: Device of the tensors, as text.
        image_bytes: Bytes of the largest group's image: a slot of this size fits every group.
        least_image_bytes: Bytes of the smallest group's image: the least distance between images.
        pools: Pool of each group. Groups whose pages share bytes share a pool, in which a block id names a slot.
        fingerprint: SHA-256 (hexadecimal) of everything that determines an image's bytes: sizes, order and dtypes, but
            not addresses, strides or the number of blocks. Layouts with equal fingerprints have compatible images.

    Raises:
        LayoutError: Sizes that are not positive or do not divide, references outside their tensor, overlapping
            pages, tensors on different devices, a dtype that cannot be placed.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        tensors: Sequence[DeviceTensor],
        num_blocks: int,
        ranks: int = 1,
        rank: int = 0,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.ranks = ranks
        self.rank = rank
        _check_sizes(self)
        self._generation = 0
        self._tensors: tuple[DeviceTensor, ...] | None = None
        self._tables: tuple[RefTable, ...] = ()
        self._split: tuple[tuple[tuple[PageRef, ...], RefTable], ...] = ()
        self.pools: tuple[int, ...] = ()
        self._place(tuple(tensors))
        self._image_bytes = tuple(ranks * group.part_bytes for group in self.groups)
        self.image_bytes = max(self._image_bytes)
        self.least_image_bytes = min(self._image_bytes)
        self.num_layers = 1 + max(max(group.layers) for group in self.groups)

    @property
    def generation(self) -> int:
        """Changes each time device memory is freed or bound: plans of another generation must not run."""
        return self._generation

    @property
    def freed(self) -> bool:
        """Whether the device memory was freed."""
        return self._tensors is None

    @property
    def tensors(self) -> tuple[DeviceTensor, ...]:
        """The tensors; `FreedLayoutError` after `free`."""
        tensors = self._tensors
        if tensors is None:
            raise FreedLayoutError(f"the device memory of this layout was freed (generation {self._generation})")
        return tensors

    def image_bytes_of(self, group: int) -> int:
        """Bytes of an image of `group`: all ranks' parts."""
        return self._image_bytes[group]

    def table(self, group: int, *, split: bool = False) -> RefTable:
        """The references of `group` as arrays; `FreedLayoutError` after `free`.

        With `split`, each piece of a page is a reference, for copies of only the first tokens.
        """
        tables = self._tables  # another thread may free them after any check
        if not tables:
            raise FreedLayoutError(f"the device memory of this layout was freed (generation {self._generation})")
        return self._split[group][1] if split else tables[group]

    def refs(self, group: int, *, split: bool = False) -> tuple[PageRef, ...]:
        """The references of the rows of `table`."""
        return self._split[group][0] if split else self.groups[group].refs

    def check_live(self) -> None:
        """Raise `FreedLayoutError` if the device memory was freed."""
        _ = self.tensors

    def free(self) -> None:
        """Release the tensors; plans are refused from now on. Idempotent.

        Does not wait for copies: jobs in flight keep the tensors alive until they have ended.
        """
        if self._tensors is not None:
            self._tensors = None
            self._tables = ()
            self._generation += 1

    def take_back(self, tensors: Sequence[DeviceTensor]) -> None:
        """Bind new tensors of the same geometry after `free`. Earlier plans remain refused."""
        if self._tensors is not None:
            raise LayoutError("the layout is still bound to device memory: call free() first")
        self._place(tuple(tensors), expected=self.fingerprint)
        self._generation += 1

    def _place(self, tensors: tuple[DeviceTensor, ...], expected: str | None = None) -> None:
        """Take `tensors`, or raise with nothing changed."""
        _check_devices(tensors)
        bases = tuple(_bases(group, tensors, self.num_blocks) for group in self.groups)
        pages = _flat_pages(self.groups, bases, self.num_blocks)
        pools = pools_of(pages, self.num_blocks, [group.name for group in self.groups])
        fingerprint = _fingerprint(self.groups, tensors, self.ranks)
        if expected not in (None, fingerprint):
            raise LayoutError(f"expected tensors of layout {expected}, got tensors of {fingerprint}: other dtypes")
        if expected is not None and tuple(pools) != self.pools:
            raise LayoutError(f"expected the groups in device pools {self.pools}, got {pools}")
        part = zip(self.groups, bases, strict=True)
        tables = tuple(_table(group, base, self.rank * group.part_bytes, self.num_blocks) for group, base in part)
        self._split = tuple(_split(group, table) for group, table in zip(self.groups, tables, strict=True))
        self._tables = tables
        self.pools = pools
        self.fingerprint = fingerprint
        self.device = str(tensors[0].device)
        self._tensors = tensors

    def __str__(self) -> str:
        where = "freed" if self.freed else f"on {self.device}"
        lines = [
            f"KVLayout {self.fingerprint[:12]}: {self.num_blocks} blocks {where}, rank {self.rank} of {self.ranks}",
            f"{'group':<12}{'pool':>5}{'tokens':>8}{'blocks/chunk':>14}{'refs':>6}"
            f"{'bytes/block':>13}{'image bytes':>13}",
        ]
        for index, group in enumerate(self.groups):
            lines.append(
                f"{group.name:<12}{self.pools[index]:>5}{group.block_size:>8}{group.blocks_per_chunk:>14}"
                f"{len(group.refs):>6}{group.block_bytes:>13}{self.image_bytes_of(index):>13}"
            )
        return "\n".join(lines)


def _check_sizes(layout: KVLayout) -> None:
    sizes = {"num_blocks": layout.num_blocks, "ranks": layout.ranks, "number of groups": len(layout.groups)}
    for group in layout.groups:
        sizes[f"block_size of group {group.name!r}"] = group.block_size
        sizes[f"blocks_per_chunk of group {group.name!r}"] = group.blocks_per_chunk
        sizes[f"number of references of group {group.name!r}"] = len(group.refs)
    for what, size in sizes.items():
        if size <= 0:
            raise LayoutError(f"{what} must be positive, got {size}")
    if not 0 <= layout.rank < layout.ranks:
        raise LayoutError(f"rank {layout.rank} does not lie in [0, {layout.ranks})")
    for group in layout.groups:
        for index, ref in enumerate(group.refs):
            _check_ref(ref, group, f"reference {index} of group {group.name!r}", layout.num_blocks)
        layers = group.layers
        if layers[0] < 0 or any(low > high for low, high in itertools.pairwise(layers)):
            raise LayoutError(f"layers of group {group.name!r} must not be negative or decrease, got {layers}")


def _check_ref(ref: PageRef, group: KVGroup, what: str, num_blocks: int) -> None:
    if ref.page_bytes <= 0 or ref.offset < 0 or ref.stride < 0:
        raise LayoutError(f"{what}: page_bytes must be positive, offset and stride not negative, got {ref}")
    if num_blocks > 1 and ref.stride < ref.page_bytes:
        raise LayoutError(f"{what}: pages of {ref.page_bytes} bytes overlap at a stride of {ref.stride}")
    if ref.pieces < 1 or (ref.token_bytes or 0) * group.block_size * ref.pieces not in (0, ref.page_bytes):
        raise LayoutError(
            f"{what}: {ref.pieces} pieces of {group.block_size} tokens of {ref.token_bytes} bytes do not make a page "
            f"of {ref.page_bytes}"
        )


def _check_devices(tensors: Sequence[DeviceTensor]) -> None:
    if not tensors:
        raise LayoutError("a layout needs at least one tensor")
    devices = sorted({str(tensor.device) for tensor in tensors})
    if len(devices) > 1:
        raise LayoutError(f"tensors must be on one device, got {', '.join(devices)}")
    for tensor in tensors:
        dtype_name(tensor)


def _bases(group: KVGroup, tensors: Sequence[DeviceTensor], num_blocks: int) -> U64:
    """Address of block 0's page, per reference; `LayoutError` where a page lies outside its tensor's storage."""
    bases = np.empty(len(group.refs), dtype=np.uint64)
    for index, ref in enumerate(group.refs):
        if not 0 <= ref.tensor < len(tensors):
            raise LayoutError(f"group {group.name!r}: no tensor {ref.tensor} among {len(tensors)}")
        tensor = tensors[ref.tensor]
        storage = tensor.untyped_storage()
        start = tensor.data_ptr() + ref.offset
        end = start + (num_blocks - 1) * ref.stride + ref.page_bytes
        limit = storage.data_ptr() + storage.nbytes()
        if end > limit:
            raise LayoutError(
                f"reference {index} of group {group.name!r}: {num_blocks} blocks end {end - limit} bytes after tensor "
                f"{ref.tensor} does"
            )
        bases[index] = start
    return bases


def _flat_pages(groups: Sequence[KVGroup], bases: Sequence[U64], num_blocks: int) -> FlatPages:
    refs = [ref for group in groups for ref in group.refs]
    # One block has no neighbour: whatever stride it was given must not make pages meet that do not.
    strides = [ref.page_bytes if num_blocks == 1 else ref.stride for ref in refs]
    return FlatPages(
        base=np.concatenate(bases).astype(np.int64),
        stride=np.array(strides, dtype=np.int64),
        page=np.array([ref.page_bytes for ref in refs], dtype=np.int64),
        group=np.repeat(np.arange(len(groups)), [len(group.refs) for group in groups]),
    )


def _table(group: KVGroup, base: U64, part: int, num_blocks: int) -> RefTable:
    page = np.array([ref.page_bytes for ref in group.refs], dtype=np.uint64)
    chunk = page * np.uint64(group.blocks_per_chunk)
    image = np.uint64(part) + np.cumsum(chunk, dtype=np.uint64) - chunk
    stride = np.array([ref.stride for ref in group.refs], dtype=np.uint64)
    starts = np.empty((2, len(base), group.blocks_per_chunk), dtype=np.uint64)
    starts[0] = base[:, None]
    starts[1] = image[:, None] + np.outer(page, np.arange(group.blocks_per_chunk, dtype=np.uint64))
    pitch = stride[0] if (stride == stride[0]).all() else None
    token = np.array([ref.token_bytes or 0 for ref in group.refs], dtype=np.uint64)
    bits = int(np.bitwise_or.reduce(np.concatenate([base, stride, page, image])))
    token_bits = bits | int(np.bitwise_or.reduce(token))
    return RefTable(
        base=base,
        stride=stride,
        page=page,
        image=image,
        token=token,
        layer=np.array(group.layers, dtype=np.int64),
        image_offsets=starts[1],
        starts=starts,
        pitch=pitch,
        seams=_seams(base, page, int(pitch), num_blocks) if pitch else None,
        alignment=bits & -bits,
        token_alignment=token_bits & -token_bits,
        longest=int(page.max()),
    )


def _seams(base: U64, page: U64, pitch: int, num_blocks: int) -> frozenset[int]:
    """`RefTable.seams` of references of one stride."""
    steps = zip(itertools.pairwise(base.tolist()), page.tolist(), strict=False)
    gaps = [second - first - nbytes for (first, second), nbytes in steps]
    return frozenset(gap // pitch for gap in gaps if gap % pitch == 0 and abs(gap) < num_blocks * pitch)


def _split(group: KVGroup, table: RefTable) -> tuple[tuple[PageRef, ...], RefTable]:
    """The pieces of all pages as references, and their table: offsets in an image are those within the pages."""
    counts = np.array([ref.pieces if ref.token_bytes else 1 for ref in group.refs])
    if (counts == 1).all():
        return group.refs, table
    which = np.repeat(np.arange(len(counts)), counts)
    page = table.page[which] // counts[which].astype(np.uint64)
    at = (np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)).astype(np.uint64) * page
    starts = table.starts[:, which] + at[:, None]
    layers = group.layers
    refs = tuple(
        ref._replace(offset=ref.offset + skip, page_bytes=size, layer=layers[index], pieces=1)
        for index, skip, size in zip(which.tolist(), at.tolist(), page.tolist(), strict=True)
        for ref in [group.refs[index]]
    )
    bits = int(np.bitwise_or.reduce(page)) | table.alignment
    token_bits = bits | table.token_alignment
    return refs, table._replace(
        base=starts[0, :, 0],
        stride=table.stride[which],
        page=page,
        image=starts[1, :, 0],
        token=table.token[which],
        layer=table.layer[which],
        image_offsets=starts[1],
        starts=starts,
        seams=None,
        alignment=bits & -bits,
        token_alignment=token_bits & -token_bits,
        longest=int(page.max()),
    )


def _token_bytes(ref: PageRef) -> int | None:
    """As the fingerprint has it: images of pages in several pieces were made before those could be split."""
    return ref.token_bytes if ref.pieces == 1 else None


def _fingerprint(groups: Sequence[KVGroup], tensors: Sequence[DeviceTensor], ranks: int) -> str:
    geometry = {
        "format": _IMAGE_FORMAT,
        "alignment": DISK_PAGE,
        "ranks": ranks,
        "groups": [
            {
                "block_size": group.block_size,
                "blocks_per_chunk": group.blocks_per_chunk,
                "refs": [
                    [layer, ref.page_bytes, _token_bytes(ref), ref.inner, dtype_name(tensors[ref.tensor])]
                    for layer, ref in zip(group.layers, group.refs, strict=True)
                ],
            }
            for group in groups
        ],
    }
    return hashlib.sha256(json.dumps(geometry, sort_keys=True).encode()).hexdigest()
