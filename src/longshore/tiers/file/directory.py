"""The directory of a file tier: private to the user, and locked while in use.

    directory/            0700: made so, or narrowed to it
      lock                locked for as long as the process lives
      superblock, .copy   geometry and generation, twice (superblock.py)
      reset               a reset that was requested while the lock was not held (superblock.py)
      index.*, journal.*  which record lies in which slot (index.py)
      segment             the slots

Every file is opened relative to the directory's descriptor and never through a symbolic link, so nobody can slip
another file under the tier between a check and its use.

The lock dies with the process that took it, also if a child that it forked lives on: a record lock is not inherited.
Such a lock keeps other processes out; that this process does not open a directory twice is kept in its own books.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from longshore.errors import TierError, TierInUseError
from longshore.tiers.file.system import RawIo, SystemIo, read_all, write_all

_log = logging.getLogger(__name__)

LOCK = "lock"
SEGMENT = "segment"

_PID_BYTES = 16

_owned: set[tuple[int, int, int]] = set()
"""Open directories: process, device, inode. A forked child ignores those of its parent."""

_owning = threading.Lock()


class Directory:
    """An open and locked tier directory, created with its parents if missing.

    Attributes:
        io: The system calls that reach it.
    """

    def __init__(self, path: Path, io: RawIo | None = None, *, guest: bool = False) -> None:
        """A `guest` does not lock the directory, creates nothing and changes no mode."""
        self.path = path
        self.io: RawIo = SystemIo() if io is None else io
        self._pid = os.getpid()
        self._guest = guest
        self._lock = -1
        with contextlib.ExitStack() as undo:
            self._fd = self._open_directory()
            undo.callback(self.io.close, self._fd)
            if guest:
                undo.pop_all()
                return
            self._own()
            undo.callback(_owned.discard, self._identity)
            self._lock = self.open(LOCK, create=True)
            undo.callback(self.io.close, self._lock)
            self._take_lock()
            undo.pop_all()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened the directory."""
        return os.getpid() != self._pid

    def open(self, name: str, *, create: bool = False) -> int:
        """A descriptor, for reading and writing, of the regular file `name`, mode 0600 and owned by us."""
        with self.as_tier_errors(name):
            fd = self.io.open(name, self._fd, create=create)
            try:
                self._check_file(fd, self.path / name)
            except BaseException:
                self.io.close(fd)
                raise
        return fd

    def reserve(self, name: str, nbytes: int) -> int:
        """A descriptor of file `name`, extended to `nbytes` with all blocks allocated; unchanged on failure.

        What it held stays; what is new reads as zeros.
        """
        self.reserve_all({name: nbytes})
        return self.open(name)

    def reserve_all(self, files: Mapping[str, int]) -> None:
        """Extend these files to these lengths, with all blocks allocated; all are unchanged on failure."""
        with contextlib.ExitStack() as undo:
            statuses = {}
            for name in files:
                fd = self.open(name, create=True)
                undo.callback(self.io.close, fd)
                with self.as_tier_errors(name):
                    statuses[name] = fd, self.io.fstat(fd)
            missing = {name: _missing(status, files[name]) for name, (_, status) in statuses.items()}
            with self.as_tier_errors():
                free = self.io.free_bytes(self._fd) if any(missing.values()) else 0
            if sum(missing.values()) > free:
                raise TierError(
                    f"{self.path}: expected room for {sum(missing.values())} more bytes (capacity "
                    f"{sum(files.values())}), the file system has {free} free"
                )
            with contextlib.ExitStack() as restore:
                for name in filter(missing.get, files):
                    fd, status = statuses[name]
                    restore.callback(self._restore, name, fd, status.st_size)
                    try:
                        self.io.allocate(fd, files[name])
                        self.io.fsync(fd)
                    except OSError as error:
                        raise TierError(
                            f"{self.path / name}: could not allocate {files[name]} bytes ({status.st_size} kept, "
                            f"{free} free): {error.strerror}"
                        ) from error
                restore.pop_all()

    def trim(self, name: str, nbytes: int) -> None:
        """Truncate file `name` to `nbytes`."""
        fd = self.open(name)
        try:
            with self.as_tier_errors(name):
                if self.io.fstat(fd).st_size > nbytes:
                    self.io.ftruncate(fd, nbytes)
        finally:
            self.io.close(fd)

    def read(self, name: str, nbytes: int | None = None, offset: int = 0) -> bytes:
        """Up to `nbytes` of file `name`, or all of it; empty if there is no file."""
        with self._opened(name) as fd:
            if fd is None:
                return b""
            status = self.io.fstat(fd)
            end = min(status.st_size, status.st_blocks * 512)
            if nbytes is not None:
                end = min(end, offset + nbytes)
            return read_all(self.io, fd, max(0, end - offset), offset)

    def length(self, name: str) -> int:
        """Bytes of file `name`; 0 if there is none."""
        with self._opened(name) as fd:
            return 0 if fd is None else self.io.fstat(fd).st_size

    def sync(self) -> None:
        """Synchronise the directory: file names are durable on return."""
        with self.as_tier_errors():
            self.io.fsync(self._fd)

    def close(self) -> None:
        """Release the lock. Idempotent; in a forked child, only its copies of the descriptors go."""
        if self._fd >= 0:
            if not self._guest:
                if not self.forked or (os.getpid(), *self._identity[1:]) not in _owned:
                    # Else the child holds the lock by now, and would lose it with any descriptor of that file.
                    self.io.close(self._lock)
                _owned.discard(self._identity)
            self.io.close(self._fd)
            self._fd = self._lock = -1

    @contextlib.contextmanager
    def as_tier_errors(self, name: str = "") -> Iterator[None]:
        """Context manager: raises a `TierError` that names the file in place of an `OSError`."""
        path = self.path / name
        try:
            yield
        except OSError as error:
            is_link = os.path.islink(path)  # noqa: PTH114 - `Path` raises where a name is too long
            what = "it is a symbolic link" if is_link else error.strerror
            raise TierError(f"{path}: cannot be used: {what}") from error
        except ValueError as error:  # a NUL in the name
            raise TierError(f"{str(path)!r}: cannot be used: {error}") from error

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int | None]:
        """Context manager: a descriptor of file `name`, `None` if there is no file; errors as in `as_tier_errors`."""
        try:
            fd = self.open(name)
        except TierError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                yield None
                return
            raise
        try:
            with self.as_tier_errors(name):
                yield fd
        finally:
            self.io.close(fd)

    def _open_directory(self) -> int:
        path = self.path
        with self.as_tier_errors():
            fd = self.io.open_directory(path, create=not self._guest)
            try:
                status = self.io.fstat(fd)
                _check_owner(status, path)
                if status.st_mode & 0o022:
                    raise TierError(
                        f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}), who could replace "
                        f"its files; expected 0700: chmod 700 {path}"
                    )
                if status.st_mode & 0o077 and not self._guest:
                    self.io.fchmod(fd, 0o700)
                    _log.warning("%s could be read by others (mode %04o); it is 0700 now", path, status.st_mode & 0o777)
            except BaseException:
                self.io.close(fd)
                raise
        self._identity = self._pid, status.st_dev, status.st_ino
        return fd

    def _own(self) -> None:
        """Raise `TierInUseError` if this process has the directory open already.

        Closing a second descriptor of the lock file would release the lock.
        """
        with _owning:
            if self._identity in _owned:
                raise self._in_use(f"{self._pid}, this one")
            _owned.add(self._identity)

    def _take_lock(self) -> None:
        with self.as_tier_errors(LOCK):
            if not self.io.lock(self._lock):
                holder = self.io.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise self._in_use(holder)
            # In place, and always as long: on a full disk a file that was emptied may stay so.
            write_all(self.io, self._lock, f"{self._pid:<{_PID_BYTES - 1}}\n".encode(), 0)
            if self.io.fstat(self._lock).st_size > _PID_BYTES:
                self.io.ftruncate(self._lock, _PID_BYTES)

    def _in_use(self, holder: str) -> TierInUseError:
        return TierInUseError(
            f"{self.path} is in use by a live process (process id {holder}). Give each a sub-directory of its own, "
            f"for instance {self.path / 'rank0'} and {self.path / 'rank1'}"
        )

    def _check_file(self, fd: int, path: Path) -> None:
        status = self.io.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TierError(f"{path}: expected a regular file, got mode {status.st_mode:#o}")
        _check_owner(status, path)
        if status.st_nlink != 1:
            raise TierError(f"{path}: expected a file with one name, got {status.st_nlink} links to it")
        if stat.S_IMODE(status.st_mode) != 0o600 and not self._guest:
            self.io.fchmod(fd, 0o600)

    def _restore(self, name: str, fd: int, nbytes: int) -> None:
        """Truncate file `name` to `nbytes`, if it became longer."""
        try:
            if self.io.fstat(fd).st_size > nbytes:
                self.io.ftruncate(fd, nbytes)
        except OSError as error:
            _log.warning(
                "%s takes more space than it needs: it cannot be truncated to %d bytes: %s",
                self.path / name,
                nbytes,
                error.strerror,
            )


def _missing(status: os.stat_result, nbytes: int) -> int:
    """Bytes to allocate until a file has `nbytes` with all blocks allocated."""
    allocated = status.st_blocks * 512
    whole = nbytes <= status.st_size <= allocated
    return 0 if whole else max(nbytes - allocated, 1)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise TierError(f"{path} belongs to user {status.st_uid}; expected user {os.geteuid()}, who we are")
