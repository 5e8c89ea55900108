"""Random paths over `TieredCache`, against the model in `cache_model`, with movers that fail, dawdle and reorder."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cache_life import Life
from cache_movers import Job
from cache_setup import COLDER, Setup, chunks, key, parent, path_of, replay
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from longshore.boundary import DEVICE, FILE, HOST, Slot, Status, TransferResult
from longshore.cache import EDGES, Hold, PrefetchPolicy, Retention, State, TieredCache
from longshore.cache import loading as loading_module
from longshore.errors import CacheError, HoldError, JobError

LEAVES = ("aaaaa", "aaaab", "aabaa", "abaaa", "baaaa", "babab")
PATHS = tuple(sorted({leaf[:n] for leaf in LEAVES for n in range(1, 6)}))
FAILURES = tuple(status for status in Status if status is not Status.OK)
PATTERNS = (
    *[(Status.OK,)] * 10,
    *[(failure,) for failure in FAILURES],
    *[(Status.OK, failure) for failure in FAILURES],
    *[(failure, Status.OK) for failure in FAILURES],
)
RETENTION = ((), (), (), (Retention(0, 2, 80, 3.0),), (Retention(1, None, 5),), (Retention(0, None, 35),))
REQUESTS = (None, "one", "two")

paths = st.sampled_from(PATHS)
long_paths = st.sampled_from(LEAVES)
small = st.integers(0, 7)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    file = draw(st.sampled_from((None, None, None, 0, 1, 2, 3, 5, 8, 12)))
    found = draw(st.lists(st.sampled_from(PATHS), unique=True, max_size=file)) if file else []
    more = draw(st.sampled_from(((), (), (0,), (2,), (5,), (3, 4)))) if file is not None else ()
    return Setup(
        more=more,
        into=(("third", draw(st.sampled_from(("write_through", "write_back", "write_through_selective"))), 2),)
        if more
        else (),
        host=draw(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8))),
        file=file,
        ranks=draw(st.integers(1, 2)),
        per_chunk=draw(st.integers(1, 2)),
        offload=draw(st.sampled_from(("write_through", "write_through", "write_back", "write_through_selective"))),
        backup=draw(st.sampled_from(("write_through", "write_back"))),
        threshold=draw(st.integers(2, 3)),
        prompt_only=draw(st.booleans()),
        priority_floor=draw(st.sampled_from((0, 0, 0, 30, 60))),
        events=draw(st.sampled_from((0, 10_000))),
        max_writes=draw(st.sampled_from((1024, 1, 3))),
        found=tuple((slot, key(path), parent(key(path))) for slot, path in enumerate(found)),
        generation=draw(st.sampled_from((0, 3))),
        policy=draw(st.sampled_from(("lru", "arc"))),
    )


class Tiers(RuleBasedStateMachine):
    """Everything that an engine, its movers, and a careless caller can do."""

    world: Life

    @initialize(setup=setups())
    def build(self, setup: Setup) -> None:
        self.world = Life(setup)
        self.gone: list[Hold] = []
        self.world.check()

    # reading

    @rule(path=long_paths, start=st.sampled_from((0, 0, 0, 1, 2)), request=st.sampled_from(REQUESTS))
    def match(self, path: str, start: int, request: str | None) -> None:
        self.world.match(path, start, request)

    @rule(path=paths)
    def peek(self, path: str) -> None:
        self.world.peek(key(path))

    @precondition(lambda self: not self.world.asleep and any(not m.onboarded for m in self.world.holds.values()))
    @rule(
        pick=small,
        leave=st.sampled_from((0, 0, 1, 2)),
        skip=st.integers(0, 1),
        short=st.integers(0, 1),
        timeout=st.sampled_from((None, None, 0.5, 3.0)),
    )
    def onboard(self, pick: int, leave: int, skip: int, short: int, timeout: float | None) -> None:
        """The held chunks, or some of them; with two blocks a chunk, also parts of the first and last."""
        holds = [hold for hold, model in self.world.holds.items() if not model.onboarded]
        hold = holds[pick % len(holds)]
        count, spare = max(1, len(self.world.holds[hold].keys) - leave), self.world.setup.per_chunk - 1
        self.world.onboard(hold, count, skip * spare, short * spare, timeout)

    @precondition(lambda self: not self.world.asleep)
    @rule(path=long_paths, request=st.sampled_from(REQUESTS))
    def match_and_onboard(self, path: str, request: str | None) -> None:
        hold = self.world.match(path, 0, request)
        if hold is not None:
            self.world.onboard(hold, len(self.world.holds[hold].keys), 0, 0)

    @precondition(lambda self: self.world.resident and not self.world.asleep)
    @rule(pick=st.integers(0, 15), skip=st.integers(0, 1))
    def come_back(self, pick: int, skip: int) -> None:
        """A prompt that some tier knows, or is about to."""
        known = list(self.world.resident)
        tail, _ = known[pick % len(known)]
        hold = self.world.match(path_of(tail), 0, None)
        if hold is not None:
            skip = min(skip, self.world.setup.per_chunk - 1)
            self.world.onboard(hold, len(self.world.holds[hold].keys), skip, 0)

    @precondition(lambda self: self.world.holds)
    @rule(pick=small, policy=st.sampled_from((None, *PrefetchPolicy)), timeout=st.sampled_from((None, 0.5, 3.0)))
    def prefetch(self, pick: int, policy: PrefetchPolicy | None, timeout: float | None) -> None:
        holds = list(self.world.holds)
        timed = policy is PrefetchPolicy.TIMEOUT
        self.world.prefetch(holds[pick % len(holds)], policy, timeout if timed else None)

    @precondition(lambda self: any(m.onboarded for m in self.world.holds.values()))
    @rule(pick=small)
    def give_up(self, pick: int) -> None:
        holds = [hold for hold, model in self.world.holds.items() if model.onboarded]
        self.world.give_up(holds[pick % len(holds)])

    @precondition(lambda self: self.world.holds)
    @rule(pick=small)
    def release(self, pick: int) -> None:
        holds = list(self.world.holds)
        hold = holds[pick % len(holds)]
        self.world.release(hold)
        self.gone.append(hold)

    # writing

    @precondition(lambda self: not self.world.asleep)
    @rule(
        path=paths,
        first=st.sampled_from((0, 0, 1, 2)),
        evicting=st.booleans(),
        retention=st.sampled_from(RETENTION),
        prompt=st.sampled_from((None, None, 1, 3)),
    )
    def commit(
        self, path: str, first: int, evicting: bool, retention: tuple[Retention, ...], prompt: int | None
    ) -> None:
        self.world.commit(path, min(first, len(path) - 1), evicting, retention, prompt)

    @precondition(lambda self: not self.world.asleep)
    @rule(path=long_paths)
    def commit_and_settle(self, path: str) -> None:
        self.world.commit(path, 0, True)
        self.world.settle_all()

    @precondition(lambda self: not self.world.asleep)
    @rule(path=paths, first=st.sampled_from((0, 0, 1)))
    def offer(self, path: str, first: int) -> None:
        self.world.offer(path, first)

    @precondition(lambda self: self.open_offers())
    @rule(pick=small)
    def withdraw(self, pick: int) -> None:
        offers = self.open_offers()
        self.world.withdraw(offers[pick % len(offers)])

    def open_offers(self) -> list[Job]:
        """Offers of which the host has written nothing that the cache has not heard of."""
        return [j for j in self.world.offers if j.transfer.job in self.world.jobs and j.moving == j.untold]

    @rule(path=paths, tier=st.sampled_from((HOST, FILE, *COLDER)))
    def discard(self, path: str, tier: str) -> None:
        if tier in self.world.sizes:
            self.world.discard(path, tier)

    # life

    @rule(
        what=st.sampled_from(("end_step", "end_step", "tick 1", "tick 12", "flush", "abort one", "abort two", "reset"))
    )
    def upkeep(self, what: str) -> None:
        verb, _, word = what.partition(" ")
        if verb == "abort":
            self.gone += [hold for hold, model in self.world.holds.items() if model.request == word]
            self.world.abort(word)
        elif verb == "tick":
            self.world.tick(float(word))
        else:
            getattr(self.world, verb)()

    @rule(how=st.sampled_from(("sleep", "wake", "wake")))
    def sleep_or_wake(self, how: str) -> None:
        getattr(self.world, how)()

    @rule(tier=st.sampled_from((HOST, HOST, FILE, *COLDER)), slots=st.integers(0, 8), discard=st.booleans())
    def resize(self, tier: str, slots: int, discard: bool) -> None:
        if tier in self.world.sizes:
            self.world.resize(tier, slots, discard)

    @precondition(lambda self: not self.world.asleep)
    @rule(count=st.integers(1, 3))
    def copy_inside(self, count: int) -> None:
        self.world.copy_inside(count)

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

    @rule(kind=st.integers(0, 38), pick=small)
    def misuse(self, kind: int, pick: int) -> None:
        """A call that breaks the contract is a typed error, and changes nothing."""
        for error, method, args, kwargs in self.wrong_calls(pick)[kind : kind + 1]:
            self.world.refused(error, method, *args, **kwargs)

    def wrong_calls(self, pick: int) -> list[tuple[type[CacheError], str, tuple[Any, ...], dict[str, Any]]]:
        world, keys = self.world, chunks("aab")
        size, per_chunk = world.setup.device_blocks, world.setup.per_chunk
        gone = self.gone[pick % len(self.gone)] if self.gone else Hold(10**9)
        asleep = [
            (CacheError, "copy_inside", ([Slot(DEVICE, 0, 0)], (1,)), {}),
            (CacheError, "commit", (keys, tuple(range(3 * per_chunk))), {}),
            (CacheError, "offer", (keys,), {}),
        ]
        calls: list[tuple[type[CacheError], str, tuple[Any, ...], dict[str, Any]]] = [
            *(asleep if world.asleep else ()),
            (CacheError, "copy_inside", ([Slot(HOST, 0, 0)], (1,)), {}),
            (CacheError, "copy_inside", ((), ()), {}),
            (CacheError, "copy_inside", ([Slot(DEVICE, 0, 0)], (size,)), {}),
            (CacheError, "resize", (HOST, -1), {}),
            (CacheError, "resize", ("attic", 1), {"discard": True}),
            (CacheError, "events", (0,), {}),
            (HoldError, "slots", (gone,), {}),
            (HoldError, "runs", (gone,), {}),
            (HoldError, "prefetched", (gone,), {}),
            (JobError, "withdraw", (10**9,), {}),
            (HoldError, "release", (gone,), {}),
            (HoldError, "outcome", (gone,), {}),
            (HoldError, "give_up", (gone,), {}),
            (HoldError, "onboard", (gone, (0,)), {}),
            (HoldError, "release", (None,), {}),
            (HoldError, "prefetch", (gone,), {}),
            (CacheError, "match", (keys, world.now), {"start": 4}),
            (CacheError, "match", (keys, world.now), {"start": -1}),
            (CacheError, "offer", ([keys[0], keys[0]],), {}),
            (CacheError, "match", ([b"", keys[0]], world.now), {}),
            (CacheError, "match", (["a", 7], world.now), {}),
            (CacheError, "commit", (keys, tuple(range(3 * per_chunk - 1))), {}),
            (CacheError, "commit", (keys, (-1, *range(3 * per_chunk - 1))), {}),
            (CacheError, "commit", (keys, (*range(3 * per_chunk - 1), size)), {}),
            (CacheError, "commit", (keys, (*range(1, 3 * per_chunk), 1)), {}),
            (CacheError, "offer", (keys,), {"first": 5}),
            (CacheError, "discard", (keys, "attic"), {}),
            (CacheError, "adopt", ("attic", ()), {}),
            (CacheError, "adopt", (HOST, ((0, key("y"), None), (0, key("x"), None))), {}),
            (CacheError, "adopt", (HOST, ((world.sizes[HOST], key("y"), None),)), {}),
            (JobError, "apply", ((TransferResult(10**9, (Status.OK,)),), world.now), {}),
        ]
        for each, _ in list(world.resident)[pick : pick + 1]:  # a path that is no chain of keys
            calls.append((CacheError, "offer", ([key("y"), each],), {}))
            calls.append((CacheError, "match", ([key("y"), each], world.now), {"start": 1}))
            calls.append((CacheError, "match", ([each, each], world.now), {}))
        for hold, model in list(world.holds.items())[:1]:
            calls += self.wrong_onboards(hold, len(model.keys), model.onboarded)
        if world.jobs:
            calls += self.wrong_results(list(world.jobs)[pick % len(world.jobs)])
        return calls[pick % 8 :] + calls[: pick % 8]

    def wrong_onboards(self, hold: Hold, held: int, onboarded: bool) -> list[Any]:
        per_chunk = self.world.setup.per_chunk
        if onboarded:
            return [(HoldError, "onboard", (hold, (0,)), {})]
        return [
            (HoldError, "outcome", (hold,), {}),
            (HoldError, "give_up", (hold,), {}),
            (CacheError, "onboard", (hold, ()), {}),
            (CacheError, "onboard", (hold, (-1,)), {}),
            (CacheError, "onboard", (hold, (self.world.setup.device_blocks,)), {}),
            (CacheError, "onboard", (hold, (0,)), {"skip": per_chunk}),
            (CacheError, "onboard", (hold, tuple(range(held * per_chunk + 1))), {}),
        ]

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
        return [(JobError, "apply", (results, self.world.now), {}) for results in wrong]

    def teardown(self) -> None:
        world = getattr(self, "world", None)
        if world is None or not world.sound:
            return
        world.wake()
        world.drain()
        world.evict_all()
        assert replay(world.setup, world.calls) == world.answers, "the same calls gave another log"


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here have five chunks: let them be loaded in several parts, too."""
    monkeypatch.setattr(loading_module, "LOAD_BATCH", 2)


ELSEWHERE = {
    "match_groups": ("test_group_match.py", ".match_groups("),
    "onboard_groups": ("test_group_loads.py", ".onboard_groups("),
    "fetch": ("test_foreign.py", ".fetch("),
    "lend": ("test_device_pool.py", "DevicePool("),
    "keep": ("test_device_pool.py", "DevicePool("),
}
"""Methods that this machine does not call: its cache has one KV cache group, no foreign tier and no device pool."""

PUBLIC = {name for name in dir(TieredCache) if not name.startswith("_")}


@pytest.fixture
def methods_called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The public methods and properties of `TieredCache` that this test has used."""
    called: set[str] = set()

    def spied(name: str, method: Any) -> Any:
        def spy(self: TieredCache, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(self, *args, **kwargs)

        return spy

    for name in PUBLIC:
        member = inspect.getattr_static(TieredCache, name)
        spy = property(spied(name, member.fget)) if isinstance(member, property) else spied(name, member)
        monkeypatch.setattr(TieredCache, name, spy)
    return called


def test_what_the_machine_does_not_call_is_called_elsewhere() -> None:
    for module, call in ELSEWHERE.values():
        assert call in (Path(__file__).parent / module).read_text()


def test_random_paths_keep_every_promise(edges_taken: Counter[tuple[State, State]], methods_called: set[str]) -> None:
    profile = settings()
    run_state_machine_as_test(
        Tiers, settings=settings(profile, max_examples=4 * profile.max_examples, stateful_step_count=70)
    )
    assert set(edges_taken) == set(EDGES), "a legal edge was never taken, or an illegal one was"
    assert methods_called == PUBLIC - set(ELSEWHERE), "a public method has no rule, or has one that is not listed"


def upheave(world: Life, dice: random.Random) -> None:
    """Time passes, the device sleeps, and a tier changes its size."""
    world.tick(dice.choice((1.0, 4.0)))
    world.copy_inside(1)
    world.sleep()
    world.wake()
    world.resize(dice.choice((HOST, FILE, "third")), dice.randrange(3, 7), dice.random() < 0.5)


def busy_world(seed: int) -> Life:
    """A fixed random life of some hundred calls."""
    dice = random.Random(seed)
    backup = dice.choice(("write_through", "write_back"))
    world = Life(Setup(host=4, file=6, more=(5,), ranks=2, per_chunk=2, backup=backup, events=10_000))
    for _ in range(60):
        path = dice.choice(PATHS)
        match dice.randrange(9):
            case 0 | 1:
                world.commit(path, 0, dice.random() < 0.5)
            case 2:
                hold = world.match(path, 0, dice.choice(REQUESTS))
                if hold is not None:
                    world.onboard(hold, len(world.holds[hold].keys), 0, 0)
            case 3:
                world.settle_all()
            case 4:
                world.peek(key(path))
            case 5:
                for job, rank in world.runnable()[:1]:
                    world.deliver(job, rank, dice.choice(PATTERNS))
                    world.apply(world.results[-1:])
            case 6:
                for hold in list(world.holds)[:1]:
                    world.prefetch(hold, PrefetchPolicy.TIMEOUT, 1.5)
            case 7 | 8:
                upheave(world, dice)
            case _:
                world.end_step()
                world.abort("one")
    return world


def digest(answers: list[Any]) -> str:
    return hashlib.sha256("\n".join(map(repr, answers)).encode()).hexdigest()


@pytest.mark.parametrize("hash_seed", ["1", "20240229"])
def test_the_same_calls_give_the_same_log_in_another_process(hash_seed: str) -> None:
    lives = [busy_world(seed) for seed in range(5)]
    script = (
        "import pickle, sys, cache_setup, test_state_machine as t\n"
        "t.loading_module.LOAD_BATCH = 2\n"
        "for setup, calls in pickle.load(sys.stdin.buffer):\n"
        "    print(t.digest(cache_setup.replay(setup, calls)))\n"
    )
    replayed = subprocess.run(
        [sys.executable, "-c", script],
        input=pickle.dumps([(world.setup, world.calls) for world in lives]),
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        check=True,
    )
    assert replayed.stdout.decode().split() == [digest(world.answers) for world in lives]
