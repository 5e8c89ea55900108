"""A CPU device whose copies wait at a gate, and a compute side that is done when the test says so."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from failing_copy import FailingCopy
from longshore.layout import KVLayout
from longshore.transfer import CpuDevice
from longshore.transfer.device.base import Copy, CpuStream, DeviceEvent, Stream, copy_pieces
from longshore.transfer.pieces import CopyBatch, PieceBuilder

TIMEOUT = 10.0
"""Seconds until something that must happen counts as not happening."""

A_MOMENT = 0.15
"""Seconds for something that must not happen to happen."""


class Work(DeviceEvent):
    """Something that the compute side is at until the test says `done`."""

    def __init__(self) -> None:
        self.finished = threading.Event()
        self.waited_for = threading.Event()
        self.waits = 0

    def done(self) -> None:
        self.finished.set()

    def query(self) -> bool:
        return self.finished.is_set()

    def wait(self) -> None:
        self.waits += 1
        self.waited_for.set()
        if not self.finished.wait(TIMEOUT):
            raise TimeoutError("compute was never done")


class Compute:
    """The compute side: pieces of work, one after the other."""

    def __init__(self) -> None:
        self.given: list[Work] = []

    def start(self) -> Work:
        self.given.append(Work())
        return self.given[-1]


class CopyGate:
    """Copies in one direction: how many batches may pass, and which have arrived."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._open = 1 << 30
        self.arrived = 0

    def shut(self, after: int = 0) -> None:
        """Copies that have arrived pass, and `after` of those that come."""
        with self._changed:
            self._open = self.arrived + after
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._open = 1 << 30
            self._changed.notify_all()

    def pass_through(self) -> None:
        with self._changed:
            self.arrived += 1
            number = self.arrived
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: number <= self._open, TIMEOUT):
                raise TimeoutError("the gate was never opened")

    def wait_arrived(self, count: int, timeout: float = TIMEOUT) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.arrived >= count, timeout)


class GatedDevice(CpuDevice):
    """Copies wait at `gates[into]`, `log` says in which order they began and ended, `fault` may raise.

    At most `depth` are in flight, until `is_finished` is set.
    """

    def __init__(self) -> None:
        self.depth = 1
        self.is_finished = threading.Event()
        self.is_finished.set()
        self.gates = {"host": CopyGate(), "device": CopyGate()}
        self.log: list[str] = []
        self.fault: Callable[[str, CopyBatch | None], None] = lambda step, batch: None
        self.closed = 0
        self.streams_closed = 0
        self.bound = 0
        self.drained = 0

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        return GatedStream(self, destination)

    def record_event(self, compute: object) -> DeviceEvent:
        return compute.given[-1] if isinstance(compute, Compute) else super().record_event(compute)

    def close(self) -> None:
        self.closed += 1


class GatedStream(CpuStream):
    def __init__(self, device: GatedDevice, destination: str) -> None:
        super().__init__()
        self.device = device
        self.destination = destination
        self.depth = device.depth

    def bind(self) -> None:
        self.device.bound += 1
        self.device.fault("bind", None)

    def drain(self) -> None:
        self.device.fault("drain", None)
        self.device.drained += 1

    def close(self) -> None:
        self.device.streams_closed += 1

    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        for event in wait_events:
            event.wait()
        self.device.log.append(f"{self.destination} begins")
        self.device.gates[self.destination].pass_through()
        self.device.fault("copy", batch)
        copy = super().copy(batch, ())
        self.device.log.append(f"{self.destination} ends")
        return FailingCopy(copy, self._finish)

    def _finish(self) -> None:
        if not self.device.is_finished.wait(TIMEOUT):
            raise TimeoutError("the test never let copies finish")
        self.device.fault("finish", None)


class SlowDevice(CpuDevice):
    """Copies in two halves with a pause before, between and after, so that what is not ordered shows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        return SlowStream(random.Random(self.random.random()))


class SlowStream(CpuStream):
    def __init__(self, pauses: random.Random) -> None:
        super().__init__()
        self.pauses = pauses

    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        destination, source, size = PieceBuilder().build(batch).directed(batch.destination)
        half = len(size) // 2
        for part in (slice(0, half), slice(half, None)):
            time.sleep(self.pauses.choice([0.0, 0.0002, 0.001]))
            copy_pieces(source[part], destination[part], size[part])
        time.sleep(self.pauses.choice([0.0, 0.0005]))
        return super().copy(batch._replace(parts=()), wait_events)
