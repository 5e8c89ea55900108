"""A copy of a device that fails when it ends, as a test says."""

from __future__ import annotations

from collections.abc import Callable

from longshore.transfer.device.base import Copy, DeviceEvent


class FailingCopy(Copy):
    """`copy`; `finish` calls `check` first, which raises what the test wants."""

    def __init__(self, copy: Copy, check: Callable[[], None]) -> None:
        self._copy = copy
        self._check = check

    @property
    def done_event(self) -> DeviceEvent:
        return self._copy.done_event

    def query(self) -> bool:
        return self._copy.query()

    def finish(self) -> float:
        self._check()
        return self._copy.finish()
