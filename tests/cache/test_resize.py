"""Tiers that grow and shrink while they are in use."""

from __future__ import annotations

import pytest
from cache_kit import Setup, chunks
from cache_model import World
from object_state import state_of

from longshore.boundary import FILE, HOST
from longshore.cache.pool import SlotPool
from longshore.errors import CacheError, CapacityError


def resize(world: World, tier: str, slots: int, *, discard: bool = False) -> None:
    world.call("resize", tier, slots, discard=discard)
    world.sizes[tier] = slots
    world.settle()


def refused(
    world: World, tier: str, slots: int, *, discard: bool = False, error: type[CacheError] = CapacityError
) -> None:
    before = state_of(world.cache)
    with pytest.raises(error):
        world.cache.resize(tier, slots, discard=discard)
    assert state_of(world.cache) == before


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_growing_tier_takes_more_and_keeps_what_it_has(policy: str) -> None:
    world = World(Setup(host=2, policy=policy)).stored("ab")
    resize(world, HOST, 5)
    world.stored("xyz")
    assert len(world.resident) == 5
    assert [s.slots for s in world.cache.stats()] == [5]
    world.stored("uvw")
    world.drain()


def test_tier_does_not_shrink_below_a_used_slot() -> None:
    world = World(Setup(host=4)).stored("a", "b", "c")
    world.discard("a", HOST)
    world.discard("b", HOST)  # one chunk is left, in slot 2
    refused(world, HOST, 2)
    refused(world, HOST, -1, error=CacheError)
    resize(world, HOST, 3)
    assert world.where("c") == {HOST: "ready"}


def test_what_is_in_the_way_can_be_discarded() -> None:
    world = World(Setup(host=4)).stored("abcd")
    resize(world, HOST, 2, discard=True)
    assert sorted(each for each, _ in world.resident) == sorted(chunks("ab"))
    resize(world, HOST, 0, discard=True)
    assert not world.resident
    resize(world, HOST, 3)
    world.stored("x")
    assert world.where("x") == {HOST: "ready"}


def test_what_is_held_read_or_needed_is_not_discarded() -> None:
    world = World(Setup(host=4)).stored("x", "abc")
    hold = world.lease("abc")
    refused(world, HOST, 1, discard=True)
    world.load(hold, 3, 0, 0)
    world.release(hold)
    refused(world, HOST, 1, discard=True)
    world.settle_all()
    world.discard("x", HOST)
    world.store("abcd", 0, False)  # into slot 0: what is above has a child below
    world.settle_all()
    refused(world, HOST, 1, discard=True)
    world.discard("abcd", HOST)
    resize(world, HOST, 0, discard=True)


def test_leased_chunk_with_colder_copy_may_leave_host_tier() -> None:
    world = World(Setup(host=4, file=4, backup="write_through")).stored("abcd")
    hold = world.lease("abcd")
    resize(world, HOST, 1, discard=True)
    assert world.where("abcd") == {FILE: "ready"}
    refused(world, FILE, 2, discard=True)
    resize(world, HOST, 4)
    world.load(hold, 4, 0, 0)
    world.settle_all()
    assert world.cache.progress(hold).outcome == (4, (HOST, FILE, FILE, FILE))


def test_a_slot_that_drains_is_in_the_way() -> None:
    world = World(Setup(host=2))
    world.store("ab", 0, False)
    world.reset()
    refused(world, HOST, 0, discard=True)
    world.settle_all()
    resize(world, HOST, 0)


def test_a_pool_that_grows_gives_its_old_slots_first() -> None:
    pool = SlotPool(2)
    pool.allocate(1)
    pool.resize(4)
    assert pool.allocate(3) == [1, 2, 3]
    with pytest.raises(CapacityError, match="from 4 to 1 slots: 3 above are in use"):
        pool.resize(1)
    pool.check_integrity()
