"""The arena's memory: its exact size, all of it there, with nothing around it, and given back."""

from __future__ import annotations

import errno
import mmap
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from longshore.errors import TierClosedError, TierError
from longshore.tiers.arena import DISK_PAGE, Arena, ArenaSettings, Fallback, align
from longshore.tiers.arena import memory as calls
from longshore.tiers.arena.memory import System
from mappings import is_mapped, mapped, open_files

MIB = 1 << 20
KINDS = pytest.mark.parametrize("settings", [ArenaSettings(), ArenaSettings(shared=True)], ids=["private", "shared"])


@KINDS
@pytest.mark.parametrize("nbytes", [1, DISK_PAGE, DISK_PAGE + 1, 5 * MIB + 1, 9 * MIB])
def test_trap_15_size_is_exact_and_all_is_there(settings: ArenaSettings, nbytes: int) -> None:
    arena = Arena(nbytes, settings)
    assert (
        arena.nbytes
        == arena.array.nbytes
        == arena.report.nbytes
        == align(nbytes)
        == -(-nbytes // DISK_PAGE) * DISK_PAGE
    )
    memory = mapped(arena.address)
    assert memory["Size"] == memory["Rss"] == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert not arena.array.any()
    arena.close()


@KINDS
def test_it_begins_where_a_huge_page_could(settings: ArenaSettings) -> None:
    small, large = Arena(DISK_PAGE, settings), Arena(5 * MIB, settings)
    assert small.address % mmap.PAGESIZE == 0
    assert large.address % (2 * MIB) == 0
    assert large.array.__array_interface__["data"][0] == large.address
    small.close()
    large.close()


@KINDS
@pytest.mark.parametrize("where", ["arena.address - 1", "arena.address + arena.nbytes"])
def test_what_lies_around_it_cannot_be_touched(settings: ArenaSettings, where: str) -> None:
    script = (
        "import ctypes\nfrom longshore.tiers.arena import Arena, ArenaSettings\n"
        f"arena = Arena(3 << 20, ArenaSettings(shared={settings.shared}))\n"
        "ctypes.string_at(arena.address, arena.nbytes)\nprint('inside', flush=True)\n"
        f"ctypes.string_at({where}, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("inside\n", -signal.SIGSEGV)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_an_arena_of_nothing_is_refused(nbytes: int) -> None:
    with pytest.raises(TierError, match=f"a positive arena size in bytes, got {nbytes}"):
        Arena(nbytes)


@pytest.mark.parametrize("change", [{"numa_node": -1}, {"numa_node": "near"}], ids=str)
def test_impossible_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(TierError, match="got"):
        ArenaSettings(**change)


@KINDS
@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 70])
def test_unavailable_memory_is_an_error_that_leaves_nothing(settings: ArenaSettings, nbytes: int) -> None:
    before = open_files()
    with pytest.raises(TierError, match=rf"cannot allocate {nbytes} bytes of host memory"):
        Arena(nbytes, settings)
    assert open_files() == before


@KINDS
def test_out_of_memory_while_touching_raises_and_leaves_nothing(settings: ArenaSettings) -> None:
    addresses = []

    def full(address: int, nbytes: int, advice: int) -> None:
        addresses.append(address)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = open_files()
    with pytest.raises(TierError, match=r"cannot allocate 3145728 bytes of host memory: .*Cannot allocate memory"):
        Arena(3 * MIB, settings, system=System(madvise=full))
    assert open_files() == before
    assert not is_mapped(addresses[0])


@KINDS
def test_an_address_range_that_cannot_be_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, settings: ArenaSettings
) -> None:
    addresses = []

    def refused(address: int, nbytes: int) -> None:
        addresses.append(address)
        raise OSError(errno.ENOMEM, "too many mappings")

    monkeypatch.setattr(calls, "forbid", refused)
    before = open_files()
    with pytest.raises(TierError, match="too many mappings") as held:  # with all that its traceback refers to
        Arena(3 * MIB, settings)
    assert open_files() == before
    assert not is_mapped(addresses[0])
    assert held.tb


@KINDS
def test_a_view_is_the_memory_itself(settings: ArenaSettings) -> None:
    arena = Arena(2 * DISK_PAGE, settings)
    arena.view(DISK_PAGE, 4)[:] = b"abcd"
    assert bytes(arena.array[DISK_PAGE : DISK_PAGE + 4]) == b"abcd"
    for offset, length in ((-1, 1), (0, -1), (0, 2 * DISK_PAGE + 1), (2 * DISK_PAGE, 1)):
        with pytest.raises(TierError, match="are outside an arena of 8192 bytes"):
            arena.view(offset, length)
    arena.close()


@KINDS
def test_close_gives_everything_back_and_may_come_twice(settings: ArenaSettings) -> None:
    before = open_files()
    arena = Arena(3 * MIB, settings)
    address = arena.address
    arena.close()
    arena.close()
    assert open_files() == before
    assert not is_mapped(address)
    for use in (lambda: arena.array, lambda: arena.view(0, 1), lambda: arena.register(None, DISK_PAGE)):  # type: ignore[arg-type]
        with pytest.raises(TierClosedError):
            use()
    assert arena.report.nbytes == 3 * MIB


@KINDS
def test_held_view_keeps_the_memory_until_it_goes(settings: ArenaSettings) -> None:
    arena = Arena(3 * MIB, settings)
    arena.array[:] = 7
    address = arena.address
    held, part = arena.view(MIB, MIB), arena.array[:5]
    arena.close()
    assert bytes(held[:3]) == bytes(part[:3]) == b"\7\7\7"
    del held
    assert is_mapped(address)
    del part
    assert not is_mapped(address)


def test_every_fallback_is_in_the_report_from_the_start() -> None:
    arena = Arena(DISK_PAGE)
    assert arena.report.fallbacks == dict.fromkeys(Fallback, 0)
    arena.close()


def test_bytes_of_one_arena_are_not_those_of_another() -> None:
    one, other = Arena(DISK_PAGE), Arena(DISK_PAGE)
    one.array[:] = 1
    assert not np.any(other.array)
    one.close()
    other.close()


@KINDS
def test_memory_is_freed_and_regained_at_the_same_addresses(settings: ArenaSettings) -> None:
    arena = Arena(9 * MIB, settings)
    address, view = arena.address, arena.view(MIB, 4)
    other = Arena.attach(arena.fd, arena.nbytes) if settings.shared else arena
    arena.array[:] = 7
    arena.give_back()
    assert arena.is_given_back
    assert mapped(arena.address)["Rss"] == mapped(other.address)["Rss"] == 0
    arena.take_back()
    assert not arena.is_given_back
    assert (arena.address, mapped(arena.address)["Rss"]) == (address, arena.nbytes)
    assert not arena.array.any()
    assert not other.array.any()
    view[0] = 9
    assert other.array[MIB] == arena.array[MIB] == 9, "views of before are of the same memory"
    other.close()
    arena.close()


@KINDS
def test_memory_that_cannot_be_freed_or_regained_is_error(settings: ArenaSettings) -> None:
    fails = False

    def madvise(address: int, nbytes: int, advice: int) -> None:
        if fails:
            raise OSError(errno.ENOMEM, "no memory")
        calls.madvise(address, nbytes, advice)

    arena = Arena(MIB, settings, system=System(madvise=madvise))
    fails = True
    with pytest.raises(TierError, match="cannot free 1048576 bytes of host memory"):
        arena.give_back()
    fails = False
    arena.give_back()
    fails = True
    with pytest.raises(TierError, match="cannot allocate 1048576 bytes"):
        arena.take_back()
    assert arena.is_given_back
    fails = False
    arena.take_back()
    assert not arena.is_given_back
    arena.close()
    with pytest.raises(TierClosedError):
        arena.give_back()
