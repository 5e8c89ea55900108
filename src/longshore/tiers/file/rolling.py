"""One thread that keeps many turns in the disk, and works on what has arrived while the others are under way.

    take ─► steps ─► pieces ──► queue ~~~ disk ~~~► pieces ─► steps ─► end
      ▲                                                         │
      └──────────── there is room in the window again ──────────┘

By turns, one is given to the disk, and one that has come out of it is gone on with: so the disk has something to do
while checksums are verified. One thread can verify more than a disk delivers, and has nobody to wait for. Several, each
of which gives up Python's interpreter lock for each checksum, wait for that lock up to ten times as long as they work.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.tiers.file.dispatch import Dispatcher, Job, Order
from longshore.tiers.file.payload import Lane
from longshore.tiers.file.segment import outcome
from longshore.tiers.file.steps import Move, Steps
from longshore.tiers.file.system import Queue
from longshore.tiers.file.workers import failed_unexpectedly

_log = logging.getLogger(__name__)

WINDOW_TURNS = 16
"""Turns that are under way at once, at most."""

READ_WINDOW, WRITE_WINDOW = 24 << 20, 64 << 20
"""Bytes of images that are in the disk to be read, and to be written, or a turn more of each.

Where a disk tells of all that it was given at once, reads of a long prompt are verified while the next ones move.
"""

AHEAD = 2
"""Turns that are ready to be moved as soon as there is room in the window: their checksums take their time."""

_MOMENT = 1e-6
"""Seconds of sleep for whoever polls, between turns that have landed together.

A checksum of a short image gives the interpreter lock up for less time than another thread takes to wake up; so results
would be seen, and answered by more to do, when all turns had been worked on, and the disk had stood still meanwhile.
"""


class Rolling:
    """A thread that gives the pieces of `steps` to `queue`, for as many turns at once as there are `lanes`.

    The queue has room for all their pieces. Raises `TierError` if there is no thread.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        steps: Callable[[Sequence[Order], Lane], Steps[Sequence[Status]]],
        queue: Queue,
        patiently: Callable[[Move], list[Status]],
        lanes: Sequence[Lane],
        name: str,
    ) -> None:
        """`patiently` moves what the queue was interrupted in, or did not take."""
        self._dispatcher = dispatcher
        self._steps = steps
        self._queue = queue
        self._patiently = patiently
        self._lanes = list(lanes)
        self._under_way: dict[int, tuple[_Flight, int]] = {}  # by the queue's number, which piece of which
        self._flights: set[_Flight] = set()
        self._ready: deque[_Flight] = deque()
        self._landed: deque[_Flight] = deque()
        self._room = {False: READ_WINDOW, True: WRITE_WINDOW}  # in bytes, by whether they are written
        # A daemon: Python does not wait for it when a process ends without close.
        self._thread = threading.Thread(target=self._work, name=f"{name}-queue", daemon=True)
        dispatcher.wake = queue.wake
        try:
            self._thread.start()
        except RuntimeError as error:
            dispatcher.close()
            raise TierError(f"expected a thread, the system gave none: {error}") from error

    def close(self) -> None:
        """End what has not begun, wait for what has, and for the thread. Idempotent."""
        self._dispatcher.close()
        self._thread.join()

    def _work(self) -> None:
        try:
            self._roll()
        except Exception as error:  # noqa: BLE001 - batches without a result would be waited for without end
            _log.exception(
                "file tier disabled: asynchronous I/O queue failed (%s); restart the process to re-enable it", error
            )
            self._dispatcher.close()
            self._queue.close()  # which waits for what is under way: only then is its memory anybody else's
            for flight in self._flights:
                self._dispatcher.end(flight.job, [Status.IO_ERROR] * len(flight.orders))

    def _roll(self) -> None:
        while True:
            self._begin_ready()
            taken = self._take_turn()
            if self._landed:
                self._go_on(self._landed.popleft())
            elif taken:
                continue
            elif self._under_way or not self._dispatcher.closed:
                self._wait()
            else:
                return

    def _take_turn(self) -> bool:
        """Begin one, if there is one, as far as there is room for it."""
        if not self._lanes or len(self._ready) >= AHEAD or (job := self._dispatcher.take()) is None:
            return False
        flight = _Flight(job, self._lanes.pop(), self._steps)
        self._flights.add(flight)
        self._go_on(flight)
        self._begin_ready()
        return True

    def _go_on(self, flight: _Flight) -> None:
        """Up to its next pieces, or to its end."""
        try:
            flight.advance()
        except StopIteration as end:
            self._end(flight, end.value)
        except Exception:  # noqa: BLE001 - without a result its batch would never end
            self._end(flight, failed_unexpectedly(flight.orders))
        else:
            self._ready.append(flight)

    def _begin_ready(self) -> None:
        """Those for which there is room."""
        waiting, self._ready = self._ready, deque()
        for flight in waiting:
            if self._room[flight.move.writing] <= 0:
                self._ready.append(flight)
                continue
            try:
                numbers = self._queue.begin(flight.move.pieces, writing=flight.move.writing)
            except Exception:  # noqa: BLE001 - as above
                self._end(flight, failed_unexpectedly(flight.orders))
            else:
                self._room[flight.move.writing] -= flight.nbytes
                self._under_way.update((number, (flight, at)) for at, number in enumerate(numbers))

    def _wait(self) -> None:
        """Until something has ended, or there is something to take."""
        self._queue.wait()
        for number, moved in self._queue.ended():
            flight, at = self._under_way.pop(number)
            piece = flight.move.pieces[at]
            status = outcome(piece, moved) or self._patiently(Move([piece], flight.move.writing))[0]
            if flight.arrive(at, status):
                self._room[flight.move.writing] += flight.nbytes
                self._landed.append(flight)

    def _end(self, flight: _Flight, statuses: Sequence[Status]) -> None:
        self._flights.remove(flight)
        self._lanes.append(flight.lane)
        self._dispatcher.end(flight.job, statuses)
        if self._landed:
            time.sleep(_MOMENT)


class _Flight:
    """A turn that was taken, and what it is waiting for."""

    __slots__ = ("_left", "_statuses", "_steps", "job", "lane", "move", "nbytes", "orders")

    def __init__(self, job: Job, lane: Lane, steps: Callable[[Sequence[Order], Lane], Steps[Sequence[Status]]]) -> None:
        self.job = job
        self.lane = lane
        self.orders = job.orders
        self.nbytes = sum(op.length for op, _ in self.orders)
        self._steps = steps(self.orders, lane)
        self._statuses: list[Status] = []  # before it has begun

    def advance(self) -> None:
        """Up to what is to be moved next; raises `StopIteration` with the result when there is nothing more."""
        self.move = self._steps.send(self._statuses) if self._statuses else next(self._steps)
        self._left = len(self.move.pieces)
        self._statuses = [Status.IO_ERROR] * self._left

    def arrive(self, at: int, status: Status) -> bool:
        """What became of a piece; whether it was the last."""
        self._statuses[at] = status
        self._left -= 1
        return not self._left
