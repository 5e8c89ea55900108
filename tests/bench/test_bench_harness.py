"""What a benchmark says and refuses; never how fast anything is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.bench import Case, Report, compare, machine_facts
from longshore.bench.files import KINDS
from longshore.bench.harness import (
    Seconds,
    check_direct,
    check_disk,
    chosen,
    duration,
    file_system_of,
    loops_within,
    rate,
    timed,
)
from longshore.cli.app import app
from longshore.errors import BenchError

CASE_KEYS = ["name", "value", "unit", "reference", "reference_value", "ratio"]


def test_sides_take_turns_and_medians_are_reported() -> None:
    order: list[str] = []

    def side(name: str, seconds: Iterator[float]) -> float:
        order.append(name)
        return next(seconds)

    ours, reference = iter([99.0, 1.0, 5.0, 2.0]), iter([99.0, 10.0, 30.0, 20.0])
    taken = compare(lambda: side("ours", ours), lambda: side("reference", reference), repeats=3)
    assert taken == Seconds(2.0, 20.0)
    assert order == ["reference", "ours", "ours", "reference", "reference", "ours", "ours", "reference"]


def test_no_repeat_is_refused() -> None:
    with pytest.raises(BenchError, match="at least one repeat, got 0"):
        compare(lambda: 1.0, lambda: 1.0, repeats=0)


def test_a_timed_call_runs_as_often_as_told() -> None:
    calls: list[int] = []
    assert timed(lambda: calls.append(1), loops=5)() >= 0
    assert len(calls) == 5


def test_unequal_sides_run_equally_long_and_at_least_once() -> None:
    assert loops_within(lambda: time.sleep(0.002), seconds=1e-3) == 1
    assert loops_within(lambda: None, seconds=1.0) > 1


def test_ratios_are_better_when_higher() -> None:
    faster = duration("plan/1", Seconds(2.0, 8.0), "loop")
    assert faster == Case("plan/1", 2e6, "us", "loop", 8e6, 4.0)
    slower = rate("read/1", Seconds(2.0, 1.0), "plain", 4 * 10**9)
    assert slower == Case("read/1", 2.0, "GB/s", "plain", 4.0, 0.5)


def test_a_report_has_exactly_these_keys() -> None:
    report = Report({"cpu": "x"}, (Case("a", 1.0, "us", "r", 2.0, 2.0),)).as_json()
    assert list(report) == ["machine", "cases"]
    assert [list(case) for case in report["cases"]] == [CASE_KEYS]  # type: ignore[attr-defined]


def test_the_machine_is_described() -> None:
    facts = machine_facts()
    assert {"cpu", "cores", "memory", "kernel", "python", "numpy"} <= set(facts)
    json.dumps(facts)


def test_cases_are_chosen_by_name() -> None:
    assert chosen(["a", "b", "c"], []) == ["a", "b", "c"]
    assert chosen(["a", "b", "c"], ["c", "a"]) == ["a", "c"]
    with pytest.raises(BenchError, match="no case d; there are a, b"):
        chosen(["a", "b"], ["d"])


class TestDisks:
    def test_file_system_type_is_that_of_its_mount_point(self, tmp_path: Path) -> None:
        inside = tmp_path / "my disk"
        inside.mkdir()
        mounts = tmp_path / "mounts"
        root = Path(inside.anchor)
        other = "none /nowhere nfs rw 0 0\n"
        escaped = str(inside).replace(" ", "\\040")
        mounts.write_text(f"{other}none {root} oldfs rw 0 0\nnone {escaped} newfs rw 0 0\n")
        assert file_system_of(inside, mounts) == "newfs"
        mounts.write_text(other)
        assert file_system_of(inside, mounts) == "unknown"

    @pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
    def test_a_ram_disk_is_refused_unless_asked_for_and_marked(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("longshore.bench.harness.file_system_of", lambda path: kind)
        with pytest.raises(BenchError, match=f"RAM disk \\({kind}\\)"):
            check_disk(tmp_path, allow_ram_disk=False)
        assert check_disk(tmp_path, allow_ram_disk=True) == {"file_system": kind, "ram_disk": True}

    def test_a_disk_is_named_and_not_marked(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("longshore.bench.harness.file_system_of", lambda path: "ext4")
        assert check_disk(tmp_path, allow_ram_disk=False) == {"file_system": "ext4"}

    def test_the_page_cache_is_refused_unless_asked_for_and_marked(self, tmp_path: Path) -> None:
        with pytest.raises(BenchError, match="no direct I/O"):
            check_direct(tmp_path, direct=False, allow_page_cache=False)
        assert check_direct(tmp_path, direct=False, allow_page_cache=True) == {"page_cache": True}
        assert check_direct(tmp_path, direct=True, allow_page_cache=False) == {}


class TestCommands:
    def test_json_has_machine_cases_provenance_and_nothing_else(self) -> None:
        result = CliRunner().invoke(app, ["bench", "plan", "--json", "--repeats", "1", "--case", "plan/1000/4"])
        assert result.exit_code == 0
        printed = json.loads(result.stdout)
        assert sorted(printed) == ["cases", "machine", "provenance"]
        (case,) = printed["cases"]
        assert list(case) == CASE_KEYS
        assert (case["name"], case["unit"]) == ("plan/1000/4", "us")
        assert case["ratio"] == pytest.approx(case["reference_value"] / case["value"])

    def test_a_table_without_json(self) -> None:
        result = CliRunner().invoke(app, ["bench", "plan", "--repeats", "1", "--case", "plan/1000/1"])
        assert result.exit_code == 0
        assert "plan/1000/1" in result.stdout

    def test_copies(self) -> None:
        arguments = ["bench", "copy", "--device", "cpu", "--json", "--bytes", "2MiB", "--repeats", "1"]
        result = CliRunner().invoke(app, [*arguments, "--case", "onboard/16KiB", "--case", "offload/64KiB"])
        assert result.exit_code == 0
        printed = json.loads(result.stdout)
        assert [(case["name"], case["unit"]) for case in printed["cases"]] == [
            ("onboard/16KiB", "GB/s"),
            ("offload/64KiB", "GB/s"),
        ]
        assert printed["machine"]["device"] == "cpu"

    def test_files_are_gone_afterwards(self, tmp_path: Path) -> None:
        flags = ["--allow-ram-disk", "--allow-page-cache", "--json", "--bytes", "1MiB", "--repeats", "1"]
        result = CliRunner().invoke(app, ["bench", "file", "--dir", str(tmp_path), *flags])
        assert result.exit_code == 0
        printed = json.loads(result.stdout.splitlines()[-1])
        names = [case["name"] for case in printed["cases"]]
        assert names == [f"{kind}/256KiB" for kind in KINDS]
        assert "file_system" in printed["machine"]
        assert list(tmp_path.iterdir()) == []

    def test_a_ram_disk_ends_with_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("longshore.bench.harness.file_system_of", lambda path: "tmpfs")
        result = CliRunner().invoke(app, ["bench", "file", "--dir", str(tmp_path)])
        assert isinstance(result.exception, BenchError)
        assert list(tmp_path.iterdir()) == []
