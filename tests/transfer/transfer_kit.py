"""Layouts and host memory to move bytes between, and a model that moves them one page at a time.

The model shares no arithmetic with the product: it is written from the description of the chunk image alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from longshore.boundary import DEVICE, HOST, Item, Route, Section, Slabs, Slot, Transfer
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.tiers.arena import Arena
from longshore.tiers.host import HostSlabs

PAGE_SIZES = (1, 7, 8, 24, 656)

Bytes = npt.NDArray[np.uint8]


class Pools:
    """A layout over tensors of random bytes, and a host tier of random bytes."""

    def __init__(self, layout: KVLayout, slots: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.layout = layout
        self.arena = Arena(slots * layout.image_bytes)
        self.host = HostSlabs(self.arena, Slabs.of_one_size(layout.image_bytes, slots))
        self.tensors = [torch.as_tensor(tensor).view(torch.uint8).view(-1) for tensor in layout.tensors]
        self.arena.array[:] = random.integers(0, 256, self.arena.nbytes, dtype=np.uint8)
        for tensor in self.tensors:
            tensor.copy_(torch.from_numpy(random.integers(0, 256, tensor.numel(), dtype=np.uint8)))

    def device_bytes(self) -> list[Bytes]:
        return [tensor.numpy().copy() for tensor in self.tensors]

    def host_bytes(self) -> Bytes:
        return self.arena.array.copy()

    def images(self, slots: Sequence[int]) -> list[int]:
        return self.host.slabs.offsets(0, slots).tolist()


class Model:
    """Byte-exact expectation: bytes of the device's tensors and of the host, and transfers one page at a time."""

    def __init__(self, pools: Pools) -> None:
        self.layout = pools.layout
        self.device = pools.device_bytes()
        self.host = pools.host_bytes()

    def move(
        self,
        sections: Sequence[Section],
        images: Sequence[int],
        *,
        destination: str,
        layers: tuple[int, int] | None = None,
        tokens: int | None = None,
    ) -> None:
        item = 0
        filled = [section for section in sections if section.blocks]
        for section in filled:
            group = self.layout.groups[section.group]
            per_chunk = group.blocks_per_chunk
            first_chunk = section.first_block // per_chunk
            for position, block in enumerate(section.blocks):
                logical = section.first_block + position
                chunk, sub = logical // per_chunk - first_chunk, logical % per_chunk
                is_last = section is filled[-1] and position == len(section.blocks) - 1
                self._move_block(
                    section.group, block, images[item + chunk], sub, destination, layers, tokens if is_last else None
                )
            last_chunk = (section.first_block + len(section.blocks) - 1) // per_chunk
            for chunk in range(last_chunk - first_chunk + 1):
                if destination == HOST:
                    self._zero_padding(section.group, images[item + chunk])
            item += last_chunk - first_chunk + 1
        assert item == len(images)

    def _move_block(
        self,
        group_index: int,
        block: int,
        image: int,
        sub: int,
        destination: str,
        layers: tuple[int, int] | None,
        tokens: int | None,
    ) -> None:
        group = self.layout.groups[group_index]
        at = image + self.layout.rank * self._part_bytes(group)
        for position, ref in enumerate(group.refs):
            layer = position if ref.layer is None else ref.layer
            if layers is None or layers[0] <= layer < layers[1]:
                piece = size = ref.page_bytes // ref.pieces
                if tokens is not None and 0 < tokens < group.block_size and ref.token_bytes is not None:
                    size = tokens * ref.token_bytes
                for number in range(ref.pieces):
                    start = ref.offset + block * ref.stride + number * piece
                    page = slice(start, start + size)
                    begin = at + sub * ref.page_bytes + number * piece
                    place = slice(begin, begin + size)
                    if destination == HOST:
                        self.host[place] = self.device[ref.tensor][page]
                    else:
                        self.device[ref.tensor][page] = self.host[place]
            at += ref.page_bytes * group.blocks_per_chunk

    def _zero_padding(self, group_index: int, image: int) -> None:
        group = self.layout.groups[group_index]
        part = self._part_bytes(group)
        start = image + self.layout.rank * part
        used = group.blocks_per_chunk * sum(ref.page_bytes for ref in group.refs)
        self.host[start + used : start + part] = 0

    @staticmethod
    def _part_bytes(group: KVGroup) -> int:
        used = group.blocks_per_chunk * sum(ref.page_bytes for ref in group.refs)
        return (used + 4095) // 4096 * 4096

    def check(self, pools: Pools) -> None:
        """Every byte is as expected: pages, padding, neighbours, guard bytes, other slots."""
        for expected, got in zip(self.device, pools.device_bytes(), strict=True):
            np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(pools.host_bytes(), self.host)


def flat(
    num_blocks: int, page_bytes: int = 24, *, refs: int = 2, blocks_per_chunk: int = 1, ranks: int = 1, padding: int = 0
) -> KVLayout:
    """One group, each reference in a tensor of its own, `padding` bytes behind each page."""
    stride = page_bytes + padding
    tensors = [torch.zeros(num_blocks * stride, dtype=torch.uint8) for _ in range(refs)]
    pages = tuple(PageRef(index, 0, stride, page_bytes) for index in range(refs))
    return KVLayout((KVGroup("kv", 4, blocks_per_chunk, pages),), tensors, num_blocks, ranks)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """Groups of any sizes; pages apart, or side by side in one tensor, with padding and guard bytes around them."""
    num_blocks = draw(st.integers(8, 24))
    tensors: list[torch.Tensor] = []
    groups = []
    for index in range(draw(st.integers(1, 3))):
        block_size = draw(st.sampled_from([1, 3, 4, 16]))
        refs: list[PageRef] = []
        sizes = draw(st.lists(st.sampled_from(PAGE_SIZES), min_size=1, max_size=4))
        side_by_side = draw(st.booleans())
        gap = draw(st.sampled_from([0, 1, 8]))
        row = sum(sizes) + gap * len(sizes)
        offset = guard = draw(st.sampled_from([0, 5, 16]))
        for layer, size in enumerate(sizes):
            stride = row if side_by_side else size + gap
            pieces = draw(st.sampled_from([count for count in (1, 2, 3, 8) if size % (count * block_size) == 0] or [1]))
            can_split = size % (pieces * block_size) == 0 and draw(st.booleans())
            token = size // block_size // pieces if can_split else None
            where = offset if side_by_side else guard
            parts = pieces if can_split else 1
            refs.append(PageRef(len(tensors), where, stride, size, token, layer // 2, pieces=parts))
            if side_by_side:
                offset += size + gap
            else:
                tensors.append(torch.zeros(guard + num_blocks * stride + guard, dtype=torch.uint8))
        if side_by_side:
            tensors.append(torch.zeros(guard + num_blocks * row + guard, dtype=torch.uint8))
        per_chunk = draw(st.integers(1, 5))
        order = draw(st.permutations(range(len(refs)))) if not side_by_side else range(len(refs))
        shuffled = [refs[i]._replace(layer=None) if list(order) != sorted(order) else refs[i] for i in order]
        groups.append(KVGroup(f"group{index}", block_size, per_chunk, tuple(shuffled)))
    ranks = draw(st.integers(1, 2))
    return KVLayout(groups, tensors, num_blocks, ranks, draw(st.integers(0, ranks - 1)))


@st.composite
def sections(draw: st.DrawFn, layout: KVLayout) -> tuple[Section, ...]:
    """One section per group, some empty, of distinct blocks."""
    drawn = []
    for group in range(len(layout.groups)):
        count = draw(st.integers(0, min(layout.num_blocks, 11)))
        blocks = draw(st.permutations(range(layout.num_blocks)))[:count]
        drawn.append(Section(group, draw(st.integers(0, 9)), tuple(blocks)))
    return tuple(drawn)


def elsewhere(draw: st.DrawFn, layout: KVLayout, original: Sequence[Section]) -> tuple[Section, ...]:
    """The same sections with other blocks."""
    moved = []
    for section in original:
        blocks = draw(st.permutations(range(layout.num_blocks)))[: len(section.blocks)]
        moved.append(section._replace(blocks=tuple(blocks)))
    return tuple(moved)


def chunks_of(layout: KVLayout, original: Sequence[Section]) -> int:
    """How many chunks the sections touch, counted one block at a time."""
    touched = set()
    for index, section in enumerate(original):
        for position in range(len(section.blocks)):
            touched.add((index, (section.first_block + position) // layout.groups[section.group].blocks_per_chunk))
    return len(touched)


def transfer(
    job: int,
    route: Route,
    sections: Sequence[Section],
    slots: Sequence[int],
    **fields: object,
) -> Transfer:
    """A transfer whose items lie in `slots` of the host."""
    items = []
    for slot in slots:
        place = Slot(HOST, 0, slot)
        source, destination = (None, place) if route.source == DEVICE else (place, None)
        items.append(Item(bytes([slot]) * 32, None, source, destination))
    return Transfer(job, route, tuple(items), tuple(sections), **fields)  # type: ignore[arg-type]
