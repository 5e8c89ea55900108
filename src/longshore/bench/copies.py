"""`longshore bench copy`: device pages into chunk images, and back.

The transfer engine moves one job. Each page of a block is in a tensor of its own, and blocks and slots are in random
order, so no two pages are adjacent on both sides. The reference is one `memmove` of as many bytes on one thread,
because the engine has one thread per direction. Our figure includes ids, plan, threads and result.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import time
from collections.abc import Iterator, Sequence

from longshore.bench.harness import ArrayTensor, Case, chosen, compare, rate
from longshore.boundary import DEVICE, HOST, Item, Route, Section, Slabs, Slot, Status, Transfer
from longshore.config import parse_size
from longshore.errors import BenchError
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.tiers.arena import Arena
from longshore.tiers.host import HostSlabs
from longshore.transfer import D2H, H2D, CpuDevice, TransferEngine

REFERENCE = "memmove of the same bytes, 1 thread"
SIZES = ("16KiB", "64KiB", "1MiB", "2MiB")
ROUTES = {"offload": D2H, "onboard": H2D}
NAMES = tuple(f"{name}/{size}" for size in SIZES for name in ROUTES)

REFERENCES = 16

COPIES = 3
"""Copies of the data in memory at a time: pages, images, and the destination of the reference."""


def run(*, total_bytes: int = 256 << 20, repeats: int = 9, only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of `NAMES`; each moves about `total_bytes`."""
    names = chosen(NAMES, only)
    least = max(parse_size(name.split("/")[1]) for name in names) * REFERENCES
    if total_bytes < least:
        raise BenchError(f"expected at least {least} bytes to move, got {total_bytes}")
    for size in SIZES:
        routes = [route for route in ROUTES if f"{route}/{size}" in names]
        if routes:
            with contextlib.closing(PageSet(parse_size(size), total_bytes)) as pages:
                for route in routes:
                    taken = compare(lambda: pages.move(ROUTES[route]), pages.memmove, repeats=repeats)  # noqa: B023
                    yield rate(f"{route}/{size}", taken, REFERENCE, pages.nbytes)


class PageSet:
    """A layout of `REFERENCES` pages to a block, as many host slots as blocks, and an engine between them."""

    def __init__(self, page_bytes: int, total_bytes: int) -> None:
        blocks = total_bytes // (page_bytes * REFERENCES)
        if blocks < 1:
            raise BenchError(f"expected at least {page_bytes * REFERENCES} bytes to move, got {total_bytes}")
        self.nbytes = blocks * page_bytes * REFERENCES
        chooser = random.Random(0)  # noqa: S311 - no secret
        self.blocks = tuple(chooser.sample(range(blocks), blocks))
        self.slots = chooser.sample(range(blocks), blocks)
        self.pages = [Arena(blocks * page_bytes) for _ in range(REFERENCES)]
        tensors = [ArrayTensor(arena.array) for arena in self.pages]
        refs = tuple(PageRef(index, 0, page_bytes, page_bytes) for index in range(REFERENCES))
        self._layout = KVLayout((KVGroup("kv", 16, 1, refs),), tensors, blocks)
        self.arena = Arena(blocks * self._layout.image_bytes)
        self._plain = Arena(self.nbytes)
        host = HostSlabs(self.arena, Slabs.of_one_size(self._layout.image_bytes, blocks))
        self._engine = TransferEngine(self._layout, CpuDevice(), host)
        self._job = 0

    def move(self, route: Route) -> float:
        """Move every block along `route`; returns the seconds from `submit` to the result."""
        self._job += 1
        items = []
        for slot in self.slots:
            host = Slot(HOST, 0, slot)
            source, destination = (None, host) if route.source == DEVICE else (host, None)
            items.append(Item(slot.to_bytes(32, "little"), None, source, destination))
        transfer = Transfer(self._job, route, tuple(items), (Section(0, 0, self.blocks),))
        begun = time.perf_counter()
        self._engine.submit(transfer)
        self._engine.wait([self._job])
        seconds = time.perf_counter() - begun
        (result,) = self._engine.poll()
        if set(result.statuses) != {Status.OK}:
            raise BenchError(f"{route} ended as {', '.join(sorted({status.value for status in result.statuses}))}")
        return seconds

    def memmove(self) -> float:
        """Copy as many bytes in one piece; returns seconds."""
        begun = time.perf_counter()
        ctypes.memmove(self._plain.address, self.arena.address, self.nbytes)
        return time.perf_counter() - begun

    def close(self) -> None:
        self._engine.close()
        for arena in (self.arena, self._plain, *self.pages):
            arena.close()
