"""What routers and operators are told: in order, bounded, and true."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from cache_kit import IMAGE_BYTES, chunks, key, lookup, parent, path_of, store
from group_kit import end, orders, settle
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from event_file import write_events
from longshore.boundary import FILE, HOST, REMOTE, Key, Status, StoredChunk, TransferResult
from longshore.cache import (
    CacheSettings,
    Event,
    EventKind,
    SlotState,
    TieredCache,
    TierSpec,
    Verdict,
    WritePolicy,
    explain,
)
from longshore.cache import events as log
from longshore.cache.events import Announcements, Change
from longshore.cache.eviction_policies import LRU
from longshore.cache.explain import read_events, requests
from longshore.errors import CacheError, TraceError
from residents import residents_of


def build(host: int, file: int = 0, events: int = 100) -> TieredCache:
    tiers = [TierSpec(HOST, host, IMAGE_BYTES, LRU), *([TierSpec(FILE, file, IMAGE_BYTES, LRU)] if file else [])]
    return TieredCache(tiers, CacheSettings(events=events, backup=WritePolicy.THROUGH))


def put(cache: TieredCache, path: str, now: float = 0.0) -> None:
    cache.apply_results((), now)
    store(cache, chunks(path), range(len(path)))
    settle(cache, now)


def ask(cache: TieredCache, path: str, request: str, start: int = 0) -> None:
    if lease := lookup(cache, chunks(path), 0.0, first=start, request=request).lease:
        cache.release(lease)


def said(events: list[Event]) -> list[tuple[str, str, str]]:
    return [(e.kind.value, path_of(e.key) if e.key else "", e.tier) for e in events]


def accounts(cache: TieredCache, request: str) -> list[tuple[Verdict, str, str]]:
    return [(a.verdict, a.tier, a.cause) for a in explain(cache.events(), request)[request]]


def test_a_life_is_told_in_order() -> None:
    cache = build(2, 2)
    put(cache, "ab", 1.0)
    cache.discard(chunks("ab"), HOST)
    assert said(cache.events()) == [
        ("ordered", "a", HOST),
        ("ordered", "ab", HOST),
        ("stored", "a", HOST),
        ("stored", "ab", HOST),
        ("ordered", "a", FILE),
        ("ordered", "ab", FILE),
        ("moved", "a", FILE),
        ("moved", "ab", FILE),
        ("removed", "ab", HOST),
        ("removed", "a", HOST),
    ]
    assert cache.events() == []
    cache.reset()
    (reset,) = cache.events()
    assert (reset.kind, reset.number, reset.at) == (EventKind.RESET, 11, 1.0)


def test_an_eviction_names_its_cause_and_for_whom() -> None:
    cache = build(1)
    put(cache, "a")
    cache.events()
    put(cache, "b", 7.0)
    removed = cache.events()[0]
    assert (removed.kind, removed.key, removed.cause, removed.by, removed.at) == (
        EventKind.REMOVED,
        key("a"),
        "evicted",
        key("b"),
        7.0,
    )


def test_slow_reader_sees_a_gap_and_then_the_newest() -> None:
    cache = build(8, events=3)
    put(cache, "abcd")
    gap, *rest = cache.events()
    assert (gap.kind, gap.length) == (EventKind.GAP, 5)
    assert [e.number for e in rest] == [6, 7, 8]
    put(cache, "x")
    assert [e.kind for e in cache.events()] == [EventKind.ORDERED, EventKind.STORED]


def recovered(count: int, events: int, known: int = 0) -> tuple[TieredCache, list[StoredChunk]]:
    """A cache that finds `count` chunks in files at start, each after the one before."""
    tiers = [TierSpec(HOST, 64, IMAGE_BYTES, LRU), TierSpec(FILE, count, IMAGE_BYTES, LRU, outlives=True)]
    cache = TieredCache(tiers, CacheSettings(events=events))
    names = [number.to_bytes(32, "little") for number in range(1, count + 1)]
    found = [StoredChunk(slot, name, names[slot - 1] if slot else None) for slot, name in enumerate(names)]
    if known:
        assert cache.adopt(HOST, found[:known]) == known
    assert cache.adopt(FILE, found) == count
    return cache, found


def test_a_restart_over_many_chunks_loses_no_event() -> None:
    cache, found = recovered(100_000, events=100)
    put(cache, "ab")
    told: list[Event] = []
    while some := cache.events(4096):
        assert len(some) <= 4096
        told += some
    assert [each.number for each in told] == list(range(1, 100_005))
    assert {each.kind for each in told[:100_000]} == {EventKind.STORED}
    assert {(each.key, each.parent) for each in told[:100_000]} == {(each.key, each.parent) for each in found}
    seen: set[bytes | None] = {None}
    for each in told[:100_000]:  # parents first
        assert each.parent in seen
        assert (each.tier, each.source) == (FILE, "")
        seen.add(each.key)
    assert said(told[100_000:]) == [
        ("ordered", "a", HOST),
        ("ordered", "ab", HOST),
        ("stored", "a", HOST),
        ("stored", "ab", HOST),
    ]


def test_chunks_of_two_tiers_at_start_are_told_twice() -> None:
    cache, found = recovered(5, events=100, known=2)
    told = [(each.kind, each.key, each.tier, each.source) for each in cache.events(100)]
    names = [each.key for each in found]
    assert sorted(told[:2], key=str) == sorted([(EventKind.STORED, name, HOST, "") for name in names[:2]], key=str)
    assert {*told[2:]} == {
        *((EventKind.MOVED, name, FILE, HOST) for name in names[:2]),
        *((EventKind.STORED, name, FILE, "") for name in names[2:]),
    }


def test_what_was_recovered_is_missing_where_a_later_event_is() -> None:
    """An event that is dropped may have taken it back."""
    cache, _ = recovered(10, events=3)
    assert len(cache.events(4)) == 4
    put(cache, "abc")
    gap, *rest = cache.events()
    assert (gap.kind, gap.length) == (EventKind.GAP, 6 + 3)
    assert [each.number for each in rest] == [14, 15, 16]


def test_without_a_limit_what_was_recovered_is_missing() -> None:
    cache, _ = recovered(10, events=100)
    put(cache, "a")
    gap, *rest = cache.events()
    assert (gap.kind, gap.length) == (EventKind.GAP, 10)
    assert said(rest) == [("ordered", "a", HOST), ("stored", "a", HOST)]
    assert cache.events(5) == []


def test_a_step_compares_a_bounded_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "STEP", 16)
    cache, found = recovered(100, events=100)
    announced: Announcements[int] = Announcements()
    for number, each in enumerate(found):
        announced.name(each.key, number)
    changes = [change for event in cache.events() for change in announced.changes(event)]
    steps = []
    while not announced.is_current:
        steps.append(cache.reconcile(announced))
        changes += announced.settle(steps[-1])
    assert max(map(len, steps)) <= 16
    assert sorted(change.name for change in changes) == [*range(100)]
    assert cache.reconcile(announced) == []


class Router(RuleBasedStateMachine):
    """A router is told what a cache holds, while chunks come and go, events are lost, and each step compares a few."""

    names = st.sampled_from(["a", "ab", "abc", "abd", "b", "bc", "x", "xy", "xyz", "k", "l", "m"])

    def __init__(self) -> None:
        super().__init__()
        tiers = [TierSpec(HOST, 4, IMAGE_BYTES, LRU), TierSpec(FILE, 9, IMAGE_BYTES, LRU, outlives=True)]
        settings = CacheSettings(events=12, backup=WritePolicy.THROUGH, remote_events=True)
        self.cache = TieredCache(tiers, settings, remote=[REMOTE])
        self.announced: Announcements[str] = Announcements()
        self.described = dict[Key, str]()
        self.known = set[tuple[str, str]]()
        """What the router knows: tier and name."""

    @initialize(count=st.integers(0, 9))
    def recover(self, count: int) -> None:
        paths = ["a", "ab", "abc", "b", "bc", "k", "l", "m", "x"][:count]
        self.cache.adopt(FILE, [StoredChunk(at, key(path), parent(key(path))) for at, path in enumerate(paths)])

    def tell(self, changes: Iterable[Change[str]]) -> None:
        for change in changes:
            copy = change.tier, change.name
            assert (copy in self.known) == change.removed, f"{change} is told twice"
            self.known ^= {copy}

    @rule(path=names, is_described=st.booleans())
    def store(self, path: str, is_described: bool) -> None:
        if is_described:
            self.described.update((each, path_of(each)) for each in chunks(path))
        put(self.cache, path)

    @rule(path=names)
    def describe(self, path: str) -> None:
        self.described[key(path)] = path
        if self.announced.has(key(path)):
            self.tell(self.announced.name(key(path), path))

    @rule(path=names, tier=st.sampled_from([HOST, FILE]))
    def discard(self, path: str, tier: str) -> None:
        self.cache.discard([key(path)], tier)

    @rule(path=names)
    def lapse(self, path: str) -> None:
        self.cache._remote.tiers[0].withdraw(key(path), "not_found")

    @rule(keep=st.sampled_from([(), (FILE,)]))
    def reset(self, keep: tuple[str, ...]) -> None:
        self.cache.reset(keep=keep)
        settle(self.cache)

    @rule()
    def drop(self) -> None:
        """Another has said that all blocks are cleared."""
        self.known.clear()
        self.announced.restart(dropped=True)

    @rule(limit=st.sampled_from([None, 1, 4, 30]), is_cleared=st.booleans(), step=st.sampled_from([1, 2, 3, 7]))
    def read(self, limit: int | None, is_cleared: bool, step: int) -> None:
        """One step of a reader. A reset is told as such, or not."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(log, "STEP", step)
            events = self.cache.events(limit)
            compared = self.cache.reconcile(self.announced)
        assert len(compared) <= step
        for event in events:
            if event.kind is EventKind.RESET and is_cleared:
                self.drop()
            if event.kind in (EventKind.STORED, EventKind.MOVED, EventKind.SHARED):
                self.name(event.key)
            self.tell(self.announced.changes(event))
        for each, tiers in compared:
            self.name(each if tiers else None)
        self.tell(self.announced.settle(compared))
        if self.announced.is_current and not self.cache._state.log.has_events:
            self.check()

    def name(self, of: Key | None) -> None:
        if of in self.described:
            self.tell(self.announced.name(of, self.described[of]))

    def check(self) -> None:
        held = {(each.slot.tier, each.key) for each in residents_of(self.cache) if each.state is SlotState.READY}
        held |= {(REMOTE, each) for each in self.cache._remote.tiers[0].announced}
        assert self.known == {(tier, self.described[each]) for tier, each in held if each in self.described}
        assert self.announced.names.keys() <= {each for _, each in held}

    def teardown(self) -> None:
        self.read(None, True, 7)
        while not self.announced.is_current:
            self.read(None, True, 7)
        self.check()


TestRouter = Router.TestCase


def test_nothing_is_recorded_unless_asked_for() -> None:
    cache = build(2, events=0)
    put(cache, "abc")
    ask(cache, "ab", "r")
    hold = lookup(cache, chunks("ab"), 0.0).lease
    cache.load(hold, {0: (0,)}, timeout=1.0)
    cache.apply_results((), 1.0)
    cache.reset()
    assert cache.events() == []


def test_every_chunk_of_a_request_is_accounted_for() -> None:
    cache = build(3, events=1000)
    put(cache, "ab", 1.0)
    put(cache, "xy", 2.0)  # in place of "ab"
    store(cache, chunks("abc"), range(3))  # in place of "xy"; on its way
    ask(cache, "abcd", "early")
    settle(cache, 3.0)
    ask(cache, "abcd", "late", start=1)
    ask(cache, "xy", "other")
    ask(cache, "q", "new")
    log = cache.events()
    assert [(a.verdict, a.tier) for a in explain(log, "early")["early"]] == [
        (Verdict.FOUND, HOST),
        (Verdict.IN_FLIGHT, HOST),
        (Verdict.IN_FLIGHT, HOST),
        (Verdict.NEVER_SEEN, ""),
    ]
    assert [a.verdict for a in explain(log, "late")["late"]] == [
        Verdict.DEVICE,
        Verdict.FOUND,
        Verdict.FOUND,
        Verdict.NEVER_SEEN,
    ]
    gone = explain(log, "other")["other"]
    assert [(a.verdict, a.by) for a in gone] == [(Verdict.EVICTED, key("ab")), (Verdict.EVICTED, key("ab"))]
    assert [a.verdict for a in explain(log, "new")["new"]] == [Verdict.NEVER_SEEN]
    with pytest.raises(TraceError, match="no event is about a request called 'nobody'"):
        explain(log, "nobody")


def test_failures_removals_and_resets_are_reasons_too() -> None:
    cache = build(4)
    store(cache, chunks("ab"), range(2))
    (transfer,) = orders(cache)
    cache.apply_results([TransferResult(transfer.job, (Status.OK, Status.IO_ERROR))], 1.0)
    ask(cache, "ab", "failed")
    assert accounts(cache, "failed") == [(Verdict.FOUND, HOST, ""), (Verdict.FAILED, HOST, "io_error")]
    put(cache, "x")
    cache.discard([key("x")], HOST)
    ask(cache, "x", "removed")
    assert accounts(cache, "removed") == [(Verdict.REMOVED, HOST, "discarded")]
    put(cache, "z")
    cache.reset()
    ask(cache, "z", "reset")
    assert accounts(cache, "reset") == [(Verdict.RESET, "", "")]


def test_what_is_there_behind_a_miss_is_behind() -> None:
    cache = build(4)
    jobs = [store(cache, chunks(path), (0,), first=len(path) - 1).job for path in ("a", "ab")]
    assert jobs[1] is not None
    cache.apply_results([TransferResult(jobs[1], (Status.OK,))], 0.0)
    ask(cache, "ab", "r")
    assert [verdict for verdict, _, _ in accounts(cache, "r")] == [Verdict.IN_FLIGHT, Verdict.AFTER_MISS]


def test_a_bad_read_is_a_reason() -> None:
    cache = build(2)
    put(cache, "a")
    hold = lookup(cache, [key("a")], 0.0).lease
    cache.load(hold, {0: (0,)})
    end(cache, orders(cache), Status.CORRUPT, 2.0)
    ask(cache, "a", "r")
    assert accounts(cache, "r") == [(Verdict.REMOVED, HOST, "corrupt")]


def test_events_survive_a_file(tmp_path: Path) -> None:
    cache = build(1, 2)
    put(cache, "a", 1.5)
    put(cache, "b")
    ask(cache, "ab", "r", start=1)
    log = cache.events()
    write_events(tmp_path / "events", log[:3])
    write_events(tmp_path / "events", log[3:])
    assert read_events(tmp_path / "events") == log
    assert all(json.loads(line) for line in (tmp_path / "events").read_text().splitlines())


def test_what_was_found_and_did_not_arrive_has_its_reason() -> None:
    cache = build(4)
    put(cache, "abc")
    hold = lookup(cache, chunks("abcd"), 0.0, first=1, request="r").lease
    cache.load(hold, {0: (0, 1)})
    cache.apply_results((), 20.0)
    loaded = cache.events()
    assert [(a.verdict, a.cause) for a in explain(loaded, "r")["r"]] == [
        (Verdict.DEVICE, ""),
        (Verdict.MISSED, "deadline"),
        (Verdict.MISSED, "after_miss"),
        (Verdict.NEVER_SEEN, ""),
    ]
    assert (loaded[-1].kind, loaded[-1].keys, loaded[-1].length) == (EventKind.LOADED, tuple(chunks("abc")[1:]), 0)
    assert loaded[-1].at == 20.0
    assert requests(loaded) == [("r", 0.0, 4, 1, 2)]


def test_a_load_that_a_reset_makes_worthless_has_not_arrived() -> None:
    cache = build(4)
    put(cache, "a")
    hold = lookup(cache, chunks("a"), 0.0, request="r").lease
    cache.load(hold, {0: (0,)})
    cache.reset()
    assert accounts(cache, "r") == [(Verdict.MISSED, HOST, "cancelled")]


def test_events_are_pulled_in_batches() -> None:
    cache = build(4, events=5)
    put(cache, "abc")
    first = cache.events(2)
    assert [(e.kind, e.number, e.length) for e in first] == [
        (EventKind.GAP, 0, 1),
        (EventKind.ORDERED, 2, 0),
        (EventKind.ORDERED, 3, 0),
    ]
    assert [e.number for e in cache.events(2) + cache.events(2) + cache.events(2)] == [4, 5, 6]
    with pytest.raises(CacheError, match="at least 1 event, got 0"):
        cache.events(0)


def test_keys_may_be_shortened() -> None:
    event = Event(1, EventKind.REQUEST, key=key("a"), by=key("b"), keys=tuple(chunks("ab")), request="r")
    short = Event.from_json(event.as_json(key_bytes=4))
    assert (short.key, short.by, short.keys) == (b"a...", b"b...", (b"a...", b"ab.."))
    assert Event.from_json(event.as_json()) == event


def test_incomplete_last_line_is_skipped_and_rotated_file_read_first(tmp_path: Path) -> None:
    (tmp_path / "events.1").write_text('{"kind": "reset", "number": 1}\n')
    (tmp_path / "events").write_text('{"kind": "reset", "number": 2}\n{"kind": "res')
    assert [event.number for event in read_events(tmp_path / "events")] == [1, 2]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"kind": "unheard of"}', '{"number": 1}', '{"kind": "stored", "key": "x"}']
)
def test_a_file_of_something_else_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "events").write_text('{"kind": "reset"}\n' + line + "\n")
    with pytest.raises(TraceError, match="line 2"):
        read_events(tmp_path / "events")
    with pytest.raises(TraceError, match="nowhere"):
        read_events(tmp_path / "nowhere")


def test_a_copy_down_comes_from_the_tier_right_above() -> None:
    tiers = [TierSpec(name, 4, IMAGE_BYTES, LRU) for name in (HOST, FILE, "third", "fourth")]
    cache = TieredCache(tiers, CacheSettings(events=100, backup=WritePolicy.THROUGH))
    put(cache, "a")
    moves = [(e.source, e.tier) for e in cache.events() if e.kind is EventKind.MOVED]
    assert moves == [(HOST, FILE), (FILE, "third"), ("third", "fourth")]


def test_a_discard_of_what_is_no_key_changes_nothing() -> None:
    cache = build(2)
    put(cache, "ab")
    with pytest.raises(CacheError, match="digest"):
        cache.discard([b"", *chunks("ab")], HOST)
    assert len(residents_of(cache)) == 2
