"""What no caller should give, and no machine should be like: typed errors, and work that goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from longshore.config import Config
from longshore.errors import ConfigError, TierError
from longshore.testing import TierHarness
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier
from longshore.tiers.file import format as fmt
from longshore.tiers.file.fsck import Fsck

Opener = Callable[..., FileTier]


@pytest.mark.parametrize(("now", "written"), [(-1e9, 0), (2.0**33, 2**32 - 1), (float(2**31), 2**31)])
def test_records_are_written_whatever_the_clock_says(
    harness: TierHarness, directory: Path, monkeypatch: pytest.MonkeyPatch, now: float, written: int
) -> None:
    monkeypatch.setattr(time, "time", lambda: now)
    harness.store(0, 0)
    harness.reopen()
    harness.assert_serves(0, 0)
    harness.tier.close()
    with Fsck(directory) as fsck:
        entries = fsck.entries()
        assert entries["written_at"].tolist() == [written]


@pytest.mark.parametrize("epoch", [0, 2**63, 2**64 - 1])
def test_a_forged_epoch_is_an_index_that_cannot_be_used(harness: TierHarness, directory: Path, epoch: int) -> None:
    harness.store(0, 0)
    harness.tier.close()
    for file in (0, 1):
        header, body = fmt.pack_checkpoint(epoch, np.zeros(0, fmt.ENTRY), 0)
        (directory / f"index.{file}").write_bytes(header + body)
        (directory / f"journal.{file}").write_bytes(fmt.pack_journal_header(epoch))
    for _ in range(2):
        harness.reopen()
        harness.assert_serves(0, 0)
        assert len(harness.tier.recover()) == 1
        harness.tier.close()


def test_a_lost_index_is_made_from_headers_without_threads(
    harness: TierHarness, opener: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.store(0, 0)
    harness.tier.close()
    for name in ("index.0", "index.1"):
        (directory / name).write_bytes(bytes(DISK_PAGE))
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if not thread.name.startswith("longshore"):
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    harness.tier = opener()
    assert refused
    assert [chunk.slot for chunk in harness.tier.recover()] == [0]
    harness.assert_serves(0, 0)


@pytest.mark.parametrize("name", ["a\0b", "n" * 300])
def test_a_directory_that_cannot_be_named_is_refused(opener: Opener, tmp_path: Path, name: str) -> None:
    with pytest.raises(TierError, match=r"cannot be used: .*(null byte|too long)"):
        opener(kind=lambda directory, **rest: FileTier(tmp_path / name, **rest))  # type: ignore[arg-type]
    with pytest.raises(TierError, match=r"does not exist|cannot be used"):
        Fsck(tmp_path / name)
    config = Config.make(host_size="1MiB", file_path=tmp_path / name, file_size="1MiB")
    if "\0" not in name:
        with pytest.raises(ConfigError, match="too long"):
            config.check_machine()


@pytest.mark.parametrize("generation", [1.5, "1", None, 2**64, -1])
def test_a_generation_that_cannot_be_is_refused(harness: TierHarness, generation: int) -> None:
    with pytest.raises(TierError, match="generation"):
        harness.tier.reset(generation)
    assert harness.tier.generation == 0


@pytest.mark.parametrize("field", ["slot", "offset", "length", "generation", "size_class"])
@pytest.mark.parametrize("number", [0.5, 1.0, "1", None])
def test_numbers_that_are_not_whole_are_refused(harness: TierHarness, field: str, number: object) -> None:
    op = harness.op(Op.READ, 0, 0)
    with pytest.raises(
        TierError, match=f"operation 1 of 2: expected an? {field.replace('_', ' ')} to be a whole number"
    ):
        harness.tier.submit([op, op._replace(**{field: number})], 1e18)
    with pytest.raises(TierError, match="expected a slot to be a whole number"):
        harness.tier.delete_records([number])  # type: ignore[list-item]
    harness.store(0, 0)
