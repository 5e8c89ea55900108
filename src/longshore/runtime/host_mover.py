"""Copies inside the host tier: a slot's image to another slot of the same size."""

from __future__ import annotations

import time

from longshore.boundary import Route, Slot, Status, Transfer, TransferResult
from longshore.errors import PlanError, TierClosedError
from longshore.tiers.host import HostTier


class HostMover:
    """Serves host -> host for one rank. `submit` copies the bytes."""

    def __init__(self, host: HostTier) -> None:
        self._host = host
        self._route = Route(host.name, host.name)
        self._results: list[TransferResult] = []
        self._closed = False

    @property
    def routes(self) -> frozenset[Route]:
        """From host slots to host slots."""
        return frozenset((self._route,))

    def submit(self, transfer: Transfer) -> None:
        """Validate all slots, then copy. Raises `PlanError` or `TierClosedError`, with nothing changed."""
        if self._closed:
            raise TierClosedError("the host mover was closed")
        if transfer.route != self._route:
            raise PlanError(f"expected route {self._route}, got {transfer.route}")
        copies = [self._copy(item.source, item.destination) for item in transfer.items]
        begun, array = time.monotonic(), self._host.arena.array
        for source, target, length in copies:
            array[target : target + length] = array[source : source + length]
        moved = sum(length for _, _, length in copies)
        statuses = (Status.OK,) * len(copies)
        self._results.append(TransferResult(transfer.job, statuses, moved, time.monotonic() - begun))

    def poll(self) -> list[TransferResult]:
        """Results since the last call."""
        results, self._results = self._results, []
        return results

    def cancel(self, job: int) -> None:
        """No effect: submitted transfers have ended."""

    def close(self) -> None:
        """Take no more transfers. The host tier stays its owner's."""
        self._closed = True

    def _copy(self, source: Slot | str | bytes | None, target: Slot | str | bytes | None) -> tuple[int, int, int]:
        """Where from, where to, how many bytes."""
        if (
            not isinstance(source, Slot)
            or not isinstance(target, Slot)
            or source == target
            or source.pool != target.pool
        ):
            raise PlanError(f"expected two slots of one pool, got {source!r} and {target!r}")
        if (source.tier, target.tier) != self._route:
            raise PlanError(f"expected slots of {self._host.name}, got {source} and {target}")
        offset, pool = self._host.offset, source.pool
        return offset(pool, source.index), offset(pool, target.index), self._host.image_bytes[pool]
