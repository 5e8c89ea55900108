"""Where a remote store is, and its limits: one URL.

    valkey://user@host:6379/0?ttl=1h          redis://... is the same
    valkeys://host:6380/0?ca_file=/etc/ca.pem rediss://... is the same: TLS, and the certificate is verified
    valkey-cluster://h1:7000,h2:7000?ttl=1h   a cluster, of which some nodes are named; valkeys-cluster://... with TLS
    unix:///run/valkey.sock?db=0
    file:///mnt/shared?daily_writes=500GiB    a directory that all replicas mount
    s3://bucket/prefix?endpoint=http://h:9000 a bucket of S3; without `endpoint`, of AWS
    mooncake://master:50051                   Mooncake Store, by its master

A password never stands in a URL, because URLs are logged: it is refused. It comes from the file that `password_file`
names, or from the environment (`LONGSHORE_REMOTE_PASSWORD`), and is read at each connection, so that it can be changed
while an engine runs. The user comes from the URL, `user` or `LONGSHORE_REMOTE_USER`. For S3, they are the access key's
ID and the secret key; without them, AWS's own variables hold (`longshore.tiers.remote.s3`).
"""

from __future__ import annotations

import math
import os
import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import ByteSize, TypeAdapter, ValidationError

from longshore.errors import ConfigError, TierError

PASSWORD_VARIABLE = "LONGSHORE_REMOTE_PASSWORD"  # noqa: S105 - the name of a variable
USER_VARIABLE = "LONGSHORE_REMOTE_USER"

DEFAULT_PORT = 6379
MASTER_PORT = 50051
_PLAIN, _TLS = frozenset({"valkey", "redis"}), frozenset({"valkeys", "rediss"})
_ALIASES = {"redis": "valkey", "rediss": "valkeys"}
_CLUSTER = "-cluster"
_SERVERS = sorted(_PLAIN | _TLS)
_SCHEMES = (*_SERVERS, *(f"{each}{_CLUSTER}" for each in _SERVERS), "unix", "file", "s3", "mooncake")
_UNITS = {"ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|)")
_SIZE = TypeAdapter(ByteSize)
_SECRETS = frozenset(
    {"password", "passwd", "pass", "pwd", "auth", "token", "secret", "secret_access_key", "session_token"}
)
_MOST_BYTES = 1 << 60
_MOST_REQUESTS = 64
_SOCKET_BYTES = 107
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"(?:[A-Za-z0-9_.-]+(?:/[A-Za-z0-9_.-]+)*)?")
_ENDPOINT = re.compile(r"https?://[A-Za-z0-9_.\[\]:-]+")
_REGION = re.compile(r"[A-Za-z0-9-]{1,64}")
_METADATA = re.compile(r"P2PHANDSHAKE|(?:https?|etcd)://[A-Za-z0-9_.\[\]:/;-]+")


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    """One store. Times are in seconds, sizes in bytes; 0 for `ttl` and `daily_writes` means no limit.

    Attributes:
        scheme: One of `valkey`, `valkeys`, `valkey-cluster`, `valkeys-cluster`, `unix`, `file`, `s3`,
            `mooncake`.
        host: Of a server reached over TCP; of a cluster, of the first node that is named; of S3, the bucket; of
            Mooncake, its master.
        port: Of that server.
        more: Host and port of the other nodes of a cluster that are named.
        path: Of a unix socket, or of the shared directory; of S3, what precedes the addresses in the bucket.
        db: Number of the server's database.
        user: Name to authenticate with; empty: the server's default user.
        password_file: File whose first line is the password.
        ca_file: Certificates of the authorities to trust; empty: those of the system.
        cert_file: Our own certificate, for servers that ask for one.
        key_file: Its private key.
        server_name: Name that the server's certificate must have; empty: `host`.
        ttl: A value expires so long after it was written.
        write: What is written: `all`, what is used a `second_use`, or what is about to be evicted (`evict`).
        daily_writes: Bytes that may be written within a day.
        connect_timeout: For connection, TLS and authentication.
        probe_timeout: Within which a probe must be answered.
        fetch_timeout: Within which a fetch must have ended, from its submission; a caller's earlier deadline counts.
        write_timeout: The same for a write.
        in_flight: Bytes of values that may be under way on one connection. More than about 1 MiB is slower. Of
            Mooncake, bytes in one call of its client.
        endpoint: URL of a server of S3; empty: AWS.
        region: Of the bucket; empty: as AWS's variables say, else `us-east-1`.
        requests: Of S3, the requests for values that may be under way in each direction.
        metadata: Of Mooncake, where its machines find each other.
    """

    scheme: str
    host: str = ""
    port: int = DEFAULT_PORT
    path: str = ""
    db: int = 0
    user: str = field(default="", repr=False)
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    ttl: float = 0.0
    write: str = "all"
    daily_writes: int = 0
    connect_timeout: float = 0.5
    probe_timeout: float = 0.05
    fetch_timeout: float = 2.0
    write_timeout: float = 5.0
    in_flight: int = 1 << 19
    endpoint: str = ""
    region: str = ""
    requests: int = 16
    metadata: str = "P2PHANDSHAKE"
    more: tuple[tuple[str, int], ...] = ()

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        if self.is_s3:
            return not self.endpoint.startswith("http://")
        return self.scheme.removesuffix(_CLUSTER) == "valkeys"

    @property
    def is_cluster(self) -> bool:
        """Whether the store is a cluster of servers."""
        return self.scheme.endswith(_CLUSTER)

    def node(self, host: str, port: int) -> RemoteSettings:
        """The settings of one node of a cluster."""
        return replace(self, scheme=self.scheme.removesuffix(_CLUSTER), host=host, port=port, more=())

    @property
    def is_directory(self) -> bool:
        """Whether the store is a directory."""
        return self.scheme == "file"

    @property
    def is_s3(self) -> bool:
        """Whether the store is a bucket."""
        return self.scheme == "s3"

    @property
    def is_mooncake(self) -> bool:
        """Whether the store is Mooncake's, whose client needs shared memory."""
        return self.scheme == "mooncake"

    def __str__(self) -> str:
        """Where the store is, for logs; nothing secret is in it."""
        if self.is_s3:
            where = self.endpoint and f"?endpoint={self.endpoint}"
            return (
                f"s3://{self.host}{self.path and '/' + self.path}{where or (self.region and f'?region={self.region}')}"
            )
        if self.path:
            return f"{self.scheme}://{self.path}"
        nodes = ((self.host, self.port), *self.more)
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in nodes)
        return f"{self.scheme}://{hosts}" + ("" if self.is_cluster or self.is_mooncake else f"/{self.db}")

    def credentials(self, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
        """User and password as of now; empty: none. Raises `TierError` if the file cannot be read."""
        user = self.user or environment.get(USER_VARIABLE, "")
        if not self.password_file:
            return user, environment.get(PASSWORD_VARIABLE, "")
        try:
            lines = Path(self.password_file).read_text().splitlines()
        except (OSError, ValueError) as error:
            kind = error.strerror if isinstance(error, OSError) else "it is not text"
            raise TierError(f"password file {self.password_file}: {kind}") from None
        return user, lines[0].strip() if lines else ""


CERTIFICATE_SECONDS = 5.0
"""For so long the files of certificates are waited for when a store is opened."""

RENEW_SECONDS = 1.0
"""Certificates that were read longer ago are read again, for the connections after the next one."""


def client_context(settings: RemoteSettings) -> ssl.SSLContext:
    """What to connect to a store with. Raises `OSError` or `ValueError` if certificates cannot be read."""
    context = ssl.create_default_context(cafile=settings.ca_file or None)
    if settings.cert_file:
        context.load_cert_chain(settings.cert_file, settings.key_file)
    return context


class Certificates:
    """The certificates of a store, read in a thread: a file system that hangs holds up no engine's start.

    They are read again now and then, because certificates are renewed while an engine runs.
    """

    def __init__(
        self,
        settings: RemoteSettings,
        make: Callable[[RemoteSettings], ssl.SSLContext] = client_context,
        first: ssl.SSLContext | None = None,
    ) -> None:
        """`first` is what `make` has just made of them.

        Raises `TierError` if they cannot be read; what takes longer than `CERTIFICATE_SECONDS` goes on.
        """
        self._settings = settings
        self._make = make
        self._found: ssl.SSLContext | TierError | None = first
        self._read_at = time.monotonic()
        if first is None:
            self._begin()
            self.context(CERTIFICATE_SECONDS)

    def context(self, seconds: float) -> ssl.SSLContext | None:
        """What to connect with; `None` if it has not been read in `seconds`. Raises `TierError` if it cannot be."""
        if self._found is None:
            self._reading.join(seconds)
        found = self._found
        if isinstance(found, TierError):
            self._found = None
            self._begin()  # for the next connection
            raise found
        if found is not None and time.monotonic() - self._read_at > RENEW_SECONDS:
            self._read_at = math.inf  # until they have been read
            self._begin()
        return found

    def _begin(self) -> None:
        self._reading = threading.Thread(target=self._read, name="longshore-certificates", daemon=True)
        self._reading.start()

    def _read(self) -> None:
        found: ssl.SSLContext | TierError
        try:
            found = self._make(self._settings)
        except (OSError, ValueError) as error:  # what OpenSSL raises is one as well
            said = getattr(error, "strerror", None) or error
            found = TierError(f"{self._settings}: certificates cannot be read: {said}")
        if self._found is None or not isinstance(found, TierError):  # else what was read before stays in use
            self._found = found
        self._read_at = time.monotonic()


_NUMBERS = {
    "ttl": "duration",
    "connect_timeout": "duration",
    "probe_timeout": "duration",
    "fetch_timeout": "duration",
    "write_timeout": "duration",
    "daily_writes": "size",
    "in_flight": "size",
    "db": "number",
    "requests": "number",
}
_TEXTS = ("user", "password_file", "ca_file", "cert_file", "key_file", "server_name", "endpoint", "region", "metadata")
_OF_S3 = frozenset({"endpoint", "region", "requests"})
_NOT_OF_S3 = frozenset({"db", "cert_file", "key_file", "server_name", "in_flight"})
_NOT_OF_MOONCAKE = frozenset({"db", "user", "password_file", "ttl"}) | _OF_S3
_FILES = ("password_file", "ca_file", "cert_file", "key_file")
_POLICIES = {"write_through": "all", "write_through_selective": "second_use", "write_back": "evict"}
"""Names of write policies, which `write` takes, too."""
_CHOICES = {"write": ("all", "second_use", "evict", *_POLICIES)}
_NODES = re.compile(rf"([^:/?#]+{_CLUSTER}://)([^/?#]*)", re.IGNORECASE)
"""The scheme of a cluster, and its nodes."""
_OPTIONS = (*_NUMBERS, *_TEXTS, *_CHOICES)


def parse_url(url: str) -> RemoteSettings:
    """The settings in `url`. Raises `ConfigError`, whose message never repeats what might be a secret."""
    try:
        others = []
        if nodes := _NODES.match(url):  # split here: `urlsplit` may refuse an IPv6 address after another host
            first, *rest = nodes[2].split(",")
            url, others = f"{nodes[1]}{first}{url[nodes.end() :]}", [urlsplit(f"//{each}") for each in rest]
        parts = urlsplit(url)
        host, port, user, password = parts.hostname, parts.port, parts.username, parts.password
        more = tuple((each.hostname or "", each.port or DEFAULT_PORT) for each in others)
    except ValueError:
        raise ConfigError(
            "remote store: expected a URL such as valkey://host:6379/0, got one with an invalid host or port"
        ) from None
    if password is not None:
        raise ConfigError(
            f"remote store: expected a URL without a password: set {PASSWORD_VARIABLE}, or add ?password_file=PATH"
        )
    if "@" in parts.path or "@" in parts.query:  # as a password makes it that has a '/' or '?' in it
        raise ConfigError(
            "remote store: expected no '@' behind the host: write %40 in a path, and no password in a URL: "
            f"set {PASSWORD_VARIABLE}, or add ?password_file=PATH"
        )
    if not all(host for host, _ in more) or any("@" in each.netloc or each.path for each in others):
        raise ConfigError("remote store: expected nodes of a cluster as HOST:PORT,HOST:PORT, a user before the first")
    name = parts.scheme.removesuffix(_CLUSTER)
    scheme = _ALIASES.get(name, name) + parts.scheme[len(name) :]
    if parts.scheme not in _SCHEMES:
        got = f", got {parts.scheme!r}" if "://" in url else ""
        raise ConfigError(
            f"remote store: expected a URL of one of {', '.join(_SCHEMES)}{got}: write valkey://HOST:PORT/DB or file:///PATH"
        )
    if parts.fragment:
        raise ConfigError("remote store: expected a URL without '#'")
    options = _options(parts.query)
    if user:
        options["user"] = unquote(user)
    settings = replace(_placed(scheme, host or "", port, parts.path, options), more=more)
    _check(settings, options)
    return settings


def _placed(scheme: str, host: str, port: int | None, path: str, options: dict[str, Any]) -> RemoteSettings:
    """The settings of the client for `scheme`."""
    if scheme == "s3":
        if not _BUCKET.fullmatch(host) or port is not None:
            raise ConfigError(
                "remote store: expected s3://BUCKET/PREFIX: the server stands in ?endpoint=http://HOST:PORT"
            )
        return RemoteSettings(scheme, host, path=_prefix(path), **{**_slower(scheme), **options})
    if scheme in {"unix", "file"}:
        if host or not path.startswith("/"):
            raise ConfigError(f"remote store: expected {scheme}:///PATH with an absolute path")
        if scheme == "unix" and (length := len(os.fsencode(unquote(path)))) > _SOCKET_BYTES:
            raise ConfigError(f"remote store: a unix socket's path has at most {_SOCKET_BYTES} bytes, got {length}")
        return RemoteSettings(scheme, path=unquote(path), **{**_slower(scheme), **options})
    if not host:
        raise ConfigError(f"remote store: expected {scheme}://HOST:PORT/DB, got no host")
    if "," in host:
        advice = "" if scheme == "mooncake" else f": for a cluster, write {scheme}-cluster://HOST:PORT,HOST:PORT"
        raise ConfigError(f"remote store: expected one host{advice}")
    number = path.strip("/")
    if number:
        options["db"] = _number("db", number)
    if scheme.endswith(_CLUSTER) and options.get("db"):
        raise ConfigError(f"remote store: db: a cluster has database 0 only, got {options['db']}")
    default = MASTER_PORT if scheme == "mooncake" else DEFAULT_PORT
    return RemoteSettings(scheme, host, port or default, **{**_slower(scheme), **options})


def _slower(scheme: str) -> dict[str, float]:
    """Network file systems and object stores are slower than a server in memory; Mooncake's client must be started."""
    if scheme == "s3":
        return {"connect_timeout": 1.0, "probe_timeout": 1.0, "fetch_timeout": 5.0, "write_timeout": 10.0}
    if scheme == "mooncake":
        return {"connect_timeout": 3.0, "probe_timeout": 0.5, "in_flight": 32 << 20}
    return {"probe_timeout": 0.5} if scheme == "file" else {}


def _prefix(path: str) -> str:
    """The path of a URL as the prefix of objects."""
    prefix = unquote(path).removeprefix("/").removesuffix("/")
    if not _PREFIX.fullmatch(prefix):
        raise ConfigError("remote store: expected a prefix of letters, digits and . _ - between single slashes")
    return prefix


def _options(query: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name.lower() in _SECRETS:
            raise ConfigError(
                f"remote store: expected no {name} in a URL: set {PASSWORD_VARIABLE}, or add ?password_file=PATH"
            )
        if name not in _OPTIONS:
            raise ConfigError(
                f"remote store: unknown option{_shown(name, ' ')}; there are {', '.join(sorted(_OPTIONS))}"
            )
        if name in options:
            raise ConfigError(f"remote store: option {name} is given twice")
        parse = {"duration": _duration, "size": _size, "number": _number}.get(_NUMBERS.get(name, ""))
        options[name] = parse(name, value) if parse else value
        if value not in _CHOICES.get(name, (value,)):
            allowed = ", ".join(_CHOICES[name])
            raise ConfigError(f"remote store: {name}: expected one of {allowed}{_shown(value, ', got ')}")
    if "write" in options:
        options["write"] = _POLICIES.get(options["write"], options["write"])
    return options


def _check(settings: RemoteSettings, options: Mapping[str, object]) -> None:
    for name in ("connect_timeout", "probe_timeout", "fetch_timeout", "write_timeout", "in_flight", "requests"):
        if getattr(settings, name) <= 0:
            raise ConfigError(f"remote store: {name}: expected more than 0, got {getattr(settings, name)}")
    if 0 < settings.ttl < 1e-3:
        raise ConfigError(f"remote store: ttl: expected at least 1ms, got {settings.ttl} s")
    for name in options.keys() & set(_FILES):  # engines read them in processes whose directory may be another
        if not Path(path := getattr(settings, name)).is_absolute():
            raise ConfigError(f"remote store: {name}: expected an absolute path{_shown(path, ', got ')}")
    if bool(settings.cert_file) != bool(settings.key_file):
        raise ConfigError("remote store: cert_file and key_file: set both or neither")
    tls_only = {"ca_file", "cert_file", "key_file", "server_name"} & options.keys()
    if tls_only and not settings.tls:
        raise ConfigError(f"remote store: {', '.join(sorted(tls_only))}: only for valkeys://, rediss:// and https")
    if foreign := (_NOT_OF_S3 if settings.is_s3 else _OF_S3) & options.keys():
        raise ConfigError(
            f"remote store: {', '.join(sorted(foreign))}: {'not' if settings.is_s3 else 'only'} for s3://"
        )
    _check_mooncake(settings, options)
    if settings.requests > _MOST_REQUESTS:
        raise ConfigError(f"remote store: requests: expected at most {_MOST_REQUESTS}, got {settings.requests}")
    if settings.endpoint and not _ENDPOINT.fullmatch(settings.endpoint):
        shown = _shown(settings.endpoint, ", got ")
        raise ConfigError(f"remote store: endpoint: expected a URL such as http://HOST:PORT, without a path{shown}")
    if settings.region and not _REGION.fullmatch(settings.region):
        raise ConfigError("remote store: region: expected a name such as us-east-1")
    server_only = {"db", "user", "password_file", "connect_timeout"} & options.keys()
    if server_only and settings.is_directory:
        raise ConfigError(f"remote store: {', '.join(sorted(server_only))}: not for file://")


def _check_mooncake(settings: RemoteSettings, options: Mapping[str, object]) -> None:
    if settings.is_mooncake and (foreign := _NOT_OF_MOONCAKE & options.keys()):
        why = ": Mooncake evicts, and nothing expires" if "ttl" in foreign else ""
        raise ConfigError(f"remote store: {', '.join(sorted(foreign))}: not for mooncake://{why}")
    if "metadata" in options and not (settings.is_mooncake and _METADATA.fullmatch(settings.metadata)):
        raise ConfigError(
            "remote store: metadata: only for mooncake://: P2PHANDSHAKE, http://HOST:PORT/metadata or etcd://HOST:PORT"
        )


def _duration(name: str, text: str) -> float:
    match = _DURATION.fullmatch(text.strip())
    if match is None or not math.isfinite(seconds := float(match[1]) * _UNITS[match[2]]) or seconds > 86_400 * 3650:
        raise ConfigError(f"remote store: {name}: expected a time such as 500ms, 30s or 1h{_shown(text, ', got ')}")
    return seconds


def _size(name: str, text: str) -> int:
    try:
        size = int(_SIZE.validate_python(text))
    except (ValidationError, OverflowError):
        size = -1
    if not 0 <= size <= _MOST_BYTES:
        raise ConfigError(f"remote store: {name}: expected a size such as 64MiB{_shown(text, ', got ')}")
    return size


def _number(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 6:
        raise ConfigError(f"remote store: {name}: expected a number from 0 to 999999{_shown(text, ', got ')}")
    return int(text)


def _shown(text: str, before: str) -> str:
    """`text` for a message, with what comes before it; empty where a part of a password may stand in it."""
    return "" if "@" in unquote(text) else f"{before}{text!r}"
