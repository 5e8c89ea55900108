"""`EventRecorder`: writes the events of the cache to a bounded file for `longshore explain`, and publishes them.

    cache ──(pulled in batches, by a thread of its own)──► path ──(half of the size is full)──► path.1, the one before
                                                     └───► KVEventPublisher, for routers

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
from longshore.config import Config
from longshore.errors import ConfigError
from longshore.runtime.kv_events import KVEventPublisher
from longshore.runtime.loop import Runtime

BATCH = 4096
"""Events per batch."""

INTERVAL = 0.25
"""Seconds between two reads of the cache's events for the file."""

PUBLISHING_INTERVAL = 0.05
"""The same for routers."""

KEPT = 1 << 16
"""Events that the cache keeps for the recorder."""

_KEY_BYTES = 8
_log = logging.getLogger(__name__)


class EventRecorder:
    """Writes the events of one runtime's cache to `path`, at most `limit` bytes in it and in the file before it.

    They go to the `publisher` as well, which is closed with the recorder. Either may be missing.

    Files are created with mode 0600. If the path is not a regular file, for instance a symbolic link, no events are
    written. Times are those of `clock`, in seconds since 1970. The file begins with a reset; the file of an earlier
    process is kept as the previous file. Keys are shortened to 8 bytes. The recorder must be the only reader of the
    cache's events.
    """

    def __init__(
        self,
        runtime: Runtime,
        path: Path | None,
        limit: int,
        *,
        publisher: KVEventPublisher | None = None,
        clock: Callable[[], float] = time.time,
        start: bool = True,
    ) -> None:
        self.path = path
        self.publisher = publisher
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
        with self._runtime.locked() as cache:
            events = cache.events(BATCH)
            compared = cache.reconcile(self.publisher.announced) if self.publisher is not None else ()
        if self.publisher is not None:
            self.publisher.publish(events, compared)
            self.publisher.serve_replays()
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
        if self.publisher is not None:
            self.publisher.close()

    def _run(self) -> None:
        while not self._stop.wait(INTERVAL if self.publisher is None else PUBLISHING_INTERVAL):
            while self.pump() and not self._stop.is_set():
                pass

    def _write(self, events: Sequence[Event]) -> None:
        if not events or self.path is None:
            return
        if self.failure is not None:
            self.missed += len(events)
            return
        # What a tier had at start was taken in before the cache was told the time.
        shifted = (event._replace(at=max(event.at, self._began) + self._offset) for event in events)
        lines = b"".join(json.dumps(event.as_json(key_bytes=_KEY_BYTES)).encode() + b"\n" for event in shifted)
        try:
            if self._file is None or self._size + len(lines) > self._limit:
                self._rotate(self.path)
            if self._file is not None:
                self._file.write(lines)
        except (OSError, ValueError) as error:  # a NUL in the name
            self._give_up(error, len(events))
        else:
            self._size += len(lines)
            self.written += len(events)

    def _rotate(self, path: Path) -> None:
        """Begin a new file; the one that is there takes the place of the one before it."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(path.lstat().st_mode):
                raise OSError(errno.EEXIST, "not a regular file", str(path))
            path.replace(former(path))
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file, self._size = os.fdopen(fd, "wb", buffering=0), 0

    def _give_up(self, error: Exception, events: int) -> None:
        _log.warning("event recording to %s stopped, restart the engine to resume it: %s", self.path, error)
        self.failure = error
        self.missed += events
        if self._file is not None:
            self._file.close()
            self._file = None


def kept_events(config: Config) -> int:
    """How many events the cache keeps for the recorder of `config`; 0 without one."""
    return KEPT if config.events_path is not None or config.kv_events else 0


def open_recorder(runtime: Runtime, config: Config, chunk_tokens: int) -> EventRecorder | None:
    """The recorder that `config` asks for, with chunks of `chunk_tokens` tokens. Raises `ConfigError`."""
    if config.kv_events_remote and not config.kv_events:
        raise ConfigError("kv_events_remote is set, but kv_events is not: set the address at which to publish")
    if not kept_events(config):
        return None
    publisher = None
    if config.kv_events:
        replay, topic = config.kv_events_replay, config.kv_events_topic
        publisher = KVEventPublisher(config.kv_events, chunk_tokens, replay=replay, topic=topic)
    return EventRecorder(runtime, config.events_path, config.events_size, publisher=publisher)
