"""Prompts longer than host memory: their heads are stored first, and a later request finds them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import (
    LookupResult,
)
from vllm_kit import file_settings, keys_of

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


def test_a_long_prompt_is_taken_whole(rigs: Any) -> None:
    """What is not taken is never offered again."""
    rig, keys = rigs(host_size=2000 * 4096), keys_of(2000)
    assert rig.manager.prepare_store(keys, rig.request("one", keys)).keys_to_store == keys
    small = rigs(host_size=2000 * 4096, max_writes=100)
    assert len(small.manager.prepare_store(keys, small.request("one", keys)).keys_to_store) == 100


def test_prompt_longer_than_host_memory_is_served_from_its_head(rigs: Any) -> None:
    """Without a file tier: what fits stays, however often the rest is offered."""
    rig, keys = rigs(host_size=12 * 4096), keys_of(28)
    for visit in range(3):
        context = rig.request(f"visit {visit}", keys)
        found = rig.lookup(keys, context)
        served = found.index(MISS)
        assert served == (12 if visit else 0)
        assert HIT not in found[served:]
        if served:
            rig.load(keys[:served], range(1, 1 + served), context)
        rig.store(keys[served:], [1] * (28 - served), context)
        rig.manager.on_request_finished(context)
        rig.cache.check_integrity()
    other = rig.request("another", keys_of(2, name="another"))
    assert rig.store(keys_of(2, name="another"), [1, 2], other), "it makes way for others"


def test_storing_goes_on_behind_a_head_as_host_memory_drains(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(host_size=12 * 4096, **file_settings(tmp_path)), keys_of(28)
    context, told_again, stored = rig.request("first", keys), 0, 0
    rig.lookup(keys, context)
    for end in range(4, 29, 4):  # as a prompt is computed
        deadline = time.monotonic() + 60
        while (output := rig.manager.prepare_store(keys[stored:end], context)) is None:
            told_again += 1
            assert time.monotonic() < deadline
            rig.end_step()
        taken = output.keys_to_store
        assert taken == keys[stored:end], "all of it, or none of it yet"
        rig.copy_in(output.store_spec, [1] * len(taken))
        rig.manager.complete_store(set(taken), context)
        stored = end
        rig.end_step()
    assert told_again, "host memory was full, and vLLM was told to offer again"
    rig.manager.on_request_finished(context)
    assert rig.manager.flush(60)
    second, deadline = rig.request("second", keys), time.monotonic() + 60
    while PENDING in (found := rig.lookup(keys, second)):
        assert time.monotonic() < deadline
    served = found.index(MISS)
    assert served == 12, "what fits host memory"
    rig.load(keys[:served], range(1, 1 + served), second)
    rig.cache.check_integrity()


def offered_in_pieces(rig: Any, keys: list[Any], name: str, lag: int, chunks: int, told: bool = True) -> None:
    """A prompt as vLLM computes it, four chunks a step, of which `chunks` before it ends or is aborted.

    Stores are reported `lag` steps late. What is refused is offered again with what has come; at the end for the last
    time, and the manager is `told` of that.
    """
    context, stored, open_stores = rig.request(name, keys), 0, list[tuple[int, Any]]()
    for step, end in enumerate([*range(4, chunks + 1, 4), *[chunks] * 3]):
        rig.end_step()
        if told and step >= chunks // 4 + 2:
            rig.manager.will_finish(name)
        output = rig.manager.prepare_store(keys[stored:end], context) if stored < end else None
        if output is not None:
            stored = end
            if output.keys_to_store:
                rig.copy_in(output.store_spec, [1] * len(output.keys_to_store))
                open_stores.append((step + lag, output))
        for at, each in open_stores:
            if at == step:
                rig.manager.complete_store(set(each.keys_to_store), context)
    rig.manager.on_request_finished(context)
    for at, each in open_stores:
        if at > step:
            rig.manager.complete_store(set(each.keys_to_store), context)


def asked_as_vllm_does(rig: Any, keys: list[Any], context: Any) -> list[LookupResult]:
    """One step: chunk by chunk, up to the first that is missing."""
    found = []
    for key in keys:
        found.append(rig.manager.lookup(key, context))
        if found[-1] is MISS:
            break
    rig.end_step()
    return found


def served(rig: Any, keys: list[Any], context: Any) -> int:
    """How many chunks are served, and loaded."""
    deadline = time.monotonic() + 60
    while PENDING in (found := asked_as_vllm_does(rig, keys, context)):
        assert time.monotonic() < deadline
    count = found.count(HIT)
    if count:
        rig.load(keys[:count], range(1, 1 + count), context)
    rig.manager.on_request_finished(context)
    return count


@pytest.mark.parametrize("lag", [0, 2, 9])
@pytest.mark.parametrize("told", [True, False])
def test_a_long_prompt_offered_in_pieces_is_served_at_once(rigs: Any, tmp_path: Path, lag: int, told: bool) -> None:
    """However late stores are reported, and with nothing waited for: at least what fits host memory."""
    rig, keys = rigs(host_size=12 * 4096, load_timeout=60.0, **file_settings(tmp_path)), keys_of(28)
    offered_in_pieces(rig, keys, "first", lag, 28, told)
    assert served(rig, keys, rig.request("second", keys)) == 12
    for chunks in (4, 16):  # another is aborted
        offered_in_pieces(rig, keys_of(28, name=f"other {chunks}"), f"aborted {chunks}", lag, chunks, told)
        assert served(rig, keys, rig.request(f"after {chunks}", keys)) == 12
    rig.cache.check_integrity()
    assert rig.manager.flush(60)
    assert rig.cache.jobs_in_flight == 0


def test_long_prompts_at_once_are_served_in_turn(rigs: Any, tmp_path: Path) -> None:
    rig = rigs(host_size=12 * 4096, load_timeout=60.0, **file_settings(tmp_path))
    prompts = {name: keys_of(28, name=name) for name in ("one", "two")}
    for name, keys in prompts.items():
        offered_in_pieces(rig, keys, name, 1, 28)
        assert rig.manager.flush(60)
    waiting = {name: rig.request(f"again {name}", keys) for name, keys in prompts.items()}
    counts, deadline = {}, time.monotonic() + 60
    while waiting:
        assert time.monotonic() < deadline
        for name in list(waiting):
            found = [rig.manager.lookup(key, waiting[name]) for key in prompts[name]]
            if PENDING not in found:
                counts[name] = found.index(MISS)
                rig.load(prompts[name][: counts[name]], range(1, 1 + counts[name]), waiting[name])
                rig.manager.on_request_finished(waiting.pop(name))
        rig.end_step()
    assert counts == {"one": 12, "two": 12}
    rig.cache.check_integrity()


def test_last_offer_of_a_request_is_stored_within_room(rigs: Any, tmp_path: Path) -> None:
    rig, keys = rigs(host_size=12 * 4096, load_timeout=60.0, **file_settings(tmp_path)), keys_of(28)
    context = rig.request("one", keys)
    assert len(rig.store(keys[:8], [1] * 8, context, complete=False)) == 8
    assert rig.manager.prepare_store(keys[8:28], context) is None, "room may be made for more"
    rig.manager.will_finish("one")
    assert rig.manager.prepare_store(keys[8:28], context).keys_to_store == keys[8:12]
