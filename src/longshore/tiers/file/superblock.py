"""The superblock, in two identical files, and a pending reset.

    superblock, superblock.copy    a page each; written one after the other, in place, by the process with the lock
    reset                          the same page twice; written by another process while the lock is not held

Their blocks are allocated and their descriptors open from the start, so neither a full disk nor a lack of descriptors
prevents a reset. Each copy is synchronised before the next one is written, and the newest copy is written last. So one
copy is valid after a crash at any point, and after any single page is damaged.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from longshore.boundary import PAGE
from longshore.errors import FormatError
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.system import RawIo, write_all

_log = logging.getLogger(__name__)

SUPERBLOCK = "superblock"
COPIES = (SUPERBLOCK, "superblock.copy")
RESET = "reset"
FILES = {**dict.fromkeys(COPIES, PAGE), RESET: 2 * PAGE}
"""How long these files are."""

_BLANK = bytes(PAGE)


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
        pages = {name: self._directory.read(name, PAGE + 1) for name in COPIES}
        wrong = {}
        for name, page in pages.items():
            try:
                found[name] = fmt.parse_superblock(page)
            except FormatError as error:
                wrong[name] = str(error) if page else "superblock: there is none"
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
            f"{self._directory.path}: {next(iter(wrong.values()))}. Its copy cannot be used either. Nothing was "
            f"touched; remove the directory to start with an empty one"
        )

    def reset(self) -> int:
        """The generation of a pending reset; 0 without one. Raises `FormatError`."""
        data = self._directory.read(RESET, 2 * PAGE)
        pages = [page for at in (0, PAGE) if (page := data[at : at + PAGE]) not in (b"", _BLANK)]
        generations = []
        for page in pages:
            with contextlib.suppress(FormatError):
                generations.append(fmt.parse_reset(page))
        if len(pages) == 2 and not generations:
            raise FormatError(
                f"{self._directory.path}: both copies of a reset in it are damaged, so nothing in it may be served. "
                f"Nothing was touched; remove the directory to start with an empty one"
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
        """Raises `TierError` if there is no reset file; opening a tier creates it."""
        self._path = path
        with contextlib.ExitStack() as undo:
            self._directory = Directory(path, io, guest=True)
            undo.callback(self._directory.close)
            self._fd = self._directory.open(RESET)
            undo.pop_all()

    def write(self, generation: int) -> None:
        """Write that nothing older than `generation` may be served; durable on return. Raises `TierError`."""
        io, page = self._directory.io, fmt.pack_reset(generation)
        with self._directory.as_tier_errors(RESET):
            if not io.fstat(self._fd).st_nlink:
                raise FileNotFoundError(2, "it was removed")
            for at in (0, PAGE):
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
