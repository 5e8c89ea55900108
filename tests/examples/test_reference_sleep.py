"""The reference engine frees its device memory and restores prefixes from the tiers afterwards."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from reference_kit import TIMEOUT, resident, rig, same_bits, tokens, wanting

from longshore.boundary import DEVICE, HOST, Section, Slot
from longshore.cache import DeviceCopy
from longshore.errors import FreedLayoutError
from longshore.transfer import H2D


@pytest.mark.parametrize("clear", [False, True], ids=["tiers kept", "tiers cleared"])
def test_prefixes_are_restored_from_the_tiers_after_sleep(clear: bool) -> None:
    prompts = [tokens(1, 45), tokens(2, 30), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompt) for prompt in prompts[:2]]
        made.engine.sleep(clear=clear)
        made.engine.wake_up()
        requests.append(made.serve(prompts[2]))
        assert dict(requests[2].hits) == {"device": 0, "tiers": 0 if clear else 40, "copied": 0}
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_plans_are_refused_during_sleep() -> None:
    with rig() as made:
        made.serve(tokens(1, 45))
        made.engine.sleep()
        with pytest.raises(FreedLayoutError):
            made.stack.transfer_engine.submit(_onboard_by_hand())
        with made.stack.runtime.batch() as cache:
            job = cache.load({0: DeviceCopy([Slot(DEVICE, 0, 0)])}, {0: [1]}).jobs[0].job
        assert made.stack.runtime.wait_jobs([job], TIMEOUT)
        with made.stack.runtime.locked() as cache:
            assert cache.counters.routes["device->device"].failed == 1
        assert not made.engine.step()


def _onboard_by_hand() -> Any:
    from longshore.boundary import Item, Transfer

    return Transfer(10**6, H2D, (Item(b"", None, Slot(HOST, 0, 0), None),), (Section(0, 0, (3,)),))


def test_sleep_waits_for_transfers_in_both_directions() -> None:
    """Nothing lets go of the memory before the copies under way have ended; what had not begun is a miss."""
    prompts = [tokens(1, 45), tokens(2, 30), tokens(1, 45)]
    with rig(64) as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        link = made.link
        link.gates[HOST].shut()
        requests.append(made.serve(prompts[1]))  # on its way down
        assert link.gates[HOST].wait_arrived(1)
        link.gates[DEVICE].shut()
        requests.append(made.engine.submit(prompts[2], 3))
        made.engine.admit()  # on its way up
        assert link.gates[DEVICE].wait_arrived(1)
        memory = made.pool._rows
        memory_was_there = []

        def open_gates() -> None:
            memory_was_there.append(made.pool._rows is memory)
            for gate in link.gates.values():
                gate.open()

        timer = threading.Timer(0.2, open_gates)
        timer.start()
        made.engine.sleep()
        timer.join()
        assert memory_was_there == [True]
        assert made.pool._rows is not memory
        with made.stack.runtime.locked() as cache:
            assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)
        memory.zero_()
        made.engine.wake_up()
        made.engine.run()
        assert (requests[2].hits["tiers"], requests[2].restarts) == (40, 0)
        again = made.serve(prompts[1])
        assert again.hits["tiers"] == 24 + 5  # all but the last token, the last of them in part of a block
        made.check_nothing_is_held()
    others = resident([*requests, again], [*prompts, prompts[1]])
    assert all(same_bits(*pair) for pair in zip([*requests, again], others, strict=True))


def test_running_request_restarts_after_sleep() -> None:
    """With what it had answered as part of its prompt: another batch of tokens, so the last bits may differ."""
    prompt = tokens(1, 45)
    with rig() as made:
        (undisturbed,) = resident([wanting(12)], [prompt])
        request = made.engine.submit(prompt, 12)
        for _ in range(8):
            assert made.engine.step()
        made.engine.sleep()
        made.engine.wake_up()
        made.engine.run()
        assert (request.schedule.hit, request.hits["tiers"]) == (48, 48)
        assert request.tokens == undisturbed.tokens
        for logits, expected in zip(request.logits, undisturbed.logits, strict=True):
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
        made.check_nothing_is_held()


def test_sleep_raises_after_its_timeout() -> None:
    """A copy that does not end keeps the memory; sleeping again, once it has, succeeds."""
    with rig(64, timeout=0.2) as made:
        made.link.gates[HOST].shut()
        first = made.serve(tokens(1, 45))
        memory = made.pool._rows
        with pytest.raises(TimeoutError, match="still touch"):
            made.engine.sleep()
        assert made.pool._rows is memory
        assert made.pool.layout.freed
        made.link.gates[HOST].open()
        made.engine.sleep()
        made.engine.wake_up()
        again = made.serve(tokens(1, 45))
        made.check_nothing_is_held()
    assert same_bits(first, again)
