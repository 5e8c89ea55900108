"""Movers between the host tier and a colder one: a transfer of the control plane becomes a batch of operations.

    arena   │ slot 0 │ slot 1 │ ... │ slot n-1 │
              ▲ │
    TierMover │ ▼
    colder tier

`KeyedMover` serves remote tiers, and also asks them which keys they have.
"""

from __future__ import annotations

from longshore.boundary import HOST, Item, Probe, ProbeResult, Route, Slot, Status, Transfer, TransferResult
from longshore.errors import PlanError
from longshore.tiers.base import BY_KEY, KeyedTier, Op, Tier, TierOp
from longshore.tiers.host import HostSlabs

_PROBES = 1024
"""Largest number of pending probes; the oldest are abandoned."""


class TierMover:
    """Serves host -> `tier` and `tier` -> host for one rank."""

    def __init__(self, tier: Tier, host: HostSlabs) -> None:
        sizes = host.slabs.image_bytes
        if tier.image_bytes != sizes:
            raise PlanError(f"{tier.name} has images of {tier.image_bytes} bytes, the host tier of {sizes}")
        self.tier = tier
        self._host = host
        self._write = Route(HOST, tier.name)
        self._read = Route(tier.name, HOST)
        self._jobs: dict[int, int] = {}  # ticket -> job
        self._tickets: dict[int, int] = {}  # job -> ticket

    @property
    def routes(self) -> frozenset[Route]:
        """Both directions."""
        return frozenset((self._write, self._read))

    def submit(self, transfer: Transfer) -> None:
        """Begin `transfer`, after the tier has validated all of it."""
        op = Op.WRITE if transfer.route == self._write else Op.READ
        batch = [self._operation(op, item, transfer.generation) for item in transfer.items]
        ticket = self.tier.submit(batch, transfer.deadline)
        self._jobs[ticket] = transfer.job
        self._tickets[transfer.job] = ticket

    def poll(self) -> list[TransferResult]:
        """Results that arrived since the last call."""
        results = []
        for done in self.tier.poll():
            job = self._jobs.pop(done.ticket)
            del self._tickets[job]
            results.append(TransferResult(job, done.statuses, done.bytes, done.seconds, done.queued_seconds))
        return results

    def cancel(self, job: int) -> None:
        """Items of `job` that have not begun need not begin."""
        ticket = self._tickets.get(job)
        if ticket is not None:
            self.tier.cancel(ticket)

    def close(self) -> None:
        """Close the tier; the last results can still be polled."""
        self.tier.close()

    def _operation(self, op: Op, item: Item, generation: int) -> TierOp:
        tier_slot, host_slot = (item.destination, item.source) if op is Op.WRITE else (item.source, item.destination)
        if host_slot is None:
            raise PlanError(f"expected a host slot on one side of a transfer between tiers, got {item}")
        index = self._address(tier_slot, host_slot)
        slabs, size_class = self._host.slabs, host_slot.size_class
        offset, length = slabs.offset(size_class, host_slot.index), slabs.image_bytes[size_class]
        return TierOp(op, index, item.key, item.parent, offset, length, generation, size_class)

    def _address(self, tier_slot: Slot | None, host_slot: Slot) -> int:
        """The index of the slot in the tier. Raises `PlanError` where there is none, or one of another size class."""
        if tier_slot is None or tier_slot.size_class != host_slot.size_class:
            raise PlanError(
                f"expected slots of one size class on both sides of a transfer, got {tier_slot} and {host_slot}"
            )
        return tier_slot.index


class KeyedMover(TierMover):
    """`TierMover` for a remote tier, which is addressed by key; also serves probes. One rank."""

    tier: KeyedTier

    def __init__(self, tier: KeyedTier, host: HostSlabs) -> None:
        super().__init__(tier, host)
        self._probes: dict[int, Probe] = {}  # by ticket, of the last ones

    @property
    def tier_name(self) -> str:
        """Of the tier that is asked."""
        return self.tier.name

    def ask(self, probe: Probe) -> None:
        """Begin `probe`."""
        self._probes[self.tier.ask(probe.keys, probe.generation, probe.deadline)] = probe
        if len(self._probes) > _PROBES:  # some answers never come
            del self._probes[next(iter(self._probes))]

    def answers(self) -> list[ProbeResult]:
        """Answers that arrived since the last call."""
        results = []
        for ticket, present in self.tier.answers():
            probe = self._probes.pop(ticket, None)
            if probe is not None and present is not None:
                results.append(ProbeResult(probe.probe, present))
            elif probe is not None:
                results.append(ProbeResult(probe.probe, (False,) * len(probe.keys), Status.UNAVAILABLE))
        return results

    def _address(self, tier_slot: Slot | None, host_slot: Slot) -> int:
        if tier_slot is not None:
            raise PlanError(f"expected no slot on the side of a remote tier, got {tier_slot}")
        return BY_KEY
