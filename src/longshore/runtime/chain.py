"""Several tiers below the host tier as one mover: host <-> each tier, and down from one tier to the next.

    tier ──read──► stage ──write──► the next tier     a stage is a slab of the host tier that the cache knows nothing of

Tiers access host memory only, so copies from tier to tier go through it. They use staging slots of their own, because
only the control plane can allocate slots of the cache. An image whose read failed is not written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise

from longshore.boundary import Item, Route, Slot, Status, Transfer, TransferResult
from longshore.errors import PlanError, QueueFullError, TierClosedError
from longshore.runtime.tier_mover import TierMover
from longshore.tiers.base import Tier
from longshore.tiers.host import HostTier


@dataclass(slots=True)
class _Relay:
    """A transfer from one tier to the next: what has not begun, and how the rest ended."""

    transfer: Transfer
    pending: deque[int]
    statuses: list[Status | None]
    bytes: int = 0
    seconds: float = 0.0
    legs: set[int] = field(default_factory=set)

    def end(self, positions: Sequence[int], status: Status) -> None:
        """Items have ended."""
        for position in positions:
            self.statuses[position] = status


@dataclass(frozen=True, slots=True)
class _Leg:
    """Half of the way of some items of a relay, by stages."""

    relay: _Relay
    positions: tuple[int, ...]
    stages: tuple[int, ...]
    writing: bool


class TierChain:
    """Serves `tiers`, warmest first, for one rank; owns the last `stages` slabs of `host`."""

    def __init__(self, tiers: Sequence[Tier], host: HostTier, stages: int) -> None:
        if not 0 < stages < host.slabs.slabs:
            raise PlanError(f"expected stages among the {host.slabs.slabs} slabs of the host tier, got {stages}")
        self._host = host
        self._movers = {tier.name: TierMover(tier, host) for tier in tiers}
        self._by_route = {route: mover for mover in self._movers.values() for route in mover.routes}
        self._down = frozenset(Route(upper.name, lower.name) for upper, lower in pairwise(tiers))
        self._free = deque(range(host.slabs.slabs - stages, host.slabs.slabs))
        self._relays: dict[int, _Relay] = {}
        self._legs: dict[int, _Leg] = {}
        self._numbers = count(-1, -1)  # of legs, which are nobody else's business

    @property
    def routes(self) -> frozenset[Route]:
        """To and from the host, and down from each tier to the next."""
        return frozenset((*self._by_route, *self._down))

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer`, after validating all of it."""
        if transfer.route not in self._down:
            self._by_route[transfer.route].submit(transfer)
            return
        for item in transfer.items:
            self._check(item, transfer.route)
        items = range(len(transfer.items))
        self._relays[transfer.job] = _Relay(transfer, deque(items), [None] * len(items))
        self._proceed()

    def poll(self) -> list[TransferResult]:
        """Results that arrived since the last call."""
        results = []
        for mover in self._movers.values():
            for result in mover.poll():
                if result.job in self._legs:
                    self._end_leg(self._legs.pop(result.job), result)
                else:
                    results.append(result)
        self._proceed()
        return results + list(self._ended())

    def cancel(self, job: int) -> None:
        """What has not begun of `job` need not begin."""
        relay = self._relays.get(job)
        if relay is None:
            for mover in self._movers.values():
                mover.cancel(job)
            return
        relay.end(relay.pending, Status.CANCELLED)
        relay.pending.clear()
        for leg in relay.legs:
            for mover in self._movers.values():
                mover.cancel(leg)

    def close(self) -> None:
        """Close the tiers; the last results can still be polled."""
        for relay in self._relays.values():
            relay.end(relay.pending, Status.TIER_OFF)
            relay.pending.clear()
        for mover in self._movers.values():
            mover.close()

    # ------------------------------------------------------------------ inside

    def _check(self, item: Item, route: Route) -> None:
        upper, lower = item.source, item.destination
        if upper is None or lower is None or upper.pool != lower.pool:
            raise PlanError(
                f"expected slots of one pool on both sides of a transfer between tiers, got {upper} and {lower}"
            )
        for slot, tier in zip((upper, lower), route, strict=True):
            self._movers[tier].tier.slabs.check(slot.pool, slot.index)

    def _proceed(self) -> None:
        """Begin what there are stages for, the oldest first."""
        for relay in self._relays.values():
            several = min(len(relay.pending), len(self._free))
            if several:
                positions = tuple(relay.pending.popleft() for _ in range(several))
                self._begin(_Leg(relay, positions, tuple(self._free.popleft() for _ in positions), writing=False))

    def _begin(self, leg: _Leg) -> None:
        """Order one half of the way; what cannot be begun has ended."""
        transfer, number = leg.relay.transfer, next(self._numbers)
        upper, lower = transfer.route
        mover = self._movers[lower if leg.writing else upper]
        route = Route(self._host.name, lower) if leg.writing else Route(upper, self._host.name)
        items = [
            self._item(transfer.items[at], stage, leg) for at, stage in zip(leg.positions, leg.stages, strict=True)
        ]
        try:
            mover.submit(replace(transfer, job=number, route=route, items=tuple(items), after=()))
        except (QueueFullError, TierClosedError) as error:
            full = isinstance(error, QueueFullError)
            leg.relay.end(leg.positions, Status.QUEUE_FULL if full else Status.TIER_OFF)
            self._free.extend(leg.stages)
        else:
            self._legs[number] = leg
            leg.relay.legs.add(number)

    def _item(self, item: Item, stage: int, leg: _Leg) -> Item:
        pool = 0 if item.source is None else item.source.pool
        between = Slot(self._host.name, pool, self._host.slabs.slots_of(stage, pool)[0])
        return item._replace(source=between) if leg.writing else item._replace(destination=between)

    def _end_leg(self, leg: _Leg, result: TransferResult) -> None:
        """What was read is written; what was written, or failed, has ended."""
        relay = leg.relay
        relay.legs.discard(result.job)
        relay.seconds += result.seconds
        on, stages = [], []
        for position, stage, status in zip(leg.positions, leg.stages, result.statuses, strict=True):
            if leg.writing or status is not Status.OK:
                relay.end((position,), status)
                self._free.append(stage)
            else:
                on.append(position)
                stages.append(stage)
        if leg.writing:
            relay.bytes += result.bytes
        elif on:
            self._begin(_Leg(relay, tuple(on), tuple(stages), writing=True))

    def _ended(self) -> Iterator[TransferResult]:
        for job, relay in list(self._relays.items()):
            statuses = tuple(status for status in relay.statuses if status is not None)
            if len(statuses) == len(relay.statuses):
                del self._relays[job]
                yield TransferResult(job, statuses, relay.bytes, relay.seconds)
