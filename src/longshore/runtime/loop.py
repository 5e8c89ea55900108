"""`Runtime`: passes commands to movers in the order of `after`, collects the ranks' results, applies them to the cache.

    take_commands ──► waiting ──(all of `after` ended)──► running ──poll──► apply_results
                         └── upstream failed, deadline, cancelled ──────────►┘

Without a thread, calls make progress (`batch`, `pump`, `wait...`). A `BackgroundLoop` makes progress in a thread
as well, between an engine's steps. One lock guards the cache in both cases.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from longshore.boundary import (
    Cancel,
    Command,
    DeleteRecords,
    Mover,
    Probe,
    Prober,
    ProbeResult,
    Reset,
    Result,
    Route,
    Section,
    Slot,
    Status,
    Transfer,
    TransferResult,
    leading_ok,
)
from longshore.cache import Lease, Progress, RecomputeGate, TieredCache
from longshore.cache.types import GuardCounters, LookupCounters
from longshore.errors import LongshoreError, PlanError, TierClosedError, former_name, log_seldom
from longshore.runtime.error_handler import CallLog, log_fault, submit_status
from longshore.tiers.base import Tier

_log = logging.getLogger(__name__)
_OFF = "all tiers disabled: the control plane failed, see the log; reopen the tiers (restart the engine)"
_POLL_SECONDS = (20e-6, 1e-3)
"""Seconds between two polls of a waiting thread: first, and maximum."""


@dataclass(slots=True)
class _WaitingTransfer:
    """A transfer whose upstream jobs have not all ended; `failures` are the slots that they did not fill."""

    transfer: Transfer
    pending: set[int]
    failures: dict[Slot, Status]


@dataclass(slots=True)
class _RunningTransfer:
    """A transfer that its mover has; `tail` are the statuses of the items after those that were submitted."""

    transfer: Transfer
    mover: Mover
    tail: tuple[Status, ...]
    ranks: int
    expired: bool = False


class Runtime:
    """The loop around one `TieredCache`. Thread-safe. With `gives_up`, waits end now, except `wait_for_blocks`."""

    def __init__(
        self,
        cache: TieredCache,
        movers: Sequence[Mover],
        tiers: Sequence[Tier] = (),
        *,
        probers: Sequence[Prober] = (),
        gate: RecomputeGate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `gate`, all chunks found are loaded."""
        self.clock = clock
        self.wakeup = threading.Event()
        self.guard_counters = GuardCounters()
        self.lookup_counters = LookupCounters()
        self.gate = gate
        self._cache = cache
        self._movers = list(movers)
        self._by_route: dict[Route, Mover] = {route: mover for mover in movers for route in mover.routes}
        self._tiers = list(tiers)
        self._lock = threading.RLock()
        self._waiting: dict[int, _WaitingTransfer] = {}
        self._running: dict[int, _RunningTransfer] = {}
        self._probers = {prober.tier_name: prober for prober in probers}
        self.remote_tiers = tuple(self._probers)
        """Names of the remote tiers that can be asked."""
        self._probing = dict[int, tuple[Probe, float]]()  # probes in flight, and when they were ordered
        self._results: list[Result] = []
        self._failures: dict[int, dict[Slot, Status]] = {}
        """Slots that were not filled, by job, until the result is applied to the cache."""
        self.closed = self.gives_up = False
        self.pid = os.getpid()
        self._unpollable: list[Mover] = []  # they could not be polled after a fault
        self._calls = CallLog(cache, self.fail)
        self._cache_version = 0
        """Grows with each change of the cache: what a caller waits for may have happened since the version it saw."""
        self._in_batch = False
        self._idle_until = -math.inf
        """Waits do not call the cache before, without results: nothing is due, unless a caller has used it."""
        self.fault: BaseException | None = None  # the first exception of the control plane; it disabled the tiers
        self.faults = 0

    def fail(self, error: BaseException) -> None:
        """Disable the control plane after a fault. Transfers in flight are cancelled, and their results are ignored.

        Slots and device blocks of transfers in flight are not reused until their movers have ended. Logs the first
        fault only.
        """
        with self._lock:
            if self.fault is None:
                self.fault = error
                self.faults += 1
                self._cache_version += 1
                log_fault(error, self._calls)
                self._waiting.clear()
                self._probing.clear()
                for job, running in self._running.items():
                    try:
                        running.mover.cancel(job)
                    except Exception:  # noqa: BLE001 - of a mover: the others are to hear of it all the same
                        _log.exception(
                            "transfer job %d could not be cancelled, and runs until it completes; report this", job
                        )

    @contextmanager
    def batch(self) -> Iterator[TieredCache]:
        """Exclusive access to the cache, for a batch of calls. Nothing is rolled back.

        When the block ends, the commands that the cache has given are submitted, also if the block raises; at the
        end of the outer one where batches are nested.

        Raises `TierClosedError` after `close`, and in a process forked from the one of the movers' threads.
        """
        if os.getpid() != self.pid:
            raise TierClosedError("the tiers belong to the process that forked this one; open them in this one, too")
        with self._lock:
            if self.closed:
                raise TierClosedError("the tiers were closed; open them again")
            with self._typed_faults():
                if not (is_inner := self._in_batch):
                    self._cache.apply_results((), self.clock())
                self._in_batch = True
                try:
                    yield self._cache
                finally:
                    self._in_batch = is_inner
                    self._cache_version += 1
                    self._idle_until = -math.inf
                    if not is_inner:
                        self._pump(cache_has_time=True)
                        if self._is_busy:
                            self.wakeup.set()

    transaction = former_name("transaction", "batch")

    @contextmanager
    def _typed_faults(self) -> Iterator[None]:
        """Turn a fault of the control plane into a typed error; raise that once the tiers are off, too."""
        if self.fault is not None:
            raise TierClosedError(_OFF) from self.fault
        try:
            yield
        except Exception as error:
            if error is self.fault:
                raise TierClosedError(_OFF) from error
            raise

    @contextmanager
    def locked(self) -> Iterator[TieredCache]:
        """The cache, under the lock; submits no commands, and makes no progress. Works after `close`, too."""
        with self._lock:
            yield self._cache

    def pump(self) -> bool:
        """Make progress without waiting; returns whether anything is in flight."""
        with self._lock:
            self._idle_until = -math.inf
            self._pump()
            return self._is_busy

    def wait_load(self, lease: Lease, timeout: float = math.inf) -> Progress:
        """Wait until the load or the prefetch of `lease` is over, at most `timeout` seconds or until its deadline.

        Raises `TierClosedError` if the control plane fails meanwhile.
        """
        self._wait(lambda: self.fault is not None or self._cache.progress(lease).is_over, timeout)
        with self._lock, self._typed_faults():
            return self._cache.progress(lease)

    def worth_loading(self, lease: Lease, context: int, *, least: int = 0, for_prefetch: bool = False) -> int:
        """Number of leading chunks of `lease` to load; computing the rest is faster.

        `context`: number of tokens before them, which are on the device. A prefetch of `lease` must be over.
        `least` and `for_prefetch` are those of `RecomputeGate.worth_loading`.
        """
        with self._lock, self._typed_faults():
            runs = self._cache.progress(lease).runs
            if self.gate is None:
                return sum(run.num_chunks for run in runs)
            return self.gate.worth_loading(context, runs, self.clock(), least=least, for_prefetch=for_prefetch)

    def observe_prefill(self, context: int, tokens: int, seconds: float) -> None:
        """Report that the engine computed `tokens` of a prompt, after `context` others, in a step of `seconds`."""
        with self._lock:
            if self.gate is not None:
                self.gate.observe_prefill(context, tokens, seconds)

    def observe_loads(self, route: Route, results: Sequence[TransferResult]) -> None:
        """Report loads that the engine made by itself."""
        with self._lock:
            if self.gate is not None:
                for result in results:
                    self.gate.observe_transfer(route, result, self.clock())

    def in_flight(self, job: int) -> bool:
        """Whether `job` is in flight. After a fault of the control plane: whether its mover still has it."""
        with self._lock:
            if self.fault is None:
                with self._suppress_logged_fault():
                    return not self._cache.progress(job).is_over
            return job in self._running

    def wait_jobs(self, jobs: Sequence[int], timeout: float) -> bool:
        """Wait for at most `timeout` seconds until none of `jobs` is in flight; returns whether that is so."""
        return self._wait(lambda: not any(map(self.in_flight, jobs)), timeout)

    def wait_dependencies(self, job: int, timeout: float) -> bool:
        """Wait for at most `timeout` seconds until `job` waits for no other job; returns whether that is so."""
        return self._wait(lambda: job not in self._waiting, timeout)

    def wait_for_blocks(self, jobs: Sequence[int], touches: Callable[[int], bool], timeout: float) -> bool:
        """As `wait_jobs`, until no job touches its device blocks any more; `touches` says so of one that has begun."""
        return self._wait(
            lambda: not any(job in self._waiting or touches(job) for job in jobs), timeout, of_movers=True
        )

    def flush(self, timeout: float) -> bool:
        """Wait until every block that is to be copied down was, and no mover is busy; returns whether that is so.

        Blocks that a tier did not admit stay where they are. Does not wait for jobs that the engine carries out itself.
        """

        def is_done() -> bool:
            self._idle_until = -math.inf  # `flush` may order backups
            return self.fault is not None or self._cache.back_up_all()

        with contextlib.suppress(TierClosedError), self._typed_faults():
            return self._wait(is_done, timeout) and self.fault is None
        return False

    def wait_idle(self, timeout: float, *, except_to: Collection[str] = ()) -> bool:
        """Wait for at most `timeout` seconds until nothing is in flight `except_to` these tiers; whether that is so."""

        def is_idle() -> bool:
            left = sum(each.transfer.route.destination in except_to for each in self._waiting.values())
            left += sum(each.transfer.route.destination in except_to for each in self._running.values())
            return self.fault is not None or self._cache.jobs_in_flight <= left

        return self._wait(is_idle, timeout)

    def add(self, mover: Mover) -> None:
        """Add `mover`, which serves its routes from now on."""
        with self._lock:
            self._movers.append(mover)
            self._by_route.update(dict.fromkeys(mover.routes, mover))

    def remove(self, mover: Mover, timeout: float) -> None:
        """Close `mover` and remove its routes. Jobs that have not ended within `timeout` seconds do not arrive."""

        def is_idle() -> bool:
            waiting = any(each.transfer.route in mover.routes for each in self._waiting.values())
            return not waiting and not any(each.mover is mover for each in self._running.values())

        self._wait(is_idle, timeout)
        mover.close()
        with self._lock:
            for job in [job for job, each in self._waiting.items() if each.transfer.route in mover.routes]:
                self._end_waiting(job, Status.TIER_OFF)
            self._pump()
            self._movers.remove(mover)
            self._by_route = {route: each for route, each in self._by_route.items() if each is not mover}

    def close(self, flush_timeout: float = 30.0) -> bool:
        """Flush, then close all movers; returns whether everything was flushed. Idempotent.

        The lock is free while this waits. A forked process closes only its copies of the tiers' files.
        """
        if os.getpid() != self.pid:
            for tier in self._tiers:
                tier.close()
            return False
        flushed = self.closed or self.flush(flush_timeout)
        with self._lock:
            self.closed = True
            for job in list(self._waiting):
                self._end_waiting(job, Status.TIER_OFF)
            for probe in list(self._probing):
                self._end_probe(probe, Status.TIER_OFF)
        for mover in self._movers:
            try:
                mover.close()
            except Exception:  # noqa: BLE001 - the others are to be closed all the same
                _log.exception("%s: could not be closed; memory is freed at exit", Route.mover_name(mover.routes))
        self.pump()
        self.wakeup.set()
        return flushed

    # ------------------------------------------------------------------ inside; the lock is held

    @property
    def _is_busy(self) -> bool:
        """Whether any job in flight will report a result; otherwise there is nothing to pump for."""
        running = any(each.mover not in self._unpollable for each in self._running.values())
        return running or bool(self._waiting or self._probing)

    @contextmanager
    def _suppress_logged_fault(self) -> Iterator[None]:
        """Suppress the fault of the control plane that `fail` has logged; exceptions of movers and callers go on."""
        try:
            yield
        except Exception as error:
            if error is not self.fault:
                raise

    def _wait(self, done: Callable[[], bool], timeout: float, *, of_movers: bool = False) -> bool:
        """Wait until `done()`. It is called after each cache change; with `of_movers`, at each poll."""
        deadline, (nap, longest), last_seen = self.clock() + timeout, _POLL_SECONDS, -1
        while True:
            with self._lock:
                self._pump()
                with self._suppress_logged_fault():  # after it, `done` is called again, and does not use the cache
                    if last_seen != self._cache_version or of_movers or self.fault is not None:
                        last_seen = self._cache_version
                        if done():
                            self._pump()
                            return True
            if self.clock() >= deadline or (self.gives_up and not of_movers):
                self.wakeup.set()
                return False
            time.sleep(nap)
            nap = min(2 * nap, longest)

    def _pump(self, *, cache_has_time: bool = False) -> None:
        with self._suppress_logged_fault():
            try:
                self._advance(cache_has_time) if self.fault is None else self._drain()
            except BaseException as error:
                if not isinstance(error, Exception):  # KeyboardInterrupt: commands or results may be lost
                    self.fail(error)
                raise

    def _drain(self) -> None:
        """With disabled tiers: collect ended jobs. A mover that raises is not polled again; its jobs stay in flight."""
        for mover in self._movers:
            if mover in self._unpollable:
                continue
            try:
                results = mover.poll()
            except Exception:  # noqa: BLE001 - the others are to be heard all the same
                named = Route.mover_name(mover.routes)
                _log.exception(
                    "%s: results cannot be read; slots of jobs in flight are blocked; restart the engine", named
                )
                self._unpollable.append(mover)
                continue
            for result in results:
                running = self._running.get(result.job)
                if running is not None:
                    running.ranks -= 1
                    if not running.ranks:
                        del self._running[result.job]

    def _advance(self, cache_has_time: bool) -> None:
        """Pass on commands and results until there are none. `cache_has_time`: the cache has the current time."""
        commands = self._cache.take_commands() if cache_has_time else ()  # else they are taken below, after the results
        while True:
            for command in commands:
                self._dispatch(command)
            now = self.clock()
            self._expire(now)
            for mover in self._movers:
                for result in mover.poll():
                    self._collect(result)
            for prober in self._probers.values():
                for answer in prober.answers():
                    if (asked := self._probing.pop(answer.probe, None)) is not None:  # it is not too late
                        self._results.append(answer)
                        self._observe_probe(*asked)
            results, self._results = self._results, []
            if not results and (cache_has_time or now < self._idle_until):
                return
            self._cache.apply_results(results, now)  # of none, too: deadlines pass all the same
            self._cache_version += 1
            cache_has_time = True
            commands = self._cache.take_commands()
            if not results and not commands:
                self._idle_until = now + _POLL_SECONDS[1]
                return
            self._failures = {job: slots for job, slots in self._failures.items() if job in self._running}

    def _dispatch(self, command: Command) -> None:
        match command:
            case Transfer():
                pending = {job for job in command.after if job in self._waiting or job in self._running}
                failures = {slot: how for job in command.after for slot, how in self._failures.get(job, {}).items()}
                waiting = _WaitingTransfer(command, pending, failures)
                if pending:
                    self._waiting[command.job] = waiting
                else:
                    self._start(waiting)
            case Probe():
                self._probe(command)
            case Cancel():
                if command.job in self._waiting:
                    self._end_waiting(command.job, Status.CANCELLED)
                elif command.job in self._running and not self._running[command.job].expired:
                    self._running[command.job].mover.cancel(command.job)
            case DeleteRecords():
                for tier in self._tiers:
                    if tier.name == command.tier:
                        with contextlib.suppress(TierClosedError):
                            tier.delete_records(command.slots)
            case Reset():
                for tier in self._tiers:
                    self._reset(tier, command.generation, weights=command.weights)

    def _reset(self, tier: Tier, generation: int, *, weights: bool) -> None:
        """A tier that cannot make a reset durable must not be written in the new generation, nor read: it is off."""
        if weights:
            tier.weights_changed()
        try:
            tier.reset(generation)
        except LongshoreError:
            _log.exception(
                "%s tier disabled: the reset to generation %d could not be written; restart the engine to re-enable it",
                tier.name,
                generation,
            )
            tier.close()

    def _start(self, waiting: _WaitingTransfer) -> None:
        """Submit the leading items whose upstream arrived: a chunk is of no use without those before it."""
        transfer = waiting.transfer
        self._waiting.pop(transfer.job, None)
        failed, sources = waiting.failures, [item.source for item in transfer.items]
        statuses = [Status.OK if source is None else failed.get(source, Status.OK) for source in sources]
        usable = leading_ok(statuses)
        tail = tuple(Status.CANCELLED if status is Status.OK else status for status in statuses[usable:])
        if not usable:
            self._end(transfer, tail)
            return
        mover = self._by_route.get(transfer.route)
        whole = usable == len(transfer.items)
        try:
            if mover is None:
                raise TierClosedError(f"no mover serves the route {transfer.route}")
            mover.submit(transfer if whole else _truncated(transfer, usable, self._cache.settings.blocks_per_chunk))
        except Exception as error:  # noqa: BLE001 - whatever a mover raises, the job must end, and the others go on
            status = submit_status(error)
            if mover is None or status in (Status.DEVICE_ERROR, Status.INTERNAL_ERROR):
                named = transfer.job, transfer.route, transfer.route.loss
                log_seldom(_log, "transfer job %d (%s) could not be submitted; %s; report this", *named)
            self._end(transfer, (status,) * len(statuses))  # its sources were not touched, and stay good
        else:
            self._running[transfer.job] = _RunningTransfer(transfer, mover, tail, transfer.ranks)

    def _probe(self, probe: Probe) -> None:
        """Submit a probe to a remote tier; if that fails in any way, the probe ends, and others continue."""
        self._probing[probe.probe] = probe, self.clock()
        prober = self._probers.get(probe.tier)
        try:
            if prober is None or probe.ranks != 1:
                raise PlanError(f"no prober for tier {probe.tier} and {probe.ranks} ranks")
            prober.ask(probe)
        except Exception as error:  # noqa: BLE001
            if not isinstance(error, TierClosedError):
                _log.exception(
                    "probe %d of the %s tier could not be submitted; its keys are misses; report this",
                    probe.probe,
                    probe.tier,
                )
            self._end_probe(probe.probe, Status.TIER_OFF)

    def _observe_probe(self, probe: Probe, ordered: float) -> None:
        """Tell the gate how long an answer took, or that there was none for so long."""
        if self.gate is not None and probe.tier in self.gate.tiers:
            self.gate.observe_probe(probe.tier, max(0.0, self.clock() - ordered))

    def _end_probe(self, number: int, status: Status) -> None:
        """End a probe without an answer, on all ranks."""
        probe, ordered = self._probing.pop(number)
        if status is Status.DEADLINE:
            self._observe_probe(probe, ordered)
        nothing = (False,) * len(probe.keys)
        self._results += [ProbeResult(number, nothing, status, rank) for rank in range(probe.ranks)]

    def _expire(self, now: float) -> None:
        for number in [number for number, (probe, _) in self._probing.items() if probe.deadline <= now]:
            self._end_probe(number, Status.DEADLINE)
        for job in [job for job, waiting in self._waiting.items() if waiting.transfer.deadline <= now]:
            self._end_waiting(job, Status.DEADLINE)
        for running in self._running.values():
            if running.transfer.deadline <= now and not running.expired:
                running.expired = True
                running.mover.cancel(running.transfer.job)

    def _end_waiting(self, job: int, status: Status) -> None:
        """End `job`, unless the end of one that it waited for has done so already."""
        waiting = self._waiting.pop(job, None)
        if waiting is not None:
            self._end(waiting.transfer, (status,) * len(waiting.transfer.items))

    def _end(self, transfer: Transfer, statuses: tuple[Status, ...]) -> None:
        """End a transfer that no mover has, on all ranks."""
        for rank in range(transfer.ranks):
            self._results.append(TransferResult(transfer.job, statuses, rank=rank))
        self._release_dependents(transfer, statuses)

    def _collect(self, result: TransferResult) -> None:
        running = self._running[result.job]
        statuses = result.statuses
        if running.expired:  # it was cancelled because its time was up
            statuses = tuple(Status.DEADLINE if s is Status.CANCELLED else s for s in statuses)
        statuses += running.tail
        result = replace(result, statuses=statuses)
        self._results.append(result)
        if self.gate is not None:
            self.gate.observe_transfer(running.transfer.route, result, self.clock())
        self._release_dependents(running.transfer, statuses, last=running.ranks == 1)
        running.ranks -= 1
        if not running.ranks:
            del self._running[result.job]

    def _release_dependents(self, transfer: Transfer, statuses: Sequence[Status], *, last: bool = True) -> None:
        """Tell those that wait for `transfer` which slots it did not fill; start them if this was its last rank."""
        failures = {
            item.destination: status
            for item, status in zip(transfer.items, statuses, strict=True)
            if item.destination is not None and status is not Status.OK
        }
        self._failures[transfer.job] = failures | self._failures.get(transfer.job, {})
        for waiting in [w for w in self._waiting.values() if transfer.job in w.pending]:
            waiting.failures = failures | waiting.failures
            if last:
                waiting.pending.discard(transfer.job)
                if not waiting.pending:
                    self._start(waiting)


class BackgroundLoop:
    """Pumps a runtime in a separate thread, which sleeps while nothing is in flight.

    A mover that raises there disables the tiers, because no caller would see the exception.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="longshore-runtime", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; the runtime stays open. Idempotent."""
        self._stopping = True
        self._runtime.wakeup.set()
        self._thread.join()

    def _run(self) -> None:
        busy = True
        while not self._stopping:
            self._runtime.wakeup.wait(_POLL_SECONDS[1] if busy else None)
            self._runtime.wakeup.clear()
            try:
                busy = self._runtime.pump()
            except Exception as error:  # noqa: BLE001 - of a mover: no caller would see it, and requests wait
                self._runtime.fail(error)


def _truncated(transfer: Transfer, items: int, blocks_per_chunk: int) -> Transfer:
    kept, left = list[Section](), items
    for section in transfer.sections:
        skipped = section.first_block % blocks_per_chunk
        blocks = section.blocks[: max(0, left * blocks_per_chunk - skipped)]
        left -= -(-(skipped + len(section.blocks)) // blocks_per_chunk)
        kept += [section._replace(blocks=blocks)] if blocks else []
    return replace(transfer, items=transfer.items[:items], sections=tuple(kept), tokens=None)
