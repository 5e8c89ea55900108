"""Load or recompute: what the gate learns, and what it costs against always loading and never loading."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from longshore.boundary import HOST, Route, Status, TransferResult
from longshore.cache.recompute_gate import EXPLORE, RecomputeGate
from longshore.cache.types import Run
from longshore.errors import CacheError

CHUNK_TOKENS = 512
TOKEN_BYTES = 131_072  # a model of eight billion parameters, grouped attention
CHUNK_BYTES = CHUNK_TOKENS * TOKEN_BYTES
ALPHA, BETA = 6e-5, 4e-10
STEP = 0.004


def prefill(context: int, tokens: int) -> float:
    return ALPHA * tokens + BETA * tokens * (2 * context + tokens) / 2


def gate(*tiers: str, explore: float = EXPLORE) -> RecomputeGate:
    return RecomputeGate(tiers or ("host",), CHUNK_TOKENS, CHUNK_BYTES, explore=explore)


def taught(bandwidth: float, *, fixed: float = 0.001, explore: float = 0.0) -> RecomputeGate:
    """A gate that has seen steps, and loads from host memory, of several sizes."""
    known = gate(explore=explore)
    for chunks in (1, 4, 16, 64):
        tokens = chunks * CHUNK_TOKENS
        known.observe_prefill(0, tokens, STEP + prefill(0, tokens))
        known.observe_prefill(4096, tokens, STEP + prefill(4096, tokens))
        known.observe_load("host", chunks * CHUNK_BYTES, fixed + chunks * CHUNK_BYTES / bandwidth, 0.0, 0.0)
    return known


def test_what_is_observed_is_what_is_expected() -> None:
    known = taught(5e9)
    for context, chunks in ((0, 8), (2048, 32), (100_000, 3)):
        tokens = chunks * CHUNK_TOKENS
        assert known.prefill_seconds(context, tokens) == pytest.approx(prefill(context, tokens), rel=0.01)
    assert known.load_seconds([Run("host", 32)], 0.0) == pytest.approx(0.001 + 32 * CHUNK_BYTES / 5e9, rel=0.01)


def test_nothing_known_loads_and_says_so() -> None:
    new = gate()
    assert new.chunks_to_load(0, [Run("host", 7)], 0.0) == 7
    assert new.chunks_to_load(0, [], 0.0) == 0
    assert new.prefill_seconds(0, 10) is None
    assert new.load_seconds([Run("host", 7)], 0.0) is None
    assert new.load_seconds([], 0.0) == 0.0


@pytest.mark.parametrize(("context", "tokens"), [(0, 16), (0, 100_000), (100_000, 1000), (1_000_000, 16)])
def test_fixed_prefill_speed_holds_for_every_prompt_length(context: int, tokens: int) -> None:
    told = RecomputeGate(("host",), CHUNK_TOKENS, CHUNK_BYTES, prefill_speed=16_000.0)
    assert told.prefill_seconds(context, tokens) == pytest.approx(tokens / 16_000)


def test_spare_time_loads_run_behind_host_memory_too() -> None:
    known = RecomputeGate(("host", "file"), CHUNK_TOKENS, CHUNK_BYTES, explore=0.0, prefill_speed=1e6)
    for chunks in (1, 4, 16, 64):
        known.observe_load("host", chunks * CHUNK_BYTES, chunks * 1e-5, 0.0, 0.0)
        known.observe_load("file", chunks * CHUNK_BYTES, chunks * 1e-2, 0.0, 0.0)
    runs = [Run("host", 10), Run("file", 1000)]
    assert known.chunks_to_load(0, runs, 0.0) == 10
    assert known.chunks_to_load(0, runs, 0.0, spare=1.0) == pytest.approx(110, abs=5)


@pytest.mark.parametrize("bandwidth", [0.5e9, 1.5e9, 2.5e9, 10e9])
def test_the_choice_is_that_of_the_formula(bandwidth: float) -> None:
    known = taught(bandwidth)
    for context in (0, 8192, 65_536):
        for chunks in (1, 10, 100):
            tokens = chunks * CHUNK_TOKENS
            load, compute = 0.001 + tokens * TOKEN_BYTES / bandwidth, prefill(context, tokens)
            if abs(load - compute) > 0.03 * compute:
                count = known.chunks_to_load(context, [Run("host", chunks)], 0.0, queued={"host": 0.0})
                assert (count == chunks) is (load < compute), (context, chunks)


def test_a_queue_counts_and_fades_where_nothing_is_seen() -> None:
    known = taught(5e9)
    runs = [Run("host", 8)]
    assert known.chunks_to_load(0, runs, 0.0) == 8
    for i in range(200):
        known.observe_load("host", 8 * CHUNK_BYTES, 0.001 + 8 * CHUNK_BYTES / 5e9, 2.0, now=10.0 * i)
    assert known.load_seconds(runs, 2000.0) == pytest.approx(2.1, rel=0.05)
    assert known.load_seconds(runs, 1990.0 + 600.0) == pytest.approx(1.1, rel=0.05)
    assert known.chunks_to_load(0, runs, 2000.0) == 0
    assert known.chunks_to_load(0, runs, 9000.0, queued={"host": 3.0}) == 0
    assert known.chunks_to_load(0, runs, 9000.0) == 8


def test_what_the_caller_says_of_the_queue_is_believed() -> None:
    known = taught(5e9)
    runs = [Run("host", 8)]
    assert known.chunks_to_load(0, runs, 0.0, queued={"host": 3.0}) == 0
    assert known.chunks_to_load(0, runs, 0.0) == 8
    assert known.chunks_to_load(0, runs, 0.0, queued={"host": 0.0}) == 8


def test_load_ordered_here_and_unfinished_is_waited_for() -> None:
    known = taught(5e9)
    runs = [Run("host", 40)]
    alone = known.load_seconds(runs, 0.0)
    assert alone is not None
    assert known.chunks_to_load(0, runs, 0.0) == 40
    assert known.load_seconds(runs, 0.0) == pytest.approx(2 * alone)
    assert known.load_seconds(runs, alone / 2) == pytest.approx(1.5 * alone)
    while known.chunks_to_load(0, runs, 0.0):
        pass
    waiting = known.load_seconds([Run("host", 1)], 0.0)
    assert waiting is not None
    assert waiting > 0.8 * prefill(0, 40 * CHUNK_TOKENS)  # so long a queue that computing is as fast
    assert known.load_seconds(runs, 1000.0) == pytest.approx(alone)


@pytest.mark.parametrize("status", [Status.UNAVAILABLE, Status.DEADLINE, Status.CANCELLED])
def test_loads_that_failed_are_not_waited_for(status: Status) -> None:
    known, runs, result = two_tiers(5e9), [Run("file", 32)], TransferResult(1, (status,) * 16)
    before = known.load_seconds(runs, 10.0)
    for _ in range(20):
        assert known.chunks_to_load(0, runs, 10.0) == 32
        for _ in range(2):
            known.observe_transfer(Route("file", HOST), result, 10.0)
    assert known.load_seconds(runs, 10.0) == pytest.approx(before)


def test_part_that_arrived_of_a_load_is_waited_for() -> None:
    known, runs = two_tiers(5e9), [Run("file", 32)]
    free = known.load_seconds(runs, 10.0)
    known.chunks_to_load(0, runs, 10.0)
    ordered = known.load_seconds(runs, 10.0)
    half = TransferResult(1, (Status.OK,) * 16 + (Status.NOT_FOUND,) * 16)
    known.observe_transfer(Route("file", HOST), half, 10.0)
    assert free is not None
    assert ordered is not None
    assert known.load_seconds(runs, 10.0) == pytest.approx((free + ordered) / 2, rel=0.01)


def test_wait_for_our_own_load_is_no_wait_for_others() -> None:
    known = taught(5e9)
    moving = 0.001 + 40 * CHUNK_BYTES / 5e9
    for i in range(50):
        begin = 100.0 * i
        known.observe_load("host", 40 * CHUNK_BYTES, moving, 0.0, begin + moving)
        known.observe_load("host", 40 * CHUNK_BYTES, moving, moving, begin + 2 * moving)  # ordered at the same time
    assert known.load_seconds([Run("host", 40)], 99_999.0) == pytest.approx(moving, rel=0.01)


def test_queue_behind_our_loads_is_expected_there_only() -> None:
    known = taught(5e9)
    moving = 0.001 + 40 * CHUNK_BYTES / 5e9
    for i in range(200):
        begin = 100.0 * i
        known.observe_load("host", 40 * CHUNK_BYTES, moving, 0.0, begin + moving)
        end = begin + 1.2 * moving + 0.5 + moving  # ordered soon after the first had ended, and behind half a second
        known.observe_load("host", 40 * CHUNK_BYTES, moving, 0.5, end)
    assert known.load_seconds([Run("host", 40)], end + 0.5 * moving) == pytest.approx(moving + 0.5, rel=0.05)
    assert known.load_seconds([Run("host", 40)], end + 50) == pytest.approx(moving, rel=0.05)


def test_a_long_context_makes_loading_worth_more() -> None:
    known = taught(2e9)
    runs = [Run("host", 4)]
    assert known.chunks_to_load(0, runs, 0.0) == 0
    assert known.chunks_to_load(100_000, runs, 0.0) == 4


def two_tiers(file_bandwidth: float) -> RecomputeGate:
    known = gate("host", "file", explore=0.0)
    for chunks in (1, 4, 16, 64):
        known.observe_prefill(0, chunks * CHUNK_TOKENS, STEP + prefill(0, chunks * CHUNK_TOKENS))
        known.observe_prefill(9000, chunks * CHUNK_TOKENS, STEP + prefill(9000, chunks * CHUNK_TOKENS))
        known.observe_load("host", chunks * CHUNK_BYTES, 0.0005 + chunks * CHUNK_BYTES / 20e9, 0.0, 0.0)
        known.observe_load("file", chunks * CHUNK_BYTES, 0.0005 + chunks * CHUNK_BYTES / file_bandwidth, 0.0, 0.0)
    return known


def test_host_chunks_are_loaded_and_slow_disk_chunks_computed() -> None:
    assert two_tiers(0.2e9).chunks_to_load(0, [Run("host", 5), Run("file", 5)], 0.0) == 5
    assert two_tiers(6e9).chunks_to_load(0, [Run("host", 5), Run("file", 5)], 0.0) == 10


def test_a_slow_disk_is_used_for_what_arrives_meanwhile() -> None:
    known = two_tiers(0.5e9)
    runs = [Run("host", 300), Run("file", 100)]
    count = known.chunks_to_load(0, runs, 0.0)
    assert 300 < count < 400
    costs = {n: 0.0005 + max(n * CHUNK_BYTES / 20e9, (n - 300) * CHUNK_BYTES / 0.5e9) for n in range(300, 401)}
    best = min(costs, key=lambda n: costs[n] + prefill(n * CHUNK_TOKENS, (400 - n) * CHUNK_TOKENS))
    assert count == pytest.approx(best, abs=2)


def test_chunks_of_a_remote_store_do_not_wait_for_files() -> None:
    known = gate("host", "file", "remote", explore=0.0)
    for tier, bandwidth in (("host", 20e9), ("file", 0.1e9), ("remote", 6e9)):
        for chunks in (1, 16):
            known.observe_load(tier, chunks * CHUNK_BYTES, chunks * CHUNK_BYTES / bandwidth, 0.0, 0.0)
    seconds = known.load_seconds([Run("host", 4), Run("remote", 8)], 0.0, queued=dict.fromkeys(("host", "remote"), 0.0))
    assert seconds == pytest.approx(8 * CHUNK_BYTES / 6e9, rel=0.01)


def test_equal_steps_are_believed_to_cost_their_tokens() -> None:
    known = gate()
    for _ in range(10):
        known.observe_prefill(0, 4096, 0.4)
        known.observe_load("host", 8 * CHUNK_BYTES, 0.1, 0.0, 0.0)
    assert known.prefill_seconds(0, 4096) == pytest.approx(0.4, rel=0.05)
    assert known.chunks_to_load(0, [Run("host", 8)], 0.0) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_what_cannot_have_been_seen_is_refused_and_changes_nothing(bad: float) -> None:
    known = taught(5e9)
    before = known.load_seconds([Run("host", 3)], 1.0), known.prefill_seconds(0, 999)
    calls: list[Callable[[], object]] = [
        lambda: known.observe_load("host", 1, bad, 0.0, 0.0),
        lambda: known.observe_load("host", 1, 1.0, bad, 0.0),
        lambda: known.observe_load("host", 1, 1.0, 0.0, bad),
        lambda: known.observe_load("tape", 1, 1.0, 0.0, 0.0),
        lambda: known.observe_prefill(0, 1, bad),
        lambda: known.chunks_to_load(0, [Run("tape", 1)], 0.0),
        lambda: known.chunks_to_load(-1, [Run("host", 1)], 0.0),
        lambda: known.chunks_to_load(0, [Run("host", 1)], bad),
        lambda: known.chunks_to_load(0, [Run("host", 1)], 0.0, {"host": bad}),
        lambda: known.load_seconds([Run("host", 1)], bad),
        lambda: known.load_seconds([Run("host", 1)], 0.0, {"host": bad}),
    ]
    for call in calls:
        with pytest.raises(CacheError):
            call()
    assert (known.load_seconds([Run("host", 3)], 1.0), known.prefill_seconds(0, 999)) == before


@pytest.mark.parametrize("arguments", [((), 1, 1), (("a", "a"), 1, 1), (("a",), 0, 1), (("a",), 1, 0)])
def test_an_impossible_gate_is_refused(arguments: tuple[tuple[str, ...], int, int]) -> None:
    with pytest.raises(CacheError, match="expected distinct tier names"):
        RecomputeGate(*arguments)


def test_refusing_gate_finds_out_that_loading_became_fast() -> None:
    known = taught(0.3e9, explore=EXPLORE)
    runs = [Run("host", 20)]
    counts = []
    for i in range(400):
        count = known.chunks_to_load(0, runs, float(i))
        counts.append(count)
        if count:
            known.observe_load("host", count * CHUNK_BYTES, 0.001 + count * CHUNK_BYTES / 20e9, 0.0, float(i))
    assert counts[0] == 0
    assert counts[-100:] == [20] * 100


class World:
    """One link that others use as well, one processor; requests come at their own pace."""

    def __init__(self, bandwidth: float, chunks: int, busy: float, seed: int) -> None:
        self.dice = random.Random(seed)
        self.bandwidth, self.chunks, self.busy = bandwidth, chunks, busy
        self.free_at = 0.0
        self.remote_at = 0.0

    def remote_load(self, now: float) -> None:
        """What others have put on the link until now: pieces of a tenth of a second."""
        while self.busy and self.remote_at < now:
            self.free_at = max(self.free_at, self.remote_at) + 0.1
            self.remote_at += self.dice.expovariate(self.busy / 0.1)

    def serve(self, count: int, now: float) -> tuple[float, float, float]:
        """Load `count` chunks: time until they are there, of which moving, of which waiting."""
        if not count:
            return 0.0, 0.0, 0.0
        waiting = max(0.0, self.free_at - now)
        noise = self.dice.uniform(0.9, 1.1)
        moving = 0.001 + count * CHUNK_BYTES / self.bandwidth * noise
        self.free_at = now + waiting + moving
        return waiting + moving, moving, waiting


def mean_ttft(choose: str, bandwidth: float, chunks: int, busy: float, seed: int = 7) -> float:
    """Over 400 requests, from the 30th on: what was loaded, then the rest and one new chunk computed."""
    world, known = World(bandwidth, chunks, busy, seed), gate()
    dice, total, now = random.Random(seed + 1), 0.0, 0.0
    ended: list[tuple[float, int, float, float]] = []
    mean_gap = 4 * prefill(0, chunks * CHUNK_TOKENS) + 0.2
    for i in range(400):
        now += dice.expovariate(1 / mean_gap)
        context, length = dice.choice([0, 2048]), dice.randint(max(1, chunks // 2), chunks)
        world.remote_load(now)
        while ended and ended[0][0] <= now:
            end, loaded, moving, waiting = ended.pop(0)
            known.observe_load("host", loaded * CHUNK_BYTES, moving, waiting, end)
        queued = {"host": max(0.0, world.free_at - now)} if choose == "told" else None
        count = {"load": length, "compute": 0}.get(choose, -1)
        if count < 0:
            count = known.chunks_to_load(context, [Run("host", length)], now, queued)
        loading, moving, waiting = world.serve(count, now)
        rest = (length - count + 1) * CHUNK_TOKENS
        computing = STEP + prefill(context + count * CHUNK_TOKENS, rest) * dice.uniform(0.95, 1.05)
        if count:
            ended.append((now + loading, count, moving, waiting))
        known.observe_prefill(context + count * CHUNK_TOKENS, rest, computing)
        total += loading + computing if i >= 30 else 0.0
    return total / 370


@pytest.mark.parametrize("busy", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("chunks", [2, 16, 120])
@pytest.mark.parametrize("bandwidth", [0.1e9, 0.5e9, 1.5e9, 2.2e9, 3e9, 6e9, 25e9])
def test_never_five_percent_worse_than_loading_or_computing(bandwidth: float, chunks: int, busy: float) -> None:
    """Whether it is told how long the queue is (as by a replay), or finds out by what it has ordered and seen."""
    fixed = [mean_ttft(choose, bandwidth, chunks, busy) for choose in ("load", "compute")]
    assert mean_ttft("told", bandwidth, chunks, busy) <= 1.05 * min(fixed)
    assert mean_ttft("untold", bandwidth, chunks, busy) <= 1.05 * min(fixed)


def test_loading_while_the_request_waits_for_an_engine_is_free() -> None:
    known, runs = taught(5e9), [Run("host", 8)]
    late = {"host": 3.0}
    assert known.chunks_to_load(0, runs, 0.0, late) == 0
    assert known.chunks_to_load(0, runs, 0.0, late, spare=3.0) == 8
    assert known.chunks_to_load(0, runs, 0.0, late, spare=1.0) == 0
    with pytest.raises(CacheError, match="spare"):
        known.chunks_to_load(0, runs, 0.0, late, spare=-1.0)


class SimulatedStore:
    """A store behind a network, in virtual time: one connection, round trips and rates that vary, and other users."""

    def __init__(self, bandwidth: float, *, round_trip: float, seed: int = 3) -> None:
        self.bandwidth, self.round_trip = bandwidth, round_trip
        self.now, self.waited, self.computed = 0.0, 0.0, 0.0
        self.served = self.held = 0
        self._chance = random.Random(seed)
        self.gate = RecomputeGate(("host", "store"), CHUNK_TOKENS, CHUNK_BYTES)
        self.gate.observe_load("host", CHUNK_BYTES, 1e-4, 0.0, 0.0)

    def request(self) -> None:
        """A prompt of which the store has all: asked about, fetched and computed as the gate says."""
        chunks, gate = self._chance.randrange(2, 64), self.gate
        self.held += chunks
        loaded = 0
        if gate.worth_probing(0, Run("store", chunks), self.now):
            trip = self.round_trip * self._chance.uniform(0.7, 1.6)
            self.wait(trip)
            gate.observe_probe("store", trip)
            loaded = gate.chunks_to_load(0, [Run("store", chunks)], self.now)
            if loaded:
                queued = self._chance.expovariate(1 / 0.002)
                seconds = self.round_trip + loaded * CHUNK_BYTES / self.bandwidth * self._chance.uniform(0.85, 1.2)
                self.wait(queued + seconds)
                gate.observe_load("store", loaded * CHUNK_BYTES, seconds, queued, self.now)
        self.served += loaded
        if rest := (chunks - loaded) * CHUNK_TOKENS:
            step = STEP + prefill(loaded * CHUNK_TOKENS, rest)
            self.now += step
            self.computed += step
            gate.observe_prefill(loaded * CHUNK_TOKENS, rest, step)
        self.now += self._chance.expovariate(2.0)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waited += seconds


COMPUTING = CHUNK_BYTES / prefill(0, CHUNK_TOKENS)
"""The rate of a store that is as fast as computing, in bytes per second."""


def known_store(bandwidth: float, round_trip: float) -> SimulatedStore:
    """A store after a few requests, from which the gate has learned."""
    store = SimulatedStore(bandwidth, round_trip=round_trip)
    store.gate.observe_prefill(0, CHUNK_TOKENS, STEP + prefill(0, CHUNK_TOKENS))
    store.gate.observe_prefill(0, 16 * CHUNK_TOKENS, STEP + prefill(0, 16 * CHUNK_TOKENS))
    for _ in range(20):
        store.request()
    store.waited = store.computed = store.served = store.held = 0
    return store


@pytest.mark.parametrize("round_trip", [0.0003, 0.005])
def test_store_twice_as_fast_as_computing_serves_its_chunks(round_trip: float) -> None:
    store = known_store(2 * COMPUTING, round_trip)
    for _ in range(400):
        store.request()
    assert store.served >= 0.95 * store.held


@pytest.mark.parametrize(("bandwidth", "round_trip"), [(0.5 * COMPUTING, 0.0003), (8 * COMPUTING, 5.0)])
def test_a_store_slower_than_computing_is_not_waited_for(bandwidth: float, round_trip: float) -> None:
    store = known_store(bandwidth, round_trip)
    for _ in range(400):
        store.request()
    assert store.waited < 0.04 * store.computed
    assert store.waited > 0  # it is tried now and then


def test_a_store_that_becomes_fast_is_found_out() -> None:
    store = known_store(0.2 * COMPUTING, 0.001)
    for _ in range(200):
        store.request()
    store.bandwidth = 10 * COMPUTING
    for _ in range(2000):
        store.request()
    store.served = store.held = 0
    for _ in range(100):
        store.request()
    assert store.served >= 0.95 * store.held


def test_store_is_asked_whether_loads_after_its_answer_pay() -> None:
    """Loads after a pause wait for long, those right behind another one do not: what counts is when loading begins."""
    known = gate("host", "store")
    known.observe_load("host", CHUNK_BYTES, 1e-4, 0.0, 0.0)
    known.observe_prefill(0, CHUNK_TOKENS, prefill(0, CHUNK_TOKENS))
    known.observe_prefill(0, 8 * CHUNK_TOKENS, prefill(0, 8 * CHUNK_TOKENS))
    known.observe_probe("store", 0.1)
    for _ in range(20):
        known.observe_load("store", CHUNK_BYTES, 0.005, 60.0, 1000.0)
    for _ in range(20):
        known.observe_load("store", CHUNK_BYTES, 0.005, 0.0, 1000.0)
    run = Run("store", 8)
    assert known.load_seconds([run], 1000.0) < known.prefill_seconds(0, 8 * CHUNK_TOKENS)  # right behind the last one
    assert known.chunks_to_load(0, [run], 1000.1) == 0
    assert not known.worth_probing(0, run, 1000.0)


def test_a_store_of_which_nothing_is_known_is_asked() -> None:
    new = gate("host", "store")
    assert new.worth_probing(0, Run("store", 1), 0.0)
    with pytest.raises(CacheError, match="got 'other'"):
        new.observe_probe("other", 1.0)
    with pytest.raises(CacheError, match="seconds"):
        new.observe_probe("store", -1.0)
