"""The seam between the transfer engine and a device.

    engine thread of one direction                        the thread that computes

    stream.begin(after)   wait for `after`, on the device   event = device.mark(compute)
    stream.copy(batch)    ... as often as there are batches
    stream.end() ──────── event ──────────────────────────► device.hold(compute, event)
    stream.finish()       block until it is all done

To serve a new kind of device, subclass `Device` and `Stream`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from longshore.layout.model import KVLayout
from longshore.transfer.selection import Batch


class Event(Protocol):
    """A point in the order of work on a device. Only the device that made it knows what is inside."""

    def passed(self) -> bool:
        """Whether everything before this point has ended."""

    def wait(self) -> None:
        """Block the calling thread until everything before this point has ended."""


class Stream(ABC):
    """Copies in one direction, in order. Used by one thread, job by job:
    `begin`, `copy` as often as needed, `end`, `finish`.

    Any method may raise what the device raises; the job has failed then. `finish` is called for a failed job too: when
    it has returned or raised, nothing of the job is still being copied.
    """

    @abstractmethod
    def bind(self) -> None:
        """Make the calling thread the one that uses this stream. Called once, before anything else."""

    @abstractmethod
    def begin(self, after: tuple[Event, ...]) -> None:
        """Start a job: what is copied from here on waits for `after`, and its time counts."""

    @abstractmethod
    def copy(self, batch: Batch) -> None:
        """Copy `batch`. May return before that has ended: nothing may rewrite the batch's arrays until `finish`."""

    @abstractmethod
    def end(self) -> Event:
        """The point at which the device memory of what was copied since `begin` may be used by others."""

    @abstractmethod
    def finish(self) -> float:
        """Block until all since `begin` has ended, on both sides. Returns seconds since then, by the device's clock."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken at start."""


class Device(ABC):
    """One kind of device. `compute` is whatever the engine computes on: a stream, or `None` for the one at hand."""

    @abstractmethod
    def stream(self, layout: KVLayout, into: str) -> Stream:
        """A stream for copies of `layout` into the tier `into`. All that it will need is taken here."""

    @abstractmethod
    def mark(self, compute: object) -> Event:
        """The point after all that was given to `compute` so far."""

    @abstractmethod
    def hold(self, compute: object, event: Event) -> None:
        """What is given to `compute` from here on waits for `event`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken at start, once all streams are closed. Idempotent."""
