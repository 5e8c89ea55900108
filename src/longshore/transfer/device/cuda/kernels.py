# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""Kernels that move pages between blocks and rows of bytes, and from block to block.

A `row` has the pages of one chunk densely: a piece of the staging ring, or an image in registered host memory. Block
ids are passed as they are; attributes of references are in a table on the device:

    page of (chunk, ref, sub)     base[ref] + blocks[chunk, sub] * stride[ref]
    its address in the row        rows[chunk] + offset[ref] + sub * step[ref]

Each kernel moves `width[ref]` bytes of each page, in words of the largest size that divides all addresses, at most 16
bytes, and the remainder of a page byte by byte. A program moves `PIECES` times `SPAN` words at a time, of one page or
of several; few programs saturate the link, and more would take multiprocessors from the engine. Data is read once, so
it is evicted first from the cache.

Each kernel has a reference with the same arguments, in plain torch: `tests/transfer/kernel_references.py`.

`mix64` sums the 8-byte words of device memory, each mixed with its position. Each program adds `SPAN` mixed words to
one sum; the order of additions does not matter. The CPU version and the last step are in `longshore.checksums`;
docs/file-format.md is the specification.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from longshore import checksums
from longshore.transfer.device.cuda.arguments import KernelShape

_WARPS = 8


@triton.jit
def _move(read, write, width, first, live, WORD: tl.constexpr, SPAN: tl.constexpr, TAIL: tl.constexpr):  # noqa: N803
    """Up to `SPAN` words from `first` on of each page; the page's tail with its first words. One line per page."""
    words = tl.where(live, width // WORD - first, 0)
    unit: tl.constexpr = 4 if WORD > 4 else WORD
    each: tl.constexpr = WORD // unit
    lane = tl.arange(0, SPAN * each)
    inside = lane[None, :] < tl.multiple_of(words * each, each)[:, None]
    at = (first[:, None] * each + lane[None, :]) * unit
    if unit == 4:
        source = (read[:, None] + at).to(tl.pointer_type(tl.int32))
        target = (write[:, None] + at).to(tl.pointer_type(tl.int32))
    elif unit == 2:
        source = (read[:, None] + at).to(tl.pointer_type(tl.int16))
        target = (write[:, None] + at).to(tl.pointer_type(tl.int16))
    else:
        source = (read[:, None] + at).to(tl.pointer_type(tl.int8))
        target = (write[:, None] + at).to(tl.pointer_type(tl.int8))
    source = tl.max_contiguous(tl.multiple_of(source, (1, WORD)), (1, each))
    target = tl.max_contiguous(tl.multiple_of(target, (1, WORD)), (1, each))
    tl.store(
        target, tl.load(source, mask=inside, eviction_policy="evict_first"), mask=inside, eviction_policy="evict_first"
    )
    if TAIL:
        rest = tl.where(live & (first == 0), width % WORD, 0)
        lane = tl.arange(0, WORD)
        inside = lane[None, :] < rest[:, None]
        at = (width - width % WORD)[:, None] + lane[None, :]
        source = (read[:, None] + at).to(tl.pointer_type(tl.int8))
        target = (write[:, None] + at).to(tl.pointer_type(tl.int8))
        tl.store(target, tl.load(source, mask=inside), mask=inside)


@triton.jit
def _place(item, live, rows, table, refs, subs, segments, SPAN: tl.constexpr):  # noqa: N803
    """Of each item: index of its block, line of the table, address in the row, and the first word to move."""
    segment = (item % segments).to(tl.int64)
    piece = item // segments
    sub = piece % subs
    line = table + (piece // subs % refs) * 5
    chunk = piece // subs // refs
    row = tl.load(rows + chunk, mask=live, other=0)
    place = row + tl.load(line + 3, mask=live, other=0) + sub * tl.load(line + 4, mask=live, other=0)
    return chunk * subs + sub, line, place, segment * SPAN


@triton.jit
def _page(blocks, index, line, live):
    """Address of the page of each block."""
    block = tl.load(blocks + index, mask=live, other=0)
    return tl.load(line, mask=live, other=0) + block * tl.load(line + 1, mask=live, other=0)


@triton.jit
def _gather_some(
    start, blocks, rows, table, total, refs, subs, segments,
    WORD: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    item = start + tl.arange(0, PIECES)
    live = item < total
    index, line, place, first = _place(item, live, rows, table, refs, subs, segments, SPAN)
    width = tl.load(line + 2, mask=live, other=0)
    _move(_page(blocks, index, line, live), place, width, first, live, WORD, SPAN, TAIL)


@triton.jit
def _scatter_some(
    start, blocks, rows, table, total, refs, subs, segments,
    WORD: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    item = start + tl.arange(0, PIECES)
    live = item < total
    index, line, place, first = _place(item, live, rows, table, refs, subs, segments, SPAN)
    width = tl.load(line + 2, mask=live, other=0)
    _move(place, _page(blocks, index, line, live), width, first, live, WORD, SPAN, TAIL)


@triton.jit
def _copy_some_blocks(
    start, blocks, sources, table, total, refs, subs, segments,
    WORD: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    item = start + tl.arange(0, PIECES)
    live = item < total
    segment = (item % segments).to(tl.int64)
    piece = item // segments
    line = table + (piece // subs % refs) * 5
    index = piece // subs // refs * subs + piece % subs
    width = tl.load(line + 2, mask=live, other=0)
    read, write = _page(sources, index, line, live), _page(blocks, index, line, live)
    _move(read, write, width, segment * SPAN, live, WORD, SPAN, TAIL)


@triton.jit(do_not_specialize=["total", "refs", "subs", "segments"])
def gather_kernel(
    blocks, rows, table, total, refs, subs, segments,
    WORD: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Pages into rows."""
    for start in range(tl.program_id(0) * PIECES, total, tl.num_programs(0) * PIECES):
        _gather_some(start, blocks, rows, table, total, refs, subs, segments, WORD, SPAN, PIECES, TAIL)


@triton.jit(do_not_specialize=["total", "refs", "subs", "segments"])
def scatter_kernel(
    blocks, rows, table, total, refs, subs, segments,
    WORD: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Rows into pages."""
    for start in range(tl.program_id(0) * PIECES, total, tl.num_programs(0) * PIECES):
        _scatter_some(start, blocks, rows, table, total, refs, subs, segments, WORD, SPAN, PIECES, TAIL)


@triton.jit(do_not_specialize=["total", "refs", "subs", "segments"])
def copy_blocks_kernel(
    blocks, sources, table, total, refs, subs, segments,
    WORD: tl.constexpr, SPAN: tl.constexpr, PIECES: tl.constexpr, TAIL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Pages of `sources` into those of `blocks`."""
    for start in range(tl.program_id(0) * PIECES, total, tl.num_programs(0) * PIECES):
        _copy_some_blocks(start, blocks, sources, table, total, refs, subs, segments, WORD, SPAN, PIECES, TAIL)


def gather(blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
    """Pages into rows, on the calling thread's current stream.

    Args:
        blocks: int64, shape `(chunks * subs,)`, on the device.
        rows: int64, shape `(chunks,)`, on the device: address of each row.
        table: int64, shape `(refs * COLUMNS,)`, on the device.
        shape: Numbers of chunks, references and blocks, and launch parameters.
    """
    _launch(gather_kernel, (blocks, rows, table), shape)


def scatter(blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
    """Rows into pages; arguments as for `gather`. No block may be named twice."""
    _launch(scatter_kernel, (blocks, rows, table), shape)


def copy_blocks(blocks: torch.Tensor, sources: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
    """Pages of `sources` into those of `blocks`, which are as many and none of them; arguments as for `gather`."""
    _launch(copy_blocks_kernel, (blocks, sources, table), shape)


def constants(shape: KernelShape) -> dict[str, Any]:
    """The compile-time constants of a kernel."""
    return {"WORD": shape.word, "SPAN": shape.span, "PIECES": shape.rows_at_once, "TAIL": shape.tail}


def _launch(kernel: Any, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], shape: KernelShape) -> None:
    total = shape.segments_in_all
    programs = max(1, min(shape.programs, triton.cdiv(total, shape.rows_at_once)))
    sizes = (total, shape.refs, shape.subs, shape.segments)
    kernel[(programs,)](*tensors, *sizes, **constants(shape), num_warps=_WARPS)


SPAN = 4096
"""Words of one program."""

WORD = 8
"""Bytes of a word."""


@triton.jit
def _mix(word, FACTOR: tl.constexpr):  # noqa: N803
    word ^= word >> 32
    word *= FACTOR
    word ^= word >> 32
    word *= FACTOR
    return word ^ (word >> 32)


@triton.jit(do_not_specialize=["words"])
def sum_kernel(address, words, total, SPAN: tl.constexpr, STEP: tl.constexpr, FACTOR: tl.constexpr):  # noqa: N803
    """Add the mixed words from `address` on to `total`, one int64, modulo 2**64."""
    index = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = index < words
    word = tl.load(address + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
    place = (index + 1).to(tl.uint64) * STEP
    mixed = tl.where(inside, _mix(word ^ place, FACTOR).to(tl.int64, bitcast=True), 0)
    tl.atomic_add(total, tl.sum(mixed, axis=0))


def mix64(memory: torch.Tensor) -> int:
    """`longshore.checksums.mix64` of `memory`, int64 on the device, on the current stream; waits for it."""
    total = torch.zeros(1, dtype=torch.int64, device=memory.device)
    words = memory.numel()
    sum_kernel[(triton.cdiv(words, SPAN),)](
        memory, words, total, SPAN=SPAN, STEP=checksums.STEP, FACTOR=checksums.FACTOR, num_warps=_WARPS
    )
    return checksums.finish(int(total.item()) % 2**64, words * WORD)
