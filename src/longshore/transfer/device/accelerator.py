"""Shared by all devices of torch: calls that need an accelerator, pooled events, counted fallbacks.

Events are allocated at start and reused. Holders of a point need not return it: an event is recorded again only after
it has passed, and the old point then reports that it has passed.

    record ──► Point ──► event ··· passed ──► recorded again, as another Point
                 └─────────────────────────── from here on: passed, without looking
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping

import torch

from longshore.transfer.device.base import DeviceEvent

EVENTS = 128
"""Events that a device allocates at start."""

_log = logging.getLogger(__name__)


class Accelerator:
    """The calls that need an accelerator, in one place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> torch.Stream:
        """The calling thread's stream."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        """A new stream."""
        return torch.Stream(device=self.device)

    def use(self, stream: torch.Stream) -> None:
        """Make `stream`, and its device, the calling thread's own: a new thread starts on device 0."""
        torch.get_device_module(self.device).set_device(self.device.index)
        torch.accelerator.set_stream(stream)

    def new_event(self) -> torch.Event:
        """An event with timing."""
        return torch.Event(device=self.device, enable_timing=True)

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8, shape `(nbytes,)`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8, shape `(nbytes,)`; `RuntimeError` if it cannot be allocated."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Fallbacks:
    """Counts of slower fallbacks, by reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Count one fallback."""
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> Mapping[str, int]:
        """All counts."""
        with self._lock:
            return dict(self._counts)


class Point(DeviceEvent):
    """A point on a stream, after all work submitted to it so far. Made by `Events.record`."""

    def __init__(self, pool: Events, event: torch.Event) -> None:
        self._pool = pool
        self._event: torch.Event | None = event
        self._waiting = 0

    def passed(self) -> bool:
        """Whether all work before it has ended."""
        with self._pool.lock:
            return self._has_passed()

    def wait(self) -> None:
        """Block the calling thread until the point has passed."""
        with self._pool.lock:
            event = self._event
            if event is None:
                return
            self._waiting += 1
        try:
            event.synchronize()
        finally:
            with self._pool.lock:
                self._waiting -= 1

    def hold(self, stream: torch.Stream) -> None:
        """Make `stream` wait for the point; the calling thread does not wait."""
        with self._pool.lock:
            if self._event is not None:
                self._event.wait(stream)

    def seconds_until(self, later: Point) -> float:
        """Seconds between two points by the device's clock. Both have passed and are not released."""
        with self._pool.lock:
            if self._event is None or later._event is None:
                raise RuntimeError("expected two points that are still held, got one that was released")
            return float(self._event.elapsed_time(later._event)) / 1000

    def _has_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def _recycle(self) -> torch.Event | None:
        """The event, which is no longer this point's, if nothing needs it."""
        if self._waiting or not self._has_passed():
            return None
        event, self._event = self._event, None
        return event


class Events:
    """A bounded pool of events. Thread-safe."""

    def __init__(self, accelerator: Accelerator, fallbacks: Fallbacks, count: int = EVENTS) -> None:
        self.lock = threading.Lock()
        self._accelerator = accelerator
        self._fallbacks = fallbacks
        self._count = count
        self._idle = [accelerator.new_event() for _ in range(count)]
        self._loose: deque[Point] = deque()  # recorded, not kept: used again as soon as they have passed

    def record(self, stream: torch.Stream, *, keep: bool = False) -> Point:
        """The point after all work on `stream` so far; with `keep`, its event is not reused until `release`."""
        with self.lock:
            event = self._take()
            try:
                event.record(stream)
            except BaseException:
                self._idle.append(event)
                raise
            point = Point(self, event)
            if not keep:
                self._loose.append(point)
            return point

    def release(self, *points: Point) -> None:
        """Return kept `points` to the pool, once each; they are reused after they have passed."""
        with self.lock:
            self._loose.extend(points)

    def close(self) -> None:
        """Release all events that are not in use."""
        with self.lock:
            self._count = 0
            self._idle.clear()

    def _take(self) -> torch.Event:
        if not self._idle:
            self._sweep()
        if self._idle:
            return self._idle.pop()
        self._fallbacks.count("new_event")
        return self._accelerator.new_event()

    def _sweep(self) -> None:
        """Take back the events of points that have passed; those beyond the stock are dropped."""
        busy: deque[Point] = deque()
        for point in self._loose:
            event = point._recycle()
            if event is None:
                busy.append(point)
            elif len(self._idle) < self._count:
                self._idle.append(event)
        self._loose = busy


def pinned_or_pageable(accelerator: Accelerator, fallbacks: Fallbacks, nbytes: int) -> torch.Tensor:
    """Pinned host memory if available, else pageable memory, which is logged and counted."""
    try:
        return accelerator.pinned_bytes(nbytes)
    except RuntimeError:
        _log.warning(
            "cannot allocate %d bytes of pinned memory; copies to %s use pageable memory, which is slower",
            nbytes,
            accelerator.device,
        )
        fallbacks.count("unpinned_stage")
        return torch.empty(nbytes, dtype=torch.uint8)
