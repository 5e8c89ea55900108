"""Other replicas as a store: each is a server of RESP (`longshore.runtime.peer_server`), and requests name it.

    a request names a peer ─► route(keys, peer) ─► probes and reads of these keys go there

One `RemoteTier` has all peers. A key that no request has named a peer for is absent, and nobody is asked. A peer that
fails is left alone for a second, then two, up to 30; it costs misses. Nothing is ever sent to a peer.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from longshore.boundary import PEERS, Key, Status
from longshore.errors import HintError
from longshore.tiers.remote.format import address
from longshore.tiers.remote.resp import RespSession, RespStore
from longshore.tiers.remote.settings import RemoteSettings
from longshore.tiers.remote.tier import RemoteTier
from longshore.tiers.remote.work import Image, Refusal, StoreError, WorkQueue

COMING = -1
"""The length of a value that a peer is computing or storing."""

_ROUTES = 1 << 16
"""Keys whose peer is known; the oldest are removed first."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0

_log = logging.getLogger(__name__)
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Peer(NamedTuple):
    """Where another replica is: an address of IP, and a port."""

    host: str
    port: int


def parse_peer(said: Any, networks: Iterable[Network]) -> Peer:
    """The peer that a request names by `{"host": ADDRESS, "port": PORT}`. Raises `HintError`.

    Clients of the engine may write that, so it must be in `networks`, or they could have it connect anywhere.
    """
    host, port = (said.get("host"), said.get("port")) if isinstance(said, Mapping) else (None, None)
    if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise HintError(f"expected a peer as host, an IP address, and port, got {str(said)[:80]!r}")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise HintError(f"expected the host of a peer as an IP address, got {host[:80]!r}") from None
    if address.is_unspecified or address.is_multicast:
        raise HintError(f"expected the address of one machine, got {address}")
    if not any(address in network for network in networks):
        raise HintError(f"the peer {address} is in none of the networks of peer_networks")
    return Peer(str(address), port)


class PeerStore:
    """The client of all peers, for one `RemoteTier`."""

    threads = 1

    def __init__(self, settings: RemoteSettings, clock: Callable[[], float], largest: int, most: int = 8) -> None:
        """`settings` hold for each peer, but for host and port. Of `most` peers, connections are kept."""
        self._settings = settings
        self.clock = clock
        self._largest = largest
        self.most = most
        self._lock = threading.Lock()
        self._routes: OrderedDict[bytes, Peer] = OrderedDict()
        self._coming: set[bytes] = set()
        self._pauses: dict[Peer, tuple[float, float]] = {}
        """Until when a peer is left alone, and for how long that is."""

    def route(self, addresses: Iterable[bytes], peer: Peer) -> None:
        """Have `peer` asked for these values."""
        with self._lock:
            for each in addresses:
                self._routes[each] = peer
                self._routes.move_to_end(each)
            while len(self._routes) > _ROUTES:
                self._coming.discard(self._routes.popitem(last=False)[0])

    def are_coming(self, addresses: Iterable[bytes]) -> bool:
        """Whether a peer has last answered of any of these values that it is coming."""
        with self._lock:
            return not self._coming.isdisjoint(addresses)

    def connect(self) -> PeerSession:
        """A session; connections are made as peers are named."""
        return PeerSession(self)

    def peer_of(self, address: bytes) -> Peer | None:
        """Who is to be asked for a value; `None` if nobody, or if that peer is left alone."""
        with self._lock:
            peer = self._routes.get(address)
            is_paused = peer is not None and self.clock() < self._pauses.get(peer, (0.0, 0.0))[0]
            return None if is_paused else peer

    def open(self, peer: Peer) -> RespSession:
        """A connection to `peer`. Raises `StoreError`."""
        settings = replace(self._settings, host=peer.host, port=peer.port)
        return RespStore(settings, self.clock, self._largest).connect()

    def answered(self, peer: Peer, lengths: Mapping[bytes, int]) -> None:
        """`peer` has answered a probe."""
        with self._lock:
            self._pauses.pop(peer, None)
            self._coming.difference_update(lengths)
            self._coming.update(each for each, length in lengths.items() if length == COMING)

    def failed(self, peer: Peer, addresses: Iterable[bytes], error: StoreError) -> None:
        """`peer` could not be asked."""
        with self._lock:
            seconds = min(max(_FIRST_PAUSE, 2 * self._pauses.get(peer, (0.0, 0.0))[1]), _LONGEST_PAUSE)
            self._pauses[peer] = self.clock() + seconds, seconds
            self._coming.difference_update(addresses)
            if len(self._pauses) > 4 * self.most:
                del self._pauses[next(iter(self._pauses))]
        _log.warning("peer %s:%d: %s; it is left alone for %.0f s", peer.host, peer.port, error, seconds)


class PeerTier(RemoteTier):
    """What peers have, as a remote tier that is only read."""

    def __init__(self, settings: RemoteSettings, networks: Sequence[str], **tier: Any) -> None:
        """`networks` are those in which requests may name peers; `tier` are further arguments of `RemoteTier`."""
        self.networks = [ipaddress.ip_network(each) for each in networks]
        sizes = tier["image_bytes"]
        self._peers = PeerStore(settings, time.monotonic, max((sizes,) if isinstance(sizes, int) else sizes))
        super().__init__(settings, store=self._peers, name=PEERS, **tier)

    def route(self, keys: Iterable[Key], peer: Peer) -> None:
        """Have `peer` asked for `keys`."""
        self._peers.route([address(self.namespace, key) for key in keys], peer)

    def are_coming(self, keys: Iterable[Key]) -> bool:
        """Whether a peer has answered of any of `keys` that it is computing or storing it."""
        return self._peers.are_coming([address(self.namespace, key) for key in keys])


class PeerSession:
    """Connections to the peers that were named last, used by one thread."""

    def __init__(self, store: PeerStore) -> None:
        self._store = store
        self._open: OrderedDict[Peer, RespSession] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, deadline: float) -> None:
        """Nothing: each peer has its own pauses."""

    def lengths(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        """The length of each value; 0 for one that is not there, or whose peer does not answer, `COMING`."""
        found: dict[bytes, int] = {}
        for peer, mine in self._by_peer(addresses).items():
            try:
                answers = self._session(peer).lengths(mine, deadline)
            except StoreError as error:
                self._drop(peer)
                self._store.failed(peer, mine, error)
                continue
            told = dict(zip(mine, answers, strict=True))
            self._store.answered(peer, told)
            found |= told
        return [found.get(each, 0) for each in addresses]

    def fetch(self, work: WorkQueue) -> None:
        """Fetch images until none waits."""
        waiting: dict[Peer, deque[Image]] = {}
        while True:
            while (image := work.take()) is not None:
                peer = self._store.peer_of(image.address)
                if peer is None:
                    work.end(image, Status.AWAY)
                else:
                    work.defer(image)
                    waiting.setdefault(peer, deque()).append(image)
            if not waiting:
                return
            peer = next(iter(waiting))
            part = _PartOfQueue(work, waiting.pop(peer))
            try:
                self._session(peer).fetch(part)  # type: ignore[arg-type]
            except StoreError as error:
                self._drop(peer)
                self._store.failed(peer, [], error)
                part.fail(error.status)

    def store(self, work: WorkQueue, is_bad: Callable[[bytes], bool], refusal: Refusal) -> None:
        """End everything: nothing is sent to peers."""
        while (image := work.take()) is not None:
            work.end(image, Status.CANCELLED)

    def is_stale(self) -> bool:
        """Never: each connection is looked at when it is used."""
        return False

    def shut_down(self) -> None:
        """Make the calls under way fail, from any thread."""
        with self._lock:
            for session in self._open.values():
                session.shut_down()

    def close(self) -> None:
        """Close all connections."""
        for peer in list(self._open):
            self._drop(peer)

    def _by_peer(self, addresses: Sequence[bytes]) -> dict[Peer, list[bytes]]:
        parts: dict[Peer, list[bytes]] = {}
        for each in addresses:
            if (peer := self._store.peer_of(each)) is not None:
                parts.setdefault(peer, []).append(each)
        return parts

    def _session(self, peer: Peer) -> RespSession:
        if peer in self._open and self._open[peer].is_stale():
            self._drop(peer)
        if peer not in self._open:
            session = self._store.open(peer)
            with self._lock:
                self._open[peer] = session
        self._open.move_to_end(peer)
        while len(self._open) > self._store.most:
            self._drop(next(iter(self._open)))
        return self._open[peer]

    def _drop(self, peer: Peer) -> None:
        with self._lock:
            session = self._open.pop(peer, None)
        if session is not None:
            session.close()


class _PartOfQueue:
    """The images of one peer, as the queue that a session fetches."""

    def __init__(self, work: WorkQueue, images: deque[Image]) -> None:
        self._work = work
        self._images = images
        self._taken: list[Image] = []

    def take(self) -> Image | None:
        """The next image, held by the caller; `None` without one."""
        while self._images:
            image = self._images.popleft()
            self._taken.append(image)
            if self._work.hold(image):
                return image
            self._work.end(image, Status.DEADLINE)
        return None

    def end(self, image: Image, status: Status) -> None:
        """An image has ended."""
        self._work.end(image, status)

    def fail(self, status: Status) -> None:
        """End all of them that have not ended."""
        for image in (*self._taken, *self._images):
            self._work.end(image, status)
