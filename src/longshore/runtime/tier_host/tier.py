"""`HostedFileTier`: a file tier whose files another process reads and writes. To the runtime it is any other tier.

    opening ──OPENED──► open ──(it dies)──► ending ──(reaped)──► away ──(pause)──► opening ...

Whatever was under way when the process died ends as `Status.AWAY`, but only once the process is reaped: until then its
reads may still land in the arena. While there is no process that has opened the files, so does whatever is ordered: a
miss, or no copy, and never a wait. Chunks in the files stay where the control plane knows them to be, and are read
again later; every read verifies everything, so what was torn is found then.

A process whose disk hangs is stalled, and left alone: another one would wait for that disk as well. It keeps the slots
of what it has begun; what is ordered ends as `AWAY` until something else has ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from longshore import __version__, errors
from longshore.boundary import FILE, Status
from longshore.errors import TierClosedError, TierError
from longshore.runtime.tier_host import wire
from longshore.runtime.tier_host.process import PROGRAM, HostProcess
from longshore.runtime.tier_host.watch import Silence, Watch
from longshore.runtime.tier_host.wire import Kind, frame
from longshore.tiers.arena import Arena
from longshore.tiers.base import StoredChunk, Tier, TierOp, TierResult
from longshore.tiers.file import TROUBLES as OF_FILES
from longshore.tiers.ops import check_batch, check_digest, check_generation

_DEATHS, _STALLS = "tier_host", "stalled"

TROUBLES = (*OF_FILES, _DEATHS, _STALLS)
"""All that `HostedFileTier.troubles` counts."""

STALLED = 10.0
"""Seconds in which nothing has ended of what is under way, after which no more is ordered until something has."""

CLOSE_PATIENCE = 60.0
"""Seconds that a process has to finish what it has begun when the tier is closed."""

FORGET_PATIENCE = 10.0
"""Seconds to wait until a reset is on the medium; a process that takes longer is ended, and the next one does it."""

_KILL_PATIENCE = 10.0
"""Seconds to wait for a process that was killed: one that is stuck in the device does not end before that answers."""

_log = logging.getLogger(__name__)


class HostedFileTier(Tier):
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
        """As for `FileTier`, whose errors this raises, and `TierError` when there can be no process.

        `arena` must be shared. With `fixed_weights` what is written after a reset may be served to a later engine. Else
        the reset may have come with other weights, of which a later engine cannot know: what is written is under a
        scope of this tier alone. `program` runs as the tier host, for tests.
        """
        check_digest("a scope", scope)
        self.name = FILE
        self.image_bytes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
        self._order = {
            "version": __version__,
            "directory": str(directory.absolute()),
            "capacity": capacity,
            "image_bytes": self.image_bytes,
            "arena_bytes": arena.nbytes,
            "threads": threads,
        }
        self._arena = arena
        self._program = program
        self._scope = scope
        self._fixed_weights = fixed_weights
        self._generation = 0
        self._forgotten: str | None = None
        """Why the last reset could not be made durable; nothing if it was; `None` while that is not known."""
        self._under_way: dict[int, int] = {}
        """How many operations each ticket has whose result has not come."""
        self._results: list[TierResult] = []
        self._tickets = 0
        self._is_open = False
        self._closed = False
        self._pid = os.getpid()
        self._watch = Watch(self._start, clock)
        self._standstill = Silence(clock)
        self._ended = self._ended_before = 0
        """Operations that the process has carried out, as it said; and had, when somebody looked the last time."""
        self._stalls = 0
        opened = self._open_first()
        self.slabs, self._generation = opened.slabs, opened.generation
        self._fallbacks, self._troubles, self._found = opened.fallbacks, opened.troubles, opened.found
        self._past: Counter[str] = Counter()
        """Troubles of the processes that have died."""

    @property
    def generation(self) -> int:
        """The generation last given to `forget`, by this process or an earlier one; 0 at first."""
        return self._generation

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """The file tier's."""
        return self._fallbacks

    @property
    def troubles(self) -> Mapping[str, int]:
        """The file tier's, of all processes; how many of these have died, or could not open the files; and stalled."""
        added = {reason: count + self._past[reason] for reason, count in self._troubles.items()}
        return {**added, _DEATHS: self._watch.deaths, _STALLS: self._stalls}

    @property
    def is_away(self) -> bool:
        """Whether no process has opened the files, or the one that has is stalled: all that is ordered is a miss."""
        return not self._is_open or self._is_stalled

    @property
    def _is_stalled(self) -> bool:
        return self._standstill.seconds >= STALLED

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Order `batch`. Generations above `generation` are refused, as by `FileTier`."""
        self._check_open()
        arena_bytes = self._arena.array.nbytes  # raises when the arena was closed under us
        check_batch(batch, deadline, slabs=self.slabs, image_bytes=self.image_bytes, arena_bytes=arena_bytes)
        newest = max((op.generation for op in batch), default=0)
        if newest > self._generation:
            raise TierError(f"generation {newest} was never given to forget(), which knows {self._generation}")
        ticket, self._tickets = self._tickets, self._tickets + 1
        self._under_way[ticket] = len(batch)
        if self._is_stalled or not self._tell(Kind.SUBMIT, wire.pack_submit(ticket, deadline, batch)):
            self._end(ticket, Status.AWAY)
        return ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call. Looks after the process, too: it is reaped, and started, here."""
        self._check_process()
        if not self._closed:
            self._listen()
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """What has not begun of `ticket` ends as `Status.CANCELLED`. An unknown or ended ticket is ignored."""
        self._check_process()
        if ticket in self._under_way:
            self._tell(Kind.CANCEL, wire.pack_cancel(ticket))

    def recover(self) -> list[StoredChunk]:
        """What was found at start. Once: the control plane knows from then on."""
        self._check_open()
        found, self._found = self._found, []
        return found

    def discard(self, slots: Sequence[int]) -> None:
        """Nobody wants what is in `slots` any more; a process that is away is not told of it."""
        self._check_open()
        for slot in slots:
            self.slabs.slab_of(slot)  # or there is none
        self._tell(Kind.DISCARD, wire.pack_discard(slots))

    def forget(self, generation: int) -> None:
        """Serve nothing older than `generation`; that is on the medium when this returns, or before anything else is.

        Raises `TierError` when it cannot be stored, as `FileTier` does; a second try may succeed.
        """
        self._check_open()
        check_generation(generation)
        if generation <= self._generation and not self._forgotten:
            return
        self._generation = max(generation, self._generation)
        if not self._fixed_weights:
            self._scope = os.urandom(len(self._scope))
        self._forgotten = None
        if self._tell(Kind.FORGET, wire.pack_forget(self._generation, self._scope)):
            self._wait_until_forgotten()
        elif self._watch.process is not None:
            self._watch.process.kill()  # it is opening an older generation; the next one is told of this one

    def close(self) -> None:
        """End what has not begun, wait for what has, and for the process. Idempotent.

        In a forked child, whose process it is not, only the copies of its pipes go.
        """
        process = self._watch.process
        if not self._closed and process is not None:
            self._closed = True
            if os.getpid() == self._pid:
                self._see_off(process)
            process.close()
        self._closed = True
        self._end_all(Status.TIER_OFF)

    # ------------------------------------------------------------------ inside

    def _start(self) -> HostProcess:
        process = HostProcess(self._program, self._arena.fd)
        first = self._watch.deaths == 0
        order = {**self._order, "scope": self._scope.hex(), "generation": self._generation, "recover": first}
        process.send(frame(Kind.OPEN, wire.pack_json(order)))
        return process

    def _open_first(self) -> wire.Opened:
        """Wait for the first process: it opens the files, or says why it cannot."""
        try:
            process = self._watch.begin()
        except OSError as error:
            raise TierError(f"the tier host could not be started: {error}") from error
        try:
            while True:
                process.wait(Silence.MOST)
                frames, died = self._watch.look(owed=True)
                for kind, body in frames:
                    if kind is Kind.OPENED:
                        self._is_open = True
                        return wire.parse_opened(body)
                    if kind is not Kind.ALIVE:
                        raise _error(body)
                if died:
                    raise TierError(f"the tier host ended {process.ending}, before it had opened the files")
        except BaseException:
            process.kill()
            process.wait_reaped(_KILL_PATIENCE)
            process.close()
            raise

    def _tell(self, kind: Kind, body: bytes) -> bool:
        """Give an order, if there is a process that has opened the files; says whether there is."""
        if self._is_open and self._watch.process is not None:
            self._watch.process.send(frame(kind, body))
        return self._is_open

    def _listen(self) -> None:
        frames, died = self._watch.look(owed=bool(self._under_way) or not self._is_open)
        for kind, body in frames:
            self._hear(kind, body)
        if died:
            self._is_open = False
            self._past.update(self._troubles)
            self._troubles = dict.fromkeys(self._troubles, 0)
            self._end_all(Status.AWAY)
        self._look_for_progress()

    def _look_for_progress(self) -> None:
        """Has the disk done anything since the last look? What was not begun in time, or called off, does not count."""
        was, moved = self._is_stalled, self._ended != self._ended_before
        self._ended_before = self._ended
        self._standstill.look(over=moved or not self._under_way)
        if self._is_stalled and not was:
            self._stalls += 1
            _log.error("the disk of the file tier has done nothing for %.0f s: misses until it does", STALLED)
        if was and not self._is_stalled:
            _log.warning("the disk of the file tier answers again")

    def _hear(self, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.RESULT:
                result = wire.parse_result(body)
                del self._under_way[result.ticket]
                self._results.append(result)
            case Kind.OPENED:
                self._is_open = True
                self._fallbacks = wire.parse_opened(body).fallbacks
            case Kind.REFUSED:
                _log.error("%s", _error(body))
            case Kind.FORGOTTEN:
                self._forgotten = body.decode()
            case Kind.TROUBLES:
                self._troubles = wire.parse_json(body)
            case Kind.ALIVE:
                self._ended = wire.parse_alive(body)
            case _:
                raise TierError(f"{kind.name} is no answer")

    def _wait_until_forgotten(self) -> None:
        deadline = time.monotonic() + FORGET_PATIENCE
        while self._is_open and self._forgotten is None and self._watch.process is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                _log.error("the tier host has not made a reset durable within %.0f s, and is ended", FORGET_PATIENCE)
                self._watch.process.kill()
                return
            self._watch.process.wait(left)
            self._listen()
        if self._forgotten:
            raise TierError(self._forgotten)

    def _see_off(self, process: HostProcess) -> None:
        """The process finishes what it has begun, and ends; if it does not, it is killed."""
        process.hang_up()
        deadline = time.monotonic() + CLOSE_PATIENCE
        while not process.hung_up and (left := deadline - time.monotonic()) > 0:
            process.wait(min(left, Silence.MOST))
            frames = process.receive()
            for kind, body in frames:
                self._hear(kind, body)
            self._watch.end_if_silent(process, over=bool(frames))
        if not process.wait_reaped(max(0.0, deadline - time.monotonic())):
            process.kill()
            if not process.wait_reaped(_KILL_PATIENCE):
                _log.error("the tier host (process %d) cannot be ended: its device does not answer", process.pid)

    def _end(self, ticket: int, status: Status) -> None:
        statuses = (status,) * self._under_way.pop(ticket)
        self._results.append(TierResult(ticket, statuses, 0, 0.0, 0.0))

    def _end_all(self, status: Status) -> None:
        for ticket in list(self._under_way):
            self._end(ticket, status)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TierClosedError("the tier host belongs to the process that forked this one")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise TierClosedError(f"{self._order['directory']}: the file tier was closed")


def _error(body: bytes) -> TierError:
    """What a tier host refused, as the error that it is."""
    name, message = wire.parse_json(body)
    kind = getattr(errors, name, TierError)
    return kind(message) if isinstance(kind, type) and issubclass(kind, TierError) else TierError(message)
