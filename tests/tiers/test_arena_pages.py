"""Every page is there before the first use, made by several threads; what is not on huge pages is counted."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.tiers.arena import DISK_PAGE, Arena, ArenaSettings, Fallback
from longshore.tiers.arena.memory import (
    MADV_POPULATE_WRITE,
    System,
    bytes_coverable_by_huge_pages,
    huge_page_bytes,
    madvise,
    populate,
    touch_pages,
)
from mappings import mapped

MIB = 1 << 20
HUGE = 2 * MIB


class Advice:
    """Records each advice, then gives it, unless it is one of `refused`."""

    def __init__(self, *refused: int, then: Callable[[int, int, int], None] = madvise) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self._refused = refused
        self._then = then

    def __call__(self, address: int, nbytes: int, advice: int) -> None:
        self.calls.append((address, nbytes, advice))
        if advice in self._refused:
            raise OSError(errno.EINVAL, "Invalid argument")
        self._then(address, nbytes, advice)


# all pages


@given(nbytes=st.integers(1, 1 << 40), threads=st.integers(1, 4))
def test_the_ranges_cover_all_of_it_exactly(nbytes: int, threads: int) -> None:
    advice = Advice(then=lambda *_: None)
    nbytes = min(nbytes, 200 << 26)
    with mock.patch.object(os, "sched_getaffinity", lambda process: range(threads)):
        assert populate(System(madvise=advice), 1 << 20, nbytes)
    ranges = sorted((address, size) for address, size, _ in advice.calls)
    assert ranges[0][0] == 1 << 20
    assert all(size > 0 for _, size in ranges)
    ends = [address + size for address, size in ranges]
    assert ends[:-1] == [address for address, _ in ranges[1:]]
    assert ends[-1] == (1 << 20) + nbytes
    assert {kind for _, _, kind in advice.calls} == {MADV_POPULATE_WRITE}


def test_several_threads_are_at_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(3))
    together = threading.Barrier(3)

    def meet(address: int, nbytes: int, advice: int) -> None:
        together.wait(timeout=60)  # breaks, and raises, when fewer come

    assert populate(System(madvise=meet), 0, 3 << 26)


def test_kernel_without_populate_is_counted_and_pages_are_touched() -> None:
    nbytes = 130 * MIB + DISK_PAGE
    arena = Arena(nbytes, system=System(madvise=Advice(MADV_POPULATE_WRITE)))
    assert arena.report.fallbacks[Fallback.POPULATE] == 1
    assert mapped(arena.address)["Rss"] == nbytes
    arena.close()


def test_touching_writes_one_byte_of_each_page() -> None:
    array = np.ones(65 * MIB, dtype=np.uint8)
    touch_pages(array)
    pages = array.reshape(-1, DISK_PAGE)
    assert not pages[:, 0].any()
    assert pages[:, 1:].all()


def test_an_error_in_one_range_is_not_lost() -> None:
    def third_fails(address: int, nbytes: int, advice: int) -> None:
        if address == 2 << 26:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with pytest.raises(OSError, match="Cannot allocate"):
        populate(System(madvise=third_fails), 0, 5 << 26)


# huge pages


def test_huge_pages_are_asked_for_before_the_first_touch() -> None:
    advice = Advice()
    arena = Arena(5 * MIB, system=System(madvise=advice))
    assert advice.calls == [
        (arena.address, 5 * MIB, mmap.MADV_HUGEPAGE),
        (arena.address, 5 * MIB, MADV_POPULATE_WRITE),
    ]
    arena.close()


def test_unwanted_huge_pages_are_refused_and_not_missed() -> None:
    advice = Advice(mmap.MADV_NOHUGEPAGE)
    arena = Arena(5 * MIB, ArenaSettings(huge_pages=False), system=System(madvise=advice))
    assert [kind for _, _, kind in advice.calls] == [mmap.MADV_NOHUGEPAGE, MADV_POPULATE_WRITE]
    assert (arena.report.huge_bytes, arena.report.fallbacks[Fallback.HUGE_PAGES]) == (0, 0)
    assert mapped(arena.address)["AnonHugePages"] == 0
    arena.close()


@pytest.mark.parametrize("shared", [False, True])
def test_what_the_report_says_is_what_the_system_shows(shared: bool) -> None:
    arena = Arena(9 * MIB, ArenaSettings(shared=shared))
    shown = mapped(arena.address)
    assert arena.report.huge_bytes == shown["AnonHugePages"] + shown["ShmemPmdMapped"] + shown["FilePmdMapped"]
    assert arena.report.fallbacks[Fallback.HUGE_PAGES] == (arena.report.huge_bytes < 8 * MIB)
    arena.close()


def system_that_shows(process: Path, fields: str, *refused: int) -> System:
    """A system whose `smaps` has `fields` for the mapping that advice is given for, between two neighbours'."""

    def show(address: int, nbytes: int, advice: int) -> None:
        neighbour = "Rss: 64 kB\nAnonHugePages:     65536 kB\n"
        process.joinpath("smaps").write_text(
            f"{address - HUGE:x}-{address:x} rw-p 00000000 00:00 0 \n{neighbour}"
            f"{address:x}-{address + nbytes:x} rw-p 00000000 00:00 0 \nRss: 64 kB\n{fields}VmFlags: rd wr\n"
            f"{address + nbytes:x}-{address + nbytes + HUGE:x} ---p 00000000 00:00 0 \n{neighbour}"
        )

    return System(madvise=Advice(*refused, then=show), process=process)


@pytest.mark.parametrize(
    ("fields", "huge", "fallbacks"),
    [
        ("AnonHugePages:      8192 kB\nShmemPmdMapped:        0 kB\n", 8 * MIB, 0),
        ("AnonHugePages:      6144 kB\nShmemPmdMapped:        0 kB\n", 6 * MIB, 1),
        ("AnonHugePages:         0 kB\nShmemPmdMapped:     8192 kB\n", 8 * MIB, 0),
        ("AnonHugePages:         0 kB\nFilePmdMapped:         0 kB\n", 0, 1),
        ("", 0, 1),
    ],
    ids=["all", "some", "shared", "none", "silent"],
)
def test_huge_pages_that_did_not_come_are_counted(tmp_path: Path, fields: str, huge: int, fallbacks: int) -> None:
    arena = Arena(9 * MIB, system=system_that_shows(tmp_path, fields))
    assert (arena.report.huge_bytes, arena.report.fallbacks[Fallback.HUGE_PAGES]) == (huge, fallbacks)
    arena.close()


def test_a_kernel_without_huge_pages_is_counted(tmp_path: Path) -> None:
    arena = Arena(9 * MIB, system=System(madvise=Advice(mmap.MADV_HUGEPAGE), process=tmp_path, sysfs=tmp_path))
    assert arena.report.fallbacks[Fallback.HUGE_PAGES] == 1
    assert mapped(arena.address)["AnonHugePages"] == 0
    arena.close()


def test_an_arena_too_small_for_a_huge_page_misses_none(tmp_path: Path) -> None:
    arena = Arena(HUGE - DISK_PAGE, system=system_that_shows(tmp_path, "AnonHugePages:      2048 kB\n"))
    assert (arena.report.huge_bytes, arena.report.fallbacks[Fallback.HUGE_PAGES]) == (0, 0)
    arena.close()


def test_the_size_of_a_huge_page_is_the_systems(tmp_path: Path) -> None:
    path = tmp_path / "kernel/mm/transparent_hugepage/hpage_pmd_size"
    path.parent.mkdir(parents=True)
    path.write_text("16777216\n")
    system = System(sysfs=tmp_path)
    assert huge_page_bytes(system) == 16 * MIB
    arena = Arena(17 * MIB, system=system)
    assert arena.address % (16 * MIB) == 0
    arena.close()


@pytest.mark.parametrize(
    ("address", "nbytes", "expected"),
    [
        (0, 2 * HUGE, 2 * HUGE),
        (DISK_PAGE, 2 * HUGE, HUGE),
        (DISK_PAGE, HUGE, 0),
        (HUGE, HUGE - 1, 0),
        (DISK_PAGE, DISK_PAGE, 0),
        (HUGE - DISK_PAGE, HUGE + 2 * DISK_PAGE, HUGE),
    ],
)
def test_whole_huge_pages_within_a_range(address: int, nbytes: int, expected: int) -> None:
    assert bytes_coverable_by_huge_pages(address, nbytes, HUGE) == expected
