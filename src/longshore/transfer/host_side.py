"""The interface of the host tier for the engine; zeroing of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from longshore.boundary import HOST, Items, Slot, Slots, Transfer
from longshore.errors import PlanError
from longshore.layout.model import KVLayout
from longshore.slabs import I64, Slabs
from longshore.transfer.selection import Selection, repeated


class HostMemory(Protocol):
    """One piece of host memory; `longshore.tiers.arena.Arena` is one."""

    @property
    def address(self) -> int:
        """Address of its first byte."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""


class HostSlots(Protocol):
    """Slots for block images in host memory; `longshore.tiers.host.HostTier` is one."""

    @property
    def arena(self) -> HostMemory:
        """Where the slots are."""

    @property
    def slabs(self) -> Slabs:
        """Numbering and image sizes of the slots."""

    def offsets(self, pool: int, indices: Sequence[int], /) -> I64:
        """Bytes from the start of the arena to each of these slots; `PlanError` if one does not exist."""


class HostImages(NamedTuple):
    """The images of one transfer in host memory.

    Attributes:
        offsets: int64, shape `(items,)`: bytes from the start of the arena to each image.
        touched: int64: host slots that they overlap, as in `Slabs.touched`.
        room: int64, shape `(items,)`: bytes of the slot of each image.
    """

    offsets: I64
    touched: I64
    room: I64


def kept(host: HostSlots) -> object:
    """An object that keeps the memory of `host` mapped while it is referenced, even if the arena is closed.

    Raises `TierClosedError` if the arena is closed already.
    """
    return getattr(host.arena, "array", host.arena)


def images_of(transfer: Transfer, host: HostSlots) -> HostImages:
    """Offsets of the items' images; `PlanError` for an item that is not between a host slot and the device."""
    pools = _slots_by_pool(transfer)
    count = len(transfer.items)
    offsets, room = np.empty(count, np.int64), np.empty(count, np.int64)
    touched = [np.empty(0, np.int64)]
    for pool, (items, indices) in pools.items():
        offsets[items] = host.offsets(pool, indices)
        room[items] = host.slabs.image_bytes[pool]
        touched.append(host.slabs.touched(pool, indices))
    together = np.concatenate(touched)
    if len(pools) > 1 and repeated(together) is not None:
        raise PlanError(f"slots of different image sizes overlap in one slab, near slot {repeated(together)}")
    return HostImages(offsets, together, room)


def check_room(layout: KVLayout, selection: Selection, images: HostImages) -> None:
    """Raise `PlanError` unless each slot is large enough for the image of its group."""
    sizes = np.array([layout.image_bytes_of(group) for group in range(len(layout.groups))])
    if len(images.room) and images.room.min() < sizes.max():
        lacking = sizes[selection.item_groups] > images.room
        if lacking.any():
            item = int(lacking.argmax())
            raise PlanError(
                f"item {item}: {sizes[selection.item_groups[item]]} image bytes exceed a slot of {images.room[item]}"
            )


def _slots_by_pool(transfer: Transfer) -> dict[int, tuple[slice | list[int], Sequence[int]]]:
    """By pool, the positions of the items that are in it, and the indices of their slots."""
    into_host = transfer.route.destination == HOST
    if isinstance(transfer.items, Items):
        sides = (transfer.items.destination, transfer.items.source)
        slots, device = sides if into_host else sides[::-1]
        if device is not None or not isinstance(slots, Slots) or slots.tier != HOST:
            raise PlanError(f"expected items between the device and host slots, got {device} and {slots}")
        if len(slots.indices) != len(transfer.items):
            raise PlanError(f"expected a slot for each of {len(transfer.items)} items, got {len(slots.indices)}")
        return {slots.pool: (slice(None), slots.indices)}
    pools: dict[int, tuple[list[int], list[int]]] = {}
    for position, item in enumerate(transfer.items):
        both = (item.destination, item.source)
        slot, other = both if into_host else both[::-1]
        if other is not None or not isinstance(slot, Slot) or slot.tier != HOST or not isinstance(slot.index, int):
            raise PlanError(f"item {position}: expected the device and a host slot, got {other} and {slot}")
        items, indices = pools.setdefault(slot.pool, ([], []))
        items.append(position)
        indices.append(slot.index)
    return {pool: (items, indices) for pool, (items, indices) in pools.items()}


def zero_padding(selection: Selection, zero: Callable[[int, int], None]) -> None:
    """Call `zero` (address, bytes) for the padding of the images that are written, which may have old bytes."""
    layout = selection.whole.layout
    begin = 0
    for index, items in selection.sections:
        group = layout.groups[index]
        padding = group.part_bytes - group.used_bytes
        if padding:
            first = selection.whole.host_address + layout.rank * group.part_bytes + group.used_bytes
            for image in selection.images[begin : begin + items].tolist():
                zero(first + image, padding)
        begin += items
