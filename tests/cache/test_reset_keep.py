"""Resets that keep the coldest tiers: what is ready there stays, and nothing that was in flight counts."""

from __future__ import annotations

import pytest
from cache_kit import Setup, chunks, key, store
from cache_model import World
from test_recovery_and_reset import load

from longshore.boundary import FILE, HOST, Cancel, Reset, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, DropReason, MissReason, TieredCache, TierSpec, WritePolicy
from longshore.errors import CacheError
from residents import residents_of

BOTH = Setup(host=8, file=8, backup="write_through")
FILES, ALL = (FILE,), (HOST, FILE)


def test_files_stay_and_are_served() -> None:
    world = World(BOTH).stored("abc", "xy")
    world.reset(FILES)
    assert world.cache.generation == 0
    assert (world.where("abc"), world.where("xy")) == ({FILE: "ready"}, {FILE: "ready"})
    assert world.free(HOST) == 8
    assert load(world, "abc") == (3, (FILE,) * 3)
    world.drain()


def test_chunk_in_no_kept_tier_goes_with_all_behind() -> None:
    world = World(BOTH._replace(backup="write_back")).stored("ab")
    world.flush()
    world.settle_all()
    world.stored("abcd")
    world.reset(FILES)
    assert sorted(world.resident) == [(key("a"), FILE), (key("ab"), FILE)]
    world.drain()


def test_all_tiers_stay_and_only_what_is_in_flight_goes() -> None:
    world = World(BOTH).stored("ab")
    world.store("abcd", 0, False)
    in_flight = list(world.jobs)
    assert in_flight
    world.reset(ALL)
    assert sorted(world.resident) == sorted((key(path), tier) for path in ("a", "ab") for tier in ALL)
    world.settle_all()  # their movers have copied them all the same
    assert world.where("abc") == {}
    world.stored("abcd")
    assert load(world, "abcd") == (4, (HOST,) * 4)
    world.drain()


def test_chunk_behind_one_in_flight_goes_with_it() -> None:
    world = World(BOTH)
    world.store("a", 0, False)
    world.store("ab", 0, False)
    first, second = world.on("device->host")
    world.end(second)
    assert world.where("ab") == {HOST: "ready"}
    world.reset(ALL)
    assert not world.resident
    world.end(first)
    world.drain()


def test_slots_of_jobs_are_nobodys_until_these_have_ended() -> None:
    world = World(BOTH._replace(host=4)).stored("abcd")
    world.discard("abcd", HOST)
    hold = world.loading("abcd")
    world.reset(FILES)
    assert world.free(HOST) == 0
    assert world.cache.progress(hold).outcome == (0, ())
    assert world.cache.counters.misses[MissReason.CANCELLED] == 4
    world.settle_all()
    assert world.free(HOST) == 4
    world.drain()


def test_corrupt_record_read_during_a_reset_is_lost() -> None:
    world = World(BOTH).stored("ab")
    world.discard("ab", HOST)
    world.loading("ab")
    world.reset(FILES)
    (read,) = world.on("file->host")
    world.end(read, Status.CORRUPT)
    assert not world.resident
    world.drain()


def test_commands_cancel_and_forget_nothing() -> None:
    world = World(BOTH).stored("a")
    world.store("xy", 0, False)
    in_flight = list(world.jobs)
    assert world.cache.reset(keep=FILES) == 0
    assert world.cache.take_commands() == [Cancel(job) for job in in_flight]


def test_new_weights_are_said_with_the_reset() -> None:
    cache = BOTH.build()
    assert cache.reset(weights=True) == 1
    assert cache.take_commands() == [Reset(1, weights=True)]


@pytest.mark.parametrize(
    ("keep", "weights"),
    [((HOST,), False), ((FILE, HOST), False), (("disk",), False), ((HOST, HOST, FILE), False), (FILES, True)],
    ids=["the warmest alone", "in another order", "no tier", "too many", "for new weights"],
)
def test_what_cannot_be_kept_is_refused(keep: tuple[str, ...], weights: bool) -> None:
    world = World(BOTH).stored("ab")
    world.refused(CacheError, "reset", keep=keep, weights=weights)


def test_what_a_restart_found_outlives_a_reset_that_keeps_it() -> None:
    cache = BOTH.build()
    cache.adopt(FILE, [(3, key("a"), None, 0)])
    cache.reset(keep=FILES)
    assert [each.key for each in residents_of(cache)] == [key("a")]
    cache.check_integrity()


def test_what_was_peeked_at_is_let_go_of() -> None:
    world = World(BOTH).stored("a")
    world.lookup_each(key("a"))
    world.reset(ALL)
    assert world.cache.leases == world.cache.protected == 0
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    world.drain()


def test_copies_that_a_reset_cancels_are_no_failed_writes() -> None:
    keys = chunks("abcd")
    tiers = [TierSpec(HOST, 8), TierSpec(FILE, 8)]
    cache = TieredCache(tiers, CacheSettings(max_writes=8, backup=WritePolicy.THROUGH), remote=("store",))
    offload = store(cache, keys, range(4))
    cache.take_commands()
    cache.apply_results([TransferResult(offload.job, (Status.OK,) * 4)], 0.0)
    copies = [command for command in cache.take_commands() if isinstance(command, Transfer)]
    assert {copy.route.destination for copy in copies} == {FILE, "store"}
    cache.reset(keep=(FILE,))
    cache.apply_results([TransferResult(copy.job, (Status.CANCELLED,) * len(copy.items)) for copy in copies], 0.0)
    for tier in (FILE, "store"):
        drops = cache.counters.drops[tier]
        assert drops[DropReason.CANCELLED] and not drops[DropReason.WRITE_FAILED]
    cache.check_integrity()
