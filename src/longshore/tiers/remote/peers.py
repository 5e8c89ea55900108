"""Other replicas as a store: each is a server of RESP (`longshore.runtime.peer_server`), and requests name it.

    a request names a peer ─► route(keys, peer) ─► probes and reads of these keys go there

`PeerTier` has a `RemoteTier` for each peer, as for each node of a cluster: threads, connections and a circuit breaker
of its own, so that one that hangs holds up no other. A key that no request has named a peer for is absent, and nobody
is asked. Nothing is ever sent to a peer.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from longshore.boundary import PEERS, Key, Status
from longshore.errors import HintError
from longshore.tiers.remote.cluster import ClusterNode, NodesTier, Portion
from longshore.tiers.remote.settings import RemoteSettings

MOST_PEERS = 32
"""Peers that have connections at a time: others are not asked until one has not been used for a minute."""

_ROUTES = 1 << 16
"""Keys whose peer is known; the oldest are removed first."""

_log = logging.getLogger(__name__)


def parse_peer(said: Any, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> ClusterNode:
    """The peer that a request names by `{"host": ADDRESS, "port": PORT}`. Raises `HintError`.

    Clients of the engine may write that, so it must be in `networks`, or they could have it connect anywhere.
    """
    host, port = (said.get("host"), said.get("port")) if isinstance(said, Mapping) else (None, None)
    if not isinstance(host, str) or isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise HintError(f"expected a peer as host, an IP address, and port, got {str(said)[:80]!r}")
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        raise HintError(f"expected the host of a peer as an IP address, got {host[:80]!r}") from None
    if found.is_unspecified or found.is_multicast:
        raise HintError(f"expected the address of one machine, got {found}")
    if not any(found in network for network in networks):
        raise HintError(f"the peer {found} is in none of the networks of peer_networks")
    return ClusterNode(str(found), port)


class PeerTier(NodesTier):
    """What peers have, as a remote tier that is only read. `settings` hold for each of them, but for host and port."""

    def __init__(self, settings: RemoteSettings, networks: Sequence[str], **options: Any) -> None:
        """`networks` are those in which requests may name peers; `options` are those of `RemoteTier`."""
        super().__init__(settings, name=PEERS, failures=1, **options)
        self._networks = [ipaddress.ip_network(each) for each in networks]
        self._routes: OrderedDict[bytes, ClusterNode] = OrderedDict()
        self._said: set[bytes] = set()
        """Addresses of which a peer says that they are coming, in probes under way."""
        self._coming: set[bytes] = set()
        """The same by the last probe that has ended."""
        if settings.credentials()[1] and not settings.tls:
            _log.warning("peer_url has a password and no TLS: it is sent in the clear to any peer that a request names")
        self._thread.start()

    def parse(self, said: Any) -> ClusterNode:
        """The peer that a request names, as by `parse_peer`."""
        return parse_peer(said, self._networks)

    def route(self, keys: Iterable[Key], peer: ClusterNode) -> None:
        """Have `peer` asked for `keys`."""
        with self._lock:
            for name in map(self._address, keys):
                self._routes[name] = peer
                self._routes.move_to_end(name)
            while len(self._routes) > _ROUTES:
                oldest, _ = self._routes.popitem(last=False)
                self._coming.discard(oldest)
                self._said.discard(oldest)
            self._wanted.set()

    def are_coming(self, keys: Iterable[Key]) -> bool:
        """Whether a peer has last answered of any of `keys` that it is computing or storing it."""
        with self._lock:
            return not self._coming.isdisjoint(map(self._address, keys))

    def _node_of(self, name: bytes) -> ClusterNode | None:
        peer = self._routes.get(name)
        if peer is not None and (peer in self._nodes or len(self._nodes) < MOST_PEERS):
            return peer
        self._coming.discard(name)
        return None

    def _redirected(self, node: ClusterNode, name: bytes, error: bytes) -> None:
        with self._lock:
            if name in self._routes:
                self._said.add(name)

    def _ended(self, node: ClusterNode, part: Portion, how: Sequence[Status | bool | None]) -> None:
        if part.whole.generation is not None:
            names = [self._address(part.whole.what[index]) for index in part.indices]
            self._coming.difference_update(names)
            self._coming.update(name for name, each in zip(names, how, strict=True) if not each and name in self._said)
            self._said.difference_update(names)
        super()._ended(node, part, how)
