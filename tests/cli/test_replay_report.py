"""What the pages of replay and plan plot: hits over time, the queue, hit ratios by capacity, the life of drives."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from longshore.cli.plan_report import drive_life
from longshore.cli.replay_report import show_hit_curves, show_requests
from longshore.report import Page
from longshore.trace import experiment
from longshore.trace.analysis import Paths
from longshore.trace.experiment import Experiment, hit_curves, policy_named
from longshore.trace.machine import Timing, geometry_of, profile_named
from longshore.trace.parsing import TraceRequest
from longshore.trace.replay import TieredReplay
from longshore.trace.sizing import Choice
from longshore.trace.tally import ReplayTally

SESSIONS = [list(range(100 * (i % 7), 100 * (i % 7) + 4 + i // 7)) for i in range(70)]


def figures(page: Page) -> dict[str, Any]:
    """By title, what each figure plots."""
    blobs = re.findall(r'<script type="application/json" id="(figure-\d+)-data">(.*?)</script>', page.html())
    titles = dict(page.figures)
    return {titles[name]: json.loads(blob) for name, blob in blobs}


def test_no_policy_is_above_the_optimum_and_lru_is_exact() -> None:
    found = hit_curves(Paths(SESSIONS), lambda at, of: None)
    assert (found.requests, found.of) == (70, 70)
    for name in ("gittins", "arc", "lru"):
        assert all(each <= best for each, best in zip(found.ratios[name], found.ratios["optimum"], strict=True)), name
    for size, ratio in zip(found.sizes, found.ratios["lru"], strict=True):
        lru = Experiment(policy_named("lru")[1], size)
        for path in SESSIONS:
            lru.serve(path)
        assert lru.totals().ratio == ratio
    assert len({ratios[-1] for ratios in found.ratios.values()}) == 1  # all blocks fit


def test_curves_of_a_long_trace_are_of_its_first_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "_MOST_REFERENCES", 100)
    found = hit_curves(Paths(SESSIONS), lambda at, of: None)
    assert sum(map(len, SESSIONS[: found.requests])) <= 100 < sum(map(len, SESSIONS[: found.requests + 1]))
    page = Page("t")
    show_hit_curves(page, found, 1 << 20)
    assert f"of the first {found.requests} of 70 requests" in page.html()


def test_a_request_is_counted_where_it_arrived() -> None:
    timing = Timing(geometry_of("llama-3.1-8b"), profile_named("h100"))
    run = TieredReplay(timing, 16, {"host": 1 << 30, "file": 1 << 30}, policy_named(None)[1])
    requests = [TraceRequest(1000 * i, 16 * len(path), 1, tuple(path)) for i, path in enumerate(SESSIONS)]
    for _ in run.run(requests):
        pass
    tally = run.tally
    assert {tier: sum(counts) for tier, counts in tally.loaded.items()} == dict(tally.hits)
    assert sum(tally.hits.values()) > 0
    assert list(tally.blocks) == [len(path) for path in SESSIONS]
    assert list(tally.arrivals) == [float(i) for i in range(70)]
    assert all(0 <= waited < ttft for waited, ttft in zip(tally.waited, tally.ttft, strict=True))
    assert sum(tally.ttft) - sum(tally.waited) == pytest.approx(tally.computing)


def test_hits_queue_and_overload_over_time() -> None:
    """Eight requests in 8 s, on one engine: the last four bring 3 s of prefill each."""
    tally = ReplayTally()
    for at in range(8):
        number = tally.arrive(float(at), 10, 1.0)
        tally.load(number, {"host": at % 4, "file": 1})
        tally.waited[number], tally.ttft[number] = (0.0, 0.5) if at < 4 else (2.0 * (at - 4), 2.0 * (at - 4) + 3)
    page = Page("t")
    show_requests(page, tally, ["host", "file"], engines=1)
    shown = figures(page)
    hits = {trace["name"]: trace["y"] for trace in shown["Hits over time, by tier"]["data"]}
    assert hits == {"host": [12, 20], "file": [10, 10]}  # by 5 s
    queue = {trace["name"]: trace["y"] for trace in shown["Queue"]["data"]}
    assert max(queue["most"]) == 2
    assert queue["mean"][0] == 0
    (band,) = shown["Queue"]["layout"]["shapes"]
    assert (band["x0"], band["x1"]) == (5, 10)
    assert "more prefill arrived" in page.html()
    busy = Page("t")
    show_requests(busy, tally, ["host", "file"], engines=8)
    assert not figures(busy)["Queue"]["layout"].get("shapes")


def test_drives_last_as_long_as_warranty_covers_their_writes() -> None:
    choice = Choice(1 << 30, 4 * 10**12, 0, 1.0, 0.5, 0.2, 0.1, 0.2, file_write_bytes_per_day=8e12)
    assert drive_life(choice) == [
        ("read-intensive (1 DWPD)", "7.30 PB", "2.50 years", "too short"),
        ("mixed-use (3 DWPD)", "21.9 PB", "7.50 years", "enough"),
    ]
