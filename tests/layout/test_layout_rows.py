"""Layouts of one row per block."""

from __future__ import annotations

import pytest
import torch

from longshore.errors import LayoutError
from longshore.layout import from_rows


def test_rows_are_k_and_v_of_each_layer() -> None:
    rows = torch.zeros(6, 2 * 3 * 40, dtype=torch.uint8)
    layout = from_rows(rows, pages_per_block=6, block_size=4, blocks_per_chunk=2)
    refs = layout.groups[0].refs
    assert [(ref.offset, ref.stride, ref.page_bytes, ref.token_bytes) for ref in refs] == [
        (40 * i, 240, 40, 10) for i in range(6)
    ]
    assert layout.groups[0].layers == (0, 0, 1, 1, 2, 2)
    assert layout.num_blocks == 6


def test_rows_may_be_wide_elements_and_padded() -> None:
    rows = torch.zeros(6, 50, dtype=torch.bfloat16)[:, :48]
    refs = from_rows(rows, pages_per_block=2, block_size=4).groups[0].refs
    assert [(ref.offset, ref.stride, ref.page_bytes, ref.token_bytes) for ref in refs] == [
        (0, 100, 48, 12),
        (48, 100, 48, 12),
    ]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((6, 240), {"pages_per_block": 7, "block_size": 4}),
        ((6, 240), {"pages_per_block": 6, "block_size": 7}),
        ((6, 240), {"pages_per_block": 3, "block_size": 4}),  # not a multiple of the two pages of a layer
        ((6, 240), {"pages_per_block": 0, "block_size": 4}),
        ((6, 240), {"pages_per_block": 6, "block_size": 0}),
        ((6, 0), {"pages_per_block": 6, "block_size": 4}),
        ((0, 240), {"pages_per_block": 6, "block_size": 4}),
        ((6, 6, 40), {"pages_per_block": 6, "block_size": 4}),
    ],
)
def test_rows_that_do_not_divide_are_refused(shape: tuple[int, ...], options: dict[str, int]) -> None:
    with pytest.raises(LayoutError):
        from_rows(torch.zeros(shape, dtype=torch.uint8), **options)


def test_rows_that_are_not_contiguous_are_refused() -> None:
    with pytest.raises(LayoutError, match="contiguous rows"):
        from_rows(torch.zeros(240, 6, dtype=torch.uint8).T, pages_per_block=6, block_size=4)


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.bits8])
def test_packed_four_bit_pages_and_block_scales_are_not_split(dtype: torch.dtype) -> None:
    rows = from_rows(torch.zeros(6, 48, dtype=torch.uint8).view(dtype), pages_per_block=2, block_size=4)
    assert [ref.token_bytes for ref in rows.groups[0].refs] == [None, None]
