"""File tiers in tier hosts, for tests that do harm to the process."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longshore.runtime.tier_host import HostedFileTier
from longshore.runtime.tier_host.supervisor import PROGRAM
from longshore.testing import TierHarness, TierTests
from longshore.testing.tier_harness import span
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.file import capacity_for

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots
TIMEOUT = 120.0


def program(*lines: str) -> Sequence[str]:
    """A tier host that runs `lines` first; the module is `child` there."""
    script = ("import sys", "from longshore.runtime.tier_host import child", *lines, "sys.exit(child.main())")
    return (sys.executable, "-c", "; ".join(script))


class HostedHarness(TierHarness):
    """A `TierHarness` around a `HostedFileTier`, whose process can be seen and signalled."""

    tier: HostedFileTier

    def __init__(self, directory: Path, run: Sequence[str] = PROGRAM, **settings: Any) -> None:
        self.directory = directory

        def open_tier() -> HostedFileTier:
            return HostedFileTier(
                directory,
                **{
                    "capacity": capacity_for(SLOTS, IMAGE),
                    "image_bytes": IMAGE,
                    "arena": arena,
                    "scope": bytes(32),
                    "threads": 4,
                    "program": run,
                    **settings,
                },
            )

        arena = Arena(32 * span(IMAGE), ArenaSettings(shared=True, huge_pages=False))
        try:
            super().__init__(open_tier, arena)
        except BaseException:
            arena.close()
            raise

    @property
    def pid(self) -> int:
        """The process that there is."""
        process = self.tier._supervisor.process
        assert process is not None
        return process.pid

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, and see that this is noticed."""
        deaths = self.tier.failures["tier_host"]
        self.signal(signal.SIGKILL)
        self.until(lambda: self.tier.failures["tier_host"] > deaths)

    def until(self, what: Callable[[], bool]) -> None:
        """Poll until `what`; keeps the results."""
        give_up = time.monotonic() + TIMEOUT
        while not what():
            assert time.monotonic() < give_up, "it did not come to that"
            for result in self.tier.poll():
                self._unclaimed[result.ticket] = result
            time.sleep(0.002)

    def until_open(self) -> None:
        """Poll until there is a process that has opened the files."""
        self.until(lambda: self.tier._is_open)

    def close(self) -> None:
        self.tier.close()
        self.arena.close()


def is_running(pid: int) -> bool:
    """Whether a process runs, or waits to be reaped by somebody else than us."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(what: Callable[[], bool]) -> bool:
    """Whether it comes to that in time."""
    give_up = time.monotonic() + TIMEOUT
    while not what():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.01)
    return True
