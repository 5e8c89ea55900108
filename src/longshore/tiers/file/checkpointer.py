"""Puts the index on the medium when it is due, in a thread of its own, so that no operation waits for that."""

from __future__ import annotations

import logging
import threading
import time

from longshore.errors import TierError
from longshore.tiers.file.index import Index

_log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""After a checkpoint that failed, the next one is tried so much later."""


class Checkpointer:
    """Writes checkpoints of `index`, one at a time. Thread-safe.

    Attributes:
        failures: Checkpoints that could not be written. The index goes on without: a restart may know less.
    """

    def __init__(self, index: Index, name: str) -> None:
        self.failures = 0
        self._index = index
        self._name = name
        self._busy = threading.Lock()  # from a nudge to the end of its checkpoint; for ever, once closed
        self._closed = False
        self._not_before = 0.0

    def nudge(self) -> None:
        """A checkpoint may be due; begins it, unless one is under way, or has just failed."""
        if self._index.due and time.monotonic() >= self._not_before and self._busy.acquire(blocking=False):
            try:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            except RuntimeError as error:  # the system has no more of them, or the interpreter is about to end
                self._failed(error)
                self._busy.release()

    def close(self) -> None:
        """Wait for the checkpoint that is under way, and write a last one. Idempotent."""
        if not self._closed:
            self._closed = True
            self._busy.acquire()
            self._checkpoint()

    def _work(self) -> None:
        try:
            self._checkpoint()
        finally:
            self._busy.release()

    def _checkpoint(self) -> None:
        try:
            self._index.checkpoint()
        except TierError as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._not_before = time.monotonic() + RETRY_SECONDS
        self.failures += 1
        if self.failures == 1:
            _log.warning(
                "index checkpoint failed: %s; tried again after %d s. Records written since the last one may be lost "
                "at a restart: check the disk. This is said once",
                error,
                RETRY_SECONDS,
            )
