"""A tier below the host as a mover: host slots become arena offsets, transfers become batches."""

from __future__ import annotations

from dataclasses import replace

from longshore.boundary import Item, Probe, ProbeResult, Route, Slot, Status, Transfer, TransferResult
from longshore.errors import PlanError
from longshore.tiers.base import BY_KEY, ForeignTier, Op, Tier, TierOp
from longshore.tiers.host import HostTier

_PROBES = 1024
"""Largest number of pending probes; the oldest are abandoned."""


class TierMover:
    """Serves host -> `tier` and `tier` -> host for one rank."""

    def __init__(self, tier: Tier, host: HostTier) -> None:
        if tier.image_bytes != host.image_bytes:
            raise PlanError(f"{tier.name} has images of {tier.image_bytes} bytes, the host tier of {host.image_bytes}")
        self.tier = tier
        self._host = host
        self._write = Route(host.name, tier.name)
        self._read = Route(tier.name, host.name)
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
        ours, hosts = (item.destination, item.source) if op is Op.WRITE else (item.source, item.destination)
        if hosts is None:
            raise PlanError(f"expected a host slot on one side of a transfer between tiers, got {item}")
        index = self._address(ours, hosts)
        offset, length = self._host.offset(hosts.pool, hosts.index), self._host.image_bytes[hosts.pool]
        return TierOp(op, index, item.key, item.parent, offset, length, generation, hosts.pool)

    def _address(self, ours: Slot | None, hosts: Slot) -> int:
        """The index of the slot in the tier. Raises `PlanError` where there is none, or one of another pool."""
        if ours is None or ours.pool != hosts.pool:
            raise PlanError(
                f"expected slots of one pool on both sides of a transfer between tiers, got {ours} and {hosts}"
            )
        return ours.index


class ForeignMover(TierMover):
    """`TierMover` for a foreign tier, which is addressed by key; also serves probes. One rank."""

    tier: ForeignTier

    def __init__(self, tier: ForeignTier, host: HostTier) -> None:
        super().__init__(tier, host)
        self._probes: dict[int, Probe] = {}  # by ticket, of the last ones

    @property
    def asks(self) -> str:
        """The name of the tier."""
        return self.tier.name

    def ask(self, probe: Probe) -> None:
        """Begin `probe`."""
        self._probes[self.tier.ask(probe.keys, probe.generation, probe.deadline)] = probe
        if len(self._probes) > _PROBES:  # some answers never come
            del self._probes[next(iter(self._probes))]

    def answers(self) -> list[ProbeResult]:
        """Answers that arrived since the last call."""
        known = [(self._probes.pop(ticket, None), present) for ticket, present in self.tier.answers()]
        return [_result_of(probe, present) for probe, present in known if probe is not None]

    def _address(self, ours: Slot | None, hosts: Slot) -> int:
        if ours is not None:
            raise PlanError(f"expected no slot on the side of a foreign tier, got {ours}")
        return BY_KEY


def _result_of(probe: Probe, present: tuple[bool, ...] | None) -> ProbeResult:
    if present is None:
        return ProbeResult(probe.probe, (False,) * len(probe.keys), Status.AWAY)
    return ProbeResult(probe.probe, present)


def truncated(transfer: Transfer, items: int, blocks_per_chunk: int) -> Transfer:
    """The leading `items` of a single-section transfer, with the device blocks that they fill."""
    kept = transfer.items[:items]
    if not transfer.sections:
        return replace(transfer, items=kept)
    (section,) = transfer.sections
    blocks = items * blocks_per_chunk - section.first_block % blocks_per_chunk
    return replace(transfer, items=kept, sections=(section._replace(blocks=section.blocks[:blocks]),), tokens=None)
