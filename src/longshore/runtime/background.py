"""`BackgroundLoop`: a thread that pumps a runtime, so that transfers continue between an engine's steps."""

from __future__ import annotations

import threading

from longshore.runtime.loop import Runtime

_NAP_SECONDS = 1e-3
"""Seconds between two polls while anything is in flight."""


class BackgroundLoop:
    """Pumps a runtime in a separate thread, which sleeps while nothing is in flight.

    A mover that raises there disables the tiers: nobody else would learn of it, and what waits for it would wait on.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="longshore-runtime", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Idempotent; the runtime stays open."""
        self._stopping = True
        self._runtime.wakeup.set()
        self._thread.join()

    def _run(self) -> None:
        busy = True
        while not self._stopping:
            self._runtime.wakeup.wait(_NAP_SECONDS if busy else None)
            self._runtime.wakeup.clear()
            try:
                busy = self._runtime.pump()
            except Exception as error:  # noqa: BLE001 - of a mover: here is no caller to see it, and requests wait
                self._runtime.fail(error)
