"""Whether the disk is still good for anything: what fails again and again is left alone, and said once.

    on ──► read-only     so many writes in a row failed: the disk is full, or worn out
       ──► off           so many reads in a row failed

One that succeeds begins the count anew; a tier that is read-only or off stays so until it is opened again.
"""

from __future__ import annotations

import enum
import logging
import threading

from longshore.boundary import Status
from longshore.tiers.base import Op

_log = logging.getLogger(__name__)

PATIENCE = 8
"""Failures in a row, of one kind, that end it."""

_FAILED = frozenset({Status.IO_ERROR, Status.NO_SPACE})


class State(enum.Enum):
    """What a file tier still does."""

    ON = "on"
    READ_ONLY = "read_only"
    OFF = "off"


class Health:
    """Of the disk under the tier called `name`. Thread-safe.

    Attributes:
        state: What may still be tried.
    """

    def __init__(self, name: str) -> None:
        self.state = State.ON
        self._name = name
        self._failures = dict.fromkeys(Op, 0)
        self._lock = threading.Lock()

    def allows(self, op: Op) -> bool:
        """Whether operations of this kind may be tried."""
        return self.state is State.ON or (self.state is State.READ_ONLY and op is Op.READ)

    def note(self, op: Op, status: Status) -> None:
        """One was tried, and ended so."""
        if status not in _FAILED and not self._failures[op]:
            return
        with self._lock:
            self._failures[op] = self._failures[op] + 1 if status in _FAILED else 0
            if self._failures[op] >= PATIENCE and self.allows(op):
                self.state = State.OFF if op is Op.READ else State.READ_ONLY
                _log.error(
                    "%s: %d %ss in a row failed, the last as %s: it is %s until it is opened again",
                    self._name,
                    PATIENCE,
                    op.value,
                    status.value,
                    self.state.value,
                )
