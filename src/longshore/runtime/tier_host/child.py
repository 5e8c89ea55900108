"""The tier host, the process of one file tier or store: `python -m longshore.runtime.tier_host.child FD`.

Only a `HostedTier` starts it. The host tier (chunks in host memory, the arena) is not in it: it maps that memory.

    standard input   requests                  FD   the host arena's memory
    standard output  replies

While there is work, a separate thread reports that the process is alive, also while the others wait for a slow or hung
disk.

The process ends at the end of its input, or with the engine: processes that the engine has forked may keep the pipe
open. It ignores signals meant for the engine: a terminal's interrupt goes to all processes, and the engine may still
have blocks to write.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from array import array
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from longshore import __version__
from longshore.boundary import StoredChunks
from longshore.errors import LongshoreError, TierError, TierInUseError
from longshore.runtime.tier_host import wire
from longshore.runtime.tier_host.wire import AWAY, Kind, frame
from longshore.tiers.arena import Arena
from longshore.tiers.file import FileTier
from longshore.tiers.remote import ClusterTier, RemoteTier, open_store

LOCK_TIMEOUT = 10.0
"""Seconds to wait for the directory's lock: the tier host of a killed engine may still have it."""

_LOOK = 0.02
"""Seconds between two checks of deadlines while anything is in flight."""

_LOOK_FOR = 0.5
"""The same while nothing is in flight, of a store that is away."""

HEARTBEAT = 1.0
"""Seconds between two ALIVE messages."""

_PIPE_READ_BYTES = 1 << 20

OpenRequest = Mapping[str, Any]
StoreTier = RemoteTier | ClusterTier


class TierHostServer:
    """Executes requests until the end of the input."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = requests
        self._replies = replies
        self._frames = wire.Frames()
        self._tickets: dict[int, int] = {}
        """The engine's tickets, by the file tier's."""
        self._reported: dict[str, int] = {}
        self._asked: dict[int, int] = {}
        """The same of what a store was asked."""
        self._tier: FileTier | StoreTier | None = None
        self._ended = os.eventfd(0)
        """Counts batches that have ended."""
        self._engine = list[int]()
        """A descriptor that is readable once the engine has ended; none where the kernel has none."""
        with contextlib.suppress(OSError):
            self._engine.append(os.pidfd_open(os.getppid()))
        self._send_lock = threading.Lock()
        self._busy = threading.Event()
        """Set while there is work whose result the engine waits for."""

    def run(self, memory: int) -> int:
        """Open the tier of the first request, and serve; returns the exit status."""
        open_request = self._read_open_request()
        if open_request is None:
            return 0
        self._busy.set()
        threading.Thread(target=self._heartbeat, name="longshore-beat", daemon=True).start()
        try:
            arena = Arena.attach(memory, open_request["arena_bytes"])
            os.close(memory)
            arena.lifeline = self._replies  # its end tells the engine that nobody writes to the arena any more
            tier = self._tier = open_tier(open_request, arena)
        except LongshoreError as error:
            self._send(Kind.REFUSED, wire.pack_json([type(error).__name__, str(error)]))
            return 1
        try:
            self._serve(tier, recover=open_request["recover"])
        finally:
            tier.close()
        self._report(tier)
        return 0

    def _read_open_request(self) -> OpenRequest | None:
        while data := os.read(self._requests, _PIPE_READ_BYTES):
            for _, body in self._frames.feed(data):
                open_request: OpenRequest = json.loads(body)
                return open_request
        return None

    def _serve(self, tier: FileTier | StoreTier, *, recover: bool) -> None:
        self._reported = failures_of(tier)
        if isinstance(tier, FileTier):
            found = tier.recover() if recover else StoredChunks.of(())
            opened = wire.OpenedReply(
                tier.slabs, tier.generation, dict(tier.fallbacks), self._reported, found, tier.other_scope_slots()
            )
            self._send(Kind.OPENED, wire.pack_opened(opened))
        else:
            self._send(Kind.OPENED, wire.pack_json(self._reported))
        tier.set_completion_callback(partial(os.eventfd_write, self._ended, 1))
        while True:
            is_idle = not self._tickets and not self._asked
            if is_idle:
                self._busy.clear()
            # A store that is away is looked for: when it is back, that is reported without delay.
            timeout = (_LOOK_FOR if failures_of(tier).get(AWAY) else None) if is_idle else _LOOK
            ready = select.select([self._requests, self._ended, *self._engine], [], [], timeout)[0]
            if self._ended in ready:
                os.eventfd_read(self._ended)
            if self._requests in ready:
                self._busy.set()
                data = os.read(self._requests, _PIPE_READ_BYTES)
                if not data:
                    return
                for kind, body in self._frames.feed(data):
                    self._execute(tier, kind, body)
            elif any(each in ready for each in self._engine):
                return
            self._report(tier)

    def _execute(self, tier: FileTier | StoreTier, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.SUBMIT:
                ticket, deadline, ops = wire.parse_submit(body)
                self._tickets[tier.submit(ops, deadline)] = ticket
            case Kind.CANCEL:
                (theirs,) = wire.NUMBER.unpack(body)
                for own in [own for own, ticket in self._tickets.items() if ticket == theirs]:
                    tier.cancel(own)
            case Kind.ASK if isinstance(tier, StoreTier):
                ticket, generation, deadline, keys = wire.parse_ask(body)
                self._asked[tier.ask(keys, generation, deadline)] = ticket
            case Kind.DELETE_RECORDS:
                tier.delete_records(array("I", body).tolist())
            case Kind.RESET:
                self._send(Kind.RESET_DONE, _reset(tier, *wire.RESET.unpack(body)).encode())
            case _:
                raise TierError(f"{kind.name} is not a request")

    def _report(self, tier: FileTier | StoreTier) -> None:
        """Send results, answers, and counts of failures."""
        results = tier.poll()
        answers = tier.answers() if isinstance(tier, StoreTier) else []
        failures = failures_of(tier)
        if failures != self._reported:
            self._reported = failures
            self._send(Kind.FAILURES, wire.pack_json(failures))  # first: a failure is counted before its result arrives
        for result in results:
            self._send(Kind.RESULT, wire.pack_result(result._replace(ticket=self._tickets.pop(result.ticket))))
        for ticket, present in answers:
            self._send(Kind.ANSWER, wire.pack_answer(self._asked.pop(ticket), present))

    def _heartbeat(self) -> None:
        """Report that this process is alive, and how many operations have ended; its thread never waits for a disk."""
        with contextlib.suppress(OSError):  # the engine has ended
            while True:
                self._busy.wait()
                self._send(Kind.ALIVE, wire.NUMBER.pack(0 if self._tier is None else self._tier.completed))
                time.sleep(HEARTBEAT)

    def _send(self, kind: Kind, body: bytes) -> None:
        with self._send_lock:
            left = memoryview(frame(kind, body))
            while left:
                left = left[os.write(self._replies, left) :]


def failures_of(tier: FileTier | StoreTier) -> dict[str, int]:
    """Its counts of failures; of a store also whether it is away."""
    away = {AWAY: int(tier.is_unavailable)} if isinstance(tier, StoreTier) else {}
    return {**tier.failures, **away}


def open_tier(open_request: OpenRequest, arena: Arena) -> FileTier | StoreTier:
    """The tier that OPEN describes. Raises as that does, and `TierError` if the engine runs another version."""
    if open_request["version"] != __version__:
        raise TierError(
            f"the engine runs Longshore {open_request['version']}, but {__version__} is installed: restart the engine"
        )
    scope = bytes.fromhex(open_request["scope"])
    if "url" in open_request:
        generation, name, sizes = open_request["generation"], open_request["name"], open_request["image_bytes"]
        return open_store(
            open_request["url"], arena=arena, image_bytes=sizes, namespace=scope, generation=generation, name=name
        )
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            tier = FileTier(
                Path(open_request["directory"]),
                capacity=open_request["capacity"],
                image_bytes=open_request["image_bytes"],
                arena=arena,
                scope=scope,
                threads=open_request["threads"],
            )
            break
        except TierInUseError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)
    with contextlib.ExitStack() as undo:
        undo.callback(tier.close)
        tier.reset(open_request["generation"])
        undo.pop_all()
    return tier


def _reset(tier: FileTier | StoreTier, generation: int, scope: bytes) -> str:
    """Store a reset; returns the error message, empty on success."""
    try:
        tier.reset(generation, scope)
    except TierError as error:
        return str(error)
    return ""


def main() -> int:
    """Entry point: uses the standard streams; other output goes to standard error, as does the log."""
    logging.basicConfig(level=logging.WARNING, format="longshore tier host: %(levelname)s: %(message)s")
    logging.getLogger("longshore.tiers.arena").setLevel(logging.ERROR)  # its creator has logged its fallbacks
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    answers = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):  # the engine has ended
        return TierHostServer(0, answers).run(int(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
