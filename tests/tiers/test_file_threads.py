"""A system without a thread to spare: a typed error at start, a later checkpoint, and never a wait without end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from longshore.errors import TierError
from longshore.testing import TierHarness
from longshore.tiers.file import FileTier, recovery
from longshore.tiers.file.index import journal_records_for
from mappings import open_files
from plain_io import PlainIo

Refuse = Callable[[str], list[str]]


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Refuse:
    """From now on, threads whose name ends so cannot be started; the list of those that were asked for."""
    start = threading.Thread.start

    def refuse(ending: str) -> list[str]:
        refused: list[str] = []

        def refusing(thread: threading.Thread) -> None:
            if thread.name.endswith(ending):
                refused.append(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refusing)
        return refused

    return refuse


def test_open_fails_with_too_few_threads_and_leaves_none(opener: Callable[..., FileTier], refuse: Refuse) -> None:
    opener().close()
    before = set(threading.enumerate())
    assert refuse("file-2") == []
    with pytest.raises(TierError, match="cannot start thread 3 of 4: can't start new thread"):
        opener(threads=4, io=PlainIo())
    assert set(threading.enumerate()) == before


@pytest.mark.usefixtures("on_ext4")
def test_nor_is_one_that_gets_no_thread_for_its_queue(opener: Callable[..., FileTier], refuse: Refuse) -> None:
    opener().close()
    before = set(threading.enumerate()), open_files()
    assert refuse("file-queue") == []
    with pytest.raises(TierError, match="cannot start thread: can't start new thread"):
        opener(threads=4)
    assert (set(threading.enumerate()), open_files()) == before


@pytest.mark.usefixtures("on_ext4")
def test_one_thread_does_it_where_the_system_has_a_queue(opener: Callable[..., FileTier]) -> None:
    before = set(threading.enumerate())
    tier = opener(threads=4)
    assert len(set(threading.enumerate()) - before) == 1
    tier.close()
    assert set(threading.enumerate()) == before


def test_headers_are_read_by_no_more_threads_than_slabs(
    opener: Callable[..., FileTier], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    pool = recovery.ThreadPoolExecutor
    monkeypatch.setattr(recovery, "ThreadPoolExecutor", lambda workers: asked.append(workers) or pool(workers))
    for slots in (2, 40):
        tier = opener(slots=slots)
        tier.close()
        for name in ("index.0", "index.1"):
            (directory / name).unlink()
        opener(slots=slots).close()
        assert asked[-1] == min(tier.slabs.slabs, 16)


def test_checkpoint_without_a_thread_is_counted_and_delays_nothing(
    harness: TierHarness, refuse: Refuse, directory: Path
) -> None:
    tier = cast(FileTier, harness.tier)
    refused = refuse("-index")
    for number in range(journal_records_for(tier.slabs.slabs)):
        harness.store(number % 2, number)
    assert len(refused) == 1, "tried again at once"
    assert tier.failures["checkpoint"] == 1
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive(), "close waits for a checkpoint that nobody makes"
    harness.reopen()
    harness.assert_serves(0, number - 1)
    harness.assert_serves(1, number)
