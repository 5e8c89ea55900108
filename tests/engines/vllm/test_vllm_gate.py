"""Load or recompute, as vLLM's lookups are answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm_kit import TOKENS, Rig, file_settings, keys_of

from longshore.boundary import DEVICE, FILE, HOST, Route, Status, TransferResult
from longshore.cache import DropReason, Presence, RecomputeGate
from longshore.engines.vllm.load_jobs import load_limit, tiers_of
from longshore.errors import ConfigError

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
READY, COLDER, IN_FLIGHT, ABSENT = Presence.HOST, Presence.COLDER, Presence.IN_FLIGHT, Presence.ABSENT
IMAGE = 4096


def gate_for(per_file_chunk: float) -> RecomputeGate:
    """Computing takes a second a chunk, and what is in files so many."""
    made = RecomputeGate([HOST, FILE], TOKENS, IMAGE, prefill_speed=TOKENS)
    made.observe_transfer(Route(HOST, DEVICE), TransferResult(1, (Status.OK,), IMAGE, 1e-6), 0.0)
    made.observe_transfer(Route(FILE, HOST), TransferResult(1, (Status.OK,), IMAGE, per_file_chunk), 0.0)
    return made


def until(found: Sequence[Presence], per_file_chunk: float, first: int = 0) -> int:
    """In tokens; a second group has the same chunks, twice as large."""
    keys, others = keys_of(len(found)), keys_of((len(found) + 1) // 2, group=7)
    ends = {key: (i + 1) * TOKENS for i, key in enumerate(keys)}
    ends.update({key: (i + 1) * 2 * TOKENS for i, key in enumerate(others)})
    tiers = tiers_of([*found, *([ABSENT] * len(others))])
    return load_limit(gate_for(per_file_chunk), ends, tiers, keys[first], 0.0)


@pytest.mark.parametrize(
    ("found", "slow", "quick"),
    [
        ([COLDER] * 4, 0, 4),
        ([READY, READY, COLDER, COLDER], 2, 4),
        ([READY, COLDER, READY, READY], 4, 4),  # one read pays for what is behind it
        ([COLDER, ABSENT, COLDER], 0, 1),
        ([IN_FLIGHT, COLDER], 1, 2),
    ],
)
def test_chunks_are_read_as_far_as_it_pays(found: list[Presence], slow: int, quick: int) -> None:
    assert until(found, 2.5) == slow * TOKENS
    assert until(found, 0.1) == quick * TOKENS


def test_what_the_device_has_is_context() -> None:
    assert until([ABSENT, ABSENT, COLDER, COLDER], 0.1, first=2) == 4 * TOKENS
    assert until([ABSENT, ABSENT, COLDER, COLDER], 2.5, first=2) == 2 * TOKENS


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Any]:
    """Makes a rig whose chunks lie in the file tier alone, and closes it."""
    made: list[Rig] = []

    def make(**settings: Any) -> Rig:
        keys, files = keys_of(4), file_settings(tmp_path)
        first = Rig(**files)
        first.store(keys, [1, 2, 3, 4], first.request("first", keys))
        first.close()
        made.append(Rig(**files, **settings))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def read_slowly(rig: Rig) -> None:
    """Of this rig it is known that a chunk takes ten seconds to read."""
    gate = rig.manager._runtime.gate
    gate.observe_transfer(Route(HOST, DEVICE), TransferResult(1, (Status.OK,), IMAGE, 1e-6), 0.0)
    gate.observe_transfer(Route(FILE, HOST), TransferResult(1, (Status.OK,), IMAGE, 10.0), 0.0)


def test_a_request_is_not_promised_what_is_computed_sooner(rigs: Any) -> None:
    rig, keys = rigs(prefill_speed=1e6), keys_of(4)
    read_slowly(rig)
    assert rig.lookup(keys, rig.request("slow", keys)) == [MISS] * 4
    assert rig.manager.get_stats().data["data"]["longshore_recomputed_chunks"][()] == 4
    assert rig.manager._runtime.gate.recomputed == 4
    assert rig.lookup(keys, rig.request("another", keys)) == [MISS] * 4
    assert rig.cache.jobs_in_flight == 0


def test_a_request_is_promised_what_is_read_sooner(rigs: Any) -> None:
    rig, keys = rigs(prefill_speed=0.001), keys_of(4)
    read_slowly(rig)
    assert rig.lookup(keys, rig.request("slow", keys)) == [PENDING] * 4


def test_without_a_gate_all_is_promised(rigs: Any) -> None:
    rig, keys = rigs(prefill_speed=1e6, gate=False), keys_of(4)
    assert rig.manager._runtime.gate is None
    assert rig.lookup(keys, rig.request("slow", keys)) == [PENDING] * 4


def test_what_steps_take_is_learned(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(4)
    read_slowly(rig)
    assert rig.lookup(keys, rig.request("unknown yet", keys)) == [PENDING] * 4
    rig.manager.reset_cache()
    rig.manager.observe_prefill(0, 1000, 0.001)
    assert rig.manager._runtime.gate.prefill_seconds(0, 1000) == pytest.approx(0.001, rel=0.01)


def test_a_selective_policy_takes_what_is_offered_the_nth_time(rigs: Any) -> None:
    rig, keys = rigs(offload="write_through_selective", threshold=3), keys_of(2, name="new")
    for turn in range(4):
        context = rig.request(f"turn {turn}", keys)
        taken = rig.store(keys, [1, 2], context)
        rig.manager.on_request_finished(context)
        assert taken == (keys if turn == 2 else [])
    assert rig.lookup(keys, rig.request("after", keys)) == [HIT] * 2
    assert rig.cache.counters.drops[HOST][DropReason.BELOW_THRESHOLD] == 4


@pytest.mark.parametrize(
    "setting", [{"prefetch": "timeout"}, {"prompt_only": True}, {"offload": "write_back"}, {"file_mode": "gds"}]
)
def test_settings_without_an_effect_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        Rig(**setting)
