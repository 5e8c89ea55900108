"""Bringing chunks up before they are asked for, and giving the device's memory away."""

from __future__ import annotations

import math

import pytest
from cache_kit import LOAD, Setup, chunks, key, lookup, store
from cache_model import World

from longshore.boundary import FILE, HOST, Cancel, Key, Status, Transfer, TransferResult, Urgency
from longshore.cache import CacheSettings, Lease, MissReason, PrefetchPolicy, Run, TieredCache, TierSpec
from longshore.cache.load import Prefetcher
from longshore.errors import CacheError, LeaseError

BOTH = Setup(host=4, file=8, backup="write_through")


def prefetched(world: World, lease: Lease) -> int | None:
    """How many chunks lead that are in the host tier, once the request need not wait any longer."""
    progress = world.cache.progress(lease)
    return progress.leading(HOST) if progress.is_over else None


def cold(path: str, setup: Setup = BOTH) -> tuple[World, Lease]:
    """A world in which only the file tier has `path`, and a hold on it."""
    world = World(setup).stored(path)
    world.discard(path, HOST)
    hold = world.lease(path, "request")
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
    world.load(hold, 3, 0, 0)
    world.settle_all()
    assert world.cache.progress(hold).outcome == (3, (HOST,) * 3)
    world.drain()


def test_an_onboarding_joins_what_is_under_way() -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold)
    world.load(hold, 2, 0, 0)
    assert world.on("file->host") == [world.jobs[job]]
    world.settle_all()
    assert world.cache.progress(hold).outcome == (2, (FILE,) * 2)
    world.drain()


@pytest.mark.parametrize("late", [Status.CANCELLED, Status.OK])
def test_a_request_that_goes_away_cancels_its_prefetches(late: Status) -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold)
    world.call("release", hold)
    world.let_go(hold)
    assert Cancel(job) in world.call("take_commands")
    world.look()
    world.end(world.jobs[job], late)
    assert (HOST in world.where("ab")) == (late is Status.OK)
    world.drain()
    world.evict_all()


def test_prefetch_takes_only_room_that_is_clean() -> None:
    world, hold = cold("abcd", Setup(host=4, file=8, backup="write_through"))
    other = store(world.cache, [key("x")])  # one slot is being written
    assert other.job is not None
    jobs = world.cache.prefetch(hold, 0.0)
    (transfer,) = (c for c in world.cache.take_commands() if isinstance(c, Transfer))
    assert (transfer.job,) == jobs
    assert [item.key for item in transfer.items] == chunks("abc")
    world.cache.check_integrity()


def test_a_prefetch_that_fails_leaves_what_is_sound() -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold)
    world.end(world.jobs[job], Status.OK, Status.IO_ERROR)
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    assert world.where("ab") == {}
    with pytest.raises(LeaseError):
        world.cache.prefetch(Lease(99), 0.0)


def called_off(world: World) -> list[int]:
    """Jobs that were called off since the last time."""
    return [command.job for command in world.call("take_commands") if isinstance(command, Cancel)]


@pytest.mark.parametrize(
    ("policy", "ends"), [(PrefetchPolicy.BEST_EFFORT, 0.0), (PrefetchPolicy.WAIT, LOAD), (PrefetchPolicy.TIMEOUT, 3.0)]
)
def test_request_waits_for_its_prefetch_as_its_policy_says(policy: PrefetchPolicy, ends: float) -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold, policy, 3.0 if policy is PrefetchPolicy.TIMEOUT else None)
    if ends:
        world.tick(ends - 0.5)
        assert prefetched(world, hold) is None
        world.call("apply_results", (), ends)
        assert called_off(world) == [job]  # its time is over, whatever the mover does
    assert prefetched(world, hold) == 0
    assert not world.cache.progress(job).is_over
    assert world.where("ab") == {HOST: "filling", FILE: "ready"}
    world.now = ends
    world.look()
    world.settle_all()  # it was too late to stop it
    assert prefetched(world, hold) == 2
    world.drain()


def test_what_the_cache_prefetches_by_is_a_setting() -> None:
    cache = TieredCache(
        [TierSpec(HOST, 2, 1), TierSpec(FILE, 2, 1)], CacheSettings(prefetch=PrefetchPolicy.TIMEOUT, prefetch_timeout=3)
    )
    cache.adopt(FILE, [(0, key("a"), None, 0)])
    hold = lookup(cache, [key("a")], 0.0).lease
    cache.prefetch(hold, 0.0)
    cache.apply_results((), 2.5)
    assert not cache.progress(hold).is_over
    cache.apply_results((), 3.0)
    assert cache.progress(hold) == (True, None, (Run(FILE, 1),), False)


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan, math.inf, "1"])
def test_a_timeout_is_a_positive_number_of_seconds(timeout: float) -> None:
    world, hold = cold("a")
    world.refused(CacheError, "prefetch", hold, 0.0, policy=PrefetchPolicy.TIMEOUT, timeout=timeout)
    world.refused(CacheError, "load", hold, {0: (0,)}, timeout=timeout)


def test_only_one_policy_has_a_timeout() -> None:
    world, hold = cold("a")
    world.refused(CacheError, "prefetch", hold, 0.0, policy=PrefetchPolicy.WAIT, timeout=1.0)
    world.refused(CacheError, "prefetch", hold, 0.0, timeout=1.0)


def test_prefetch_that_two_joined_outlives_its_first_request() -> None:
    world, first = cold("ab")
    (job,) = world.prefetch(first, PrefetchPolicy.TIMEOUT, 5.0)
    world.tick(3.0)
    second = world.lease("ab", "another")
    assert world.prefetch(second, PrefetchPolicy.TIMEOUT, 4.0) == (job,)
    world.call("apply_results", (), 5.0)
    assert called_off(world) == []
    assert (prefetched(world, first), prefetched(world, second)) == (0, None)
    world.call("release", first)
    assert called_off(world) == []
    world.call("apply_results", (), 7.0)
    assert called_off(world) == [job]
    assert prefetched(world, second) == 0


def test_an_onboarding_keeps_a_prefetch_alive_whose_request_has_gone() -> None:
    world, first = cold("ab")
    (job,) = world.prefetch(first)
    second = world.lease("ab", "another")
    world.load(second, 2, 0, 0)
    world.release(first)
    world.end(world.jobs[job])
    world.settle_all()
    assert world.cache.progress(second).outcome == (2, (FILE,) * 2)


def test_each_waiter_of_a_load_has_its_own_deadline() -> None:
    world, first = cold("ab")
    world.load(first, 2, 0, 0, 2.0)
    world.tick(1.0)
    second = world.lease("ab")
    world.load(second, 2, 0, 0, 5.0)
    (read,) = world.on("file->host")
    world.tick(1.0)
    assert world.cache.progress(first).outcome == (0, ())  # at the tick, and the mover has said nothing yet
    assert world.cache.progress(second).outcome is None
    assert not world.cache.progress(read.transfer.job).is_over
    world.end(read)
    world.settle_all()
    assert world.cache.progress(second).outcome == (2, (FILE,) * 2)
    assert world.cache.counters.misses[MissReason.DEADLINE] == 2
    world.drain()


def test_a_released_load_leaves_its_read_until_the_deadline() -> None:
    world, hold = cold("ab")
    world.load(hold, 2, 0, 0, 4.0)
    (read,), (copy,) = world.on("file->host"), world.on("host->device")
    world.call("release", hold)
    assert called_off(world) == [copy.transfer.job]
    world.call("apply_results", (), 3.5)
    assert called_off(world) == []
    world.call("apply_results", (), 4.0)
    assert called_off(world) == [read.transfer.job]
    world.call("apply_results", (), 100.0)
    assert called_off(world) == []


def test_a_second_prefetch_takes_the_place_of_the_first() -> None:
    world, hold = cold("ab")
    (job,) = world.prefetch(hold, PrefetchPolicy.TIMEOUT, 1.0)
    assert world.prefetch(hold, PrefetchPolicy.TIMEOUT, 3.0) == (job,)
    world.call("apply_results", (), 2.0)
    assert called_off(world) == []
    assert prefetched(world, hold) is None


def test_nobody_waits_for_what_a_reset_has_made_worthless() -> None:
    world, hold = cold("ab")
    world.prefetch(hold, PrefetchPolicy.WAIT)
    world.reset()
    assert prefetched(world, hold) == 0
    world.drain()


def test_waits_that_are_over_are_not_kept() -> None:
    world, hold = cold("ab")
    waiters = world.cache._transfers.waiters
    for _ in range(300):
        each = lookup(world.cache, chunks("ab"), 0.0).lease
        world.cache.load(each, {0: (0, 1)}, timeout=1000.0)
        world.cache.release(each)
    world.cache.take_commands()
    assert len(waiters.open) == 300  # they have left their read to each other
    (read, *copies) = world.cache._transfers.jobs
    for job in (read, *copies):
        world.cache.apply_results([TransferResult(job, (Status.OK,) * 2)], 0.0)
    assert not waiters.open
    world.cache.load(hold, {0: (0, 1)})
    assert len(waiters._due) == 1


def test_hold_that_lost_everything_has_nothing_to_prefetch() -> None:
    world, hold = cold("ab")
    world.loading("ab")
    world.end(world.on("file->host")[0], Status.CORRUPT)
    assert world.where("a") == {}
    assert world.prefetch(hold) == ()


def crowded(*paths: str) -> tuple[World, list[Lease]]:
    """A world in which only the file tier has `paths`, and the host tier is full of w, x, y and z alone; holds."""
    world = World(Setup(host=4, file=32))
    for path in paths:
        world.stored(path)
        while not world.flush():
            world.settle_all()
        world.discard(path, HOST)
    for path in "wxyz":
        world.store(path, 0, False)
    for job in world.on("device->host"):
        world.end(job)
    holds = [world.lookup(path, 0, path) for path in paths]
    assert world.free(HOST) == 0
    return world, [hold for hold in holds if hold is not None]


def step(world: World, *statuses: Status) -> list[str]:
    """All jobs under way end; their routes."""
    jobs = list(world.jobs.values())
    for job in jobs:
        world.end(job, *statuses)
    return [str(job.transfer.route) for job in jobs]


def test_a_prefetch_has_room_made_by_copies_down() -> None:
    world, (hold,) = crowded("abc")
    assert world.prefetch(hold, PrefetchPolicy.WAIT) == ()
    assert prefetched(world, hold) is None
    assert set(step(world)) == {"host->file"}
    assert prefetched(world, hold) is None
    while world.jobs:
        step(world)
    assert prefetched(world, hold) == 3
    assert all(world.where(path) for path in "wxyz"), "what made way is safe"
    world.drain()


def test_a_prefetch_goes_on_with_what_room_is_made() -> None:
    """Copies down end one after the other, and some of them fail: heads come first, and as much as fits."""
    world, (hold,) = crowded("abc")
    world.prefetch(hold, PrefetchPolicy.WAIT)
    copies = world.on("host->file")
    world.end(copies[0], Status.OK, Status.IO_ERROR)
    assert prefetched(world, hold) is None
    while world.jobs:
        step(world)
    assert prefetched(world, hold) == 3
    world.drain()


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.TIER_OFF, Status.QUEUE_FULL, Status.DEVICE_ERROR])
def test_a_prefetch_that_lacks_room_repeats_no_failed_read(status: Status) -> None:
    """The chunk is still there, and a read that fails at once would be ordered at once, again and again."""
    world, (hold,) = crowded("abc")
    world.prefetch(hold, PrefetchPolicy.WAIT)
    assert world.discard("z", HOST) == 1
    world.end_step()
    (read,) = world.on("file->host")
    assert world.on("host->file"), "more room will be made"
    world.end(read, status)
    assert world.on("file->host") == []
    assert prefetched(world, hold) == 0
    while world.jobs:
        assert set(step(world)) == {"host->file"}
    world.prefetch(hold, PrefetchPolicy.WAIT)
    while world.jobs:
        step(world)
    assert prefetched(world, hold) == 3, "the next one reads"
    world.drain()


def test_prefetch_waits_for_end_of_step_that_protects_its_victims() -> None:
    world, (hold,) = crowded("abc")
    world.prefetch(hold, PrefetchPolicy.WAIT)
    world.lookup_each(*(key(path) for path in "wxyz"))
    while world.jobs:
        step(world)
    assert prefetched(world, hold) is None
    world.end_step()
    while world.jobs:
        step(world)
    assert prefetched(world, hold) == 3
    world.drain()


def test_slow_copies_down_end_a_prefetch_at_its_deadline() -> None:
    world, (hold,) = crowded("abc")
    world.prefetch(hold, PrefetchPolicy.TIMEOUT, 3.0)
    world.tick(2.5)
    assert prefetched(world, hold) is None
    world.tick(0.5)
    assert prefetched(world, hold) == 0
    step(world)
    assert step(world) == [], "nothing is read for it any more"
    world.drain()


def test_a_prefetch_does_not_evict_what_its_own_hold_has() -> None:
    world, hold = cold("abcd")
    head = world.lease("ab")
    world.prefetch(head)
    world.settle_all()
    world.store("xy", 0, False)  # clean, and used later than "ab"
    world.settle_all()
    assert world.free(HOST) == 0
    world.prefetch(hold, PrefetchPolicy.WAIT)
    assert step(world) == ["file->host"]
    assert prefetched(world, hold) == 4
    world.drain()


def test_prefetches_that_do_not_fit_together_take_turns() -> None:
    """The first gets all room, and keeps it until it lets go; nobody waits for nothing."""
    world, (first, second) = crowded("abc", "def")
    world.prefetch(first, PrefetchPolicy.WAIT)
    assert world.discard("z", HOST) == 1
    assert world.prefetch(second, PrefetchPolicy.WAIT) == (), "what comes free is for the first"
    lacks_room = [(world.cache.progress(first).lacks_room, world.cache.progress(second).lacks_room)]
    while world.jobs:
        step(world)
        lacks_room.append((world.cache.progress(first).lacks_room, world.cache.progress(second).lacks_room))
    assert (True, True) not in lacks_room[1:], "the first waits for its reads by then"
    assert lacks_room[-1] == (False, True)
    assert (prefetched(world, first), prefetched(world, second)) == (3, None)
    world.stored("v", before_eviction=True)
    assert prefetched(world, first) == 3, "a store takes what the prefetches left"
    world.release(first)
    while world.jobs:
        step(world)
    assert prefetched(world, second) == 3
    world.drain()


def test_a_reset_ends_prefetches_that_wait_for_room() -> None:
    world, (first, second) = crowded("abc", "def")
    world.prefetch(first, PrefetchPolicy.WAIT)
    world.prefetch(second, PrefetchPolicy.WAIT)
    world.reset()
    assert (prefetched(world, first), prefetched(world, second)) == (0, 0)
    world.drain()
    world.evict_all()


def work(monkeypatch: pytest.MonkeyPatch) -> list[Lease]:
    """Grows each time that a prefetch that waits for room looks at its chunks."""
    done: list[Lease] = []
    inner = Prefetcher._path

    def counted(self: Prefetcher, hold: Lease) -> list[int]:
        done.append(hold)
        return inner(self, hold)

    monkeypatch.setattr(Prefetcher, "_path", counted)
    return done


def test_prefetches_that_wait_for_room_cost_nothing_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    world, (first, second) = crowded("abc", "def")
    looks = work(monkeypatch)
    world.prefetch(first, PrefetchPolicy.TIMEOUT, 3.0)
    world.prefetch(second, PrefetchPolicy.TIMEOUT, 4.0)
    for _ in range(2):
        world.call("apply_results", (), world.now)
    assert looks, "what was counted is what they look with"
    looks.clear()
    for _ in range(100):
        world.call("apply_results", (), world.now)
        world.call("apply_results", [], world.now)
        world.call("end_step")
    assert looks == []
    world.tick(3.5)
    assert looks, "the first has given up"
    assert (prefetched(world, first), prefetched(world, second)) == (0, None)
    while world.jobs:
        step(world)
    assert prefetched(world, second) == 3
    looks.clear()
    for _ in range(100):
        world.call("apply_results", (), world.now)
    assert looks == [], "one that has all it wants costs nothing until it lets go"


def test_prefetch_times_out_behind_one_that_waits_longer() -> None:
    world, (first, second) = crowded("abc", "def")
    world.prefetch(first, PrefetchPolicy.TIMEOUT, 9.0)
    world.prefetch(second, PrefetchPolicy.TIMEOUT, 2.0)
    world.tick(1.5)
    assert (prefetched(world, first), prefetched(world, second)) == (None, None)
    world.tick(0.5)
    assert (prefetched(world, first), prefetched(world, second)) == (None, 0)


def reads(cache: TieredCache) -> list[Key]:
    """Chunks that reads into the host tier were ordered of since the last time, once time has gone on."""
    cache.apply_results((), 0.0)
    transfers = [each for each in cache.take_commands() if isinstance(each, Transfer)]
    return [item.key for each in transfers if str(each.route) == "file->host" for item in each.items]


@pytest.mark.parametrize("event", ["discard", "resize"])
def test_a_waiting_prefetch_takes_room_that_no_job_has_made(event: str) -> None:
    world, (hold,) = crowded("abc")
    world.prefetch(hold, PrefetchPolicy.WAIT)
    assert [key for _ in range(3) for key in reads(world.cache)] == []
    if event == "discard":
        assert world.cache.discard([key(path) for path in "wxyz"], HOST)
    else:
        world.cache.resize(HOST, 7)
    assert reads(world.cache)


def test_waiting_prefetch_takes_the_room_a_load_has_read() -> None:
    world, (hold,) = crowded("abcd")
    while not world.flush():
        step(world)
    world.loading("w")
    world.end_step()
    (copy,) = world.on("host->device")
    world.cache.prefetch(hold, world.now, policy=PrefetchPolicy.WAIT)
    assert reads(world.cache) == chunks("abc")
    assert [key for _ in range(3) for key in reads(world.cache)] == []
    world.cache.apply_results([TransferResult(copy.transfer.job, (Status.OK,))], 0.0)
    assert reads(world.cache) == [key("abcd")]


def test_failed_backups_of_waiting_prefetch_are_retried_on_use() -> None:
    world, (hold,) = crowded("abc")
    for path in "wxyz":
        world.discard(path, HOST)
    world.store("wxyz", 0, False)
    world.end(world.on("device->host")[0])
    world.loading("w")  # under way all the time, so that there is something to wait for
    world.end_step()
    world.prefetch(hold, PrefetchPolicy.WAIT)
    (copy,) = world.on("host->file")
    world.end(copy, *[Status.IO_ERROR] * len(copy.transfer.items))
    assert (prefetched(world, hold), world.on("host->file")) == (None, [])
    assert store(world.cache, [key("w")]).job is None
    world.tick(0.0)
    assert sum(len(job.transfer.items) for job in world.on("host->file")) == 3, "as many as it lacks room for"
