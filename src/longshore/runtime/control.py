"""The socket of an engine for `longshore ctl`, and its client. `commands` carries out what it is sent.

    longshore ctl ──► socket, of its owner alone ──► thread ──► Commands ──► Runtime.batch ──► TieredCache

    request   {"command": "lookup", "tokens": [1, 2, ...]}\\n           or "keys": ["00ff...", ...], in hexadecimal
    answer    {"ok": {...}}\\n    or    {"error": "PinLimitError", "message": "..."}\\n

One thread serves all clients, one command after the other. It takes the runtime's lock as any other caller does, and
holds it for as long as one call of the cache takes. Whatever a client sends or leaves out is its own affair: it gets an
error, or its connection is closed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import selectors
import socket
import stat
import struct
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longshore.errors import CommandError, ConfigError, EngineError
from longshore.runtime.commands import Commands, ControlledEngine

_log = logging.getLogger(__name__)

MOST_BYTES = 2 << 20
"""Of a request: some 300,000 token ids, which take the interpreter about 20 ms to read."""

_MOST_CLIENTS, _BACKLOG = 16, 128
_IDLE_SECONDS, _PAUSE, _NAP = 30.0, 0.1, 0.01
_PATH_BYTES = 107


def user_directory() -> Path:
    """The directory of this user's sockets and notes. It belongs to this user alone, or `EngineError`."""
    directory = Path(tempfile.gettempdir()) / f"longshore-{os.getuid()}"
    with contextlib.suppress(FileExistsError):  # whatever is there
        directory.mkdir(mode=0o700)
    _check_private(directory)
    return directory


def _check_private(directory: Path) -> None:
    try:
        status = directory.lstat()
    except OSError as error:
        raise EngineError(f"{directory}: {error.strerror}; make it a directory of mode 0700") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise EngineError(
            f"{directory} is not a directory of this user alone: expected an own directory of mode 0700: chmod 700 it, "
            "or name another"
        )


def socket_path(name: str) -> Path:
    """Where the engine `name` listens: an absolute path, or a name in the user's directory.

    Raises `ConfigError` for what cannot be one, `EngineError` if that directory is not this user's alone.
    """
    path = Path(name)
    if not path.is_absolute():
        if not name or "/" in name or name.startswith("."):
            raise ConfigError(f"control: expected a name without slashes, or an absolute path, got {name!r}")
        path = user_directory() / f"{name}.ctl"
    if len(os.fsencode(path)) > _PATH_BYTES - 12:  # with the process's number behind it
        raise ConfigError(f"control: {path} is too long for a socket: expected at most {_PATH_BYTES - 12} bytes")
    return path


@dataclass(slots=True)
class _Client:
    connection: socket.socket
    since: float
    """Since when the server has waited for it."""
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    ends: bool = False


class ControlServer:
    """The socket of an engine, and the thread that serves it.

    Attributes:
        path: The socket. If a living engine has the one of this name, the number of the process is added.
    """

    def __init__(self, name: str, engine: ControlledEngine) -> None:
        """Raises as `socket_path`, and `EngineError` if the socket cannot be made or its directory is not private."""
        path = socket_path(name)
        _check_private(path.parent)
        self._commands = Commands(engine)
        self._clients: dict[int, _Client] = {}
        self._closed = self._is_short = False
        self._undo = contextlib.ExitStack()
        try:
            self.path = self._take(path)
            self._listener = self._undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.setblocking(False)
            self.path.unlink(missing_ok=True)  # of an engine that was killed: the lock says that it is gone
            self._listener.bind(str(self.path))
            self._undo.callback(self.path.unlink, missing_ok=True)
            self.path.chmod(0o600)
            self._listener.listen(_BACKLOG)
            ours, theirs = socket.socketpair()
            self._wake, self._woken = self._undo.enter_context(ours), self._undo.enter_context(theirs)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._woken, selectors.EVENT_READ)
            self._thread = threading.Thread(target=self._run, name="longshore-control", daemon=True)
            self._thread.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: a thread cannot be started
            self._undo.close()
            raise EngineError(f"control: {path}: {getattr(error, 'strerror', None) or error}") from error
        _servers.add(self)
        _log.info("commands are served: longshore ctl %s", self.path)

    def close(self, timeout: float = 10.0) -> None:
        """Remove the socket, and end the thread, which finishes the command that it is at. Idempotent."""
        if not self._closed:
            self._closed = True
            _servers.discard(self)
            with contextlib.suppress(OSError):
                self._wake.send(b"\0")
            self._thread.join(timeout)
            self._undo.close()

    def forget(self) -> None:
        """Close the copies of the files that a fork has got: all of it is the parent's."""
        self._closed = True
        for each in (
            self._listener,
            self._wake,
            self._woken,
            *(client.connection for client in self._clients.values()),
        ):
            with contextlib.suppress(OSError):
                os.close(each.detach())
        with contextlib.suppress(OSError):
            os.close(self._lock)
        self._selector.close()
        self._undo.pop_all()

    def _take(self, path: Path) -> Path:
        """Lock the name `path`, or one of this process's own if a living engine has that."""
        own = path.with_stem(f"{path.stem}-{os.getpid()}")
        for each in (path, own):
            self._lock = os.open(f"{each}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(self._lock)
                if each is path:
                    _log.warning("control: socket %s is in use by another engine; using %s", path, own)
            else:
                self._undo.callback(os.close, self._lock)
                return each
        raise EngineError(f"control: {path} is in use by other engines; choose another name")

    def _run(self) -> None:
        while not self._closed:
            try:
                ready = self._selector.select(_IDLE_SECONDS / 4 if self._clients else None)
                begun = time.monotonic()
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fd in self._clients:
                        client = self._clients[key.fd]
                        (self._answer if key.events == selectors.EVENT_WRITE else self._receive)(client)
                now = time.monotonic()
                for client in list(self._clients.values()):
                    client.since = min(now, client.since + now - begun)  # it waited for the commands of others
                    if client.since < now - _IDLE_SECONDS:
                        self._drop(client)
            except Exception:  # noqa: BLE001 - whatever it was, others are served
                _log.exception(
                    "control: an internal error closed all connections; clients may connect again; report this"
                )
                for client in list(self._clients.values()):
                    self._drop(client)
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the client has hung up
            return
        except OSError as error:  # the listener stays readable: without a pause this would spin
            if not self._is_short:
                _log.error(
                    "control: no connection could be accepted, clients wait: %s; check ulimit -n", error.strerror
                )
            self._is_short = True
            time.sleep(_PAUSE)
            return
        self._is_short = False
        connection.setblocking(False)
        client = _Client(connection, time.monotonic())
        self._clients[connection.fileno()] = client
        self._selector.register(connection, selectors.EVENT_READ)
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.geteuid():
            self._refuse(client, f"expected the engine's user, {os.geteuid()}, got {user}")
        elif len(self._clients) > _MOST_CLIENTS:
            self._refuse(client, f"expected at most {_MOST_CLIENTS} clients at a time; try again")
        self._answer(client)

    def _receive(self, client: _Client) -> None:
        try:
            more = client.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        client.received += more
        client.ends = not more
        self._answer(client)

    def _answer(self, client: _Client) -> None:
        """Answer one request after the other; the next one when the client has taken the answer to the one before."""
        try:
            while True:
                while client.unsent:
                    del client.unsent[: client.connection.send(client.unsent)]
                    client.since = time.monotonic()
                if b"\n" in client.received:
                    line, _, client.received = client.received.partition(b"\n")
                    client.unsent += _encode(self._commands.answer(line))
                elif len(client.received) > MOST_BYTES:
                    self._refuse(client, f"expected a request of at most {MOST_BYTES} bytes")
                else:
                    break
        except BlockingIOError:
            self._selector.modify(client.connection, selectors.EVENT_WRITE)
            return
        except OSError:
            client.ends = True
        if client.ends:
            self._drop(client)
        else:
            self._selector.modify(client.connection, selectors.EVENT_READ)

    def _refuse(self, client: _Client, reason: str) -> None:
        """The last answer to a client."""
        client.received.clear()
        client.ends = True
        client.unsent += _encode({"error": CommandError.__name__, "message": reason})

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.connection.fileno(), None)
        with contextlib.suppress(KeyError, ValueError, OSError):
            self._selector.unregister(client.connection)
        client.connection.close()


def _encode(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


_servers: weakref.WeakSet[ControlServer] = weakref.WeakSet()


def _forget_all() -> None:
    for server in list(_servers):
        server.forget()


os.register_at_fork(after_in_child=_forget_all)


def ask(path: Path, request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """Send a command to the engine that listens at `path`; its answer.

    Raises `CommandError`, or the engine's own error as one, which says what it was; never waits longer than `timeout`
    seconds for each step.
    """
    deadline = time.monotonic() + timeout
    answer = bytearray()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout)
            while (failed := connection.connect_ex(str(path))) == errno.EAGAIN:  # as many clients as can wait
                if time.monotonic() > deadline:
                    raise TimeoutError
                time.sleep(_NAP)
            if failed:
                raise OSError(failed, os.strerror(failed))
            connection.sendall(json.dumps(request).encode() + b"\n")
            while not answer.endswith(b"\n"):
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
                more = connection.recv(1 << 16)
                if not more:
                    raise CommandError(
                        f"{path}: the engine closed the connection: it ended, or is closing; see its log"
                    )
                answer += more
    except FileNotFoundError:
        running = sorted(each.stem for each in path.parent.glob("*.ctl"))
        raise CommandError(
            f"{path}: no such socket. Engines with one: {', '.join(running) or 'none'}; an engine has one if its "
            "setting control names it"
        ) from None
    except ConnectionRefusedError:
        if not path.is_socket():
            raise CommandError(f"{path}: not a socket: expected the engine's setting control") from None
        raise CommandError(f"{path}: nobody listens: the engine was killed. Start it again") from None
    except TimeoutError:
        raise CommandError(
            f"{path}: no answer within {timeout:g} s: the engine is stopped or very busy. Whether the command will be "
            "carried out is not known"
        ) from None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from None
    try:
        found = json.loads(answer)
        if "error" in found:
            raise CommandError(f"{found['error']}: {found['message']}")
        return dict(found["ok"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CommandError(f"{path}: expected an answer of Longshore, got {bytes(answer[:40])!r}") from None
