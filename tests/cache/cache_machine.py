"""What every random path over the cache may do: movers end as they like, time passes, tiers change, callers err.

What requests ask for stands in the machines of `test_state_machine`, `test_state_machine_groups` and
`test_state_machine_device`; together they call every public method.
"""

from __future__ import annotations

from typing import Any

from cache_kit import COLDER, group_of, path_of, replay
from cache_model_groups import Groups
from cache_movers import Job
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from longshore.boundary import FILE, HOST, Status, TransferResult
from longshore.cache import Lease, PrefetchPolicy, Retention, TieredCache
from longshore.errors import CacheError, JobError

LEAVES = ("aaaaa", "aaaab", "aabaa", "abaaa", "baaaa", "babab")
PATHS = tuple(sorted({leaf[:n] for leaf in LEAVES for n in range(1, 6)}))
FAILURES = tuple(status for status in Status if status is not Status.OK)
PATTERNS = (
    *[(Status.OK,)] * 10,
    *[(failure,) for failure in FAILURES],
    *[(Status.OK, failure) for failure in FAILURES],
    *[(failure, Status.OK) for failure in FAILURES],
)
ANSWERS = (Status.OK, Status.OK, Status.OK, Status.DEADLINE, Status.TIER_OFF)
RESIZE = ("keep", "discard")
RETENTION = ((), (), (), (Retention(0, 2, 80, 3.0),), (Retention(1, None, 5),), (Retention(0, None, 35),))
REQUESTS = (None, "one", "two")
THOROUGH = 40
"""Examples from which on a profile is asked what its paths have covered."""

long_paths = st.sampled_from(LEAVES)
small = st.integers(0, 7)

PUBLIC = frozenset(name for name in dir(TieredCache) if not name.startswith("_"))

WrongCall = tuple[type[CacheError], str, tuple[Any, ...], dict[str, Any]]


class Machine(RuleBasedStateMachine):
    """Everything that the movers below a cache can do, and whoever keeps it."""

    world: Groups

    def begin(self, world: Groups) -> None:
        self.world = world
        self.gone: list[Lease] = []
        self.world.check()

    # holds

    @precondition(lambda self: self.world.holds)
    @rule(pick=small, policy=st.sampled_from((None, *PrefetchPolicy)), timeout=st.sampled_from((None, 0.5, 3.0)))
    def prefetch(self, pick: int, policy: PrefetchPolicy | None, timeout: float | None) -> None:
        holds = list(self.world.holds)
        timed = policy is PrefetchPolicy.TIMEOUT
        self.world.prefetch(holds[pick % len(holds)], policy, timeout if timed else None)

    @precondition(lambda self: self.world.holds)
    @rule(pick=small)
    def release(self, pick: int) -> None:
        holds = list(self.world.holds)
        hold = holds[pick % len(holds)]
        self.world.release(hold)
        self.gone.append(hold)

    # remote tiers

    @precondition(lambda self: self.world.setup.remote)
    @rule(path=long_paths, there=st.integers(0, 5), name=st.sampled_from(("near", "far")))
    def others_store(self, path: str, there: int, name: str) -> None:
        """Another engine has stored the beginning of `path` in a remote tier; what follows has lapsed there."""
        self.world.others_store(path, there, name)

    @precondition(lambda self: self.world.questions)
    @rule(pick=small, there=st.sampled_from((True, True, True, False)), status=st.sampled_from(ANSWERS))
    def answer(self, pick: int, there: bool, status: Status) -> None:
        """One rank of a remote tier answers, in any order, or not in time."""
        open_ones = [(number, rank) for number, each in self.world.questions.items() for rank in sorted(each.waiting)]
        number, rank = open_ones[pick % len(open_ones)]
        self.world.answer(number, rank, there, status)

    @precondition(lambda self: self.open_host_stores())
    @rule(pick=small)
    def release_job(self, pick: int) -> None:
        offers = self.open_host_stores()
        self.world.release_job(offers[pick % len(offers)])

    def open_host_stores(self) -> list[Job]:
        """Offers of which the host has written nothing that the cache has not heard of."""
        return [j for j in self.world.host_stores if j.transfer.job in self.world.jobs and j.moving == j.untold]

    # life

    @rule(
        what=st.sampled_from(("end_step", "end_step", "tick 1", "tick 12", "flush", "abort one", "abort two", "reset"))
    )
    def upkeep(self, what: str) -> None:
        verb, _, word = what.partition(" ")
        if verb == "abort":
            self.gone += [hold for hold, model in self.world.holds.items() if model.request == word]
            self.world.release_request(word)
        elif verb == "tick":
            self.world.tick(float(word))
        else:
            getattr(self.world, verb)()

    @rule(kept=st.integers(1, 5))
    def reset_some(self, kept: int) -> None:
        self.world.reset(tuple(self.world.sizes)[-kept:])

    @rule(tier=st.sampled_from((HOST, HOST, FILE, *COLDER)), slots=st.integers(0, 8), how=st.sampled_from(RESIZE))
    def resize(self, tier: str, slots: int, how: str) -> None:
        if tier in self.world.sizes:
            self.world.resize(tier, slots, how == "discard")

    @rule(tier=st.sampled_from((HOST, HOST, FILE, *COLDER)), most=st.integers(0, 8))
    def evict(self, tier: str, most: int) -> None:
        if tier in self.world.sizes:
            self.world.evict(tier, most)

    @precondition(lambda self: self.world.resident)
    @rule(pick=small, spare=st.integers(0, 1), settle=st.booleans())
    def compact(self, pick: int, spare: int, settle: bool) -> None:
        """A chunk goes, and its tier gives back what it does not need, if nothing lies above."""
        if settle:
            self.world.settle_all()
        some = list(self.world.resident)
        if some:
            of, tier = some[pick % len(some)]
            self.world.discard(path_of(of), tier, group_of(of))
            self.world.resize(tier, self.world.taken(tier) + spare, False)

    # movers

    @precondition(lambda self: self.world.runnable())
    @rule(pick=small, pattern=st.sampled_from(PATTERNS))
    def end_late(self, pick: int, pattern: tuple[Status, ...]) -> None:
        """One rank of one job ends; the cache does not hear of it yet."""
        runnable = self.world.runnable()
        self.world.deliver(*runnable[pick % len(runnable)], pattern)

    @precondition(lambda self: self.world.runnable())
    @rule(pick=small, pattern=st.sampled_from(PATTERNS))
    def end_now(self, pick: int, pattern: tuple[Status, ...]) -> None:
        runnable = self.world.runnable()
        self.world.deliver(*runnable[pick % len(runnable)], pattern)
        self.world.apply(self.world.results[-1:])

    @precondition(lambda self: self.world.setup.ranks == 2 and self.world.runnable())
    @rule(pick=small, one=st.sampled_from(FAILURES), other=st.sampled_from(FAILURES))
    def end_unevenly(self, pick: int, one: Status, other: Status) -> None:
        """Both ranks of a job fail, each in its own way."""
        runnable = self.world.runnable()
        job, _ = runnable[pick % len(runnable)]
        for rank, status in zip(sorted(job.moving), (one, other), strict=False):
            self.world.deliver(job, rank, [status])
        self.world.apply([result for result in self.world.results if result.job == job.transfer.job])

    @precondition(lambda self: self.world.results)
    @rule(first=small, count=st.integers(1, 4), backwards=st.booleans())
    def tell(self, first: int, count: int, backwards: bool) -> None:
        """The cache hears of some of what happened, in one order or the other."""
        results = self.world.results
        first %= len(results)
        told = results[first : first + count]
        self.world.apply(told[::-1] if backwards else told)

    @precondition(lambda self: self.world.jobs)
    @rule()
    def all_end_well(self) -> None:
        self.world.settle_all()

    # misuse

    @rule(kind=st.integers(0, 42), pick=small)
    def misuse(self, kind: int, pick: int) -> None:
        """A call that breaks the contract is a typed error, and changes nothing."""
        for error, method, args, kwargs in self.wrong_calls(pick)[kind : kind + 1]:
            self.world.refused(error, method, *args, **kwargs)

    def wrong_calls(self, pick: int) -> list[WrongCall]:
        """Calls that break the contract."""
        raise NotImplementedError

    def wrong_results(self, number: int) -> list[Any]:
        """Results that nobody waits for; together with a right one, which must not be taken in either."""
        job = self.world.jobs[number]
        statuses = (Status.OK,) * len(job.told)
        ranks = job.transfer.ranks
        waiting = min(job.untold)
        right = TransferResult(number, statuses, rank=waiting)
        wrong = [
            (right, TransferResult(number, statuses, rank=ranks)),
            (right, TransferResult(number, statuses, rank=-1)),
            (right, right),
            (right, TransferResult(10**9, statuses)),
            (TransferResult(number, (*statuses, Status.OK), rank=waiting),),
            (TransferResult(number, statuses[1:], rank=waiting),),
        ]
        wrong += [(TransferResult(number, statuses, rank=rank),) for rank in set(range(ranks)) - job.untold]
        return [(JobError, "apply_results", (results, self.world.now), {}) for results in wrong]

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None or not world.sound:
            return
        world.drain()
        world.evict_all()
        assert replay(world.setup, world.calls) == world.answers, "the same calls gave another log"


def run(machine: type[Machine], times: float, steps: int = 70) -> bool:
    """Try `times` as many paths as the profile says; whether these are so many that everything must have happened."""
    profile = settings()
    examples = max(1, round(times * profile.max_examples))
    run_state_machine_as_test(machine, settings=settings(profile, max_examples=examples, stateful_step_count=steps))
    return profile.max_examples >= THOROUGH
