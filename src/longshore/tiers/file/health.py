"""What went wrong, and whether the disk is still good for anything: what fails again and again is left alone.

    on ──► read-only     so many writes in a row failed: the disk is full, or worn out
       ──► off           so many reads in a row failed

One that succeeds begins the count anew; a tier that is read-only or off stays so until it is opened again, and the log
says so once.
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
"""Failures in a row, of one kind, that end it."""

_FAILED = frozenset({Status.IO_ERROR, Status.NO_SPACE})

_UNREADABLE = (Status.CORRUPT, Status.MISMATCH, Status.SHORT, Status.IO_ERROR)
_WRONG = (*((Op.READ, each) for each in _UNREADABLE), (Op.WRITE, Status.IO_ERROR), (Op.WRITE, Status.NO_SPACE))
"""What can go wrong with an operation that was tried."""


class TierState(enum.Enum):
    """What a file tier still does."""

    ON = "on"
    READ_ONLY = "read_only"
    OFF = "off"


TROUBLES = (
    *(f"{op.value}_{status.value}" for op, status in _WRONG),
    *(state.value for state in (TierState.READ_ONLY, TierState.OFF)),
    "checkpoint",
)
"""All that `FileTier.troubles` counts."""


class Health:
    """Of the disk under the tier called `name`. For one thread, but for what is read here.

    Attributes:
        state: What may still be tried.
    """

    def __init__(self, name: str) -> None:
        self.state = TierState.ON
        self._name = name
        self._failures = dict.fromkeys(Op, 0)
        self._wrong: Counter[tuple[Op, Status]] = Counter()

    def allows(self, op: Op) -> bool:
        """Whether operations of this kind may be tried."""
        return self.state is TierState.ON or (self.state is TierState.READ_ONLY and op is Op.READ)

    @property
    def troubles(self) -> dict[str, int]:
        """How often each thing went wrong, whether the tier is read-only, and whether it is off."""
        wrong = {f"{op.value}_{status.value}": self._wrong[op, status] for op, status in _WRONG}
        return {**wrong, **{state.value: int(state is self.state) for state in (TierState.READ_ONLY, TierState.OFF)}}

    def note(self, op: Op, statuses: Sequence[Status]) -> None:
        """Some were tried, one after the other, and ended so."""
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
