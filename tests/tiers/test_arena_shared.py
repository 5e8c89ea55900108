"""Two processes see the same bytes; what is no arena, or one of another size, is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longshore.errors import TierClosedError, TierError
from longshore.tiers.arena import DISK_PAGE, Arena, ArenaSettings, Fallback
from longshore.tiers.arena.memory import MADV_POPULATE_WRITE, System, madvise
from mappings import is_mapped, mapped, open_files
from pinning import PinningDevice

MIB = 1 << 20
NBYTES = 3 * MIB + DISK_PAGE
SHARED = ArenaSettings(shared=True)

# Adds one to every byte, and says what it found; then waits for a line, and says what the first byte is by then.
CHILD = """
import sys
from longshore.tiers.arena import Arena
source = sys.argv[1]
arena = Arena.attach(int(source) if source.isdecimal() else source, int(sys.argv[2]))
found = arena.array.tobytes()
assert found == bytes(i * 7 % 251 for i in range(4096)) * (len(found) // 4096), "other bytes"
arena.array[:] += 1
print(arena.report.shared, flush=True)
sys.stdin.readline()
print(arena.array[0], flush=True)
arena.close()
"""


def pattern() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.tile(np.arange(DISK_PAGE) * 7 % 251, NBYTES // DISK_PAGE).astype(np.uint8)


@pytest.mark.parametrize("way", ["path", "descriptor"])
def test_another_process_sees_the_same_bytes(way: str) -> None:
    arena = Arena(NBYTES, SHARED)
    arena.array[:] = pattern()
    source = str(arena.path) if way == "path" else str(arena.fd)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, source, str(NBYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=() if way == "path" else (arena.fd,),
    )
    with child:
        assert child.stdin is not None
        assert child.stdout.readline() == "True\n"
        assert np.array_equal(arena.array, pattern() + 1)
        arena.array[0] = 99
        child.stdin.write("\n")
        child.stdin.flush()
        assert child.stdout.readline() == "99\n"
    assert child.returncode == 0
    arena.close()


def test_a_descriptor_may_come_over_a_socket() -> None:
    arena = Arena(NBYTES, SHARED)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"arena"], [arena.fd])
        _, (fd, *_), _, _ = socket.recv_fds(theirs, 16, 1)
    other = Arena.attach(fd, NBYTES)
    os.close(fd)  # the arena has its own
    arena.array[:] = pattern()
    assert np.array_equal(other.array, pattern())
    assert other.address != arena.address
    other.close()
    arena.close()


def test_attaching_changes_no_byte_and_finds_all_pages_there() -> None:
    arena = Arena(NBYTES, SHARED)
    arena.array[:] = pattern()
    other = Arena.attach(arena.path, NBYTES)
    assert mapped(other.address)["Rss"] == NBYTES
    assert np.array_equal(arena.array, pattern())
    other.close()
    arena.close()


def test_attaching_changes_no_byte_without_pages_made_ahead() -> None:
    def old(address: int, nbytes: int, advice: int) -> None:
        if advice == MADV_POPULATE_WRITE:
            raise OSError(errno.EINVAL, "Invalid argument")
        madvise(address, nbytes, advice)

    arena = Arena(NBYTES, SHARED)
    arena.array[:] = 255
    other = Arena.attach(arena.path, NBYTES, system=System(madvise=old))
    assert (arena.array == 255).all()
    assert other.report.fallbacks[Fallback.POPULATE] == 1
    other.close()
    arena.close()


def test_the_memory_lives_as_long_as_one_of_them() -> None:
    arena = Arena(NBYTES, SHARED)
    other = Arena.attach(arena.path, NBYTES)
    arena.array[:] = pattern()
    arena.close()
    assert np.array_equal(other.array, pattern())
    third = Arena.attach(other.path, NBYTES)
    assert np.array_equal(third.array, pattern())
    third.close()
    other.close()


def test_each_registers_for_itself() -> None:
    arena = Arena(4 * DISK_PAGE, SHARED)
    other = Arena.attach(arena.path, 4 * DISK_PAGE)
    devices = PinningDevice(), PinningDevice()
    arena.register(devices[0], DISK_PAGE)
    other.register(devices[1], DISK_PAGE)
    arena.close()
    assert (devices[0].ranges, devices[1].ranges) == ({}, {other.address: 4 * DISK_PAGE})
    other.close()


def test_nobody_can_change_the_size_under_another() -> None:
    arena = Arena(NBYTES, SHARED)
    for size in (0, NBYTES - DISK_PAGE, NBYTES + DISK_PAGE):
        with pytest.raises(PermissionError):
            os.truncate(arena.fd, size)
    arena.close()


def test_a_private_arena_cannot_be_shared() -> None:
    arena = Arena(DISK_PAGE)
    for use in (lambda: arena.fd, lambda: arena.path):
        with pytest.raises(TierError, match="the arena is private"):
            use()
    arena.close()


def test_a_closed_arena_cannot_be_shared() -> None:
    arena = Arena(DISK_PAGE, SHARED)
    arena.close()
    with pytest.raises(TierClosedError):
        _ = arena.path


@pytest.mark.parametrize("nbytes", [DISK_PAGE, NBYTES - DISK_PAGE, NBYTES + 1, 2 * NBYTES])
def test_another_size_is_refused(nbytes: int) -> None:
    arena = Arena(NBYTES, SHARED)
    before = open_files()
    with pytest.raises(TierError, match=rf"has {NBYTES} bytes, expected "):
        Arena.attach(arena.fd, nbytes)
    assert open_files() == before
    arena.close()


def test_what_is_no_arena_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(DISK_PAGE))
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    half = os.memfd_create("half", os.MFD_ALLOW_SEALING)
    for fd in (loose, half):
        os.truncate(fd, DISK_PAGE)
    fcntl.fcntl(half, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    before = open_files()
    for source, message in (
        (plain, "expected a memfd"),
        (loose, "its size is not sealed"),
        (half, "its size is not sealed"),
        (tmp_path / "nothing", "cannot open the arena at .*No such file"),
        (tmp_path, "cannot open the arena at .*directory"),
        ("/proc/self/fd/987", "cannot open the arena at"),
        (987, "cannot open the arena at 987"),
        (-1, "cannot open the arena at -1"),
    ):
        with pytest.raises(TierError, match=message):
            Arena.attach(source, DISK_PAGE)
    assert open_files() == before
    os.close(loose)
    os.close(half)


@pytest.mark.parametrize("nbytes", [0, -DISK_PAGE])
def test_attaching_to_nothing_is_refused_and_leaves_nothing(nbytes: int) -> None:
    arena = Arena(DISK_PAGE, SHARED)
    before = open_files()
    with pytest.raises(TierError):
        Arena.attach(arena.fd, nbytes)
    assert open_files() == before
    arena.close()


def test_an_attachment_that_fails_half_way_leaves_nothing() -> None:
    arena = Arena(NBYTES, SHARED)
    addresses = []

    def full(address: int, nbytes: int, advice: int) -> None:
        addresses.append(address)
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = open_files()
    with pytest.raises(TierError, match="cannot allocate"):
        Arena.attach(arena.fd, NBYTES, system=System(madvise=full))
    assert open_files() == before
    assert not is_mapped(addresses[0])
    arena.array[:] = 1
    arena.close()
