"""A TCP proxy between a client and a server of Valkey, Redis or S3, which damages replies and requests on a plan.

    client ──command──► FaultyProxy ──command──► server
           ◄──reply────      │      ◄──reply────
                             └── plan(name of the command, its number) -> fault, or None

It understands single commands and their replies, so a fault hits what it is meant for. `FaultyHttpProxy` does so for
HTTP, where methods are the commands. `fired` counts faults that have happened: a test of faults must assert that there
were some.
"""

from __future__ import annotations

import contextlib
import enum
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import BinaryIO, NamedTuple


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


class HttpFault(enum.Enum):
    """A refusal of S3: status, code. The server does not see the request."""

    DENIED = 403, "AccessDenied"
    SKEWED = 403, "RequestTimeTooSkewed"
    NO_BUCKET = 404, "NoSuchBucket"
    MISSING = 404, "NoSuchKey"
    THROTTLED = 429, "TooManyRequests"
    SLOW_DOWN = 503, "SlowDown"


ProxyFault = WireFault | HttpFault

_OF_VALUES = frozenset({WireFault.FLIP, WireFault.TRUNCATE, WireFault.OTHER, WireFault.LENGTH})
_SLOW_PIECE, _SLOW_SECONDS = 64, 0.064

Plan = Callable[[bytes, int], ProxyFault | None]
"""The fault of the `number`th command (from 1) of this name, in upper case."""


class WireRequest(NamedTuple):
    """A command: its name, the key that it is about, the value that it stores or `None`, and all of its bytes."""

    name: bytes
    key: bytes
    value: bytes | None
    raw: bytes


class WireReply(NamedTuple):
    """All bytes of a reply, and the value in it or `None`."""

    raw: bytes
    value: bytes | None


class FaultyProxy:
    """Listens on 127.0.0.1, in threads, until `close`.

    Attributes:
        port: Where it listens.
        fired: How often each fault has happened.
    """

    def __init__(self, upstream: tuple[str, int], plan: Plan, seed: int = 0) -> None:
        self.plan = plan
        self.fired: Counter[ProxyFault] = Counter()
        self._upstream = upstream
        self._chance = random.Random(seed)  # noqa: S311 - no secret
        self._seen: Counter[bytes] = Counter()
        self._values: dict[bytes, bytes] = {}
        """What was stored, by key."""
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
                    while (request := self._read_request(commands)) and self._pass_on(request, client, server, replies):
                        pass
            finally:
                with self._lock:
                    self._open -= {client, server}

    def _pass_on(self, request: WireRequest, client: socket.socket, server: socket.socket, replies: BinaryIO) -> bool:
        """One command and its reply; returns whether the connection goes on."""
        with self._lock:
            self._seen[request.name] += 1
            fault = self.plan(request.name, self._seen[request.name])
            others = [value for key, value in self._values.items() if key != request.key]
            if request.value is not None:
                self._values[request.key] = request.value
        if fault is not None and (refused := self._refused(fault, request)):
            self._fire(fault)
            client.sendall(refused)
            return True
        if fault is WireFault.FLIP and request.value:
            self._fire(fault)
            request = request._replace(raw=request.raw.replace(request.value, self._flipped(request.value)))
        server.sendall(request.raw)
        reply = self._read_reply(replies, request)
        harmless = fault in _OF_VALUES and reply.value is None
        if not isinstance(fault, WireFault) or harmless or (fault is WireFault.OTHER and not others):
            client.sendall(reply.raw)
            return True
        self._fire(fault)
        return self._damage(fault, reply, others, client)

    def _damage(self, fault: WireFault, reply: WireReply, others: list[bytes], client: socket.socket) -> bool:
        raw, value = reply.raw, reply.value or b""
        match fault:
            case WireFault.FLIP:
                raw = self._framed(reply, self._flipped(value))
            case WireFault.OTHER:
                raw = self._framed(reply, self._chance.choice(others))
            case WireFault.TRUNCATE:
                raw = self._framed(reply, value[: self._chance.randrange(len(value))])
            case WireFault.LENGTH:
                other = max(0, len(value) + self._chance.choice([-4096, -9, -1, 1, 9, 4096, 2**40]))
                raw = self._framed(reply, value, other)
            case WireFault.EXTRA:
                raw = self._chance.choice([*self._extras, raw]) + raw
            case WireFault.JUNK:
                raw = self._chance.choice(self._junk)
            case WireFault.HALF:
                client.sendall(raw[: len(raw) // 2])
                return False
            case WireFault.STALL:
                while client.recv(1 << 16):
                    pass
                return False
            case WireFault.SLOW:
                for start in range(0, len(raw), _SLOW_PIECE):
                    client.sendall(raw[start : start + _SLOW_PIECE])
                    time.sleep(_SLOW_SECONDS)
                return True
        client.sendall(raw)
        return True

    def _flipped(self, value: bytes) -> bytes:
        changed = bytearray(value)
        with self._lock:
            changed[self._chance.randrange(len(changed))] ^= 1 << self._chance.randrange(8)
        return bytes(changed)

    def _fire(self, fault: ProxyFault) -> None:
        with self._lock:
            self.fired[fault] += 1

    # ------------------------------------------------------------------ RESP

    _extras: tuple[bytes, ...] = (b"+OK\r\n", b"$-1\r\n", b":4224\r\n")
    _junk: tuple[bytes, ...] = (b"HTTP/1.1 400\r\n", b"*-7\r\n", b"\0" * 4096, b"$12x\r\n", b"\r\n")

    def _refused(self, fault: ProxyFault, request: WireRequest) -> bytes:
        """The reply to a command that the server does not see; empty: it sees it."""
        refusals: Mapping[ProxyFault, bytes] = {
            WireFault.ERROR: b"-ERR injected\r\n",
            WireFault.FULL: b"-OOM injected\r\n",
        }
        return refusals.get(fault, b"")

    def _read_request(self, stream: BinaryIO) -> WireRequest | None:
        """One command; `None` at the end."""
        if not (line := stream.readline()):
            return None
        words = [stream.read(int(stream.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
        raw = line + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in words)
        name = words[0].upper()
        return WireRequest(name, words[1] if len(words) > 1 else b"", words[2] if name == b"SET" else None, raw)

    def _read_reply(self, stream: BinaryIO, request: WireRequest) -> WireReply:
        """One status, error, number or value, or several."""
        line = stream.readline()
        if line.startswith(b"*"):
            return WireReply(line + b"".join(self._read_reply(stream, request).raw for _ in range(int(line[1:]))), None)
        if not line.startswith(b"$") or line.startswith(b"$-1"):
            return WireReply(line, None)
        value = stream.read(int(line[1:]) + 2)
        return WireReply(line + value, value[:-2] if request.name == b"GET" else None)

    def _framed(self, reply: WireReply, value: bytes, length: int | None = None) -> bytes:
        """`value` as a reply, which says that it has another `length`."""
        return b"$%d\r\n%b\r\n" % (len(value) if length is None else length, value)


class FaultyHttpProxy(FaultyProxy):
    """The same between a client and a server of S3. `HttpFault`s are refusals that only S3 has."""

    _extras = (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    _junk = (b"+OK\r\n", b"HTTP/1.1 2OO\r\n\r\n", b"\0" * 4096, b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n")

    def _refused(self, fault: ProxyFault, request: WireRequest) -> bytes:
        refusals = {WireFault.ERROR: (500, "InternalError"), WireFault.FULL: (507, "XMinioStorageFull")}
        number, code = fault.value if isinstance(fault, HttpFault) else refusals.get(fault, (0, ""))
        if not number:
            return b""
        text = (
            b""
            if request.name == b"HEAD"
            else f"<Error><Code>{code}</Code><AWSAccessKeyId>AK</AWSAccessKeyId></Error>".encode()
        )
        return b"HTTP/1.1 %d Injected\r\nContent-Length: %d\r\n\r\n%b" % (number, len(text), text)

    def _read_request(self, stream: BinaryIO) -> WireRequest | None:
        head, body = _read_http(stream)
        if not head:
            return None
        name, path, _ = head.split(b" ", 2)
        return WireRequest(name, path, body if name == b"PUT" else None, head + body)

    def _read_reply(self, stream: BinaryIO, request: WireRequest) -> WireReply:
        head, body = _read_http(stream, has_body=request.name != b"HEAD")
        has_value = request.name == b"GET" and head.split(b" ", 2)[1] == b"200"
        return WireReply(head + body, body if has_value else None)

    def _framed(self, reply: WireReply, value: bytes, length: int | None = None) -> bytes:
        head = reply.raw.partition(b"\r\n\r\n")[0]
        said = b"Content-Length: %d" % (len(value) if length is None else length)
        return _LENGTH.sub(said, head) + b"\r\n\r\n" + value


_LENGTH = re.compile(rb"(?i)content-length: *(\d+)")


def _read_http(stream: BinaryIO, *, has_body: bool = True) -> tuple[bytes, bytes]:
    """The head and the body of one message; both empty at the end. Bodies must say how long they are."""
    lines = []
    while (line := stream.readline()) and line != b"\r\n":
        lines.append(line)
    if not line:
        return b"", b""
    head = b"".join(lines) + line
    length = _LENGTH.search(head)
    return head, stream.read(int(length[1])) if length and has_body else b""
