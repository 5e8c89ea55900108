"""An engine over gated copies, with a clock that the test sets."""

from __future__ import annotations

from typing import Any

from gated_device import TIMEOUT, GatedDevice
from transfer_kit import Model, Pools, flat, transfer

from longshore.boundary import Section
from longshore.layout import KVLayout
from longshore.transfer import D2H, H2D, TransferEngine


class Rig:
    """An engine over gated copies, with a clock that the test sets."""

    def __init__(self, layout: KVLayout | None = None, slots: int = 8, depth: int = 1, **options: Any) -> None:
        self.pools = Pools(layout or flat(16), slots)
        self.model = Model(self.pools)
        self.device = GatedDevice()
        self.device.depth = depth
        self.now = 0.0
        self.engine = TransferEngine(self.pools.layout, self.device, self.pools.host, clock=lambda: self.now, **options)

    def offload(self, job: int, blocks: tuple[int, ...], slots: list[int], **fields: Any) -> None:
        self.engine.submit(transfer(job, D2H, [Section(0, 0, blocks)], slots, **fields))

    def onboard(self, job: int, blocks: tuple[int, ...], slots: list[int], **fields: Any) -> None:
        self.engine.submit(transfer(job, H2D, [Section(0, 0, blocks)], slots, **fields))

    def expect(self, destination: str, blocks: tuple[int, ...], slots: list[int]) -> None:
        self.model.move([Section(0, 0, blocks)], self.pools.images(slots), destination=destination)

    def results(self, *jobs: int) -> list[Any]:
        assert self.engine.wait(jobs, TIMEOUT)
        return sorted(self.engine.poll(), key=lambda result: result.job)
