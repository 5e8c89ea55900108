"""Alert rules as Prometheus evaluates them: `promtool` runs unit tests of each, Prometheus one against a real engine.

`make monitoring` installs Prometheus and runs these tests; elsewhere they are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longshore.boundary import Route
from longshore.cache import TieredCache, TierSpec
from longshore.metrics import LongshoreCollector, serve_metrics
from longshore.monitoring.rules import RULES, as_yaml
from longshore.runtime import Runtime
from longshore.testing.local_server import free_port
from scripted import Scripted

PROMETHEUS = "LONGSHORE_PROMETHEUS" in os.environ
if PROMETHEUS and not all(map(shutil.which, ("prometheus", "promtool"))):
    raise RuntimeError("LONGSHORE_PROMETHEUS is set, but prometheus or promtool is not on the PATH")
pytestmark = pytest.mark.skipif(not PROMETHEUS, reason="alert rules NOT tested: run make monitoring")


class Case(NamedTuple):
    """Series by the minute, in promtool's notation, that fire an alert at `at` with `labels`; `calm` do not."""

    series: dict[str, str]
    labels: dict[str, str]
    calm: dict[str, str]
    at: str = "2h"


def histogram(name: str, labels: str, values: dict[str, str]) -> dict[str, str]:
    return {f'{name}_bucket{{instance="a",{labels},le="{le}"}}': series for le, series in values.items()}


FLAT, GROWING = "0x180", "0+60x180"
MISS, HIT = (
    'longshore_miss_chunks_total{instance="a",reason="%s"}',
    'longshore_hit_chunks_total{instance="a",tier="host"}',
)
OFF = 'longshore_file_failures_total{instance="a",reason="off"}'
ERRORS = 'longshore_file_failures_total{instance="a",reason="stalled"}'
LOST = 'longshore_lost_chunks_total{instance="a",tier="file"}'
STORE = 'longshore_store_failures_total{instance="a",tier="remote",reason="timeout"}'
DROPPED = 'longshore_dropped_chunks_total{instance="a",tier="file",reason="%s"}'
AVAILABLE, FAULTS = (
    'longshore_tier_available{instance="a",tier="file"}',
    'longshore_control_plane_faults_total{instance="a"}',
)
INTERNAL = 'longshore_internal_errors_total{instance="a"}'
EVENTS = 'longshore_events_off{instance="a"}'
LOADS = ("longshore_load_seconds", 'tier="file"')
AGES = ("longshore_evicted_age_seconds", 'tier="host"')
A, FILE = {"instance": "a"}, {"instance": "a", "tier": "file"}

CASES = {
    "LongshoreControlPlaneFailed": Case({FAULTS: "1x180"}, A, {FAULTS: FLAT}),
    "LongshoreInternalErrors": Case({INTERNAL: "0x110 1x70"}, A, {INTERNAL: "1x180"}),
    "LongshoreDeviceErrors": Case(
        {MISS % "device_error": "0x100 4+4x80"},
        A | {"reason": "device_error"},
        {MISS % "device_error": "0x117 4x70", MISS % "io_error": "0x100 4+4x80"},
    ),
    "LongshoreTierUnavailable": Case({AVAILABLE: "1x110 0x70"}, FILE, {AVAILABLE: "1x117 0x70"}),
    "LongshoreFileTierDisabled": Case({OFF: "1x180"}, A | {"reason": "off"}, {OFF: FLAT, ERRORS: "1x180"}),
    "LongshoreFileErrors": Case(
        {ERRORS: "0x110 1x70"}, A | {"reason": "stalled"}, {ERRORS: "1x180", OFF: "0x110 1x70"}
    ),
    "LongshoreDamagedChunks": Case({LOST: "0x100 2x80"}, FILE, {LOST: "2x180"}),
    "LongshoreStoreFailing": Case({STORE: GROWING}, {"instance": "a", "tier": "remote"}, {STORE: "0+1x180"}),
    "LongshoreLoadsTimeOut": Case(
        {MISS % "deadline": "0+6x180", HIT: GROWING},
        A,
        {MISS % "deadline": "0+2x180", MISS % "absent": GROWING, HIT: GROWING},
    ),
    "LongshoreLoadsSlow": Case(
        histogram(*LOADS, {"1.0": FLAT, "2.5": FLAT, "5.0": GROWING, "+Inf": GROWING}),
        FILE,
        histogram(*LOADS, {"1.0": GROWING, "2.5": GROWING, "5.0": GROWING, "+Inf": GROWING}),
    ),
    "LongshoreWritesDropped": Case(
        {DROPPED % "backpressure": "0+120x180"},
        FILE,
        {DROPPED % "admission": "0+120x180", DROPPED % "backpressure": "0+6x180"},
    ),
    "LongshoreTierTooSmall": Case(
        histogram(*AGES, {"15.0": GROWING, "60.0": GROWING, "+Inf": GROWING}),
        {"instance": "a", "tier": "host"},
        histogram(*AGES, {"15.0": FLAT, "60.0": FLAT, "300.0": GROWING, "+Inf": GROWING}),
    ),
    "LongshoreHitRatioDropped": Case(
        {HIT: "0+600x1400 840000x100", MISS % "absent": "0+120x1500"},
        A,
        {HIT: "0+600x1500", MISS % "absent": "0+120x1500"},
        "1480m",
    ),
    "LongshoreEventsStopped": Case({EVENTS: "1x180"}, A, {EVENTS: FLAT}),
}


def unit_test(series: dict[str, str], at: str, name: str, labels: dict[str, str] | None) -> dict[str, Any]:
    """A test of promtool: `name` fires with `labels` at `at`, or, if there are none, does not."""
    rule = next(rule for rule in RULES if rule.name == name)
    expected = []
    if labels is not None:
        text = re.sub(r"{{ \$labels\.(\w+) }}", lambda match: labels[match[1]], rule.summary)
        annotations = {"summary": text, "runbook": rule.runbook}
        expected = [{"exp_labels": labels | {"severity": rule.severity}, "exp_annotations": annotations}]
    return {
        "interval": "1m",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "alert_rule_test": [{"eval_time": at, "alertname": name, "exp_alerts": expected}],
    }


def promtool(folder: Path, tests: list[dict[str, Any]]) -> subprocess.CompletedProcess[str]:
    (folder / "rules.yml").write_text(as_yaml())
    (folder / "tests.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": tests}))
    return subprocess.run(
        ["promtool", "test", "rules", "tests.yml"], cwd=folder, capture_output=True, text=True, check=False
    )


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.name for rule in RULES]


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_only_when_it_should(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    tests = [unit_test(case.series, case.at, name, case.labels), unit_test(case.calm, case.at, name, None)]
    done = promtool(tmp_path, tests)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_notices_an_alert_that_does_not_fire(tmp_path: Path) -> None:
    case = CASES["LongshoreEventsStopped"]
    assert promtool(tmp_path, [unit_test(case.calm, "2h", "LongshoreEventsStopped", A)]).returncode == 1


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(as_yaml())
    done = subprocess.run(
        ["promtool", "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(RULES)} rules found" in done.stdout + done.stderr


def test_prometheus_scrapes_an_engine_and_fires_an_alert(tmp_path: Path) -> None:
    runtime = Runtime(TieredCache([TierSpec("host", 4, 4096)]), [Scripted(Route("device", "host"))])
    port = free_port()
    (tmp_path / "rules.yml").write_text(as_yaml())
    with serve_metrics(LongshoreCollector(runtime), "127.0.0.1:0") as server:
        jobs = [{"job_name": "longshore", "static_configs": [{"targets": [server.address]}]}]
        every = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
        configuration = {"global": every, "rule_files": ["rules.yml"], "scrape_configs": jobs}
        (tmp_path / "prometheus.yml").write_text(json.dumps(configuration))
        flags = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        with (tmp_path / "log").open("wb") as log:
            running = subprocess.Popen(
                ["prometheus", "--config.file=prometheus.yml", *flags], cwd=tmp_path, stdout=log, stderr=log
            )
        try:
            ask(port, 'query?query=longshore_tier_available{tier="host"}==1', running, lambda found: found["result"])
            runtime.fail(RuntimeError("broken for a test"))
            # A group is evaluated rule by rule, so the first alert that is seen may be another one.
            ask(port, "alerts", running, lambda found: "LongshoreControlPlaneFailed" in alert_names(found))
            health = rule_health(ask(port, "rules", running, lambda found: "unknown" not in rule_health(found)))
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait()
    assert health == {"ok"}


def alert_names(found: Any) -> set[str]:
    return {alert["labels"]["alertname"] for alert in found["alerts"]}


def rule_health(found: Any) -> set[str]:
    """The health of every rule; `unknown` is that of a rule not evaluated yet, and of all before any is loaded."""
    return {rule["health"] for group in found["groups"] for rule in group["rules"]} or {"unknown"}


def ask(port: int, what: str, running: subprocess.Popen[bytes], there: Any) -> Any:
    """Prometheus' answer, once it has what is asked for; an error if it has ended, or has not had it for minutes."""
    deadline = time.monotonic() + 300
    url = f"http://127.0.0.1:{port}/api/v1/{what.replace('{', '%7B').replace('}', '%7D').replace(chr(34), '%22')}"
    while running.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                found = json.load(answer)["data"]
        except OSError:
            found = None
        if found is not None and there(found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"prometheus has ended ({running.poll()}), or never answered as expected: {what}")
