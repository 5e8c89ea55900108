"""Jobs for any device that torch knows, against a model that takes them one by one.

`round_trip`, `compute_is_late`, `random_jobs` and `layer_by_layer` run on a GPU, and on the asynchronous device on the
CPU; `Hardware` is what differs.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from device_kit import copied_inside
from gated_device import TIMEOUT
from transfer_kit import Bytes, Model, Pools, transfer

from longshore.boundary import DEVICE, HOST, Item, Section, Slabs, Slot, Status, Transfer
from longshore.errors import QueueFullError
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.host import HostSlabs
from longshore.transfer import D2D, D2H, H2D, TransferEngine
from longshore.transfer.device.base import Device


def inside_transfer(job: int, layout: KVLayout, group: int, written: Sequence[int], read: Sequence[int]) -> Transfer:
    items = [Item(bytes(32), None, Slot(DEVICE, layout.pools[group], block), None) for block in read]
    return Transfer(job, D2D, tuple(items), (Section(group, 0, tuple(written)),))


class Jobs:
    """What is given to one engine, and what must come of it.

    `compute` is the engine's stream; `on_compute(work)` gives it `work`, which may run later.
    """

    def __init__(
        self,
        pools: Pools,
        engine: TransferEngine,
        compute: object,
        on_compute: Callable[[Callable[[], object]], None],
        finish_compute: Callable[[], None],
    ) -> None:
        self.pools, self.engine = pools, engine
        self.compute, self.on_compute, self.finish_compute = compute, on_compute, finish_compute
        self.model = Model(pools)
        self.given = 0
        self.ended: list[Status] = []
        engine.begin_step(compute)

    def run(self, count: int, seed: int, before_copies: Callable[[], object] | None = None) -> None:
        """`count` random steps; compute does `before_copies` now and then, just before it writes."""
        chance = random.Random(seed)
        for _ in range(count):
            if chance.random() < 0.15:
                self.write(chance.randrange(self.pools.layout.num_blocks), chance.randrange(256), before_copies)
            else:
                self.copy(chance)
        self.finish()

    def write(self, block: int, value: int, before: Callable[[], object] | None = None) -> None:
        """Compute fills a block's pages, after all copies so far and before all that follow."""
        self.engine.end_step(self.compute)
        pages = []
        for group in self.pools.layout.groups:
            for ref in group.refs:
                page = slice(ref.offset + block * ref.stride, ref.offset + block * ref.stride + ref.page_bytes)
                pages.append(self.pools.tensors[ref.tensor][page])
                self.model.device[ref.tensor][page] = value
        self.on_compute(lambda: (before and before(), [page.fill_(value) for page in pages]))
        self.engine.begin_step(self.compute)

    def copy(self, chance: random.Random) -> None:
        layout = self.pools.layout
        group = chance.randrange(len(layout.groups))
        per_chunk = layout.groups[group].blocks_per_chunk
        route = chance.choice([D2H, H2D, H2D, D2D])
        blocks = chance.sample(range(layout.num_blocks), 2 * chance.randint(1, layout.num_blocks // 4))
        self.given += 1
        if route == D2D:
            written, read = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
            self.submit(inside_transfer(self.given, layout, group, written, read))
            copied_inside(self.model.device, layout, group, written, read)
            return
        first = chance.randrange(2 * per_chunk)
        parts = [Section(group, first, tuple(blocks))]
        chunks = (first + len(blocks) - 1) // per_chunk - first // per_chunk + 1
        slots = chance.sample(range(self.pools.host.slabs.indices), chunks)
        self.submit(transfer(self.given, route, parts, slots))
        destination = HOST if route == D2H else DEVICE
        self.model.move(parts, self.pools.images(slots), destination=destination)

    def submit(self, job: Transfer) -> None:
        while True:
            try:
                self.engine.submit(job)
            except QueueFullError:
                self.finish()
            else:
                return

    def finish(self) -> None:
        """Wait for all jobs, and look at every byte."""
        assert self.engine.wait(range(self.given + 1), 60 * TIMEOUT)
        self.engine.end_step(self.compute)
        self.ended += [status for result in self.engine.poll() for status in result.statuses]
        assert set(self.ended) <= {Status.OK}
        self.engine.begin_step(self.compute)
        self.finish_compute()
        self.model.check(self.pools)


class Hardware(ABC):
    """What jobs ask of a device besides copies. `name` is torch's."""

    name: str

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream to compute on."""

    @abstractmethod
    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Within it, `stream` is the calling thread's current one."""

    @abstractmethod
    def late(self, share: float = 1.0) -> None:
        """Keep the current stream busy for a while."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block until nothing is under way."""

    @abstractmethod
    def register(self, address: int, nbytes: int) -> None:
        """The device reaches this host memory."""

    @abstractmethod
    def unregister(self, address: int) -> None:
        """It no longer does."""


class DevicePools(Pools):
    """Tensors on the device, and host memory that is registered with it, unless `registered` is false."""

    def __init__(
        self,
        hardware: Hardware,
        page: int,
        *,
        blocks: int = 24,
        slots: int = 16,
        seed: int = 0,
        registered: bool = True,
    ) -> None:
        sizes = (page, max(1, page // 3), page + 5)
        tensors = [torch.zeros(16 + blocks * (size + 3), dtype=torch.uint8, device=hardware.name) for size in sizes]
        refs = tuple(PageRef(index, index, size + 3, size) for index, size in enumerate(sizes))
        groups = (KVGroup("pair", 4, 2, refs[:2]), KVGroup("odd", 4, 3, refs[2:]))
        super().__init__(KVLayout(groups, tensors, blocks), slots, seed)
        self.hardware = hardware
        self._registered = registered
        if registered:
            hardware.register(self.arena.address, self.arena.nbytes)

    def device_bytes(self) -> list[Bytes]:
        return [tensor.cpu().numpy().copy() for tensor in self.tensors]

    def close(self) -> None:
        self.hardware.synchronize()
        if self._registered:
            self.hardware.unregister(self.arena.address)


def round_trip(pools: DevicePools, device: Device, compute: object = None) -> None:
    """Out, back into other blocks, and from block to block."""
    model = Model(pools)
    engine = TransferEngine(pools.layout, device, pools.host)
    try:
        out = [Section(0, 1, (3, 0, 17, 4, 5)), Section(1, 2, (9, 8, 7, 20))]
        slots = [4, 0, 9, 3, 2]
        engine.begin_step(compute)
        engine.submit(transfer(1, D2H, out, slots))
        assert engine.wait([1], TIMEOUT)
        model.move(out, pools.images(slots), destination=HOST)
        back = [Section(0, 1, (10, 11, 12, 13, 14)), Section(1, 2, (23, 1, 2, 15))]
        engine.submit(transfer(2, H2D, back, slots))
        assert engine.wait([2], TIMEOUT)
        model.move(back, pools.images(slots), destination=DEVICE)
        engine.submit(inside_transfer(3, pools.layout, 0, [20, 21, 22], [10, 12, 14]))
        assert engine.wait([3], TIMEOUT)
        copied_inside(model.device, pools.layout, 0, [20, 21, 22], [10, 12, 14])
        engine.end_step(compute)
        pools.hardware.synchronize()
        model.check(pools)
        assert {status for result in engine.poll() for status in result.statuses} == {Status.OK}
    finally:
        engine.close()


def jobs_on(pools: DevicePools, engine: TransferEngine) -> Jobs:
    """Jobs with compute on a stream of its own."""
    hardware, compute = pools.hardware, pools.hardware.new_stream()

    def give(work: Callable[[], object]) -> None:
        with hardware.on(compute):
            work()

    return Jobs(pools, engine, compute, give, compute.synchronize)


def compute_is_late(pools: DevicePools, device: Device, rounds: int = 20) -> None:
    """Compute is busy, then writes; copies are given at once, and their blocks are used again at once."""
    engine = TransferEngine(pools.layout, device, pools.host)
    try:
        jobs = jobs_on(pools, engine)
        chance = random.Random(3)
        for round_number in range(rounds):
            for block in chance.sample(range(pools.layout.num_blocks), 3):
                jobs.write(block, round_number, pools.hardware.late)
            for _ in range(4):
                jobs.copy(chance)
        jobs.finish()
    finally:
        engine.close()


def random_jobs(
    pools: DevicePools, device: Device, count: int, *, seed: int = 0, each: int = 250, late: float = 0.01
) -> None:
    """At least `count`, looked at after every `each`; compute is `late` before it writes."""
    engine = TransferEngine(pools.layout, device, pools.host, max_batch_bytes=1 << 18)
    try:
        jobs = jobs_on(pools, engine)
        while jobs.given < count:
            jobs.run(each, seed, lambda: pools.hardware.late(late))
            seed += 1
        assert jobs.ended
    finally:
        engine.close()


def side_by_side(*runs: Callable[[], object]) -> None:
    """Each in a thread of its own; raises what the first of them raised."""
    failures: list[BaseException] = []

    def caught(run: Callable[[], object]) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001 - said by the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=caught, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def layer_by_layer(pools: DevicePools, device: Device, rounds: int = 4) -> None:
    """Compute reads each layer of an onboard as soon as it is told that it may."""
    engine = TransferEngine(pools.layout, device, pools.host, max_batch_bytes=1 << 12)
    compute = pools.hardware.new_stream()
    group = pools.layout.groups[0]
    try:
        for turn in range(1, rounds + 1):
            blocks = tuple(range(turn % 2, pools.layout.num_blocks, 2))[: 2 * pools.host.slabs.indices]
            slots = range(len(blocks) // 2)
            pools.arena.array[:] = np.arange(turn, turn + pools.arena.nbytes, dtype=np.uint64).astype(np.uint8)
            model = Model(pools)
            section = [Section(0, 0, blocks)]
            model.move(section, pools.images(list(slots)), destination=DEVICE)
            engine.begin_step(compute)
            engine.submit(transfer(turn, H2D, section, list(slots), by_layer=True))
            seen = []
            for layer, ref in enumerate(group.refs):
                assert engine.wait_layer(turn, layer, 60 * TIMEOUT) is Status.OK
                with pools.hardware.on(compute):
                    seen.append((ref.tensor, torch.empty_like(pools.tensors[ref.tensor])))
                    seen[-1][1].copy_(pools.tensors[ref.tensor])
            engine.end_step(compute)
            compute.synchronize()
            for tensor, copy in seen:
                np.testing.assert_array_equal(copy.cpu().numpy(), model.device[tensor])
            assert engine.wait([turn], 60 * TIMEOUT)
    finally:
        engine.close()


def one_rank(hardware: Hardware, device: Device, arena: Arena, rank: int, stored: Callable[[], object]) -> None:
    """A rank of two stores its part of each image, waits until all have (`stored`), and loads it into other blocks.

    `arena` is registered with the process: whoever calls this for several ranks unregisters it after the last.
    """
    blocks, page, slots = 16, 656, 8
    tensors = [torch.zeros(blocks * page, dtype=torch.uint8, device=hardware.name) for _ in range(2)]
    pages = tuple(PageRef(index, 0, page, page) for index in range(len(tensors)))
    layout = KVLayout((KVGroup("kv", 4, 1, pages),), tensors, blocks, 2, rank)
    assert arena.nbytes == slots * layout.image_bytes
    before = np.random.default_rng(rank).integers(1, 256, (len(tensors), blocks, page), dtype=np.uint8)
    compute = hardware.new_stream()
    hardware.synchronize()  # the zeros were written on another stream
    engine = TransferEngine(layout, device, HostSlabs(arena, Slabs.of_one_size(layout.image_bytes, slots)))
    try:
        with hardware.on(compute):
            hardware.late(0.5)
            for tensor, pattern in zip(tensors, before, strict=True):
                tensor.copy_(torch.from_numpy(pattern.reshape(-1)))
        engine.begin_step(compute)
        engine.submit(transfer(1, D2H, [Section(0, 0, tuple(range(slots)))], range(slots)))
        assert engine.wait([1], 60 * TIMEOUT)
        stored()
        engine.submit(transfer(2, H2D, [Section(0, 0, tuple(range(blocks - 1, slots - 1, -1)))], range(slots)))
        engine.end_step(compute)
        compute.synchronize()
        before[:, slots:] = before[:, slots - 1 :: -1]
        for tensor, pattern in zip(tensors, before, strict=True):
            np.testing.assert_array_equal(tensor.cpu().numpy().reshape(blocks, page), pattern)
        assert engine.wait([2], 60 * TIMEOUT)
        assert {status for result in engine.poll() for status in result.statuses} == {Status.OK}
    finally:
        engine.close()
        hardware.synchronize()


def images_of_two_ranks() -> Arena:
    """What `one_rank` stores into, shared between processes."""
    return Arena(8 * 2 * 4096, ArenaSettings(numa_node=None, huge_pages=False, shared=True))
