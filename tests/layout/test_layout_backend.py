"""Axes found by asking a back end several times, for every kind of shape that back ends have."""

from __future__ import annotations

import pytest
import torch

from longshore.errors import LayoutError
from longshore.layout import axes_of_backend, from_axes, from_backend


class Apart:
    """K and V in front; says nothing of memory."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        if block_size % 16:
            raise ValueError("block size must be a multiple of 16")
        return (2, num_blocks, block_size, num_kv_heads, head_size)


class BlocksFirst:
    """Blocks first; heads before tokens in memory, and layers after blocks."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    def get_kv_cache_stride_order(self, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (1, 2, 0, 4, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)


class Latent:
    """One latent tensor; serves a single head, and one head size."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        assert num_kv_heads == 1
        if head_size != 576:
            raise ValueError("head size must be 576")
        return (num_blocks, block_size, 656)

    def get_kv_cache_stride_order(self, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        raise NotImplementedError


class Packed:
    """Tokens, heads and elements in one axis."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size * num_kv_heads * head_size)


def test_two_blocks_two_heads_and_two_halves_are_told_apart() -> None:
    tensor = torch.zeros(2, 2, 16, 2, 2)
    axes = axes_of_backend(Apart(), tensor, kernel_block_size=16, num_kv_heads=2, head_size=2)
    assert axes == ("kv", "block", "token", "head", "dim")
    axes = axes_of_backend(BlocksFirst(), tensor, kernel_block_size=16, num_kv_heads=2, head_size=2)
    assert axes == ("block", "kv", "token", "head", "dim")


def test_a_tensor_in_the_order_of_memory() -> None:
    tensor = torch.zeros(9, 2, 8, 16, 5)
    axes = axes_of_backend(BlocksFirst(), tensor, kernel_block_size=16, num_kv_heads=8, head_size=5)
    assert axes == ("block", "kv", "head", "token", "dim")


def test_a_permuted_view_of_it() -> None:
    tensor = torch.zeros(9, 2, 8, 16, 5).permute(0, 1, 3, 2, 4)
    axes = axes_of_backend(BlocksFirst(), tensor, kernel_block_size=16, num_kv_heads=8, head_size=5)
    assert axes == ("block", "kv", "token", "head", "dim")


@pytest.mark.parametrize("shown", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4)])
def test_strides_tell_heads_from_as_many_tokens(shown: tuple[int, ...]) -> None:
    tensor = torch.zeros(9, 2, 16, 16, 5).permute(shown)
    layout = from_backend(BlocksFirst(), [tensor], kernel_block_size=16, num_kv_heads=16, head_size=5)
    assert layout.groups[0].refs[0].inner == "kv0 head:16,token:16,dim:5"


def test_an_axis_more_means_a_tensor_across_layers() -> None:
    memory = torch.zeros(9, 2, 3, 8, 16, 5)
    options = {"kernel_block_size": 16, "num_kv_heads": 8, "head_size": 5}
    as_memory = axes_of_backend(BlocksFirst(), memory, **options)
    assert as_memory == ("block", "kv", "layer", "head", "token", "dim")
    logical = memory.permute(2, 0, 1, 4, 3, 5)
    assert axes_of_backend(BlocksFirst(), logical, **options) == ("layer", "block", "kv", "token", "head", "dim")
    layouts = [from_backend(BlocksFirst(), [tensor], **options) for tensor in (memory, logical)]
    assert layouts[0].fingerprint == layouts[1].fingerprint
    assert layouts[0].groups[0].layers == (0, 0, 1, 1, 2, 2)


def test_a_backend_that_refuses_sizes_and_the_question_of_memory() -> None:
    tensor = torch.zeros(9, 16, 656, dtype=torch.uint8)
    layout = from_backend(Latent(), [tensor], kernel_block_size=16, num_kv_heads=1, head_size=576)
    ref = layout.groups[0].refs[0]
    assert (layout.num_blocks, ref.page_bytes, ref.token_bytes) == (9, 16 * 656, 656)


def test_kernel_blocks_of_a_packed_backend() -> None:
    tensors = [torch.zeros(2, 12, 16 * 2 * 4) for _ in range(2)]
    layout = from_backend(Packed(), tensors, kernel_block_size=16, num_kv_heads=2, head_size=4, block_size=64)
    ref = layout.groups[0].refs[0]
    assert (layout.num_blocks, ref.page_bytes, ref.token_bytes) == (3, 4 * 16 * 2 * 4 * 4, None)


def test_several_backends_in_one_group() -> None:
    apart, first = torch.zeros(2, 9, 16, 8, 5), torch.zeros(9, 2, 8, 16, 5)
    options = {"kernel_block_size": 16, "num_kv_heads": 8, "head_size": 5}
    axes = [axes_of_backend(Apart(), apart, **options), axes_of_backend(BlocksFirst(), first, **options)]
    layout = from_axes([apart, first], axes, block_size=16)
    assert layout.groups[0].layers == (0, 0, 1, 1)
    assert [ref.token_bytes for ref in layout.groups[0].refs] == [160, 160, 20, 20]


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match="expected a tensor of axes"):
        axes_of_backend(Apart(), torch.zeros(2, 9, 32, 8, 5), kernel_block_size=16, num_kv_heads=8, head_size=5)


class TwoPairs:
    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, 2, block_size)


class Mixed:
    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks * block_size, num_kv_heads, head_size)


class WrongOrder(Apart):
    def get_kv_cache_stride_order(self, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        return (0, 1, 2, 3)


def test_shapes_that_stay_ambiguous_are_refused() -> None:
    with pytest.raises(LayoutError, match="cannot identify the axes"):
        axes_of_backend(TwoPairs(), torch.zeros(2, 9, 2, 16), kernel_block_size=16, num_kv_heads=8, head_size=5)
    with pytest.raises(LayoutError, match="blocks need an axis of their own"):
        axes_of_backend(Mixed(), torch.zeros(2, 144, 8, 5), kernel_block_size=16, num_kv_heads=8, head_size=5)
    with pytest.raises(LayoutError, match="stride order of 5 axes"):
        axes_of_backend(WrongOrder(), torch.zeros(2, 9, 16, 8, 5), kernel_block_size=16, num_kv_heads=8, head_size=5)


class ByDtype:
    """As back ends of sparse MLA: 656 bytes for a token of `fp8_ds_mla`."""

    def get_kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, block_size, 656 if cache_dtype_str == "fp8_ds_mla" else head_size)


def test_cache_dtype_is_passed_to_the_back_end() -> None:
    sizes = {"kernel_block_size": 64, "num_kv_heads": 1, "head_size": 576}
    tensor = torch.zeros(9, 64, 656, dtype=torch.uint8)
    layout = from_backend(ByDtype(), [tensor], cache_dtype="fp8_ds_mla", **sizes)
    assert layout.groups[0].refs[0].token_bytes == 656
    with pytest.raises(LayoutError, match="expected a tensor of axes"):
        from_backend(ByDtype(), [tensor], **sizes)


@pytest.mark.parametrize(
    ("cache_dtype", "record", "token"),
    [
        ("fp8", 576, 576),
        ("fp8_ds_mla", 656, 656),
        ("nvfp4", 576, None),
        ("nvfp4_4over6", 576, None),
        ("fp8_ds_mla", 584, None),  # the scales of all tokens behind their values
        ("fp8_ds_mla", 132, None),  # so do those of an indexer
        ("fp8", 132, None),
        ("auto", 132, None),
        (None, 132, None),
        ("a_new_one", 576, None),
    ],
)
def test_pages_whose_scales_may_be_interleaved_move_whole(
    cache_dtype: str | None, record: int, token: int | None
) -> None:
    class Records:
        def get_kv_cache_shape(
            self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
        ) -> tuple[int, ...]:
            return (num_blocks, block_size, head_size)

    sizes = {"kernel_block_size": 64, "num_kv_heads": 1, "head_size": record}
    tensor = torch.zeros(9, 64, record, dtype=torch.uint8)
    layout = from_backend(Records(), [tensor], cache_dtype=cache_dtype, **sizes)
    (ref,) = layout.groups[0].refs
    assert (ref.page_bytes, ref.token_bytes) == (64 * record, token)
