"""A cluster of Valkey or Redis servers: each key belongs to one of 16,384 slots, and each slot to a node.

    submit, ask ──► slot of each key ──► RemoteTier of its node ── threads, connections, breaker
                                              │
              -MOVED, -ASK ◄──────────────────┘   the operation goes on at the node that the error names
    one thread ──► CLUSTER SLOTS of any node that answers, at most once in a second

Nodes fail apart from each other: the operations on one that is away end as `UNAVAILABLE`, those on others go on.
Probes of one node are one round trip. The map of slots is read at the start, after a redirection, and each second
while a node is away or a slot has none. Until it is known, the first node that the URL names is asked, which redirects.
`NodesTier` is all of that but the map; `longshore.tiers.remote.peers` is the other one with several nodes.
"""

from __future__ import annotations

import binascii
import logging
import math
import os
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from longshore.boundary import Key, Status
from longshore.errors import TierClosedError, log_seldom
from longshore.tiers.arena import Arena
from longshore.tiers.base import KeyedTier, Op, TierOp, TierResult, check_batch, check_question
from longshore.tiers.remote.breaker import FAILURES
from longshore.tiers.remote.format import NO_RANK, Namespace, address
from longshore.tiers.remote.resp import RespClient, RespSession
from longshore.tiers.remote.settings import RemoteSettings, parse_url
from longshore.tiers.remote.tier import FAILURE_REASONS, RemoteTier
from longshore.tiers.remote.work import Budget, RemoteError

SLOTS = 16_384

REFRESH_SECONDS = 1.0
"""Between two readings of the map of slots, at least."""

_HOPS = 4
"""Nodes that one operation is sent to, at most."""

_IDLE_SECONDS = 60.0
"""After so long without use, the connections to a node that has no slots are closed."""

_MOST_ASKS = 4096
_LAST_PORT = 65_535
_UNNAMED = frozenset({None, b"", b"?"})
"""A host in a map or in a redirection that is the host which was asked: the node does not know its address."""

_log = logging.getLogger(__name__)


class ClusterNode(NamedTuple):
    """Where a node is. `asking`: it is asked for what has come there of a slot that still moves."""

    host: str
    port: int
    asking: bool = False


SlotMap = list[ClusterNode | None]
"""The node of each slot; `None` for one that no node has."""


def slot_of(key: bytes) -> int:
    """The slot of `key`: CRC16 (XMODEM) of it, or of its hash tag, the first non-empty text between braces."""
    begin = key.find(b"{")
    end = key.find(b"}", begin + 1)
    if 0 <= begin < end - 1:
        key = key[begin + 1 : end]
    return binascii.crc_hqx(key, 0) % SLOTS


def read_slots(session: RespSession, host: str, deadline: float) -> SlotMap:
    """The slots as a node at `host` knows them. Raises `RemoteError`, also for a reply that is no map."""
    reply: Any = session.call(b"CLUSTER", b"SLOTS", deadline=deadline)
    slots: SlotMap = [None] * SLOTS
    try:
        for first, last, (name, port, *_), *_ in reply:
            if not (0 <= first <= last < SLOTS and 0 < port <= _LAST_PORT):
                raise ValueError(first, last, port)
            at = ClusterNode(host if name in _UNNAMED else name.decode(), port)
            slots[first : last + 1] = [at] * (last + 1 - first)
    except (TypeError, ValueError, AttributeError) as error:
        raise RemoteError("broken", "invalid reply: no map of slots", Status.IO_ERROR) from error
    return slots


class _Split:
    """A batch, or a probe, in parts of one node each: `what` are its operations, or keys of `generation`."""

    def __init__(self, ticket: int, what: Sequence[Any], generation: int | None, now: float, deadline: float) -> None:
        self.ticket = ticket
        self.what = what
        self.generation = generation
        self.begun, self.deadline = now, deadline
        self.ended: list[Any] = [None] * len(what)
        self.open = len(what)
        self.bytes, self.seconds, self.queued = 0, 0.0, math.inf


class Portion(NamedTuple):
    """What one node was given of a whole: the items at `indices`, which `hops` nodes have been given by then."""

    whole: _Split
    indices: Sequence[int]
    hops: int


class NodesTier(KeyedTier):
    """Images in several servers, under `namespace`: as `RemoteTier`, with one of those for each node.

    Subclasses say which node an address belongs to.

    Attributes:
        settings: What the URL says.
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
    ) -> None:
        """As for `RemoteTier`; `failures` in a row open the breaker of one node."""
        self.settings = settings = parse_url(url) if isinstance(url, str) else url
        self.image_bytes = (image_bytes,) if isinstance(image_bytes, int) else tuple(image_bytes)
        self.name = name
        self._name = Namespace(namespace, generation, fixed_weights=fixed_weights)
        self._arena, self._rank, self._threshold, self._clock = arena, rank, failures, clock
        self._budget = Budget(settings.daily_writes, clock)
        self._store = RespClient(settings, clock, max(self.image_bytes))
        self._lock = threading.RLock()
        self._nodes: dict[ClusterNode, RemoteTier] = {}
        self._used: dict[ClusterNode, float] = {}
        self._closed_counts: Counter[tuple[str, str]] = Counter()
        self._closed_failures = Counter(dict.fromkeys(FAILURE_REASONS, 0))
        self._closed_completed = self._tickets = 0
        self._parts: dict[tuple[ClusterNode, int], Portion] = {}
        self._probes: dict[tuple[ClusterNode, int], Portion] = {}
        self._results: list[TierResult] = []
        self._answers: list[tuple[int, tuple[bool, ...] | None]] = []
        self._on_batch_end: Callable[[], None] | None = None
        self._closed = False
        self._pid = os.getpid()
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep_nodes, name=f"longshore-{name}", daemon=True)

    @abstractmethod
    def _node_of(self, name: bytes) -> ClusterNode | None:
        """Where the value with the address `name` is; `None` if nowhere. With the lock."""

    @abstractmethod
    def _redirected(self, node: ClusterNode, name: bytes, error: bytes) -> None:
        """`node` does not serve `name`. Called by the threads of its tier, before the operation ends."""

    def _goes_on(self, node: ClusterNode, part: Portion, index: int) -> bool:
        """Whether an item that was not found at `node` is to be looked for at another one."""
        return False

    def _refresh(self) -> None:
        """Find out where values are, at most once in `REFRESH_SECONDS`."""

    @property
    def _kept(self) -> set[ClusterNode | None]:
        """Nodes whose connections are kept without use. With the lock."""
        return set()

    @property
    def _is_restless(self) -> bool:
        """Whether to look after the nodes again in `REFRESH_SECONDS`, though nothing happens. With the lock."""
        return bool(self._nodes)

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
    def failures(self) -> Mapping[str, int]:
        """Number of failures of all nodes, by one of `FAILURE_REASONS`."""
        with self._lock:
            total = Counter(self._closed_failures)
            for each in self._nodes.values():
                total.update(each.failures)
            return dict(total)

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """How many operations have ended at nodes, by kind and status, and probes, by answer."""
        with self._lock:
            return sum((each.counts for each in self._nodes.values()), self._closed_counts)

    @property
    def completed(self) -> int:
        """Number of operations that have ended."""
        with self._lock:
            return self._closed_completed + sum(each.completed for each in self._nodes.values())

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """As `RemoteTier.submit`; nothing has begun if it raises."""
        self._check_open()
        nbytes = self._arena.array.nbytes
        sizes, last = self.image_bytes, self.generation
        check_batch(batch, deadline, slabs=None, image_bytes=sizes, arena_bytes=nbytes, last_reset=last)
        with self._lock:
            return self._begin(tuple(batch), None, deadline)

    def poll(self) -> list[TierResult]:
        """Results since the last call; ends what is late."""
        with self._lock:
            for node, tier in list(self._nodes.items()):
                for result in tier.poll():
                    part = self._parts.pop((node, result.ticket))
                    whole = part.whole
                    whole.bytes += result.bytes
                    whole.seconds = max(whole.seconds, result.seconds)
                    whole.queued = min(whole.queued, result.queued_seconds)
                    self._ended(node, part, result.statuses)
            results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """End operations of `ticket` that have not begun."""
        with self._lock:
            for (node, theirs), part in self._parts.items():
                if part.whole.ticket == ticket:
                    self._nodes[node].cancel(theirs)

    def ask(self, keys: Sequence[Key], generation: int, deadline: float) -> int:
        """As `RemoteTier.ask`: what a node does not answer for is not there, unless none answers."""
        self._check_open()
        check_question(keys, generation, self.generation)
        with self._lock:
            return self._begin(tuple(keys), generation, min(deadline, self._clock() + self.settings.probe_timeout))

    def answers(self) -> list[tuple[int, tuple[bool, ...] | None]]:
        """Answers since the last call; `None`: it is not known, because all nodes are away or late."""
        with self._lock:
            for node, tier in list(self._nodes.items()):
                for ticket, present in tier.answers():
                    part = self._probes.pop((node, ticket))
                    self._ended(node, part, [None] * len(part.indices) if present is None else present)
            answers, self._answers = self._answers, []
        return answers

    def reset(self, generation: int, namespace: bytes | None = None) -> None:
        """As `RemoteTier.reset`."""
        self._check_open()
        with self._lock:
            if self._name.reset(generation, namespace, self.settings):
                for each in self._nodes.values():
                    each.reset(generation, self.namespace)

    def weights_changed(self) -> None:
        """Weights have changed: the next `reset` starts a namespace of its own."""
        self._name.weights_changed()

    def set_completion_callback(self, call: Callable[[], None]) -> None:
        """As `RemoteTier.set_completion_callback`. It may also be called when only a part of a batch has ended."""
        with self._lock:
            self._on_batch_end = call
            for each in self._nodes.values():
                each.set_completion_callback(call)

    def close(self) -> None:
        """As `RemoteTier.close`, for all nodes at once."""
        if os.getpid() != self._pid:  # another thread may have had the lock when this process was forked
            self._closed = True
            for each in list(self._nodes.values()):
                each.close()
            return
        with self._lock:
            self._closed = True
            nodes = list(self._nodes.values())
        self._closing.set()
        self._wanted.set()
        closing = [threading.Thread(target=each.close, name="longshore-close", daemon=True) for each in nodes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._thread.join(2 * self.settings.connect_timeout)

    # ------------------------------------------------------------------ parts of batches and probes, with the lock

    def _begin(self, what: Sequence[Any], generation: int | None, deadline: float) -> int:
        self._tickets += 1
        whole = _Split(self._tickets, what, generation, self._clock(), deadline)
        self._send(Portion(whole, range(len(what)), 0))
        return whole.ticket

    def _send(self, part: Portion) -> None:
        """Give each node what belongs to it."""
        whole, limits = part.whole, {Op.READ: self.settings.fetch_timeout, Op.WRITE: self.settings.write_timeout}
        by_node: dict[ClusterNode | None, list[int]] = {}
        for index in part.indices:
            name = self._address(whole.what[index])
            by_node.setdefault(self._node_of(name), []).append(index)
        for node, indices in by_node.items():
            what = [whole.what[index] for index in indices]
            if node is None:
                self._wanted.set()
                self._end(whole, indices, [None if whole.generation is not None else Status.UNAVAILABLE] * len(what))
                continue
            if whole.generation is not None:
                ticket = self._at(node).ask(what, whole.generation, whole.deadline)
                parts = self._probes
            else:  # of what was sent before, the store's own timeout counts from then
                until = whole.begun + min(limits[op.op] for op in what) if part.hops else math.inf
                ticket = self._at(node).submit(what, min(whole.deadline, until))
                parts = self._parts
            parts[node, ticket] = Portion(whole, indices, part.hops + 1)
        self._settle(whole)

    def _ended(self, node: ClusterNode, part: Portion, how: Sequence[Status | bool | None]) -> None:
        """A part has ended at `node`: what is elsewhere goes on there."""
        again = {
            index
            for index, each in zip(part.indices, how, strict=True)
            if (each is False or each is Status.NOT_FOUND) and self._goes_on(node, part, index)
        }
        self._end(part.whole, part.indices, how, but=again)
        if Status.UNAVAILABLE in how or None in how:
            self._wanted.set()
        if again:
            self._send(part._replace(indices=sorted(again)))
        else:
            self._settle(part.whole)

    def _end(self, whole: _Split, indices: Sequence[int], how: Sequence[Any], but: Container[int] = ()) -> None:
        elsewhere = Status.TIER_OFF if self._closed else Status.UNAVAILABLE  # of writes: it was not sent on
        for index, each in zip(indices, how, strict=True):
            if index not in but:
                is_write = whole.generation is None and whole.what[index].op is Op.WRITE
                whole.ended[index] = elsewhere if is_write and each is Status.NOT_FOUND else each
                whole.open -= 1

    def _settle(self, whole: _Split) -> None:
        if whole.open:
            return
        if whole.generation is None:
            queued = 0.0 if math.isinf(whole.queued) else whole.queued
            self._results.append(TierResult(whole.ticket, tuple(whole.ended), whole.bytes, whole.seconds, queued))
        else:
            is_known = not whole.ended or any(each is not None for each in whole.ended)
            self._answers.append((whole.ticket, tuple(map(bool, whole.ended)) if is_known else None))
        self._tell()

    def _address(self, each: TierOp | Key) -> bytes:
        rank = NO_RANK if self._rank is None else self._rank
        return address(self.namespace, each.key if isinstance(each, TierOp) else each, rank)

    def _tell(self) -> None:
        if self._on_batch_end is not None:
            self._on_batch_end()

    def _check_open(self) -> None:
        if self._closed:
            raise TierClosedError(f"{self.settings}: the {self.name} tier was closed")

    # ------------------------------------------------------------------ nodes and slots

    def _at(self, node: ClusterNode) -> RemoteTier:
        """The tier of a node, opened if need be; nothing is connected for that."""
        self._used[node] = self._clock()
        if (tier := self._nodes.get(node)) is None:
            settings = self.settings.node(node.host, node.port)
            tier = self._nodes[node] = RemoteTier(
                settings,
                arena=self._arena,
                image_bytes=self.image_bytes,
                namespace=self.namespace,
                generation=self.generation,
                rank=self._rank,
                name=self.name,
                failures=self._threshold,
                clock=self._clock,
                store=self._store.at(settings, partial(self._redirected, node), asking=node.asking),
                budget=self._budget,
            )
            if self._on_batch_end is not None:
                tier.set_completion_callback(self._on_batch_end)
        return tier

    def _keep_nodes(self) -> None:
        """Look after the nodes when that is wanted, until the tier is closed."""
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            try:
                self._refresh()
                self._close_unused()
            except Exception:  # noqa: BLE001 - nodes would never be looked after again
                log_seldom(
                    _log,
                    "remote tier %s (%s): checking its nodes failed, and is retried; report this",
                    self.name,
                    self.settings,
                )
            with self._lock:
                if self._is_restless:
                    self._wanted.set()
            self._closing.wait(REFRESH_SECONDS)

    def _close_unused(self) -> None:
        """Close the connections to nodes that are not used any more."""
        unused = []
        with self._lock:
            busy = {node for node, _ in [*self._parts, *self._probes]} | self._kept
            for node, used in list(self._used.items()):
                if node not in busy and self._clock() - used > _IDLE_SECONDS:
                    unused.append(tier := self._nodes.pop(node))
                    del self._used[node]
                    self._closed_counts += tier.counts
                    self._closed_failures.update(tier.failures)
                    self._closed_completed += tier.completed
        for tier in unused:
            tier.close()


class ClusterTier(NodesTier):
    """A cluster, as its map of slots says, which is read again when it seems to be wrong."""

    def __init__(self, url: str | RemoteSettings, **options: Any) -> None:
        """As for `RemoteTier`; `failures` in a row open the breaker of one node."""
        super().__init__(url, **options)
        self._named = [ClusterNode(*each) for each in ((self.settings.host, self.settings.port), *self.settings.more)]
        self._slots: SlotMap = [self._named[0]] * SLOTS
        self._owners: set[ClusterNode | None] = {self._named[0]}
        """What is in `_slots`."""
        self._asks: dict[bytes, ClusterNode] = {}
        """The nodes that have values of slots that move."""
        self._map_failed = False
        """Whether no node gave the map when it was read last."""
        self._wanted.set()
        self._at(self._named[0])  # raises where sizes or the like are invalid
        self._thread.start()

    @property
    def is_unavailable(self) -> bool:
        """Whether no node that has slots can be used."""
        with self._lock:
            used = [self._nodes.get(node) for node in self._owners if node is not None]
            return all(each is not None and each.is_unavailable for each in used)

    @property
    def _kept(self) -> set[ClusterNode | None]:
        return {*self._owners, self._named[0]}

    @property
    def _is_restless(self) -> bool:
        nodes = self._nodes.items()
        return None in self._owners or any(each.is_unavailable or node not in self._kept for node, each in nodes)

    def _node_of(self, name: bytes) -> ClusterNode | None:
        return self._asks.pop(name, None) or self._slots[slot_of(name)]

    def _goes_on(self, node: ClusterNode, part: Portion, index: int) -> bool:
        """Whether an item that was not found at `node` is to be looked for at another one."""
        if self._closed or node.asking or part.hops >= _HOPS:
            return False
        name = self._address(part.whole.what[index])
        return name in self._asks or self._slots[slot_of(name)] not in {node, None}

    def _redirected(self, node: ClusterNode, name: bytes, error: bytes) -> None:
        """`node` does not serve `name`. Called by the threads of its tier, before the operation ends."""
        kind, _, where = error.partition(b" ")
        host, _, port = where.rpartition(b" ")[2].rpartition(b":")
        self._wanted.set()
        if kind == b"CLUSTERDOWN" or not (port.isdigit() and 0 < int(port) <= _LAST_PORT):
            return
        name_of_host = node.host if host in _UNNAMED else host.decode(errors="replace")
        to = ClusterNode(name_of_host, int(port), asking=kind == b"ASK")
        with self._lock:
            if not to.asking:
                self._owners.add(to)
                self._slots[slot_of(name)] = to
                return
            if len(self._asks) >= _MOST_ASKS:  # the oldest, whose operation may have ended meanwhile
                del self._asks[next(iter(self._asks))]
            self._asks[name] = to

    def _refresh(self) -> None:
        """Read the map from the first node that knows an owner of each slot, or else from the one that knows most.

        A node that was reset, or has lost its configuration, knows none. If no node answers, the map stays as it is,
        and the first such reading of an outage is logged.
        """
        best: SlotMap | None = None
        failures: list[str] = []
        with self._lock:
            known = sorted(self._nodes, key=lambda node: self._nodes[node].is_unavailable)
            candidates = dict.fromkeys(node._replace(asking=False) for node in [*known, *self._named])
        for node in candidates:
            if self._closed:
                return
            try:
                session = self._store.at(self.settings.node(node.host, node.port), lambda *_: None).connect()
                try:
                    slots = read_slots(session, node.host, self._clock() + self.settings.connect_timeout)
                finally:
                    session.close()
            except RemoteError as error:
                failures.append(f"{node.host}:{node.port}: {error}")
                continue
            if best is None or slots.count(None) < best.count(None):
                best = slots
            if None not in best:
                break
        if best is not None:
            self._map_failed = False
            with self._lock:
                self._slots, self._owners = best, set(best)
        elif not self._map_failed:
            self._map_failed = True
            _log.warning(
                "remote tier %s (%s): no node gives the map of slots, and the last one stays in use (%s); run: "
                "longshore doctor %s",
                *(self.name, self.settings, "; ".join(failures), self.settings),
            )
