"""`PeerServer`: other replicas read what the tiers of this one have, by the protocol that their Valkey client speaks.

    STRLEN  ──► the length of a value; 0, not there; -1, on its way: ask again
    GET     ──► header, and the image straight from host memory, whose slot is not written meanwhile
    AUTH    ──► before anything else, if there is a password; PING and SELECT 0 are answered, all else is an error

Each connection has a thread, and a deadline: to log in, to send the next command, to take an answer. The thread that
accepts connections shuts down those that are late, which wakes their threads, so that none keeps a slot. Values have
the header of every remote store, and the namespace is a part of their address: a replica with other weights finds
nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress

from longshore.boundary import Key
from longshore.cache import GroupKeys, Lease, PrefetchPolicy, Presence, Protection, Residency, TieredCache
from longshore.errors import ConfigError, LongshoreError, TierError, log_seldom
from longshore.runtime.loop import Runtime
from longshore.tiers.host import HostSlabs
from longshore.tiers.remote.format import HEADER_BYTES, Identity, pack_header
from longshore.tiers.remote.resp import COMING
from longshore.tiers.remote.settings import Certificates, RemoteSettings, parse_url
from longshore.tiers.remote.stream import parts_behind

_log = logging.getLogger(__name__)

LOGIN = 5.0
"""Seconds within which a client must have ended the TLS handshake, and given the password if there is one."""
IDLE = 600.0
"""Seconds after which a client that sends nothing is dropped."""
SENDING = 10.0
"""Seconds within which a client must have taken an answer."""
READING = 2.0
"""Seconds for which a GET waits until a chunk has been read from files."""
MOST_CLIENTS = 64
_LATE_SECONDS = 1.0
_AT_ONCE = 8 << 20
"""Bytes of images that are held together for one client; one image may be larger."""
_PARTS = 512
"""Pieces of memory that one system call sends, at most: each value is three of them."""
_SEND_BYTES = 256 << 10
"""Bytes of images after which what is ready is sent: the client receives while the next checksums are computed."""
_THERE = (Presence.HOST, Presence.COLDER)
_WORDS, _WORD_BYTES, _LINE_BYTES = 4, 512, 16
_ADDRESS = re.compile(rb"ls1/([0-9a-f]{64})/([0-9a-f]{64})")
_COMMAND = re.compile(
    rb"\*2\r\n\$(?=3\r\nGET\r|6\r\nSTRLEN\r)[36]\r\n(GET|STRLEN)\r\n\$133\r\n(ls1/[0-9a-f]{64}/[0-9a-f]{64})\r\n"
)
"""What clients of ours send, again and again; `PeerClient._next` reads any other command."""
_END = b"\r\n"


class TierSource:
    """What the tiers of one engine have: chunks of one KV cache group, in host memory or in files."""

    def __init__(
        self,
        runtime: Runtime,
        host: HostSlabs,
        namespace: Callable[[], bytes],
        is_coming: Callable[[Key], bool] = lambda key: False,
    ) -> None:
        """`namespace` is the present one; `is_coming` says of a chunk that no tier has whether one will have it soon.

        Both are called within a batch of the runtime; resets change the namespace within one, too.
        """
        self._runtime = runtime
        self._host = host
        self._namespace = namespace
        self._is_coming = is_coming
        self._bytes = host.slabs.image_bytes[0]
        self.at_once = max(1, min(_AT_ONCE // self._bytes, _PARTS // 3))
        """Values that are leased together, at most."""
        self._request_number: int | None = None
        """Of all reads for peers: they are no requests of this engine."""

    def lengths(self, addresses: Sequence[bytes]) -> list[int]:
        """The length of each value; 0 for one that is not there, `COMING` for one that will be."""
        with self._runtime.batch() as cache:
            namespace = self._namespace()
            keys = [self._key(each, namespace) for each in addresses]
            known = [key for key in keys if key is not None]
            where = dict(zip(known, self._seen(cache, known).presences, strict=True))
            return [0 if key is None else self._length(key, where[key]) for key in keys]

    @contextlib.contextmanager
    def leased(self, addresses: Sequence[bytes]) -> Iterator[Iterable[tuple[bytes, memoryview] | None]]:
        """Header and image of each value, whose slots are not written meanwhile; `None` for one that is not there.

        A checksum is computed when its value is taken: the image is in the core's cache when it is sent.
        """
        with contextlib.ExitStack() as undo:
            slots = self._lease(addresses, undo)
            yield (self._value(*slots[each]) if each in slots else None for each in addresses)

    def _release(self, what: int | Lease) -> None:
        with self._runtime.batch() as cache:
            cache.release(what)

    def _value(self, slot: int, identity: Identity) -> tuple[bytes, memoryview]:
        image = self._host.arena.view(self._host.slabs.offset(0, slot), self._bytes)
        return pack_header(identity, image), image

    def _lease(self, addresses: Sequence[bytes], undo: contextlib.ExitStack) -> dict[bytes, tuple[int, Identity]]:
        """Slots of host memory with what is in each, by address; not written until `undo` releases them.

        What only files have is read into host memory first, for at most `READING` seconds.
        """
        was_read = False
        while True:
            with contextlib.ExitStack() as reading:
                with self._runtime.batch() as cache:  # may raise at its end; between two, weights may change
                    namespace = self._namespace()
                    names = {key: each for each in addresses if (key := self._key(each, namespace)) is not None}
                    seen = self._seen(cache, list(names))
                    if was_read or Presence.COLDER not in seen.presences:
                        is_ready = [each is Presence.HOST for each in seen.presences]
                        ready = list(compress(names, is_ready))
                        if not ready:
                            return {}
                        (part,) = cache.load({0: GroupKeys(seen if all(is_ready) else ready)}, count=False).jobs
                        undo.callback(self._release, part.job)
                        slots = zip(ready, part.slots.of.indices, strict=True)
                        return {names[key]: (at, Identity(namespace, key, self._bytes)) for key, at in slots}
                    there = [key for key, each in zip(names, seen.presences, strict=True) if each in _THERE]
                    path, now = {0: GroupKeys(there)}, self._runtime.clock()
                    found = cache.lookup(path, now, independent=True, count=False, request_number=self._request_number)
                    self._request_number, was_read = found.request_number, True
                    if (lease := found.lease) is not None:
                        reading.callback(self._release, lease)
                        cache.prefetch(lease, now, policy=PrefetchPolicy.TIMEOUT, timeout=READING)
                if lease is not None:
                    self._runtime.wait_load(lease, READING)

    @staticmethod
    def _key(address: bytes, namespace: bytes) -> Key | None:
        """The key in an address of `namespace`."""
        found = _ADDRESS.fullmatch(address)
        return bytes.fromhex(found[2].decode()) if found and found[1] == namespace.hex().encode() else None

    def _seen(self, cache: TieredCache, keys: Sequence[Key]) -> Residency:
        path = {0: GroupKeys(keys)}
        found = cache.lookup(path, self._runtime.clock(), protect=Protection.NONE, independent=True, count=False)
        return found.residency[0]

    def _length(self, key: Key, presence: Presence) -> int:
        if presence in _THERE:
            return HEADER_BYTES + self._bytes
        return COMING if presence is Presence.IN_FLIGHT or self._is_coming(key) else 0


class PeerServer:
    """Serves a `TierSource` at the address of a URL, such as `valkeys://10.0.0.7:7007?password_file=...`.

    Attributes:
        settings: What the URL says.
        answers: Values that clients have asked for, by `probe` or `read`, and answer: `present`, `absent`, `coming`.
        sent_bytes: Bytes of values that were sent, headers included.
        dropped: Clients that were refused or dropped, by reason: `limit`, `tls`, `password`, `credentials`, `late`,
            `invalid`, `sleep`.
    """

    def __init__(self, url: str, source: TierSource) -> None:
        """Raises `ConfigError` if the address cannot be bound, or every address of the machine without a password.

        Whether clients need a password is decided here: a file of it that is empty later lets nobody in.
        """
        self.settings, self.source = parse_url(url), source
        self.answers: Counter[tuple[str, str]] = Counter()
        self.dropped: Counter[str] = Counter()
        self.sent_bytes = 0
        self.deadlines: dict[socket.socket, float] = {}
        """When each client that is connected is dropped; a clock reading in seconds."""
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._certificates: Certificates | None = None
        if (tls := tls_context(self.settings)) is not None:
            self._certificates = Certificates(self.settings, _make_context, tls)
        self._listener, self.needs_password = listen(self.settings)
        if not self.needs_password:
            _log.warning("anyone who can reach %s can read cached blocks: set password_file", self.settings)
        self._thread = threading.Thread(target=self._accept, name="longshore-peers", daemon=True)
        self._thread.start()
        _log.info("peers are served at %s", self.settings)

    def close(self) -> None:
        """Drop all clients, and free the address. Idempotent."""
        with self._lock:
            self._closed = True
            threads = [self._thread, *self._threads]
        _shut_down(self._listener)  # wakes the thread that accepts
        self._drop(math.inf)
        give_up = time.monotonic() + 2 * READING
        for thread in threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        self._listener.close()

    def drop_clients(self) -> None:
        """Drop all clients before a sleep: those that read host memory stop soon. They may connect again."""
        self._drop(math.inf, "sleep")

    # ------------------------------------------------------------------ connections

    def _accept(self) -> None:
        while not self._closed:
            try:
                self._listener.settimeout(_LATE_SECONDS if self.deadlines else None)
                sock, _ = self._listener.accept()
            except TimeoutError:
                pass
            except OSError as error:
                if not self._closed:
                    _log.error("peers: no connection could be accepted, peers wait: %s; check ulimit -n", error)
                    time.sleep(_LATE_SECONDS)
            else:
                self._begin(sock)
            self._drop(time.monotonic())

    def _begin(self, sock: socket.socket) -> None:
        """Start a thread for a client, or drop it."""
        reason = "limit"
        with self._lock:
            if not self._closed and len(self.deadlines) < MOST_CLIENTS:
                try:
                    if self._certificates is not None:
                        sock = _encrypted(sock, self._certificates)
                    thread = threading.Thread(target=self._run, args=(sock,), name="longshore-peer", daemon=True)
                    thread.start()
                except OSError as error:
                    reason = "tls"
                    _log.debug("peers: a client was dropped: %s", error)
                except RuntimeError:
                    log_seldom(_log, "peers: no thread can be started for a client; raise the limit of threads")
                else:
                    self.deadlines[sock] = time.monotonic() + LOGIN
                    self._threads.add(thread)
                    return
        self.count_drop(reason)
        sock.close()

    def _run(self, sock: socket.socket) -> None:
        """Serve one client until it ends, or breaks the rules."""
        with self._lock:
            pass  # it is known by now
        try:
            PeerClient(self, sock).serve()
        except (OSError, LongshoreError) as error:
            if isinstance(error, _NoCommandError):
                self.count_drop("invalid")
            elif isinstance(error, ssl.SSLError) and not isinstance(error, _CLIENT_LEFT):
                self.count_drop("tls")
            if not self._closed:
                _log.debug("peers: a client was dropped: %s", error)
        except Exception:  # noqa: BLE001 - others are served
            _log.exception("peers: the connection of a client failed and was closed, others go on; report this")
        finally:
            with self._lock:
                self.deadlines.pop(sock, None)
                self._threads.discard(threading.current_thread())
                sock.close()

    def _drop(self, now: float, reason: str = "late") -> None:
        """Shut down the connections whose deadline has passed `now`."""
        with self._lock:  # none is closed meanwhile
            for client, deadline in list(self.deadlines.items()):
                if now >= deadline:
                    self.deadlines[client] = math.inf
                    self.dropped[reason] += not self._closed
                    _shut_down(client)

    def count_drop(self, reason: str) -> None:
        """A client is refused or dropped."""
        with self._lock:
            self.dropped[reason] += 1

    def count_answers(self, kind: str, answers: Mapping[str, int], sent_bytes: int = 0) -> None:
        """Values have been asked for."""
        with self._lock:
            self.sent_bytes += sent_bytes
            self.answers.update({(kind, answer): count for answer, count in answers.items()})


class _NoCommandError(TierError):
    """What a client has sent is no command."""


class PeerClient:
    """One connection."""

    def __init__(self, server: PeerServer, sock: socket.socket) -> None:
        self._server = server
        self._socket = sock
        self._buffer = bytearray()
        self._may = False
        """Whether it has logged in, or need not."""
        self._sent = 0
        """Bytes of answers that the kernel has taken."""

    def serve(self) -> None:
        """Answer commands, one after the other, until the client ends. Raises `_NoCommandError` for what is none."""
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.do_handshake()
        self._may = not self._server.needs_password
        source = self._server.source
        of_each: dict[bytes, Callable[[list[bytes]], None]] = {b"STRLEN": self._lengths, b"GET": self._get}
        waiting: list[bytes] = []  # addresses of commands of one kind that have come together
        name = b""
        while True:
            words = self._next()
            kind = words[0].upper() if words is not None and self._may and len(words) == 2 else b""
            if waiting and (kind != name or (name == b"GET" and len(waiting) == source.at_once)):
                of_each[name](waiting)
                waiting = []
            if words is not None and kind in of_each:
                waiting.append(words[1])
                name = kind
            elif words is not None:
                self._answer(words)
            else:
                self._has(IDLE)
                came = self._socket.recv(1 << 16)
                if not came:
                    return
                self._buffer += came

    def _answer(self, words: list[bytes]) -> None:
        name, *arguments = words
        match name.upper(), arguments:
            case b"AUTH", [password]:
                self._log_in(None, password)
            case b"AUTH", [user, password]:
                self._log_in(user, password)
            case _ if not self._may:
                self._send(b"-NOAUTH Authentication required.\r\n")
            case b"PING", []:
                self._send(b"+PONG\r\n")
            case b"SELECT", [b"0"]:
                self._send(b"+OK\r\n")
            case b"SET", _:
                self._send(b"-READONLY a peer serves reads only\r\n")
            case _:
                self._send(b"-ERR unknown command\r\n")

    def _lengths(self, addresses: list[bytes]) -> None:
        lengths = self._server.source.lengths(addresses)
        self._send(b"".join([b":%d\r\n" % each for each in lengths]))
        absent, coming = lengths.count(0), lengths.count(COMING)
        answers = {"present": len(lengths) - absent - coming, "absent": absent, "coming": coming}
        self._server.count_answers("probe", answers)

    def _get(self, addresses: list[bytes]) -> None:
        present = absent = nbytes = written = 0
        answers, sent = {"present": 0, "absent": 0}, self._sent
        try:
            with self._server.source.leased(addresses) as values:
                self._has(SENDING)  # for all of them, however many times is sent
                parts: list[bytes | memoryview] = []
                for each in values:
                    if each is None:
                        parts.append(b"$-1\r\n")
                        absent += 1
                        continue
                    header, image = each
                    parts += (b"$%d\r\n%b" % (HEADER_BYTES + len(image), header), image, _END)
                    present += 1
                    nbytes += HEADER_BYTES + len(image)
                    if nbytes - written >= _SEND_BYTES:
                        self._write(parts)
                        parts, written, answers = [], nbytes, {"present": present, "absent": absent}
                self._write(parts)
                answers = {"present": present, "absent": absent}
        finally:  # the client may have left in the middle
            self._server.count_answers("read", answers, min(nbytes, self._sent - sent))

    def _log_in(self, user: bytes | None, password: bytes) -> None:
        if not self._server.needs_password:
            self._send(b"-ERR no password is set\r\n")
            return
        try:
            name, right = [each.encode() for each in self._server.settings.credentials()]  # the file is read each time
        except TierError:
            self._server.count_drop("credentials")
            log_seldom(_log, "peers: nobody can log in at %s; restore its password file", self._server.settings)
            self._send(b"-ERR the password cannot be read\r\n")
            raise
        is_user = user is None or not name or hmac.compare_digest(user, name)
        if right and hmac.compare_digest(password, right) and is_user:
            self._may = True
            self._send(b"+OK\r\n")
            return
        self._server.count_drop("password")
        self._send(b"-WRONGPASS invalid username-password pair\r\n")
        raise TierError("a wrong password")

    def _has(self, seconds: float) -> None:
        """The client has so long for what comes next; before it has logged in, what is left of `LOGIN`."""
        if self._may:
            self._server.deadlines[self._socket] = time.monotonic() + seconds

    def _send(self, answer: bytes) -> None:
        self._has(SENDING)
        self._write([answer])

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            for part in parts:
                self._socket.sendall(part)
                self._sent += len(part)
            return
        left = [memoryview(part) for part in parts]
        while left:
            count = self._socket.sendmsg(left)
            self._sent += count
            left = parts_behind(left, count)

    def _next(self) -> list[bytes] | None:
        """The next command, if all of it has come. Raises `_NoCommandError` for what is none."""
        if (usual := _COMMAND.match(self._buffer)) is not None:
            words = list(usual.groups())
            end = usual.end()
            del usual  # it holds the buffer
            del self._buffer[:end]
            return words
        count, at = self._number(b"*", 0, _WORDS)
        words = []
        while count is not None and len(words) < count:
            length, at = self._number(b"$", at, _WORD_BYTES)
            if length is None or len(self._buffer) < at + length + len(_END):
                return None
            words.append(bytes(self._buffer[at : at + length]))
            at += length + len(_END)
            if self._buffer[at - len(_END) : at] != _END:
                raise _NoCommandError("a word without its end")
        if count is None:
            return None
        if not words:
            raise _NoCommandError("a command without words")
        del self._buffer[:at]
        return words

    def _number(self, kind: bytes, begin: int, most: int) -> tuple[int | None, int]:
        """The number in the line of this kind that begins there, and what is behind; `None` if it has not come."""
        end = self._buffer.find(_END, begin, begin + _LINE_BYTES)
        if end < 0 and len(self._buffer) < begin + _LINE_BYTES:
            return None, begin
        line = bytes(self._buffer[begin : max(begin, end)])
        if line[:1] != kind or not line[1:].isdigit() or int(line[1:]) > most:
            raise _NoCommandError(f"expected {kind.decode()} and a number up to {most}")
        return int(line[1:]), end + len(_END)


_CLIENT_LEFT = ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError
"""A client of TLS that has left, or was dropped; which of these says so depends on the version of OpenSSL."""


def tls_context(settings: RemoteSettings) -> ssl.SSLContext | None:
    """What encrypts the connections of clients; `None` without TLS. Raises `ConfigError`."""
    try:
        return _make_context(settings) if settings.tls else None
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"serve is {settings}: cert_file, key_file or ca_file cannot be used: {error}") from error


def _make_context(settings: RemoteSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(settings.cert_file, settings.key_file or None)
    if settings.ca_file:  # clients need a certificate then
        context.load_verify_locations(settings.ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _encrypted(sock: socket.socket, certificates: Certificates) -> ssl.SSLSocket:
    """The connection of a client, whose handshake is yet to be made. Raises `OSError`."""
    if (context := certificates.context(0.0)) is None:
        raise OSError("the certificates have not been read")
    return context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)


def listen(settings: RemoteSettings) -> tuple[socket.socket, bool]:
    """A socket that listens at the address of `settings`, and at no other; and whether clients need a password.

    Raises `ConfigError` if it cannot be bound, or is every address of the machine and there is no password.
    """
    try:
        has_password = bool(settings.credentials()[1])
    except TierError as error:
        raise ConfigError(f"serve is {settings}: {error}") from error
    if settings.password_file and not has_password:
        raise ConfigError(f"serve is {settings}: password_file is empty")
    with contextlib.ExitStack() as undo:
        try:
            (family, _, _, _, address), *_ = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
            if ipaddress.ip_address(address[0]).is_unspecified and not has_password:
                raise ConfigError(f"serve is {settings}, which is every address of this machine: a password is needed")
            listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MOST_CLIENTS)
        except OSError as error:
            message = f"serve is {settings}, which cannot be bound: {error.strerror or error}"
            raise ConfigError(message) from error
        undo.pop_all()
    return listener, has_password


def _shut_down(sock: socket.socket) -> None:
    """Make the calls on a socket fail, in whatever thread; `SSLSocket.shutdown` would end encryption."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
