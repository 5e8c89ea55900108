"""From a restart to a reset: what is found, what is forgotten, and what a chunk goes through in between."""

import math
import pickle

import pytest
from cache_kit import LOAD, Setup, chunks, key, lookup, parent, path_of, store
from cache_model import World

from longshore.boundary import FILE, HOST, Cancel, Reset, Status, Transfer
from longshore.cache import GroupKeys, MissReason, Outcome, TieredCache, TierSpec
from longshore.errors import CacheError, JobError, LeaseError
from longshore.tiers.base import StoredChunk
from residents import residents_of

BOTH = Setup(host=4, file=4, backup="write_through")


def found(*paths: str) -> tuple[tuple[int, bytes, bytes | None], ...]:
    """What a file tier holds at start: these chunks, oldest first, in slots from the top."""
    return tuple((len(paths) - 1 - i, key(path), parent(key(path))) for i, path in enumerate(paths))


def load(world: World, path: str) -> Outcome | None:
    hold = world.lease(path)
    world.load(hold, len(world.holds[hold].keys), 0, 0)
    world.settle_all()
    outcome: Outcome | None = world.cache.progress(hold).outcome
    world.release(hold)
    return outcome


def test_chunk_is_backed_up_loaded_and_finally_evicted() -> None:
    world = World(Setup(host=1, file=1))
    assert world.where("a") == {}
    world.store("a", 0, True)
    assert world.where("a") == {HOST: "filling"}
    world.settle_all()
    assert world.where("a") == {HOST: "ready"}
    world.flush()
    assert world.where("a") == {HOST: "ready", FILE: "filling"}
    world.settle_all()
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    world.store("x", 0, True)
    assert (world.where("a"), world.where("x")) == ({FILE: "ready"}, {HOST: "filling"})
    world.settle_all()
    hold = world.loading("a")
    assert (world.where("a"), world.where("x")) == ({HOST: "filling", FILE: "ready"}, {})
    world.settle_all()
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    assert world.cache.progress(hold).outcome == (1, (FILE,))
    world.release(hold)
    world.store("y", 0, True)
    assert world.where("a") == {FILE: "ready"}
    world.settle_all()
    world.flush()
    assert world.where("a") == {}
    world.drain()
    world.evict_all()


def test_what_a_restart_finds_can_be_matched() -> None:
    world = World(BOTH._replace(found=found("a", "ab", "abc"), generation=7))
    assert world.cache.generation == 7
    assert load(world, "abc") == (3, (FILE,) * 3)


def test_chunk_written_last_before_restart_goes_last_after() -> None:
    world = World(Setup(host=2, file=4, backup="write_through", found=found("b", "a", "ab", "c")))
    for newcomer, left in (("x", ["a", "ab", "c", "x"]), ("y", ["a", "c", "x", "y"]), ("z", ["c", "x", "y", "z"])):
        world.stored(newcomer)
        assert sorted(path_of(each) for each, tier in world.resident if tier == FILE) == left


@pytest.mark.parametrize(
    "bad",
    [
        ((0, key("a"), None), (0, key("b"), None)),
        ((0, key("a"), None), (1, key("a"), None)),
        ((0, key("a"), None), (4, key("b"), None)),
        ((0, key("a"), None), (-1, key("b"), None)),
        ((0, key("c"), None), (1, key("a"), None)),
        ((0, key("c"), None), (1, key("x"), None)),
    ],
    ids=["one slot twice", "one key twice", "slot too high", "slot too low", "taken slot", "known key"],
)
def test_what_cannot_have_been_found_is_refused_as_a_whole(bad: tuple[tuple[int, bytes, bytes | None], ...]) -> None:
    world = World(BOTH._replace(found=((1, key("x"), None),)))
    world.refused(CacheError, "adopt", FILE, [StoredChunk(*each) for each in bad])


def test_restart_into_the_warmest_tier_knows_missing_backups() -> None:
    world = World(BOTH)
    assert world.cache.adopt(HOST, [(3, key("a"), None, 0)]) == 1
    world.cache.check_integrity()
    world.cache.apply_results((), 0.0)
    (backup,) = world.cache.take_commands()
    assert isinstance(backup, Transfer)
    assert [item.source.index for item in backup.items if item.source] == [3]


def test_a_reset_forgets_everything_and_waits_for_slots_in_use() -> None:
    world = World(BOTH).stored("ab")
    world.discard("ab", HOST)
    world.loading("ab")
    world.store("x", 0, False)
    in_flight = list(world.jobs)
    world.generation += 1
    assert world.cache.reset() == 1
    assert world.cache.take_commands() == [*map(Cancel, in_flight), Reset(1)]
    assert residents_of(world.cache) == []
    assert [(s.used, s.ready) for s in world.cache.stats()] == [(3, 0), (2, 0)]


def test_an_onboarding_from_before_a_reset_has_brought_nothing() -> None:
    world = World(BOTH).stored("ab")
    over, amid, before = (world.lookup("ab", 0, None) for _ in range(3))
    assert amid is not None
    world.load(over, 2, 0, 0)
    world.settle_all()
    assert world.cache.progress(over).outcome == (2, (HOST, HOST))
    world.load(amid, 2, 0, 0)
    world.reset()
    assert world.cache.progress(over).outcome == world.cache.progress(amid).outcome == (0, ())
    world.settle_all()
    assert world.cache.progress(amid).outcome == (0, ())
    assert world.cache.counters.misses[MissReason.CANCELLED] == 2
    world.tick(LOAD)
    world.load(before, 2, 0, 0)
    assert world.cache.progress(before).outcome == (0, ())
    world.drain()


def test_commands_come_once_and_in_order() -> None:
    cache = BOTH.build()
    first = store(cache, [key("a")], (0,)).job
    second = store(cache, [key("b")], (1,)).job
    cache.reset()
    commands = cache.take_commands()
    assert [c.job for c in commands if isinstance(c, Transfer)] == [first, second]
    assert commands[2:] == [Cancel(first or 0), Cancel(second or 0), Reset(1)]
    assert cache.take_commands() == []


def test_commands_and_results_survive_a_pipe() -> None:
    world = World(BOTH._replace(per_chunk=2))
    world.store("ab", 0, False)
    for job in world.jobs.values():
        assert pickle.loads(pickle.dumps(job.transfer)) == job.transfer  # noqa: S301


@pytest.mark.parametrize("now", [math.nan, math.inf, -math.inf])
def test_a_time_that_is_none_is_refused(now: float) -> None:
    world = World(BOTH._replace(groups=1))
    world.refused(CacheError, "apply_results", [], now)
    for path in (GroupKeys(chunks("a")), GroupKeys(chunks("a"), device=())):
        for verb in ("lookup", "prefetch"):
            world.refused(CacheError, verb, {0: path}, now)


def test_time_does_not_run_backwards() -> None:
    cache = BOTH.build()
    cache.apply_results((), 5.0)
    lookup(cache, chunks("a"), 3.0)
    store(cache, chunks("a"), (0,))
    (offload,) = cache.take_commands()
    assert isinstance(offload, Transfer)
    assert offload.deadline == 65.0


def test_holds_are_released_once() -> None:
    world = World(BOTH).stored("a")
    first, second = world.lookup("a", 0, None), world.lookup("a", 0, "mine")
    assert second is not None
    world.release(first)
    world.refused(LeaseError, "release", first)
    world.refused(LeaseError, "load", first, {0: (0,)})
    assert world.discard("a", HOST) == 1  # the file has it, too
    assert world.discard("a", FILE) == 0  # the other hold keeps it
    world.release_request("mine")
    world.refused(LeaseError, "release", second)
    assert world.discard("a", FILE) == 1


def test_a_hold_is_onboarded_once() -> None:
    world = World(BOTH).stored("a")
    hold = world.loading("a")
    world.refused(LeaseError, "load", hold, {0: (7,)})


def test_a_result_is_taken_once() -> None:
    world = World(BOTH._replace(ranks=2))
    world.store("a", 0, False)
    (job,) = world.jobs.values()
    world.deliver(job, 0, [Status.OK])
    (result,) = world.results
    world.apply([result])
    world.refused(JobError, "apply_results", (result,), 0.0)
    world.settle_all()
    world.refused(JobError, "apply_results", (result,), 0.0)


def test_first_generation_is_the_persistent_tiers_or_zero() -> None:
    assert Setup(host=1).build().generation == 0
    assert TieredCache([TierSpec(HOST, 1, 1)]).generation == 0
    assert TieredCache([TierSpec(HOST, 1, 1)], generation=5).reset() == 6
