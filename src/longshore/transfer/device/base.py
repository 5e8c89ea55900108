"""The seam between the transfer engine and a device.

    engine's thread of one direction                      the thread that computes

    copy = stream.copy(batch, after)                      event = device.mark(compute)
      the device waits for `after`, then copies
    copy.reached ──────────── event ────────────────────► device.hold(compute, event)
    copy.finish()         block until both sides are in place

Several copies may be under way at once, `Stream.depth` of them; they reach and finish in the order of their calls. To
serve a new kind of device, subclass `Device`, `Stream` and `Copy`.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longshore.errors import DeviceError
from longshore.layout.model import KVLayout
from longshore.transfer.batch import Batch


class Event(Protocol):
    """A point in the order of work on a device. Only the device that made it knows what is inside."""

    def passed(self) -> bool:
        """Whether everything before this point has ended."""

    def wait(self) -> None:
        """Block the calling thread until everything before this point has ended."""


class InOnePiece(Protocol):
    """What is registered of the host memory; `longshore.tiers.arena.Arena.in_one_piece` is one."""

    def __call__(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike, /) -> npt.NDArray[np.bool_]:
        """Whether each `[offset, offset + length)` lies within one piece that is registered with the device."""


class ImageMemory(Protocol):
    """One piece of a device's memory, for images that never stop in host memory.

    Any thread may call. Nothing here waits for a stream: whoever calls has waited for the copies of those bytes, and
    begins others when the call has returned.
    """

    @property
    def address(self) -> int:
        """Of its first byte, a multiple of 4096."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def bind(self) -> Callable[[], None]:
        """Make the device the calling thread's own, for libraries that ask the thread; returns what undoes it."""

    def mix64(self, offset: int, length: int) -> int:
        """`longshore.checksums.mix64` of a range, computed on the device. Both are multiples of 8."""

    def load(self, offset: int, host: memoryview) -> None:
        """Copy from `offset` on into host memory."""

    def store(self, offset: int, host: memoryview) -> None:
        """Copy host memory to `offset`."""

    def zero(self, offset: int, length: int) -> None:
        """Make a range zero."""


class Copy(Protocol):
    """A batch that was given to the device."""

    @property
    def reached(self) -> Event:
        """The point from which on others may use the device memory of the batch."""

    def passed(self) -> bool:
        """Whether `finish` would return without waiting for the device."""

    def finish(self) -> float:
        """Block until the batch is in place on both sides. Returns seconds on its way, by the device's clock.

        Called once, by the thread of the stream, in the order of the copies. May raise what the device raises.
        """


class Stream(ABC):
    """Copies in one direction, in order. Used by one thread.

    Attributes:
        depth: How many copies may be unfinished at once: as many as there are resources taken for.
    """

    depth: int = 1

    @abstractmethod
    def bind(self) -> None:
        """Make the calling thread the one that uses this stream. Called once, before anything else."""

    @abstractmethod
    def copy(self, batch: Batch, after: tuple[Event, ...]) -> Copy:
        """Give `batch` to the device, to be copied once `after` have passed and all earlier copies have.

        May return before that. May raise what the device raises; some of the batch may be under way then, and `drain`
        is called before anything else.
        """

    @abstractmethod
    def drain(self) -> None:
        """Block until nothing that was given to the device is still being copied, finished or not. May raise."""

    def zero(self, address: int, nbytes: int) -> None:
        """Zero bytes of an image that nothing is copying. Images are in host memory, unless the device says so."""
        ctypes.memset(address, 0, nbytes)

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken at start. Nothing is being copied then."""


class Device(ABC):
    """One kind of device. `compute` is whatever the engine computes on: a stream, or `None` for the one at hand."""

    @abstractmethod
    def stream(self, layout: KVLayout, into: str) -> Stream:
        """A stream for copies of `layout` into the tier `into`. All that it will need is taken here.

        Into the device come copies from the host and, where `Batch.inside`, from other blocks of the device.
        """

    def resolve(self, compute: object) -> object:
        """What `compute` means in the calling thread: something that means the same in any other."""
        return compute

    @abstractmethod
    def mark(self, compute: object) -> Event:
        """The point after all that was given to `compute` so far."""

    @abstractmethod
    def hold(self, compute: object, event: Event) -> None:
        """What is given to `compute` from here on waits for `event`."""

    def reach(self, in_one_piece: InOnePiece) -> None:  # noqa: B027 - most devices need not know
        """Say what of the host memory is registered with the device, before any stream is made."""

    def take_images(self, nbytes: int) -> ImageMemory:
        """Memory of the device for images, in place of host memory, before any stream is made.

        Raises `DeviceError` where there is none. It is the device's to give back.
        """
        raise DeviceError(
            f"{type(self).__name__} cannot hold block images: expected a device that GPUDirect Storage supports"
        )

    def fallbacks(self) -> Mapping[str, int]:
        """How often something was done the slower way, by reason."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give back what was taken at start, once all streams are closed. Idempotent."""
