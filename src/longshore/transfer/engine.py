"""The mover at the device: device <-> host, and copies inside the device.

submit()   validate, record dependencies, queue                        caller's thread
─────────────────────────────────────────────────────────────────────────────────────
wait for the jobs that touch the same slots                            direction's thread (ordering.py)
copy       batch by batch, on the device after the recorded events
           of compute; between two batches come cancellation, the
           deadline, and batches of more urgent jobs
finish     block until the last byte is in place
result     only now: the job has ended, others may touch its slots
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, cast

from longshore.boundary import DEVICE, HOST, Route, Status, Transfer, TransferResult, Urgency
from longshore.errors import LayoutError, PlanError, QueueFullError, TierClosedError
from longshore.layout.model import KVLayout
from longshore.transfer.copy_plan import CopyPlan, HostSlots, images_of, memory_of, plan_copy, plan_copy_inside
from longshore.transfer.device.base import Device, DeviceEvent
from longshore.transfer.ordering import (
    FAILED,
    Access,
    CopyJob,
    EngineState,
    Hazards,
    Lane,
    LaneDriver,
    LayerWiseJobs,
    Threads,
    TierPool,
)

D2H = Route(DEVICE, HOST)
H2D = Route(HOST, DEVICE)
D2D = Route(DEVICE, DEVICE)

MAX_BYTES = 64 << 20
"""Bytes per batch: two of them are in flight at most, which is the delay of a more urgent copy (2.6 ms at 50 GB/s)."""

MAX_QUEUED = 1024
"""Largest number of waiting jobs of one direction and class; further jobs are refused."""

_DIRECTIONS = {HOST: 0, DEVICE: 1}


class TransferStats(NamedTuple):
    """State of the queues, and counts of refusals and fallbacks.

    Attributes:
        queued: Jobs not yet submitted to the device completely, by destination tier and class.
        refused: Jobs refused because a queue was full, since the start.
        fallbacks: Copies that used a slower fallback, by reason.
    """

    queued: Mapping[tuple[str, Urgency], int]
    refused: int
    fallbacks: Mapping[str, int]


class TransferEngine:
    """Moves blocks between device and host, and inside the device; a `longshore.boundary.Mover`.

    Thread-safe; only `wait`, `wait_layer`, `end_step`, `shutdown` and `close` block. The engine owns `device`. Call
    `close` or `shutdown` to release the device's resources. An engine that is garbage-collected, or open when the
    interpreter exits, starts no further copies. A job in flight keeps the tensors and the host memory alive until it
    has ended, even if the engine, the layout or the arena is dropped, freed or closed.

    Order among copies: copies of one direction and class begin and end in the order of submission. A more urgent class
    overtakes, unless it touches slots of earlier jobs. Loads and copies inside the device share the direction into the
    device.

    Order against compute: copies submitted between `begin_step` and `end_step` wait for work submitted to compute
    before `begin_step`; copies submitted at any other time wait for work submitted before `submit`. `end_step` makes
    compute wait for copies.
    """

    def __init__(
        self,
        layout: KVLayout,
        device: Device,
        host: HostSlots,
        *,
        max_batch_bytes: int = MAX_BYTES,
        max_queued: int = MAX_QUEUED,
        clock: Callable[[], float] = time.monotonic,
        driver: LaneDriver | None = None,
    ) -> None:
        """Allocate all resources and start.

        Args:
            layout: Layout of the pages.
            device: The device of the pages.
            host: Slots of the images.
            max_batch_bytes: Largest batch; two in flight bound the delay of cancellation and of urgent jobs.
            max_queued: Largest number of waiting jobs per direction and class.
            clock: Clock of the deadlines, in seconds.
            driver: Runs the lanes; `None` for threads.

        Raises:
            LayoutError: The host slots are too small for an image.
            PlanError: A limit is not positive.
        """
        largest = max(host.slabs.image_bytes)
        if largest < layout.image_bytes:
            raise LayoutError(f"a chunk image has {layout.image_bytes} bytes, the largest host slot only {largest}")
        if max_batch_bytes <= 0 or max_queued <= 0:
            raise PlanError(f"limits must be positive, got max_batch_bytes={max_batch_bytes}, max_queued={max_queued}")
        self._layout = layout
        self._device = device
        self._host = host
        self._max_queued = max_queued
        self._driver = driver or Threads()
        self._lock = self._driver.lock
        self._compute: object = None
        self._step: tuple[DeviceEvent, ...] = ()
        self._layer_wise_jobs = LayerWiseJobs()
        self._refused = 0
        device_pools = {TierPool(DEVICE, pool): layout.num_blocks for pool in layout.pools}
        hazards = Hazards(
            {**device_pools, TierPool(HOST, 0): host.slabs.indices}, queues=len(_DIRECTIONS) * len(Urgency)
        )
        self._state = EngineState(self._driver, self._driver.watch(hazards), clock, max_batch_bytes)
        self._lanes = {
            destination: Lane(f"into {destination}", device.stream(layout, destination), self._state)
            for destination in _DIRECTIONS
        }
        for lane in self._lanes.values():
            self._driver.start(f"longshore {lane.name}", lane.run(), self._state.stop)
        if driver is None:
            weakref.finalize(self, self._state.stop).atexit = False

    @property
    def routes(self) -> frozenset[Route]:
        """Device to host, host to device, and inside the device."""
        return frozenset({D2H, H2D, D2D})

    def begin_step(self, compute: object = None) -> None:
        """Copies submitted until `end_step` wait for work submitted to `compute` so far.

        `compute` is the device's own kind of stream, `None` the calling thread's. A second call adds to the first.
        Callers that wait for the results of their copies before they compute (`PrefixStore`, the self-test) need no
        `end_step`: what has ended is forgotten by the next call.
        """
        compute = self._device.resolve(compute)
        event = self._device.record_event(compute)
        with self._lock:
            self._check_open()
            self._compute = compute
            self._step = (*(earlier for earlier in self._step if not earlier.query()), event)

    def end_step(self, compute: object = None, jobs: Collection[int] | None = None) -> None:
        """Work submitted to `compute` from now on waits for `jobs`; `None`: for all copies submitted so far.

        Blocks until the last of them has been submitted to the device (on the CPU: until it has ended). An engine that
        keeps the source blocks of offloads allocated until their results arrive need not name them.
        """
        compute = self._device.resolve(compute)
        with self._lock:
            self._compute = compute
            self._step = ()
            self._layer_wise_jobs.age()
            waited = [job for number, job in self._state.jobs.items() if jobs is None or number in jobs]
            self._driver.wait_for(lambda: all(job.fully_submitted for job in waited))
        for job in waited:
            if job.done_event is not None:
                self._device.wait_event(compute, job.done_event)

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer`.

        Raises:
            PlanError: An invalid route, id or slot, or a job that is already in flight. Nothing has changed.
            QueueFullError: The queue of its direction and class is full. Nothing has changed.
            FreedLayoutError: The device memory is gone.
            TierClosedError: The engine was closed, or the arena.
        """
        if not isinstance(transfer.deadline, int | float):
            raise PlanError(f"expected a deadline in clock seconds, got {transfer.deadline!r}")
        plan, accesses = self._plan(transfer)
        keep_alive = (self._layout.tensors, memory_of(self._host))
        direction = _DIRECTIONS[transfer.route.destination]
        lane = self._lanes[transfer.route.destination]
        with self._lock:
            self._check_open()
            if transfer.job in self._state.jobs:
                raise PlanError(f"job {transfer.job} is already in flight")
            if lane.queued(transfer.urgency) >= self._max_queued:
                self._refused += 1
                raise QueueFullError(
                    f"{self._max_queued} {transfer.urgency.name} jobs are already queued to go {lane.name}"
                )
            wait_events = self._step or (self._device.record_event(self._compute),)
            position = self._state.hazards.add(direction * len(Urgency) + transfer.urgency, accesses)
            job = CopyJob(transfer, plan, wait_events, position, self._state.clock(), keep_alive)
            self._state.jobs[transfer.job] = job
            self._layer_wise_jobs.add(job)
            lane.put(job)

    def check(self, transfer: Transfer) -> None:
        """Raise the errors that `submit` would raise for `transfer`. Changes nothing."""
        self._plan(transfer)

    def poll(self) -> list[TransferResult]:
        """Results since the last call, without waiting. Works after `close` too."""
        with self._lock:
            results, self._state.results = self._state.results, []
        return results

    def wait(self, jobs: Collection[int], timeout: float | None = None) -> bool:
        """Block until `jobs` have ended; returns `False` after `timeout` seconds.

        `poll` returns their results. A job that is not in flight counts as ended.
        """
        with self._lock:
            return self._driver.wait_for(lambda: not any(job in self._state.jobs for job in jobs), timeout)

    def wait_layer(self, job: int, layer: int, timeout: float | None = None) -> Status:
        """Make compute wait for one layer of a layer-wise job.

        Blocks until the copies of the layer have been submitted to the device. Work submitted afterwards to the
        `compute` of the last `begin_step` waits for them. May be called until the second `end_step` after the job's
        end.

        Returns:
            `Status.OK`: compute may read the layer. `Status.DEADLINE`: not submitted within `timeout` seconds; may be
            called again. Any other status: the job ended with it, and the layer will not arrive.

        Raises:
            PlanError: The job is not layer-wise, or does not copy that layer.
        """
        with self._lock:
            found = self._layer_wise_jobs.get(job)
            if found is None:
                raise PlanError(
                    f"job {job} is not copied layer by layer, or ended before the last two calls of end_step"
                )
            if not 0 <= layer < self._layout.num_layers:
                raise PlanError(f"job {job} copies layers [0, {self._layout.num_layers}), got layer {layer}")
            if not self._driver.wait_for(lambda: layer in found.layers or found.result is not None, timeout):
                return Status.DEADLINE
            if layer not in found.layers or found.early_status in FAILED:
                return cast(Status, found.early_status)  # a job that has ended without a layer was stopped
            event, compute = found.layers[layer], self._compute
        if event is not None:
            self._device.wait_event(compute, event)
        return Status.OK

    def stats(self) -> TransferStats:
        """Current statistics. Works after `close` too."""
        with self._lock:
            queued = {
                (destination, urgency): lane.queued(urgency)
                for destination, lane in self._lanes.items()
                for urgency in Urgency
            }
            return TransferStats(queued, self._refused, dict(self._device.fallbacks()))

    def cancel(self, job: int) -> None:
        """Batches of `job` that have not begun need not begin; a job that is not in flight is ignored."""
        with self._lock:
            if job in self._state.jobs:
                self._state.jobs[job].cancelled = True
                self._driver.notify()

    def shutdown(self, timeout: float | None = None) -> bool:
        """Wait for at most `timeout` seconds until all jobs have ended, then `close`. Idempotent.

        Returns whether all jobs have ended by themselves.
        """
        with self._lock:
            is_drained = self._driver.wait_for(lambda: not self._state.jobs, timeout)
        self.close()
        return is_drained

    def close(self) -> None:
        """Wait for the batches that have begun, end the rest as `Status.TIER_OFF`, close the device. Idempotent."""
        self._state.stop()
        self._driver.join()
        for lane in self._lanes.values():
            lane.close()
        self._device.close()

    def _check_open(self) -> None:
        if self._state.closing:
            raise TierClosedError("the transfer engine was closed; a lane may have failed: see the log")

    def _plan(self, transfer: Transfer) -> tuple[CopyPlan, list[Access]]:
        """The pages that move, and the slots that are accessed."""
        if transfer.route not in self.routes:
            served = ", ".join(map(str, sorted(self.routes)))
            raise PlanError(f"route {transfer.route} is not served, only {served}")
        if transfer.route == D2D:
            plan = plan_copy_inside(self._layout, transfer.sections, transfer.items, tokens=transfer.tokens)
            read = [Access(TierPool(DEVICE, pool), blocks, False) for pool, blocks in plan.sources().items()]
            written = [Access(TierPool(DEVICE, pool), blocks, True) for pool, blocks in plan.blocks().items()]
            return plan, read + written
        images = images_of(transfer, self._host)
        destination = transfer.route.destination
        plan = plan_copy(
            self._layout,
            transfer.sections,
            images.offsets,
            destination=destination,
            host_address=self._host.arena.address,
            host_bytes=self._host.arena.nbytes,
            tokens=transfer.tokens,
            room=images.room,
        )
        device = [
            Access(TierPool(DEVICE, pool), blocks, destination == DEVICE) for pool, blocks in plan.blocks().items()
        ]
        return plan, [*device, Access(TierPool(HOST, 0), images.overlap_units, destination == HOST)]
