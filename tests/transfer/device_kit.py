"""Drives a device's streams as the transfer engine does, without its threads."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Sequence

from transfer_kit import Bytes, Pools

from longshore.boundary import DEVICE, HOST, Item, Section, Slot
from longshore.layout import KVLayout
from longshore.transfer.copy_plan import CopyPlan, plan_copy, plan_copy_inside, zero_padding
from longshore.transfer.device.base import Copy, DeviceEvent, Stream
from longshore.transfer.pieces import CopyBatch


def between(
    pools: Pools, parts: Sequence[Section], slots: Sequence[int], destination: str, tokens: int | None = None
) -> CopyPlan:
    """What a job between the device and `slots` of the host moves; its images are padded as the engine does."""
    plan = plan_copy(
        pools.layout,
        parts,
        pools.images(slots),
        destination=destination,
        host_address=pools.arena.address,
        host_bytes=pools.arena.nbytes,
        tokens=tokens,
    )
    if destination == HOST:
        zero_padding(plan, lambda address, nbytes: ctypes.memset(address, 0, nbytes))
    return plan


def inside(layout: KVLayout, group: int, blocks: Sequence[int], sources: Sequence[int]) -> CopyPlan:
    """What a job moves from `sources` to `blocks` of one group."""
    pool = layout.pools[group]
    items = [Item(bytes(32), None, Slot(DEVICE, pool, source), None) for source in sources]
    return plan_copy_inside(layout, [Section(group, 0, tuple(blocks))], items)


def copied_inside(
    device: list[Bytes], layout: KVLayout, group: int, written: Sequence[int], read: Sequence[int]
) -> None:
    """The same in a model's bytes."""
    for ref in layout.groups[group].refs:
        for target, source in zip(written, read, strict=True):
            to, at = ref.offset + target * ref.stride, ref.offset + source * ref.stride
            device[ref.tensor][to : to + ref.page_bytes] = device[ref.tensor][at : at + ref.page_bytes]


class Lane:
    """Gives batches to a stream, as many at once as it takes, and ends them in order."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.under_way: deque[Copy] = deque()
        stream.bind()

    def send(self, batches: Iterable[CopyBatch], after: tuple[DeviceEvent, ...] = ()) -> None:
        for batch in batches:
            while len(self.under_way) >= self.stream.depth:
                self.finish_one()
            self.under_way.append(self.stream.copy(batch, after))

    def finish_one(self) -> float:
        return self.under_way.popleft().finish()

    def finish(self) -> None:
        while self.under_way:
            self.finish_one()

    def close(self) -> None:
        self.finish()
        self.stream.drain()
        self.stream.close()
