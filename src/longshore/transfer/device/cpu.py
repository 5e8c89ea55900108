"""Copies for tensors in host memory: no streams, no temporaries of the size of the data.

Pages of medium size are moved many at a time, with one numpy call per run of bytes that is contiguous on one side, for
example an image. The other side is viewed as an array of words, whose size is the largest power of two that divides
every address and every size:

    memory  ├ word ┼ word ┼ word ┼ word ┼      gather    run = take(words, indices)
                ▲             ▲                scatter   words[indices] = run

Large pieces are moved one by one with `memmove`; both ways release the interpreter lock. Small pieces of one size are
moved together, as elements of an array with an element at every byte:

    memory  ┌───────────────────────────────
    view[0] ├ width ┤
    view[1]  ├ width ┤                        to[offsets] = from[offsets]
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.checksums import mix64
from longshore.layout.model import U64, KVLayout
from longshore.transfer.batch import CopyBatch
from longshore.transfer.device.base import Copy, Device, DeviceEvent, Stream
from longshore.transfer.plan import Planner

SMALL = 4096
"""Bytes below which a piece is moved together with others of its size."""

_PAGE = 4096
_LARGE = 256 << 10  # bytes from which on the call that moves one piece costs next to nothing
_SHORTEST_WORD = 1 << 10  # shorter ones take as long to index as to move
_SHORTEST_RUN = 64 << 10  # average bytes, for which a call of numpy's pays

_STAGE = 256 << 10  # bytes that small pieces pass through at a time; fits a second-level cache


class _Done(DeviceEvent, Copy):
    """A point that has passed, a copy that has finished: on the CPU, work ends when the call that does it returns."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    @property
    def reached(self) -> DeviceEvent:
        return self

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def finish(self) -> float:
        return self._seconds


class CpuDevice(Device):
    """Host memory. Compute is the calling thread, whose work is complete when it returns."""

    def stream(self, layout: KVLayout, into: str) -> Stream:
        """A stream that copies in the calling thread."""
        return CpuStream()

    def mark(self, compute: object) -> DeviceEvent:
        """A passed point."""
        return _Done()

    def hold(self, compute: object, event: DeviceEvent) -> None:
        """Wait in the calling thread."""
        event.wait()

    def take_images(self, nbytes: int) -> CpuImages:
        """Host memory, which is the device memory."""
        return CpuImages(nbytes)

    def close(self) -> None:
        """Nothing was taken."""


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
        """By the processor."""
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
        self._planner = Planner()

    def bind(self) -> None:
        """Nothing to do."""

    def copy(self, batch: CopyBatch, after: tuple[DeviceEvent, ...]) -> Copy:
        """Wait for `after`, then copy `batch`, now."""
        for event in after:
            event.wait()
        begun = time.perf_counter()
        destination, source, size = self._planner.describe(batch).directed(batch.into)
        copy_pieces(source, destination, size)
        return _Done(time.perf_counter() - begun)

    def drain(self) -> None:
        """No copy is ever in flight."""

    def close(self) -> None:
        """Nothing was taken."""


def copy_pieces(source: U64, destination: U64, size: U64) -> None:
    """Copy `size` bytes from each address of `source` to `destination`; no two pieces may overlap."""
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
