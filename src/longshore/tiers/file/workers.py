"""Threads that carry out turns, one at a time each, and wait for the disk: for what has no queue (`rolling.py`).

With one piece in the disk for each thread, it takes several to keep a disk busy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.tiers.file.dispatch import Dispatcher, Order

_log = logging.getLogger(__name__)

Execute = Callable[[Sequence[Order], int], Sequence[Status]]
"""Carries out the operations of a turn, given the index of the worker; a status for each."""


class Workers:
    """`threads` workers that call `execute`. Raises `TierError` if there are fewer."""

    def __init__(self, dispatcher: Dispatcher, execute: Execute, threads: int, name: str) -> None:
        self._dispatcher = dispatcher
        self._execute = execute
        # Daemons: a process that ends without close must not wait for a stuck device.
        self._threads = [
            threading.Thread(target=self._work, args=(index,), name=f"{name}-{index}", daemon=True)
            for index in range(threads)
        ]
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                del self._threads[started:]
                self.close()
                raise TierError(f"expected {threads} threads, the system gave {started}: {error}") from error

    def close(self) -> None:
        """End what has not begun, wait for what has, and for the threads. Idempotent."""
        self._dispatcher.close()
        for thread in self._threads:
            thread.join()

    def _work(self, worker: int) -> None:
        job = self._dispatcher.wait()
        while job is not None:
            orders = job.orders
            try:
                statuses = self._execute(orders, worker)
            except Exception:  # noqa: BLE001 - a worker that died would leave its batch without a result
                statuses = failed_unexpectedly(orders)
            job = self._dispatcher.end_and_wait(job, statuses)


def failed_unexpectedly(orders: Sequence[Order]) -> Sequence[Status]:
    """What is said of a turn that raised what nobody expects, while that is being handled."""
    op = orders[0].op
    _log.exception("internal error of the file tier in a %s of %d slots from %d on", op.op.value, len(orders), op.slot)
    return [Status.IO_ERROR] * len(orders)
