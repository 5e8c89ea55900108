"""What a replay counts: times and hits of requests, and why blocks were computed."""

from __future__ import annotations

import enum
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from longshore.boundary import DEVICE, HOST, REMOTE, Items, Key, Status, Transfer, TransferResult


class Loss(enum.Enum):
    """Why a block was computed. Closed: each complete block of a prompt was loaded, or has one of these causes."""

    FIRST_USE = "first_use"  # no request has asked for it before
    LAST_TOKEN = "last_token"  # noqa: S105 - the last token of a prompt is always computed, and this block ends with it
    OTHER_REPLICA = "other_replica"  # only other replicas were asked for it before, and no shared store had it
    PENDING = "pending"  # asked for before, and not in host memory yet
    BACKPRESSURE = "backpressure"  # not stored: what was to make way had not been copied down yet
    NOT_STORED = "not_stored"  # not stored, for other reasons
    FORGOTTEN = "forgotten"  # evicted from host memory before a colder tier had a copy
    EVICTED = "evicted"  # evicted from the coldest tier that had it
    NOT_LOADED = "not_loaded"  # found, but no room for it, or not in time
    CHOICE = "computed_by_choice"  # found, but faster to compute than to load


class Losses:
    """What has become of each block that a replica was asked for, by what movers report and by what its cache takes.

    About 100 bytes for each different block. Replicas share `counts`, and the set of all blocks `asked` for, which one
    replica alone has no use for.
    """

    def __init__(self, coldest: str, counts: Counter[Loss], asked: set[int] | None = None) -> None:
        self.counts = counts
        self._coldest, self._asked = coldest, asked
        self._cause: dict[int, Loss] = {}
        """The cause that counts if the block is asked for and not there; by the first 8 bytes of its key."""

    def miss(self, keys: Sequence[Key], usable: int) -> None:
        """A request looked for `keys`, of which the first `usable` may be loaded, and found none of them."""
        causes, asked, new = self._cause, self._asked, 0
        for at, name in enumerate(_names(keys)):
            cause = causes.get(name)
            if cause is None:
                causes[name] = Loss.PENDING
                if asked is None or name not in asked:
                    new += 1
                else:
                    self.counts[Loss.OTHER_REPLICA] += 1
                if asked is not None:
                    asked.add(name)
            else:
                self.counts[Loss.LAST_TOKEN if at >= usable else cause] += 1
        self.counts[Loss.FIRST_USE] += new

    def arrived(self, transfer: Transfer, result: TransferResult) -> None:
        """Copies have come into a tier."""
        source, tier = transfer.route
        if tier == DEVICE or source not in (DEVICE, HOST, REMOTE):
            return
        cause = Loss.FORGOTTEN if tier == HOST and self._coldest != HOST else Loss.EVICTED
        items = transfer.items
        names = _names(items.keys if isinstance(items, Items) else [item.key for item in items])
        if source != REMOTE and result.statuses.count(Status.OK) == len(names):
            self._cause.update(dict.fromkeys(names, cause))
            return
        for name, status in zip(names, result.statuses, strict=True):
            if status is Status.OK and (source != REMOTE or name not in self._cause):  # else its cause is known
                self._cause[name] = cause

    def refused(self, keys: Sequence[Key], cause: Loss) -> None:
        """Host memory did not take `keys`."""
        self._cause.update(dict.fromkeys(_names(keys), cause))


def _names(keys: Sequence[Key]) -> list[int]:
    """The first 8 bytes of `keys`, which are of one length, a multiple of 8."""
    if not keys:
        return []
    names: list[int] = np.frombuffer(b"".join(keys), ">u8")[:: len(keys[0]) // 8].tolist()
    return names


@dataclass(slots=True)
class ReplayTally:
    """Counters of a replay, of all replicas together.

    Blocks are the complete blocks of prompts; times are in seconds.

    Attributes:
        arrivals: When each request arrived, in the time of the trace.
        waited: By request, from its arrival until an engine began to compute it.
        blocks: By request, its complete blocks.
        loaded: By tier, the blocks loaded for each request.
        ttft: By request, with tiers.
        recompute: By request, if everything is computed.
    """

    requests: int = 0
    block_refs: int = 0
    prompt_tokens: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    computed_by_choice: int = 0
    computing: float = 0.0
    recomputing: float = 0.0
    ttft: array[float] = field(default_factory=lambda: array("d"))
    recompute: array[float] = field(default_factory=lambda: array("d"))
    first: float = 0.0
    last: float = 0.0
    losses: Counter[Loss] = field(default_factory=Counter)
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    waited: array[float] = field(default_factory=lambda: array("d"))
    blocks: array[int] = field(default_factory=lambda: array("i"))
    loaded: dict[str, array[int]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return self.last - self.first

    def arrive(self, seconds: float, blocks: int, recompute: float) -> int:
        """A request arrives, with so many blocks, whose first token would take `recompute` seconds; its number."""
        self.first = self.first if self.requests else seconds
        self.last = seconds
        self.requests += 1
        self.block_refs += blocks
        self.arrivals.append(seconds)
        self.blocks.append(blocks)
        self.recompute.append(recompute)
        for times in (self.ttft, self.waited):
            times.append(0.0)
        for counts in self.loaded.values():
            counts.append(0)
        return self.requests - 1

    def load(self, number: int, sources: Mapping[str, int]) -> None:
        """Blocks have been loaded for a request, so many from each tier."""
        self.hits.update(sources)
        for tier, count in sources.items():
            if tier not in self.loaded:
                self.loaded[tier] = array("i", bytes(4 * self.requests))
            self.loaded[tier][number] += count
