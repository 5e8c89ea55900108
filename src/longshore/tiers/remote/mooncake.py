"""Mooncake Store: its values lie in memory of machines that its master knows, and come from there over TCP.

    mooncake://MASTER:PORT/?metadata=P2PHANDSHAKE      ls1/<namespace>/<key>[.r<rank>]      header, image

    thread ── MooncakeSession ══socket══ process of the client (`mooncake_child.py`) ── master, machines with values
                 arena ═══════ shared memory ═══════╧   the client reads and writes images in place, but for
                 small images ◄─► buffer ═══════════╧   small ones: those are one range with their headers

Mooncake's client takes no deadline: it hangs for seconds when its master dies, and for good when that is stopped. So
each session has a client in a process of its own, which is told keys, offsets and lengths. One that does not answer by
the deadline is killed, and its images end only when it is dead: until then, it may still write to their slots. One
that has died is replaced, as a lost connection is.

Values never expire: Mooncake evicts. They are in memory that other machines give: an engine's process holds none.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from longshore.boundary import DISK_PAGE, Status
from longshore.checksums import digest
from longshore.errors import TierError, with_extra
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.arena.memory import create_shared
from longshore.tiers.base import Op
from longshore.tiers.remote.format import HEADER_BYTES, pack_header, verify
from longshore.tiers.remote.settings import RemoteSettings
from longshore.tiers.remote.work import Image, Refusal, RemoteError, WorkQueue

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

_CALLS = 2
"""Calls that wait or run at a time: values of one are checked, or prepared, while the client executes the other."""

_SMALL, _BUFFER_BYTES = 512 << 10, 8 << 20
"""Images of up to so many bytes pass through a buffer with their headers, so much of them in one call: header and image
in places of their own cost Mooncake two transfers, which takes a quarter more time for values of 256 KiB, and a call
costs it about two milliseconds of CPU time."""

_HEADERS = _MOST * HEADER_BYTES
_AREA = _HEADERS + _BUFFER_BYTES
"""Memory of one call, beside the arena: headers first, one after the other; or whole values."""

_NOTHING = b"ls1/nothing"
"""A key that nobody stores."""

_NOT_THERE, _THERE_ALREADY, _NO_ROOM, _NO_MASTER = -704, -705, -200, -900
"""Mooncake's codes."""

_STORED = {0: Status.OK, _THERE_ALREADY: Status.OK, _NO_ROOM: Status.NO_SPACE}

_AT_ONCE = 1 << 16


class MooncakeSession:
    """One thread's client, in a process. Methods raise `RemoteError` where Mooncake cannot be used.

    Attributes:
        pid: The client's process id.
    """

    def __init__(self, settings: RemoteSettings, clock: Callable[[], float], arena: Arena, largest: int) -> None:
        """Start the process, and connect, in `connect_timeout`. `largest` is the length of values in bytes, at most."""
        self._clock = clock
        self._arena = arena
        self._largest = largest
        self._in_flight = settings.in_flight
        self._said = bytearray()
        """What has come of answers, and was not taken."""
        self._write_timeout = settings.write_timeout
        self._owner = os.getpid()
        deadline = clock() + settings.connect_timeout
        local = _address_towards(settings)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self._sock, other = socket.socketpair()
            theirs.callback(other.close)
            undo.callback(self._sock.close)
            memory = create_shared(_CALLS * _AREA)
            theirs.callback(os.close, memory)
            self._memory = mmap.mmap(memory, _CALLS * _AREA)
            undo.callback(self._memory.close)
            numbers = (other.fileno(), arena.fd, arena.nbytes, memory, len(self._memory), self._owner)
            master = f"{settings.host}:{settings.port}"
            lifeline = () if arena.lifeline is None else (arena.lifeline,)
            self._process = subprocess.Popen(
                [*_PROGRAM, *map(str, numbers), local, settings.metadata, master],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # where it logs each miss as an error; MC_LOG_DIR keeps its log
                pass_fds=(other.fileno(), arena.fd, memory, *lifeline),
                env={"MC_TCP_ENABLE_CONNECTION_POOL": "1", **os.environ},
            )
            self.pid = self._process.pid
            undo.callback(self.close)
            other.close()  # else it would not be seen that the process has ended
            if (said := self._answer(deadline)) != 0:
                what = said if isinstance(said, str) else f"error {said}"
                raise RemoteError("refused", f"Mooncake's client cannot be set up ({what})", Status.IO_ERROR)
            undo.pop_all()

    def check(self, deadline: float) -> None:
        """Return if the master answers."""
        self.lengths([_NOTHING], deadline)

    def lengths(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        """The length of the largest value for each that is there, 0 for others: Mooncake is asked for no lengths."""
        return [self._largest if each else 0 for each in self._exist(addresses, deadline)]

    def fetch(self, work: WorkQueue) -> None:
        """Fetch images until none waits."""
        under_way: deque[_BatchCall] = deque()
        again: list[Image] = []
        areas = itertools.cycle(range(0, _CALLS * _AREA, _AREA))
        while True:
            while len(under_way) < _CALLS:
                # of one deadline: a client that is late is killed, with all that it was asked for
                deadline = under_way[0].deadline if under_way else None
                if not (images := self._next_call(work, again, deadline)):
                    break
                under_way.append(read := _BatchCall(images, next(areas)))
                self._order(read.deadline, *self._described(read, "read", "get"))
            if not under_way:
                return
            codes = self._codes(under_way[0].deadline)
            read = under_way.popleft()
            for image, at, code in zip(read.images, read.places(), codes, strict=True):
                work.end(image, self._fetched(image, at, code, is_small=read.is_small))

    def store(self, work: WorkQueue, is_bad: Callable[[bytes], bool], refusal: Refusal) -> None:
        """Store images until none waits; those that are there are not sent again, unless known to be bad."""
        again: list[Image] = []
        under_way: deque[_BatchCall] = deque()

        def end_oldest() -> None:
            codes, write = self._codes(under_way[0].deadline), under_way.popleft()
            for image, code in zip(write.images, codes, strict=True):
                work.end(image, _STORED.get(code, Status.UNAVAILABLE))

        while images := self._next_call(work, again):
            waiting, bad = list[Image](), {each.address for each in images if is_bad(each.address)}
            there = self._exist([each.address for each in images], _soonest(images))
            for image, is_there in zip(images, there, strict=True):
                if is_there and image.address not in bad:
                    work.end(image, Status.OK)
                elif (refused := refusal(HEADER_BYTES + len(image.memory))) is not None:
                    work.end(image, refused)
                else:
                    waiting.append(image)
            for part, area in zip(_parts(waiting), itertools.cycle(range(0, _CALLS * _AREA, _AREA)), strict=False):
                if len(under_way) == _CALLS:
                    end_oldest()
                under_way.append(write := _BatchCall(part, area))
                self._prepare(write)
                replaced = [image.address in bad for image in part]
                self._order(write.deadline, *self._described(write, "write", "put"), replaced)
            while under_way:
                end_oldest()

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
        if os.getpid() == self._owner:
            self._process.kill()
            self._process.wait()
        self._sock.close()
        with contextlib.suppress(BufferError):  # the traceback of an exception may refer to a part of it
            self._memory.close()

    def _next_call(self, work: WorkQueue, again: list[Image], deadline: float | None = None) -> list[Image]:
        """Images for one call, held by the caller: of one deadline, because that of a call holds for all of it.

        `again` are those that were taken for an earlier call, and have a key that was in it already. Late ones end: a
        call that has no time left would have the client killed.
        """
        images = [each for each in again if self._clock() < each.deadline]
        for each in again:
            if each not in images:
                work.end(each, Status.DEADLINE)
        again.clear()
        if not images and (image := work.take(math.inf, deadline)) is not None:
            images = [image]
            small = work.op is Op.READ and len(image.memory) <= _SMALL  # what is written is divided once it is known
            room = (min(self._in_flight, _BUFFER_BYTES) if small else self._in_flight) - len(image.memory)
            while len(images) < _MOST and (more := work.take(room, image.deadline)) is not None:
                images.append(more)
                room -= len(more.memory)
        unique = {each.address: each for each in images}  # of equal keys, Mooncake reads only one
        again += [each for each in images if unique[each.address] is not each]
        return list(unique.values())

    def _fetched(self, image: Image, at: int, code: int, *, is_small: bool) -> Status:
        """How a read ended, whose header is at `at`, and its image after it if it `is_small`."""
        expected = HEADER_BYTES + len(image.memory)
        if code == expected:
            with memoryview(self._memory)[at : at + expected] as value, value[HEADER_BYTES:] as behind:
                found = behind if is_small else image.memory
                status = verify(bytes(value[:HEADER_BYTES]), digest(found), image.identity)
                if is_small and status is Status.OK:
                    image.memory[:] = found
                return status
        if code >= 0:
            return Status.SHORT if code < expected else Status.MISMATCH
        return Status.NOT_FOUND if code == _NOT_THERE else Status.UNAVAILABLE

    def _prepare(self, write: _BatchCall) -> None:
        """Put headers into the buffer, and behind each its image if they are small."""
        for image, at in zip(write.images, write.places(), strict=True):
            behind = at + HEADER_BYTES
            if write.is_small:
                self._memory[behind : behind + len(image.memory)] = image.memory
                with memoryview(self._memory)[behind : behind + len(image.memory)] as copied:
                    self._memory[at:behind] = pack_header(image.identity, copied)
            else:
                self._memory[at:behind] = pack_header(image.identity, image.memory)

    @staticmethod
    def _described(call: _BatchCall, small: str, large: str) -> tuple[object, ...]:
        """An order for the values of `call`, which is `small` if they lie in the buffer as a whole, else `large`."""
        names = [image.address.decode() for image in call.images]
        if call.is_small:
            return small, names, call.places(), [HEADER_BYTES + len(image.memory) for image in call.images]
        offsets = [image.batch.ops[image.index].offset for image in call.images]
        return large, names, offsets, [len(image.memory) for image in call.images], call.area

    def _exist(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        codes = self._call(deadline, "exist", [each.decode() for each in addresses])
        if min(codes, default=0) < 0:
            raise _lost()
        return codes

    def _call(self, deadline: float, *order: object) -> list[int]:
        """Mooncake's codes for an order. Raises `RemoteError` without any by `deadline`: then the process must die."""
        self._order(deadline, *order)
        codes: list[int] = self._answer(deadline)
        return codes

    def _codes(self, deadline: float) -> list[int]:
        """Mooncake's codes for the oldest order of values without an answer; raises `RemoteError` as `_call` does."""
        codes: list[int] = self._answer(deadline)
        if _NO_MASTER in codes:
            raise _lost()
        return codes

    def _order(self, deadline: float, *order: object) -> None:
        try:
            self._sock.settimeout(self._left(deadline))
            self._sock.sendall(json.dumps(order).encode() + b"\n")
        except (TimeoutError, BlockingIOError):
            raise _late() from None
        except OSError:
            raise _died() from None

    def _answer(self, deadline: float) -> Any:
        """The answer to the oldest order without one."""
        while (end := self._said.find(b"\n")) < 0:
            try:
                self._sock.settimeout(self._left(deadline))
                data = self._sock.recv(_AT_ONCE)
            except (TimeoutError, BlockingIOError):
                raise _late() from None
            except OSError:
                raise _died() from None
            if not data:
                raise _died()
            self._said += data
        answer = bytes(self._said[:end])
        del self._said[: end + 1]
        return json.loads(answer)

    def _left(self, deadline: float) -> float | None:
        """For how long a call on the socket may block; 0 after the deadline: an answer that has come is taken."""
        seconds = max(0.0, deadline - self._clock())
        return seconds if seconds < math.inf else None


class _BatchCall(NamedTuple):
    """A call that reads or writes `images`, with memory from `area` on."""

    images: list[Image]
    area: int

    @property
    def is_small(self) -> bool:
        """Whether whole values are in the buffer."""
        lengths = [len(image.memory) for image in self.images]
        return max(lengths) <= _SMALL and sum(lengths) <= _BUFFER_BYTES

    @property
    def deadline(self) -> float:
        """When it must have ended; a clock reading in seconds."""
        return _soonest(self.images)

    def places(self) -> list[int]:
        """Where the header of each value is; its image follows it if they are small."""
        lengths = [HEADER_BYTES + len(image.memory) * self.is_small for image in self.images]
        return list(itertools.accumulate(lengths[:-1], initial=self.area))


def _soonest(images: Sequence[Image]) -> float:
    return min(image.deadline for image in images)


def _parts(images: Sequence[Image]) -> Iterator[list[Image]]:
    """Images to write in calls of their own: as many small ones as the buffer has room for, or all others together."""
    for is_small, same in itertools.groupby(images, lambda image: len(image.memory) <= _SMALL):
        part, nbytes = list[Image](), 0
        for image in same:
            nbytes += len(image.memory)
            if is_small and part and nbytes > _BUFFER_BYTES:
                yield part
                part, nbytes = [], len(image.memory)
            part.append(image)
        yield part


class MooncakeClient:
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
        """A session of one thread, with a process of its own. Raises `RemoteError`."""
        return MooncakeSession(self._settings, self._clock, self._arena, self._largest)


@contextlib.contextmanager
def open_session(settings: RemoteSettings) -> Iterator[MooncakeSession]:
    """A session that moves no images, to check and to remove. Raises `RemoteError`."""
    with contextlib.ExitStack() as undo:
        arena = undo.enter_context(contextlib.closing(Arena(DISK_PAGE, ArenaSettings(shared=True))))
        store = MooncakeClient(settings, time.monotonic, arena, [DISK_PAGE])
        yield undo.enter_context(contextlib.closing(store.connect()))


def _address_towards(settings: RemoteSettings) -> str:
    """Our address as the master sees it. Raises `RemoteError` if nobody listens there: it costs no process."""
    try:
        with socket.create_connection((settings.host, settings.port), settings.connect_timeout) as sock:
            return str(sock.getsockname()[0])
    except TimeoutError:
        raise RemoteError("timeout", "the master does not answer", Status.DEADLINE) from None
    except OSError as error:
        raise RemoteError("connection", f"could not connect to the master ({error.strerror or error})") from None


def _lost() -> RemoteError:
    return RemoteError("connection", "the master cannot be reached")


def _late() -> RemoteError:
    return RemoteError("timeout", "Mooncake's client does not answer", Status.DEADLINE)


def _died() -> RemoteError:
    return RemoteError("connection", "the process of Mooncake's client has ended")
