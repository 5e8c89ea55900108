"""The random jobs that `make gpu` gives to a GPU, on the stand-in."""

from __future__ import annotations

import pytest
from cuda_stand_in import AnyWay, StandIn
from jobs_kit import Jobs
from transfer_kit import Pools, flat

from longshore.transfer import TransferEngine


@pytest.mark.parametrize("mood", ["lazy", "eager", 1, 2])
@pytest.mark.parametrize("page", [7, 656])
def test_random_jobs(mood: str | int, page: int) -> None:
    pools = Pools(flat(24, page, refs=3, blocks_per_chunk=2), slots=16)
    gpu = StandIn(AnyWay(page), mood=mood, staging_bytes=1 << 13)
    engine = TransferEngine(pools.layout, gpu.device, pools.host, max_batch_bytes=4000, max_queued=8)
    try:
        compute = gpu.accelerator.compute
        jobs = Jobs(pools, engine, compute, gpu.on_compute, lambda: gpu.device.record_event(compute).wait())
        for seed in range(3):
            jobs.run(40, seed)
        assert jobs.ended
    finally:
        engine.close()
    assert not gpu.library.breaches
