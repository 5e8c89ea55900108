"""A client of Valkey and Redis: our own RESP on a blocking socket, for values of hundreds of kilobytes.

    GET     ◄── "$262272\\r\\n" and the header, into a small buffer, and the image, into the arena, in one call
    SET     ──► command and header, image, end: `sendmsg`, straight from the arena
    STRLEN  ──► hundreds of commands at once: existence and length, in one round trip

A connection on which a deadline passed, a reply broke off, or something came that is no reply, is closed. It is never
read on: the next reply might be that of another request.

Bytes under way are bounded by connection: with 64 values of 2 MiB requested at once, a server answers ten times slower
than one by one.

`stream.py` keeps the deadline of each call; `breaker.py`, which the tiers use, ends requests to a server that fails.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from longshore.boundary import Status
from longshore.errors import TierError
from longshore.tiers.remote.format import HEADER_BYTES, pack_header, verify
from longshore.tiers.remote.settings import Certificates, RemoteSettings
from longshore.tiers.remote.stream import (
    Clock,
    Deadline,
    PlainStream,
    Stream,
    TlsStream,
    parts_behind,
    time_left,
    typed_error,
)
from longshore.tiers.remote.work import Image, Refusal, RemoteError, WorkQueue

PROBE_BATCH = 1024
"""Keys whose length is asked for in one round trip: their replies fit the buffers of a socket."""

STORE_BATCH = 64
"""Images whose existence is asked for before they are sent."""

_PIECE = 256 << 10
"""Bytes that are received before their checksum is computed."""

_BUFFER = 4096
_LONGEST_LINE = 1024
_END = b"\r\n"
_ABSENT = -1
ELSEWHERE = -1
"""The length of a value that another node of a cluster has."""

COMING = -1
"""What a peer answers as the length of a value that it is computing or storing; ask again."""

_ELSEWHERE = (b"MOVED ", b"ASK ", b"CLUSTERDOWN Hash slot")
_GET = b"%b*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n"
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
_ERROR_CODE = re.compile(rb"[A-Z0-9]{1,32}(?![^ ])")
_LONGEST_REPLY, _MOST_PARTS = 1 << 20, 1 << 16
Reply = bytes | int | list["Reply"] | None
"""What a server answers: text, a number, several, or nothing."""

Redirected = Callable[[bytes, bytes], None]
"""Called with an address, and the error of a node that does not have its value; `COMING` of a peer that will."""


class RespSession:
    """One connection, used by one thread. Every method raises `RemoteError`; after that, only `close` is left."""

    def __init__(
        self,
        settings: RemoteSettings,
        stream: Stream,
        clock: Clock,
        largest: int,
        redirected: Redirected | None = None,
        asking: bytes = b"",
    ) -> None:
        """`largest` is the length of the largest image in bytes; the rest as for `RespClient.at`."""
        self._redirected = redirected
        self._asking = asking
        self._stream = stream
        self._clock = clock
        self._in_flight = settings.in_flight
        self._largest = HEADER_BYTES + largest
        self._expiry = _expiry(settings.ttl)
        self._bytes = bytearray(_BUFFER)
        self._buffer = memoryview(self._bytes)
        self._begin = self._end = 0
        self._expected, self._line, self._head = -1, b"", memoryview(b"")
        """Of the value received last: its bytes, the line before it, and room for that line and a header."""
        self._tail = memoryview(bytearray(len(_END)))

    # ------------------------------------------------------------------ requests

    def authenticate(self, settings: RemoteSettings, deadline: Deadline) -> None:
        """Log in, and choose the database."""
        user, password = settings.credentials()
        commands: list[tuple[bytes, ...]] = []
        if password:
            commands.append((b"AUTH", *([user.encode()] if user else []), password.encode()))
        if settings.db:
            commands.append((b"SELECT", b"%d" % settings.db))
        self._send(b"".join(_command(*words) for words in commands), deadline)
        for name, *_ in commands:
            if (error := self._read_simple(deadline)) is not None:
                raise RemoteError("refused", f"the server answered {_error_word(error)} to {name.decode()}")

    def check(self, deadline: Deadline) -> None:
        """Ask the server what probes ask. One that cannot write to its disk serves reads, and refuses PING."""
        self.lengths([b"ls1/"], deadline)

    def call(self, *words: bytes, deadline: Deadline) -> Reply:
        """Any command whose reply is small, and its reply. Raises `RemoteError` where the server answers an error."""
        self._send(_command(*words), deadline)
        return self._read_reply(deadline)

    def lengths(self, addresses: Sequence[bytes], deadline: Deadline) -> list[int]:
        """The length of each value in bytes; 0 for one that is not there, `ELSEWHERE` for one of another node."""
        found = []
        for start in range(0, len(addresses), PROBE_BATCH):
            some, first = addresses[start : start + PROBE_BATCH], self._asking
            requests = [b"%b*2\r\n$6\r\nSTRLEN\r\n$%d\r\n%b\r\n" % (first, len(each), each) for each in some]
            self._send(b"".join(requests), deadline)
            found += [self._read_length(each, deadline) for each in some]
        return found

    def fetch(self, work: WorkQueue) -> None:
        """Fetch images until none waits."""
        asked: deque[Image] = deque()
        coming = rest = 0  # bytes requested and not received: of all images, of the first

        def received(count: int) -> Deadline:
            """Request what there is room for, before the last bytes of the value before it have come."""
            nonlocal coming, rest
            coming, rest = coming - count, rest - count
            images = []
            if coming <= self._in_flight // 2:  # several small images with one system call
                images = work.take_some(self._in_flight - coming)
                coming += sum([len(image.memory) for image in images])
                asked.extend(images)
            soonest = _soonest(asked)
            if images:
                asking = self._asking
                requests = [_GET % (asking, len(image.address), image.address) for image in images]
                self._send(b"".join(requests), soonest)
            return soonest

        deadline = received(0)
        while asked:
            rest = len(asked[0].memory)
            status = self._read_value(asked[0], deadline, received)
            work.end(asked.popleft(), status)
            deadline = received(rest)

    def store(self, work: WorkQueue, is_bad: Callable[[bytes], bool], refusal: Refusal) -> None:
        """Store images until none waits; those that are there are not sent again, unless known to be bad."""
        while batch := _some(work):
            for image in batch:
                work.defer(image)
            there = self.lengths([image.address for image in batch], min(image.deadline for image in batch))
            sent: deque[Image] = deque()
            under_way = 0
            for image, length in zip(batch, there, strict=True):
                value_bytes = HEADER_BYTES + len(image.memory)
                if length == value_bytes and not is_bad(image.address):
                    work.end(image, Status.OK)
                elif length == ELSEWHERE:
                    work.end(image, Status.NOT_FOUND)
                elif not work.hold(image):
                    work.end(image, Status.DEADLINE)
                elif (refused := refusal(value_bytes)) is not None:
                    work.end(image, refused)
                else:
                    header = pack_header(image.identity, image.memory)  # while the server is busy with those before
                    work.defer(image)
                    while under_way >= self._in_flight:
                        under_way -= HEADER_BYTES + len(sent[0].memory)
                        self._stored(sent, work)
                    if not work.hold(image):
                        work.end(image, Status.DEADLINE)
                        continue
                    self._set(image, header, min(image.deadline, _soonest(sent)))
                    sent.append(image)
                    under_way += value_bytes
            while sent:
                self._stored(sent, work)

    def is_stale(self) -> bool:
        """Whether the server has closed an idle connection, or sent what nobody asked for."""
        poll = select.poll()
        poll.register(self._stream.fileno(), select.POLLIN)
        return self._begin < self._end or bool(poll.poll(0))

    def shut_down(self) -> None:
        """Shut the connection down, from any thread: a call that is blocked on it fails."""
        self._stream.shut_down()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    # ------------------------------------------------------------------ replies

    def _set(self, image: Image, header: bytes, deadline: Deadline) -> None:
        name = b"%b*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (
            self._asking,
            5 if self._expiry else 3,
            len(image.address),
            image.address,
            HEADER_BYTES + len(image.memory),
        )
        parts = [memoryview(name + header), image.memory, memoryview(_END + self._expiry)]
        self._stream.send(parts, deadline)

    def _stored(self, sent: deque[Image], work: WorkQueue) -> None:
        deadline = _soonest(sent)
        self._read_asking(deadline)
        error = self._read_simple(deadline)
        image = sent.popleft()
        if error is None:
            work.end(image, Status.OK)
        elif self._is_elsewhere(image.address, b"-" + error):
            work.end(image, Status.NOT_FOUND)
        elif error.startswith(b"OOM"):
            work.end(image, Status.NO_SPACE)
        else:
            work.end(image, Status.IO_ERROR)
            raise _refusal(error)

    def _read_value(self, image: Image, deadline: Deadline, received: Callable[[int], Deadline]) -> Status:
        """Receive a value into the image's memory. Checksums are computed of pieces that are still in the cache."""
        pieces = [image.memory]
        if len(image.memory) > _PIECE:
            pieces = [image.memory[start : start + _PIECE] for start in range(0, len(image.memory), _PIECE)]
        left = [*pieces, self._tail] if len(pieces) == 1 else pieces[:1]
        header = self._receive_value(image.address, HEADER_BYTES + len(image.memory), left, deadline)
        if isinstance(header, Status):
            return header
        checksum, last = xxhash.xxh3_64(), len(pieces) - 1
        for index, piece in enumerate(pieces):
            if index:
                left = [piece, self._tail] if index == last else [piece]
            if left:
                self._fill(left, deadline)
            if index < last:
                deadline = received(len(piece))
            checksum.update(piece)
        self._check_tail()
        return verify(header, checksum.intdigest(), image.identity)

    def _receive_value(
        self, address: bytes, expected: int, left: list[memoryview], deadline: Deadline
    ) -> bytes | Status:
        """Receive the beginning of a value of `expected` bytes; its header, or how the read ends.

        What comes with it goes straight into `left`, and what of that is to come is left there. If what comes is no
        such value, it is in the small buffer afterwards.
        """
        if expected != self._expected:
            self._expected, self._line = expected, b"$%d\r\n" % expected
            self._head = memoryview(bytearray(len(self._line) + HEADER_BYTES))
        if self._asking:
            self._read_asking(deadline)
        if self._begin == self._end:
            parts = [self._head, *left]
            count = self._stream.receive_some(parts, deadline)
            head = bytes(self._head)
            if count >= len(head) and head.startswith(self._line):
                left[:] = parts_behind(parts, count)
                return head[len(self._line) :]
            self._unread(b"".join(parts)[:count])
        if (line := self._read_line(deadline)).startswith(b"-WRONGTYPE"):
            return Status.MISMATCH
        if self._is_elsewhere(address, line):
            return Status.NOT_FOUND
        length = _number(line, b"$")
        if length == _ABSENT:
            return Status.NOT_FOUND
        if length > self._largest:
            raise _broken(f"a value of {length} bytes, the largest image has {self._largest - HEADER_BYTES}")
        if length != expected:
            self._fill([memoryview(bytearray(length)), self._tail], deadline)
            self._check_tail()
            return Status.SHORT if length < expected else Status.MISMATCH
        return self._read_exactly(HEADER_BYTES, deadline)

    def _check_tail(self) -> None:
        if self._tail != _END:
            raise _broken("a value without its end")

    def _read_length(self, address: bytes, deadline: Deadline) -> int:
        self._read_asking(deadline)
        line = self._read_line(deadline)
        if self._is_elsewhere(address, line):
            return ELSEWHERE
        length = 0 if line.startswith(b"-WRONGTYPE") else _number(line, b":")
        if length == COMING and self._redirected is not None:
            self._redirected(address, b"COMING")
        return max(0, length)

    def _is_elsewhere(self, address: bytes, line: bytes) -> bool:
        """Whether a node answers that another one has a value, or none; who it is has been told on then."""
        if line[:1] != b"-" or self._redirected is None or not line.startswith(_ELSEWHERE, 1):
            return False
        self._redirected(address, line[1:])
        return True

    def _read_asking(self, deadline: Deadline) -> None:
        """Receive the reply to the command before a command, if there is one."""
        if self._asking and (error := self._read_simple(deadline)) is not None:
            raise _refusal(error)

    def _read_simple(self, deadline: Deadline) -> bytes | None:
        """Receive a simple reply: `None`, or the error."""
        line = self._read_line(deadline)
        if line[:1] == b"+":
            return None
        if line[:1] == b"-":
            return line[1:]
        raise _broken(f"expected a status, got {line[:1]!r}")

    def _read_reply(self, deadline: Deadline, depth: int = 4) -> Reply:
        line = self._read_line(deadline)
        if line[:1] == b"+":
            return line[1:]
        if line[:1] == b"*" and depth:
            return [self._read_reply(deadline, depth - 1) for _ in range(min(_number(line, b"*"), _MOST_PARTS))]
        if line[:1] != b"$":
            return _number(line, b":")
        if (length := _number(line, b"$")) == _ABSENT:
            return None
        if length > _LONGEST_REPLY:
            raise _broken(f"a reply of {length} bytes")
        value = bytearray(length)
        self._fill([memoryview(value), self._tail], deadline)
        self._check_tail()
        return bytes(value)

    def _read_line(self, deadline: Deadline) -> bytes:
        """Receive one line, without its end."""
        while (at := self._bytes.find(_END, self._begin, self._end)) < 0:
            if self._end - self._begin > _LONGEST_LINE:
                raise _broken("a line without an end")
            self._read_more(deadline)
        line = bytes(self._bytes[self._begin : at])
        self._begin = at + len(_END)
        return line

    def _read_exactly(self, count: int, deadline: Deadline) -> bytes:
        while self._end - self._begin < count:
            self._read_more(deadline)
        found = bytes(self._buffer[self._begin : self._begin + count])
        self._begin += count
        return found

    def _read_more(self, deadline: Deadline) -> None:
        """Receive into the small buffer, no more than a line and a header: what is more belongs into the arena."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin > _BUFFER // 2:
            left = self._end - self._begin
            self._buffer[:left] = bytes(self._buffer[self._begin : self._end])
            self._begin, self._end = 0, left
        room = self._buffer[self._end : self._end + self._at_once]
        self._end += self._stream.receive_some([room], deadline)

    def _unread(self, data: bytes) -> None:
        """Let the small buffer, which is empty, hold `data`, however long it is."""
        self._bytes = bytearray(data.ljust(_BUFFER))
        self._buffer = memoryview(self._bytes)
        self._begin, self._end = 0, len(data)

    def _fill(self, parts: list[memoryview], deadline: Deadline) -> None:
        """Fill `parts` with what is in the small buffer, then from the socket."""
        if self._begin == self._end:
            self._stream.receive(parts, deadline)
            return
        left = []
        for part in parts:
            count = min(len(part), self._end - self._begin)
            part[:count] = self._buffer[self._begin : self._begin + count]
            self._begin += count
            if count < len(part):
                left.append(part[count:])
        self._stream.receive(left, deadline)

    _at_once = HEADER_BYTES + 16

    def _send(self, request: bytes, deadline: Deadline) -> None:
        if request:
            self._stream.send([memoryview(request)], deadline)


class RespClient:
    """A Valkey or Redis server."""

    threads = 1
    """Connections for each direction. One thread fills a link of 25 Gbit/s."""

    def __init__(self, settings: RemoteSettings, clock: Clock, largest: int) -> None:
        """Raises `TierError` if certificates cannot be read, unless that hangs. Nothing is connected yet."""
        self._settings = settings
        self._clock = clock
        self._largest = largest
        self._certificates = Certificates(settings) if settings.tls else None
        self._redirected: Redirected | None = None
        self._asking = b""

    def at(self, settings: RemoteSettings, redirected: Redirected, *, asking: bool = False) -> RespClient:
        """The same for one node of a cluster; `redirected` is called with addresses whose values are elsewhere.

        `asking` is for a node that a slot moves to: it serves what has come there already, if asked to.
        """
        node = copy.copy(self)
        node._settings, node._redirected, node._asking = settings, redirected, _ASKING if asking else b""
        return node

    def connect(self) -> RespSession:
        """A connection, logged in. Raises `RemoteError`."""
        deadline = self._clock() + self._settings.connect_timeout
        stream = self._open(deadline)
        with contextlib.ExitStack() as undo:
            undo.callback(stream.close)
            session = RespSession(self._settings, stream, self._clock, self._largest, self._redirected, self._asking)
            try:
                session.authenticate(self._settings, deadline)
            except TierError as error:
                raise RemoteError("refused", str(error)) from None
            undo.pop_all()
        return session

    def _open(self, deadline: Deadline) -> Stream:
        try:
            return self._open_unix() if self._settings.scheme == "unix" else self._open_tcp(deadline)
        except OSError as error:
            raise typed_error(error, "connect") from None

    def _open_unix(self) -> Stream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _closed_on_error(sock):
            sock.settimeout(self._settings.connect_timeout)
            sock.connect(self._settings.path)
            return PlainStream(sock, self._clock)

    def _open_tcp(self, deadline: Deadline) -> Stream:
        settings = self._settings
        try:
            sock = socket.create_connection((settings.host, settings.port), timeout=settings.connect_timeout)
        except UnicodeError:
            raise OSError(f"{settings.host!r} is not the name of a host") from None
        with _closed_on_error(sock):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._certificates is None:
                return PlainStream(sock, self._clock)
            context = self._context(self._certificates, time_left(deadline, self._clock))
            sock.settimeout(time_left(deadline, self._clock))
            name = settings.server_name or settings.host
            return TlsStream(context.wrap_socket(sock, server_hostname=name), self._clock)

    @staticmethod
    def _context(certificates: Certificates, seconds: float) -> ssl.SSLContext:
        try:
            context = certificates.context(seconds)
        except TierError as error:
            raise RemoteError("refused", str(error)) from None
        if context is None:
            raise RemoteError(
                "timeout", "the certificates could not be read in time: their file system does not answer"
            )
        return context


def _some(work: WorkQueue) -> list[Image]:
    """The next images of a queue, as many as are asked about together."""
    batch: list[Image] = []
    while len(batch) < STORE_BATCH and (image := work.take()) is not None:
        batch.append(image)
    return batch


def _soonest(images: Iterable[Image]) -> Deadline:
    soonest = math.inf
    for image in images:  # `min` with a generator takes much longer, and this happens for each value
        soonest = image.deadline if image.deadline < soonest else soonest
    return soonest


def _expiry(ttl: float) -> bytes:
    """The end of a SET command that lets the value expire; empty without expiry."""
    if not ttl:
        return b""
    millis = b"%d" % max(1, round(ttl * 1000))
    return b"$2\r\nPX\r\n$%d\r\n%b\r\n" % (len(millis), millis)


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


def _number(line: bytes, kind: bytes) -> int:
    if line[:1] == b"-":
        raise _refusal(line[1:])
    digits = line[1:]
    if line[:1] != kind or not (digits == b"-1" or (digits.isdigit() and len(digits) <= 18)):
        raise _broken(f"expected {kind.decode()} and a number, got {line[:24]!r}")
    return int(digits)


def _refusal(error: bytes) -> RemoteError:
    return RemoteError("refused", f"the server answered {_error_word(error)}", Status.IO_ERROR)


def _error_word(error: bytes) -> str:
    """The code that begins a server's error, for logs. The rest is not repeated: it may quote what was sent."""
    code = _ERROR_CODE.match(error)
    return code[0].decode() if code else "an error"


def _broken(what: str) -> RemoteError:
    return RemoteError("broken", f"invalid reply: {what}", Status.IO_ERROR)


@contextlib.contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise
