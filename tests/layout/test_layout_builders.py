"""Layouts from rows and from named axes: what is found in the pages is what the axes say, whatever the strides."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from longshore.boundary import HOST, Section
from longshore.errors import LayoutError
from longshore.layout import KVLayout, from_axes, from_rows, group_from_axes
from longshore.tiers.arena import Arena
from longshore.transfer.device.base import copy_pieces
from plans import plan

SIZES = {"layer": 3, "kv": 2, "block": 8, "token": 4, "head": 2, "dim": 5}


def permuted(order: tuple[str, ...], names: tuple[str, ...], dtype: torch.dtype = torch.int16) -> torch.Tensor:
    """A tensor with axes `names` over memory in the order `order`; each element tells its indices."""
    physical = torch.zeros([SIZES[name] for name in order], dtype=dtype)
    tensor = physical.permute([order.index(name) for name in names])
    digits = torch.zeros_like(tensor)
    for name in ("layer", "kv", "block", "token", "head", "dim"):
        if name in names:
            shape = [-1 if axis == name else 1 for axis in names]
            digits = digits * SIZES[name] + torch.arange(SIZES[name], dtype=dtype).view(shape)
    tensor.copy_(digits)
    return tensor


def image_of(layout: KVLayout, blocks: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    arena = Arena(layout.image_bytes)
    made = plan(
        layout, [Section(0, 0, blocks)], [0], destination=HOST, host_address=arena.address, host_bytes=arena.nbytes
    )
    copy_pieces(made.source, made.destination, made.size)
    return arena.array.copy()


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


def test_rows_of_state_have_no_tokens() -> None:
    layout = from_rows(
        torch.zeros(6, 7, dtype=torch.uint8),
        pages_per_block=1,
        pages_per_layer=1,
        block_size=16,
        tokens_outermost=False,
    )
    assert layout.groups[0].refs[0].token_bytes is None


def test_blocks_first_and_k_v_apart_make_the_same_image() -> None:
    """Two engines that hold K and V in another order read each other's images."""
    names = ("kv", "block", "token", "head", "dim")
    apart = from_axes([permuted(names, names)], names, block_size=4, blocks_per_chunk=2)
    first = ("block", "kv", "token", "head", "dim")
    together = from_axes([permuted(first, first)], first, block_size=4, blocks_per_chunk=2)
    assert apart.fingerprint == together.fingerprint
    np.testing.assert_array_equal(image_of(apart, (5, 2)), image_of(together, (5, 2)))
    assert apart.groups[0].refs[0].token_bytes == together.groups[0].refs[0].token_bytes == 20


def test_heads_before_tokens_are_another_image() -> None:
    names = ("kv", "block", "token", "head", "dim")
    by_token = from_axes([permuted(names, names)], names, block_size=4)
    by_head = from_axes([permuted(("kv", "block", "head", "token", "dim"), names)], names, block_size=4)
    assert by_head.fingerprint != by_token.fingerprint
    assert by_head.groups[0].refs[0][-4:] == (10, 0, "kv0 head:2,token:4,dim:5", 2)
    assert by_head.groups[0].block_bytes == by_token.groups[0].block_bytes


NAMES = ("layer", "kv", "block", "token", "head", "dim")


@examples(80)
@given(st.permutations(NAMES), st.permutations(NAMES), st.integers(1, 3))
def test_one_fingerprint_is_one_image_under_any_strides(memory: list[str], shown: list[str], per_chunk: int) -> None:
    order, names = tuple(memory), tuple(shown)
    try:
        layout = from_axes([permuted(order, names)], names, block_size=4, blocks_per_chunk=per_chunk)
    except LayoutError:
        # Only where layers lie between the tokens, heads or elements of a page.
        inner = list(itertools.takewhile(lambda name: name != "block", reversed(order)))
        assert "layer" in inner[: max(inner.index(name) for name in inner if name not in ("layer", "kv"))]
        return
    canonical = from_axes([permuted(order, order)], order, block_size=4, blocks_per_chunk=per_chunk)
    blocks = (6, 1, 3)[:per_chunk]
    image = image_of(layout, blocks)
    assert layout.fingerprint == canonical.fingerprint
    np.testing.assert_array_equal(image, image_of(canonical, blocks))
    assert sorted(words(image, layout)) == sorted(expected_words(blocks))
    seen = IMAGES.setdefault((layout.fingerprint, per_chunk), image)
    np.testing.assert_array_equal(image, seen)


IMAGES: dict[tuple[str, int], np.ndarray[Any, np.dtype[np.uint8]]] = {}


def words(image: np.ndarray[Any, np.dtype[np.uint8]], layout: KVLayout) -> list[int]:
    used: list[int] = image[: layout.groups[0].used_bytes].view(np.int16).tolist()
    return used


def expected_words(blocks: tuple[int, ...]) -> list[int]:
    whole = permuted(NAMES, NAMES)
    return [int(word) for block in blocks for word in whole[:, :, block].reshape(-1)]


def test_a_tensor_across_layers_has_references_by_layer() -> None:
    names = ("block", "layer", "kv", "token", "head", "dim")
    layout = from_axes([permuted(names, names)], names, block_size=4)
    assert layout.groups[0].layers == (0, 0, 1, 1, 2, 2)
    assert layout.groups[0].refs[0].inner == "kv0 token:4,head:2,dim:5"


def test_latent_pages_of_a_size_of_their_own() -> None:
    tensor = torch.zeros(10, 16, 656, dtype=torch.uint8)
    ref = from_axes([tensor], ("block", "token", "dim"), block_size=16).groups[0].refs[0]
    assert (ref.page_bytes, ref.stride, ref.token_bytes) == (16 * 656, 16 * 656, 656)


def test_padded_pages_leave_their_padding_out() -> None:
    padded = torch.zeros(10, 100, dtype=torch.uint8)[:, :80].unflatten(1, (4, 20))
    ref = from_axes([padded], ("block", "token", "dim"), block_size=4).groups[0].refs[0]
    assert (ref.page_bytes, ref.stride, ref.token_bytes) == (80, 100, 20)


def test_padded_tokens_are_references_of_their_own() -> None:
    padded = torch.zeros(10, 4, 25, dtype=torch.uint8)[:, :, :20]
    refs = from_axes([padded], ("block", "token", "dim"), block_size=4).groups[0].refs
    assert [(ref.offset, ref.page_bytes, ref.token_bytes) for ref in refs] == [(25 * i, 20, None) for i in range(4)]


def test_kernel_blocks_without_padding_are_one_page() -> None:
    names = ("kv", "block", "token", "head", "dim")
    layout = from_axes([permuted(names, names)], names, block_size=16)
    ref = layout.groups[0].refs[0]
    assert (layout.num_blocks, ref.page_bytes, ref.stride, ref.token_bytes) == (2, 320, 320, 20)
    # 16 tokens are 16 tokens, in four kernel blocks or in one block.
    whole = torch.zeros(2, 2, 16, 2, 5, dtype=torch.int16)
    assert from_axes([whole], names, block_size=16).fingerprint == layout.fingerprint


def test_kernel_blocks_with_others_between_are_pages_apart() -> None:
    names = ("block", "kv", "token", "head", "dim")
    layout = from_axes([permuted(names, names)], names, block_size=8)
    assert layout.num_blocks == 4
    assert [(ref.offset, ref.stride, ref.page_bytes, ref.token_bytes) for ref in layout.groups[0].refs] == [
        (0, 320, 80, None),
        (160, 320, 80, None),
        (80, 320, 80, None),
        (240, 320, 80, None),
    ]


def test_scales_are_pages_beside_their_values() -> None:
    values = torch.zeros(2, 10, 4, 2, 5, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(2, 10, 4, 2, dtype=torch.float32)
    axes = [("kv", "block", "token", "head", "dim"), ("kv", "block", "token", "head")]
    layout = from_axes([values, scales], axes, block_size=4, layers=[0, 0])
    assert layout.groups[0].layers == (0, 0, 0, 0)
    assert [ref.page_bytes for ref in layout.groups[0].refs] == [40, 40, 32, 32]


def test_keys_and_values_in_tensors_apart_stand_together_by_layer() -> None:
    tensors = [torch.zeros(10, 4, 5) for _ in range(4)]
    layout = from_axes(tensors, ("block", "token", "dim"), block_size=4, layers=[0, 1, 0, 1])
    assert [(ref.layer, ref.tensor) for ref in layout.groups[0].refs] == [(0, 0), (0, 2), (1, 1), (1, 3)]


@pytest.mark.parametrize("dtype", [torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, torch.bits8])
def test_packed_four_bit_pages_and_block_scales_are_not_split(dtype: torch.dtype) -> None:
    packed = torch.zeros(10, 4, 5, dtype=torch.uint8).view(dtype)
    assert from_axes([packed], ("block", "token", "dim"), block_size=4).groups[0].refs[0].token_bytes is None
    rows = from_rows(torch.zeros(6, 48, dtype=torch.uint8).view(dtype), pages_per_block=2, block_size=4)
    assert [ref.token_bytes for ref in rows.groups[0].refs] == [None, None]


def test_scales_of_packed_four_bit_values_move_whole() -> None:
    values = torch.zeros(2, 10, 4, 2, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scales = torch.zeros(2, 10, 4, 2, 1, dtype=torch.float8_e4m3fn)
    axes = ("kv", "block", "token", "head", "dim")
    layout = from_axes([values, scales], axes, block_size=4, layers=[0, 0])
    assert [ref.token_bytes for ref in layout.groups[0].refs] == [None] * 4


def test_a_token_axis_beside_interleaved_scales_is_refused() -> None:
    tensor = torch.zeros(10, 4, 132, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="'token' and 'interleaved'"):
        from_axes([tensor], ("block", "token", "interleaved"), block_size=4)
    whole = from_axes([tensor.flatten(1)], ("block", "interleaved"), block_size=4)
    assert whole.groups[0].refs[0].token_bytes is None


def test_several_groups_over_tensors_of_one_layout() -> None:
    full = [torch.zeros(2, 10, 4, 5) for _ in range(3)]
    state = [torch.zeros(10, 7)]
    axes = ("kv", "block", "token", "dim")
    first, count = group_from_axes(full, axes, block_size=4, name="full")
    second, same = group_from_axes(state, ("block", "state"), block_size=16, name="mamba", first_tensor=3)
    layout = KVLayout((first, second), [*full, *state], count)
    assert count == same == 10
    assert [ref.tensor for ref in layout.groups[1].refs] == [3]
    assert layout.pools == (0, 1)


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        (("block", "token"), {}),
        (("block", "token", "token"), {}),
        (("page", "token", "dim"), {}),
        ([("block", "token", "dim")] * 2, {}),
        (("block", "token", "dim"), {"block_size": 5}),
        (("block", "token", "dim"), {"block_size": 12}),  # 10 kernel blocks do not make blocks of 3
        (("block", "token", "dim"), {"block_size": 2}),
        (("block", "token", "dim"), {"layers": [0, 1]}),
        (("block", "token", "dim"), {"kernel_block_size": 2}),
        (("block", "dim", "layer"), {}),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes: Any, options: dict[str, Any]) -> None:
    with pytest.raises(LayoutError):
        from_axes([torch.zeros(10, 4, 5)], axes, **({"block_size": 4} | options))


def test_axes_that_repeat_bytes_are_refused() -> None:
    with pytest.raises(LayoutError, match="need a positive stride: elements share bytes"):
        from_axes([torch.zeros(10, 1, 5).expand(10, 4, 5)], ("block", "token", "dim"), block_size=4)


def test_tensors_of_unequal_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(LayoutError, match="different numbers of blocks"):
        from_axes([torch.zeros(10, 4, 5), torch.zeros(9, 4, 5)], ("block", "token", "dim"), block_size=4)


def test_no_tensors_are_refused() -> None:
    with pytest.raises(LayoutError, match="at least one tensor"):
        from_axes([], ("block", "token", "dim"), block_size=4)
