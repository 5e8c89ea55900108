"""The note by which the processes of one engine find their memory: whose it is, and what is left of engines before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longshore.engines.vllm.model import ModelIdentity
from longshore.engines.vllm.rendezvous import (
    EngineMemory,
    memory_info_path,
    record_memory_info,
    remove_memory_info,
    wait_for_memory_info,
)
from longshore.errors import EngineError

ENGINE = "an engine"
HERE = EngineMemory(
    arena="/proc/self/fd/0",
    reports="/proc/self/fd/0",
    slab_bytes=8192,
    image_bytes=(4096, 8192),
    slabs=3,
    size_classes=(1, 0, 1),
    ranks=1,
    world=2,
    fingerprint="layout",
    device="cpu",
    model=ModelIdentity(groups=("a", "b", "c"), windows=(None, 16, 1)),
)
GONE = replace(HERE, arena="/proc/0/fd/0")


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where notes lie."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"longshore-{os.getuid()}"


def test_a_note_says_what_was_published_until_it_is_withdrawn(directory: Path) -> None:
    record_memory_info(ENGINE, HERE)
    assert wait_for_memory_info(ENGINE, timeout=0.0) == HERE
    assert [path.stat().st_mode & 0o777 for path in (directory, *directory.iterdir())] == [0o700, 0o600]
    with pytest.raises(EngineError, match="no worker of engine another"):
        wait_for_memory_info("another", timeout=0.0)
    remove_memory_info(ENGINE, HERE)
    assert list(directory.iterdir()) == []


def test_note_of_a_killed_engine_is_not_believed() -> None:
    record_memory_info(ENGINE, GONE)
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        record_memory_info(ENGINE, HERE)

    assert wait_for_memory_info(ENGINE, nap=nap) == HERE
    assert len(naps) == 1
    record_memory_info(ENGINE, GONE)
    with pytest.raises(EngineError, match="no worker of engine"):
        wait_for_memory_info(ENGINE, timeout=0.0)


def test_engines_of_one_id_that_start_together_have_files_apart(directory: Path) -> None:
    mine, others = os.getpid(), os.getppid()
    uni = replace(HERE, fingerprint="of this process", instance="1", writers=(mine, others))
    multi = replace(HERE, fingerprint="of another engine's child", instance="2", writers=(1, others))
    record_memory_info(ENGINE, uni)
    record_memory_info(ENGINE, multi)
    assert [wait_for_memory_info(ENGINE, instance) for instance in "12"] == [uni, multi], "ranks"
    assert wait_for_memory_info(ENGINE) == uni, "the scheduler"
    record_memory_info(ENGINE, replace(GONE, instance="killed"))
    remove_memory_info(ENGINE, uni)
    assert [path.name for path in directory.iterdir()] == [memory_info_path(ENGINE, "2").name]
    record_memory_info(ENGINE, replace(uni, writers=(1, others)))
    with pytest.raises(EngineError, match="2 engines with the engine_id an engine are starting"):
        wait_for_memory_info(ENGINE)


def link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.parent / "elsewhere")


def open_to_others(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def of_another_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, os.getuid() + 1, -1)


@pytest.mark.parametrize(
    "make",
    [
        link,
        open_to_others,
        pytest.param(of_another_user, marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.touch(mode=0o600),
    ],
)
def test_notes_lie_in_no_directory_that_others_can_write(directory: Path, make: Callable[[Path], object]) -> None:
    make(directory)
    with pytest.raises(EngineError, match="is not a directory of this user alone"):
        memory_info_path(ENGINE)
