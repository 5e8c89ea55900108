"""`RemoteTier`: chunk images in a store that replicas share, with the interface of any remote tier.

    submit ──► reads  ──► thread(s) ── connection ──┐
           ──► writes ──► thread(s) ── connection ──┼── server, or directory        one breaker for all of them
    ask    ──► probes ──► one thread ─ connection ──┘

Probes, reads and writes have a connection each, so none waits behind large values of another kind. The caller never
waits: `poll` and `answers` end what is late, `submit` and `ask` answer at once while the breaker is open.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from longshore.boundary import Key, Status
from longshore.errors import TierClosedError, TierError, log_seldom
from longshore.tiers.arena import Arena
from longshore.tiers.base import (
    KeyedTier,
    Op,
    OpBatch,
    TierOp,
    TierResult,
    check_batch,
    check_question,
)
from longshore.tiers.remote.breaker import FAILURES, CircuitBreaker
from longshore.tiers.remote.directory import DirectoryClient
from longshore.tiers.remote.format import HEADER_BYTES, NO_RANK, Identity, Namespace, address
from longshore.tiers.remote.resp import RespClient
from longshore.tiers.remote.settings import RemoteSettings, parse_url
from longshore.tiers.remote.work import Budget, Image, RemoteClient, RemoteError, Session, WorkQueue

FAILURE_REASONS = (
    *("connection", "timeout", "refused", "broken", "breaker", "full", "budget"),
    *("denied", "clock", "throttled", "server"),
)
"""The reasons counted in `RemoteTier.failures`.

`connection`: it could not be made, or was lost. `timeout`: no answer by a deadline. `refused`: the server answered with
an error, such as a wrong password. `broken`: what came was no reply. `breaker`: how often it has opened. `full`: writes
that the store had no room for. `budget`: writes beyond `daily_writes`. Of S3: `denied`, wrong credentials or no
permission; `clock`, this machine's differs from the server's; `throttled`, too many requests; `server`, a status of
500 or more.
"""

_BAD = 4096
"""Values that were found corrupt, of which the next write is sent though they are there."""

_WRITE_PAUSE = 1.0
"""Seconds for which nothing is sent to a store that has said that it is full, or takes no writes."""

_BAD_VALUES = frozenset({Status.CORRUPT, Status.MISMATCH, Status.SHORT})
_ANSWERED = _BAD_VALUES | {Status.OK, Status.NOT_FOUND, Status.NO_SPACE}
"""Statuses of operations that the store has answered."""

_GRACE = 1.0
"""Seconds beyond its last deadline that a thread is waited for when the tier is closed."""

_SAYS_LITTLE = 10.0
"""Seconds between two warnings about one store."""

_SAYS_ONCE = 3600.0
"""The same for what only a person can change."""

_OF_PEOPLE = frozenset({"denied", "clock"})
_OF_WRITES = frozenset({"refused", "denied", "throttled"})
"""Answers to a write which say nothing of reads."""

_log = logging.getLogger(__name__)


class _PendingProbe:
    """A probe that waits for its answer."""

    __slots__ = ("addresses", "deadline", "ticket")

    def __init__(self, ticket: int, addresses: Sequence[bytes], deadline: float) -> None:
        self.ticket = ticket
        self.addresses = addresses
        self.deadline = deadline


class RemoteTier(KeyedTier):
    """Images in the store at `url`, under `namespace`; see the package for the interface as a whole.

    Nothing is connected here, and no failure of the store raises, here or later: it ends operations.

    Attributes:
        settings: What the URL says.
        counts: How many operations have ended, by kind and status, and probes, by answer.
    """

    def __init__(
        self,
        url: str | RemoteSettings,
        *,
        arena: Arena,
        image_bytes: int | Sequence[int],
        namespace: bytes,
        generation: int = 0,
        rank: int | None = None,
        fixed_weights: bool = False,
        name: str = "remote",
        failures: int = FAILURES,
        clock: Callable[[], float] = time.monotonic,
        store: RemoteClient | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Raises `ConfigError` for an invalid URL, `TierError` for invalid sizes, digests or certificates.

        `image_bytes` are the sizes of images, by size class. `namespace` is a digest of 32 bytes: of everything that
        must be equal for bytes to be shared. `generation` is that of the first operations. `rank` is set where each
        rank stores its own part of an image. With `fixed_weights`, resets keep the namespace, unless `weights_changed`
        was called. `failures` in a row open the breaker. `store` replaces the client, `budget` that of `daily_writes`.
        """
        self.settings = parse_url(url) if isinstance(url, str) else url
        self.image_bytes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
        if not self.image_bytes or min(self.image_bytes) <= 0:
            raise TierError(f"expected sizes of images in bytes, got {self.image_bytes}")
        if rank is not None and not 0 <= rank < NO_RANK:
            raise TierError(f"expected a rank in [0, {NO_RANK}), got {rank}")
        self.name = name
        self.counts: Counter[tuple[str, str]] = Counter()
        self._rank = NO_RANK if rank is None else rank
        self._name = Namespace(namespace, generation, fixed_weights=fixed_weights)
        self._arena = arena
        self._clock = clock
        self._lock = threading.RLock()
        self._breaker = CircuitBreaker(failures)
        self._failures = dict.fromkeys(FAILURE_REASONS, 0)
        self._budget = budget or Budget(self.settings.daily_writes, clock)
        self._bad: OrderedDict[bytes, None] = OrderedDict()
        self._said_at, self._said = -1.0, ""
        self._pause: tuple[float, Status] = -1.0, Status.NO_SPACE
        """Until when writes end at once, and how."""
        self._tickets = 0
        self._open: dict[int, OpBatch] = {}
        self._results: list[TierResult] = []
        self._asked: deque[_PendingProbe] = deque()
        self._asking: _PendingProbe | None = None
        self._is_stuck = False
        """Whether the thread for probes has not come back from one that is late."""
        self._answers: list[tuple[int, tuple[bool, ...] | None]] = []
        self._probing = threading.Condition(self._lock)
        self._closed = False
        self._pid = os.getpid()
        self._on_batch_end: Callable[[], None] | None = None
        self.completed = 0
        self._store = store = open_client(self.settings, clock, arena, self.image_bytes) if store is None else store
        self._queues = {op: WorkQueue(op, self._lock, clock, self._image_ended) for op in Op}
        self._sessions: set[Session] = set()
        """Sessions that are open, of all threads."""
        self._threads = [
            *(self._start(self._move, queue) for queue in self._queues.values() for _ in range(store.threads)),
            self._start(self._probe),
        ]

    # ------------------------------------------------------------------ the tier

    @property
    def generation(self) -> int:
        """The generation last given to `reset`, or to the constructor."""
        return self._name.generation

    @property
    def namespace(self) -> bytes:
        """Under which images are stored now."""
        return self._name.current

    @property
    def is_unavailable(self) -> bool:
        """Whether the breaker is open."""
        return self._breaker.is_open

    @property
    def failures(self) -> Mapping[str, int]:
        """Number of failures, by one of `FAILURE_REASONS`."""
        with self._lock:
            return {**self._failures, "breaker": self._breaker.opened}

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Begin `batch`. An operation *ends* by `deadline`, and by the store's own timeout from now.

        Raises `TierError` for a generation that was never given to `reset`: such bytes would be shared under the
        namespace of other weights.
        """
        self._check_open()
        nbytes = self._arena.array.nbytes
        sizes, last = self.image_bytes, self.generation
        check_batch(batch, deadline, slabs=None, image_bytes=sizes, arena_bytes=nbytes, last_reset=last)
        views = [self._arena.view(op.offset, op.length) for op in batch]
        with self._lock:
            self._tickets += 1
            now = self._clock()
            state = OpBatch(self._tickets, batch, deadline, now)
            self._open[state.ticket] = state
            limits = {Op.READ: self.settings.fetch_timeout, Op.WRITE: self.settings.write_timeout}
            waiting: dict[Op, list[Image]] = {op: [] for op in Op}
            for index, (op, view) in enumerate(zip(state.ops, views, strict=True)):
                identity = Identity(self.namespace, op.key, op.length, self._rank)
                until = min(deadline, now + limits[op.op])
                image = Image(state, index, identity, view, until, op.generation)
                status = self._ends_at_once(op, now, until)
                if status is None:
                    waiting[op.op].append(image)
                else:
                    self._count(op.op, status)
                    state.end(index, status, now)
            for kind, images in waiting.items():
                if images:
                    self._queues[kind].put(images)
            self._settle(state)
        return state.ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call; ends what is late."""
        for queue in self._queues.values():
            if late := queue.expire():
                self._failed(RemoteError("timeout", "the store does not answer"), late)
        with self._lock:
            results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """End operations of `ticket` that have not begun."""
        with self._lock:
            if (batch := self._open.get(ticket)) is not None:
                for queue in self._queues.values():
                    queue.cancel(batch)

    def ask(self, keys: Sequence[Key], generation: int, deadline: float) -> int:
        """Ask which of `keys` the store has. The answer comes by `deadline` or the store's probe timeout.

        Images of an earlier generation are not there, and nobody is asked.
        """
        self._check_open()
        check_question(keys, generation, self.generation)
        with self._lock:
            self._tickets += 1
            if generation < self.generation or not keys:
                self._answer(self._tickets, (False,) * len(keys))
            elif self._breaker.is_open:
                self._answer(self._tickets, None)
            else:
                until = min(deadline, self._clock() + self.settings.probe_timeout)
                addresses = [address(self.namespace, each, self._rank) for each in keys]
                self._asked.append(_PendingProbe(self._tickets, addresses, until))
                self._probing.notify()
            return self._tickets

    def answers(self) -> list[tuple[int, tuple[bool, ...] | None]]:
        """Answers since the last call; `None`: it is not known, because the store is away or late."""
        with self._lock:
            now = self._clock()
            for asked in [each for each in self._asked if now >= each.deadline]:
                self._asked.remove(asked)
                self._answer(asked.ticket, None)
                if self._is_stuck:
                    self._failed(RemoteError("timeout", "a probe hangs"))
            if (asking := self._asking) is not None and now >= asking.deadline:
                self._is_stuck = True
                self._unanswered(asking, RemoteError("timeout", "no answer to a probe in time"))
            answers, self._answers = self._answers, []
        return answers

    def reset(self, generation: int, namespace: bytes | None = None) -> None:
        """Serve nothing from before `generation`; from then on, images are those of `namespace`.

        Without one, they are those of the same as before with `fixed_weights`; else, and after `weights_changed`, those
        of a random one that nobody else has: the reset may mean other weights, and nothing says which. An earlier
        generation changes nothing.
        """
        self._check_open()
        with self._lock:
            if not self._name.reset(generation, namespace, self.settings):
                return
            for queue in self._queues.values():
                queue.reset(generation)
            while self._asked:
                asked = self._asked.popleft()
                self._answer(asked.ticket, (False,) * len(asked.addresses))

    def weights_changed(self) -> None:
        """Weights have changed: the next `reset` starts a namespace of its own."""
        self._name.weights_changed()

    def set_completion_callback(self, call: Callable[[], None]) -> None:
        """Set a completion callback: called in any thread when a batch has ended or an answer has come; it is short."""
        self._on_batch_end = call

    def close(self) -> None:
        """Wait for what has begun, until its deadline at most; end the rest; close the connections. Idempotent.

        Connections of threads that are blocked beyond that are shut down. A thread that waits for a file system that
        hangs is left to itself: it uses no byte of the arena, and the operations that it was busy with have ended.

        In a forked child, closes only the child's copies of the connections: threads and locks are the parent's.
        """
        if os.getpid() != self._pid:
            self._closed = True
            for session in self._sessions:
                session.close()
            return
        with self._lock:
            self._closed = True
            for queue in self._queues.values():
                queue.stop()
            while self._asked:
                self._answer(self._asked.popleft().ticket, None)
            self._probing.notify_all()
        settings = self.settings
        write = settings.probe_timeout + settings.write_timeout  # stores look first whether a value is there
        timeout = max(settings.fetch_timeout, write, settings.connect_timeout) + _GRACE
        self._join(timeout)
        if any(thread.is_alive() for thread in self._threads):
            with self._lock:
                for session in self._sessions:
                    session.shut_down()
            self._join(_GRACE)
        for queue in self._queues.values():
            queue.end_free(Status.TIER_OFF)
        if any(thread.is_alive() for thread in self._threads):
            message = "remote tier %s (%s): an I/O thread did not stop within %.0f s and keeps running"
            _log.error(message, self.name, settings, timeout + _GRACE)

    def _join(self, seconds: float) -> None:
        """Wait until all threads have ended, for at most `seconds`."""
        give_up = time.monotonic() + seconds
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < give_up:
                thread.join(0.02)
                for queue in self._queues.values():
                    queue.expire()

    # ------------------------------------------------------------------ with the lock

    def _ends_at_once(self, op: TierOp, now: float, until: float) -> Status | None:
        if op.generation < self.generation:
            return Status.MISMATCH if op.op is Op.READ else Status.CANCELLED
        if now >= until:
            return Status.DEADLINE
        if self._breaker.is_open:
            return Status.UNAVAILABLE
        return self._paused(now) if op.op is Op.WRITE else None

    def _paused(self, now: float) -> Status | None:
        """How writes end at once, if they do."""
        return self._pause[1] if now < self._pause[0] else None

    def _image_ended(self, image: Image, status: Status) -> None:
        op = image.batch.ops[image.index].op
        self._count(op, status)
        if status is Status.OK:
            if op is Op.WRITE:
                self._bad.pop(image.address, None)
        elif op is Op.READ and status in _BAD_VALUES:
            self._bad[image.address] = None
            if len(self._bad) > _BAD:
                self._bad.popitem(last=False)
        if status in _ANSWERED:
            self._breaker.succeeded()
        self._settle(image.batch)

    def _count(self, op: Op, status: Status) -> None:
        self.completed += 1
        self.counts[op._value_, status._value_] += 1
        if op is Op.WRITE and status is Status.NO_SPACE:
            self._failures["full"] += 1
            if self._paused(now := self._clock()) is None:
                self._pause = now + _WRITE_PAUSE, status

    def _settle(self, batch: OpBatch) -> None:
        if batch.ended and self._open.pop(batch.ticket, None) is not None:
            self._results.append(batch.result())
            self._tell()

    def _answer(self, ticket: int, present: tuple[bool, ...] | None) -> None:
        answer = Counter({"none": 1} if present is None else {"present": sum(present), "absent": present.count(False)})
        self.counts.update({("probe", each): count for each, count in answer.items()})
        self._answers.append((ticket, present))
        self._tell()

    def _tell(self) -> None:
        if self._on_batch_end is not None:
            self._on_batch_end()

    # ------------------------------------------------------------------ threads

    def _start(self, run: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=run, args=arguments, name=f"longshore-{self.name}", daemon=True)
        thread.start()
        return thread

    def _move(self, queue: WorkQueue) -> None:
        """Move images until the queue stops."""
        session: Session | None = None
        try:
            while queue.wait():
                is_writing = False
                try:
                    session = self._connected(session)
                    is_writing = queue.op is Op.WRITE
                    if queue.op is Op.READ:
                        session.fetch(queue)
                    else:
                        session.store(queue, self._is_bad, self._refusal)
                except Exception as error:  # noqa: BLE001 - this thread serves all requests to come
                    session = self._close(session)
                    failure = self._as_failure(error)
                    if is_writing and failure.reason in _OF_WRITES:
                        self._takes_no_writes(failure)
                    else:
                        self._failed(failure)
                    queue.fail(failure.status)
        finally:
            self._close(session)

    def _connected(self, session: Session | None) -> Session:
        """`session`, or a new one where there is none, or the server has closed an idle one."""
        if session is not None and session.is_stale():
            session = self._close(session)
        return self._connect() if session is None else session

    def _connect(self) -> Session:
        session = self._store.connect()
        with self._lock:
            self._sessions.add(session)
        return session

    def _close(self, session: Session | None) -> Session | None:
        """Close a session, if there is one; there is none after that, whatever its `close` raises."""
        if session is not None:
            with self._lock:
                self._sessions.discard(session)
            try:
                session.close()
            except Exception:  # noqa: BLE001 - this thread serves all requests to come
                log_seldom(
                    _log, "remote tier %s (%s): a connection could not be closed; report this", self.name, self.settings
                )
        return None

    def _probe(self) -> None:
        """Answer probes, and look for a server that is away, until the tier is closed."""
        session: Session | None = None
        try:
            while True:
                with self._lock:
                    asked, check = self._next_probe()
                    if self._closed:
                        return
                try:
                    if check:
                        session = self._close(session)
                        session = self._connect()
                        session.check(self._clock() + self.settings.connect_timeout)
                        self._checked(answers=True)
                    elif asked is not None:
                        session = self._connected(session)
                        self._answered(asked, session.lengths(asked.addresses, asked.deadline))
                except Exception as error:  # noqa: BLE001 - this thread serves all probes to come
                    session = self._close(session)
                    failure = self._as_failure(error)
                    if check:
                        self._checked(answers=False)
                    elif asked is not None:
                        self._unanswered(asked, failure)
        finally:
            self._close(session)

    def _next_probe(self) -> tuple[_PendingProbe | None, bool]:
        """Wait for a probe, or until the server is to be looked for."""
        self._is_stuck = False
        while not self._closed:
            if self._breaker.is_open:
                left = self._breaker.check_due(self._clock())
                if left <= 0:
                    return None, True
                self._probing.wait(left)
            elif self._asked:
                self._asking = self._asked.popleft()
                return self._asking, False
            else:
                self._probing.wait()
        return None, False

    def _answered(self, asked: _PendingProbe, lengths: Sequence[int]) -> None:
        with self._lock:
            if self._asking is not asked:  # its deadline has passed
                return
            self._asking = None
            self._breaker.succeeded()
            known = {HEADER_BYTES + size for size in self.image_bytes}
            pairs = zip(asked.addresses, lengths, strict=True)
            self._answer(asked.ticket, tuple(length in known and each not in self._bad for each, length in pairs))

    def _unanswered(self, asked: _PendingProbe, error: RemoteError) -> None:
        with self._lock:
            if self._asking is asked:  # otherwise its deadline has passed, and was counted
                self._asking = None
                self._answer(asked.ticket, None)
                self._failed(error)

    def _as_failure(self, error: Exception) -> RemoteError:
        if isinstance(error, RemoteError):
            return error
        log_seldom(_log, "remote tier %s (%s): internal error in an I/O thread; report this", self.name, self.settings)
        return RemoteError("broken", f"{type(error).__name__} in its client", Status.IO_ERROR)

    def _failed(self, error: RemoteError, times: int = 1) -> None:
        """A connection, a request or a reply has failed."""
        with self._lock:
            self._failures[error.reason] += times
            now = self._clock()
            if self._breaker.failed(now, times):
                for queue in self._queues.values():
                    queue.end_waiting(Status.UNAVAILABLE)
                while self._asked:
                    self._answer(self._asked.popleft().ticket, None)
                self._probing.notify_all()
                message = "remote tier %s is unreachable: %s; it is skipped until a health check succeeds (run: %s)"
                self._warn(now, error, message, self.name, error, f"longshore doctor {self.settings}")

    def _takes_no_writes(self, error: RemoteError) -> None:
        """The store has answered that it takes no writes: a replica, a disk that fails. That says nothing of reads."""
        with self._lock:
            self._failures[error.reason] += 1
            now = self._clock()
            self._pause = now + _WRITE_PAUSE, error.status
            message = "remote tier %s takes no writes: %s; reads go on (run: longshore doctor %s)"
            self._warn(now, error, message, self.name, error, self.settings)

    def _checked(self, *, answers: bool) -> None:
        with self._lock:
            if self._breaker.checked(self._clock(), answers=answers):
                _log.info("remote tier %s (%s) is reachable again", self.name, self.settings)

    def _is_bad(self, each: bytes) -> bool:
        with self._lock:
            return each in self._bad

    def _refusal(self, nbytes: int) -> Status | None:
        """Why a value of `nbytes` must not be sent; otherwise it counts as sent."""
        with self._lock:
            if (status := self._paused(self._clock())) is not None:
                return status
            if self._budget.take(nbytes):
                return None
            self._failures["budget"] += 1
            return Status.QUEUE_FULL

    def _warn(self, now: float, error: RemoteError, message: str, *arguments: object) -> None:
        pause = _SAYS_ONCE if error.reason in _OF_PEOPLE and str(error) == self._said else _SAYS_LITTLE
        if self._said_at < 0 or now - self._said_at >= pause:
            self._said_at, self._said = now, str(error)
            _log.warning(message, *arguments)

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"{self.settings}: the {self.name} tier was closed")


def open_client(
    settings: RemoteSettings, clock: Callable[[], float], arena: Arena, sizes: Sequence[int]
) -> RemoteClient:
    """What connects to the store. Raises `TierError` if a package or certificates are missing."""
    if settings.is_mooncake:
        from longshore.tiers.remote.mooncake import MooncakeClient  # noqa: PLC0415 - its package is an extra

        return MooncakeClient(settings, clock, arena, sizes)
    if settings.is_s3:
        from longshore.tiers.remote.s3 import S3Client  # noqa: PLC0415 - its package is an extra

        return S3Client(settings, clock, min(sizes))
    if settings.is_directory:
        return DirectoryClient(settings, max(sizes))
    return RespClient(settings, clock, max(sizes))
