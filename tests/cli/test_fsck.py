"""`longshore fsck` and `longshore inspect`: what they say, and how they exit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.errors import ConfigError, TierError, TierInUseError
from longshore.testing import TierHarness, TierTests, flip_header_bit, flip_image_bit
from longshore.testing.tier_harness import key, span
from longshore.tiers.arena import Arena
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.file.directory import COPIES

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tier with whole records in slots 0 to 4."""
    directory = tmp_path / "tier"
    with_arena = Arena(32 * span(IMAGE))
    harness = TierHarness(lambda: opened(directory, with_arena), with_arena)
    for slot in range(5):
        harness.store(slot, slot)
    harness.assert_serves(3, 3)
    harness.tier.close()
    with_arena.close()
    return directory


def opened(directory: Path, arena: Arena, scope: bytes = bytes(range(32))) -> FileTier:
    return FileTier(directory, capacity=capacity_for(SLOTS, IMAGE), image_bytes=IMAGE, arena=arena, scope=scope)


@contextmanager
def opened_harness(directory: Path, scope: bytes = bytes(range(32))) -> Iterator[TierHarness]:
    arena = Arena(32 * span(IMAGE))
    harness = TierHarness(lambda: opened(directory, arena, scope), arena)
    yield harness
    harness.tier.close()
    arena.close()


@pytest.fixture
def damaged(directory: Path) -> Path:
    flip_header_bit(directory, 1, 77)
    flip_image_bit(directory, 2, 12345)
    return directory


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def told(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_a_sound_directory(directory: Path) -> None:
    done = run("fsck", directory)
    assert done.exit_code == 0
    assert "no damage" in done.stdout
    facts = told("fsck", directory)
    assert facts["slots"]["whole"] == 5
    assert facts["slots"]["empty"] == SLOTS - 5
    assert (facts["damaged"], facts["missing"], facts["repaired"]) == ([], 0, 0)


def test_directories_with_brackets_are_named_as_they_are(directory: Path) -> None:
    moved = directory.parent / "a[" / "b]"
    moved.parent.mkdir()
    directory.rename(moved)
    for arguments in (("fsck", moved), ("gc", moved)):
        done = run(*arguments)
        assert (done.exit_code, str(moved) in done.stdout) == (0, True)


def test_damage_is_said_slot_by_slot_and_left_alone(damaged: Path) -> None:
    before = (damaged / "segment").read_bytes()
    done = run("fsck", damaged)
    assert done.exit_code == 1
    assert "2 damaged records" in done.stdout
    assert "slot 1: corrupt header" in done.stdout
    assert f"slot 2: corrupt image  key {key(2).hex()[:16]}" in done.stdout
    assert (damaged / "segment").read_bytes() == before
    assert told("fsck", damaged)["damaged"] == [
        {"slot": 1, "condition": "corrupt header", "key": None},
        {"slot": 2, "condition": "corrupt image", "key": key(2).hex()},
    ]


def test_repair_empties_the_slots(damaged: Path) -> None:
    done = run("fsck", damaged, "--repair")
    assert done.exit_code == 0
    assert "their slots were emptied" in done.stdout
    facts = told("fsck", damaged)
    assert (facts["slots"]["whole"], facts["slots"]["empty"], facts["damaged"]) == (3, SLOTS - 3, [])


def test_what_is_repaired_is_counted_in_json(damaged: Path) -> None:
    facts = told("fsck", damaged, "--repair")
    assert facts["repaired"] == len(facts["damaged"]) == 2


def test_long_lists_are_cut_and_say_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.cli.files._SHOWN", 1)
    for slot in range(3):
        flip_header_bit(directory, slot, 5)
    assert "and 2 more; --json lists all" in run("fsck", directory).stdout


def test_a_segment_that_ends_early_is_damage(directory: Path) -> None:
    with (directory / "segment").open("r+b") as file:
        file.truncate(6 * (4096 + IMAGE))
    done = run("fsck", directory, "--repair")
    assert done.exit_code == 1
    assert "the segment file is 2 slabs short" in done.stdout


def test_an_index_that_cannot_be_used_is_said(directory: Path) -> None:
    assert told("fsck", directory)["index"] is True
    for name in ("index.0", "index.1"):
        (directory / name).write_bytes(b"")
    assert told("fsck", directory)["index"] is False
    done = run("fsck", directory)
    assert done.exit_code == 1
    assert "the next start reads all record headers" in done.stdout
    assert "no damaged record; the damage to superblock or index costs no record" in " ".join(done.stdout.split())
    assert told("fsck", directory)["slots"]["whole"] == 5
    repaired = run("fsck", directory, "--repair")
    assert repaired.exit_code == 0
    assert "rebuilt from 5 records" in repaired.stdout
    assert "no damage" in run("fsck", directory).stdout
    assert told("inspect", directory)["from_index"] is True


def test_duplicate_record_without_an_index_counts_once(directory: Path) -> None:
    with opened_harness(directory) as harness:
        harness.store(6, 0)  # the same key once more, elsewhere
        harness.tier.delete_records([0])
    for name in ("index.0", "index.1"):
        (directory / name).write_bytes(b"")
    facts = told("fsck", directory)
    assert (facts["slots"]["whole"], facts["slots"]["left_over"]) == (5, 1)
    assert told("inspect", directory)["records"] == 5
    run("fsck", directory, "--repair")
    with opened_harness(directory) as harness:
        assert sorted(chunk.slot for chunk in harness.tier.recover()) == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("name", COPIES)
def test_a_damaged_copy_of_the_superblock_is_said_and_repaired(directory: Path, name: str) -> None:
    page = bytearray((directory / name).read_bytes())
    page[30] ^= 4
    (directory / name).write_bytes(page)
    done = run("fsck", directory)
    assert done.exit_code == 1
    assert f"{name} is damaged: the other copy is used" in done.stdout
    assert (directory / name).read_bytes() == page
    assert told("fsck", directory)["superblocks"] == [name]
    assert told("inspect", directory)["damaged_superblocks"] == [name]
    said = CliRunner().invoke(app, ["inspect", str(directory)]).stdout
    assert f"{name}: the other copy is used; longshore fsck --repair rewrites it" in said
    done = run("fsck", directory, "--repair")
    assert done.exit_code == 0
    assert f"{name} is damaged: rewritten from the other copy" in done.stdout
    assert len({(directory / each).read_bytes() for each in COPIES}) == 1
    assert "no damage" in run("fsck", directory).stdout
    assert told("inspect", directory)["records"] == 5


def test_a_live_tier_is_inspected_and_not_changed(directory: Path) -> None:
    with opened_harness(directory) as harness:
        harness.store(6, 6)
        before = {path.name: path.read_bytes() for path in directory.iterdir()}
        facts = told("inspect", directory)
        assert (facts["live"], facts["records"], facts["full"]) == (True, 6, 6 / SLOTS)
        text = run("inspect", directory).stdout
        assert "75.0%" in text
        assert "by a live process" in text
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
        harness.assert_serves(6, 6)
    assert told("inspect", directory)["live"] is False


def test_a_live_tier_of_another_process_is_inspected(directory: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from longshore.tiers.arena import Arena\n"
        "from longshore.tiers.file import FileTier\n"
        f"tier = FileTier(Path({str(directory)!r}), capacity={capacity_for(SLOTS, IMAGE)}, image_bytes={IMAGE}, "
        "arena=Arena(4096), scope=bytes(range(32)))\n"
        "print('open', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout.readline() == b"open\n"
            facts = told("inspect", directory)
            assert (facts["live"], facts["records"]) == (True, 5)
            assert isinstance(run("fsck", directory).exception, TierInUseError)
            (row,) = told("gc", directory, "--all-but-current", "--older-than", "0h", "--yes")
            assert (row["in_use"], row["records"]) == (True, 5)
            assert run("gc", directory, "--remove", bytes(range(32)).hex(), "--yes").exit_code == 1
            assert told("inspect", directory)["records"] == 5
        finally:
            process.kill()


def scope_of(number: int) -> bytes:
    return bytes([number]) * 32


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A tier with a record of each of three scopes, the last of them current."""
    for number in range(3):
        with opened_harness(tmp_path / "kv" / "rank0", scope_of(number)) as harness:
            harness.store(number, number)
    return tmp_path / "kv"


class TestGc:
    def test_lists_scopes_and_removes_nothing(self, shared: Path) -> None:
        rows = told("gc", shared)
        assert [(row["records"], row["bytes"], row["in_use"], row["fate"]) for row in rows] == [
            (1, IMAGE, False, "kept")
        ] * 3
        assert {row["scope"] for row in rows} == {scope_of(number).hex() for number in range(3)}
        assert all(0 <= row["age"] < 3600 for row in rows)
        assert scope_of(1).hex()[:16] in run("gc", shared).stdout

    @pytest.mark.parametrize(
        ("options", "left"),
        [
            (["--all-but-current"], {2}),
            (["--remove", scope_of(1).hex()], {0, 2}),
            (["--remove", scope_of(1).hex()[:8], "--remove", scope_of(2).hex()], {0}),
            (["--older-than", "1d"], {0, 1, 2}),
        ],
    )
    def test_removes_what_it_is_told_to_with_yes_alone(self, shared: Path, options: list[str], left: set[int]) -> None:
        doomed = 3 - len(left)
        assert sum(row["fate"] == "would be removed by --yes" for row in told("gc", shared, *options)) == doomed
        assert len(told("gc", shared)) == 3
        assert sum(row["fate"] == "removed" for row in told("gc", shared, *options, "--yes")) == doomed
        assert {row["scope"] for row in told("gc", shared)} == {scope_of(number).hex() for number in left}
        assert run("fsck", shared / "rank0").exit_code == 0
        for number in range(3):
            with opened_harness(shared / "rank0", scope_of(number)) as harness:
                assert len(harness.tier.recover()) == (number in left)
                if number in left:
                    harness.assert_serves(number, number)

    def test_a_scope_that_nobody_has_is_an_error(self, shared: Path) -> None:
        result = run("gc", shared, "--remove", "deadbeef", "--yes")
        assert "no such scope" in str(result.exception)
        assert len(told("gc", shared)) == 3

    def test_what_was_removed_does_not_come_back_without_an_index(self, shared: Path) -> None:
        run("gc", shared, "--all-but-current", "--yes")
        for name in ("index.0", "index.1"):
            (shared / "rank0" / name).write_bytes(b"")
        assert told("fsck", shared / "rank0")["slots"]["whole"] == 1

    def test_a_directory_of_which_nothing_is_left_is_removed(self, shared: Path) -> None:
        run("gc", shared / "rank0", *(f"--remove={scope_of(number).hex()}" for number in range(3)), "--yes")
        assert not (shared / "rank0").exists()

    def test_older_scopes_alone_go_by_age(self, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 40 * 86_400)
        with opened_harness(shared / "rank0", scope_of(1)) as harness:
            harness.store(5, 5)
        told("gc", shared, "--older-than", "30d", "--yes")
        assert [(row["scope"], row["records"]) for row in told("gc", shared)] == [(scope_of(1).hex(), 2)]

    def test_a_directory_without_an_index_is_not_touched(self, shared: Path) -> None:
        for name in ("index.0", "index.1"):
            (shared / "rank0" / name).write_bytes(b"")
        done = run("gc", shared, "--all-but-current", "--yes")
        assert done.exit_code == 1
        assert "the index is damaged" in done.stdout
        assert len(told("gc", shared)) == 3

    @pytest.mark.parametrize("options", [["--older-than", "soon"], ["--older-than", "-1d"], ["--remove", "dead"]])
    def test_options_that_cannot_be_are_refused(self, shared: Path, options: list[str]) -> None:
        assert isinstance(run("gc", shared, *options).exception, ConfigError)

    def test_help_teaches(self) -> None:
        assert "--all-but-current" in run("gc", "--help").stdout


def test_a_table_of_what_is_there(directory: Path) -> None:
    done = run("inspect", directory)
    assert done.exit_code == 0
    for words in ("8 of 20.0 KiB", "16.0 KiB", bytes(range(8)).hex(), "in the last hour", "the index"):
        assert words in done.stdout, words


def test_the_same_as_json(directory: Path) -> None:
    facts = told("inspect", directory)
    (scope,) = facts["scopes"]
    assert (facts["slabs"], facts["records"], facts["stale"], facts["from_index"]) == (SLOTS, 5, 0, True)
    assert (scope["scope"], scope["records"], scope["bytes"]) == (bytes(range(32)).hex(), 5, 5 * IMAGE)
    assert scope["reads"] == 1
    assert sum(age["records"] for age in facts["ages"]) == 5


@pytest.mark.parametrize("command", ["fsck", "inspect"])
class TestErrors:
    def test_no_such_directory(self, command: str, tmp_path: Path) -> None:
        done = run(command, tmp_path / "nowhere")
        assert isinstance(done.exception, TierError)
        assert "does not exist" in str(done.exception)
        assert not (tmp_path / "nowhere").exists()

    def test_not_a_tier(self, command: str, tmp_path: Path) -> None:
        done = run(command, tmp_path)
        assert "has no superblock" in str(done.exception)
        assert list(tmp_path.iterdir()) == []

    def test_in_use(self, command: str, directory: Path, arena: Arena) -> None:
        tier = opened(directory, arena)
        done = run(command, directory)
        assert isinstance(done.exception, TierInUseError) == (command == "fsck")
        tier.close()
        assert run(command, directory).exit_code == 0

    def test_help_teaches(self, command: str) -> None:
        text = run(command, "--help").stdout
        assert {"fsck": "Exit status", "inspect": "scope"}[command] in text


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(32 * span(IMAGE))
    yield arena
    arena.close()


def test_tables_are_not_cut_when_piped(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    below = directory.parent / ("a-long-name-" * 12)
    directory.rename(below)
    scope = bytes(range(32)).hex()[:16]
    lines = CliRunner().invoke(app, ["gc", str(below)]).output.splitlines()
    assert [line for line in lines if str(below) in line and scope in line and line.rstrip().endswith("kept")]


def test_gc_lists_the_other_tiers_where_one_cannot_be_read(directory: Path) -> None:
    broken = directory.parent / "broken"
    shutil.copytree(directory, broken)
    os.truncate(broken / "segment", 100)
    done = CliRunner().invoke(app, ["gc", str(directory.parent), "--json"])
    assert done.exit_code == 1
    assert [row["directory"] for row in json.loads(done.stdout)] == [str(directory)]
    assert "segment was cut to 100 bytes" in " ".join(done.stderr.split())
