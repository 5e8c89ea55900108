"""Images that wait for one store or move to or from it; shared by the caller and the threads that move them.

    waiting ──take──► held ──end──► ended          held: a thread uses the image's bytes in the arena
       │               │ ▲                         free: a thread is busy with the store, on a buffer of its own
       │ release/defer │ │ hold                    deferred: a thread has it, and is busy with others before it
       │               ▼ │
       └───expire────► free, deferred ──expire──► ended

An image that a thread holds is ended by that thread alone, which has the deadline on each of its calls. All others can
be ended at any time, so a file system that hangs keeps no slot of the arena.
"""

from __future__ import annotations

import enum
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from longshore.boundary import Status
from longshore.tiers.base import Op, OpBatch
from longshore.tiers.remote.format import Identity


class RemoteError(Exception):
    """A remote store cannot be used: the connection failed, a deadline passed, or a reply was invalid.

    `reason` is for logs and counts, one of `longshore.tiers.remote.FAILURE_REASONS`.
    """

    def __init__(self, reason: str, message: str, status: Status = Status.UNAVAILABLE) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


class Phase(enum.Enum):
    """Of an image under way."""

    WAITING = "waiting"
    HELD = "held"
    FREE = "free"
    DEFERRED = "deferred"
    ENDED = "ended"


class Image:
    """One image to move: `memory` are its bytes in the arena, `deadline` a clock reading in seconds."""

    __slots__ = ("address", "batch", "deadline", "generation", "identity", "index", "memory", "owner", "phase")

    def __init__(
        self, batch: OpBatch, index: int, identity: Identity, memory: memoryview, deadline: float, generation: int
    ) -> None:
        self.batch = batch
        self.index = index
        self.identity = identity
        self.address = identity.address
        self.memory = memory
        self.deadline = deadline
        self.generation = generation
        self.owner = 0
        self.phase = Phase.WAITING


class WorkQueue:
    """Images to fetch, or to store, in the order of submission.

    `lock` is common to all queues of a tier. `ended` is called, with the lock held, for each image that has ended.
    """

    def __init__(
        self,
        op: Op,
        lock: threading.RLock,
        clock: Callable[[], float],
        ended: Callable[[Image, Status], None],
    ) -> None:
        self.op = op
        self.clock = clock
        self._lock = lock
        self._ended = ended
        self._wake = threading.Condition(lock)
        self._waiting: deque[Image] = deque()
        self._taken: set[Image] = set()
        self._oldest = 0
        """Generation below which nothing begins."""
        self._stopped = False

    def put(self, images: Iterable[Image]) -> None:
        """Images to move."""
        with self._lock:
            before = len(self._waiting)
            self._waiting.extend(images)
            self._wake.notify(len(self._waiting) - before)

    def wait(self) -> bool:
        """Block until an image waits; returns `False` once the queue has stopped."""
        with self._lock:
            while not self._waiting and not self._stopped:
                self._wake.wait()
            return not self._stopped

    def take(self, room: float = math.inf, deadline: float | None = None) -> Image | None:
        """The next image, held by the caller; `None` without one.

        It is left there, too, if it has more than `room` bytes, or a deadline more than `NEAR` from the given one.
        """
        with self._lock:
            return self._take(room, deadline)

    def take_some(self, nbytes: int) -> list[Image]:
        """The next images, held by the caller, of `nbytes` together; the last one may have more."""
        images: list[Image] = []
        with self._lock:
            while nbytes > 0 and (image := self._take(math.inf, None)) is not None:
                images.append(image)
                nbytes -= len(image.memory)
        return images

    def end(self, image: Image, status: Status) -> None:
        """An image that the caller has taken has ended; ignored if its deadline ended it before."""
        with self._lock:
            self._end(image, status, self.clock())

    def fail(self, status: Status) -> None:
        """End all images that the calling thread has taken."""
        with self._lock:
            me, now = threading.get_ident(), self.clock()
            for image in [image for image in self._taken if image.owner == me]:
                self._end(image, status, now)

    def release(self, image: Image) -> None:
        """The caller does not use the bytes of an image that it holds."""
        with self._lock:
            if image.phase is Phase.HELD:
                image.phase = Phase.FREE

    def defer(self, image: Image) -> None:
        """The caller is busy with other images before it uses the bytes of one that it holds."""
        with self._lock:
            if image.phase is Phase.HELD:
                image.phase = Phase.DEFERRED

    def hold(self, image: Image) -> bool:
        """The caller is about to use the bytes of an image; `False`: it has ended or is late, leave them alone."""
        with self._lock:
            if image.phase in {Phase.FREE, Phase.DEFERRED} and self.clock() < image.deadline:
                image.phase = Phase.HELD
            return image.phase is Phase.HELD

    def expire(self) -> int:
        """End what is not held and late; returns how many of these a thread was busy with."""
        with self._lock:
            now = self.clock()
            for image in [image for image in self._waiting if now >= image.deadline]:
                self._end(image, Status.DEADLINE, now)
            late = [image for image in self._taken if image.phase is not Phase.HELD and now >= image.deadline]
            busy = sum(image.phase is Phase.FREE for image in late)
            for image in late:
                self._end(image, Status.DEADLINE, now)
            self._drop_ended()
            return busy

    def cancel(self, batch: OpBatch) -> None:
        """End those of `batch` that nobody has taken."""
        self._end_waiting(Status.CANCELLED, batch)

    def end_waiting(self, status: Status) -> None:
        """End all that nobody has taken."""
        self._end_waiting(status, None)

    def end_free(self, status: Status) -> None:
        """End what threads have taken, and do not hold."""
        with self._lock:
            now = self.clock()
            for image in [image for image in self._taken if image.phase is not Phase.HELD]:
                self._end(image, status, now)

    def reset(self, generation: int) -> None:
        """Nothing of an earlier generation begins any more."""
        with self._lock:
            self._oldest = generation

    def stop(self) -> None:
        """End what has not been taken; `take` and `wait` return nothing any more."""
        with self._lock:
            self._stopped = True
            self._end_waiting(Status.TIER_OFF, None)
            self._wake.notify_all()

    def _take(self, room: float, deadline: float | None) -> Image | None:
        while self._waiting and not self._stopped:
            image = self._waiting[0]
            fits = len(image.memory) <= room and (deadline is None or _are_near(deadline, image.deadline))
            if image.phase is not Phase.ENDED and not fits:
                return None
            self._waiting.popleft()
            if image.phase is Phase.ENDED:
                continue
            now = self.clock()
            if now >= image.deadline:
                self._end(image, Status.DEADLINE, now)
            elif image.generation < self._oldest:
                self._end(image, Status.CANCELLED, now)
            else:
                image.phase = Phase.HELD
                image.owner = threading.get_ident()
                image.batch.begin(image.index, now)
                self._taken.add(image)
                return image
        return None

    def _end_waiting(self, status: Status, batch: OpBatch | None) -> None:
        with self._lock:
            now = self.clock()
            for image in self._waiting:
                if batch is None or image.batch is batch:
                    self._end(image, status, now)
            self._drop_ended()

    def _drop_ended(self) -> None:
        if any(image.phase is Phase.ENDED for image in self._waiting):
            self._waiting = deque(image for image in self._waiting if image.phase is not Phase.ENDED)

    def _end(self, image: Image, status: Status, now: float) -> None:
        if image.phase is Phase.ENDED:
            return
        image.phase = Phase.ENDED
        self._taken.discard(image)
        image.batch.end(image.index, status, now)
        self._ended(image, status)


NEAR = 0.1
"""Seconds between deadlines that count as one: jobs that are ordered together are submitted one after the other."""


def _are_near(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= NEAR


_DAY, _HOUR = 86_400.0, 3600.0


class Budget:
    """Bytes that may be sent: `daily` in a day, at most an hour's worth at once; 0: no limit. Thread-safe."""

    def __init__(self, daily: int, clock: Callable[[], float]) -> None:
        self.spent = 0
        """Bytes that were sent, whatever the limit."""
        self._rate = daily / _DAY
        self._clock = clock
        self._left = self._rate * _HOUR
        self._now = clock()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Whether `nbytes` may be sent; then they count."""
        with self._lock:
            if self._rate:
                now = self._clock()
                self._left = min(self._left + (now - self._now) * self._rate, self._rate * _HOUR)
                self._now = now
                if nbytes > self._left:
                    return False
                self._left -= nbytes
            self.spent += nbytes
            return True


Refusal = Callable[[int], Status | None]
"""Asked for each value before it is sent, with its bytes: how the write ends instead, or `None`."""


class Session(Protocol):
    """A connection to a store, used by one thread. Calls raise `RemoteError`; after that, only `close` is left.

    Deadlines are clock readings in seconds; images have one each.
    """

    def check(self, deadline: float) -> None:
        """Return if the store answers."""

    def lengths(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        """The length of each value in bytes; at most 0 for one that is not there."""

    def fetch(self, work: WorkQueue) -> None:
        """Fetch images until none waits, verify each, and end it."""

    def store(self, work: WorkQueue, is_bad: Callable[[bytes], bool], refusal: Refusal) -> None:
        """Store images until none waits. One that is there ends as `OK` unsent, unless its address `is_bad`."""

    def is_stale(self) -> bool:
        """Whether an idle connection was closed by the server, or has received what nobody asked for."""

    def shut_down(self) -> None:
        """Make the calls under way fail. Any thread may call this, but not while the session is closed."""

    def close(self) -> None:
        """Close the connection."""


class RemoteClient(Protocol):
    """Where sessions come from; `threads` is how many each direction has."""

    threads: int

    def connect(self) -> Session:
        """Connect, within the store's timeout. Raises `RemoteError`."""
