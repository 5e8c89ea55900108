"""A directory that all replicas mount: one file for each value.

    <directory>/ls1/<namespace>/<first two digits of the key>/<key>[.r<rank>]      header, image
    <directory>/ls1/<namespace>/<first two digits of the key>/.<random>.tmp        being written; then renamed

A file system that hangs cannot be given a deadline: a thread that calls it waits in the kernel. So threads read into,
and write from, buffers of their own, and use the arena only for a copy between memory. An image whose thread hangs ends
at its deadline, and keeps no slot. The directory itself is never created: an empty mount point is not a store.

A value has expired by the clock of the file system, which writes the time of a file: this machine's may differ.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from longshore.boundary import Status
from longshore.tiers.remote.format import HEADER_BYTES, pack_header, verify
from longshore.tiers.remote.settings import RemoteSettings
from longshore.tiers.remote.work import Image, Refusal, RemoteError, WorkQueue

_PIECE = 256 << 10
"""Bytes of an image that are read before they are checked and copied."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_GONE = frozenset({errno.ENOENT, errno.ESTALE})
"""Of a file or a folder that somebody has removed; the second one, of NFS, also while it is open."""


class DirectorySession:
    """One thread's use of a directory. Methods raise `RemoteError` where the file system fails."""

    def __init__(self, settings: RemoteSettings, largest: int) -> None:
        self._settings = settings
        self._root = settings.path
        self._buffer = memoryview(bytearray(HEADER_BYTES + largest))
        self._known: set[str] = set()
        """Directories that exist."""
        self._ahead = 0.0
        """Seconds by which this machine's clock is ahead of the file system's."""

    def check(self, deadline: float) -> None:
        """Look whether the directory is there."""
        try:
            if not Path(self._root).is_dir():
                raise RemoteError("connection", f"{self._root} is no directory")
        except OSError as error:
            raise _typed(error) from None

    def compare_clocks(self) -> None:
        """Find out how far this machine's clock and the file system's differ, by a file that is removed at once."""
        path = f"{self._root}/.{secrets.token_hex(8)}.tmp"
        with contextlib.suppress(OSError):  # it may be read-only
            try:
                self._write_new(path, memoryview(b"time"))
                self._ahead = time.time() - os.stat(path).st_mtime  # noqa: PTH116
            finally:
                os.unlink(path)  # noqa: PTH108

    def lengths(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        """The length of each value in bytes; 0 for one that is not there, or has expired."""
        return [self._length(self._path(address)) for address in addresses]

    def fetch(self, work: WorkQueue) -> None:
        """Fetch images until none waits."""
        while (image := work.take()) is not None:
            work.release(image)
            work.end(image, self._read(image, work))

    def store(self, work: WorkQueue, is_bad: Callable[[bytes], bool], refusal: Refusal) -> None:
        """Store images until none waits; those that are there are not sent again, unless known to be bad."""
        while (image := work.take()) is not None:
            value = self._buffer[: HEADER_BYTES + len(image.memory)]
            value[HEADER_BYTES:] = image.memory
            work.release(image)
            path = self._path(image.address)
            if self._length(path) == len(value) and not is_bad(image.address):
                work.end(image, Status.OK)
            elif (refused := refusal(len(value))) is not None:
                work.end(image, refused)
            else:
                value[:HEADER_BYTES] = pack_header(image.identity, value[HEADER_BYTES:])
                work.end(image, self._write(path, value))

    def is_stale(self) -> bool:
        """Nothing stays open between two requests."""
        return False

    def shut_down(self) -> None:
        """Nothing ends a call that hangs in the kernel; it uses no byte of the arena."""

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, address: bytes) -> str:
        version, namespace, name = address.decode().split("/")
        return f"{self._root}/{version}/{namespace}/{name[:2]}/{name}"

    def _length(self, path: str) -> int:
        try:
            found = os.stat(path)  # noqa: PTH116 - a `Path` for each of 512 keys takes longer than the call
        except OSError as error:
            if error.errno in _GONE:
                return 0
            raise _typed(error) from None
        return 0 if self._expired(found) else found.st_size

    def _expired(self, found: os.stat_result) -> bool:
        return bool(self._settings.ttl) and time.time() - self._ahead - found.st_mtime > self._settings.ttl

    def _read(self, image: Image, work: WorkQueue) -> Status:
        """Read a value; how that ended."""
        expected = HEADER_BYTES + len(image.memory)
        path = self._path(image.address)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a FIFO would block
        except OSError as error:
            return _absent(error)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                return Status.MISMATCH
            if self._expired(found):
                with contextlib.suppress(OSError):
                    os.unlink(path)  # noqa: PTH108
                return Status.NOT_FOUND
            if found.st_size != expected:
                return Status.SHORT if found.st_size < expected else Status.MISMATCH
            return self._read_pieces(descriptor, image, work)
        except OSError as error:
            return _absent(error)
        finally:
            os.close(descriptor)

    def _read_pieces(self, descriptor: int, image: Image, work: WorkQueue) -> Status:
        """Read, check and copy a piece at a time, each while it is in the core's cache."""
        header, checksum, done = b"", xxhash.xxh3_64(), 0
        while done < len(image.memory):
            before = 0 if header else HEADER_BYTES
            piece = self._buffer[: before + min(_PIECE, len(image.memory) - done)]
            at, count = HEADER_BYTES + done - before, 0
            while count < len(piece) and (more := os.preadv(descriptor, [piece[count:]], at + count)):
                count += more
            if count < len(piece):
                return Status.SHORT
            if not header:
                header, piece = bytes(piece[:before]), piece[before:]
            checksum.update(piece)
            if not work.hold(image):
                return Status.DEADLINE
            image.memory[done : done + len(piece)] = piece
            work.release(image)
            done += len(piece)
        return verify(header, checksum.intdigest(), image.identity)

    def _write(self, path: str, value: memoryview) -> Status:
        """Write a file beside `path`, and give it that name."""
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/.{secrets.token_hex(8)}.tmp"
        try:
            if folder not in self._known:
                self._make(folder)
            try:
                self._write_new(temporary, value)
            except OSError as error:
                if error.errno not in _GONE:  # else somebody has removed the namespace
                    raise
                self._make(folder)
                self._write_new(temporary, value)
            os.rename(temporary, path)  # noqa: PTH104
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            if error.errno in _FULL:
                return Status.NO_SPACE
            if error.errno in _READ_ONLY:
                said = f"the file system refuses to write: {error.strerror}"
                raise RemoteError("refused", said, Status.IO_ERROR) from None
            raise _typed(error) from None
        return Status.OK

    def _make(self, folder: str) -> None:
        mode = os.stat(self._root).st_mode & 0o2777  # noqa: PTH116
        for above in (folder.rpartition("/")[0].rpartition("/")[0], folder.rpartition("/")[0], folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(above)  # noqa: PTH102 - not its parents: the root must be there
                with contextlib.suppress(OSError):  # whoever may write to the root may write there, whatever the umask
                    os.chmod(above, mode)  # noqa: PTH101
        self._known.add(folder)

    @staticmethod
    def _write_new(path: str, value: memoryview) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            while value:
                value = value[os.write(descriptor, value) :]
        finally:
            os.close(descriptor)


class DirectoryClient:
    """A shared directory."""

    threads = 4
    """For each direction: network file systems answer one call of a thread after the other."""

    def __init__(self, settings: RemoteSettings, largest: int) -> None:
        self._settings = settings
        self._largest = largest

    def connect(self) -> DirectorySession:
        """A session of one thread. Raises `RemoteError` if the directory is not there."""
        session = DirectorySession(self._settings, self._largest)
        session.check(0.0)
        if self._settings.ttl:
            session.compare_clocks()
        return session


def _absent(error: OSError) -> Status:
    """How a read ends whose file is gone. Raises `RemoteError` for another `error`."""
    if error.errno in _GONE:
        return Status.NOT_FOUND
    raise _typed(error) from None


def _typed(error: OSError) -> RemoteError:
    return RemoteError("connection", f"the file system failed: {error.strerror}", Status.IO_ERROR)
