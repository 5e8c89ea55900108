"""`HostedTier`: a tier whose I/O is done by a process of its own (the tier host), with the interface of any other tier.

    opening ──OPENED──► open ──(it dies)──► ending ──(reaped)──► away ──(pause)──► opening ...

    HostedFileTier   files (here)              HostedRemoteTier   a store that replicas share (`remote.py`)

When the process dies, its operations end as `Status.UNAVAILABLE`, but only once it is reaped: until then, its reads may
still write to the arena. Until another process has opened the tier, new operations end as `UNAVAILABLE` at once: misses
and skipped copies, never a wait. Records in the files remain known to the control plane and are read again later; every
read is verified, so torn records are detected.

A process whose disk hangs is stalled and is not killed, because another one would wait for the disk as well. It keeps
the slots of its operations; new operations end as `UNAVAILABLE` until one has ended.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longshore import __version__, errors
from longshore.boundary import DISK_PAGE, FILE, Status, StoredChunks
from longshore.errors import TierClosedError, TierError
from longshore.runtime.tier_host import wire
from longshore.runtime.tier_host.supervisor import PROGRAM, HostProcess, HostSupervisor, SilenceTimer
from longshore.runtime.tier_host.wire import Kind, WireError, frame
from longshore.tiers.arena import Arena
from longshore.tiers.base import (
    Tier,
    TierOp,
    TierResult,
    check_batch,
    check_digest,
    check_generation,
    check_slots,
)
from longshore.tiers.file import FAILURE_REASONS as OF_FILES
from longshore.tiers.file import PendingReset

_DEATHS, _STALLS = "tier_host", "stalled"

FAILURE_REASONS = (*OF_FILES, _DEATHS, _STALLS)
"""The reasons counted in `HostedFileTier.failures`."""

STALLED = 10.0
"""Seconds without a completed operation after which no operation is submitted until one completes."""

CLOSE_TIMEOUT = 60.0
"""Seconds that the tier host has to finish its operations when the tier is closed."""

RESET_TIMEOUT = 10.0
"""Seconds to wait until the tier host has stored a reset. Then it is killed, and this process writes the reset."""

_KILL_TIMEOUT = 10.0
"""Seconds to wait for a killed process, which does not end while it is blocked in the kernel."""

_log = logging.getLogger(__name__)


class TierHostError(TierError):
    """A tier host could not be started, or has ended before it opened its tier."""


class HostedTier(Tier):
    """What tiers in a tier host have in common: the process, and what is in flight there."""

    def __init__(
        self,
        name: str,
        image_bytes: int | Sequence[int],
        arena: Arena,
        program: Sequence[str],
        clock: Callable[[], float],
        **open_request: Any,
    ) -> None:
        """`open_request` is what OPEN says of the tier. Nothing is started yet."""
        self.name = name
        self.image_bytes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
        self._open_request: dict[str, Any] = {
            "version": __version__,
            "name": name,
            "image_bytes": self.image_bytes,
            "arena_bytes": arena.nbytes,
            **open_request,
        }
        self._arena = arena
        self._program = program
        self._in_flight: dict[int, int] = {}
        """Number of operations of each ticket in flight."""
        self._results: list[TierResult] = []
        self._tickets = 0
        self._is_open = False
        self._closed = False
        self._pid = os.getpid()
        self._supervisor = HostSupervisor(self._start, clock, name)
        self._failures: dict[str, int] = {}
        self._past: Counter[str] = Counter()
        """Failures counted by earlier processes."""

    @property
    def failures(self) -> Mapping[str, int]:
        """Failures of the tier over all processes, and deaths and failed starts of processes."""
        added = {reason: count + self._past[reason] for reason, count in self._failures.items()}
        return {**added, _DEATHS: self._supervisor.deaths}

    @property
    def is_stalled(self) -> bool:
        """Whether the process has work, and sends no message."""
        return self._supervisor.is_quiet

    @property
    def is_unavailable(self) -> bool:
        """Whether no process has opened the tier, or it is stalled or silent. All operations are misses then."""
        return not self._is_open or self.is_stalled

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Begin `batch`. Generations above `generation` are refused."""
        self._check_open()
        nbytes, slabs = self._arena.array.nbytes, getattr(self, "slabs", None)  # raises when it was closed under us
        sizes, last = self.image_bytes, self.generation
        check_batch(batch, deadline, slabs=slabs, image_bytes=sizes, arena_bytes=nbytes, last_reset=last)
        ticket = self._new_ticket()
        self._in_flight[ticket] = len(batch)
        if self.is_unavailable or not self._send(Kind.SUBMIT, wire.pack_submit(ticket, deadline, batch)):
            self._end(ticket, Status.UNAVAILABLE)
        return ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call. Also reaps and restarts the process."""
        self._check_process()
        if not self._closed:
            self._receive()
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """End operations of `ticket` that have not begun as `CANCELLED`. Unknown and ended tickets are ignored."""
        self._check_process()
        if ticket in self._in_flight:
            self._send(Kind.CANCEL, wire.NUMBER.pack(ticket))

    def close(self) -> None:
        """End operations that have not begun, wait for the others, and for the process. Idempotent.

        In a forked child, closes only the child's copies of the pipes.
        """
        process = self._supervisor.process
        if not self._closed and process is not None:
            self._closed = True
            if os.getpid() == self._pid:
                self._shut_down_process(process)
            process.close()
        self._closed = True
        self._end_all(Status.TIER_OFF)

    # ------------------------------------------------------------------ for the tiers

    def _open_fields(self) -> dict[str, Any]:
        """What OPEN says beside `_open_request`, as of now."""
        raise NotImplementedError

    def _on_opened(self, body: bytes) -> None:
        """A process has opened the tier, and says so in `body`. `WireError` if that cannot be."""
        raise NotImplementedError

    @property
    def _expects_reply(self) -> bool:
        """Whether answers are expected."""
        return bool(self._in_flight) or not self._is_open

    def _handle(self, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.RESULT:
                result = wire.parse_result(body)
                if self._in_flight.get(result.ticket) != len(result.statuses):
                    wanted = self._in_flight.get(result.ticket, 0)
                    said = f"expected {wanted} statuses, got {len(result.statuses)}"
                    raise WireError(f"RESULT: ticket {result.ticket}: {said}")
                del self._in_flight[result.ticket]
                self._results.append(result)
            case Kind.OPENED:
                self._on_opened(body)
                self._is_open = True
            case Kind.REFUSED:
                message = "restarted tier host cannot open the %s tier: %s; its blocks are misses until it can"
                _log.error(message, self.name, _refusal(body))
            case Kind.FAILURES:
                self._failures = wire.parse_counts(body, self._failures)
            case Kind.ALIVE:
                pass
            case _:
                raise WireError(f"{kind.name} is not a reply")

    def _open_first(self) -> None:
        """Wait until the first process has opened the tier, or has reported why it cannot: `TierError`."""
        try:
            process = self._supervisor.begin()
        except OSError as error:
            raise TierHostError(f"the tier host could not be started: {error}") from error
        try:
            while not self._is_open:
                process.wait(SilenceTimer.MOST)
                frames, died = self._supervisor.poll(expects_reply=True)
                for kind, body in frames:
                    if kind is Kind.REFUSED:
                        raise _refusal(body)
                    self._handle(kind, body)
                if died:
                    raise TierHostError(f"the tier host ended {process.ending} before it opened the {self.name} tier")
        except BaseException as error:
            process.kill()
            process.wait_reaped(_KILL_TIMEOUT)
            process.close()
            if isinstance(error, WireError):
                raise TierError(f"invalid message from the tier host: {error}") from error
            raise

    def _send(self, kind: Kind, body: bytes) -> bool:
        """Send a request, if a process has opened the tier; returns whether one has."""
        if self._is_open and self._supervisor.process is not None:
            self._supervisor.process.send(frame(kind, body))
        return self._is_open

    def _receive(self) -> None:
        frames, died = self._supervisor.poll(expects_reply=self._expects_reply)
        self._handle_all(frames)
        if died:
            self._is_open = False
            self._past.update(self._failures)
            self._failures = dict.fromkeys(self._failures, 0)
            self._end_all(Status.UNAVAILABLE)

    def _new_ticket(self) -> int:
        ticket, self._tickets = self._tickets, self._tickets + 1
        return ticket

    def _end_all(self, status: Status) -> None:
        for ticket in list(self._in_flight):
            self._end(ticket, status)

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise TierClosedError(f"the {self.name} tier was closed")

    # ------------------------------------------------------------------ inside

    def _start(self) -> HostProcess:
        process = HostProcess(self._program, self._arena.fd, self.name)
        process.send(frame(Kind.OPEN, wire.pack_json({**self._open_request, **self._open_fields()})))
        return process

    def _handle_all(self, frames: Sequence[tuple[Kind, bytes]]) -> None:
        """Handle messages. A process that sends an invalid one is killed, and counted as dead."""
        try:
            for kind, body in frames:
                self._handle(kind, body)
        except (WireError, TierError) as error:
            if self._supervisor.process is not None:
                self._supervisor.process.reject(error)

    def _shut_down_process(self, process: HostProcess) -> None:
        """Wait until the process has finished its operations and ended; kill it if it does not."""
        process.close_requests()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        while not process.is_eof and (left := deadline - time.monotonic()) > 0:
            process.wait(min(left, SilenceTimer.MOST))
            frames = process.receive()
            self._handle_all(frames)
            self._supervisor.kill_if_silent(process, is_over=bool(frames))
        if not process.wait_reaped(max(0.0, deadline - time.monotonic())):
            process.kill()
            if not process.wait_reaped(_KILL_TIMEOUT):
                _log.error("tier host (process %d) cannot be killed: it is blocked in I/O; check the disk", process.pid)

    def _end(self, ticket: int, status: Status) -> None:
        statuses = (status,) * self._in_flight.pop(ticket)
        self._results.append(TierResult(ticket, statuses, 0, 0.0, 0.0))

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TierClosedError(f"the {self.name} tier belongs to the parent of this forked process")


class HostedFileTier(HostedTier):
    """A `FileTier` in a tier host."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        image_bytes: int | Sequence[int],
        arena: Arena,
        scope: bytes,
        threads: int = 16,
        fixed_weights: bool = False,
        program: Sequence[str] = PROGRAM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As for `FileTier`, with its errors, and `TierError` if the process cannot be started.

        `arena` must be shared. With `fixed_weights`, records written after a reset may be served to a later engine.
        Otherwise the reset may mean other weights, which a later engine cannot detect, and records are written under a
        scope of this tier alone. `program` runs as the tier host, for tests.
        """
        check_digest("a scope", scope)
        open_request = {"directory": str(directory.absolute()), "capacity": capacity, "threads": threads}
        super().__init__(FILE, image_bytes, arena, program, clock, **open_request)
        self._generation = 0
        self._scope = scope
        self._fixed_weights = fixed_weights
        self._unsaved_reset: str | None = None
        """Error of the last reset; empty if it is durable; `None` while that is unknown."""
        self._pending: PendingReset | None = None
        """File for resets that no tier host has confirmed."""
        self._progress_timer = SilenceTimer(clock)
        self._ended = self._ended_before = 0
        """Operations completed by the process, as reported; and the number at the last `_receive`."""
        self._stalls = 0
        self._fallbacks: Mapping[str, int] = {}
        self._found = StoredChunks.of(())
        self._other_scope_slots: list[int] = []
        try:
            self._open_first()
        except BaseException:
            if self._pending is not None:
                self._pending.close()
            raise

    @property
    def generation(self) -> int:
        """The generation last given to `reset`, by this process or an earlier one; 0 at first."""
        return self._generation

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """The file tier's."""
        return self._fallbacks

    @property
    def failures(self) -> Mapping[str, int]:
        """Failures of the file tier over all processes, deaths and failed starts of processes, and stalls."""
        return {**super().failures, _STALLS: self._stalls}

    @property
    def is_stalled(self) -> bool:
        """Whether no operation has ended for `STALLED` seconds, or the process sends no message."""
        return self._is_stalled or super().is_stalled

    @property
    def _is_stalled(self) -> bool:
        return self._progress_timer.seconds >= STALLED

    def recover(self) -> StoredChunks:
        """Chunks recovered at the first start. Returned once."""
        self._check_open()
        found, self._found = self._found, StoredChunks.of(())
        return found

    def other_scope_slots(self) -> list[int]:
        """As of the start."""
        self._check_open()
        return self._other_scope_slots

    def delete_records(self, slots: Sequence[int]) -> None:
        """Discard the content of `slots`. Has no effect while the process is away."""
        self._check_open()
        check_slots(slots, self.slabs)
        self._send(Kind.DELETE_RECORDS, array("I", slots).tobytes())

    def reset(self, generation: int) -> None:
        """Serve no record from before `generation`. The reset is durable when this returns, whatever the process does.

        A reset that no process has confirmed is written by the engine's process, next to the files (`PendingReset`),
        for the next tier host. Raises `TierError` if that fails, as `FileTier` does. A second call may succeed; `close`
        tries again as well.
        """
        self._check_open()
        check_generation(generation)
        if generation <= self._generation and not self._unsaved_reset:
            return
        self._generation = max(generation, self._generation)
        if not self._fixed_weights:
            self._scope = os.urandom(len(self._scope))
        self._unsaved_reset = None
        if self._send(Kind.RESET, wire.RESET.pack(self._generation, self._scope)):
            self._wait_until_forgotten()
        elif self._supervisor.process is not None:
            self._supervisor.process.kill()  # it is opening an older generation; the next one is told of this one
        if self._unsaved_reset is None:
            self._unsaved_reset = self._write_pending_reset(lambda pending: pending.write(self._generation))
        if self._unsaved_reset:
            raise TierError(self._unsaved_reset)

    def weights_changed(self) -> None:
        """Report changed weights: records written after the next reset are for this engine alone."""
        self._fixed_weights = False

    def close(self) -> None:
        """As `HostedTier.close`; a reset that could not be written before is written now."""
        super().close()
        if self._unsaved_reset and os.getpid() == self._pid:
            self._settle_reset()
        if self._pending is not None:
            self._pending.close()
            self._pending = None

    # ------------------------------------------------------------------ inside

    def _open_fields(self) -> dict[str, Any]:
        first = self._supervisor.deaths == 0
        return {"scope": self._scope.hex(), "generation": self._generation, "recover": first}

    def _on_opened(self, body: bytes) -> None:
        """A process has opened the files: as the first did, if it is not that one."""
        opened, slabs = wire.parse_opened(body, OF_FILES), getattr(self, "slabs", None)
        sizes = tuple(DISK_PAGE + each for each in self.image_bytes)
        if self._is_open:
            raise WireError("OPENED received twice")
        if opened.slabs.image_bytes != sizes or slabs not in (None, opened.slabs):
            raise WireError(f"OPENED: expected {slabs or f'records of {sizes} bytes'}, got {opened.slabs}")
        if opened.generation < self._generation:
            raise WireError(f"OPENED: expected generation {self._generation} or later, got {opened.generation}")
        if opened.slabs.nbytes > (capacity := self._open_request["capacity"]):
            raise WireError(f"OPENED: expected at most {capacity} bytes, got {opened.slabs}")
        pending = PendingReset(Path(self._open_request["directory"]))  # the directory may be another one now
        if self._pending is not None:
            self._pending.close()
        self._pending, self._fallbacks = pending, opened.fallbacks
        if slabs is None:
            self.slabs, self._generation, self._other_scope_slots = (
                opened.slabs,
                opened.generation,
                opened.other_scope_slots,
            )
            self._found, self._failures = opened.found, opened.failures

    def _receive(self) -> None:
        super()._receive()
        self._check_progress()

    def _check_progress(self) -> None:
        """Detect a stalled disk: no operation completed, not counting late and cancelled ones."""
        was, moved = self._is_stalled, self._ended != self._ended_before
        self._ended_before = self._ended
        self._progress_timer.update(is_over=moved or not self._in_flight)
        if self._is_stalled and not was:
            self._stalls += 1
            _log.error(
                "file tier stalled: no I/O has completed for %.0f s; its blocks are misses until the disk responds",
                STALLED,
            )
        if was and not self._is_stalled:
            _log.warning("file tier is no longer stalled: the disk responds")

    def _handle(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.RESET_DONE:
            with wire.checked("RESET_DONE"):
                self._unsaved_reset = body.decode()
        elif kind is Kind.ALIVE:
            with wire.checked("ALIVE"):
                (self._ended,) = wire.NUMBER.unpack(body)
        else:
            super()._handle(kind, body)

    def _wait_until_forgotten(self) -> None:
        begun, was_stalled = time.monotonic(), self.is_stalled
        while self._is_open and self._unsaved_reset is None and self._supervisor.process is not None:
            waited = time.monotonic() - begun
            left = (0.0 if was_stalled else RESET_TIMEOUT) - waited  # a stalled disk has had its time
            if left <= 0 or self._supervisor.is_quiet:
                _log.error(
                    "tier host (process %d) killed: it has not confirmed a reset after %.1f s%s; the engine writes the "
                    "reset to %s itself",
                    self._supervisor.process.pid,
                    waited,
                    ", and sends no messages" if self._supervisor.is_quiet else ", its disk is stalled" * was_stalled,
                    self._open_request["directory"],
                )
                self._supervisor.process.kill()
                return
            self._supervisor.process.wait(left)
            self._receive()

    def _settle_reset(self) -> None:
        """Retry a reset that `reset` could not write; if that fails, drop the superblock, and with it all records."""
        self._unsaved_reset = self._write_pending_reset(lambda pending: pending.write(self._generation))
        if not self._unsaved_reset:
            return
        _log.error("%s; discarding all records, so that none from before the reset is served", self._unsaved_reset)
        if worse := self._write_pending_reset(PendingReset.drop):
            _log.error(
                "%s; remove %s before the next start, or records from before the reset may be served",
                worse,
                self._open_request["directory"],
            )

    def _write_pending_reset(self, change: Callable[[PendingReset], None]) -> str:
        """Write a reset beside the files, for the next process to find; why that could not be done, or nothing.

        Writes in a thread and waits with a timeout, because a write to a hung disk blocks.
        """
        pending, outcome = self._pending, queue.SimpleQueue[str]()
        if pending is None:
            directory = self._open_request["directory"]
            return f"{directory}: the reset cannot be written: the tier host never opened the directory"

        def write() -> None:
            try:
                change(pending)
            except TierError as error:
                outcome.put(str(error))
            else:
                outcome.put("")

        try:
            threading.Thread(target=write, name="longshore-reset", daemon=True).start()
        except RuntimeError:  # no more threads to be had
            write()
        try:
            return outcome.get(timeout=RESET_TIMEOUT)
        except queue.Empty:
            return f"{self._open_request['directory']}: the reset was not written to disk within {RESET_TIMEOUT:.0f} s"


def _refusal(body: bytes) -> TierError:
    name, message = wire.parse_refused(body)
    kind = getattr(errors, name, TierError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, TierError) else TierError(message)
