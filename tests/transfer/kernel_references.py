"""References of the copy kernels (`longshore.transfer.device.cuda.kernels`), in plain torch for host memory."""

from __future__ import annotations

import ctypes

import torch

from longshore.transfer.device.cuda.arguments import COLUMNS, KernelShape


def gather_reference(blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
    """As `gather`, page by page."""
    for page, place, width in pages_of(blocks, rows, table, shape):
        _memory(place, width).copy_(_memory(page, width))


def scatter_reference(blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
    """As `scatter`, page by page."""
    for page, place, width in pages_of(blocks, rows, table, shape):
        _memory(page, width).copy_(_memory(place, width))


def copy_blocks_reference(blocks: torch.Tensor, sources: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
    """As `copy_blocks`, page by page."""
    rows = torch.zeros(shape.chunks, dtype=torch.int64)
    written, read = pages_of(blocks, rows, table, shape), pages_of(sources, rows, table, shape)
    for (to, _, width), (at, _, _) in zip(written, read, strict=True):
        _memory(to, width).copy_(_memory(at, width))


def pages_of(
    blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape
) -> list[tuple[int, int, int]]:
    """Of each page its address, its place in its row, and how many bytes of it move."""
    lines = table.view(shape.refs, COLUMNS).tolist()
    return [
        (base + block * stride, row + offset + sub * step, width)
        for row, ids in zip(rows.tolist(), blocks.view(shape.chunks, shape.subs).tolist(), strict=True)
        for base, stride, width, offset, step in lines
        for sub, block in enumerate(ids)
    ]


def _memory(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
