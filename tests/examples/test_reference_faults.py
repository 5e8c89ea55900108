"""The reference engine recomputes what fails, is late, cancelled or aborted, and stays bit-exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_kit import DECODER, SHAPE, TIMEOUT, resident, rig, same_bits, tokens

from longshore.boundary import DEVICE, HOST
from longshore.errors import CapacityError, EngineError
from longshore.transfer.pieces import CopyBatch

LAYERS = range(SHAPE.layers)


def failing_layer(layer: int) -> Callable[[CopyBatch], None]:
    """`layer` cannot be copied from the host."""

    def fault(batch: CopyBatch) -> None:
        if batch.destination == DEVICE and not batch.is_d2d and batch.of_layer(layer).parts:
            raise RuntimeError(f"layer {layer} cannot be copied")

    return fault


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_failed_layer_is_recomputed(layer: int, by_layer: bool) -> None:
    prompts = [tokens(1, 45), tokens(1, 45), tokens(1, 45)]
    with rig(by_layer=by_layer) as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        made.link.fault = failing_layer(layer)
        requests.append(made.serve(prompts[1]))
        made.link.fault = lambda batch: None
        assert (requests[1].restarts, requests[1].schedule.hit) == (1, 0)
        made.evict_all()
        requests.append(made.serve(prompts[2]))
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("layer", [3, 5])
@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_requests_that_share_a_failed_load_recompute(layer: int, by_layer: bool) -> None:
    """Also whoever has copied from a block that never came: that copy succeeds."""
    prompts = [tokens(1, 45), tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(64, by_layer=by_layer) as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        made.link.fault = failing_layer(layer)
        requests += [made.engine.submit(prompt, 3) for prompt in prompts[1:]]
        made.engine.run()
        assert [request.restarts for request in requests] == [0, 1, 1]
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_failed_copy_inside_the_device_is_recomputed() -> None:
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]

    def fault(batch: CopyBatch) -> None:
        if batch.is_d2d:
            raise RuntimeError("no")

    with rig(64) as made:
        made.link.fault = fault
        requests = [made.serve(prompt) for prompt in prompts]
        assert [request.restarts for request in requests] == [0, 1]
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_late_layer_is_recomputed(passes: int, by_layer: bool) -> None:
    """Its blocks stay away from others until the copy has ended; then they are all there again."""
    prompts = [tokens(1, 45), tokens(1, 45), tokens(3, 10)]
    with rig(40, by_layer=by_layer, timeout=0.1) as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        gate = made.link.gates[DEVICE]
        gate.let(passes if by_layer else 0)
        requests.append(made.serve(prompts[1]))
        assert (requests[1].restarts, requests[1].schedule.hit) == (1, 0)
        assert made.pool.obtainable < made.pool.size
        requests.append(made.serve(prompts[2]))
        gate.open()
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_late_blocks_are_awaited_when_the_pool_is_exhausted() -> None:
    """The pool is too small to recompute elsewhere: the request goes back to the queue, and nothing has leaked."""
    prompt = tokens(1, 45)
    with rig(20, timeout=0.1) as made:
        requests = [made.serve(prompt)]
        made.evict_all()
        made.link.gates[DEVICE].shut()
        requests.append(made.engine.submit(prompt, 3))
        with pytest.raises(CapacityError, match="copies still touch"):
            made.engine.run()
        assert made.engine.waiting == requests[1:]
        made.link.gates[DEVICE].open()
        made.settle()
        made.engine.run()
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, [prompt] * 2), strict=True))


def test_prompt_is_recomputed_after_the_tiers_close() -> None:
    prompts = [tokens(1, 45), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        made.stack.transfer_engine.close()
        made.tiers.begin_step = made.tiers.end_step = lambda: None  # type: ignore[method-assign]
        requests.append(made.serve(prompts[1]))
        assert (requests[1].restarts, requests[1].schedule.hit) == (1, 0)
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_cancelled_load_is_recomputed() -> None:
    """A reset while it travels: it may arrive, and counts no more."""
    prompts = [tokens(1, 45), tokens(1, 45), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        gate = made.link.gates[DEVICE]
        gate.shut()
        requests.append(made.engine.submit(prompts[1], 3))
        made.engine.admit()
        assert gate.wait_arrived(1)
        with made.stack.runtime.batch() as cache:
            cache.reset()
        gate.open()
        made.engine.compute()
        made.engine.run()
        assert (requests[1].restarts, requests[1].schedule.hit) == (1, 0)
        made.evict_all()
        requests.append(made.serve(prompts[2]))
        assert requests[2].hits["tiers"] == 40
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("how", ["reset", "cancel"])
def test_load_cancelled_between_layers_is_recomputed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two layers have been computed on then; the others arrive, or do not, and count no more."""
    prompts = [tokens(1, 45), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        gate, attention = made.link.gates[DEVICE], DECODER._attention
        computed: list[int] = []

        def attend(*args: Any) -> torch.Tensor:
            computed.append(gate.passed)
            if len(computed) == 2:
                with made.stack.runtime.batch() as cache:
                    (job,) = cache._transfers.jobs
                    if how == "reset":
                        cache.reset()
                    else:
                        made.stack.transfer_engine.cancel(job)
                gate.open()
            return attention(*args)

        gate.let(2)
        monkeypatch.setattr(DECODER, "_attention", attend)
        requests.append(made.serve(prompts[1]))
        monkeypatch.undo()
        assert computed[1] < computed[0] + SHAPE.layers - 1
        assert (requests[1].restarts, requests[1].schedule.hit) == (1, 0)
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("first", [True, False], ids=["the first", "who shares"])
def test_aborted_request_leaves_shared_loads_to_others(first: bool) -> None:
    prompts = [tokens(1, 45), tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(48, timeout=0.1) as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        gate = made.link.gates[DEVICE]
        gate.shut()
        both = [made.engine.submit(prompt, 3) for prompt in prompts[1:]]
        made.engine.admit()
        made.engine.abort(both[0 if first else 1])
        gate.open()
        made.settle()
        kept = both[1 if first else 0]
        made.engine.compute()
        made.engine.run()
        assert (len(kept.logits), kept.restarts) == (3, 0)
        requests.append(kept)
        made.engine.abort(kept)  # too late
        made.check_nothing_is_held()
    kept_prompt = prompts[2 if first else 1]
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, [prompts[0], kept_prompt]), strict=True))


def test_abort_of_the_last_request_releases_everything() -> None:
    with rig(48, timeout=0.1) as made:
        made.serve(tokens(1, 45))
        made.evict_all()
        made.link.gates[DEVICE].shut()
        requests = [made.engine.submit(tokens(1, 45), 3) for _ in range(3)]
        made.engine.admit()
        for request in requests:
            made.engine.abort(request)
        with made.stack.runtime.locked() as cache:
            assert cache.leases == cache.protected == 0
        made.link.gates[DEVICE].open()
        made.check_nothing_is_held()
        assert not made.pool.index


def test_prompt_larger_than_the_pool_is_refused() -> None:
    with rig(8) as made:
        with pytest.raises(CapacityError, match="need"):
            made.engine.submit(tokens(1, 100), 1)
        assert not made.engine.waiting


def test_schedule_that_cannot_be_replayed_is_refused() -> None:
    prompt = tokens(1, 45)
    with rig() as made:
        requests = [made.serve(prompt), made.serve(prompt)]
    with pytest.raises(EngineError, match="replayed"):
        resident(requests[1:], [prompt])


@pytest.mark.parametrize("inside", [False, True], ids=["from the host", "inside the device"])
def test_layer_that_fails_after_use_restarts_the_request(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an accelerator may: compute was made to wait for a copy, and only then the copy fails."""
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    computed = threading.Event()

    def late_fault(batch: CopyBatch) -> None:
        if batch.destination == DEVICE and batch.is_d2d == inside and batch.of_layer(SHAPE.layers - 1).parts:
            assert computed.wait(TIMEOUT)
            raise RuntimeError("no")

    with rig(64) as made:
        requests = [made.serve(prompts[0])]
        if not inside:
            made.evict_all()
        made.link.late_fault = late_fault
        forward = DECODER.forward

        def then_fail(*args: Any) -> torch.Tensor:
            logits = forward(*args)
            computed.set()
            return logits

        monkeypatch.setattr(DECODER, "forward", then_fail)
        requests.append(made.serve(prompts[1]))
        monkeypatch.undo()
        assert (requests[1].restarts, requests[1].schedule.hit) == (1, 0)
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_late_copy_inside_the_device_affects_no_other_request() -> None:
    """The third request takes every block but those that the copy reads and writes, of each group one."""
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9), tokens(3, 93), tokens(3, 93)]
    with rig(40, timeout=0.1) as made:
        requests = [made.serve(prompts[0])]
        made.settle()
        made.link.gates[DEVICE].shut()
        requests.append(made.serve(prompts[1]))
        assert requests[1].restarts == 1
        requests.append(made.serve(prompts[2]))
        assert made.pool.obtainable == made.pool.size - 4
        made.link.gates[DEVICE].open()
        made.settle()
        requests.append(made.serve(prompts[3]))
        assert requests[3].hits["device"] == 88
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_blocks_being_offloaded_are_not_overwritten() -> None:
    prompts = [tokens(1, 45), tokens(2, 45), tokens(1, 45)]
    with rig(20, timeout=0.1) as made:
        made.link.gates[HOST].shut()
        requests = [made.serve(prompts[0]), made.engine.submit(prompts[1], 3)]
        with pytest.raises(CapacityError, match="copies still touch"):
            made.engine.run()
        made.link.gates[HOST].open()
        made.settle()
        made.engine.run()
        requests.append(made.serve(prompts[2]))
        assert requests[2].hits["tiers"] == 40
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_copies_are_ordered_against_the_compute_stream(by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = object()
    forward = DECODER.forward
    with rig(compute=stream, by_layer=by_layer) as made:
        monkeypatch.setattr(DECODER, "forward", lambda *args: (made.link.marked.append("compute"), forward(*args))[1])
        made.serve(tokens(1, 45))
        monkeypatch.undo()
        # Before the step; then, after its compute, before the offloads of each group.
        assert made.link.marked[:4] == [stream, "compute", stream, stream]
        made.evict_all()
        made.link.marked.clear()
        made.serve(tokens(1, 45))
        assert len(made.link.marked) >= 3
        assert set(made.link.marked) == {stream}
        assert set(made.link.held) == ({stream} if by_layer else set())
