"""A thread that puts the index on the medium when it is due, so that no operation waits for that."""

from __future__ import annotations

import logging
import threading

from longshore.errors import TierError
from longshore.tiers.file.index import Index

_log = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
"""After a checkpoint that failed, the next one is tried so much later."""


class Keeper:
    """Writes checkpoints of `index`, from `nudge` to `close`.

    Attributes:
        failures: Checkpoints that could not be written. The index goes on without: a restart may know less.
    """

    def __init__(self, index: Index, name: str) -> None:
        self.failures = 0
        self._index = index
        self._nudged = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def nudge(self) -> None:
        """A checkpoint is due."""
        self._nudged.set()

    def close(self) -> None:
        """Write a last checkpoint, and end. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._nudged.set()
            self._thread.join()
            self._checkpoint()

    def _work(self) -> None:
        while True:
            self._nudged.wait()
            self._nudged.clear()
            if self._closed.is_set():
                return
            if self._index.due and not self._checkpoint():
                self._closed.wait(RETRY_SECONDS)

    def _checkpoint(self) -> bool:
        try:
            self._index.checkpoint()
        except TierError as error:
            self.failures += 1
            if self.failures == 1:
                _log.warning("%s; after a restart, what came after the last one may be missing", error)
            return False
        return True
