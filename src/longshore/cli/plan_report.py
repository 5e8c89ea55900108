"""The page of `longshore plan`, and how it writes sizes, costs and the table of sizes."""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import FILE, HOST, REMOTE
from longshore.cli.replay_report import show_hit_curves, show_requests
from longshore.report import RUNS, SOURCES, Curve, Page, curves
from longshore.report.plots import MUTED
from longshore.report.units import quantity, seconds, share
from longshore.trace.experiment import HitCurves
from longshore.trace.sizing import LARGEST_DRIVE, WARRANTY_YEARS, Choice, Estimate, Plan, Size, frontier_of

DRIVE_CLASSES = {"read-intensive": 1, "mixed-use": 3}
"""Drive writes per day (DWPD) that the warranty of each class of drives covers."""

COLUMNS = ("DRAM", "NVMe", "store", "cost", "hits", "TTFT p50", "TTFT p95", "DWPD", "")


def amount(found: Plan, choice: Choice | Estimate) -> str:
    """Its size as text."""
    return sizes_words(choice.size, found.replicas)


def sizes_words(size: Size, replicas: int) -> str:
    """A size as text."""
    if not size.host:
        return "nothing"
    words = f"{size.host >> 30} GiB of DRAM" + (f" and {drives(size.file)} of NVMe" if size.file else "")
    words += f" in each of {replicas:,} replicas" if replicas > 1 else ""
    return words + (f", and a store of {size.store >> 30:,} GiB" if size.store else "")


def drives(file: int) -> str:
    """Drives with `file` bytes in total: `3.84 TB`, `2 x 15.36 TB`."""
    count, each = max(1, file // LARGEST_DRIVE), min(file, LARGEST_DRIVE)
    return f"{each / 1e12:.4g} TB" if count == 1 else f"{count} x {each / 1e12:.4g} TB"


def cost(found: Plan, choice: Choice) -> str:
    """Its cost with the currency."""
    return f"{choice.cost:,.0f} {found.prices.currency}"


def rows(found: Plan) -> list[tuple[str, ...]]:
    """Rows of the table of replayed sizes: sizes, cost, hits, TTFT, drive writes per day, and a mark."""
    names = {found.knee: "knee"} | ({found.recommended: "recommended"} if found.recommended else {})
    return [
        (
            f"{each.host_bytes >> 30} GiB" if each.host_bytes else "-",
            drives(each.file_bytes) if each.file_bytes else "-",
            f"{each.store_bytes >> 30} GiB" if each.store_bytes else "-",
            f"{each.cost:,.0f}",
            share(each.hit_ratio, 1),
            seconds(each.ttft_p50),
            seconds(each.ttft_p95),
            quantity(each.drive_writes_per_day) if each.file_bytes else "-",
            names.get(each, ""),
        )
        for each in found.choices
    ]


def drive_life(choice: Choice) -> list[tuple[str, str, str, str]]:
    """By class of drives: its rating, the bytes that the warranty covers, and after how long they have been written."""
    found = []
    for name, rated in DRIVE_CLASSES.items():
        covered = rated * choice.file_bytes * 365 * WARRANTY_YEARS
        years = covered / (365 * choice.file_write_bytes_per_day)
        life = f"{quantity(years)} years" if years < 100 else "more than 100 years"
        found.append((f"{name} ({rated} DWPD)", f"{quantity(covered / 1e15)} PB", life, _within(years)))
    return found


def _within(years: float) -> str:
    return "enough" if years >= WARRANTY_YEARS else "too short"


def plan_page(found: Plan, words: Sequence[str], hits: HitCurves, image: int) -> Page:
    """The page of a plan; `hits` are hit ratios by capacity, in blocks of `image` bytes."""
    page = Page(
        "DRAM and NVMe sizing",
        f"{found.requests:,} requests, {found.unique_blocks:,} unique blocks; target for "
        f"TTFT p95: {seconds(found.target)}.",
        footer="Made by longshore plan. Times are those of a model of the machine, with the assumptions above.",
    )
    if found.overload is not None:
        page.verdict(False, found.overload.words, word="Overload")
    first, *others = (line for line in words if not line.startswith(("Overload", "Assumed")))
    page.verdict(found.recommended is not None, first, word="Recommended" if found.recommended else "Out of reach")
    choice, nothing = found.recommended or found.frontier[-1], found.choices[0]
    page.facts(
        [
            ("Cost", f"{choice.cost:,.0f}", f"{found.prices.currency}: {amount(found, choice)}"),
            ("TTFT p95", seconds(choice.ttft_p95), f"{seconds(nothing.ttft_p95)} without tiers"),
            ("TTFT p50", seconds(choice.ttft_p50), f"{seconds(nothing.ttft_p50)} without tiers"),
            ("Blocks hit", share(choice.hit_ratio, 1), f"{share(choice.host_hit_ratio, 1)} in DRAM"),
        ]
    )
    page.text("Results", *others)
    _show_frontier(page, found, choice)
    each = f" DRAM and NVMe are those of each of {found.replicas:,} replicas." if found.replicas > 1 else ""
    page.table("Sizes replayed", COLUMNS, rows(found), f"By cost. Costs are in {found.prices.currency}.{each}")
    if found.tally is not None:
        page.text(
            "The choice, replayed",
            f"The figures below are of the replay with {amount(found, choice)}.",
        )
        if choice.file_write_bytes_per_day:
            page.table(
                "Life of the drives",
                ("drives", "warranty covers", "written after", f"for {WARRANTY_YEARS} years"),
                drive_life(choice),
                f"{quantity(choice.file_write_bytes_per_day / 1e12)} TB are written per day at the rate of the trace, "
                f"{quantity(choice.drive_writes_per_day)} drive writes per day (DWPD).",
            )
        show_requests(page, found.tally, [HOST, FILE, REMOTE], found.engines * found.replicas)
    size = found.replicas * (choice.host_bytes + choice.file_bytes) + choice.store_bytes
    show_hit_curves(page, hits, image, (size // image, choice.hit_ratio) if size else None)
    assumed = [line.removeprefix("Assumed: ") for line in words if line.startswith("Assumed: ")]
    page.text("Assumptions", *(line[:1].upper() + line[1:] for line in assumed))
    return page


def _show_frontier(page: Page, found: Plan, choice: Choice) -> None:
    """All sizes on sale as estimated, the frontier of those that were replayed, the choice, and the target."""
    sold = [each for each in found.estimates if each.host_bytes]
    unit = found.prices.currency
    most = max([each.cost for each in sold] or [choice.cost])
    alone = frontier_of([each for each in found.choices if not each.store_bytes])
    lines = [
        Curve(
            "on sale, estimated p95",
            [each.cost for each in sold],
            [each.ttft_p95 for each in sold],
            SOURCES["computed"],
            [f"{amount(found, each)}: {seconds(each.ttft_p95)} (estimate)" for each in sold],
            "",
            size=5,
        ),
        *(
            Curve(
                name,
                [each.cost for each in among],
                [getattr(each, field) for each in among],
                RUNS[colour],
                [f"{amount(found, each)}: {seconds(getattr(each, field))}, {cost(found, each)}" for each in among],
            )
            for name, colour, field, among in (
                ("frontier, TTFT p95", "recompute", "ttft_p95", found.frontier),
                ("frontier, TTFT p50", "tiered", "ttft_p50", found.frontier),
                *([("without a store, TTFT p95", "resident", "ttft_p95", alone)] if found.replicas > 1 else []),
            )
        ),
        Curve("target for p95", [0, most], [found.target] * 2, MUTED, dash="dot"),
        Curve(
            "recommended" if found.recommended else "fastest",
            [choice.cost],
            [choice.ttft_p95],
            RUNS["recompute"],
            [f"{amount(found, choice)}: {seconds(choice.ttft_p95)}, {cost(found, choice)}"],
            "",
            "star",
            14,
        ),
    ]
    page.figure(
        "Time to first token by cost",
        "Grey: every size on sale, as estimated; they choose what to replay. Lines: sizes that were replayed and that "
        "no cheaper one beats. Further down is faster, further left is cheaper; where a line is flat, larger sizes "
        "improve little.",
        curves(lines, x_title=f"cost, {unit}", y_title="time to first token, s"),
    )
