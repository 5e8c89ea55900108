"""A TCP proxy between a client and a Valkey or Redis server, which damages replies and requests on a plan.

    client ──command──► FaultyProxy ──command──► server
           ◄──reply────      │      ◄──reply────
                             └── plan(name of the command, its number) -> fault, or None

It understands single commands and their replies, so a fault hits what it is meant for. `fired` counts faults that have
happened: a test of faults must assert that there were some.
"""

from __future__ import annotations

import contextlib
import enum
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO


class WireFault(enum.Enum):
    """A fault of one command. Those of values need a reply with a value, and pass anything else on."""

    FLIP = "flip"  # one bit of a value, wherever it is; of a SET, one bit of what is stored
    TRUNCATE = "truncate"  # a shorter value, of the length that is declared
    OTHER = "other"  # the value of another key
    LENGTH = "length"  # another length than the value has
    HALF = "half"  # half of the reply, then the connection is closed
    EXTRA = "extra"  # a reply that nobody asked for, before the right one
    JUNK = "junk"  # something that is no reply
    ERROR = "error"  # an error reply; the server does not see the command
    FULL = "full"  # -OOM; the server does not see the command
    STALL = "stall"  # no reply
    SLOW = "slow"  # the reply at 1 KB/s


_OF_VALUES = frozenset({WireFault.FLIP, WireFault.TRUNCATE, WireFault.OTHER, WireFault.LENGTH})
_UNSEEN = {WireFault.ERROR: b"-ERR injected\r\n", WireFault.FULL: b"-OOM injected\r\n"}
_SLOW_PIECE, _SLOW_SECONDS = 64, 0.064

Plan = Callable[[bytes, int], WireFault | None]
"""The fault of the `number`th command (from 1) of this name, in upper case."""


class FaultyProxy:
    """Listens on 127.0.0.1, in threads, until `close`.

    Attributes:
        port: Where it listens.
        fired: How often each fault has happened.
    """

    def __init__(self, upstream: tuple[str, int], plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.fired: Counter[WireFault] = Counter()
        self._upstream = upstream
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._seen: Counter[bytes] = Counter()
        self._keys: list[bytes] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="faulty-proxy", daemon=True).start()

    def close(self) -> None:
        """Close all connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="faulty-proxy", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client, socket.create_connection(self._upstream) as server:
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open |= {client, server}
            try:
                with client.makefile("rb") as commands, server.makefile("rb") as replies:
                    while (words := _read_command(commands)) and self._pass_on(words, client, server, replies):
                        pass
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pass_on(self, words: list[bytes], client: socket.socket, server: socket.socket, replies: BinaryIO) -> bool:
        """One command and its reply; returns whether the connection goes on."""
        name = words[0].upper()
        with self._lock:
            self._seen[name] += 1
            fault = self.plan(name, self._seen[name])
            if name == b"SET" and words[1] not in self._keys:
                self._keys.append(words[1])
            others = [each for each in self._keys if each != words[-1]]
        if fault in _UNSEEN:
            self._fire(fault)
            client.sendall(_UNSEEN[fault])
            return True
        if fault is WireFault.FLIP and name == b"SET":
            self._fire(fault)
            words[2] = self._flipped(words[2])
        if fault is WireFault.OTHER and name == b"GET" and others:
            words[1] = self._chance.choice(others)
        server.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in words))
        reply = _read_reply(replies)
        has_value = reply.startswith(b"$") and not reply.startswith(b"$-1")
        if fault is None or (fault in _OF_VALUES and not (name == b"GET" and has_value)):
            client.sendall(reply)
            return True
        if fault is WireFault.OTHER and not others:
            client.sendall(reply)
            return True
        self._fire(fault)
        return self._damage(fault, reply, client)

    def _damage(self, fault: WireFault, reply: bytes, client: socket.socket) -> bool:
        line, _, rest = reply.partition(b"\r\n")
        value = rest[:-2]
        match fault:
            case WireFault.FLIP:
                reply = line + b"\r\n" + self._flipped(value) + b"\r\n"
            case WireFault.TRUNCATE:
                kept = self._chance.randrange(len(value))
                reply = b"$%d\r\n%b\r\n" % (kept, value[:kept])
            case WireFault.LENGTH:
                other = max(0, len(value) + self._chance.choice([-4096, -9, -1, 1, 9, 4096, 2**40]))
                reply = b"$%d\r\n%b\r\n" % (other, value)
            case WireFault.EXTRA:
                reply = self._chance.choice([b"+OK\r\n", b"$-1\r\n", b":4224\r\n", reply]) + reply
            case WireFault.JUNK:
                reply = self._chance.choice([b"HTTP/1.1 400\r\n", b"*-7\r\n", b"\0" * 4096, b"$12x\r\n", b"\r\n"])
            case WireFault.HALF:
                client.sendall(reply[: len(reply) // 2])
                return False
            case WireFault.STALL:
                while client.recv(1 << 16):
                    pass
                return False
            case WireFault.SLOW:
                for start in range(0, len(reply), _SLOW_PIECE):
                    client.sendall(reply[start : start + _SLOW_PIECE])
                    time.sleep(_SLOW_SECONDS)
                return True
        client.sendall(reply)
        return True

    def _flipped(self, value: bytes) -> bytes:
        changed = bytearray(value)
        with self._lock:
            changed[self._chance.randrange(len(changed))] ^= 1 << self._chance.randrange(8)
        return bytes(changed)

    def _fire(self, fault: WireFault) -> None:
        with self._lock:
            self.fired[fault] += 1


def _read_command(stream: BinaryIO) -> list[bytes]:
    """One command; empty at the end."""
    line = stream.readline()
    return [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))] if line else []


def _read_reply(stream: BinaryIO) -> bytes:
    """One status, error, number or value."""
    line = stream.readline()
    if line.startswith(b"$") and not line.startswith(b"$-1"):
        return line + stream.read(int(line[1:]) + 2)
    return line
