"""The reference engine is bit for bit the same engine without tiers, whatever is restored and how."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from examples.reference_engine import Request
from examples.reference_engine.connector import PendingCopy
from reference_kit import DECODER, SHAPE, Rig, resident, rig, same_bits, tokens, wanting

from depth import deep
from longshore.boundary import DEVICE, FILE, HOST
from longshore.transfer import H2D
from longshore.transfer.pieces import CopyBatch
from residents import residents_of

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
def test_restored_blocks_give_bit_equal_logits(by_layer: bool, settings: dict[str, Any]) -> None:
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


def test_one_flipped_bit_in_the_host_tier_changes_the_logits() -> None:
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
    with made.stack.runtime.locked() as cache:
        first = made.engine.submit(tokens(1, 45), 1)
        made.engine.waiting.remove(first)
        (slot,) = [one.slot.index for one in residents_of(cache) if one.key == first.chains[1].keys[0]]
    made.stack.arena.array[made.stack.host.slabs.offset(0, slot) + 3] ^= 0x40


def test_prefixes_are_restored_from_the_file_tier(tmp_path: Any) -> None:
    prompts = [tokens(1, 45), tokens(1, 45) + tokens(2, 5)]
    with rig(file_path=tmp_path, file_size="4MiB", backup="write_through") as made:
        requests = [made.serve(prompts[0])]
        move_to_files(made, requests[0])
        requests.append(made.serve(prompts[1]))
        assert requests[1].hits["tiers"] == 40
        with made.stack.runtime.locked() as cache:
            assert cache.counters.hits["file"] == 5 + 3  # five blocks, and those that the window still sees
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def test_engine_without_tiers_equals_dense_attention() -> None:
    """Pages, windows and tables against the whole prompt at once, without any."""
    prompt = tokens(7, 50)
    (request,) = resident([wanting(5)], [prompt])
    with rig(36) as made:
        again = made.serve(prompt, wanted=5)
    for count, (logits, other) in enumerate(zip(request.logits, again.logits, strict=True)):
        torch.testing.assert_close(logits, _dense(request.tokens[: 50 + count]), rtol=1e-3, atol=1e-4)
        assert torch.equal(logits, other)


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


def test_equal_tokens_have_one_published_block() -> None:
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


@pytest.mark.parametrize("seed", range(deep(4, 12)))
def test_random_conversations_with_faults_are_bit_equal(seed: int) -> None:
    """Both tiers too small, copies that fail, two requests at once, sleep in between."""
    random = Random(seed)
    known = [tokens(100 + each, 70) for each in range(3)]
    prompts: list[list[int]] = []
    requests: list[Request] = []

    dice = {DEVICE: Random(seed), HOST: Random(seed)}  # each direction has a thread of its own

    def fault(batch: CopyBatch) -> None:
        if dice[batch.destination].random() < 0.02:
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


def test_first_layers_compute_while_later_layers_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_layers_of_both_groups_are_copied_in_model_order() -> None:
    """One transfer for both: the full layers of a prompt do not arrive behind all of its sliding ones."""
    travelled: list[int] = []

    def note(batch: CopyBatch) -> None:
        if batch.destination == DEVICE:
            travelled.extend(layer for layer in LAYERS if batch.of_layer(layer).parts)

    with rig() as made:
        made.serve(tokens(1, 45))
        made.evict_all()
        made.link.fault = note
        with made.stack.runtime.locked() as cache:
            before = cache.counters.routes[str(H2D)].chunks
        made.serve(tokens(1, 45))
        made.settle()
        with made.stack.runtime.locked() as cache:
            assert cache.counters.routes[str(H2D)].chunks - before > 2
    assert travelled == list(LAYERS)


def test_whole_load_arrives_before_any_layer_computes() -> None:
    with rig(by_layer=False) as made:
        made.serve(tokens(1, 45))
        made.evict_all()
        made.serve(tokens(1, 45))
        assert made.tiers.overlapped == 0


def test_first_layers_compute_while_later_ones_are_in_flight(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tokens(1, 45), tokens(1, 45)]
    with rig(file_path=tmp_path, file_size="4MiB", backup="write_through") as made:
        requests = [made.serve(prompts[0])]
        move_to_files(made, requests[0])
        gate, attention = made.link.gates[DEVICE], DECODER._attention
        before = gate.passed
        passed: list[int] = []

        def attend(*args: Any) -> torch.Tensor:
            passed.append(gate.passed - before)
            gate.let(1)
            return attention(*args)

        gate.let(1)
        monkeypatch.setattr(DECODER, "_attention", attend)
        requests.append(made.serve(prompts[1]))
        monkeypatch.undo()
        assert passed[: SHAPE.layers] == [1, 2, 3, 4, 5, 6]
        assert (requests[1].hits["tiers"], requests[1].restarts) == (40, 0)
        with made.stack.runtime.locked() as cache:
            assert cache.counters.hits["file"] == 5 + 3
        gate.open()
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


# ---------------------------------------------------------------------- partial reuse


def test_partial_block_is_copied_inside_the_device() -> None:
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(64) as made:
        requests = [made.serve(prompt) for prompt in prompts]
        # Four blocks of eight tokens are shared, five tokens of the next: one block of four and one token, sliding.
        assert dict(requests[1].hits) == {"device": 32, "tiers": 0, "copied": 5}
        assert made.link.inside == len(LAYERS)
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_partial_block_is_loaded_from_the_tiers(by_layer: bool) -> None:
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


def test_copy_of_too_few_tokens_changes_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    prompts = [tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(64) as made:
        copy = made.tiers.copy
        monkeypatch.setattr(made.tiers, "copy", lambda group, source, block, count: copy(group, source, block, 1))
        requests = [made.serve(prompt) for prompt in prompts]
    assert [same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True)] == [True, False]


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_source_of_a_partial_copy_may_be_in_flight(by_layer: bool) -> None:
    """Both are admitted in one step, before anything has arrived: the second shares the first one's load."""
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


@pytest.mark.parametrize("by_layer", [True, False], ids=["layer by layer", "whole"])
def test_source_of_a_partial_copy_may_still_be_loading(by_layer: bool, tmp_path: Any) -> None:
    """The load that fills it has not begun: it waits for the file tier."""
    prompts = [tokens(1, 45), tokens(1, 45), tokens(1, 37) + tokens(2, 9)]
    with rig(48, by_layer=by_layer, file_path=tmp_path, file_size="4MiB", backup="write_through") as made:
        requests = [made.serve(prompts[0])]
        move_to_files(made, requests[0])
        release = hold_reads(made)
        requests += [made.engine.submit(prompt, 3) for prompt in prompts[1:]]
        made.engine.admit()
        assert dict(requests[2].hits) == {"device": 28, "tiers": 4, "copied": 5}
        copies = [copy.job for copy in requests[2].pending if type(copy) is PendingCopy]
        assert len(copies) == 2
        assert not any(made.stack.runtime.wait_jobs([job], 0.2) for job in copies)
        release()
        made.engine.compute()
        made.engine.run()
        assert not any(request.restarts for request in requests)
        made.check_nothing_is_held()
    assert all(same_bits(*pair) for pair in zip(requests, resident(requests, prompts), strict=True))


def move_to_files(made: Rig, request: Request) -> None:
    """Nothing of the first 45 tokens of `request` is left on the device and in host memory."""
    made.evict_all()
    with made.stack.runtime.batch() as cache:
        for chain in request.chains:
            assert cache.discard(chain.keys[: 45 // (chain.chunk_bytes // 4)], HOST)


def hold_reads(made: Rig) -> Callable[[], None]:
    """Results of reads from files reach nobody until what this returns is called."""
    (mover,) = {mover for route, mover in made.stack.runtime._by_route.items() if route.source == FILE}
    poll = mover.poll
    mover.poll = lambda: []  # type: ignore[method-assign]

    def release() -> None:
        mover.poll = poll  # type: ignore[method-assign]

    return release
