"""Random jobs in all three routes, with compute that writes in between, against a model that takes them one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from device_kit import copied_inside
from gated import PATIENCE
from transfer_kit import Model, Pools, transfer

from longshore.boundary import DEVICE, HOST, Item, Section, Slot, Status, Transfer
from longshore.errors import QueueFullError
from longshore.layout import KVLayout
from longshore.transfer import INSIDE, OFFLOAD, ONBOARD, TransferEngine


def inside_transfer(job: int, layout: KVLayout, group: int, written: Sequence[int], read: Sequence[int]) -> Transfer:
    items = [Item(bytes(32), None, Slot(DEVICE, layout.pools[group], block), None, 1) for block in read]
    return Transfer(job, INSIDE, tuple(items), (Section(group, 0, tuple(written)),))


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
        route = chance.choice([OFFLOAD, ONBOARD, ONBOARD, INSIDE])
        blocks = chance.sample(range(layout.num_blocks), 2 * chance.randint(1, layout.num_blocks // 4))
        self.given += 1
        if route == INSIDE:
            written, read = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
            self.submit(inside_transfer(self.given, layout, group, written, read))
            copied_inside(self.model.device, layout, group, written, read)
            return
        first = chance.randrange(2 * per_chunk)
        parts = [Section(group, first, tuple(blocks))]
        chunks = (first + len(blocks) - 1) // per_chunk - first // per_chunk + 1
        slots = chance.sample(range(self.pools.host.slabs.indices), chunks)
        self.submit(transfer(self.given, route, parts, slots, valid=(1 << per_chunk) - 1))
        into = HOST if route == OFFLOAD else DEVICE
        self.model.move(parts, self.pools.images(slots), into=into)

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
        assert self.engine.wait(range(self.given + 1), 60 * PATIENCE)
        self.engine.end_step(self.compute)
        self.ended += [status for result in self.engine.poll() for status in result.statuses]
        assert set(self.ended) <= {Status.OK}
        self.engine.begin_step(self.compute)
        self.finish_compute()
        self.model.check(self.pools)
