"""What may be written to a tier: a rate, and tiers that take nothing any more."""

import math

import pytest
from cache_kit import IMAGE_BYTES, Setup, path_of
from cache_model import World

from longshore.boundary import FILE, HOST, Status
from longshore.cache import DropReason, WritePolicy, WriteRule
from longshore.cache.settings import SAVED_SECONDS, WriteBudget
from longshore.errors import CacheError
from residents import residents_of

RATE = IMAGE_BYTES / SAVED_SECONDS
"""One image an hour."""


def world(hourly: float) -> World:
    return World(Setup(host=8, file=8, backup="write_through", budget=hourly * RATE))


def store(world: World, *paths: str) -> None:
    for path in paths:
        world.store(path, 0, True)
        for job in world.on("device->host"):
            world.end(job)
        for job in world.on("host->file"):
            world.end(job)


def in_file(world: World) -> set[str]:
    return {path_of(each.key) for each in residents_of(world.cache) if each.slot.tier == FILE}


def drops(world: World) -> dict[DropReason, int]:
    return {reason: n for reason, n in world.cache.counters.drops[FILE].items() if n}


def test_bucket_fills_at_its_rate_up_to_its_bound() -> None:
    budget = WriteBudget(10.0)
    assert budget.allows(0.0, 10**9, 1) == 36_000
    budget.spend(36_000)
    assert budget.allows(0.0, 5, 1) == 0
    assert budget.allows(1.0, 50, 4) == 2
    budget.spend(8)
    assert budget.allows(1.0, 50, 1) == 2
    assert budget.allows(0.5, 50, 1) == 2, "a clock that goes back gives nothing"
    assert budget.allows(1e9, 10**9, 1) == 36_000


def test_without_a_rate_everything_may_be_written() -> None:
    assert WriteBudget(math.inf).allows(0.0, 10**9, 10**9) == 10**9


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_is_positive(rate: float) -> None:
    with pytest.raises(CacheError, match="bytes_per_second: expected more than 0"):
        WriteRule(WritePolicy.BACK, bytes_per_second=rate)


def test_what_is_beyond_the_budget_is_refused_and_counted_once() -> None:
    told = world(hourly=2)
    store(told, "a", "b", "c", "d")
    assert in_file(told) == {"a", "b"}
    assert drops(told) == {DropReason.RATE_LIMIT: 2}
    told.tick(1.0)
    assert drops(told) == {DropReason.RATE_LIMIT: 2}
    assert told.where("c") == {HOST: "ready"}


def test_refused_chunk_is_written_on_use_once_budget_returns() -> None:
    told = world(hourly=1)
    store(told, "a", "b")
    assert in_file(told) == {"a"}
    store(told, "b")
    told.tick(1.0)
    assert in_file(told) == {"a"}
    store(told, "b")
    told.tick(SAVED_SECONDS)
    store(told, "b")
    assert in_file(told) == {"a", "b"}
    assert drops(told) == {DropReason.RATE_LIMIT: 2}


def test_path_is_written_within_the_budget_heads_first() -> None:
    told = world(hourly=2)
    store(told, "abcd")
    assert in_file(told) == {"a", "ab"}


def test_a_flush_ends_also_without_budget() -> None:
    told = world(hourly=1)
    store(told, "a", "b", "c")
    assert told.flush()
    assert in_file(told) == {"a"}


def test_disabled_tier_gets_no_writes_and_keeps_its_chunks() -> None:
    told = World(Setup(host=8, file=3, backup="write_through"))
    store(told, "a", "b")
    told.store("c", 0, True)
    for job in told.on("device->host"):
        told.end(job)
    (job,) = told.on("host->file")
    told.end(job, Status.TIER_OFF)
    left = in_file(told)
    assert left == {"a", "b"}
    for path in "defg":
        told.store(path, 0, True)
        for each in told.on("device->host"):
            told.end(each)
        assert told.on("host->file") == []
    assert in_file(told) == left
    assert drops(told) == {DropReason.WRITE_FAILED: 1, DropReason.TIER_OFF: 4}
