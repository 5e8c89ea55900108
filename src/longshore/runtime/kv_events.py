"""`KVEventPublisher`: tells routers, in vLLM's wire format over ZeroMQ, which blocks the tiers of this process have.

    engine ──describe (tokens of chunks)──┐
    EventRecorder ──publish (events)──────┴─► PUB     topic | sequence | [time, events, rank]   to all subscribers
                                              ROUTER  sequence asked for ► the batches from there on, then an end mark

Frames are bytes: the topic, the sequence (8 bytes, big-endian, from 0), and msgpack. An event is a map with a `type`:
`BlockStored`, `BlockRemoved` or `AllBlocksCleared`, with the fields that vLLM's have. A block is one of our chunks; its
hash is the end of its key, as an integer of 64 bits. The first batch, the last one, and each reset say that all blocks
are cleared.

Subscribers that are too slow miss batches, see it by the sequence, and ask the replay address for them.
"""

from __future__ import annotations

import logging
import struct
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from longshore.boundary import FILE, HOST, Key
from longshore.cache.events import STORING, Announcements, Change, Event, EventKind
from longshore.errors import ConfigError

_log = logging.getLogger(__name__)

CLEARED = {"type": "AllBlocksCleared"}
END = (-1).to_bytes(8, "big", signed=True)
"""The sequence that ends a replay."""

KEPT_BATCHES = 10_000
KEPT_BYTES = 64 << 20
"""Batches kept for replays, and their bytes; the oldest go first."""

_DESCRIBED = 1 << 16
"""Chunks whose tokens are kept, whether or not a tier has them."""
_REPLAYS = 16
"""Replays at a time."""
_LINGER = 1.0
"""Seconds for which `close` waits for subscribers to take the last batch."""
_MEDIA = {HOST: "CPU", FILE: "STORAGE"}


_PARENT = struct.Struct("=?Q")
_Block = bytes
"""What a router is told of a chunk: whether it has a parent, that one's hash (`_PARENT`), and token ids as `uint32`.

With a tuple of integers, a named chunk of 16 tokens took 1,061 bytes in all tables; it takes 207 so.
"""


def _packed(parent: Key | None, tokens: Sequence[int]) -> _Block:
    return _PARENT.pack(parent is not None, block_hash(parent or b"")) + array("I", tokens).tobytes()


def _parent(block: _Block) -> int | None:
    has_parent, parent = _PARENT.unpack_from(block)
    return parent if has_parent else None


class KVEventPublisher:
    """Publishes to whoever subscribes. `describe` may be called by any thread, all else by one at a time.

    Attributes:
        endpoint: The address that is bound, with the port that the system chose for port 0.
        replay_endpoint: The same of replays; empty without them.
        batches: How many batches were published.
    """

    def __init__(
        self,
        endpoint: str,
        chunk_tokens: int,
        *,
        replay: str = "",
        topic: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Bind `endpoint`, and `replay` if it is not empty. Chunks have `chunk_tokens` tokens.

        Raises `ConfigError` if an address cannot be bound, or pyzmq or msgspec is not installed.
        """
        try:
            import msgspec  # noqa: PLC0415 - the extra `events`
            import zmq  # noqa: PLC0415
        except ImportError as error:
            raise ConfigError(
                f"kv_events needs pyzmq and msgspec, and there is no module {error.name}: install the extra 'events'"
            ) from error
        self._pack = msgspec.msgpack.Encoder().encode
        self._clock = clock
        self._topic = topic.encode()
        self._chunk_tokens = chunk_tokens
        self.announced: Announcements[_Block] = Announcements()
        """What subscribers were told."""
        self._described: deque[tuple[Key, _Block]] = deque()
        self._pending: set[Key] = set()
        """The keys in `_described`: a request that waits is described again and again."""
        self._lately: dict[Key, _Block] = {}
        """The chunks described last: what is in no tier now may be stored at any time."""
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_bytes = 0
        self.batches = 0
        self._context = zmq.Context()
        """Of its own: to end it waits until its addresses are free, for the next publisher of this process."""
        self._replay: Any = None
        try:
            self._publisher, self.endpoint = self._bind("kv_events", zmq.PUB, endpoint)
            self.replay_endpoint = ""
            if replay:
                self._replay, self.replay_endpoint = self._bind("kv_events_replay", zmq.ROUTER, replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        _log.info("KV events are published at %s, replays at %s", self.endpoint, self.replay_endpoint or "no address")
        self._send([CLEARED])

    def record_tokens(self, keys: Sequence[Key], first: int, tokens: Sequence[int]) -> None:
        """Say which tokens chunks have, so that events can tell: `tokens` are those of the path `keys` from `first` on.

        Before they are stored, or whenever they are known for chunks that tiers have already.
        """
        size = self._chunk_tokens
        for at, key in enumerate(keys[first:], first):
            if key not in self._lately and key not in self._pending and len(self._described) < _DESCRIBED:
                self._pending.add(key)
                mine = tokens[(at - first) * size : (at - first + 1) * size]
                self._described.append((key, _packed(keys[at - 1] if at else None, mine)))

    def publish(self, events: Iterable[Event], compared: Iterable[tuple[Key, tuple[str, ...]]] = ()) -> None:
        """Publish what `events` mean as one batch; nothing if they mean nothing.

        After events were missing, so does what was `compared` by `TieredCache.reconcile` when they were pulled.
        """
        told: list[dict[str, Any]] = []
        changes = self._take_described()
        for event in events:
            if event.kind is EventKind.RESET:
                self.announced.restart(dropped=True)
                changes, told = [], [CLEARED]
            else:
                if event.kind in STORING:
                    changes += self._named(event.key)
                changes += self.announced.changes(event)
        compared = list(compared)
        for key, tiers in compared:
            changes += self._named(key if tiers else None)
        changes += self.announced.settle(compared)
        for (tier, removed), run in groupby(changes, key=lambda each: each[:2]):
            some = list(run)
            told += [self._removed(tier, some)] if removed else [self._stored(tier, each) for each in _paths(some)]
        if told:
            self._send(told)

    def serve_replays(self) -> None:
        """Answer those who ask for batches again."""
        for _ in range(_REPLAYS):
            if self._replay is None or not self._replay.poll(0):
                return
            frames = self._replay.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                _log.warning(
                    "KV events: a request to %s was ignored: expected a sequence of 8 bytes behind an empty frame; "
                    "correct the subscriber",
                    self.replay_endpoint,
                )
                continue
            asked = int.from_bytes(frames[2], "big")
            for sequence, body in self._kept:
                if int.from_bytes(sequence, "big") >= asked:
                    self._replay.send_multipart((frames[0], b"", self._topic, sequence, body))
            self._replay.send_multipart((frames[0], b"", b"", END, b""))

    def close(self) -> None:
        """Say that all blocks are cleared, and free the addresses. Idempotent."""
        if not self._context.closed:
            self._send([CLEARED])
            self._context.destroy(linger=int(1000 * _LINGER))

    # ------------------------------------------------------------------ inside

    def _bind(self, setting: str, kind: int, endpoint: str) -> tuple[Any, str]:
        import zmq  # noqa: PLC0415 - it is installed, or `__init__` has failed

        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        if kind == zmq.ROUTER:
            socket.setsockopt(zmq.SNDHWM, 2 * (KEPT_BATCHES + 1))  # a replay is taken, or dropped, as a whole
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"{setting} is {endpoint}, which cannot be bound: {error.strerror}") from error
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _take_described(self) -> list[Change[_Block]]:
        """The changes of chunks that tiers had before their tokens were known."""
        changes: list[Change[_Block]] = []
        while self._described:
            key, block = self._described.popleft()
            if self.announced.has(key):
                changes += self.announced.name(key, block)
            self._lately[key] = block
            self._pending.discard(key)
            if len(self._lately) > _DESCRIBED:
                del self._lately[next(iter(self._lately))]
        return changes

    def _named(self, key: Key | None) -> list[Change[_Block]]:
        """Name a chunk whose tokens are known; the changes of copies that tiers had before."""
        return self.announced.name(key, self._lately[key]) if key is not None and key in self._lately else []

    def _stored(self, tier: str, path: Sequence[Change[_Block]]) -> dict[str, Any]:
        tokens = array("I")
        for change in path:
            tokens.frombytes(change.name[_PARENT.size :])
        return {
            "type": "BlockStored",
            "block_hashes": [block_hash(change.key) for change in path],
            "parent_block_hash": _parent(path[0].name),
            "token_ids": tokens.tolist(),
            "block_size": len(tokens) // len(path),
            "lora_id": None,
            "medium": _MEDIA.get(tier, "STORAGE"),
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
            **_owner(tier),
        }

    def _removed(self, tier: str, changes: Sequence[Change[_Block]]) -> dict[str, Any]:
        return {
            "type": "BlockRemoved",
            "block_hashes": [block_hash(change.key) for change in changes],
            "medium": _MEDIA.get(tier, "STORAGE"),
            "group_idx": 0,
            **_owner(tier),
        }

    def _send(self, events: Sequence[dict[str, Any]]) -> None:
        sequence, body = self.batches.to_bytes(8, "big"), self._pack([self._clock(), events, 0])
        self.batches += 1
        self._publisher.send_multipart((self._topic, sequence, body))
        self._kept.append((sequence, body))
        self._kept_bytes += len(body)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])


def block_hash(key: Key) -> int:
    """The name of a chunk in events: the last 64 bits of its key, as vLLM shortens its own hashes."""
    return int.from_bytes(key[-8:], "big")


def _paths(changes: Sequence[Change[_Block]]) -> Iterator[list[Change[_Block]]]:
    """Runs of chunks of one size, each the parent of the next: an event tells of a run."""
    run: list[Change[_Block]] = []
    for change in changes:
        if run and (_parent(change.name), len(change.name)) != (block_hash(run[-1].key), len(run[-1].name)):
            yield run
            run = []
        run.append(change)
    if run:
        yield run


def _owner(tier: str) -> dict[str, str]:
    """Whose a copy is: this process's own, or that of a store, which all replicas read."""
    return {"locality": "LOCAL"} if tier in _MEDIA else {"locality": "REMOTE", "ownership": tier}
