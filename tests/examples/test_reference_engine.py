"""The reference engine: bit for bit what the same engine computes without tiers, whatever is restored and how."""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from examples.reference_engine import Request
from reference_kit import DECODER, PATIENCE, SHAPE, Rig, resident, rig, same_bits, tokens

from longshore.boundary import DEVICE, HOST, Section, Slot
from longshore.cache import DeviceCopy
from longshore.errors import CapacityError, EngineError, FreedLayoutError
from longshore.transfer import ONBOARD
from longshore.transfer.plan import CopyBatch

LAYERS = range(SHAPE.layers)


def conversation() -> list[list[int]]:
    """Prompts that share prefixes, return, and part within a block."""
    first, second = tokens(1, 45), tokens(2, 61)
    return [
        first,
        second,
        first + tokens(3, 9),
        (first + tokens(3, 9))[:50] + tokens(4, 8),
        second,
        first + tokens(3, 9) + tokens(5, 30),
        second[:20],
        first,
        second + tokens(6, 1),
    ]


def serve_all(made: Rig, prompts: list[list[int]]) -> list[Request]:
    """Some find the device as the last one left it, some find nothing there."""
    requests = []
    for index, prompt in enumerate(prompts):
        requests.append(made.serve(prompt, wanted=4 + index))
        if index in (1, 4, 6):
            made.evict_all()
    return requests


# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
@pytest.mark.parametrize("settings", [{}, {"background": True}], ids=["in thread", "background"])
def test_restored_blocks_give_the_bits_of_the_engine_without_tiers(by_layer: bool, settings: dict[str, Any]) -> None:
    prompts = conversation()
    with rig(36, by_layer=by_layer, **settings) as made:
        requests = serve_all(made, prompts)
        made.check_nothing_is_held()
    restored = [request.hits["tiers"] for request in requests]
    assert sum(restored) > 150
    assert sum(request.hits["copied"] for request in requests) > 0
    assert not any(request.restarts for request in requests)
    others = resident(requests, prompts)
    assert [other.schedule.hit for other in others] == [request.schedule.hit for request in requests]
    assert all(same_bits(*pair) for pair in zip(requests, others, strict=True))


def test_one_flipped_bit_in_the_host_tier_is_seen() -> None:
    """The control: a comparison that could not fail would show nothing."""
    prompts = [tokens(1, 45), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        flip_a_bit(made)
        requests.append(made.serve(prompts[1]))
        assert requests[1].hits["tiers"] == 40
    assert [same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True)] == [True, False]


def flip_a_bit(made: Rig) -> None:
    """The highest bit of the exponent of the first key in the first full-attention block."""
    with made.stack.runtime.observe() as cache:
        first = made.engine.submit(tokens(1, 45), 1)
        made.engine.waiting.remove(first)
        (slot,) = [one.slot.index for one in cache.residents() if one.key == first.chains[1].keys[0]]
    made.stack.arena.array[made.stack.host.offset(0, slot) + 3] ^= 0x40


def test_prefixes_come_back_from_the_file_tier_too(tmp_path: Any) -> None:
    prompts = [tokens(1, 45), tokens(1, 45) + tokens(2, 5)]
    with rig(file_path=tmp_path, file_size="4MiB", backup="write_through") as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        with made.stack.runtime.control() as cache:
            for chain in requests[0].chains:
                assert cache.discard(chain.keys[: 45 // (chain.chunk_bytes // 4)], HOST)
        requests.append(made.serve(prompts[1]))
        assert requests[1].hits["tiers"] == 40
        with made.stack.runtime.observe() as cache:
            assert cache.counters.hits["file"] == 5 + 3  # five blocks, and those that the window still sees
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_the_engine_without_tiers_computes_what_plain_attention_does() -> None:
    """Pages, windows and tables against the whole prompt at once, without any."""
    prompt = tokens(7, 50)
    (request,) = resident([_wanting(5)], [prompt])
    with rig(36) as made:
        again = made.serve(prompt, wanted=5)
    for count, (logits, other) in enumerate(zip(request.logits, again.logits, strict=True)):
        torch.testing.assert_close(logits, _dense(request.tokens[: 50 + count]), rtol=1e-3, atol=1e-4)
        assert torch.equal(logits, other)


def _wanting(count: int) -> Request:
    return Request([], 0, [], logits=[torch.zeros(0)] * count)


def _dense(prompt: list[int]) -> torch.Tensor:
    """Logits after `prompt`, with torch's own attention and a mask."""
    hidden = DECODER.embedding[prompt]
    at = torch.arange(len(prompt))
    distance = at[:, None] - at
    half = SHAPE.head_dim // 2
    angles = at[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    for layer, weights in enumerate(DECODER.layers):
        window = SHAPE.groups[SHAPE.group_of(layer)].window or len(prompt)
        heads = (norm(hidden) @ weights["qkv"].T).view(len(prompt), -1, SHAPE.head_dim)
        q, k, v = heads.split([SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads], 1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            rotate(q).transpose(0, 1),
            rotate(k).transpose(0, 1),
            v.transpose(0, 1),
            attn_mask=(distance >= 0) & (distance < window),
            enable_gqa=True,
        )
        hidden = hidden + mixed.transpose(0, 1).reshape(len(prompt), -1) @ weights["out"].T
        gate, up = (norm(hidden) @ weights["up"].T).chunk(2, -1)
        hidden = hidden + (torch.nn.functional.silu(gate) * up) @ weights["down"].T
    return norm(hidden)[-1] @ DECODER.head.T


def test_there_is_one_version_of_a_block() -> None:
    """The last block of a prompt that fills it is computed again, in another batch of tokens: its bits may differ."""
    prompt = tokens(1, 48)
    prompts = [prompt, prompt, prompt + tokens(2, 9), prompt + tokens(3, 9)]
    with rig(64) as made:
        requests = []
        for turn, each in enumerate(prompts):
            requests.append(made.serve(each))
            if turn != 1:
                made.evict_all()
        assert [request.schedule.hit for request in requests] == [0, 47, 48, 48]
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_any_conversation_with_any_fault_gives_the_same_bits(seed: int) -> None:
    """Both tiers too small, copies that fail, two requests at once, sleep in between."""
    random = Random(seed)
    known = [tokens(100 + each, 70) for each in range(3)]
    prompts: list[list[int]] = []
    requests: list[Request] = []

    dice = {DEVICE: Random(seed), HOST: Random(seed)}  # each direction has a thread of its own

    def fault(batch: CopyBatch) -> None:
        if dice[batch.into].random() < 0.02:
            raise RuntimeError("no")

    with rig(44, by_layer=seed % 2 == 0, host_size=f"{random.choice([200, 400])}KiB") as made:
        made.link.fault = fault
        for turn in range(16):
            prompts.append(random.choice(known)[: random.randint(1, 70)] + tokens(turn, random.randint(0, 12)))
            requests.append(made.engine.submit(prompts[-1], random.randint(1, 9)))
            if random.random() < 0.6:
                made.engine.run()
            if random.random() < 0.2:
                made.engine.run()
                made.engine.sleep(clear=random.random() < 0.3)
                made.engine.wake_up()
        made.engine.run()
        made.check_nothing_is_held()
        assert made.link.gates[DEVICE].passed > 0
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


# ---------------------------------------------------------------------- layer by layer


def test_the_first_layers_are_computed_while_later_ones_still_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's pages may not travel before the layer below has been computed on: no overlap, and this would hang."""
    prompts = [tokens(1, 45), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        gate, attention = made.link.gates[DEVICE], DECODER._attention
        before = gate.passed
        passed: list[int] = []

        def attend(*args: Any) -> torch.Tensor:
            passed.append(gate.passed - before)
            if len(passed) == 1:
                gate.let(1)
            elif len(passed) == 2:
                gate.open()
            return attention(*args)

        gate.let(1)
        monkeypatch.setattr(DECODER, "_attention", attend)
        requests.append(made.serve(prompts[1]))
        monkeypatch.undo()
        assert passed[:2] == [1, 2]  # of six copies: four sliding layers, two full ones
        assert made.tiers.overlapped >= 2
        assert (requests[1].hits["tiers"], requests[1].restarts) == (40, 0)
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_the_layers_of_both_groups_travel_in_the_order_of_the_model() -> None:
    """One transfer for both: the full layers of a prompt do not arrive behind all of its sliding ones."""
    travelled: list[int] = []

    def note(batch: CopyBatch) -> None:
        if batch.into == DEVICE:
            travelled.extend(layer for layer in LAYERS if batch.of_layer(layer).parts)

    with rig() as made:
        made.serve(tokens(1, 45))
        made.evict_all()
        made.link.fault = note
        with made.stack.runtime.observe() as cache:
            before = cache.counters.routes[str(ONBOARD)].chunks
        made.serve(tokens(1, 45))
        made.settle()
        with made.stack.runtime.observe() as cache:
            assert cache.counters.routes[str(ONBOARD)].chunks - before > 2
    assert travelled == list(LAYERS)


def test_without_layers_nothing_is_computed_before_all_has_arrived() -> None:
    with rig(by_layer=False) as made:
        made.serve(tokens(1, 45))
        made.evict_all()
        made.serve(tokens(1, 45))
        assert made.tiers.overlapped == 0


# ---------------------------------------------------------------------- partial reuse


def test_the_first_tokens_of_a_block_are_copied_within_the_device() -> None:
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(64) as made:
        requests = [made.serve(prompt) for prompt in prompts]
        # Four blocks of eight tokens are shared, five tokens of the next: one block of four and one token, sliding.
        assert dict(requests[1].hits) == {"device": 32, "tiers": 0, "copied": 5}
        assert made.link.inside == len(LAYERS)
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_the_first_tokens_of_a_block_come_from_the_tiers_too(by_layer: bool) -> None:
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9), tokens(1, 45)]
    with rig(64, by_layer=by_layer) as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        requests.append(made.serve(prompts[1]))
        assert dict(requests[1].hits) == {"device": 0, "tiers": 37, "copied": 0}
        assert made.link.inside == 0
        requests.append(made.serve(prompts[2]))  # finds no trace of it in the block that it came from
        made.check_nothing_is_held()
    assert not any(request.restarts for request in requests)
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_a_copy_of_too_few_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(64) as made:
        copy = made.tiers.copy
        monkeypatch.setattr(made.tiers, "copy", lambda group, source, block, count: copy(group, source, block, 1))
        requests = [made.serve(prompt) for prompt in prompts]
    assert [same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True)] == [True, False]


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_the_block_that_is_copied_from_may_itself_be_on_its_way(by_layer: bool) -> None:
    """Both are admitted in one step, before anything has arrived: the second shares the first one's arrivals."""
    prompts = [tokens(1, 45), tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(48, by_layer=by_layer) as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        gate = made.link.gates[DEVICE]
        gate.shut()
        requests += [made.engine.submit(prompt, 3) for prompt in prompts[1:]]
        made.engine.admit()
        assert gate.wait_arrived(1)
        assert made.link.inside == 0
        assert [dict(request.hits) for request in requests[1:]] == [
            {"device": 0, "tiers": 40, "copied": 0},
            {"device": 28, "tiers": 4, "copied": 5},  # its window sees one block that the first one's does not
        ]
        gate.open()
        made.engine.compute()
        made.engine.run()
        assert made.link.inside == len(LAYERS)
        assert not any(request.restarts for request in requests)
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


# ---------------------------------------------------------------------- faults


def failing_layer(layer: int) -> Callable[[CopyBatch], None]:
    """`layer` cannot be copied from the host."""

    def fault(batch: CopyBatch) -> None:
        if batch.into == DEVICE and not batch.inside and batch.of_layer(layer).parts:
            raise RuntimeError(f"layer {layer} cannot be copied")

    return fault


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_a_layer_that_fails_is_a_miss(layer: int, by_layer: bool) -> None:
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
def test_whoever_shares_an_arrival_that_fails_recomputes_too(layer: int, by_layer: bool) -> None:
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


def test_a_copy_inside_the_device_that_fails_is_a_miss() -> None:
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]

    def fault(batch: CopyBatch) -> None:
        if batch.inside:
            raise RuntimeError("no")

    with rig(64) as made:
        made.link.fault = fault
        requests = [made.serve(prompt) for prompt in prompts]
        assert [request.restarts for request in requests] == [0, 1]
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_a_layer_that_is_late_is_a_miss(passes: int, by_layer: bool) -> None:
    """Its blocks stay away from others until the copy has ended; then they are all there again."""
    prompts = [tokens(1, 45), tokens(1, 45), tokens(3, 10)]
    with rig(40, by_layer=by_layer, patience=0.1) as made:
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


def test_late_blocks_that_nothing_can_do_without_are_waited_for() -> None:
    """The pool is too small to recompute elsewhere: the request goes back to the queue, and nothing has leaked."""
    prompt = tokens(1, 45)
    with rig(20, patience=0.1) as made:
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


def test_tiers_that_are_gone_are_a_miss() -> None:
    prompts = [tokens(1, 45), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompts[0])]
        made.evict_all()
        made.stack.engine.close()
        made.tiers.begin_step = made.tiers.end_step = lambda: None  # type: ignore[method-assign]
        requests.append(made.serve(prompts[1]))
        assert (requests[1].restarts, requests[1].schedule.hit) == (1, 0)
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_a_load_that_is_cancelled_is_a_miss() -> None:
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
        with made.stack.runtime.control() as cache:
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


@pytest.mark.parametrize("first", [True, False], ids=["the first", "who shares"])
def test_an_aborted_request_takes_nothing_from_others(first: bool) -> None:
    prompts = [tokens(1, 45), tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(48, patience=0.1) as made:
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


def test_when_the_last_request_is_aborted_nothing_is_left() -> None:
    with rig(48, patience=0.1) as made:
        made.serve(tokens(1, 45))
        made.evict_all()
        made.link.gates[DEVICE].shut()
        requests = [made.engine.submit(tokens(1, 45), 3) for _ in range(3)]
        made.engine.admit()
        for request in requests:
            made.engine.abort(request)
        with made.stack.runtime.observe() as cache:
            assert cache.held == 0
        made.link.gates[DEVICE].open()
        made.check_nothing_is_held()
        assert not made.pool.index


def test_a_prompt_that_can_never_fit_is_refused() -> None:
    with rig(8) as made:
        with pytest.raises(CapacityError, match="need"):
            made.engine.submit(tokens(1, 100), 1)
        assert not made.engine.waiting


def test_a_schedule_that_cannot_be_replayed_is_refused() -> None:
    prompt = tokens(1, 45)
    with rig() as made:
        requests = [made.serve(prompt), made.serve(prompt)]
    with pytest.raises(EngineError, match="replayed"):
        resident(requests[1:], [prompt])


@pytest.mark.parametrize("inside", [False, True], ids=["from the host", "inside the device"])
def test_a_layer_that_fails_after_it_was_computed_on_is_a_miss(inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an accelerator may: compute was made to wait for a copy, and only then the copy fails."""
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    computed = threading.Event()

    def late_fault(batch: CopyBatch) -> None:
        if batch.into == DEVICE and batch.inside == inside and batch.of_layer(SHAPE.layers - 1).parts:
            assert computed.wait(PATIENCE)
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


def test_a_late_copy_inside_the_device_disturbs_nobody() -> None:
    """The third request takes every block but those that the copy reads and writes, of each group one."""
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9), tokens(3, 93), tokens(3, 93)]
    with rig(40, patience=0.1) as made:
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


def test_blocks_that_are_still_on_their_way_down_are_not_written() -> None:
    prompts = [tokens(1, 45), tokens(2, 45), tokens(1, 45)]
    with rig(20, patience=0.1) as made:
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
def test_copies_are_ordered_against_the_stream_that_computes(by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---------------------------------------------------------------------- sleep


@pytest.mark.parametrize("clear", [False, True], ids=["tiers kept", "tiers cleared"])
def test_after_sleep_prefixes_come_back_from_the_tiers(clear: bool) -> None:
    prompts = [tokens(1, 45), tokens(2, 30), tokens(1, 45)]
    with rig() as made:
        requests = [made.serve(prompt) for prompt in prompts[:2]]
        made.engine.sleep(clear=clear)
        made.engine.wake_up()
        requests.append(made.serve(prompts[2]))
        assert dict(requests[2].hits) == {"device": 0, "tiers": 0 if clear else 40, "copied": 0}
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_asleep_every_plan_is_refused() -> None:
    with rig() as made:
        made.serve(tokens(1, 45))
        made.engine.sleep()
        with pytest.raises(FreedLayoutError):
            made.stack.engine.submit(_onboard_by_hand())
        with made.stack.runtime.control() as cache:
            job = cache.load({0: DeviceCopy([Slot(DEVICE, 0, 0)])}, {0: [1]}).parts[0].job
        assert made.stack.runtime.wait_ended([job], PATIENCE)
        with made.stack.runtime.observe() as cache:
            assert cache.counters.routes["device->device"].failed == 1
        assert not made.engine.step()


def _onboard_by_hand() -> Any:
    from longshore.boundary import Item, Transfer

    return Transfer(10**6, ONBOARD, (Item(b"", None, Slot(HOST, 0, 0), None, 1),), (Section(0, 0, (3,)),))


def test_sleep_with_transfers_in_flight_both_ways() -> None:
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
        with made.stack.runtime.observe() as cache:
            assert (cache.held, cache.jobs_in_flight) == (0, 0)
        memory.zero_()
        made.engine.wake_up()
        made.engine.run()
        assert (requests[2].hits["tiers"], requests[2].restarts) == (40, 0)
        again = made.serve(prompts[1])
        assert again.hits["tiers"] == 24 + 5  # all but the last token, the last of them in part of a block
        made.check_nothing_is_held()
    others = resident([*requests, again], [*prompts, prompts[1]])
    assert all(same_bits(*pair) for pair in zip([*requests, again], others, strict=True))


def test_a_request_that_has_begun_to_answer_begins_anew_after_sleep() -> None:
    """With what it had answered as part of its prompt: another batch of tokens, so the last bits may differ."""
    prompt = tokens(1, 45)
    with rig() as made:
        (undisturbed,) = resident([_wanting(12)], [prompt])
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


def test_sleep_waits_no_longer_than_it_is_told_to() -> None:
    """A copy that does not end keeps the memory; sleeping again, once it has, succeeds."""
    with rig(64, patience=0.2) as made:
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
