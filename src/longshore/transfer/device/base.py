"""The interface between the transfer engine and a device.

    engine's thread of one direction                      the thread that computes

    copy = stream.copy(batch, after)                      event = device.mark(compute)
      the device waits for `after`, then copies
    copy.reached ──────────── event ────────────────────► device.hold(compute, event)
    copy.finish()         block until both sides are in place

At most `Stream.depth` copies are in flight at once; they complete in the order of their calls. For a new kind of
device, subclass `Device`, `Stream` and `Copy`.
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
from longshore.transfer.batch import CopyBatch


class DeviceEvent(Protocol):
    """A point in the order of work on a device. Opaque except to the device that made it."""

    def passed(self) -> bool:
        """Whether everything before this point has ended."""

    def wait(self) -> None:
        """Block the calling thread until everything before this point has ended."""


class InOnePiece(Protocol):
    """Which host memory is registered; `longshore.tiers.arena.Arena.in_one_piece` is an implementation."""

    def __call__(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike, /) -> npt.NDArray[np.bool_]:
        """Whether each `[offset, offset + length)` lies within one piece that is registered with the device."""


class ImageMemory(Protocol):
    """A range of device memory for images that bypass host memory.

    Thread-safe. Calls do not wait for streams: the caller must wait for copies of the bytes before, and start others
    only after the call has returned.
    """

    @property
    def address(self) -> int:
        """Of its first byte, a multiple of 4096."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""

    def bind(self) -> Callable[[], None]:
        """Make the device current in the calling thread, for libraries that need it; returns its undo function."""

    def mix64(self, offset: int, length: int) -> int:
        """`longshore.checksums.mix64` of a range, computed on the device. Both are multiples of 8."""

    def load(self, offset: int, host: memoryview) -> None:
        """Copy from `offset` to host memory."""

    def store(self, offset: int, host: memoryview) -> None:
        """Copy host memory to `offset`."""

    def zero(self, offset: int, length: int) -> None:
        """Zero a range."""


class Copy(Protocol):
    """A batch submitted to the device."""

    @property
    def reached(self) -> DeviceEvent:
        """The point after which other work may use the device memory of the batch."""

    def passed(self) -> bool:
        """Whether `finish` would return without waiting for the device."""

    def finish(self) -> float:
        """Block until the batch is in place on both sides. Returns its duration in seconds, by the device's clock.

        Called once, by the thread of the stream, in the order of the copies. May raise errors of the device.
        """


class Stream(ABC):
    """Copies in one direction, in order. Used by one thread.

    Attributes:
        depth: Largest number of unfinished copies, for which resources are allocated.
    """

    depth: int = 1

    @abstractmethod
    def bind(self) -> None:
        """Bind the stream to the calling thread. Called once, before any other method."""

    @abstractmethod
    def copy(self, batch: CopyBatch, after: tuple[DeviceEvent, ...]) -> Copy:
        """Submit `batch` to the device, to be copied after the points `after` and all earlier copies.

        May return earlier. May raise errors of the device; part of the batch may then be in flight, and `drain` is
        called next.
        """

    @abstractmethod
    def drain(self) -> None:
        """Block until no submitted copy is in flight. May raise."""

    def zero(self, address: int, nbytes: int) -> None:
        """Zero bytes of an image that no copy uses. Images are in host memory, unless the device keeps them."""
        ctypes.memset(address, 0, nbytes)

    @abstractmethod
    def close(self) -> None:
        """Release the resources. No copy may be in flight."""


class Device(ABC):
    """One kind of device. `compute` is the stream on which the engine computes, or `None` for the current one."""

    @abstractmethod
    def stream(self, layout: KVLayout, into: str) -> Stream:
        """A stream for copies of `layout` into the tier `into`. Allocates all its resources.

        Copies into the device are from the host, or, with `CopyBatch.inside`, from other blocks of the device.
        """

    def resolve(self, compute: object) -> object:
        """Resolve `compute` in the calling thread to a value that is valid in every thread."""
        return compute

    @abstractmethod
    def mark(self, compute: object) -> DeviceEvent:
        """The point after all work submitted to `compute` so far."""

    @abstractmethod
    def hold(self, compute: object, event: DeviceEvent) -> None:
        """Make work submitted to `compute` from now on wait for `event`."""

    def reach(self, in_one_piece: InOnePiece) -> None:  # noqa: B027 - most devices need not know
        """Set which host memory is registered with the device. Called before any stream is made."""

    def take_images(self, nbytes: int) -> ImageMemory:
        """Device memory for images, in place of host memory. Called before any stream is made.

        Raises `DeviceError` if there is none. The device frees it.
        """
        raise DeviceError(
            f"{type(self).__name__} cannot hold block images: expected a device that GPUDirect Storage supports"
        )

    def fallbacks(self) -> Mapping[str, int]:
        """Counts of slower fallbacks, by reason."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release the resources, after all streams are closed. Idempotent."""
