"""Blocks of every shape that back ends have go to the host and come back into other blocks, bit for bit.

What a block holds is said here by indexing the tensor, and never by the layout: a page in the wrong place, an axis
taken for another one, or padding that was written shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from test_layout_backend import Apart, BlocksFirst, Latent, Packed

from longshore.boundary import DEVICE, HOST, Section
from longshore.errors import PlanError
from longshore.layout import KVLayout, axes_of_backend, from_axes, from_backend, group_from_axes
from longshore.tiers.arena import Arena
from longshore.transfer.copy_plan import plan_copy
from longshore.transfer.device.base import copy_pieces
from plans import plan


class Held(NamedTuple):
    """Where a group's blocks are in one tensor: `kernel_blocks` positions of axis `axis` each."""

    tensor: torch.Tensor
    axis: int
    kernel_blocks: int = 1


class Made(NamedTuple):
    layout: KVLayout
    held: Sequence[Sequence[Held]]  # per group


def kernel_blocks(blocks: Sequence[int], factor: int) -> torch.Tensor:
    """The kernel blocks of `blocks`, each of which has `factor` of them."""
    return torch.tensor([block * factor + each for block in blocks for each in range(factor)], dtype=torch.int64)


def storage_of(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte behind `tensor`, its padding and its neighbours too."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def over(storage: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`storage` with the axes and strides of `like`, as bits of the same width."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[like.element_size()]
    flat = torch.empty(0, dtype=bits).set_(storage.untyped_storage())
    return flat.as_strided(like.size(), like.stride(), like.storage_offset())


def there_and_back(made: Made, out: Sequence[Section], back: Sequence[Section]) -> None:
    layout = made.layout
    tensors = {held.tensor.untyped_storage().data_ptr(): held.tensor for group in made.held for held in group}
    storages = {key: storage_of(tensor) for key, tensor in tensors.items()}
    for seed, storage in enumerate(storages.values()):
        storage.random_(0, 256, generator=torch.Generator().manual_seed(seed))
    before = {key: storage.clone() for key, storage in storages.items()}

    chunks = sum(
        -(-(section.first_block % per_chunk + len(section.blocks)) // per_chunk)
        for section in out
        for per_chunk in [layout.groups[section.group].blocks_per_chunk]
        if section.blocks
    )
    arena = Arena((chunks + 1) * layout.image_bytes)
    images = [layout.image_bytes * (chunk + 1) for chunk in reversed(range(chunks))]
    for sections, destination in ((out, HOST), (back, DEVICE)):
        made_plan = plan(
            layout, sections, images, destination=destination, host_address=arena.address, host_bytes=arena.nbytes
        )
        copy_pieces(made_plan.source, made_plan.destination, made_plan.size)
        if destination == HOST:
            for key, storage in storages.items():
                assert torch.equal(storage, before[key])
                storage.bitwise_not_()

    expected = {key: ~storage for key, storage in before.items()}
    for source, destination in zip(out, back, strict=True):
        for held in made.held[source.group]:
            key = held.tensor.untyped_storage().data_ptr()
            old, new = over(before[key], held.tensor), over(expected[key], held.tensor)
            rows = kernel_blocks(source.blocks, held.kernel_blocks)
            places = kernel_blocks(destination.blocks, held.kernel_blocks)
            new.index_copy_(held.axis, places, old.index_select(held.axis, rows))
    for key, storage in storages.items():
        assert torch.equal(storage, expected[key])
    arena.close()


SIZES = {"kernel_block_size": 16, "num_kv_heads": 2, "head_size": 4}
BLOCKS = 12


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def one(layout: KVLayout, *held: Held) -> Made:
    return Made(layout, [held])


def k_and_v_apart(per_chunk: int) -> Made:
    tensors = [empty(2, BLOCKS, 16, 2, 4) for _ in range(3)]
    layout = from_backend(Apart(), tensors, blocks_per_chunk=per_chunk, **SIZES)
    return one(layout, *(Held(tensor, 1) for tensor in tensors))


def in_the_order_of_memory(per_chunk: int) -> Made:
    tensors = [empty(BLOCKS, 2, 2, 16, 4) for _ in range(2)]
    layout = from_backend(BlocksFirst(), tensors, blocks_per_chunk=per_chunk, **SIZES)
    return one(layout, *(Held(tensor, 0) for tensor in tensors))


def permuted(per_chunk: int) -> Made:
    tensors = [empty(BLOCKS, 2, 2, 16, 4).permute(0, 1, 3, 2, 4) for _ in range(2)]
    layout = from_backend(BlocksFirst(), tensors, blocks_per_chunk=per_chunk, **SIZES)
    return one(layout, *(Held(tensor, 0) for tensor in tensors))


def across_layers(per_chunk: int) -> Made:
    tensor = empty(BLOCKS, 2, 3, 2, 16, 4)
    layout = from_backend(BlocksFirst(), [tensor], blocks_per_chunk=per_chunk, **SIZES)
    assert layout.num_layers == 3
    return one(layout, Held(tensor, 0))


def across_layers_permuted(per_chunk: int) -> Made:
    tensor = empty(BLOCKS, 2, 3, 2, 16, 4).permute(2, 0, 1, 4, 3, 5)
    layout = from_backend(BlocksFirst(), [tensor], blocks_per_chunk=per_chunk, **SIZES)
    return one(layout, Held(tensor, 1))


def latent(per_chunk: int) -> Made:
    tensors = [empty(BLOCKS, 16, 656, dtype=torch.uint8) for _ in range(2)]
    layout = from_backend(
        Latent(), tensors, kernel_block_size=16, num_kv_heads=1, head_size=576, blocks_per_chunk=per_chunk
    )
    assert {ref.token_bytes for ref in layout.groups[0].refs} == {656}
    return one(layout, *(Held(tensor, 0) for tensor in tensors))


def packed(per_chunk: int) -> Made:
    tensors = [empty(2, BLOCKS, 16 * 2 * 4) for _ in range(2)]
    layout = from_backend(Packed(), tensors, blocks_per_chunk=per_chunk, **SIZES)
    return one(layout, *(Held(tensor, 1) for tensor in tensors))


def kernel_blocks_in_a_row(per_chunk: int) -> Made:
    tensors = [empty(2, 4 * BLOCKS, 16, 2, 4) for _ in range(2)]
    layout = from_backend(Apart(), tensors, block_size=64, blocks_per_chunk=per_chunk, **SIZES)
    assert layout.num_blocks == BLOCKS
    return one(layout, *(Held(tensor, 1, 4) for tensor in tensors))


def kernel_blocks_with_others_between(per_chunk: int) -> Made:
    tensor = empty(2 * BLOCKS, 2, 2, 16, 4)
    layout = from_backend(BlocksFirst(), [tensor], block_size=32, blocks_per_chunk=per_chunk, **SIZES)
    return one(layout, Held(tensor, 0, 2))


def padded_pages(per_chunk: int) -> Made:
    tensor = empty(BLOCKS + 1, 16 * 24 + 40, dtype=torch.uint8)[1:, 24 : 24 + 16 * 24].unflatten(1, (16, 24))
    layout = from_axes([tensor], ("block", "token", "dim"), block_size=16, blocks_per_chunk=per_chunk)
    return one(layout, Held(tensor, 0))


def padded_tokens(per_chunk: int) -> Made:
    tensor = empty(BLOCKS, 4, 31, dtype=torch.uint8)[:, :, 3:27]
    layout = from_axes([tensor], ("block", "token", "dim"), block_size=4, blocks_per_chunk=per_chunk)
    return one(layout, Held(tensor, 0))


def scales_beside_values(per_chunk: int) -> Made:
    values, scales = empty(2, BLOCKS, 16, 2, 8, dtype=torch.float8_e4m3fn), empty(2, BLOCKS, 16, 2, dtype=torch.float32)
    axes = [("kv", "block", "token", "head", "dim"), ("kv", "block", "token", "head")]
    layout = from_axes([values, scales], axes, block_size=16, blocks_per_chunk=per_chunk, layers=[0, 0])
    return one(layout, Held(values, 1), Held(scales, 1))


def states(per_chunk: int) -> Made:
    convolution, recurrent = empty(BLOCKS, 3, 7, dtype=torch.bfloat16), empty(BLOCKS, 5, 2, 8, dtype=torch.float32)
    axes = [("block", "width", "channel"), ("block", "head", "dim", "state")]
    layout = from_axes([convolution, recurrent], axes, block_size=48, blocks_per_chunk=per_chunk, layers=[0, 0])
    assert [ref.token_bytes for ref in layout.groups[0].refs] == [None, None]
    return one(layout, Held(convolution, 0), Held(recurrent, 0))


def a_draft_model_after_the_model(per_chunk: int) -> Made:
    """The draft's layers come after the model's, with heads of their own; one block table serves both."""
    model, draft = [empty(2, BLOCKS, 16, 2, 4) for _ in range(3)], [empty(2, BLOCKS, 16, 1, 8) for _ in range(2)]
    axes = ("kv", "block", "token", "head", "dim")
    layout = from_axes([*model, *draft], axes, block_size=16, blocks_per_chunk=per_chunk)
    assert layout.num_layers == 5
    return one(layout, *(Held(tensor, 1) for tensor in [*model, *draft]))


SHAPES: list[Callable[[int], Made]] = [
    k_and_v_apart,
    in_the_order_of_memory,
    permuted,
    across_layers,
    across_layers_permuted,
    latent,
    packed,
    kernel_blocks_in_a_row,
    kernel_blocks_with_others_between,
    padded_pages,
    padded_tokens,
    scales_beside_values,
    states,
    a_draft_model_after_the_model,
]


@pytest.mark.parametrize("per_chunk", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("shape", SHAPES, ids=[shape.__name__ for shape in SHAPES])
def test_blocks_come_back_in_other_blocks(shape: Callable[[int], Made], per_chunk: int) -> None:
    made = shape(per_chunk)
    # Scattered, two in a row, and unaligned at both ends.
    out, back = (7, 2, 3, 11, 0, 5), (4, 5, 1, 9, 11, 6)
    there_and_back(made, [Section(0, 5, out)], [Section(0, 5, back)])


def test_groups_of_other_block_sizes_and_backends_over_one_pool() -> None:
    """A page is as many bytes in each group; a block is of one group at a time, and its id names the same bytes."""
    memory = torch.zeros(BLOCKS, 1024, dtype=torch.uint8)
    full = memory.view(torch.float16).view(BLOCKS, 2, 2, 16, 8)  # 16 tokens, heads first
    window = memory.view(BLOCKS, 32, 32)  # 32 tokens of one head, in one byte each
    state = memory.view(torch.float32)[:, :250]  # padded
    draft = torch.zeros(2, BLOCKS, 16, 1, 8, dtype=torch.float16)
    axes = [
        axes_of_backend(BlocksFirst(), full, kernel_block_size=16, num_kv_heads=2, head_size=8),
        axes_of_backend(Apart(), draft, kernel_block_size=16, num_kv_heads=1, head_size=8),
    ]
    groups = [
        group_from_axes([full, draft], axes, block_size=16, blocks_per_chunk=4, name="full"),
        group_from_axes(
            [window], ("block", "token", "dim"), block_size=32, blocks_per_chunk=1, name="window", first_tensor=2
        ),
        group_from_axes([state], ("block", "state"), block_size=64, blocks_per_chunk=3, name="state", first_tensor=3),
    ]
    layout = KVLayout([group for group, _ in groups], [full, draft, window, state], BLOCKS)
    assert layout.pools == (0, 0, 0)
    made = Made(layout, [[Held(full, 0), Held(draft, 1)], [Held(window, 0)], [Held(state, 0)]])
    out = [Section(0, 3, (0, 7, 2)), Section(1, 9, (5,)), Section(2, 1, (11, 4))]
    back = [Section(0, 3, (9, 1, 5)), Section(1, 9, (0,)), Section(2, 1, (6, 7))]
    there_and_back(made, out, back)
    with pytest.raises(PlanError, match="block 5 of device pool 0 would be written twice"):
        taken = [back[0], Section(1, 9, (5,)), back[2]]
        plan(layout, taken, [4096 * i for i in range(4)], destination=DEVICE, host_address=0, host_bytes=1 << 20)


def test_each_layer_covers_all_its_tensors() -> None:
    """Draft layers are layers."""
    made = a_draft_model_after_the_model(1)
    whole = plan_copy(
        made.layout, [Section(0, 0, (3,))], [0], destination=HOST, host_address=0, host_bytes=1 << 20
    ).batch
    sizes = [whole.of_layer(layer).nbytes for layer in range(made.layout.num_layers)]
    assert sizes == [2 * 16 * 2 * 4 * 2] * 3 + [2 * 16 * 1 * 8 * 2] * 2
    assert whole.nbytes == sum(sizes)
