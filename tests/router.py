"""A router: it knows which blocks an engine has from the engine's KV events alone, in vLLM's wire format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Place = tuple[str | None, str | None, str | None]
"""Medium, locality and owner of a copy."""

DEVICE: Place = ("GPU", None, None)
HOST: Place = ("CPU", "LOCAL", None)
FILE: Place = ("STORAGE", "LOCAL", None)


def store(name: str) -> Place:
    """Copies in a store that replicas share."""
    return "STORAGE", "REMOTE", name


class Router:
    """The index of a router, and what it has read."""

    def __init__(self) -> None:
        self.blocks: defaultdict[Place, set[int]] = defaultdict(set)
        """Hashes of the blocks in each place."""
        self.tokens: dict[int, tuple[int | None, list[int]]] = {}
        """Of each hash that was ever told with its tokens: the parent's hash, and the tokens."""
        self.batches = 0
        self.events: list[dict[str, Any]] = []

    def read(self, frames: Sequence[bytes], topic: bytes = b"") -> None:
        """Take in the three frames of a batch, which must be the next one."""
        from msgspec import msgpack

        said, sequence, body = frames
        assert said == topic
        assert sequence == self.batches.to_bytes(8, "big"), "a batch is missing"
        time, events, rank = msgpack.decode(body)
        assert isinstance(time, float) and rank == 0
        self.batches += 1
        self.apply(events)

    def apply(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.blocks.clear()
                continue
            place = event["medium"], event.get("locality"), event.get("ownership")
            if event["type"] == "BlockRemoved":
                self.blocks[place] -= {*event["block_hashes"]}
                continue
            assert event["type"] == "BlockStored"
            self.blocks[place] |= {*event["block_hashes"]}
            if event["token_ids"]:
                self._learn(event)

    def _learn(self, event: dict[str, Any]) -> None:
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(event["block_hashes"])
        for at, hashed in enumerate(event["block_hashes"]):
            known = parent, tokens[at * size : (at + 1) * size]
            assert self.tokens.setdefault(hashed, known) == known, "a hash names two blocks"
            parent = hashed


class Subscriber:
    """Reads what is published at an address, from when it has connected."""

    def __init__(self, endpoint: str, replay: str = "", topic: str = "") -> None:
        import zmq

        self._topic, self._zmq = topic.encode(), zmq
        self._context = zmq.Context()
        self._sub = self._socket(zmq.SUB, endpoint)
        self._sub.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._ask = self._socket(zmq.DEALER, replay) if replay else None

    def _socket(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.RECONNECT_IVL, 10)
        socket.setsockopt(self._zmq.IPV6, "[" in endpoint)
        socket.setsockopt(self._zmq.RCVHWM, 0)
        socket.connect(endpoint)
        return socket

    def batches(self, timeout: float = 0.0) -> list[list[bytes]]:
        """The batches that have come, waiting at most `timeout` seconds for the first."""
        found = []
        while self._sub.poll(0 if found else int(1000 * timeout)):
            found.append(self._sub.recv_multipart())
        return found

    def ask(self, sequence: int) -> None:
        """Ask for all batches from `sequence` on."""
        self._ask.send_multipart((b"", sequence.to_bytes(8, "big")))

    def replayed(self, timeout: float = 30.0) -> list[list[bytes]]:
        """What comes after `ask`, up to the mark that ends it."""
        found: list[list[bytes]] = []
        while self._ask.poll(int(1000 * timeout)):
            empty, *frames = self._ask.recv_multipart()
            assert empty == b""
            if frames == [b"", b"\xff" * 8, b""]:
                return found
            found.append(frames)
        raise AssertionError(f"no end of the replay, after {len(found)} batches")

    def send_garbage(self, *frames: bytes) -> None:
        """Ask for something that is no replay."""
        self._ask.send_multipart(frames)

    def close(self) -> None:
        self._context.destroy(linger=0)
