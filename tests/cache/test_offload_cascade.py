"""More than two tiers: copies go down from neighbour to neighbour, and up straight into the host tier."""

from __future__ import annotations

import pytest
from cache_kit import Setup, chunks, key, lookup, path_of
from cache_model import World

from longshore.boundary import DEVICE, FILE, HOST, Status
from longshore.cache import CacheSettings, DropReason, Lease, TieredCache, TierSpec, WritePolicy, WriteRule
from longshore.errors import CacheError

THIRD = "third"


def three(host: int, file: int, third: int, **rest: object) -> World:
    """A world with three tiers; copies go down as soon as they can, unless said otherwise."""
    return World(Setup(host=host, file=file, more=(third,), **{"backup": "write_through", **rest}))  # type: ignore[arg-type]


def on(world: World, route: str) -> list[str]:
    return [path_of(item.key) for job in world.on(route) for item in job.transfer.items]


def there(world: World, tier: str) -> set[str]:
    return {path_of(each) for each, where in world.resident if where == tier}


def test_down_through_three_tiers_up_again_and_gone() -> None:
    world = three(1, 1, 1)
    world.store("a", 0, False)
    assert world.where("a") == {HOST: "filling"}
    world.end(world.on("device->host")[0])
    assert world.where("a") == {HOST: "ready", FILE: "filling"}
    world.end(world.on("host->file")[0])
    assert world.where("a") == {HOST: "ready", FILE: "ready", THIRD: "filling"}
    world.end(world.on("file->third")[0])
    assert world.where("a") == {HOST: "ready", FILE: "ready", THIRD: "ready"}
    assert [world.discard("a", HOST), world.discard("a", FILE)] == [1, 1]
    assert world.where("a") == {THIRD: "ready"}
    hold = world.lookup("a", 0, None)
    assert isinstance(hold, Lease)
    world.load(hold, 1, 0, 0)
    assert world.where("a") == {HOST: "filling", THIRD: "ready"}  # not by way of the file tier
    world.end(world.on("third->host")[0])
    world.end(world.on("host->device")[0])
    assert world.cache.progress(hold).outcome == (1, (THIRD,))
    assert world.where("a") == {HOST: "ready", THIRD: "ready"}
    world.release(hold)
    assert [world.discard("a", THIRD), world.discard("a", HOST)] == [1, 1]
    assert world.where("a") == {}
    world.drain()


def test_runs_name_each_tier_along_a_path() -> None:
    world = three(4, 4, 4).stored("abcd", before_eviction=True)
    world.discard("abc", HOST)
    world.discard("ac", FILE)
    assert world.cache.discard(chunks("abc")[2:], FILE) == 1
    world.loading("a")
    world.settle_all()
    hold = world.lease("abcd")
    assert world.cache.progress(hold).runs == ((HOST, 1), (FILE, 1), (THIRD, 1), (HOST, 1))
    world.load(hold, 4, 0, 0)
    world.settle_all()
    assert world.cache.progress(hold).outcome == (4, (HOST, FILE, THIRD, HOST))


def safe(world: World) -> World:
    """All that only the host tier had is below as well, if it can be."""
    while not world.flush():
        world.settle_all()
    return world


def test_full_tier_copies_its_own_down_before_making_room() -> None:
    world = safe(three(2, 2, 4, backup="write_back").stored("a", "b", before_eviction=True))
    world.stored("c", "d", before_eviction=True)  # what is safe in the file tier went from the host tier
    assert (there(world, FILE), there(world, THIRD)) == ({"a", "b"}, set())
    assert not world.flush()
    assert (on(world, "host->file"), sorted(on(world, "file->third"))) == ([], ["a", "b"])
    world.settle_all()
    assert (there(world, FILE), there(world, THIRD)) == ({"a", "b"}, {"a", "b"})
    assert not world.flush()
    assert (sorted(on(world, "host->file")), there(world, FILE)) == (["c", "d"], {"c", "d"})
    world.drain()


def test_chunks_waiting_for_a_cascade_survive_an_offload() -> None:
    world = safe(three(1, 1, 4, backup="write_back").stored("a", before_eviction=True))
    world.stored("b", before_eviction=True)
    world.store("c", 0, True)
    assert (on(world, "file->third"), there(world, HOST)) == (["a"], {"b"})
    assert world.cache.counters.drops[HOST][DropReason.BACKPRESSURE] == 1
    world.end(world.on("file->third")[0])
    world.store("c", 0, True)
    assert (on(world, "host->file"), there(world, HOST)) == (["b"], {"b"})
    world.settle_all()
    world.stored("c", before_eviction=True)
    assert [there(world, tier) for tier in world.sizes] == [{"c"}, {"b"}, {"a"}]


def test_a_cascade_goes_down_all_tiers() -> None:
    world = World(Setup(host=1, file=1, more=(1, 1, 1), backup="write_back"))
    for path in "abcde":
        while not world.where(path):
            world.stored(path, before_eviction=True)
            safe(world)
    assert [there(world, tier) for tier in world.sizes] == [{"e"}, {"e"}, {"d"}, {"c"}, {"b"}]


def test_a_cascade_that_does_not_fit_changes_nothing() -> None:
    world = three(2, 1, 1, backup="write_back")
    for path in ("a", "b"):
        safe(world.stored(path, before_eviction=True))
    assert (there(world, FILE), there(world, THIRD)) == ({"b"}, {"a"})
    assert world.lookup("a", 0, None)
    world.stored("c", before_eviction=True)
    assert there(world, HOST) == {"b", "c"}
    before, gone = dict(world.resident), dict(world.cache.counters.evictions)
    assert world.flush()  # "c" would take the place of "b", and that the place of "a", which is held
    assert (world.resident, world.cache.counters.evictions) == (before, gone)


def test_a_copy_down_that_fails_costs_nothing_but_the_copy() -> None:
    world = three(2, 2, 2)
    world.store("ab", 0, False)
    world.end(world.on("device->host")[0])
    world.end(world.on("host->file")[0])
    world.end(world.on("file->third")[0], Status.OK, Status.NO_SPACE)
    assert world.where("ab") == {HOST: "ready", FILE: "ready"}
    world.end_step()
    assert on(world, "file->third") == []
    hold = world.lease("ab")
    world.release(hold)  # a use makes it worth another try
    world.end_step()
    assert on(world, "file->third") == ["ab"]


def test_children_wait_in_each_tier_until_their_parents_are_below() -> None:
    world = three(4, 4, 4)
    world.store("ab", 0, False)
    world.end(world.on("device->host")[0])
    world.store("abc", 0, False)
    world.end(world.on("device->host")[0])
    assert on(world, "host->file") == ["a", "ab"]
    world.end(world.on("host->file")[0])
    assert (on(world, "host->file"), on(world, "file->third")) == (["abc"], ["a", "ab"])
    world.end(world.on("host->file")[0])
    assert on(world, "file->third") == ["a", "ab"]
    world.end(world.on("file->third")[0], Status.IO_ERROR, Status.OK)
    assert on(world, "file->third") == []
    assert there(world, THIRD) == set()


def test_each_route_has_a_rule_of_its_own() -> None:
    rules = ((FILE, "write_back", 2), (THIRD, "write_through_selective", 3))
    world = three(8, 8, 8, write_rules=rules)
    world.stored("abcdefg", before_eviction=True)
    assert there(world, FILE) == {"a"}  # one slot of the host tier is free, so one must be safe
    assert there(world, THIRD) == set()
    for _ in range(3):
        hold = world.lease("ab")
        world.release(hold)
        world.end_step()
        world.settle_all()
    assert there(world, FILE) == {"a"}
    assert there(world, THIRD) == {"a"}


@pytest.mark.parametrize("tier", ["attic", DEVICE])
def test_a_rule_for_no_route_is_refused(tier: str) -> None:
    with pytest.raises(CacheError, match="write_rules: expected tiers of"):
        TieredCache([TierSpec(HOST, 1, 1)], CacheSettings(write_rules={tier: WriteRule(WritePolicy.BACK)}))


@pytest.mark.parametrize("threshold", [1, 256])
def test_a_threshold_that_cannot_be_is_refused(threshold: int) -> None:
    with pytest.raises(CacheError, match="threshold: expected 2 to 255"):
        WriteRule(WritePolicy.SELECTIVE, threshold)
    assert WriteRule(WritePolicy.BACK, threshold).threshold == threshold


def test_what_a_warmer_tier_would_write_again_stays_below() -> None:
    world = three(2, 2, 1).stored("a", "b", before_eviction=True)
    assert (there(world, HOST), there(world, FILE)) == ({"a", "b"}, {"a", "b"})
    assert there(world, THIRD) == {"a"}  # for "b" there would be room only if "a" left, and was written again
    assert safe(world).cache.counters.routes["file->third"].chunks == 1


def test_found_in_two_tiers_at_start() -> None:
    world = three(4, 4, 4)
    assert world.cache.adopt(THIRD, [(0, key("a"), None, 0), (1, key("ab"), key("a"), 0)]) == 2
    found = [(0, key("abc"), key("ab"), 0), (3, key("xy"), key("x"), 0), (2, key("ab"), key("a"), 0)]
    assert world.cache.adopt(FILE, found) == 3
    world.cache.check_integrity()
    hold = lookup(world.cache, chunks("abc"), 0.0).lease
    assert world.cache.progress(hold).runs == ((THIRD, 1), (FILE, 2))


@pytest.mark.parametrize("batch", ["end_step", "tick", "apply_results"])
def test_pending_backups_are_issued_with_the_next_batch(batch: str) -> None:
    world = three(8, 8, 8, max_writes=1)
    world.store("a", 0, True)
    world.store("x", 0, True)  # one write at a time: it is dropped
    world.end(world.on("device->host")[0])
    world.store("ab", 1, True)
    world.end(world.on("device->host")[0])
    assert on(world, "host->file") == ["a"]  # "ab" is pending
    for job in world.on("host->file"):
        for rank in sorted(job.moving):
            world.deliver(job, rank, [Status.OK])
    if batch != "apply_results":
        getattr(world, batch)()
        assert on(world, "host->file") == ["a"]
    world.apply(world.results[:])
    assert (on(world, "host->file"), on(world, "file->third")) == (["ab"], ["a"])
