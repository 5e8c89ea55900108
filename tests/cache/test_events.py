"""What routers and operators are told: in order, bounded, and true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cache_kit import IMAGE_BYTES, chunks, key, lookup, path_of, store
from group_kit import end, orders, settle

from event_file import write_events
from longshore.boundary import FILE, HOST, Status, StoredChunk, TransferResult
from longshore.cache import CacheSettings, Event, EventKind, TieredCache, TierSpec, Verdict, WritePolicy, explain
from longshore.cache.eviction import LRU
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
    told = [(each.kind, each.key, each.tier, each.source) for each in cache.events()]
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
