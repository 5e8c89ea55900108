"""From a match to device blocks: joining, cutting, failing, giving up. The model checks each outcome, too."""

import gc
import math

import pytest
from cache_kit import LOAD, Setup, chunks, key, lookup, path_of, store
from cache_model import World

from longshore.boundary import FILE, HOST, Cancel, Status, TransferResult, Urgency
from longshore.cache import Lease, MissReason, Run, TieredCache, TierSpec
from longshore.errors import LeaseError

BOTH = Setup(host=6, file=8, backup="write_through")


def cold(setup: Setup, *paths: str) -> World:
    """A world in which these paths are in the file tier alone."""
    world = World(setup)
    for path in paths:
        world.stored(path)
        world.discard(path, HOST)
    return world


def load(world: World, path: str, count: int = 0) -> Lease:
    hold = world.lease(path)
    world.load(hold, count or len(world.holds[hold].keys), 0, 0)
    return hold


def misses(world: World) -> dict[str, int]:
    return {reason.value: n for reason, n in world.cache.counters.misses.items() if n}


def test_a_match_names_the_tiers_that_it_will_come_from() -> None:
    world = cold(BOTH, "abc")
    load(world, "a")
    world.settle_all()
    found = lookup(world.cache, chunks("abc"), 0.0)
    assert found.num_chunks == 3
    assert world.cache.progress(found.lease).runs == (Run(HOST, 1), Run(FILE, 2))


def test_a_match_of_nothing_holds_nothing() -> None:
    world = World(BOTH)
    assert world.lookup("abc", 0, None) is None
    assert misses(world) == {"absent": 3}
    assert world.cache.leases == world.cache.protected == 0


def test_chunk_in_flight_to_its_first_tier_is_a_miss() -> None:
    world = World(BOTH)
    world.store("a", 0, False)
    world.store("ab", 0, False)
    world.end(world.on("device->host")[1])  # the child arrives before its parent
    assert world.lookup("abc", 0, None) is None
    assert misses(world) == {"in_flight": 1, "after_miss": 1, "absent": 1}


def test_peek_sees_every_state_and_protects_what_is_ready() -> None:
    world = cold(Setup(host=1, file=4, backup="write_through"), "a")
    assert world.lookup_each(key("a")) == "colder"
    assert world.lookup_each(key("x")) == "absent"
    world.store("x", 0, False)
    assert world.lookup_each(key("x")) == "in_flight"
    world.end_step()
    world.settle_all()
    assert world.lookup_each(key("x")) == "host"
    assert world.seen_in_step == {key("x"): False}
    assert world.discard("x", FILE) == 1
    assert world.discard("x", HOST) == 0
    world.end_step()
    world.settle_all()
    assert world.discard("x", HOST) == 1


def test_a_chunk_in_the_file_comes_through_the_host_tier() -> None:
    world = cold(BOTH, "ab")
    load(world, "ab")
    (reading,), (copying,) = world.on("file->host"), world.on("host->device")
    assert copying.transfer.after == (reading.transfer.job,)
    assert [i.destination for i in reading.transfer.items] == [i.source for i in copying.transfer.items]
    assert reading.transfer.urgency is copying.transfer.urgency is Urgency.DEMAND
    assert reading.transfer.deadline == math.inf  # others may join it: who waits, and until when, is the cache's
    assert world.runnable() == [(reading, 0)]


def test_a_second_request_joins_a_load_in_flight() -> None:
    world = cold(BOTH, "abc")
    first, second = load(world, "ab"), load(world, "abc")
    reading, rest = world.on("file->host")
    assert [path_of(i.key) for i in reading.transfer.items] == ["a", "ab"]
    assert [path_of(i.key) for i in rest.transfer.items] == ["abc"]
    assert set(world.on("host->device")[1].transfer.after) == {reading.transfer.job, rest.transfer.job}
    world.settle_all()
    assert world.cache.progress(first).outcome == (2, (FILE, FILE))
    assert world.cache.progress(second).outcome == (3, (FILE, FILE, FILE))


def test_a_joined_load_outlives_the_request_that_began_it() -> None:
    world = cold(BOTH, "a")
    first, second = load(world, "a"), load(world, "a")
    world.release(first)
    world.settle_all()
    assert world.cache.progress(second).outcome == (1, (FILE,))


def test_a_joined_load_that_fails_is_a_miss_for_both() -> None:
    world = cold(BOTH, "ab")
    first, second = load(world, "ab"), load(world, "ab")
    world.end(world.on("file->host")[0], Status.OK, Status.SHORT)
    for job in world.on("host->device"):
        world.end(job)
    assert world.cache.progress(first).outcome == world.cache.progress(second).outcome == (1, (FILE,))
    assert misses(world) == {"short": 2}
    assert world.where("ab") == {}


def test_chunks_without_host_room_are_left_out_and_counted() -> None:
    world = cold(Setup(host=3, file=8, backup="write_through"), "abc", "xyz")
    load(world, "abc")
    hold = load(world, "xyz")
    assert not world.holds[hold].parts
    assert world.cache.progress(hold).outcome == (0, ())
    assert misses(world) == {"no_room": 3}
    world.settle_all()
    world.lookup("a", 0, None)
    load(world, "xy")
    hold = load(world, "xyz")
    assert [len(part.told) for part in world.holds[hold].parts] == [3]
    world.settle_all()
    assert world.cache.progress(hold).outcome == (3, (FILE,) * 3)


def test_as_much_is_loaded_as_there_is_room_for() -> None:
    world = cold(Setup(host=3, file=8, backup="write_through"), "ab", "xyz")
    load(world, "ab")
    hold = load(world, "xyz")
    world.settle_all()
    assert world.cache.progress(hold).outcome == (1, (FILE,))
    assert misses(world) == {"no_room": 2}


def test_chunk_with_slot_behind_one_without_room_follows_it() -> None:
    world = World(Setup(host=1, file=1, found=((0, key("a"), None),), backup="write_through")).stored("ab")
    load(world, "ab")
    assert misses(world) == {"no_room": 1, "after_miss": 1}


def test_what_is_loaded_does_not_evict_itself() -> None:
    world = cold(Setup(host=3, file=8, backup="write_through"), "abc")
    load(world, "ab")
    world.settle_all()
    hold = load(world, "abc")
    world.settle_all()
    assert world.cache.progress(hold).outcome == (3, (HOST, HOST, FILE))


def test_ready_chunks_do_not_wait_the_rest_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.cache.load.LOAD_BATCH", 2)
    world = cold(BOTH, "abcdef")
    load(world, "a")
    world.settle_all()
    hold = load(world, "abcdef")
    parts = world.holds[hold].parts
    assert [len(part.told) for part in parts] == [1, 2, 2, 1]
    assert [len(part.transfer.after) for part in parts] == [0, 1, 1, 1]
    world.end(world.on("file->host")[0])
    world.end(parts[0])
    world.end(parts[1])
    world.tick(LOAD)
    assert world.cache.progress(hold).outcome == (3, (HOST, FILE, FILE))


def test_a_batch_is_sixteen_chunks() -> None:
    world = cold(Setup(host=20, file=20, backup="write_through"), "a" * 20)
    hold = load(world, "a" * 20)
    assert [len(part.told) for part in world.holds[hold].parts] == [16, 4]


def test_parts_of_the_first_and_the_last_chunk() -> None:
    world = cold(BOTH._replace(per_chunk=2), "abc")
    hold = world.lease("abc")
    world.load(hold, 3, 1, 1)
    (section,) = world.on("host->device")[0].transfer.sections
    assert (section.first_block, len(section.blocks)) == (1, 4)
    world.settle_all()
    assert world.cache.progress(hold).outcome == (3, (FILE,) * 3)


def test_what_has_arrived_by_the_deadline_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.cache.load.LOAD_BATCH", 1)
    world = cold(BOTH, "abc")
    before = misses(world)
    hold = load(world, "abc")
    for job in (world.on("file->host")[0], world.on("host->device")[0]):
        world.end(job)
    assert world.cache.progress(hold).outcome is None
    world.tick(LOAD)
    assert world.cache.progress(hold).outcome == (1, (FILE,))
    assert misses(world) == {**before, "deadline": 2}
    world.tick(LOAD)  # is the same again
    late = world.on("host->device")
    world.settle_all()
    assert world.cache.progress(hold).outcome == (1, (FILE,))
    assert all(world.cache.progress(job.transfer.job).is_over for job in late)


def test_giving_up_cancels_what_nobody_waits_for_and_nothing_else() -> None:
    world = cold(BOTH, "a")
    hasty, patient = (world.lookup("a", 0, None) for _ in range(2))
    world.load(hasty, 1, 0, 0, 1.0)
    world.load(patient, 1, 0, 0)
    world.cache.apply_results((), 1.0)
    mine, _ = world.on("host->device")
    assert world.cache.take_commands() == [Cancel(mine.transfer.job)]
    world.cache.release(hasty)
    assert world.cache.take_commands() == []
    world.cache.release(patient)
    assert len(world.cache.take_commands()) == 1


def test_letting_go_amid_a_load_leaves_nothing_behind() -> None:
    world = cold(BOTH, "abc")
    world.lookup("abc", 0, "one")
    world.lookup("ab", 0, "one")
    for hold in list(world.holds)[:1]:
        world.load(hold, 3, 0, 0)
    world.release_request("one")
    assert world.cache.leases == world.cache.protected == 0
    world.settle_all()
    assert world.where("abc") == {HOST: "ready", FILE: "ready"}  # what was on its way in stays, for the next one
    world.drain()


def test_a_chunk_counts_only_when_all_ranks_have_it() -> None:
    world = cold(BOTH._replace(ranks=2), "ab")
    hold = load(world, "ab")
    reading, copying = world.on("file->host")[0], world.on("host->device")[0]
    world.deliver(reading, 0, [Status.OK])
    world.apply(world.results[:])
    assert world.where("a") == {HOST: "filling", FILE: "ready"}
    world.deliver(reading, 1, [Status.OK])
    world.apply(world.results[:])
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    world.deliver(copying, 1, [Status.OK])
    world.deliver(copying, 0, [Status.OK, Status.CANCELLED])
    world.apply(world.results[:1])
    assert world.cache.progress(hold).outcome is None
    world.apply(world.results[:])
    assert world.cache.progress(hold).outcome == (1, (FILE,))


@pytest.mark.parametrize("said", [(Status.DEADLINE, Status.CORRUPT), (Status.CORRUPT, Status.DEADLINE)])
@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
def test_bad_bytes_on_one_rank_outweigh_another_ranks_delay(
    ranks: tuple[int, int], said: tuple[Status, Status]
) -> None:
    world = cold(BOTH._replace(ranks=2), "a")
    load(world, "a")
    reading = world.on("file->host")[0]
    for rank, status in zip(ranks, said, strict=True):
        world.deliver(reading, rank, [status])
        world.apply(world.results[:])
    assert world.where("a") == {}, "what is corrupt on one rank could be matched again"


def test_a_late_load_leaves_its_source_good() -> None:
    world = cold(BOTH, "a")
    load(world, "a")
    world.end(world.on("file->host")[0], Status.DEADLINE)
    assert world.where("a") == {FILE: "ready"}
    world.end(world.on("host->device")[0])
    assert MissReason.DEADLINE.value in misses(world)
    world.drain()


def test_chunk_others_found_bad_has_not_arrived_for_anyone() -> None:
    world = World(BOTH)
    world.store("a", 0, False)
    world.end(world.on("device->host")[0])
    for job in world.on("host->file"):
        world.end(job)
    first, second = load(world, "a"), load(world, "a")
    one, two = world.on("host->device")
    world.end(one, Status.CORRUPT)
    world.end(two, Status.OK)
    assert world.cache.progress(first).outcome == world.cache.progress(second).outcome == (0, ())
    assert misses(world) == {"corrupt": 2}


@pytest.mark.parametrize("arrives", [Status.OK, Status.IO_ERROR])
@pytest.mark.parametrize("together", [True, False])
def test_copy_reported_before_its_read_arrives_only_with_the_read(arrives: Status, together: bool) -> None:
    """Results come in any order: what a copy has read is known only once the result of its source's writer is."""
    world = cold(BOTH, "ab")
    hold = load(world, "ab")
    cache, read, copy = world.cache, world.on("file->host")[0].transfer, world.on("host->device")[0].transfer
    told = [TransferResult(copy.job, (Status.OK,) * 2), TransferResult(read.job, (Status.OK, arrives))]
    for results in [told] if together else [told[:1], told[1:]]:
        cache.apply_results(results, 0.0)
    both = arrives is Status.OK and together
    progress = cache.progress(hold)
    assert progress.outcome is not None
    assert progress.outcome.num_chunks == (2 if both else 1 if together else 0)
    cache.release(hold)
    cache.check_integrity()
    assert cache.jobs_in_flight == 0


def test_backup_of_bytes_that_turn_out_bad_is_not_kept() -> None:
    world = World(BOTH)
    world.store("a", 0, False)
    world.end(world.on("device->host")[0])
    load(world, "a")
    world.end(world.on("host->device")[0], Status.CORRUPT)
    world.end(world.on("host->file")[0], Status.OK)
    assert world.where("a") == {}
    assert world.lookup("a", 0, None) is None
    world.drain()


def test_what_arrived_behind_a_miss_is_counted_as_behind() -> None:
    world = cold(BOTH, "abc")
    before = misses(world)
    hold = load(world, "abc")
    world.end(world.on("file->host")[0])
    world.end(world.on("host->device")[0], Status.OK, Status.TIER_OFF, Status.OK)
    assert world.cache.progress(hold).outcome == (1, (FILE,))
    assert misses(world) == {**before, "tier_off": 1, "after_miss": 1}


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_each_failure_is_a_miss_of_its_own_name(status: Status) -> None:
    world = cold(BOTH, "a")
    hold = load(world, "a")
    world.end(world.on("file->host")[0], status)
    world.end(world.on("host->device")[0])
    assert world.cache.progress(hold).outcome == (0, ())
    assert misses(world)[status.value] == 1
    assert world.where("a") == ({} if status.invalidates_source else {FILE: "ready"})
    world.drain()


def test_what_was_loaded_leaves_nothing_to_a_garbage_collector() -> None:
    cache, blocks = TieredCache([TierSpec(HOST, 4, 1)]), [0, 1]
    offload = store(cache, [key("a"), key("ab")], blocks)
    cache.apply_results([TransferResult(offload.job, (Status.OK,) * 2)], 0.0)
    cache.take_commands()
    gc.collect()
    gc.disable()
    try:
        hold = lookup(cache, [key("a"), key("ab")], 0.0).lease
        (part,) = cache.load(hold, {0: blocks}).jobs
        cache.take_commands()
        cache.apply_results([TransferResult(part.job, (Status.OK,) * 2)], 0.0)
        cache.release(hold)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_lease_is_on_the_keys_of_its_lookup() -> None:
    cache, keys = TieredCache([TierSpec(HOST, 8)]), chunks("abcd")
    offload = store(cache, keys, range(4))
    cache.apply_results([TransferResult(offload.job, (Status.OK,) * 4)], 0.0)
    asked = list(keys)
    lease = lookup(cache, asked, 0.0).lease
    asked += chunks("wxyz")  # a request grows
    assert cache.load(lease, {0: range(4)}).num_chunks == 4
    assert [item.key for item in cache.take_commands()[-1].items] == keys
    for change in (list.pop, list.reverse, list.clear):
        asked = list(keys)
        lease = lookup(cache, asked, 0.0).lease
        change(asked)
        with pytest.raises(LeaseError, match="have changed since"):
            cache.load(lease, {0: range(4)})
        cache.release(lease)
    asked = list(keys)
    lease = lookup(cache, asked, 0.0).lease
    cache.reset()
    asked[:] = chunks("wxyz")
    with pytest.raises(LeaseError, match="have changed since"):
        cache.load(lease, {0: range(4)})
    cache.check_integrity()
