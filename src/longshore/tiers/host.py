"""The host tier: slots for block images inside the arena itself, and the movers between them and colder tiers.

    arena   │ ... │ slot 0 │ slot 1 │ ... │ slot n-1 │ ...
                  base     base + image_bytes                    (with one image size; `longshore.boundary` for several)
                    ▲ │
    TierMover       │ ▼      a transfer of the control plane becomes a batch of operations
    colder tier     slot

The transfer engine accesses a slot by its arena offset (`HostTier.offset`), without the `Tier` interface. As a `Tier`,
it copies between a slot and another range of the same arena; this is the reference implementation for other tiers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from longshore.boundary import (
    HOST,
    I64,
    PAGE,
    Item,
    Key,
    Probe,
    ProbeResult,
    Route,
    Slabs,
    Slot,
    Status,
    Transfer,
    TransferResult,
)
from longshore.errors import PlanError, TierClosedError, TierError
from longshore.tiers.arena import Arena, ArenaReport
from longshore.tiers.base import (
    BY_KEY,
    KeyedTier,
    Op,
    OpBatch,
    Tier,
    TierOp,
    TierResult,
    check_batch,
    check_generation,
)


class _Content(NamedTuple):
    """What the last `WRITE` to a slot said it was."""

    pool: int
    key: Key
    generation: int
    length: int


class HostTier(Tier):
    """`slabs` of images in `arena`, from `base` on.

    Copies are made in `submit`, in order, so `cancel` has no effect. Keys are those of `WRITE` operations: bytes that a
    mover wrote to a slot by offset have no key here, and a `READ` of them is a mismatch.
    """

    def __init__(self, arena: Arena, slabs: Slabs, *, base: int = 0) -> None:
        if slabs.slabs <= 0:
            raise TierError(f"a host tier needs at least one slab, got {slabs.slabs}")
        if any(size % PAGE for size in (slabs.slab_bytes, *slabs.image_bytes)):
            raise TierError(f"slabs and images must be multiples of {PAGE} bytes, got {slabs}")
        if base < 0 or base % PAGE:
            raise TierError(f"base must be a non-negative multiple of {PAGE}, got {base}")
        if base + slabs.nbytes > arena.nbytes:
            raise TierError(
                f"{slabs} at offset {base} need {base + slabs.nbytes} bytes, but the arena has {arena.nbytes}"
            )
        self.name = HOST
        self.slabs = slabs
        self.image_bytes = slabs.image_bytes
        self.arena = arena
        self._base = base
        self._contents: dict[int, dict[int, _Content]] = {}
        """By slab, and by slot in it."""
        self._forgotten = 0
        self._tickets = 0
        self._results: list[TierResult] = []
        self._closed = False

    def offset(self, pool: int, index: int) -> int:
        """Arena offset of the first byte of a slot. Raises `PlanError` if there is no such slot."""
        return self._base + self.slabs.offset(pool, index)

    def offsets(self, pool: int, indices: Sequence[int]) -> I64:
        """The same for many slots of one pool: int64, shape `(len(indices),)`."""
        return self._base + self.slabs.offsets(pool, indices)

    @property
    def report(self) -> ArenaReport:
        """State and fallbacks of the arena."""
        return self.arena.report

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Copy `batch`, now."""
        if self._closed:
            raise TierClosedError("the host tier was closed")
        arena_bytes = self.arena.array.nbytes  # raises when the arena was closed under us
        check_batch(batch, deadline, slabs=self.slabs, image_bytes=self.image_bytes, arena_bytes=arena_bytes)
        for op in batch:
            self._check_outside_slots(op)
        now = time.monotonic()
        state = OpBatch(self._tickets, batch, deadline, now)
        self._tickets += 1
        for index, op in enumerate(state.ops):
            now = time.monotonic()
            if state.late(now):
                state.end_pending(Status.DEADLINE, now)
                break
            state.begin(index, now)
            status = self._read(op) if op.op is Op.READ else self._write(op)
            state.end(index, status, time.monotonic())
        self._results.append(state.result())
        return state.ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call."""
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """Nothing: what was submitted has ended."""

    def close(self) -> None:
        """Take no more batches. The arena stays its owner's."""
        self._closed = True

    def forget(self, generation: int) -> None:
        """Serve nothing written before `generation`."""
        if self._closed:
            raise TierClosedError("the host tier was closed")
        check_generation(generation)
        self._forgotten = max(self._forgotten, generation)

    def _check_outside_slots(self, op: TierOp) -> None:
        # A copy into one of our own slots would change its bytes, but not the key that they are checked against.
        end = self._base + self.slabs.nbytes
        if op.offset < end and op.offset + op.length > self._base:
            raise TierError(
                f"bytes [{op.offset}, {op.offset + op.length}) overlap the host tier's own slots [{self._base}, {end})"
            )

    def _read(self, op: TierOp) -> Status:
        found = self._contents.get(self.slabs.slab_of(op.slot), {}).get(op.slot)
        if op.generation < self._forgotten or found != _Content(op.pool, op.key, op.generation, op.length):
            return Status.MISMATCH
        self._copy(op.offset, self.offset(op.pool, op.slot), op.length)
        return Status.OK

    def _write(self, op: TierOp) -> Status:
        if op.generation < self._forgotten:
            return Status.CANCELLED  # nobody could ever read it
        slab = self._contents.setdefault(self.slabs.slab_of(op.slot), {})
        if any(content.pool != op.pool for content in slab.values()):
            slab.clear()
        slab[op.slot] = _Content(op.pool, op.key, op.generation, op.length)
        self._copy(self.offset(op.pool, op.slot), op.offset, op.length)
        return Status.OK

    def _copy(self, destination: int, source: int, length: int) -> None:
        array = self.arena.array
        array[destination : destination + length] = array[source : source + length]


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


class KeyedMover(TierMover):
    """`TierMover` for a remote tier, which is addressed by key; also serves probes. One rank."""

    tier: KeyedTier

    def __init__(self, tier: KeyedTier, host: HostTier) -> None:
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
            raise PlanError(f"expected no slot on the side of a remote tier, got {ours}")
        return BY_KEY


def _result_of(probe: Probe, present: tuple[bool, ...] | None) -> ProbeResult:
    if present is None:
        return ProbeResult(probe.probe, (False,) * len(probe.keys), Status.UNAVAILABLE)
    return ProbeResult(probe.probe, present)
