"""Time for our threads, where an engine does nothing but ask whether they are done.

A step that finds nothing to compute returns at once, and the next one asks again. vLLM's own process then sleeps for a
millisecond. An engine in the process of its caller (VLLM_ENABLE_V1_MULTIPROCESSING=0) does not: its loop takes and
gives the interpreter lock so quickly that a thread which waits for it may lose the race for hundreds of milliseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_COMPUTED_SECONDS = 0.5e-3
"""A step that took longer has computed something, or slept."""

_NAP_SECONDS = 0.2e-3


class Pace:
    """Sleeps a little in steps that come one upon the other while copies are awaited."""

    def __init__(self) -> None:
        self._last_step = -math.inf

    def planned(self, is_awaited: Callable[[], bool]) -> None:
        """A step is planned; `is_awaited` says whether somebody waits for copies."""
        if time.monotonic() - self._last_step < _COMPUTED_SECONDS and is_awaited():
            time.sleep(_NAP_SECONDS)
        self._last_step = time.monotonic()
