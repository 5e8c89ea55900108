"""Damaged disks: one in memory that has every state a crash may leave, and bit flips in the files of a real one.

    disk = SimulatedDisk()
    FileTier(path, ..., io=disk)          the production code; no byte of it reaches a real disk
    for moment in disk.moments: ...       one after each call that changed anything

What a crash at some moment may leave:

    of the process     all that was written: `moment.killed()`
    of the machine     what was synchronised; and of each sector written since, any of the contents that it has had,
                       independently of all others, so writes are torn, dropped and reordered in every possible way:
                       `moment.states()`. Names change in order, and are durable once the directory was synchronised

Lengths are durable at once: the tier synchronises each file whose length it changes before it relies on it. A disk
begins with a given `Image`, so the tier can be opened on each of these states.

    flip_header_bit(directory, slot, bit)     ┌────────┬──────────────┐
    flip_image_bit(directory, slot, bit)      │ header │    image     │   of one slot; bit 0 is the lowest of byte 0
                                              └────────┴──────────────┘
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from longshore.boundary import DISK_PAGE
from longshore.errors import PlanError, TierError
from longshore.tiers.file.directory import SEGMENT, SUPERBLOCK
from longshore.tiers.file.format import parse_superblock
from longshore.tiers.file.io import IoQueue, Piece, RawIo

SECTOR = 512
"""Bytes that a disk writes atomically."""

Image = Mapping[str, bytes]
"""The files of a directory, by name."""

_DIRECTORY = 3
_inodes = itertools.count(1)


@dataclass(slots=True)
class _File:
    """A file: its bytes, its durable bytes, and the writes since."""

    inode: int
    data: bytearray
    durable: bytes
    pending: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _FileMoment:
    """A file at some moment; `sectors` has every content that a sector may have after a crash, if there are several."""

    data: bytes
    base: bytes
    sectors: Mapping[int, tuple[bytes, ...]]

    def with_sectors(self, chosen: Sequence[bytes]) -> bytes:
        state = bytearray(self.base)
        for sector, content in zip(self.sectors, chosen, strict=True):
            state[sector * SECTOR : sector * SECTOR + len(content)] = content
        return bytes(state)

    def states(self) -> Iterator[bytes]:
        return map(self.with_sectors, itertools.product(*self.sectors.values()))


@dataclass(frozen=True, slots=True)
class Moment:
    """The disk between two calls."""

    call: str
    _files: Mapping[int, _FileMoment]
    _names: tuple[Mapping[str, int], ...]

    def killed(self) -> Image:
        """The disk after the end of the process."""
        return {name: self._files[inode].data for name, inode in self._names[-1].items()}

    def states(self, fixed: Collection[str] = ()) -> Iterator[Image]:
        """Every state that a crash of the machine may leave; of the files that are `fixed`, only the newest."""
        for names in self._names:
            files = [self._files[inode] for inode in names.values()]
            each = [[f.data] if n in fixed else f.states() for n, f in zip(names, files, strict=True)]
            for chosen in itertools.product(*each):
                yield dict(zip(names, chosen, strict=True))

    def one_file_at_a_time(self, most: int) -> Iterator[Image]:
        """Every state of each file, with the others as they are now; of each, no more than `most`."""
        for names in self._names:
            rest = {name: self._files[inode].data for name, inode in names.items()}
            for name, inode in names.items():
                states = itertools.islice(self._files[inode].states(), most)
                yield from ({**rest, name: state} for state in states)

    def sample(self, count: int, random: Random) -> Iterator[Image]:
        """So many of these states by chance."""
        for _ in range(count):
            names = random.choice(self._names)
            yield {
                name: file.with_sectors([random.choice(each) for each in file.sectors.values()])
                for name, file in ((name, self._files[inode]) for name, inode in names.items())
            }


class SimulatedDisk:
    """`RawIo` over files in memory, which has one directory. Thread-safe.

    Attributes:
        moments: The disk after each call that changed anything, if it was made with `remember`.
    """

    def __init__(self, image: Image | None = None, *, remember: bool = True) -> None:
        self.moments: list[Moment] = []
        self._remember = remember
        self._inode = next(_inodes)
        self._files = {n: _File(n, bytearray(data), data) for n, data in enumerate((image or {}).values(), 10)}
        self._names: list[dict[str, int]] = [dict(zip(image or {}, self._files, strict=True))]
        self._open: dict[int, int] = {}
        self._fds = itertools.count(10)
        self._lock = threading.RLock()

    @property
    def descriptors(self) -> int:
        """How many files are open."""
        with self._lock:
            return len(self._open)

    def open_directory(self, path: Path, /, *, create: bool) -> int:
        """The one directory, whatever its path."""
        return _DIRECTORY

    def open(self, name: str, directory: int, /, *, create: bool) -> int:
        """A file; its name is safe once the directory was synchronised."""
        with self._lock:
            if name not in self._names[-1]:
                if not create:
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
                inode = next(_inodes) + 1_000_000
                self._files[inode] = _File(inode, bytearray(), b"")
                self._rename({**self._names[-1], name: inode}, f"create {name}")
            fd = next(self._fds)
            self._open[fd] = self._names[-1][name]
            return fd

    def close(self, fd: int, /) -> None:
        """Forget the descriptor."""
        with self._lock:
            self._open.pop(fd, None)

    def fstat(self, fd: int, /) -> os.stat_result:
        """Ours, private, and every byte allocated."""
        kind, size, inode = stat.S_IFDIR | 0o700, 0, self._inode
        if fd != _DIRECTORY:
            file = self._file(fd)
            kind, size, inode = stat.S_IFREG | 0o600, len(file.data), file.inode
        blocks = -(-size // SECTOR)
        return os.stat_result((kind, inode, -self._inode, 1, os.geteuid(), 0, size, 0, 0, 0), {"st_blocks": blocks})

    def fchmod(self, fd: int, mode: int, /) -> None:
        """Nothing to do."""

    def lock(self, fd: int, /) -> bool:
        """The disk is not shared."""
        return True

    def pread(self, fd: int, nbytes: int, offset: int, /) -> bytes:
        """All bytes written, durable or not."""
        with self._lock:
            return bytes(self._file(fd).data[offset : offset + nbytes])

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int, /) -> int:
        """Not safe before it is synchronised."""
        with self._lock:
            file, written = self._file(fd), bytes(data)
            if offset + len(written) > len(file.data):
                self.ftruncate(fd, offset + len(written))
            file.data[offset : offset + len(written)] = written
            file.pending.append((offset, written))
            self._note(f"write {self._name(fd)}")
            return len(written)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """As direct I/O: whole pages."""
        self._check_aligned(buffers, offset)
        data = self.pread(fd, sum(map(len, buffers)), offset)
        done = 0
        for buffer in buffers:
            part = data[done : done + len(buffer)]
            buffer[: len(part)] = part
            done += len(part)
        return done

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int:
        """As direct I/O: whole pages, not durable, because the disk has a cache."""
        self._check_aligned(buffers, offset)
        return self.pwrite(fd, b"".join(buffers), offset)

    def fsync(self, fd: int, /) -> None:
        """All of the file is safe; or all names, if it is the directory."""
        with self._lock:
            if fd == _DIRECTORY:
                del self._names[:-1]
            else:
                file = self._file(fd)
                file.durable = bytes(file.data)
                file.pending.clear()
            self._note(f"fsync {self._name(fd)}")

    def ftruncate(self, fd: int, nbytes: int, /) -> None:
        """Extends with zeros."""
        with self._lock:
            file = self._file(fd)
            del file.data[nbytes:]
            file.data += bytes(nbytes - len(file.data))
            file.durable = file.durable[:nbytes].ljust(nbytes, b"\0")
            file.pending = [(at, data[: nbytes - at]) for at, data in file.pending if at < nbytes]
            self._note(f"truncate {self._name(fd)}")

    def allocate(self, fd: int, nbytes: int, /) -> None:
        """As `ftruncate`, if it becomes longer."""
        if nbytes > len(self._file(fd).data):
            self.ftruncate(fd, nbytes)

    def free_bytes(self, fd: int, /) -> int:
        """More than anybody needs."""
        return 1 << 40

    def enable_direct(self, fd: int, /) -> bool:
        """It can."""
        return True

    def open_queue(self, fd: int, pieces: int, buffers: int, /) -> IoQueue:
        """`OneByOneQueue`."""
        return OneByOneQueue(self, fd)

    def drop_cache(self, fd: int, offset: int, nbytes: int, /) -> None:
        """Nothing to do."""

    def _file(self, fd: int) -> _File:
        inode = self._open.get(fd)
        if inode is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._files[inode]

    def _name(self, fd: int) -> str:
        inode = self._open.get(fd)
        return next((name for name, each in self._names[-1].items() if each == inode), "directory")

    def _rename(self, names: dict[str, int], call: str) -> None:
        self._names.append(names)
        self._note(call)

    def _note(self, call: str) -> None:
        if self._remember:
            files = {inode: _moment(file) for inode, file in self._files.items()}
            self.moments.append(Moment(call, files, tuple(map(dict, self._names))))

    def _check_aligned(self, buffers: Sequence[memoryview], offset: int) -> None:
        if offset % DISK_PAGE or any(len(buffer) % DISK_PAGE for buffer in buffers):
            raise OSError(errno.EINVAL, f"direct I/O of {[len(buffer) for buffer in buffers]} bytes at {offset}")


def _moment(file: _File) -> _FileMoment:
    """Each sector's contents, one after the other: the safe one, and as it was after each write since."""
    sectors: dict[int, list[bytes]] = {}
    now = bytearray(file.durable)
    for offset, data in file.pending:
        now[offset : offset + len(data)] = data
        for sector in range(offset // SECTOR, -(-(offset + len(data)) // SECTOR)):
            at = slice(sector * SECTOR, (sector + 1) * SECTOR)
            contents = sectors.setdefault(sector, [bytes(file.durable[at])])
            if bytes(now[at]) not in contents:
                contents.append(bytes(now[at]))
    several = {sector: tuple(contents) for sector, contents in sorted(sectors.items()) if len(contents) > 1}
    return _FileMoment(bytes(file.data), file.durable, several)


class OneByOneQueue:
    """A queue that moves pieces by calls of `io`, the last one first: each can fail, and be cut off from the others.

    One moves each time that somebody asks for what has ended, so that those of several turns are under way together.
    """

    def __init__(self, io: RawIo, fd: int) -> None:
        self._io = io
        self._fd = fd
        self._numbers = itertools.count()
        self._under_way: list[tuple[int, Piece, bool]] = []
        self._changed = threading.Semaphore(0)

    def submit(self, pieces: Sequence[Piece], /, *, writing: bool) -> list[int]:
        """Nothing moves yet."""
        begun = [(next(self._numbers), piece, writing) for piece in pieces]
        self._under_way += begun
        self.wake()
        return [number for number, _, _ in begun]

    def reap(self) -> list[tuple[int, int]]:
        """One, in a call of its own."""
        self._changed.acquire()
        if not self._under_way:
            return []
        number, piece, writing = self._under_way.pop()
        if self._under_way:
            self.wake()
        return [(number, self._move(piece, writing=writing))]

    def wake(self) -> None:
        """End `reap`."""
        self._changed.release()

    def close(self) -> None:
        """Nothing to do."""

    def _move(self, piece: Piece, *, writing: bool) -> int:
        try:
            return (self._io.pwritev if writing else self._io.preadv)(self._fd, piece.buffers, piece.offset)
        except OSError as error:
            return -(error.errno or errno.EIO)


def flip_header_bit(directory: Path, slot: int, bit: int, size_class: int = 0) -> None:
    """Flip one bit of the header page of `slot`."""
    _flip(directory, slot, bit, size_class, start=0, nbytes=DISK_PAGE)


def flip_image_bit(directory: Path, slot: int, bit: int, size_class: int = 0) -> None:
    """Flip one bit of the image in `slot` of `size_class`."""
    image_bytes = parse_superblock((directory / SUPERBLOCK).read_bytes()).image_bytes[size_class]
    _flip(directory, slot, bit, size_class, start=DISK_PAGE, nbytes=image_bytes)


def _flip(directory: Path, slot: int, bit: int, size_class: int, *, start: int, nbytes: int) -> None:
    slabs = parse_superblock((directory / SUPERBLOCK).read_bytes()).geometry
    if not 0 <= bit < 8 * nbytes:
        raise TierError(f"bit {bit} does not lie in [0, {8 * nbytes})")
    try:
        offset = slabs.offset(size_class, slot) + start + bit // 8
    except PlanError as error:
        raise TierError(str(error)) from None
    fd = os.open(directory / SEGMENT, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, offset)
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), offset)
        os.fsync(fd)  # a tier that reads around the page cache must see it
    finally:
        os.close(fd)
