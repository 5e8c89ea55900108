"""The directory of a file tier: private to the user, locked while in use, described by its superblock.

    directory/                    0700: created so, or restricted to it
      lock                        locked for as long as the process lives
      superblock, superblock.copy geometry and generation, twice: a page each, written by the process with the lock
      reset                       a pending reset, the same page twice: written by a process without the lock
      index.*, journal.*          which record is in which slot (index.py)
      segment                     the slots

Every file is opened relative to the directory's descriptor and never through a symbolic link, so nobody can replace a
file between a check and its use.

The lock is released when its process ends, even if a forked child lives on: record locks are not inherited. It excludes
other processes; `_owned` prevents this process from opening a directory twice.

The blocks of superblock and reset are allocated and their descriptors open from the start, so neither a full disk nor a
lack of descriptors prevents a reset. Each copy is synchronised before the next one is written, and the newest copy is
written last. One copy is therefore valid after a crash at any point, and after any single page is damaged.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from longshore.boundary import DISK_PAGE
from longshore.errors import FormatError, TierError, TierInUseError
from longshore.tiers.file import format as fmt
from longshore.tiers.file.io import RawIo, SystemIo, read_all, write_all

_log = logging.getLogger(__name__)

LOCK = "lock"
SEGMENT = "segment"

_PID_BYTES = 16

_FLOCK = "hhqqi0q"
"""`struct flock` of Linux, see fcntl(2)."""

_owned: set[tuple[int, int, int]] = set()
"""Open directories: process, device, inode. A forked child ignores those of its parent."""

_owning = threading.Lock()


class Directory:
    """An open and locked tier directory, created with its parents if missing.

    Attributes:
        io: The system calls that reach it.
    """

    def __init__(self, path: Path, io: RawIo | None = None, *, unlocked: bool = False) -> None:
        """With `unlocked`, takes no lock, creates nothing and changes no mode."""
        self.path = path
        self.io: RawIo = SystemIo() if io is None else io
        self._pid = os.getpid()
        self._unlocked = unlocked
        self._lock = -1
        with contextlib.ExitStack() as undo:
            self._fd = self._open_directory()
            undo.callback(self.io.close, self._fd)
            if unlocked:
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

        Its content stays; added bytes are zero.
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
                    f"{self.path}: expected room for {sum(missing.values()) / 2**20:.1f} MiB more (capacity "
                    f"{sum(files.values()) / 2**20:.1f} MiB), the file system has {free / 2**20:.1f} MiB free; lower "
                    "file_size, or free disk space"
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
            if not self._unlocked:
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
            fd = self.io.open_directory(path, create=not self._unlocked)
            try:
                status = self.io.fstat(fd)
                _check_owner(status, path)
                if status.st_mode & 0o022:
                    raise TierError(
                        f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):04o}), who could replace "
                        f"its files; expected 0700: chmod 700 {path}"
                    )
                if status.st_mode & 0o077 and not self._unlocked:
                    self.io.fchmod(fd, 0o700)
                    _log.warning(
                        "%s could be read by others (mode %04o); changed to 0700", path, stat.S_IMODE(status.st_mode)
                    )
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
            f"{self.path} is in use by a live process (process id {holder}): stop it, or give each a sub-directory of "
            f"its own, for instance {self.path / 'rank0'} and {self.path / 'rank1'}"
        )

    def _check_file(self, fd: int, path: Path) -> None:
        status = self.io.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise TierError(f"{path}: expected a regular file, got mode {status.st_mode:#o}")
        _check_owner(status, path)
        if status.st_nlink != 1:
            raise TierError(f"{path}: file has {status.st_nlink} hard links, expected 1")
        if stat.S_IMODE(status.st_mode) != 0o600 and not self._unlocked:
            self.io.fchmod(fd, 0o600)

    def _restore(self, name: str, fd: int, nbytes: int) -> None:
        """Truncate file `name` to `nbytes`, if it became longer."""
        try:
            if self.io.fstat(fd).st_size > nbytes:
                self.io.ftruncate(fd, nbytes)
        except OSError as error:
            _log.warning(
                "%s takes more space than it needs: it cannot be truncated to %d bytes: %s; check the file system",
                self.path / name,
                nbytes,
                error.strerror,
            )


def holder_of(path: Path) -> str:
    """The process id of whoever has the tier directory `path` open; empty without one. Takes no lock."""
    with _owning, contextlib.suppress(OSError):
        status = path.stat()
        if (os.getpid(), status.st_dev, status.st_ino) in _owned:  # whose lock would go with `fd`
            return f"{os.getpid()}, this one"
        fd = os.open(path / LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            told = fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            if struct.unpack(_FLOCK, told)[0] != fcntl.F_UNLCK:
                number = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                return number if number.isdecimal() else ""  # else it is another program's lock
        finally:
            os.close(fd)
    return ""


def _missing(status: os.stat_result, nbytes: int) -> int:
    """Bytes to allocate until a file has `nbytes` with all blocks allocated."""
    allocated = status.st_blocks * 512
    whole = nbytes <= status.st_size <= allocated
    return 0 if whole else max(nbytes - allocated, 1)


def _check_owner(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise TierError(f"{path} belongs to user {status.st_uid}; expected user {os.geteuid()}, that of this process")


SUPERBLOCK = "superblock"
COPIES = (SUPERBLOCK, "superblock.copy")
RESET = "reset"
FILES = {**dict.fromkeys(COPIES, DISK_PAGE), RESET: 2 * DISK_PAGE}
"""How long these files are."""

_BLANK = bytes(DISK_PAGE)


class Superblocks:
    """The superblock of a directory that is locked, or read without the lock.

    Attributes:
        damaged: Which copies `read` could not use, though another one could be, and why.
    """

    def __init__(self, directory: Directory) -> None:
        self.damaged: dict[str, str] = {}
        self._directory = directory
        self._order = list(COPIES)
        self._fds: dict[str, int] = {}

    def read(self) -> fmt.Superblock | None:
        """The superblock, with the generation of a later reset; `None` when there is none yet.

        Raises `FormatError` when there is one, and no copy of it can be used.
        """
        found: dict[str, fmt.Superblock] = {}
        pages = {name: self._directory.read(name, DISK_PAGE + 1) for name in COPIES}
        wrong = {}
        for name, page in pages.items():
            try:
                found[name] = fmt.parse_superblock(page)
            except FormatError as error:
                wrong[name] = str(error) if page else "superblock: the file is missing"
        # The copy that says least is written first.
        self._order = sorted(COPIES, key=lambda name: (name in found, found[name][3:][::-1] if name in found else ()))
        self.damaged = wrong if found else {}
        if found:
            best = found[self._order[-1]]
            return best._replace(generation=max(best.generation, self.reset()))
        first, second = pages.values()
        if all(page in (b"", _BLANK) for page in (first, second)) or second == _BLANK:
            return None  # the first one that was ever to be written was not, or is torn: the second one comes after it
        raise FormatError(
            f"{self._directory.path}: {next(iter(wrong.values()))}. Its copy is damaged, too. Nothing was "
            f"changed; remove the directory to start with an empty one"
        )

    def reset(self) -> int:
        """The generation of a pending reset; 0 without one. Raises `FormatError`."""
        data = self._directory.read(RESET, 2 * DISK_PAGE)
        pages = [page for at in (0, DISK_PAGE) if (page := data[at : at + DISK_PAGE]) not in (b"", _BLANK)]
        generations = []
        for page in pages:
            with contextlib.suppress(FormatError):
                generations.append(fmt.parse_reset(page))
        if len(pages) == 2 and not generations:
            raise FormatError(
                f"{self._directory.path}: both copies of a reset in it are damaged, so nothing in it may be served. "
                f"Nothing was changed; remove the directory to start with an empty one"
            )
        return max(generations, default=0)

    def open(self) -> None:
        """Open the files, which are reserved."""
        for name in COPIES:
            self._fds[name] = self._directory.open(name)

    def write(self, superblock: fmt.Superblock) -> None:
        """Replace the superblock; all copies are on the medium when this returns. Raises `TierError`."""
        page, io = fmt.pack_superblock(superblock), self._directory.io
        for name in self._order:
            with self._directory.as_tier_errors(name):
                write_all(io, self._fds[name], page, 0)
                io.fsync(self._fds[name])

    def drop(self) -> None:
        """Truncate the superblock, so that the next process finds no records. Raises `TierError`."""
        if not self._fds:
            self.open()
        for name, fd in self._fds.items():
            with self._directory.as_tier_errors(name):
                self._directory.io.ftruncate(fd, 0)
                self._directory.io.fsync(fd)

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in self._fds.values():
            self._directory.io.close(fd)
        self._fds = {}


class PendingReset:
    """Writes a reset that the next process to open the directory at `path` applies. Does not need the lock."""

    def __init__(self, path: Path, io: RawIo | None = None) -> None:
        """Raises `TierError` if there is no reset file; opening a tier creates one."""
        self._path = path
        with contextlib.ExitStack() as undo:
            self._directory = Directory(path, io, unlocked=True)
            undo.callback(self._directory.close)
            self._fd = self._directory.open(RESET)
            undo.pop_all()

    def write(self, generation: int) -> None:
        """Write that nothing older than `generation` may be served; durable on return. Raises `TierError`."""
        io, page = self._directory.io, fmt.pack_reset(generation)
        with self._directory.as_tier_errors(RESET):
            if not io.fstat(self._fd).st_nlink:
                raise FileNotFoundError(2, "it was removed")
            for at in (0, DISK_PAGE):
                write_all(io, self._fd, page, at)
                io.fsync(self._fd)

    def drop(self) -> None:
        """Truncate the superblock, if a reset cannot be written and no process has the directory open.

        Raises `TierError`.
        """
        superblocks = Superblocks(self._directory)
        try:
            superblocks.drop()
        finally:
            superblocks.close()

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        if self._fd >= 0:
            self._directory.io.close(self._fd)
            self._fd = -1
        self._directory.close()
