"""The tier's directory: ours alone, locked while in use, its superblock replaced as a whole or not at all.

    directory/            0700 when made here
      lock                held by flock for as long as the process lives
      superblock          one page: geometry and generation
      segment             the slots

Every file is opened relative to the directory's descriptor and never through a symbolic link, so nobody can slip
another file under the tier between a check and its use.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from longshore.errors import FormatError, TierError, TierInUseError
from longshore.tiers.arena import PAGE
from longshore.tiers.file.format import Superblock, pack_superblock, parse_superblock

LOCK = "lock"
SUPERBLOCK = "superblock"
SEGMENT = "segment"
_REPLACEMENT = "superblock.new"

OVERHEAD = 4 * PAGE
"""Bytes of a tier's capacity that are no slots: the directory, the lock, the superblock and its replacement."""

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Directory:
    """An open and locked tier directory; made, with its parents, when it does not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with contextlib.ExitStack() as undo:
            self._fd = _open_directory(path)
            undo.callback(os.close, self._fd)
            self._lock = self.open(LOCK, os.O_CREAT)
            undo.callback(os.close, self._lock)
            self._take_lock()
            undo.pop_all()

    def open(self, name: str, flags: int = 0) -> int:
        """A descriptor, for reading and writing, of the regular file `name`, mode 0600 and owned by us."""
        with _as_tier_errors(self.path / name):
            fd = os.open(name, _FLAGS | flags, 0o600, dir_fd=self._fd)
        try:
            _check_file(fd, self.path / name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def read_superblock(self) -> Superblock | None:
        """The superblock, `None` when there is none yet; raises `FormatError` when it is not ours."""
        try:
            os.stat(SUPERBLOCK, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        fd = self.open(SUPERBLOCK)
        try:
            with _as_tier_errors(self.path / SUPERBLOCK):
                page = os.pread(fd, PAGE + 1, 0)
        finally:
            os.close(fd)
        try:
            return parse_superblock(page)
        except FormatError as error:
            raise FormatError(
                f"{self.path}: {error}. Nothing was touched; remove the directory to start with an empty one"
            ) from None

    def write_superblock(self, superblock: Superblock) -> None:
        """Replace the superblock; it is on the medium when this returns."""
        fd = self.open(_REPLACEMENT, os.O_CREAT)
        try:
            with _as_tier_errors(self.path / _REPLACEMENT):
                os.ftruncate(fd, 0)  # not when opening: then it could be another's file
                written = os.write(fd, pack_superblock(superblock))
                if written != PAGE:
                    raise TierError(f"{self.path}: wrote {written} of {PAGE} bytes of the superblock")
                os.fsync(fd)
        finally:
            os.close(fd)
        with _as_tier_errors(self.path / SUPERBLOCK):
            os.rename(_REPLACEMENT, SUPERBLOCK, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            os.fsync(self._fd)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._fd >= 0:
            # Closing alone is not enough: a forked child may hold a copy of the descriptor, and would keep the lock.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            os.close(self._fd)
            self._fd = self._lock = -1

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise TierInUseError(
                f"{self.path} is in use by another live process (process id {holder}). Give each process a "
                f"sub-directory of its own, for instance {self.path / 'rank0'} and {self.path / 'rank1'}"
            ) from None
        except OSError as error:
            raise TierError(f"{self.path}: cannot be locked: {error}") from error
        with _as_tier_errors(self.path / LOCK):
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)


def _open_directory(path: Path) -> int:
    with _as_tier_errors(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid():
            raise TierError(f"{path} belongs to user {status.st_uid}; expected user {os.geteuid()}, who we are")
        if status.st_mode & 0o022:
            raise TierError(
                f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}), who could replace "
                f"its files; expected 0700: chmod 700 {path}"
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_file(fd: int, path: Path) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise TierError(f"{path}: expected a regular file, got mode {status.st_mode:#o}")
    if status.st_uid != os.geteuid():
        raise TierError(f"{path} belongs to user {status.st_uid}; expected user {os.geteuid()}, who we are")
    if status.st_nlink != 1:
        raise TierError(f"{path}: expected a file with one name, got {status.st_nlink} links to it")
    if stat.S_IMODE(status.st_mode) != 0o600:
        os.fchmod(fd, 0o600)


@contextlib.contextmanager
def _as_tier_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise TierError(f"{path}: cannot be used: {what}") from error
