"""The table of metrics: stable names, complete reasons, and files made from it that are not stale."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
from grafana_foundation_sdk.models.prometheus import Dataquery

from longshore.boundary import DISK_PAGE
from longshore.cache import DropReason, MissReason
from longshore.cache.types import Answer
from longshore.monitoring import board, page, rules
from longshore.monitoring.metric_names import METRICS, VALUES, MetricKind
from longshore.runtime.tier_host import FAILURE_REASONS as OF_FILES
from longshore.tiers.arena import Arena, Fallback
from longshore.tiers.file import FileTier, capacity_for, gds
from longshore.tiers.remote import FAILURE_REASONS as OF_STORES

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("golden_metrics.txt")
NAME = re.compile(r"\blongshore_[a-z_]+")


def exported() -> set[str]:
    """Every name that Prometheus sees."""
    ends = {
        MetricKind.COUNTER: ("_total",),
        MetricKind.GAUGE: ("",),
        MetricKind.HISTOGRAM: ("_bucket", "_sum", "_count"),
    }
    return {name + end for name, metric in METRICS.items() for end in ends[metric.kind]}


def panels() -> list[dict[str, Any]]:
    rows = json.loads(board.as_json())["panels"]
    return [*rows, *(inside for row in rows for inside in row.get("panels", ()))]


def test_names_and_labels_are_those_of_the_golden_list() -> None:
    # A change here breaks boards and alerts of users: list the old and the new name in CHANGELOG.md.
    found = [" ".join((each.kind.value, name, *each.labels)) for name, each in sorted(METRICS.items())]
    assert found == GOLDEN.read_text().splitlines()


def test_every_reason_has_a_meaning() -> None:
    for (metric, label), kind in {
        ("longshore_miss_chunks", "reason"): MissReason,
        ("longshore_dropped_chunks", "reason"): DropReason,
        ("longshore_probed_chunks", "answer"): Answer,
    }.items():
        assert list(VALUES[metric, label]) == [each.value for each in kind], metric  # type: ignore[attr-defined]
        assert label in METRICS[metric].labels


def test_every_reason_of_failures_and_fallbacks_has_a_meaning() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "src/longshore/transfer").rglob("*.py"))
    counted = re.findall(r'fallbacks\.count\("(\w+)"(?: if [^)]* else "(\w+)")?\)', source)
    assert {name for names in counted for name in names if name} == set(VALUES["longshore_device_fallbacks", "reason"])
    assert list(VALUES["longshore_file_failures", "reason"]) == list(OF_FILES)
    assert list(VALUES["longshore_store_failures", "reason"]) == [*OF_STORES, "tier_host"]
    assert list(VALUES["longshore_arena_fallbacks", "reason"]) == [each.value for each in Fallback]
    for name in (name for name, metric in METRICS.items() if "reason" in metric.labels):
        assert VALUES[name, "reason"], name


def test_every_fallback_of_files_has_a_meaning(tmp_path: Path) -> None:
    given = {"capacity": capacity_for(2, DISK_PAGE), "image_bytes": DISK_PAGE, "scope": bytes(32), "threads": 1}
    with closing(Arena(DISK_PAGE)) as arena, closing(FileTier(tmp_path, arena=arena, **given)) as tier:
        assert list(VALUES["longshore_file_fallbacks", "reason"]) == [*tier.fallbacks, *gds.REASONS]


@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("docs/metrics.md", page.as_markdown),
        ("deploy/grafana-board.json", board.as_json),
        ("deploy/prometheus-rules.yml", rules.as_yaml),
    ],
)
def test_files_made_from_the_table_are_not_stale(path: str, made: Any) -> None:
    assert (ROOT / path).read_text() == made(), f"run `make monitoring-files`: {path} is stale"


def test_board_and_rules_ask_for_metrics_that_exist() -> None:
    asked = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    assert len(asked) > len(METRICS)
    for expression in [*asked, *(rule.expression for rule in rules.RULES)]:
        names = set(NAME.findall(expression))
        assert names and names <= exported(), expression
    assert {name for each in asked for name in NAME.findall(each)} == {
        name for name in exported() if not name.endswith(("_sum", "_count"))
    }


def test_board_groups_by_labels_that_its_metrics_have() -> None:
    labels, seen = {name: {"le", "instance", *METRICS[name].labels} for name in METRICS}, 0
    for panel in panels():
        for target in panel.get("targets", ()):
            for by, name in re.findall(r"by \(([^)]*)\) .*?(longshore_[a-z_]+)", target["expr"]):
                assert set(by.split(", ")) <= labels[re.sub("_(total|bucket)$", "", name)], target["expr"]
                seen += 1
    assert seen > len(METRICS)


def test_board_is_of_the_types_of_grafana() -> None:
    plugins.register_default_plugins()
    given = json.loads(board.as_json())
    parsed = Dashboard.from_json(given)
    assert list(changed(given, json.loads(JSONEncoder(sort_keys=True).encode(parsed)))) == []
    inside = [each for row in parsed.panels or () for each in (getattr(row, "panels", None) or [row])]
    series = [each for each in inside if each.type_val != "row"]
    assert len(series) > len(METRICS)
    assert all(isinstance(each, Panel) for each in series)
    assert all(isinstance(target, Dataquery) for each in series for target in each.targets or ())
    numbers = [panel["id"] for panel in panels()]
    assert len(numbers) == len(set(numbers))


def changed(given: Any, back: Any, path: str = "") -> Iterator[str]:
    """Fields that Grafana's types lack, or read as something else."""
    if isinstance(given, dict) and isinstance(back, dict):
        for key, value in given.items():
            yield from changed(value, back[key], f"{path}/{key}") if key in back else (f"{path}/{key}",)
    elif isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        for at, pair in enumerate(zip(given, back, strict=True)):
            yield from changed(*pair, path=f"{path}[{at}]")
    elif given != back:
        yield f"{path}: {given!r} became {back!r}"


def test_a_field_that_grafana_lacks_is_noticed() -> None:
    plugins.register_default_plugins()
    given = {"title": "x", "refreshh": "30s"}
    back = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))
    assert list(changed(given, back)) == ["/refreshh"]
