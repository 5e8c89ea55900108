"""Failure counters of a file tier, and its state after repeated failures.

    on ──► read-only     `PATIENCE` writes in a row failed: the disk is full or worn out
       ──► off           `PATIENCE` reads in a row failed

A success resets the count. A tier that is read-only or off stays so until it is opened again; this is logged once.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter
from collections.abc import Sequence

from longshore.boundary import Status
from longshore.tiers.base import Op

_log = logging.getLogger(__name__)

PATIENCE = 8
"""Consecutive failures of reads, or of writes, that change the state."""

_FAILED = frozenset({Status.IO_ERROR, Status.NO_SPACE})

_UNREADABLE = (Status.CORRUPT, Status.MISMATCH, Status.SHORT, Status.IO_ERROR)
_WRONG = (*((Op.READ, each) for each in _UNREADABLE), (Op.WRITE, Status.IO_ERROR), (Op.WRITE, Status.NO_SPACE))
"""Counted failures."""


class TierState(enum.Enum):
    """Operations that a file tier accepts: all, reads only, or none."""

    ON = "on"
    READ_ONLY = "read_only"
    OFF = "off"


TROUBLES = (
    *(f"{op.value}_{status.value}" for op, status in _WRONG),
    *(state.value for state in (TierState.READ_ONLY, TierState.OFF)),
    "checkpoint",
)
"""Keys of `FileTier.troubles`."""


class Health:
    """Health of the disk of the tier called `name`. Updated by one thread; attributes may be read by any.

    Attributes:
        state: The state.
    """

    def __init__(self, name: str) -> None:
        self.state = TierState.ON
        self._name = name
        self._failures = dict.fromkeys(Op, 0)
        self._wrong: Counter[tuple[Op, Status]] = Counter()

    def allows(self, op: Op) -> bool:
        """Whether operations of this kind are accepted."""
        return self.state is TierState.ON or (self.state is TierState.READ_ONLY and op is Op.READ)

    @property
    def troubles(self) -> dict[str, int]:
        """Number of failures by kind, and 0 or 1 for the states read-only and off."""
        wrong = {f"{op.value}_{status.value}": self._wrong[op, status] for op, status in _WRONG}
        return {**wrong, **{state.value: int(state is self.state) for state in (TierState.READ_ONLY, TierState.OFF)}}

    def record(self, op: Op, statuses: Sequence[Status]) -> None:
        """Record the statuses of operations, in order."""
        if not self._failures[op] and statuses.count(Status.OK) == len(statuses):
            return
        for status in statuses:
            if status is not Status.OK:
                self._wrong[op, status] += 1
            self._failures[op] = self._failures[op] + 1 if status in _FAILED else 0
            if self._failures[op] >= PATIENCE and self.allows(op):
                self.state = TierState.OFF if op is Op.READ else TierState.READ_ONLY
                _log.error(
                    "file tier %s is %s until the engine is restarted; check the disk: %d %ss in a row failed, the "
                    "last with %s",
                    self._name,
                    self.state.value.replace("_", "-"),
                    PATIENCE,
                    op.value,
                    status.value,
                )
