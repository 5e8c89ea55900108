"""When chunks are written to a colder tier, and what becomes of those that cannot be."""

import pytest
from cache_kit import Setup, chunks, key, path_of
from cache_model import World

from longshore.boundary import FILE, HOST, Key, Status, TransferResult
from longshore.cache import CacheSettings, DropReason, GroupKeys, ScheduledStore, TieredCache, TierSpec
from longshore.cache.eviction_policies import LRU
from longshore.errors import CacheError

NO_ROOM, BACKPRESSURE, ORPHAN, WRITE_FAILED = (
    DropReason.NO_ROOM,
    DropReason.BACKPRESSURE,
    DropReason.NO_PARENT,
    DropReason.WRITE_FAILED,
)


def store(world: World, *paths: str) -> World:
    """Store these paths; their backups, if any were scheduled, stay under way."""
    for path in paths:
        world.store(path, 0, True)
        for job in world.on("device->host"):
            world.end(job)
    return world


def drops(world: World, tier: str = HOST) -> dict[DropReason, int]:
    return {reason: n for reason, n in world.cache.counters.drops[tier].items() if n}


def backed_up(world: World) -> list[str]:
    """Chunks on their way into the file tier, in order."""
    return [path_of(item.key) for job in world.on("host->file") for item in job.transfer.items]


def test_write_back_waits_for_the_engine_to_evict() -> None:
    world = World(Setup(host=4, offload="write_back"))
    world.store("ab", 0, False)
    assert world.where("ab") == {}
    world.store("ab", 0, True)
    assert world.where("ab") == {HOST: "filling"}


def test_chunk_in_or_arriving_at_a_tier_is_not_rewritten() -> None:
    world = World(Setup(host=4))
    world.store("ab", 0, False)
    world.store("abc", 0, False)
    first, second = world.on("device->host")
    assert [path_of(item.key) for item in second.transfer.items] == ["abc"]
    world.end(second)
    world.end(first)
    assert world.call("store", {0: GroupKeys([key("a")])}, {0: (0,)})[0] == ScheduledStore(
        None, stored_prefix=1, already_stored=range(1), later=range(0)
    )


def test_write_through_backs_up_what_is_ready() -> None:
    world = store(World(Setup(host=4, file=4, backup="write_through")), "ab")
    assert backed_up(world) == ["a", "ab"]


def test_write_back_keeps_a_quarter_free_or_safe() -> None:
    world = store(World(Setup(host=8, file=8)), "abcdef")
    assert backed_up(world) == []  # two of eight are free
    store(world, "x")
    assert backed_up(world) == ["a"]  # one is free, so one must be safe; heads go first
    store(world, "y")
    assert backed_up(world) == ["a", "x"]  # "ab" is colder, but waits for "a"


def test_store_copies_down_only_as_many_as_it_lacks() -> None:
    world = store(World(Setup(host=8, file=8)), "abcdef")
    world.store("wxyz", 0, True)  # two slots are free, and two more are needed
    assert backed_up(world) == ["a", "ab"]


def test_all_branches_behind_a_head_follow_its_backup() -> None:
    world = store(World(Setup(host=5, file=5, backup="write_through")), "a", "ab", "ac", "ad", "abe")
    assert backed_up(world) == ["a"]
    world.end(world.on("host->file")[0])
    assert backed_up(world) == ["ad", "ac", "ab", "abe"]


def test_an_offload_takes_no_room_from_what_it_follows() -> None:
    world = store(World(Setup(host=2)), "a")
    world.store("abc", 1, True)
    assert world.where("a") == {HOST: "ready"}
    assert world.where("ab") == {HOST: "filling"}
    assert drops(world) == {NO_ROOM: 1}


def test_dirty_chunks_are_not_evicted_during_a_backup() -> None:
    world = store(World(Setup(host=2, file=4)), "a", "b")
    world.store("c", 0, True)
    assert backed_up(world) == ["a"]
    assert drops(world) == {BACKPRESSURE: 1}
    world.end(world.on("host->file")[0])
    store(world, "c")
    assert world.where("a") == {FILE: "ready"}
    assert (world.where("b"), world.where("c")) == ({HOST: "ready"}, {HOST: "ready"})


@pytest.mark.parametrize("file", [None, 0])
def test_without_a_file_tier_to_help_the_coldest_is_dropped(file: int | None) -> None:
    world = store(World(Setup(host=2, file=file)), "a", "b", "c")
    assert world.where("a") == {}
    assert world.where("c") == {HOST: "ready"}
    assert drops(world) == {}


def test_failed_backup_is_not_retried_and_blocks_nothing() -> None:
    world = store(World(Setup(host=2, file=4, backup="write_through")), "a")
    world.end(world.on("host->file")[0], Status.NO_SPACE)
    assert drops(world, FILE) == {WRITE_FAILED: 1}
    world.end_step()
    world.flush()
    assert backed_up(world) == []
    world.store("ab", 1, True)  # nor what is behind it: the file tier alone could not reach it
    world.end(world.on("device->host")[0])
    assert backed_up(world) == []
    store(world, "xy")
    assert world.where("a") == {}


def test_dirty_chunks_are_evicted_when_the_colder_tier_is_off() -> None:
    world = store(World(Setup(host=2, file=4, max_writes=1)), "a", "b", "c")
    assert backed_up(world) == ["a"]
    assert drops(world) == {BACKPRESSURE: 1}  # `a` is being copied, `b` waits for its turn: both were passed over
    world.end(world.on("host->file")[0], Status.TIER_OFF)
    store(world, "d", "e", "f")
    assert {path_of(of) for of, _ in world.resident} == {"e", "f"}
    assert drops(world) == {BACKPRESSURE: 1}


def test_siblings_that_fail_together_are_both_left_alone() -> None:
    world = store(World(Setup(host=4, file=4, backup="write_through")), "ab")
    world.end(world.on("host->file")[0], Status.DEADLINE)
    world.end_step()
    assert backed_up(world) == []


def test_a_chunk_waits_for_the_backup_of_its_parent() -> None:
    world = store(World(Setup(host=2, file=4, backup="write_through")), "a")
    store(world, "ab")
    assert backed_up(world) == ["a"]
    world.end(world.on("host->file")[0])
    assert backed_up(world) == ["ab"]


def test_a_held_chunk_survives_the_failed_backup_of_its_parent() -> None:
    world = store(World(Setup(host=2, file=4, backup="write_through")), "a", "ab")
    slow = world.on("host->file")[0]
    for job in world.on("host->file")[1:]:
        world.end(job)
    assert world.lookup("ab", 0, None) is not None
    world.store("c", 0, True)  # would like the slot of "ab"
    world.end(slow, Status.IO_ERROR)
    assert world.where("ab") == {HOST: "ready"}


def test_file_tier_smaller_than_the_host_comes_to_rest() -> None:
    world = World(Setup(host=4, file=2, backup="write_through"))
    for path in ("a", "b", "c", "d"):
        world.stored(path)
    assert world.cache.counters.routes["host->file"].chunks == 2
    assert world.flush()


def test_file_tier_evicts_what_the_host_tier_lacks() -> None:
    world = World(Setup(host=2, file=3, backup="write_through"))
    for path in ("a", "b", "c", "d"):
        world.stored(path)
    assert world.where("c") == world.where("d") == {HOST: "ready", FILE: "ready"}
    assert sum(world.where(path) == {FILE: "ready"} for path in "ab") == 1


@pytest.mark.parametrize(("limit", "taken"), [(3, 3), (1, 1)])
def test_offloads_in_flight_are_bounded_and_the_rest_is_counted(limit: int, taken: int) -> None:
    world = World(Setup(host=8, max_writes=limit))
    world.store("abcde", 0, False)
    assert len(world.on("device->host")[0].transfer.items) == taken
    assert drops(world) == {BACKPRESSURE: 5 - taken}
    world.store("xyz", 0, False)
    assert drops(world) == {BACKPRESSURE: 5 - taken + 3}
    world.end(world.on("device->host")[0])
    world.store("abcde", 0, False)
    assert world.where("abcde"[: taken + 1]) == {HOST: "filling"}


def test_backups_in_flight_are_bounded_the_rest_waits() -> None:
    world = World(Setup(host=8, file=8, backup="write_through", max_writes=3))
    store(world, "abc", "xyz")
    assert backed_up(world) == ["a", "ab", "abc"]
    assert drops(world, FILE) == {}
    world.settle_all()
    assert world.where("xyz") == {HOST: "ready", FILE: "ready"}


def test_offers_count_as_writes_in_flight() -> None:
    world = World(Setup(host=8, max_writes=2))
    world.store_by_host("abc", 0)
    world.store("x", 0, False)
    assert drops(world) == {BACKPRESSURE: 2}


def test_no_room_is_counted_as_such() -> None:
    world = store(World(Setup(host=1)), "a")
    world.lookup("a", 0, None)
    world.store("x", 0, False)
    assert drops(world) == {NO_ROOM: 1}


def test_an_orphan_is_counted_as_such() -> None:
    world = store(World(Setup(host=1)), "x")
    world.store("abc", 2, False)
    assert drops(world) == {ORPHAN: 1}


def test_flush_orders_all_that_a_restart_would_lose() -> None:
    world = store(World(Setup(host=8, file=8, max_writes=3)), "abc", "xy")
    assert backed_up(world) == []
    assert not world.flush()
    assert len(backed_up(world)) == 3
    world.settle_all()
    assert not world.flush()
    world.settle_all()
    assert world.flush()
    assert all(world.where(path)[FILE] == "ready" for path in ("abc", "xy"))


def test_failed_backup_is_retried_when_its_chunk_is_used() -> None:
    world = store(World(Setup(host=4, file=4, backup="write_through")), "ab")
    world.end(world.on("host->file")[0], Status.NO_SPACE)
    world.end_step()
    assert backed_up(world) == []
    hold = world.lease("ab")
    world.release(hold)
    world.end_step()
    assert backed_up(world) == ["a", "ab"]


def test_chunks_behind_a_cancelled_backup_wait_again() -> None:
    world = store(World(Setup(host=8, file=4, backup="write_through")), "ab", "abc")
    world.deliver(world.on("host->file")[0], 0, [Status.OK])
    books = world.cache._state
    books.backlog.choose = lambda tier, wanted: []  # type: ignore[method-assign]
    world.apply(world.results[:])
    assert (world.where("ab"), world.where("abc")) == ({HOST: "ready", FILE: "ready"}, {HOST: "ready"})
    world.discard("ab", FILE)
    del books.backlog.choose
    world.end_step()
    assert backed_up(world) == ["a", "ab", "abc"]


class Policy(LRU):
    """LRU, and what it was asked for."""

    looks = 0

    def victim(self) -> int:
        Policy.looks += 1
        return super().victim()


@pytest.mark.parametrize("kind", ["one long path", "held", "dirty", "heads older than tails"])
def test_evictions_do_not_rescan_what_cannot_go(kind: str) -> None:
    """The cost of an eviction must not depend on how much in the tier may not go."""
    tiers = [TierSpec(HOST, 400, 1, Policy)] + ([TierSpec(FILE, 400, 1)] if kind == "dirty" else [])
    cache = TieredCache(tiers)

    def put(path: list[Key], first: int = 0) -> None:
        """Store a path; backups stay under way for ever."""
        offload = cache.store({0: GroupKeys(path, first)})[0]
        if offload.job is not None:
            cache.apply_results([TransferResult(offload.job, (Status.OK,) * len(offload.positions))], 0.0)

    long = chunks("a" * 300)
    if kind == "one long path":
        put(long)
    elif kind == "heads older than tails":
        for i in range(300):
            put(long[: i + 1], i)
    singles = [b"single" + bytes([i // 256, i % 256]) for i in range(400 - cache.stats()[0].used)]
    for single in singles:
        put([single])
    if kind == "held":
        assert all(cache.lookup({0: GroupKeys([single])}, 0.0).lease for single in singles[:300])
    Policy.looks = 0
    for i in range(60):
        put([b"new" + bytes([i])])
    assert cache.counters.evictions[HOST] == (0 if kind == "dirty" else 60)
    assert Policy.looks <= 400 + 3 * 60
    cache.check_integrity()


@pytest.mark.parametrize("name", ["blocks_per_chunk", "ranks", "max_writes"])
def test_settings_that_cannot_work_are_refused(name: str) -> None:
    with pytest.raises(CacheError, match="at least 1"):
        CacheSettings(**{name: 0})


@pytest.mark.parametrize(
    "tiers",
    [
        [],
        [TierSpec("a", 1, 1), TierSpec("a", 1, 1)],
        [TierSpec("device", 1, 1)],
        [TierSpec("a", -1, 1)],
    ],
)
def test_tiers_that_cannot_be_are_refused(tiers: list[TierSpec]) -> None:
    with pytest.raises(CacheError):
        TieredCache(tiers)


def test_answered_chunks_that_a_tier_already_has_stay() -> None:
    world = World(Setup(host=8, prompt_only=True))
    world.store("abcd", 0, False, prompt=None)
    world.settle_all()
    world.store("abcde", 0, False, prompt=2)
    assert world.cache.counters.drops[HOST][DropReason.GENERATED] == 1
