"""`longshore fsck` and `longshore inspect`: what they say, and how they exit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.errors import TierError, TierInUseError
from longshore.testing import TierHarness, TierTests, flip_header_bit, flip_image_bit
from longshore.testing.tier_harness import key, span
from longshore.tiers.arena import Arena
from longshore.tiers.file import FileTier, capacity_for

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


def opened(directory: Path, arena: Arena) -> FileTier:
    return FileTier(
        directory, capacity=capacity_for(SLOTS, IMAGE), image_bytes=IMAGE, arena=arena, scope=bytes(range(32))
    )


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
    assert "their slots are empty now" in done.stdout
    facts = told("fsck", damaged)
    assert (facts["slots"]["whole"], facts["slots"]["empty"], facts["damaged"]) == (3, SLOTS - 3, [])


def test_what_is_repaired_is_counted_in_json(damaged: Path) -> None:
    facts = told("fsck", damaged, "--repair")
    assert facts["repaired"] == len(facts["damaged"]) == 2


def test_long_lists_are_cut_and_say_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.cli.files._SHOWN", 1)
    for slot in range(3):
        flip_header_bit(directory, slot, 5)
    assert "and 2 more: --json lists all" in run("fsck", directory).stdout


def test_a_segment_that_ends_early_is_damage(directory: Path) -> None:
    with (directory / "segment").open("r+b") as file:
        file.truncate(6 * (4096 + IMAGE))
    done = run("fsck", directory, "--repair")
    assert done.exit_code == 1
    assert "ends 2 slabs early" in done.stdout


def test_an_index_that_cannot_be_used_is_said(directory: Path) -> None:
    assert told("fsck", directory)["index"] is True
    for name in ("index.0", "index.1"):
        (directory / name).write_bytes(b"")
    assert told("fsck", directory)["index"] is False
    done = run("fsck", directory)
    assert done.exit_code == 0  # no record is lost by that
    assert "the next start reads all headers" in done.stdout


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
        assert isinstance(done.exception, TierInUseError)
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
