"""Many requests at once over a device cache that cannot hold them, some cancelled: nothing leaks, nothing is wrong."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from serving import make_demo
from transformers import ContinuousBatchingConfig, GenerationConfig

from longshore.cli.demo_runs import _engine
from longshore.config import Config
from longshore.engines.transformers import tiered


def serve_together(demo: Any, prompts: list[tuple[int, ...]], cancelled: set[int]) -> int:
    """Ask everything at once; how many requests finished."""
    batching = ContinuousBatchingConfig(
        page_size=demo.options.block_tokens, num_blocks=demo.device_blocks, max_batch_tokens=256,
        max_requests_per_batch=6, use_async_batching=False, use_cuda_graph=False, auto_switch_to_flash=False,
    )  # fmt: skip
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    manager = demo.model.init_continuous_batching(generation, batching)
    for number, prompt in enumerate(prompts):
        manager.add_request(list(prompt), request_id=str(number), max_new_tokens=20)
    manager.start()
    try:
        for number in cancelled:
            time.sleep(0.01)
            manager.cancel_request(str(number))
        finished = 0
        deadline = time.monotonic() + 300
        while finished < len(prompts) - len(cancelled) and time.monotonic() < deadline:
            result = manager.get_result(timeout=1.0)
            if result is not None:
                assert result.error is None
                finished += result.request_id not in map(str, cancelled)
        assert manager.background_thread_status.fatal_error is None
        return finished
    finally:
        manager.stop(block=True)
        manager.destroy()


@pytest.mark.parametrize("settings", [{}, {"offload": "write_back"}, {"blocks_per_chunk": 2}, {"background": False}])
def test_nothing_leaks_and_nothing_is_wrong(tmp_path: Path, settings: dict[str, object]) -> None:
    demo = make_demo(tmp_path)
    config = Config.make(**{**demo.config(tmp_path).model_dump(), **settings})
    requests = list(demo.workload.requests)
    with _engine(demo, 2 * demo.workload.total_blocks) as ask:
        expected = [ask(request) for request in requests]
    shuffled = [request.prompt for request in requests]
    random.Random(5).shuffle(shuffled)
    cancelled = {3, 7, 20}
    with tiered(demo.model, config) as tiers:
        assert serve_together(demo, shuffled, cancelled) == len(shuffled) - len(cancelled)
        allocator, stack = tiers._allocator, tiers.stack
        assert allocator is not None
        assert stack.runtime.flush(30)
        assert not allocator.block_table
        allocator._reclaim()
        assert allocator._obtainable() + len(allocator.ledger.cached_blocks) == allocator.num_blocks
        with stack.runtime.batch() as cache:
            cache.check_integrity()
            assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)
    with tiered(demo.model, config) as tiers, _engine(demo, demo.device_blocks) as ask:
        answers = [ask(request) for request in requests]
        restored = sum(source == "file" for record in tiers.records for source in record.sources)
    assert restored > len(requests)
    for answer, reference in zip(answers, expected, strict=True):
        # Other batches, other rounding; a block that is not its prompt's would be off by far more.
        assert answer.logprobs[0] == pytest.approx(reference.logprobs[0], abs=1e-3)
