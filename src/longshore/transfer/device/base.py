"""The interface between the transfer engine and a device, and its implementation for tensors in host memory.

    engine's thread of one direction                      the thread that computes

    copy = stream.copy(batch, wait_events)                event = device.record_event(compute)
      the device waits for `wait_events`, then copies
    copy.done_event ───────── event ────────────────────► device.wait_event(compute, event)
    copy.finish()         block until both sides are in place

At most `Stream.depth` copies are in flight at once; they complete in the order of their calls. For a new kind of
device, subclass `Device`, `Stream` and `Copy`. `CpuDevice` is the shortest example: it copies in the thread that calls.
"""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from longshore.checksums import mix64
from longshore.errors import DeviceError
from longshore.layout.model import U64, KVLayout
from longshore.transfer.pieces import CopyBatch, PieceBuilder


class DeviceEvent(Protocol):
    """A point in the order of work on a device. Opaque except to the device that made it."""

    def query(self) -> bool:
        """Whether everything before this point has ended."""

    def wait(self) -> None:
        """Block the calling thread until everything before this point has ended."""


InOnePiece = Callable[[npt.ArrayLike, npt.ArrayLike], npt.NDArray[np.bool_]]
"""Whether each `[offset, offset + length)` lies within one piece of host memory that is registered with the device.

`longshore.tiers.arena.Arena.in_one_piece` is one.
"""


class ImageMemory(Protocol):
    """A range of device memory for images that bypass host memory.

    Thread-safe. Calls return when they are done, or raise `DeviceError`. They do not wait for streams: the caller must
    wait for copies of the bytes before, and start others only after the call has returned.
    """

    @property
    def address(self) -> int:
        """Address of its first byte, a multiple of 4096."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes. May raise `TierClosedError` when it is gone."""

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
    def done_event(self) -> DeviceEvent:
        """The event after which other work may use the device memory of the batch."""

    def query(self) -> bool:
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
    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        """Submit `batch` to the device, to be copied after `wait_events` and all earlier copies.

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
    def stream(self, layout: KVLayout, destination: str) -> Stream:
        """A stream for copies of `layout` into the tier `destination`. Allocates all its resources.

        Copies into the device are from the host, or, with `CopyBatch.is_d2d`, from other blocks of the device.
        """

    def resolve(self, compute: object) -> object:
        """Resolve `compute` in the calling thread to a value that is valid in every thread."""
        return compute

    @abstractmethod
    def record_event(self, compute: object) -> DeviceEvent:
        """An event after all work submitted to `compute` so far."""

    @abstractmethod
    def wait_event(self, compute: object, event: DeviceEvent) -> None:
        """Make work submitted to `compute` from now on wait for `event`."""

    def set_registered_memory(self, in_one_piece: InOnePiece) -> None:  # noqa: B027 - most devices need not know
        """Set which host memory is registered with the device. Called before any stream is made."""

    def allocate_images(self, nbytes: int) -> ImageMemory:
        """Device memory for images, in place of host memory. Called before any stream is made.

        Raises `DeviceError` if there is none. The device frees it.
        """
        raise DeviceError(
            f"{type(self).__name__} cannot hold chunk images: expected a device that GPUDirect Storage supports"
        )

    def fallbacks(self) -> Mapping[str, int]:
        """Counts of slower fallbacks, by reason."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release the resources, after all streams are closed. Idempotent."""


SMALL = 4096
"""Bytes below which a piece is moved together with others of its size."""

_PAGE = 4096
_LARGE = 256 << 10  # bytes from which on the call that moves one piece costs next to nothing
_SHORTEST_WORD = 1 << 10  # shorter ones take as long to index as to move
_SHORTEST_RUN = 64 << 10  # average bytes, for which a call of numpy's pays

_STAGE = 256 << 10  # bytes that small pieces pass through at a time; fits a second-level cache


class _Done(DeviceEvent, Copy):
    """A passed event, and a finished copy: on the CPU, work ends when the call that does it returns."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    @property
    def done_event(self) -> DeviceEvent:
        return self

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def finish(self) -> float:
        return self._seconds


class CpuDevice(Device):
    """Host memory. Compute is the calling thread, whose work is complete when it returns."""

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        """A stream that copies in the calling thread."""
        return CpuStream()

    def record_event(self, compute: object) -> DeviceEvent:
        """An event that has passed."""
        return _Done()

    def wait_event(self, compute: object, event: DeviceEvent) -> None:
        """Wait in the calling thread."""
        event.wait()

    def allocate_images(self, nbytes: int) -> CpuImages:
        """Host memory, which is the device memory."""
        return CpuImages(nbytes)

    def close(self) -> None:
        """Nothing was allocated."""


class CpuImages:
    """An `ImageMemory` in host memory, for tensors in host memory."""

    def __init__(self, nbytes: int) -> None:
        array = np.zeros(nbytes + _PAGE, dtype=np.uint8)
        first = -int(array.ctypes.data) % _PAGE
        self._bytes = array[first : first + nbytes]
        self.address = int(self._bytes.ctypes.data)
        self.nbytes = nbytes

    def bind(self) -> Callable[[], None]:
        """Nothing to do, or to undo."""
        return lambda: None

    def mix64(self, offset: int, length: int) -> int:
        """By the CPU."""
        return mix64(self._piece(offset, length))

    def load(self, offset: int, host: memoryview) -> None:
        """Copy out."""
        host[:] = self._piece(offset, len(host))

    def store(self, offset: int, host: memoryview) -> None:
        """Copy in."""
        self._piece(offset, len(host))[:] = host

    def zero(self, offset: int, length: int) -> None:
        """Zero a range."""
        self._bytes[offset : offset + length] = 0

    def _piece(self, offset: int, length: int) -> memoryview:
        return self._bytes[offset : offset + length].data


class CpuStream(Stream):
    """Copies in the calling thread, during `copy`."""

    def __init__(self) -> None:
        self._builder = PieceBuilder()

    def bind(self) -> None:
        """Nothing to do."""

    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        """Wait for `wait_events`, then copy `batch`, now."""
        for event in wait_events:
            event.wait()
        begun = time.perf_counter()
        destination, source, size = self._builder.build(batch).directed(batch.destination)
        copy_pieces(source, destination, size)
        return _Done(time.perf_counter() - begun)

    def drain(self) -> None:
        """No copy is ever in flight."""

    def close(self) -> None:
        """Nothing was allocated."""


def copy_pieces(source: U64, destination: U64, size: U64) -> None:
    """Copy `size` bytes from each address of `source` to `destination`; no two pieces may overlap.

    Needs no memory of the size of the data, and releases the interpreter lock. Large pieces are moved one by one with
    `memmove`. Pages of medium size are moved many at a time, with one numpy call per run of bytes that is contiguous
    on one side, for example an image. The other side is viewed as an array of words, whose size is the largest power of
    two that divides every address and every size:

        memory  ├ word ┼ word ┼ word ┼ word ┼      gather    run = take(words, indices)
                    ▲             ▲                scatter   words[indices] = run

    Small pieces of one size are moved together, as elements of an array with an element at every byte:

        memory  ┌───────────────────────────────
        view[0] ├ width ┤
        view[1]  ├ width ┤                        to[offsets] = from[offsets]
    """
    if not len(size) or _copy_medium(source, destination, size):
        return
    small = size < SMALL
    large = ~small
    for width in np.unique(size[small]).tolist():
        same = np.flatnonzero(size == width)
        _copy_small(source[same], destination[same], width)
    # ctypes gives up the interpreter lock in each call; map keeps the loop itself out of the interpreter.
    calls = map(ctypes.memmove, destination[large].tolist(), source[large].tolist(), size[large].tolist())
    deque(calls, maxlen=0)


def _copy_medium(source: U64, destination: U64, size: U64) -> bool:
    """Copy run by run, where one side has long runs and the other long words; whether it has."""
    total = int(size.sum())
    if total >= _LARGE * len(size):
        return False
    into_runs, from_runs = _run_starts(destination, size), _run_starts(source, size)
    gathers = len(into_runs) <= len(from_runs)
    runs = into_runs if gathers else from_runs
    if total < _SHORTEST_RUN * len(runs):
        return False
    dense, scattered = (destination, source) if gathers else (source, destination)
    first = scattered.min()
    offsets = scattered - first
    bits = int(np.bitwise_or.reduce(offsets) | np.bitwise_or.reduce(size))
    word = bits & -bits
    if word < _SHORTEST_WORD:
        return False
    counts = (size // np.uint64(word)).astype(np.int64)
    index = _spread((offsets // np.uint64(word)).astype(np.int64), counts)
    words = np.asarray(_ByteArray(int(first), int(index.max()) + 1, word, step=word))
    before = np.cumsum(counts) - counts
    starts = before[runs].tolist()
    low = int(dense.min())
    memory = np.asarray(_ByteArray(low, int(dense.max()) - low + int(size.max()), 1))
    element = words.dtype
    begins = (dense[runs] - np.uint64(low)).tolist()
    for start, stop, begin in zip(starts, [*starts[1:], len(index)], begins, strict=True):
        run = memory[begin : begin + (stop - start) * word].view(element)
        if gathers:
            words.take(index[start:stop], out=run, mode="clip")  # any other mode goes through a buffer
        else:
            words[index[start:stop]] = run
    return True


def _run_starts(addresses: U64, size: U64) -> npt.NDArray[np.int64]:
    """Index of each piece that does not begin where the one before it ends."""
    breaks = np.flatnonzero(addresses[:-1] + size[:-1] != addresses[1:])
    return np.concatenate([np.zeros(1, dtype=np.int64), breaks + 1])


def _spread(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`counts[i]` consecutive integers from each `starts[i]` on, one after the other."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _copy_small(source: U64, destination: U64, width: int) -> None:
    read, read_at = _bytewise(source, width)
    written, write_at = _bytewise(destination, width)
    step = max(1, _STAGE // width)
    for start in range(0, len(read_at), step):
        now = slice(start, start + step)
        written[write_at[now]] = read[read_at[now]]


class _ByteArray:
    """Memory from `address` on as elements of `width` bytes, one starting every `step` bytes, for `np.asarray`."""

    def __init__(self, address: int, length: int, width: int, step: int = 1) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (length,),
            "strides": (step,),
            "typestr": f"|V{width}",
        }


def _bytewise(addresses: U64, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """A view of the memory around `addresses`, and the index of each of them in it."""
    first = int(addresses.min())
    offsets = (addresses - np.uint64(first)).astype(np.int64)
    return np.asarray(_ByteArray(first, int(offsets.max()) + 1, width)), offsets
