"""What the engine needs of the host tier, and what it does there besides copying."""

from __future__ import annotations

import ctypes
from typing import Protocol

from longshore.boundary import HOST, Slot, Transfer
from longshore.errors import PlanError
from longshore.transfer.selection import Selection


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
    def slots(self) -> int:
        """How many there are."""

    @property
    def image_bytes(self) -> int:
        """Bytes of one."""

    def offset(self, slot: int, /) -> int:
        """Bytes from the start of the arena to `slot`."""


def slots_of(transfer: Transfer, host: HostSlots) -> list[int]:
    """Index of each item's host slot; `PlanError` for an item that is not between a host slot and the device."""
    slots = []
    for index, item in enumerate(transfer.items):
        sides = (item.destination, item.source)
        slot, device = sides if transfer.route.destination == HOST else sides[::-1]
        if device is not None or not isinstance(slot, Slot) or (slot.tier, slot.pool) != (HOST, 0):
            raise PlanError(f"item {index}: expected the device and a slot of host pool 0, got {device} and {slot}")
        if not 0 <= slot.index < host.slots:
            raise PlanError(f"item {index}: host slot {slot.index} does not lie in [0, {host.slots})")
        slots.append(slot.index)
    return slots


def zero_padding(selection: Selection) -> None:
    """Zero the padding of the images that are written: a slot's former owner may have had data there."""
    layout = selection.whole.layout
    begin = 0
    for index, items in selection.sections:
        group = layout.groups[index]
        padding = group.part_bytes - group.used_bytes
        if padding:
            first = selection.whole.host_address + layout.rank * group.part_bytes + group.used_bytes
            for image in selection.images[begin : begin + items].tolist():
                ctypes.memset(first + image, 0, padding)
        begin += items
