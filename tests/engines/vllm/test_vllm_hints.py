"""What requests say of their blocks: hints, priorities, tiers to load from."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    TierFilter,
    TierMatcher,
)
from vllm_kit import TOKENS, file_settings, keys_of

from longshore.cache import ReuseHint, TieredCache

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


def asking(rig: Any, name: str, keys: Any, **fields: Any) -> ReqContext:
    """A new request with fields of vLLM's own."""
    context = ReqContext(req_id=name, **fields)
    rig.manager.on_new_request(context)
    rig.tell(keys, context)
    return context


def test_request_that_declines_storing_still_loads(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(4)
    private = {"longshore": {"store": False}}
    assert rig.store(keys, range(1, 5), asking(rig, "private", keys, kv_transfer_params=private)) == []
    assert rig.store(keys[:2], range(1, 3), rig.request("other", keys)) == keys[:2]
    assert rig.lookup(keys, asking(rig, "again", keys, kv_transfer_params=private)) == [HIT] * 2 + [MISS] * 2


def test_request_with_unreadable_hints_is_not_stored(rigs: Any, caplog: pytest.LogCaptureFixture) -> None:
    rig, keys = rigs(), keys_of(4)
    context = asking(rig, "odd", keys, kv_transfer_params={"longshore": {"stor": False}})
    assert rig.store(keys, range(1, 5), context) == []
    assert "request odd: invalid kv_transfer_params" in caplog.text
    assert "stor: Extra inputs are not permitted" in caplog.text


def test_hints_of_the_settings_are_those_of_requests_without(rigs: Any) -> None:
    rig, keys = rigs(request_hints={"store": False}), keys_of(2)
    assert rig.store(keys, range(1, 3), rig.request("one", keys)) == []
    context = asking(rig, "two", keys, kv_transfer_params={"longshore": {}})
    assert rig.store(keys, range(1, 3), context) == keys


def test_kv_hints_say_the_same_as_transfer_parameters(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    action = KvHintAction("1", "longshore", "1", {"store": False})
    context = asking(rig, "one", keys, kv_hints=KvHintsEnvelope("1", "message", [action]))
    assert rig.store(keys, range(1, 3), context) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_transfer_params": {"longshore": {"load": ["host"]}}},
        {"load_tier_filter": TierFilter((TierMatcher(medium=Medium.CPU),))},
    ],
)
def test_files_are_not_read_for_requests_that_exclude_them(rigs: Any, tmp_path: Path, fields: Any) -> None:
    rig, keys = rigs(host_size=4 * 4096, backup="write_through", **file_settings(tmp_path)), keys_of(4)
    rig.store(keys, range(1, 5), rig.request("one", keys))
    assert rig.manager.flush(60)
    others = keys_of(3, name="other")
    assert rig.store(others, range(1, 4), rig.request("other", others)) == others
    assert rig.lookup(keys, asking(rig, "host alone", keys, **fields)) == [HIT] + [MISS] * 3
    assert PENDING in rig.lookup(keys, asking(rig, "both", keys))


def test_a_request_that_loads_nothing_misses_everything(rigs: Any) -> None:
    rig, keys = rigs(), keys_of(2)
    rig.store(keys, range(1, 3), rig.request("one", keys))
    nothing = {"longshore": {"load": []}}
    assert rig.lookup(keys, asking(rig, "two", keys, kv_transfer_params=nothing)) == [MISS] * 2


@pytest.mark.parametrize("looks_up", [True, False])
def test_what_a_request_says_of_its_return_reaches_the_cache(
    rigs: Any, monkeypatch: pytest.MonkeyPatch, looks_up: bool
) -> None:
    said, lookup = list[ReuseHint](), TieredCache.lookup

    def watched(cache: TieredCache, *of: Any, **how: Any) -> Any:
        if how.get("turn") is None and how.get("reuse_hint") is not None:
            said.append(how["reuse_hint"])
        return lookup(cache, *of, **how)

    monkeypatch.setattr(TieredCache, "lookup", watched)
    rig, keys = rigs(), keys_of(2)
    for name, hints in (("over", {"ends": True}), ("tool", {"returns_in": 2.5}), ("batch", {"class": "batch"})):
        context = asking(rig, name, keys, kv_transfer_params={"longshore": hints})
        if looks_up:
            rig.lookup(keys, context)
        rig.store(keys, range(1, 3), context)
    assert said == [ReuseHint(ends=True), ReuseHint(seconds=2.5), ReuseHint(of="batch")]


def test_priorities_of_requests_decide_what_is_evicted_first(rigs: Any) -> None:
    rig, low, high = rigs(host_size=8 * 4096), keys_of(4, name="low"), keys_of(4, name="high")
    for name, keys, priority in (("high", high, 90), ("low", low, 10)):
        hints = {"longshore": {"retention": [{"priority": priority}]}}
        assert rig.store(keys, range(1, 5), asking(rig, name, keys, kv_transfer_params=hints)) == keys
    others = keys_of(4, name="others")
    assert rig.store(others, range(1, 5), rig.request("others", others)) == others
    assert rig.lookup(high, rig.request("high again", high)) == [HIT] * 4, "older, and worth more"
    assert rig.lookup(low, rig.request("low again", low)) == [MISS] * 4


def test_priorities_lapse_when_their_time_is_over(rigs: Any) -> None:
    rig, first, second = rigs(host_size=8 * 4096, eviction="lru"), keys_of(4, name="first"), keys_of(4, name="second")
    for name, keys, seconds in (("first", first, 0.1), ("second", second, None)):
        hints = {"longshore": {"retention": [{"priority": 90, "seconds": seconds}]}}
        assert rig.store(keys, range(1, 5), asking(rig, name, keys, kv_transfer_params=hints)) == keys
    time.sleep(0.2)
    others = keys_of(4, name="others")
    assert rig.store(others, range(1, 5), rig.request("others", others)) == others
    assert rig.lookup(first, rig.request("first again", first)) == [MISS] * 4
    assert rig.lookup(second, rig.request("second again", second)) == [HIT] * 4


def test_blocks_below_the_priority_floor_are_not_stored(rigs: Any) -> None:
    rig, keys = rigs(priority_floor=50), keys_of(4)
    assert rig.store(keys, range(1, 5), rig.request("one", keys)) == []
    hints = {"longshore": {"retention": [{"end": 2 * TOKENS, "priority": 50}]}}
    assert rig.store(keys, range(1, 5), asking(rig, "two", keys, kv_transfer_params=hints)) == keys[:2]
