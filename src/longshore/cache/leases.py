"""Leases of requests on the chunks that their lookups found, and the protection of chunks until the end of a step.

Lease           what a request has: none of its chunks is evicted until it is released
pin             a reference on one node, which keeps that chunk and those before it from eviction; a lease has some
protected       a chunk that a lookup without a lease has found: not evicted until `end_step`
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from longshore.boundary import Key
from longshore.cache.columns import i32_view, u8_view, unique
from longshore.cache.index import Index
from longshore.cache.state import CacheState, Pin
from longshore.cache.transfers import Load, Wait
from longshore.cache.types import Lease
from longshore.errors import CacheError, LeaseError


@dataclass(slots=True, eq=False)
class LeasedChunks:
    """Leased chunks of one KV cache group: `keys`, at `positions` of their path, kept by pins on nodes.

    A pin on the last chunk keeps a path. Chunks that stand `alone` have a pin each. `blocks` is the number of device
    blocks of a load, where the lookup has determined it.
    """

    keys: Sequence[Key]
    positions: Sequence[int]
    pins: Sequence[Pin]
    group: int = 0
    alone: bool = field(default=False, kw_only=True)
    blocks: int = field(default=0, kw_only=True)

    def nodes(self, index: Index) -> list[int]:
        """The nodes of the chunks, head first, up to the first one that was removed."""
        if self.alone:
            return list(takewhile(bool, (pin.node for pin in self.pins)))
        tail = self.pins[0].node
        if not tail:
            return index.reachable_nodes(self.keys)
        last = self.positions[-1]
        path = index.path(tail, last - self.positions[0] + 1)
        return path[::-1] if len(path) == len(self.keys) else [path[last - at] for at in self.positions]


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """What the control plane knows of a lease: the leased chunks, of one or several groups, its load and prefetch."""

    parts: Sequence[LeasedChunks]
    request: str | None
    request_number: int
    is_multi_group: bool = field(kw_only=True)
    load: Load | None = None
    prefetch: Wait | None = None

    @property
    def keys(self) -> list[Key]:
        """The keys of all groups, one group after the other."""
        return [key for part in self.parts for key in part.keys]

    def nodes(self, index: Index) -> list[int]:
        """The nodes of all groups, of each up to the first one that was removed."""
        return [node for part in self.parts for node in part.nodes(index)]


class Leases:
    """The leases on one `CacheState`, by number."""

    def __init__(self, state: CacheState) -> None:
        self._state = state
        self._records: dict[int, LeaseRecord] = {}
        self._step = array("i")
        """Nodes protected in this step, each once; some may have been removed since."""

    def __len__(self) -> int:
        """Number of leases not released."""
        return len(self._records)

    @property
    def protected(self) -> int:
        """Number of chunks that lookups protect until the end of the step."""
        return int(np.count_nonzero(u8_view(self._state.protected)[np.unique(i32_view(self._step))]))

    def __iter__(self) -> Iterator[LeaseRecord]:
        return iter(self._records.values())

    def take(
        self, identity: int, parts: Sequence[LeasedChunks], request: str | None, *, is_multi_group: bool = False
    ) -> Lease:
        """A new lease on `parts`, whose nodes are pinned."""
        self._records[identity] = LeaseRecord(
            parts, request, self._state.current_request, is_multi_group=is_multi_group
        )
        return Lease(identity)

    def get(self, lease: Lease) -> LeaseRecord:
        """The record of `lease`. Raises `LeaseError` if it was released, or is no lease of this cache."""
        record = self._records.get(lease.id) if isinstance(lease, Lease) else None
        if record is None:
            raise LeaseError(f"expected a lease of this cache that was not released, got {lease!r}")
        return record

    def to_load(self, lease: Lease) -> LeaseRecord:
        """The record of `lease`, to load it. Raises `LeaseError` if it was loaded, or is of single chunks."""
        record = self.get(lease)
        if not record.is_multi_group and record.parts[0].alone:
            raise LeaseError(f"lease {lease.id} is of single chunks, not of a path: load these by their keys")
        if record.load is not None:
            raise LeaseError(f"lease {lease.id} was loaded before; a lease serves one load")
        return record

    def release(self, lease: Lease) -> None:
        """Remove `lease`, and record a use of its chunks by its request."""
        record = self._records.pop(lease.id)
        self._state.set_request(record.request_number)
        for part in record.parts:
            nodes = [node for pin in part.pins if (node := pin.node)]
            if part.alone:
                self._state.windows.serve(nodes)
            elif nodes:
                nodes = self._state.index.path(nodes[0], part.positions[-1] - part.positions[0] + 1)
            self._state.touch(nodes if not part.alone else nodes[::-1])
            for pin in part.pins:
                self._state.unpin(pin)

    def protect(self, at: npt.NDArray[np.int32]) -> None:
        """Protect the nodes `at` from eviction until `end_step`, those in the warmest tier in that tier."""
        seen = u8_view(self._state.protected)
        fresh = unique(at[seen[at] == 0])
        seen[fresh] = 1
        self._step.frombytes(fresh.tobytes())

    @property
    def protects(self) -> bool:
        """Whether nodes are protected until the end of the step."""
        return bool(self._step)

    def forget_step(self) -> None:
        """The cache was cleared: nothing is protected any more."""
        self._step = array("i")

    def end_step(self) -> None:
        """The step has ended: remove all protections."""
        if self._step:
            at, self._step = i32_view(self._step), array("i")
            u8_view(self._state.protected)[at] = 0
            self._state.recheck_evictable(at)
        self._state.discard_invalid_copies()

    def check_integrity(self) -> None:
        """Raise `CacheError` unless all pins are those of leases, and all marks those of protected nodes."""
        held = [pin for record in self for part in record.parts for pin in part.pins]
        ours = {pin for pin in held if pin.node}
        theirs = {pin for pins in self._state.pins.values() for pin in pins}
        if ours != theirs:
            raise CacheError(f"the cache has {len(theirs)} pins, the leases {len(ours)}")
        seen = set(np.flatnonzero(u8_view(self._state.protected)).tolist())
        if not seen <= set(self._step):
            raise CacheError(f"{len(seen)} nodes are marked as protected, expected {len(set(self._step))}")
