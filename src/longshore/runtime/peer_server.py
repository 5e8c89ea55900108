"""`PeerServer`: other replicas read what the tiers of this one have, by the protocol that their Valkey client speaks.

    STRLEN  ──► the length of a value; 0, not there; -1, on its way: ask again
    GET     ──► header, and the image straight from host memory, whose slot is not written meanwhile
    AUTH    ──► before anything else, if there is a password; PING and SELECT 0 are answered, all else is an error

Each connection has a thread. A client that sends nothing for `IDLE`, or does not take a value within `SENDING`, is
dropped, so that it keeps no slot. Values have the header of every remote store, and the namespace is a part of their
address: a replica with other weights finds nothing.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from longshore.boundary import Key
from longshore.cache import GroupKeys, PrefetchPolicy, Presence, Until
from longshore.errors import ConfigError, LongshoreError, TierError
from longshore.runtime.loop import Runtime
from longshore.tiers.host import HostTier
from longshore.tiers.remote.format import HEADER_BYTES, Identity, pack_header
from longshore.tiers.remote.resp import PlainStream, Stream, TlsStream
from longshore.tiers.remote.settings import RemoteSettings, parse_url
from longshore.tiers.remote.work import StoreError

_log = logging.getLogger(__name__)

COMING = -1
"""The length of a value that is being computed, stored or read from files."""

IDLE = 600.0
"""Seconds after which a client that sends nothing is dropped."""
SENDING = 10.0
"""Seconds within which a client must have taken an answer."""
READING = 2.0
"""Seconds for which a GET waits until a chunk has been read from files."""
_MOST_CLIENTS = 64
_HANDSHAKE = 5.0
_WORDS, _WORD_BYTES = 4, 512
_ADDRESS = re.compile(rb"ls1/([0-9a-f]{64})/([0-9a-f]{64})")
_END = b"\r\n"


class TierSource:
    """What the tiers of one engine have: chunks of one KV cache group, in host memory or in files."""

    def __init__(
        self,
        runtime: Runtime,
        host: HostTier,
        namespace: Callable[[], bytes],
        is_coming: Callable[[Sequence[Key]], set[Key]] = lambda keys: set(),
    ) -> None:
        """`namespace` is the present one; `is_coming` says which of some keys are being computed, or stored."""
        self._runtime = runtime
        self._host = host
        self._namespace = namespace
        self._is_coming = is_coming
        self._bytes = host.slabs.image_bytes[0]

    def lengths(self, addresses: Sequence[bytes]) -> list[int]:
        """The length of each value; 0 for one that is not there, `COMING` for one that will be."""
        keys = [self._key(each) for each in addresses]
        known = [key for key in keys if key is not None]
        with self._runtime.control() as cache:
            asked = {0: GroupKeys(known)}
            found = cache.lookup(asked, self._runtime.clock(), until=Until.NOTHING, each=True, count=False, asks=())
            where = dict(zip(known, found.residency[0].presences, strict=True))
            absent = [key for key, each in where.items() if each is Presence.ABSENT]
            coming = self._is_coming(absent) if absent else set()
        return [0 if key is None else self._length(where[key], is_coming=key in coming) for key in keys]

    @contextlib.contextmanager
    def held(self, address: bytes) -> Iterator[tuple[bytes, memoryview] | None]:
        """The header and the image of a value, whose slot is not written meanwhile; `None`: it is not there."""
        key, job, namespace = self._key(address), None, self._namespace()
        if key is not None:
            job = self._hold(key)
        if key is None or job is None:
            yield None
            return
        number, index = job
        try:
            offset = self._host.offset(0, index)
            image = self._host.arena.view(offset, self._bytes)
            yield pack_header(Identity(namespace, key, self._bytes), image), image
        finally:
            with self._runtime.control() as cache:
                cache.release(number)

    def _hold(self, key: Key) -> tuple[int, int] | None:
        """A job that reads a slot of host memory with `key`, and the slot; it is read from files first if need be."""
        path, deadline = {0: GroupKeys([key])}, self._runtime.clock() + READING
        while True:
            with self._runtime.control() as cache:
                now = self._runtime.clock()
                found = cache.lookup(path, now, until=Until.NOTHING, each=True, count=False, asks=())
                (presence,) = found.residency[0].presences
                if presence is Presence.READY:
                    (part,) = cache.load(path).parts
                    return part.job, part.slots.of.indices[0]
                if presence is Presence.ABSENT or now >= deadline:
                    return None
                lease = cache.lookup(path, now, each=True, count=False, asks=()).lease
                if lease is not None:
                    cache.prefetch(lease, now, policy=PrefetchPolicy.TIMEOUT, timeout=deadline - now)
            if lease is None:
                return None
            try:
                self._runtime.wait_over(lease)
            finally:
                with self._runtime.control() as cache:
                    cache.release(lease)

    def _key(self, address: bytes) -> Key | None:
        """The key in an address of the present namespace."""
        found = _ADDRESS.fullmatch(address)
        if found is None or bytes.fromhex(found[1].decode()) != self._namespace():
            return None
        return bytes.fromhex(found[2].decode())

    def _length(self, presence: Presence, *, is_coming: bool) -> int:
        if presence in (Presence.READY, Presence.COLDER):
            return HEADER_BYTES + self._bytes
        return COMING if is_coming or presence is Presence.IN_FLIGHT else 0


class PeerServer:
    """Serves a `TierSource` at the address of a URL, such as `valkeys://10.0.0.7:7007?password_file=...`.

    Attributes:
        served: Values that were sent.
        refused: Connections that were refused, or gave a wrong password.
    """

    def __init__(self, url: str, source: TierSource) -> None:
        """Raises `ConfigError` if the address cannot be bound, or every address of the machine without a password."""
        self.settings = parse_url(url)
        if self.settings.scheme not in ("valkey", "valkeys"):
            raise ConfigError(f"serve is {url}: expected valkey://ADDRESS:PORT, or valkeys:// with TLS")
        self._source = source
        self.served = self.refused = 0
        self._tls = self._context(self.settings)
        self._clients: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False
        try:
            self._listener = self._bind(self.settings)
        except OSError as error:
            raise ConfigError(f"serve is {url}, which cannot be bound: {error.strerror or error}") from error
        if not self._password():
            if ipaddress.ip_address(self._listener.getsockname()[0]).is_unspecified:
                self._listener.close()
                raise ConfigError(f"serve is {url}, which is every address of this machine: a password is needed")
            _log.warning("anyone who can reach %s can read cached blocks: set password_file", self.settings)
        self._thread = threading.Thread(target=self._accept, name="longshore-peers", daemon=True)
        self._thread.start()
        _log.info("peers are served at %s", self.settings)

    def close(self) -> None:
        """Drop all clients, and free the address. Idempotent."""
        with self._lock:
            self._closed = True
            clients, threads = list(self._clients), list(self._threads)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for client in clients:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(client, socket.SHUT_RDWR)
        for thread in (self._thread, *threads):
            thread.join(SENDING)
        self._listener.close()

    # ------------------------------------------------------------------ connections

    @staticmethod
    def _bind(settings: RemoteSettings) -> socket.socket:
        (family, _, _, _, address), *_ = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(_MOST_CLIENTS)
        except BaseException:
            listener.close()
            raise
        return listener

    @staticmethod
    def _context(settings: RemoteSettings) -> ssl.SSLContext | None:
        if not settings.tls:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(settings.cert_file, settings.key_file or None)
            if settings.ca_file:  # clients need a certificate then
                context.load_verify_locations(settings.ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"serve is {settings}: cert_file, key_file or ca_file cannot be used: {error}") from error
        return context

    def _password(self) -> tuple[str, str] | None:
        """User and password, if there is one; the file is read each time."""
        try:
            user, password = self.settings.credentials()
        except TierError as error:
            raise ConfigError(f"serve: {error}") from error
        return (user, password) if password else None

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if not self._closed:
                    _log.error("peers: no connection could be accepted: %s", error)
                    time.sleep(1.0)
                continue
            thread = threading.Thread(target=self._run, args=(client,), name="longshore-peer", daemon=True)
            with self._lock:
                if self._closed or len(self._clients) >= _MOST_CLIENTS:
                    self.refused += 1
                    client.close()
                    continue
                self._clients.add(client)
                self._threads.add(thread)
            thread.start()

    def _run(self, client: socket.socket) -> None:
        """Serve one client until it ends, or breaks the rules."""
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Client(self, self._stream(client)).serve()
        except (OSError, StoreError, LongshoreError) as error:
            if not self._closed:
                _log.debug("peers: a client was dropped: %s", error)
        except Exception:  # noqa: BLE001 - others are served
            _log.exception("peers: a client could not be served; others are")
        finally:
            client.close()
            with self._lock:
                self._clients.discard(client)
                self._threads.discard(threading.current_thread())

    def _stream(self, client: socket.socket) -> Stream:
        if self._tls is None:
            return _ServedStream(client, time.monotonic)
        client.settimeout(_HANDSHAKE)
        secure = self._tls.wrap_socket(client, server_side=True)
        with self._lock:
            self._clients.add(secure)
        return TlsStream(secure, time.monotonic)


class _ServedStream(PlainStream):
    """TCP, where the kernel bounds a whole send: it takes an image with one call."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float]) -> None:
        super().__init__(sock, clock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(SENDING), 0))

    def send(self, parts: list[memoryview], deadline: float) -> None:
        """Send `parts`, within `SENDING`. Raises `StoreError`."""
        left = sum(map(len, parts))
        try:
            if self._sock.sendmsg(parts) < left:
                raise StoreError("timeout", "a client did not take an answer in time")
        except OSError as error:
            raise StoreError("connection", f"could not send: {error.strerror or error}") from None


class _Client:
    """One connection."""

    def __init__(self, server: PeerServer, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self._buffer = bytearray()
        self._into = memoryview(bytearray(1 << 16))
        self._may = server._password() is None

    def serve(self) -> None:
        """Answer commands, one after the other. Raises `StoreError` when the client ends, or is dropped."""
        lengths: list[bytes] = []
        while True:
            words = self._next()
            if words is not None and self._may and words[0].upper() == b"STRLEN" and len(words) == 2:
                lengths.append(words[1])  # all that have come are looked up together
                continue
            if lengths:
                self._send([b"".join(b":%d\r\n" % each for each in self._server._source.lengths(lengths))])
                lengths = []
            if words is not None:
                self._answer(words)
                continue
            count = self._stream.receive_some(self._into, time.monotonic() + IDLE)
            self._buffer += self._into[:count]

    def _answer(self, words: list[bytes]) -> None:
        name, *arguments = words
        match name.upper(), arguments:
            case b"AUTH", [*_, password] if len(arguments) <= 2:
                self._log_in(arguments[0] if len(arguments) == 2 else b"", password)
            case _ if not self._may:
                self._send([b"-NOAUTH Authentication required.\r\n"])
            case b"GET", [address]:
                self._get(address)
            case b"PING", []:
                self._send([b"+PONG\r\n"])
            case b"SELECT", [b"0"]:
                self._send([b"+OK\r\n"])
            case b"SET", _:
                self._send([b"-READONLY a peer serves reads only\r\n"])
            case _:
                self._send([b"-ERR unknown command\r\n"])

    def _get(self, address: bytes) -> None:
        with self._server._source.held(address) as value:
            if value is None:
                self._send([b"$-1\r\n"])
                return
            header, image = value
            self._send([b"$%d\r\n%b" % (len(header) + len(image), header), image, _END])
            self._server.served += 1

    def _log_in(self, user: bytes, password: bytes) -> None:
        known = self._server._password()
        if known is None:
            self._send([b"-ERR no password is set\r\n"])
            return
        is_right = hmac.compare_digest(password, known[1].encode())
        if is_right and (not user or not known[0] or hmac.compare_digest(user, known[0].encode())):
            self._may = True
            self._send([b"+OK\r\n"])
            return
        self._server.refused += 1
        self._send([b"-WRONGPASS invalid username-password pair\r\n"])
        raise StoreError("refused", "a wrong password")

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        self._stream.send([memoryview(part) for part in parts], time.monotonic() + SENDING)

    def _next(self) -> list[bytes] | None:
        """The next command, if all of it has come. Raises `StoreError` for what is none."""
        line, at = self._line(0)
        if line is None:
            return None
        count = _count(line, b"*", _WORDS)
        words: list[bytes] = []
        for _ in range(count):
            line, at = self._line(at)
            if line is None:
                return None
            length = _count(line, b"$", _WORD_BYTES)
            if len(self._buffer) < at + length + len(_END):
                return None
            words.append(bytes(self._buffer[at : at + length]))
            at += length + len(_END)
            if self._buffer[at - len(_END) : at] != _END:
                raise StoreError("broken", "a word without its end")
        del self._buffer[:at]
        return words

    def _line(self, begin: int) -> tuple[bytes | None, int]:
        end = self._buffer.find(_END, begin, begin + 32)
        if end < 0 and len(self._buffer) >= begin + 32:
            raise StoreError("broken", "a line without an end")
        return (None, begin) if end < 0 else (bytes(self._buffer[begin:end]), end + len(_END))


def _count(line: bytes, kind: bytes, most: int) -> int:
    """The number in a line of this kind, at most `most`. Raises `StoreError`."""
    if line[:1] != kind or not line[1:].isdigit() or int(line[1:]) > most or line == b"*0":
        raise StoreError("broken", f"expected {kind.decode()} and a number up to {most}")
    return int(line[1:])
