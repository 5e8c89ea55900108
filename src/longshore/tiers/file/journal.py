"""The journal: what has changed since a checkpoint, a note at a time, so that it survives the end of the process.

Nothing is synchronised. What the process has written is the system's, and survives a `kill -9`; a crash of the machine
may lose the newest notes, and reading is what then finds out.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from longshore.tiers.arena import PAGE
from longshore.tiers.file import index_format as fmt
from longshore.tiers.file.directory import Directory
from longshore.tiers.file.system import write_all


def journal_name(epoch: int) -> str:
    """The file of journal `epoch`."""
    return f"journal.{epoch % 2}"


class Journal:
    """An open journal, empty, with room for `room` notes, for what comes after checkpoint `epoch`.

    Attributes:
        serial: Of the last note, in this journal or one before it.
        written: Notes that are in it.
    """

    def __init__(self, directory: Directory, epoch: int, room: int) -> None:
        self.epoch = epoch
        self.room = room
        self.serial = 0
        self.written = 0
        self._io = directory.io
        self._fd = directory.reserve(journal_name(epoch), fmt.journal_bytes(room))
        try:
            with directory.as_tier_errors(journal_name(epoch)):
                write_all(self._io, self._fd, fmt.pack_journal_header(epoch), 0)
        except BaseException:
            self._io.close(self._fd)
            raise

    def append(self, notes: Sequence[tuple[int, bytes]]) -> None:
        """Write down `notes`, kinds and entries, at once. Raises `OSError`: then they do not count, if they are there.

        What comes next has higher serial numbers, and stands in their place.
        """
        if not notes:
            return
        first = self.serial + 1
        self.serial += len(notes)
        if self.written + len(notes) > self.room:
            raise OSError(errno.ENOSPC, f"{journal_name(self.epoch)}: no room for {len(notes)} more notes")
        data = b"".join(fmt.pack_note(self.epoch, first + n, kind, entry) for n, (kind, entry) in enumerate(notes))
        write_all(self._io, self._fd, data, PAGE + self.written * fmt.NOTE.itemsize)
        self.written += len(notes)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._fd >= 0:
            self._io.close(self._fd)
            self._fd = -1
