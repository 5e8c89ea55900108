"""Tiers that shrink by moving what is in the way: nothing is lost, whatever becomes of the copies."""

from __future__ import annotations

import pytest
from cache_setup import IMAGE_BYTES
from pickled import state_of
from test_sizes import LARGE, SIZES, SMALL, Bytes

from longshore.boundary import FILE, HOST, Status
from longshore.cache import TieredCache, TierSpec
from longshore.errors import CacheError, CapacityError
from longshore.slabs import Slabs


def filled() -> Bytes:
    """Small images in slabs 1 and 3, large ones in 2 and 4; the slabs below are free again."""
    world = Bytes(host=5)
    world.store(LARGE, "v")
    world.store(SMALL, "abcd")
    world.store(LARGE, "x")
    world.store(SMALL, "e")
    world.store(LARGE, "y")
    world.settle()
    for group, of in ((LARGE, "v"), (SMALL, "abcd")):
        assert world.cache.discard(keys(group, of), HOST) == len(of)
    return world


def keys(group: int, of: str) -> list[bytes]:
    return [f"{'SL'[group]}{of[: at + 1]}".encode().ljust(32, b".") for at in range(len(of))]


def shrink(world: Bytes, slabs: int) -> int | None:
    job = world.cache.resize(HOST, slabs, move=True)
    if job is None:
        world.slabs[HOST] = Slabs(12, SIZES, slabs)
    world.take()
    return job


def test_what_is_in_the_way_moves_below_and_keeps_its_bytes() -> None:
    world = filled()
    job = shrink(world, 3)
    assert job is not None
    assert (world.kept(LARGE, "x", "y"), world.kept(SMALL, "e")) == (["x", "y"], ["e"]), "readable meanwhile"
    assert world.cache.stats()[0].nbytes == 60, "not yet"
    world.end(job)
    assert shrink(world, 3) is None
    assert world.cache.stats()[0].nbytes == 36
    for group, of in ((LARGE, "x"), (LARGE, "y"), (SMALL, "e")):
        _, hold = world.lookup(group, of)
        assert hold is not None
        assert all(each.slot.index < 12 for each in world.cache.residents() if each.key in keys(group, of))
        before = world.checked
        world.cache.load(hold, {group: [0]})
        world.cache.release(hold)
        world.take()
        world.settle()
        assert world.checked == before + 1


def test_what_is_held_moves_too() -> None:
    world = filled()
    _, hold = world.lookup(LARGE, "y")
    assert hold is not None
    job = shrink(world, 3)
    assert job is not None
    world.end(job)
    assert shrink(world, 3) is None
    assert [each.slot.index < 12 for each in world.cache.residents() if each.key in keys(LARGE, "y")] == [True]
    world.cache.release(hold)
    world.check()


def test_a_request_that_comes_during_the_move_reads_the_old_place() -> None:
    world = filled()
    job = shrink(world, 3)
    assert job is not None
    _, hold = world.lookup(LARGE, "y")
    assert hold is not None
    world.cache.load(hold, {LARGE: [0]})
    world.cache.release(hold)
    world.take()
    world.end(job)
    with pytest.raises(CapacityError):
        shrink(world, 3)
    world.settle()
    assert shrink(world, 3) is None


@pytest.mark.parametrize("reading", [True, False])
def test_while_jobs_work_above_nothing_moves(reading: bool) -> None:
    world = filled()
    if reading:
        _, hold = world.lookup(LARGE, "y")
        assert hold is not None
        world.cache.load(hold, {LARGE: [0]})
    else:
        world.store(SMALL, "ef")
    before = state_of(world.cache)
    with pytest.raises(CapacityError, match="jobs work on"):
        world.cache.resize(HOST, 3, move=True)
    assert state_of(world.cache) == before


def test_without_room_below_nothing_moves() -> None:
    world = filled()
    before = state_of(world.cache)
    with pytest.raises(CapacityError, match="3 slabs from 2 on are taken, 2 below it are free"):
        world.cache.resize(HOST, 2, move=True)
    with pytest.raises(CacheError, match="not both"):
        world.cache.resize(HOST, 3, move=True, discard=True)
    with pytest.raises(CacheError):
        world.cache.resize(HOST, -1, move=True)
    assert state_of(world.cache) == before


def test_a_move_that_fails_has_changed_nothing_and_can_be_tried_again() -> None:
    world = filled()
    job = shrink(world, 3)
    assert job is not None
    world.end(job, Status.CANCELLED)
    assert (world.kept(LARGE, "x", "y"), world.kept(SMALL, "e")) == (["x", "y"], ["e"])
    assert world.cache.stats()[0].used == 3
    assert world.cache.counters.lost[HOST] == 0
    job = shrink(world, 3)
    assert job is not None
    world.end(job)
    assert shrink(world, 3) is None


def test_a_source_that_cannot_be_read_is_lost_and_counted() -> None:
    world = filled()
    job = shrink(world, 4)
    assert job is not None
    world.end(job, Status.CORRUPT)
    assert world.cache.counters.lost[HOST] == 1
    assert world.kept(LARGE, "x", "y") == ["x"]
    assert shrink(world, 4) is None


@pytest.mark.parametrize("how", ["reset", "evicted"])
def test_what_is_forgotten_during_its_move_leaves_nothing_behind(how: str) -> None:
    world = filled()
    job = shrink(world, 3)
    assert job is not None
    if how == "reset":
        world.cache.reset()
    else:
        assert world.cache.discard(keys(LARGE, "y"), HOST) == 0, "it is being read"
    world.take()
    world.end(job)
    world.check()
    assert world.cache.stats()[0].used == (0 if how == "reset" else 3)
    assert shrink(world, 3) is None


def test_a_tier_whose_slots_nobody_copies_refuses_to_move() -> None:
    cache = TieredCache([TierSpec(HOST, 4, IMAGE_BYTES), TierSpec(FILE, 4, IMAGE_BYTES, moves=False)])
    before = state_of(cache)
    with pytest.raises(CacheError, match="nothing copies from slot to slot of tier 'file'"):
        cache.resize(FILE, 2, move=True)
    assert state_of(cache) == before
    assert cache.resize(FILE, 2) is None
