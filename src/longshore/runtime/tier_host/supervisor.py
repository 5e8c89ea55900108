"""Supervises a tier host, the process of one tier: starts it, detects that it is dead or silent, reaps, restarts it.

`HostProcess` exchanges requests and replies with one process, `HostSupervisor` restarts it after a pause that doubles.
Only `wait` and `wait_reaped` block.

    running ──(its end of the replies is closed)──► hung up ──kill, reap──► reaped

Only a reaped process writes no memory any more; until then, a read in progress may still complete. Processes that it
has started, and that write to the arena, keep its end of the replies open (`Arena.lifeline`). `tier.py` ends what was
in flight.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import longshore
from longshore.boundary import FILE
from longshore.runtime.tier_host.wire import Frames, Kind, WireError

PROGRAM = (sys.executable, "-P", "-m", "longshore.runtime.tier_host.child")
"""The program of a tier host; its argument is the descriptor of the arena's memory."""

_PIPE_READ_BYTES = 1 << 20

_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a tier host ignores; they are blocked until it has set that up."""

_log = logging.getLogger(__name__)


class HostProcess:
    """Start a tier host. Raises `OSError`, with nothing left behind, if that fails.

    Attributes:
        pid: Process id.
        is_eof: Whether no more replies will arrive.
    """

    def __init__(self, program: Sequence[str], memory: int, tier: str = FILE) -> None:
        self._tier = tier
        self.is_eof = False
        self._unsent = bytearray()
        self._frames = Frames()
        self._requests = self._replies = -1
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            undo.callback(self.close)
            requests, self._requests = os.pipe()
            theirs.callback(os.close, requests)
            self._replies, replies = os.pipe()
            theirs.callback(os.close, replies)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED_SIGNALS)  # of this thread; inherited
            theirs.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            self._popen = subprocess.Popen(
                [*program, str(memory)], stdin=requests, stdout=replies, pass_fds=(memory,), env=_environment()
            )
            undo.pop_all()
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        self.pid = self._popen.pid

    @property
    def reaped(self) -> bool:
        """Whether the process has ended, all its threads included."""
        return self._popen.poll() is not None

    @property
    def ending(self) -> str:
        """How a reaped process ended, as text."""
        status = self._popen.returncode
        return f"by signal {-status}" if status is not None and status < 0 else f"with status {status}"

    def send(self, data: bytes) -> None:
        """Send a request; bytes that the pipe does not take now are sent by the next `receive`."""
        self._unsent += data
        self._flush()

    def receive(self) -> list[tuple[Kind, bytes]]:
        """Replies since the last call."""
        self._flush()
        received: list[tuple[Kind, bytes]] = []
        while not self.is_eof:
            try:
                data = os.read(self._replies, _PIPE_READ_BYTES)
            except BlockingIOError:
                break
            self.is_eof = not data
            try:
                received += self._frames.feed(data)
            except WireError as error:
                self.reject(error)
        return received

    def reject(self, error: Exception) -> None:
        """Ignore the process after an invalid message; the supervisor kills it."""
        message = "%s tier: tier host (process %d) killed, because it sent an invalid message: %s; report this"
        _log.error(message, self._tier, self.pid, error)
        self.is_eof = True

    def wait(self, timeout: float | None) -> None:
        """Block for at most `timeout` seconds until a reply arrives, or unsent bytes can be sent."""
        either = select.poll()  # unlike `select`, whatever the numbers of the descriptors
        either.register(self._replies, select.POLLIN)
        if self._unsent:
            either.register(self._requests, select.POLLOUT)
        either.poll(None if timeout is None else 1000 * timeout)

    def close_requests(self) -> None:
        """Close the pipe of requests, dropping unsent ones; the process finishes what it has begun and ends."""
        self._unsent.clear()
        if self._requests >= 0:
            os.close(self._requests)
            self._requests = -1

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        self._popen.kill()

    def wait_reaped(self, timeout: float) -> bool:
        """Block for at most `timeout` seconds until the process has ended; returns whether it has."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        return self.reaped

    def close(self) -> None:
        """Close the pipes. Idempotent."""
        self.close_requests()
        if self._replies >= 0:
            os.close(self._replies)
            self._replies = -1

    def _flush(self) -> None:
        while self._unsent:
            try:
                with memoryview(self._unsent) as unsent:
                    sent = os.write(self._requests, unsent)
            except BlockingIOError:
                return
            except BrokenPipeError:  # its last replies may still be there to hear
                self._unsent.clear()
                return
            del self._unsent[:sent]


def _environment() -> dict[str, str]:
    """Ours, by which the very same package is found."""
    root = str(Path(longshore.__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root if known is None else f"{root}{os.pathsep}{known}"}


FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
"""Seconds from a death to the next start: first, and maximum."""

SILENCE = 30.0
"""Seconds without a message after which a process with work is killed."""

QUIET = 5.0
"""Seconds without a message after which no operation is submitted."""

STABLE = 60.0
"""Lifetime in seconds after which delays start again at the first one."""


class ReceivedFrames(NamedTuple):
    """Replies since the last `poll`, and whether the process was reaped."""

    frames: list[tuple[Kind, bytes]]
    died: bool


class SilenceTimer:
    """Seconds waited for an event, as observed by calls of `update`.

    Each call adds at most one second, so that the time of a suspended process does not count.
    """

    MOST = 1.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._last = clock()

    def update(self, *, is_over: bool) -> None:
        """Update the time. `is_over`: the event has occurred, or nothing is expected."""
        now = self._clock()
        self.seconds = 0.0 if is_over else self.seconds + min(now - self._last, self.MOST)
        self._last = now


class HostSupervisor:
    """Watches the processes that `start` starts, one at a time; `start` raises `OSError` if it fails.

    Attributes:
        process: The current process; `None` between two.
        deaths: Processes that ended unexpectedly, or could not be started.
    """

    def __init__(self, start: Callable[[], HostProcess], clock: Callable[[], float], tier: str = FILE) -> None:
        """`tier` is for the log."""
        self.process: HostProcess | None = None
        self._tier = tier
        self.deaths = 0
        self._start = start
        self._clock = clock
        self._begun = self._restart_at = clock()
        self._pause = FIRST_PAUSE
        self._silence = SilenceTimer(clock)

    @property
    def is_quiet(self) -> bool:
        """Whether the process has work and has sent no message for `QUIET` seconds."""
        return self._silence.seconds >= QUIET

    def begin(self) -> HostProcess:
        """Start a process, now. Raises `OSError`."""
        self._begun = self._clock()
        self._silence.seconds = 0.0
        self.process = self._start()
        return self.process

    def poll(self, *, expects_reply: bool) -> ReceivedFrames:
        """Receive replies. Starts a process if there is none and the delay is over.

        `expects_reply`: whether a reply is due.
        """
        if self.process is None:
            self._begin_if_due()
            return ReceivedFrames([], died=False)
        frames = self.process.receive()
        self.kill_if_silent(self.process, is_over=bool(frames) or not expects_reply)
        if self.process.is_eof:
            self.process.kill()  # it may live on with its pipe closed
            if self.process.reaped:
                self._on_reaped(self.process)
                return ReceivedFrames(frames, died=True)
        return ReceivedFrames(frames, died=False)

    def kill_if_silent(self, process: HostProcess, *, is_over: bool) -> None:
        """Kill a process that has been silent for too long; `is_over`: it has sent a message, or none is expected."""
        self._silence.update(is_over=is_over)
        if self._silence.seconds >= SILENCE:
            message = "%s tier: tier host (process %d) killed: no message for %.0f s; look at the load of the machine"
            _log.error(message, self._tier, process.pid, SILENCE)
            self._silence.seconds = 0.0
            process.kill()

    def _begin_if_due(self) -> None:
        if self._clock() < self._restart_at:
            return
        try:
            self.begin()
        except OSError as error:
            self._count_death(f"could not be started: {error}")

    def _on_reaped(self, process: HostProcess) -> None:
        process.close()
        self.process = None
        if self._clock() - self._begun >= STABLE:
            self._pause = FIRST_PAUSE
        self._count_death(f"(process {process.pid}) ended {process.ending}")

    def _count_death(self, what: str) -> None:
        self.deaths += 1
        _log.error(
            "tier host %s; %s tier blocks are misses until it is restarted, in %.1f s; if it repeats, look for the "
            "out-of-memory killer in dmesg",
            what,
            self._tier,
            self._pause,
        )
        self._restart_at = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
