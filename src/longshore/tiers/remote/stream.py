"""Connected sockets whose calls end by a deadline: plain ones, and TLS.

The kernel keeps the deadline of each receive (`SO_RCVTIMEO`): it bounds the whole call, so a server that sends a byte
at a time gains no time by it. `SO_SNDTIMEO` does not bound a send over a unix socket, where it holds for each buffer
that the kernel allocates; so sends do not block, and poll until the socket has room.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
from collections.abc import Callable

from longshore.boundary import Status
from longshore.tiers.remote.work import RemoteError

_LIMIT_SECONDS = 0.005
"""A deadline is kept to within so many seconds, so that not every call needs another one to set it."""

_TIME = struct.Struct("@ll")
Deadline = float
Clock = Callable[[], float]


class PlainStream:
    """A connected TCP or unix socket, whose calls end by a deadline."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        sock.setblocking(True)  # the kernel has the deadline: with a timeout of Python's, MSG_WAITALL would not wait
        self._sock = sock
        self._clock = clock
        self._limit_set = -1.0
        """Seconds that the kernel has been told as the limit of a receive."""
        self._room = select.poll()
        self._room.register(sock, select.POLLOUT)

    def receive_some(self, parts: list[memoryview], deadline: Deadline, flags: int = 0) -> int:
        """Receive what has come, at least one byte, into `parts`, one after the other; how many."""
        self._limit(deadline)
        try:
            return _came(self._sock.recvmsg_into(parts, 0, flags)[0])
        except OSError as error:
            raise typed_error(error) from None

    def receive(self, parts: list[memoryview], deadline: Deadline) -> None:
        """Fill `parts`, one after the other."""
        while parts:
            parts = parts_behind(parts, self.receive_some(parts, deadline, socket.MSG_WAITALL))

    def send(self, parts: list[memoryview], deadline: Deadline) -> None:
        """Send `parts`, one after the other."""
        while parts:
            left = time_left(deadline, self._clock)
            try:
                if len(parts) == 1:
                    count = self._sock.send(parts[0], socket.MSG_DONTWAIT)  # a request: quicker than `sendmsg`
                else:
                    count = self._sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
                parts = parts_behind(parts, count)
            except BlockingIOError:
                self._room.poll(math.ceil(left * 1000))
            except OSError as error:
                raise typed_error(error) from None

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._sock.fileno()

    def shut_down(self) -> None:
        """Shut the connection down, from any thread: a call that is blocked on it fails."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def _limit(self, deadline: Deadline) -> None:
        left = time_left(deadline, self._clock)
        if left <= self._limit_set <= left + _LIMIT_SECONDS:
            return
        self._limit_set = left
        micros = int(left * 1e6) or 1  # 0 would be no limit
        self._sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIME.pack(micros // 1_000_000, micros % 1_000_000)
        )


class TlsStream:
    """The same over TLS, whose records are of at most 16 KiB."""

    def __init__(self, sock: ssl.SSLSocket, clock: Clock) -> None:
        self._sock = sock
        self._clock = clock

    def receive_some(self, parts: list[memoryview], deadline: Deadline) -> int:
        """Receive what has come, at least one byte, into the first of `parts`; how many."""
        self._sock.settimeout(time_left(deadline, self._clock))
        try:
            return _came(self._sock.recv_into(parts[0]))
        except OSError as error:
            raise typed_error(error) from None

    def receive(self, parts: list[memoryview], deadline: Deadline) -> None:
        """Fill `parts`, one after the other."""
        while parts:
            parts = parts_behind(parts, self.receive_some(parts, deadline))

    def send(self, parts: list[memoryview], deadline: Deadline) -> None:
        """Send `parts`, one after the other."""
        for part in parts:
            left = part
            while left:
                self._sock.settimeout(time_left(deadline, self._clock))
                try:
                    left = left[self._sock.send(left) :]
                except OSError as error:
                    raise typed_error(error) from None

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._sock.fileno()

    def shut_down(self) -> None:
        """Shut the connection down, from any thread: a call that is blocked on it fails."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)  # `SSLSocket.shutdown` would end encryption

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


Stream = PlainStream | TlsStream


def time_left(deadline: Deadline, clock: Clock) -> float:
    """Seconds until `deadline`; raises `RemoteError` when it has passed."""
    left = deadline - clock()
    if left <= 0:
        raise RemoteError("timeout", "no answer in time", Status.DEADLINE)
    return min(left, 3600.0)


def _came(count: int) -> int:
    if not count:
        raise RemoteError("connection", "the server closed the connection")
    return count


def parts_behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left of `parts` after their first `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []


def typed_error(error: OSError, doing: str = "move bytes") -> RemoteError:
    """The error of a socket as a `RemoteError`."""
    if isinstance(error, TimeoutError | BlockingIOError | ssl.SSLWantReadError | ssl.SSLWantWriteError):
        return RemoteError("timeout", f"could not {doing} in time", Status.DEADLINE)
    if isinstance(error, ssl.SSLError):
        return RemoteError("refused" if doing == "connect" else "connection", f"TLS: {error.reason}")
    return RemoteError("connection", f"could not {doing}: {error.strerror or error}")
