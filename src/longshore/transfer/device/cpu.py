"""Copies where the engine's tensors are in host memory: no streams, no temporaries of the size of the data.

Large pieces are moved one by one by `memmove`, which leaves the interpreter lock to others. For a small one the call
costs more than the bytes, so small pieces of one size are moved together, as elements of an array that has one
starting at every byte:

    memory  ┌───────────────────────────────
    view[0] ├ width ┤
    view[1]  ├ width ┤                        to[offsets] = from[offsets]
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.boundary import HOST
from longshore.layout.model import U64, KVLayout
from longshore.transfer.device.base import Device, Event, Stream
from longshore.transfer.plan import describe
from longshore.transfer.selection import Batch

SMALL = 4096
"""Bytes below which a piece is moved together with others of its size."""

_STAGE = 256 << 10  # bytes that small pieces pass through at a time; fits a second-level cache


class _Passed(Event):
    """A point that has passed: on the CPU, work has ended when the call that did it returns."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuDevice(Device):
    """Host memory. The compute side is the calling thread: what it has done is done."""

    def stream(self, layout: KVLayout, into: str) -> Stream:
        """A stream that copies in the calling thread."""
        return CpuStream()

    def mark(self, compute: object) -> Event:
        """A point that has passed."""
        return _Passed()

    def hold(self, compute: object, event: Event) -> None:
        """Wait here: what this thread does next comes after."""
        event.wait()

    def close(self) -> None:
        """Nothing was taken."""


class CpuStream(Stream):
    """Copies when `copy` is called, in the calling thread."""

    def __init__(self) -> None:
        self._begun = 0.0

    def bind(self) -> None:
        """Nothing to do."""

    def begin(self, after: tuple[Event, ...]) -> None:
        """Wait for `after`."""
        for event in after:
            event.wait()
        self._begun = time.perf_counter()

    def copy(self, batch: Batch) -> None:
        """Copy `batch`, now."""
        device, host, size = describe(batch)
        if batch.into == HOST:
            copy_pieces(device, host, size)
        else:
            copy_pieces(host, device, size)

    def end(self) -> Event:
        """A point that has passed."""
        return _Passed()

    def finish(self) -> float:
        """Seconds since `begin`."""
        return time.perf_counter() - self._begun

    def close(self) -> None:
        """Nothing was taken."""


def copy_pieces(source: U64, destination: U64, size: U64) -> None:
    """Copy `size` bytes from each address of `source` to `destination`; no two pieces may overlap."""
    small = size < SMALL
    large = ~small
    for width in np.unique(size[small]).tolist():
        same = np.flatnonzero(size == width)
        _copy_small(source[same], destination[same], width)
    # ctypes gives up the interpreter lock in each call; map keeps the loop itself out of the interpreter.
    calls = map(ctypes.memmove, destination[large].tolist(), source[large].tolist(), size[large].tolist())
    deque(calls, maxlen=0)


def _copy_small(source: U64, destination: U64, width: int) -> None:
    read, read_at = _bytewise(source, width)
    written, write_at = _bytewise(destination, width)
    step = max(1, _STAGE // width)
    for start in range(0, len(read_at), step):
        now = slice(start, start + step)
        written[write_at[now]] = read[read_at[now]]


class _Memory:
    """Memory from `address` on as an array of `width` bytes that starts at every byte, for `np.asarray`."""

    def __init__(self, address: int, length: int, width: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address, False),
            "shape": (length,),
            "strides": (1,),
            "typestr": f"|V{width}",
        }


def _bytewise(addresses: U64, width: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """A view of the memory around `addresses`, and the index of each of them in it."""
    first = int(addresses.min())
    offsets = (addresses - np.uint64(first)).astype(np.int64)
    return np.asarray(_Memory(first, int(offsets.max()) + 1, width)), offsets
