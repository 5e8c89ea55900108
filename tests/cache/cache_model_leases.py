"""What the model expects of one hold: which chunks it keeps, what was ordered of them, and how that must end."""

from __future__ import annotations

from collections.abc import Sequence

from cache_kit import above
from cache_movers import Job

from longshore.boundary import Key, Status
from longshore.cache import MissReason, Outcome


class ModelHold:
    """What the model expects of one hold."""

    def __init__(self, keys: Sequence[Key], request: str | None, *, start: int = 0, joint: bool = False) -> None:
        self.keys = list(keys)
        self.start = start
        self.request = request
        self.joint = joint
        self.lost: set[Key] = set()
        """Independent chunks, and were lost once: the hold knows them no more, even when they come back."""
        self.excused = False
        self.has_load = False
        self.parts: list[Job] = []
        self.blocks: list[int] = []
        self.sources: list[str] = []
        self.cut: list[MissReason] = []
        self.outcome: Outcome | None = None
        self.deadline = 0.0
        self.reading: tuple[int, ...] = ()
        self.reading_until = 0.0
        self.patient = False

    @property
    def needs(self) -> set[Key]:
        """The held chunks, and all that these need to be reached."""
        return {each for key in self.keys for each in above(key)}

    def wants(self, read: int, now: float) -> bool:
        """Whether this still waits for a job that reads into the host tier."""
        joined = self.parts and self.outcome is None and now < self.deadline
        return (read in self.reading and now < self.reading_until) or bool(
            joined and any(read in part.transfer.after for part in self.parts)
        )

    def conclude(self, unfinished: MissReason) -> list[MissReason]:
        """Fix the outcome; the misses."""
        arrived, misses = 0, []
        broken = self.joint and any(part.untold or set(part.told) != {Status.OK} for part in self.parts)
        for part in self.parts:
            for status in part.told:
                if part.untold:
                    reason: MissReason | None = unfinished
                else:
                    reason = None if status is Status.OK else MissReason(status.value)
                failed = any(each is not MissReason.AFTER_MISS for each in misses)
                if reason is None and not misses and not broken:
                    arrived += 1
                elif (reason is None and (misses or broken)) or (failed and reason is MissReason.CANCELLED):
                    misses.append(MissReason.AFTER_MISS)
                else:
                    assert reason is not None
                    misses.append(reason)
        self.outcome = Outcome(arrived, tuple(self.sources[:arrived]))
        return misses + self.cut
