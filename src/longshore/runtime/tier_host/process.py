"""A tier host's process, seen from its engine: requests and answers. Only `wait` and `wait_reaped` block.

    running ──(its end of the answers is closed)──► hung up ──kill, reap──► reaped

Only a reaped process writes no memory any more; until then, a read in progress may still complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import longshore
from longshore.runtime.tier_host.wire import Frames, Kind, WireError

PROGRAM = (sys.executable, "-P", "-m", "longshore.runtime.tier_host.child")
"""The program of a tier host; its argument is the descriptor of the arena's memory."""

_AT_ONCE = 1 << 20

_NOT_MEANT_FOR_IT = (signal.SIGINT, signal.SIGTERM)
"""Signals that a tier host ignores; they are blocked until it has set that up."""

_log = logging.getLogger(__name__)


class HostProcess:
    """Start a tier host. Raises `OSError`, with nothing left behind, if that fails.

    Attributes:
        pid: Process id.
        hung_up: Whether no more answers will arrive.
    """

    def __init__(self, program: Sequence[str], memory: int) -> None:
        self.hung_up = False
        self._unsent = bytearray()
        self._frames = Frames()
        self._orders = self._answers = -1
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            undo.callback(self.close)
            orders, self._orders = os.pipe()
            theirs.callback(os.close, orders)
            self._answers, answers = os.pipe()
            theirs.callback(os.close, answers)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_MEANT_FOR_IT)  # of this thread; inherited
            theirs.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
            self._popen = subprocess.Popen(
                [*program, str(memory)], stdin=orders, stdout=answers, pass_fds=(memory,), env=_environment()
            )
            undo.pop_all()
        os.set_blocking(self._orders, False)
        os.set_blocking(self._answers, False)
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
        """Answers since the last call."""
        self._flush()
        heard: list[tuple[Kind, bytes]] = []
        while not self.hung_up:
            try:
                data = os.read(self._answers, _AT_ONCE)
            except BlockingIOError:
                break
            self.hung_up = not data
            try:
                heard += self._frames.feed(data)
            except WireError as error:
                self.distrust(error)
        return heard

    def distrust(self, error: Exception) -> None:
        """Ignore the process after an invalid message; the watch kills it."""
        _log.error("tier host (process %d) killed: invalid message: %s", self.pid, error)
        self.hung_up = True

    def wait(self, timeout: float | None) -> None:
        """Block for at most `timeout` seconds until an answer arrives, or unsent bytes can be sent."""
        either = select.poll()  # unlike `select`, whatever the numbers of the descriptors
        either.register(self._answers, select.POLLIN)
        if self._unsent:
            either.register(self._orders, select.POLLOUT)
        either.poll(None if timeout is None else 1000 * timeout)

    def hang_up(self) -> None:
        """Close the pipe of requests, dropping unsent ones; the process finishes what it has begun and ends."""
        self._unsent.clear()
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1

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
        self.hang_up()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _flush(self) -> None:
        """Send what the pipe takes."""
        while self._unsent:
            try:
                with memoryview(self._unsent) as unsent:
                    sent = os.write(self._orders, unsent)
            except BlockingIOError:
                return
            except BrokenPipeError:  # its last answers may still be there to hear
                self._unsent.clear()
                return
            del self._unsent[:sent]


def _environment() -> dict[str, str]:
    """Ours, by which the very same package is found."""
    root = str(Path(longshore.__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": root if known is None else f"{root}{os.pathsep}{known}"}
