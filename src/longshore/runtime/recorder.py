"""`EventRecorder`: writes the events of the cache to a bounded file for `longshore explain`.

    cache ──(pulled in batches, by a thread of its own)──► path ──(half of the size is full)──► path.1, the one before

The engine's step never waits for the file. Events that are not collected in time are missing. If the file cannot be
written, recording stops; this is logged once, and missed events are counted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from longshore.cache.events import Event, EventKind
from longshore.cache.explain import former
from longshore.runtime.loop import Runtime

BATCH = 4096
"""Events per batch."""

INTERVAL = 0.25
"""Seconds between two reads of the cache's events."""

KEPT = 1 << 16
"""Events that the cache keeps for the recorder."""

_KEY_BYTES = 8
_log = logging.getLogger(__name__)


class EventRecorder:
    """Writes the events of one runtime's cache to `path`, at most `limit` bytes in it and in the file before it.

    Files are created with mode 0600. If the path is not a regular file, for instance a symbolic link, no events are
    written. Times are those of `clock`, in seconds since 1970. The file begins with a reset; the file of an earlier
    process is kept as the previous file. Keys are shortened to 8 bytes. The recorder must be the only reader of the
    cache's events.
    """

    def __init__(
        self, runtime: Runtime, path: Path, limit: int, *, clock: Callable[[], float] = time.time, start: bool = True
    ) -> None:
        self.path = path
        self.written = 0
        """Events written."""
        self.missed = 0
        """Events that were not collected in time, or could not be written."""
        self.failure: Exception | None = None
        """The exception that stopped the recording."""
        self._runtime = runtime
        self._limit = max(1, limit // 2)
        self._began = runtime.clock()
        self._offset = clock() - self._began
        self._file: BinaryIO | None = None
        self._size = 0
        self._closed = False
        self._stop = threading.Event()
        self._write([Event(0, EventKind.RESET, self._began, cause="start")])
        self._thread = threading.Thread(target=self._run, name="longshore-events", daemon=True)
        if start:
            self._thread.start()

    def pump(self) -> bool:
        """Write the next batch; returns whether there may be more."""
        with self._runtime.observe() as cache:
            events = cache.events(BATCH)
        self.missed += sum(event.length for event in events if event.kind is EventKind.GAP)
        self._write(events)
        return len(events) >= BATCH

    def close(self) -> None:
        """Write the remaining events and stop. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        while self.pump():
            pass
        if self._file is not None:
            self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL):
            while self.pump() and not self._stop.is_set():
                pass

    def _write(self, events: Sequence[Event]) -> None:
        if not events:
            return
        if self.failure is not None:
            self.missed += len(events)
            return
        # What a tier had at start was taken in before the cache was told the time.
        shifted = (event._replace(at=max(event.at, self._began) + self._offset) for event in events)
        lines = b"".join(json.dumps(event.as_json(key_bytes=_KEY_BYTES)).encode() + b"\n" for event in shifted)
        try:
            if self._file is None or self._size + len(lines) > self._limit:
                self._rotate()
            if self._file is not None:
                self._file.write(lines)
        except (OSError, ValueError) as error:  # a NUL in the name
            self._give_up(error, len(events))
        else:
            self._size += len(lines)
            self.written += len(events)

    def _rotate(self) -> None:
        """Begin a new file; the one that is there takes the place of the one before it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(self.path.lstat().st_mode):
                raise OSError(errno.EEXIST, "not a regular file", str(self.path))
            self.path.replace(former(self.path))
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file, self._size = os.fdopen(fd, "wb", buffering=0), 0

    def _give_up(self, error: Exception, events: int) -> None:
        _log.warning("event recording to %s stopped, restart the engine to resume it: %s", self.path, error)
        self.failure = error
        self.missed += events
        if self._file is not None:
            self._file.close()
            self._file = None
