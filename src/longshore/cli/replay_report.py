"""The page of `longshore replay`, and the figures that it shares with the page of `longshore plan`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.report import REASONS, RUNS, SOURCES, Curve, Page, curves, stacked_bars
from longshore.report.units import quantity, seconds, share
from longshore.trace.experiment import HitCurves
from longshore.trace.result import Replayed
from longshore.trace.tally import ReplayTally

_POINTS = 200
_MOST_BARS = 60
_GIB = 1 << 30
_UNITS = {"s": (1, 2, 5, 10, 20), "min": (0.5, 1, 2, 5, 10, 20), "h": (0.5, 1, 2, 6, 12), "days": (1, 2, 7, 14, 30)}
"""Widths of the parts of a trace, by unit."""
_SECONDS_PER = {"s": 1.0, "min": 60.0, "h": 3600.0, "days": 86_400.0}

_CURVES = {
    "optimum": ("Belady's optimum", RUNS["resident"], "dot"),
    "gittins": ("Longshore (gittins)", RUNS["tiered"], "solid"),
    "arc": ("ARC", SOURCES["device"], "solid"),
    "lru": ("LRU", RUNS["recompute"], "solid"),
}
"""Name, colour and line of each curve of hit ratios."""


def replay_page(found: Replayed, hits: HitCurves | None) -> Page:
    """The page of a replay; `hits` are hit ratios by capacity, if they were computed."""
    ttft, tally = found.ttft, found.replay.tally
    page = Page(
        "Replay of a trace",
        f"{tally.requests:,} requests through the control plane, in virtual time.",
        footer="Made by longshore replay. Times are those of a model of the machine, described above.",
    )
    if found.overload is not None:
        page.verdict(False, found.overload.words, word="Overload")
    page.facts(
        [
            ("Blocks hit", share(found.hit_ratio, 1), "of all complete blocks of prompts"),
            ("TTFT p50", seconds(ttft["p50"]), f"{seconds(ttft['recompute_p50'])} without tiers"),
            ("TTFT p95", seconds(ttft["p95"]), f"{seconds(ttft['recompute_p95'])} without tiers"),
        ]
    )
    engines = found.replay.engines * len(found.replay.replicas)
    show_requests(page, tally, list(found.slots), engines)
    if hits is not None:
        here = found.replay.slots, found.hit_ratio
        show_hit_curves(page, hits, found.replay.image_bytes, here)
    evictions, routes = _without_zeros(found.evictions), _without_zeros(found.routes)
    if evictions:
        page.figure(
            "Evictions",
            "Blocks evicted from each tier. A colder tier has a copy of demoted blocks, no tier of forgotten ones; "
            "unusable blocks could not be read.",
            _by(evictions, y_title="blocks"),
        )
    if routes:
        page.figure(
            "Routes",
            "Seconds that each route was busy, and seconds that transfers waited for it, in total.",
            _by(routes, y_title="seconds"),
        )
    page.table("Results", ("", "", ""), found.rows())
    page.text("Assumptions", *found.assumptions)
    return page


def show_requests(page: Page, tally: ReplayTally, tiers: list[str], engines: int) -> None:
    """Figures of the requests of a replay: time to first token, hits by tier over time, and the queue."""
    page.figure(
        "Time to first token",
        "Share of requests with a first token by that time; further left is better. Tiered: this replay. Recompute: "
        "the same requests without tiers, all computed.",
        _ttft(tally),
    )
    time = _Timeline(tally, engines)
    page.figure(
        "Hits over time, by tier",
        f"Share of blocks, by the tier they were loaded from and by the prompt's time of arrival, {time.width} a bar. "
        "What is missing to 100 % was computed.",
        stacked_bars(
            time.middles.tolist(),
            {tier: time.hits(tier) for tier in tiers if tally.hits[tier]} or {tiers[0]: [0.0] * len(time.middles)},
            SOURCES,
            x_title=time.title,
            y_title="blocks, %",
        ),
    )
    bands = time.overloaded()
    words = (
        f"Shaded: more prefill arrived within the {time.width} than the engines can compute in it, so the queue grows."
        if bands
        else f"In no {time.width} did more prefill arrive than the engines can compute in it."
    )
    page.figure(
        "Queue",
        f"Requests that had arrived and that no engine had begun to compute, while they were loaded or waited. {words}",
        curves(
            [
                Curve(name, time.middles.tolist(), values, colour, shape="hvh")
                for (name, values), colour in zip(
                    time.queue().items(), (RUNS["resident"], SOURCES["device"]), strict=True
                )
            ],
            x_title=time.title,
            y_title="requests",
            bands=bands,
        ),
    )


def show_hit_curves(page: Page, hits: HitCurves, image: int, here: tuple[int, float] | None = None) -> None:
    """The figure of hit ratios by capacity, in blocks of `image` bytes; `here`: capacity and ratio of a replay."""
    blocks, ratios = list(hits.sizes), {key: list(each) for key, each in hits.ratios.items()}
    if here is not None and here[0] > blocks[-1]:  # all blocks fit: beyond, nothing changes
        blocks.append(here[0])
        for each in ratios.values():
            each.append(each[-1])
    sizes = [size * image / _GIB for size in blocks]
    lines = [
        Curve(
            name,
            sizes,
            [100 * ratio for ratio in ratios[key]],
            colour,
            [
                f"{name}: {share(ratio, 1)} with {quantity(size)} GiB"
                for ratio, size in zip(ratios[key], sizes, strict=True)
            ],
            dash,
            size=5,
        )
        for key, (name, colour, dash) in _CURVES.items()
    ]
    caption = (
        "Share of blocks that one tier of that capacity hits, without time. No policy can be above Belady's optimum, "
        "which knows the future; LRU and ARC are what other caches do."
    )
    if here is not None:
        size, ratio = here[0] * image / _GIB, here[1]
        text = f"this replay: {share(ratio, 1)} with {quantity(size)} GiB in all tiers"
        lines.append(Curve("this replay", [size], [100 * ratio], RUNS["tiered"], [text], "", "star", 13))
        caption += " The star is this replay, with all its tiers, and with time."
    if hits.requests < hits.of:
        caption += f" The curves are of the first {hits.requests:,} of {hits.of:,} requests."
    figure = curves(lines, x_title="capacity, GiB", y_title="blocks hit, %", logarithmic=True)
    page.figure("Hit ratio by capacity", caption, figure)


def _without_zeros(rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Rows and columns that have a value above zero."""
    shown = {name for row in rows.values() for name, value in row.items() if value}
    return {
        label: {name: value for name, value in row.items() if name in shown}
        for label, row in rows.items()
        if any(row.values())
    }


def _by(rows: Mapping[str, Mapping[str, float]], *, y_title: str) -> Any:
    """A stacked bar for each row."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    parts = {name: [row.get(name, 0) for row in rows.values()] for name in names}
    return stacked_bars([_arrow(label) for label in rows], parts, REASONS, x_title="", y_title=y_title)


def _arrow(label: str) -> str:
    return label.replace("->", " \u2192 ")


def _ttft(tally: ReplayTally) -> Any:
    shares = np.linspace(0, 100, _POINTS)
    runs = (("tiered", tally.ttft), ("recompute", tally.recompute))
    return curves(
        [
            Curve(name, np.percentile(np.frombuffer(values, np.float64), shares).tolist(), shares.tolist(), RUNS[name])
            for name, values in runs
            if len(values)
        ],
        x_title="time to first token, s",
        y_title="requests, %",
        logarithmic=True,
    )


class _Timeline:
    """The requests of a replay in equal parts of its time."""

    def __init__(self, tally: ReplayTally, engines: int) -> None:
        self._tally, self._engines = tally, engines
        self._arrived = np.frombuffer(tally.arrivals, np.float64) - tally.first
        self._waited = np.frombuffer(tally.waited, np.float64)
        least = tally.seconds / max(1, min(_MOST_BARS, tally.requests // 4))
        widths = [(unit, width, width * _SECONDS_PER[unit]) for unit, each in _UNITS.items() for width in each]
        self._unit, width, self._step = next((each for each in widths if each[2] >= least), widths[-1])
        self._part = (self._arrived / self._step).astype(np.int64)
        self._count = int(self._part.max(initial=0)) + 1
        self._seconds = _SECONDS_PER[self._unit]
        self.title = f"time of the trace, {self._unit}"
        self.width = f"{width} {self._unit}"
        self.middles = (np.arange(self._count) + 0.5) * self._step / self._seconds

    def hits(self, tier: str) -> list[float]:
        """Blocks loaded from `tier`, in % of those asked for, by part."""
        asked = self._sums(np.frombuffer(self._tally.blocks, np.int32))
        loaded = self._sums(np.frombuffer(self._tally.loaded[tier], np.int32))
        found: list[float] = (100 * loaded / np.maximum(asked, 1)).tolist()
        return found

    def queue(self) -> dict[str, list[float]]:
        """Requests that wait in each part: the most at a time, and the mean."""
        arrived, waited = self._arrived[self._waited > 0], self._waited[self._waited > 0]
        edges = np.arange(self._count + 1) * self._step
        times = np.concatenate([edges, arrived, np.minimum(arrived + waited, edges[-1])])
        changes = np.concatenate([np.zeros(len(edges), int), np.repeat([1, -1], len(arrived))])
        order = np.lexsort((changes, times))
        times, waiting = times[order], np.cumsum(changes[order])
        starts = np.searchsorted(times, edges)
        area = np.concatenate([[0.0], np.cumsum(np.diff(times) * waiting[:-1])])
        return {
            "most": np.maximum.reduceat(waiting, starts[:-1]).tolist(),
            "mean": (np.diff(area[starts]) / self._step).tolist(),
        }

    def overloaded(self) -> list[tuple[float, float]]:
        """From when to when more prefill arrives than the engines can compute."""
        computing = np.frombuffer(self._tally.ttft, np.float64) - self._waited
        much = np.flatnonzero(self._sums(computing) > self._engines * self._step)
        runs = np.split(much, np.flatnonzero(np.diff(much) > 1) + 1) if len(much) else []
        scale = self._step / self._seconds
        return [(float(run[0]) * scale, float(run[-1] + 1) * scale) for run in runs]

    def _sums(self, values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.bincount(self._part, values, self._count).astype(np.float64)
