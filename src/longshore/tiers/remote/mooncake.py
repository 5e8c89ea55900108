"""Mooncake Store: its values lie in memory of machines that its master knows, and come from there over TCP.

    mooncake://MASTER:PORT/?metadata=P2PHANDSHAKE      ls1/<namespace>/<key>[.r<rank>]      header, image

    thread ── MooncakeSession ══socket══ process of the client (`mooncake_child.py`) ── master, machines with values
                 arena ═══════ shared memory ═══════╧   the client reads and writes images in place

Mooncake's client takes no deadline: it hangs for seconds when its master dies, and for good when that is stopped. So
each session has a client in a process of its own, which is told keys, offsets and lengths. One that does not answer by
the deadline is killed, and its images end only when it is dead: until then, it may still write to their slots. One
that has died is replaced, as a lost connection is.

Values never expire: Mooncake evicts. They are in memory that other machines give: an engine's process holds none.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from longshore.boundary import PAGE, Status
from longshore.checksums import digest
from longshore.errors import TierError, with_extra
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.arena.memory import create_shared
from longshore.tiers.remote.format import HEADER_BYTES, pack_header, verify
from longshore.tiers.remote.settings import RemoteSettings
from longshore.tiers.remote.work import Image, Refusal, StoreError, WorkQueue

if find_spec("mooncake") is None:
    raise TierError(f"stores at mooncake:// need mooncake-transfer-engine-non-cuda: {with_extra('mooncake')}")
try:
    ctypes.CDLL("libibverbs.so.1")  # loaded by the client, which uses it for RDMA
except OSError as missing:
    raise TierError(
        f"stores at mooncake:// need libraries of the system ({missing}): apt-get install libibverbs1 libnl-3-200 "
        "libnl-route-3-200, or rdma-core"
    ) from None

_PROGRAM = (sys.executable, "-P", str(Path(__file__).with_name("mooncake_child.py")))

_MOST = 512
"""Values in one call of the client."""

_NOTHING = b"ls1/nothing"
"""A key that nobody stores."""

_NOT_THERE, _THERE_ALREADY, _NO_ROOM, _NO_MASTER = -704, -705, -200, -900
"""Mooncake's codes."""

_STORED = {0: Status.OK, _THERE_ALREADY: Status.OK, _NO_ROOM: Status.NO_SPACE}

_AT_ONCE = 1 << 16


class MooncakeSession:
    """One thread's client, in a process. Methods raise `StoreError` where Mooncake cannot be used.

    Attributes:
        pid: The client's process id.
    """

    def __init__(self, settings: RemoteSettings, clock: Callable[[], float], arena: Arena, largest: int) -> None:
        """Start the process, and connect, in `connect_timeout`. `largest` is the length of values in bytes, at most."""
        self._clock = clock
        self._arena = arena
        self._largest = largest
        self._in_flight = settings.in_flight
        self._write_timeout = settings.write_timeout
        self._owner = os.getpid()
        deadline = clock() + settings.connect_timeout
        local = _address_towards(settings)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self._sock, other = socket.socketpair()
            theirs.callback(other.close)
            undo.callback(self._sock.close)
            headers = create_shared(_MOST * HEADER_BYTES)
            theirs.callback(os.close, headers)
            self._headers = mmap.mmap(headers, _MOST * HEADER_BYTES)
            undo.callback(self._headers.close)
            numbers = (other.fileno(), arena.fd, arena.nbytes, headers, len(self._headers), self._owner)
            master = f"{settings.host}:{settings.port}"
            self._process = subprocess.Popen(
                [*_PROGRAM, *map(str, numbers), local, settings.metadata, master],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # where it logs each miss as an error; MC_LOG_DIR keeps its log
                pass_fds=(other.fileno(), arena.fd, headers),
                env={"MC_TCP_ENABLE_CONNECTION_POOL": "1", **os.environ},
            )
            self.pid = self._process.pid
            undo.callback(self.close)
            other.close()  # else it would not be seen that the process has ended
            if (said := self._answer(deadline)) != 0:
                what = said if isinstance(said, str) else f"error {said}"
                raise StoreError("refused", f"Mooncake's client cannot be set up ({what})", Status.IO_ERROR)
            undo.pop_all()

    def check(self, deadline: float) -> None:
        """Return if the master answers."""
        self.lengths([_NOTHING], deadline)

    def lengths(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        """The length of the largest value for each that is there, 0 for others: Mooncake is asked for no lengths."""
        return [self._largest if each else 0 for each in self._exist(addresses, deadline)]

    def fetch(self, work: WorkQueue) -> None:
        """Fetch images until none waits."""
        for images in self._calls(work):
            codes = self._call(images[0].deadline, "get", *self._described(images))
            if _NO_MASTER in codes:
                raise _lost()
            for index, (image, code) in enumerate(zip(images, codes, strict=True)):
                work.end(image, self._fetched(index, image, code))

    def store(self, work: WorkQueue, is_bad: Callable[[bytes], bool], refusal: Refusal) -> None:
        """Store images until none waits; those that are there are not sent again, unless known to be bad."""
        for images in self._calls(work):
            deadline, waiting, replaced = images[0].deadline, list[Image](), list[bool]()
            there = self._exist([each.address for each in images], deadline)
            for image, is_there in zip(images, there, strict=True):
                bad = is_bad(image.address)
                if is_there and not bad:
                    work.end(image, Status.OK)
                elif (refused := refusal(HEADER_BYTES + len(image.memory))) is not None:
                    work.end(image, refused)
                else:
                    start = len(waiting) * HEADER_BYTES
                    self._headers[start : start + HEADER_BYTES] = pack_header(image.identity, image.memory)
                    waiting.append(image)
                    replaced.append(bad)
            if not waiting:
                continue
            codes = self._call(deadline, "put", *self._described(waiting), replaced)
            if _NO_MASTER in codes:
                raise _lost()
            for image, code in zip(waiting, codes, strict=True):
                work.end(image, _STORED.get(code, Status.UNAVAILABLE))

    def headers(self, count: int) -> tuple[list[bytes], list[str]]:
        """Nothing: Mooncake lists no keys."""
        return [], []

    def remove(self, namespace: bytes) -> None:
        """Remove all values of `namespace`."""
        if self._call(self._clock() + self._write_timeout, "remove", f"ls1/{namespace.hex()}/.*")[0] < 0:
            raise _lost()

    def is_stale(self) -> bool:
        """Whether the idle process has ended."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(0))

    def shut_down(self) -> None:
        """Kill the process, so that the call under way ends."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process, and wait until it is dead: after that, it writes to no slot any more."""
        self._sock.close()
        self._headers.close()
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.wait()

    def _calls(self, work: WorkQueue) -> Iterator[list[Image]]:
        """Images for one call each, held by the caller: of one deadline, because that of a call holds for all of it."""
        while (image := work.take()) is not None:
            images, room = [image], self._in_flight - len(image.memory)
            while len(images) < _MOST and (more := work.take(room, image.deadline)) is not None:
                images.append(more)
                room -= len(more.memory)
            while images:  # each key once in a call: of equal keys, Mooncake reads only one
                unique = {each.address: each for each in images}
                yield list(unique.values())
                images = [each for each in images if unique[each.address] is not each]

    def _fetched(self, index: int, image: Image, code: int) -> Status:
        """How a read ended."""
        expected = HEADER_BYTES + len(image.memory)
        if code == expected:
            start = index * HEADER_BYTES
            return verify(self._headers[start : start + HEADER_BYTES], digest(image.memory), image.identity)
        if code >= 0:
            return Status.SHORT if code < expected else Status.MISMATCH
        return Status.EXPIRED if code == _NOT_THERE else Status.UNAVAILABLE

    def _described(self, images: Sequence[Image]) -> tuple[list[str], list[int], list[int]]:
        """Keys, and where in the arena their images are."""
        offsets = [image.batch.ops[image.index].offset for image in images]
        return [image.address.decode() for image in images], offsets, [len(image.memory) for image in images]

    def _exist(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        codes = self._call(deadline, "exist", [each.decode() for each in addresses])
        if min(codes, default=0) < 0:
            raise _lost()
        return codes

    def _call(self, deadline: float, *order: object) -> list[int]:
        """Mooncake's codes for an order. Raises `StoreError` without any by `deadline`: then the process must die."""
        try:
            self._sock.settimeout(self._left(deadline))
            self._sock.sendall(json.dumps(order).encode() + b"\n")
        except TimeoutError:
            raise _late() from None
        except OSError:
            raise _died() from None
        codes: list[int] = self._answer(deadline)
        return codes

    def _answer(self, deadline: float) -> Any:
        said = bytearray()
        while not said.endswith(b"\n"):
            try:
                self._sock.settimeout(self._left(deadline))
                data = self._sock.recv(_AT_ONCE)
            except TimeoutError:
                raise _late() from None
            except OSError:
                raise _died() from None
            if not data:
                raise _died()
            said += data
        return json.loads(said)

    def _left(self, deadline: float) -> float | None:
        if (seconds := deadline - self._clock()) <= 0:
            raise TimeoutError
        return seconds if seconds < math.inf else None


class MooncakeStore:
    """What a master of Mooncake knows of."""

    threads = 1
    """For each direction: the client itself has many."""

    def __init__(
        self, settings: RemoteSettings, clock: Callable[[], float], arena: Arena, image_bytes: Sequence[int]
    ) -> None:
        """Raises `TierError` if `arena` is not shared: another process reads and writes it."""
        self._settings = settings
        self._clock = clock
        self._arena = arena
        self._largest = HEADER_BYTES + max(image_bytes)
        _ = arena.fd

    def connect(self) -> MooncakeSession:
        """A session of one thread, with a process of its own. Raises `StoreError`."""
        return MooncakeSession(self._settings, self._clock, self._arena, self._largest)


@contextlib.contextmanager
def open_session(settings: RemoteSettings) -> Iterator[MooncakeSession]:
    """A session that moves no images, to check and to remove. Raises `StoreError`."""
    with contextlib.ExitStack() as undo:
        arena = undo.enter_context(contextlib.closing(Arena(PAGE, ArenaSettings(shared=True))))
        store = MooncakeStore(settings, time.monotonic, arena, [PAGE])
        yield undo.enter_context(contextlib.closing(store.connect()))


def _address_towards(settings: RemoteSettings) -> str:
    """Our address as the master sees it. Raises `StoreError` if nobody listens there: it costs no process."""
    try:
        with socket.create_connection((settings.host, settings.port), settings.connect_timeout) as sock:
            return str(sock.getsockname()[0])
    except TimeoutError:
        raise StoreError("timeout", "the master does not answer", Status.DEADLINE) from None
    except OSError as error:
        raise StoreError("connection", f"could not connect to the master ({error.strerror or error})") from None


def _lost() -> StoreError:
    return StoreError("connection", "the master cannot be reached")


def _late() -> StoreError:
    return StoreError("timeout", "Mooncake's client does not answer", Status.DEADLINE)


def _died() -> StoreError:
    return StoreError("connection", "the process of Mooncake's client has ended")
