"""Bringing chunks up before they are asked for, and giving the device's memory away."""

from __future__ import annotations

import pytest
from cache_model import World
from cache_setup import Setup, chunks, key

from longshore.boundary import FILE, HOST, Cancel, Status, Transfer, Urgency
from longshore.cache import Hold
from longshore.errors import CacheError, HoldError

BOTH = Setup(host=4, file=8, backup="write_through")


def cold(path: str, setup: Setup = BOTH) -> tuple[World, Hold]:
    """A world in which only the file tier has `path`, and a hold on it."""
    world = World(setup)
    world.commit(path, 0, False)
    world.settle_all()
    world.discard(path, HOST)
    hold = world.match(path, 0, "request")
    assert hold is not None
    return world, hold


def test_held_chunks_come_up_and_are_onboarded_from_there() -> None:
    world, hold = cold("abc")
    (job,) = world.prefetch(hold)
    transfer = world.jobs[job].transfer
    assert (transfer.urgency, [item.key for item in transfer.items]) == (Urgency.PREFETCH, chunks("abc"))
    assert [item.parent for item in transfer.items] == [None, key("a"), key("ab")]
    world.settle_all()
    assert world.where("abc") == {HOST: "ready", FILE: "ready"}
    assert world.prefetch(hold) == ()
    world.onboard(hold, 3, 0, 0)
    world.settle_all()
    assert world.cache.outcome(hold) == (3, (HOST,) * 3)
    world.release(hold)
    world.drain()


def test_an_onboarding_joins_what_is_under_way() -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold)
    world.onboard(hold, 2, 0, 0)
    assert world.on("file->host") == [world.jobs[job]]
    world.settle_all()
    assert world.cache.outcome(hold) == (2, (FILE,) * 2)
    world.release(hold)
    world.drain()


@pytest.mark.parametrize("late", [Status.CANCELLED, Status.OK])
def test_a_request_that_goes_away_cancels_its_prefetches(late: Status) -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold)
    world.call("abort", "request")
    world.let_go(hold)
    assert Cancel(job) in world.call("take")
    world.look()
    world.end(world.jobs[job], late)
    assert (HOST in world.where("ab")) == (late is Status.OK)
    world.drain()
    world.evict_all()


def test_a_prefetch_takes_no_more_than_the_room_that_is_clean() -> None:
    world, hold = cold("abcd", Setup(host=4, file=8, backup="write_through"))
    other = world.cache.offer([key("x")])  # one slot is being written
    assert other.job is not None
    jobs = world.cache.prefetch(hold)
    (transfer,) = (c for c in world.cache.take() if isinstance(c, Transfer))
    assert (transfer.job,) == jobs
    assert [item.key for item in transfer.items] == chunks("abc")
    world.cache.check_integrity()


def test_a_prefetch_that_fails_leaves_what_is_sound() -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold)
    world.end(world.jobs[job], Status.OK, Status.IO_ERROR)
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    assert world.where("ab") == {}
    with pytest.raises(HoldError):
        world.cache.prefetch(Hold(99))


def test_asleep_nothing_touches_the_device_and_the_tiers_stay() -> None:
    world = World(Setup(host=4, device_blocks=8))
    world.commit("ab", 0, False)
    world.settle_all()
    hold = world.match("ab", 0, None)
    assert hold is not None
    world.onboard(hold, 2, 0, 0)
    world.commit("x", 0, False)
    assert not world.call("sleep")
    assert sum(isinstance(c, Cancel) for c in world.call("take")) == 2
    world.refused(CacheError, "commit", [key("y")], (7,))
    other = world.match("a", 0, None)
    world.refused(CacheError, "onboard", other, (7,))
    world.settle_all()
    assert world.call("sleep")
    assert world.where("ab") == {HOST: "ready"}
    world.call("wake")
    assert other is not None
    world.onboard(other, 1, 0, 0)
    world.settle_all()
    assert world.cache.outcome(other) == (1, (HOST,))
    world.release(hold)
    world.release(other)
    world.drain()
