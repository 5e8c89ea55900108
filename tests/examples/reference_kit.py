"""The reference engine over a device whose copies wait at gates, and the engine without tiers that judges it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from examples.reference_engine import Decoder, DevicePool, Engine, Request, Shape, Tiers, cache_groups
from examples.reference_engine.engine import scope_of

from failing_copy import FailingCopy
from longshore.boundary import DEVICE, HOST
from longshore.config import Config
from longshore.layout import KVLayout
from longshore.runtime.stack import open_stack
from longshore.transfer import CpuDevice
from longshore.transfer.device.base import Copy, CpuStream, DeviceEvent, Stream
from longshore.transfer.pieces import CopyBatch

TIMEOUT = 10.0
"""Seconds until something that must happen counts as not happening."""

CPU = torch.device("cpu")
SHAPE = Shape()
DECODER = Decoder(SHAPE, CPU)


class CopyGate:
    """Copies into one tier: how many may pass."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._passes: int | None = None
        self.arrived = 0
        self.passed = 0

    def shut(self) -> None:
        self.let(0)

    def let(self, passes: int) -> None:
        """Let so many more pass."""
        with self._changed:
            self._passes = passes
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._passes = None
            self._changed.notify_all()

    def wait_arrived(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.arrived >= count, TIMEOUT)

    def pass_through(self) -> None:
        with self._changed:
            self.arrived += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._passes != 0, TIMEOUT):
                raise TimeoutError("the gate was never opened")
            if self._passes is not None:
                self._passes -= 1
            self.passed += 1


class GatedLink(CpuDevice):
    """Real copies, each of which waits at the gate of its direction.

    `fault` may raise in place of a copy, `late_fault` after the copy was said to be under way. `marked` and `held` are
    the compute sides that were named.
    """

    def __init__(self) -> None:
        self.gates = {DEVICE: CopyGate(), HOST: CopyGate()}
        self.fault: Callable[[CopyBatch], None] = lambda batch: None
        self.late_fault: Callable[[CopyBatch], None] = lambda batch: None
        self.inside = 0
        self.marked: list[object] = []
        self.held: list[object] = []

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        return _GatedStream(self, destination)

    def record_event(self, compute: object) -> DeviceEvent:
        self.marked.append(compute)
        return super().record_event(compute)

    def wait_event(self, compute: object, event: DeviceEvent) -> None:
        self.held.append(compute)
        super().wait_event(compute, event)


class _GatedStream(CpuStream):
    def __init__(self, link: GatedLink, destination: str) -> None:
        super().__init__()
        self._link = link
        self._into = destination

    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        self._link.gates[self._into].pass_through()
        self._link.fault(batch)
        self._link.inside += batch.is_d2d
        return FailingCopy(super().copy(batch, wait_events), lambda: self._link.late_fault(batch))


class Rig:
    """An engine with tiers. `blocks` is the size of the device pool."""

    def __init__(
        self,
        blocks: int = 24,
        *,
        by_layer: bool = True,
        timeout: float = TIMEOUT,
        batch: int = 2,
        compute: object = None,
        **settings: Any,
    ) -> None:
        self.link = GatedLink()
        self.pool = DevicePool(SHAPE, blocks, CPU)
        config = Config.make(**{"host_size": "4MiB", "background": False, **settings})
        groups, scope = cache_groups(SHAPE), scope_of(DECODER, self.pool)
        self.stack = open_stack(config, self.pool.layout, scope, self.link, groups=groups, partial=True)
        self.tiers = Tiers(self.stack, self.pool, compute, by_layer=by_layer, timeout=timeout)
        self.engine = Engine(DECODER, self.pool, self.tiers, batch=batch)

    def serve(self, prompt: Sequence[int], wanted: int = 3) -> Request:
        request = self.engine.submit(prompt, wanted)
        self.engine.run()
        return request

    def settle(self) -> None:
        """All copies have ended."""
        assert self.stack.runtime.flush(TIMEOUT)

    def evict_all(self) -> None:
        """Take every block, so that the prefix cache on the device is empty."""
        self.settle()
        self.pool.give(self.pool.take(self.pool.size))

    def check_nothing_is_held(self) -> None:
        """After all requests have ended: no hold, no job, no block that is not free or idle."""
        self.settle()
        self.pool.give(self.pool.take(0))
        with self.stack.runtime.locked() as cache:
            cache.check_integrity()
            assert (cache.leases, cache.protected, cache.jobs_in_flight) == (0, 0, 0)
        assert self.pool.obtainable == self.pool.size


@contextlib.contextmanager
def rig(blocks: int = 24, **settings: Any) -> Iterator[Rig]:
    made = Rig(blocks, **settings)
    try:
        yield made
    finally:
        for gate in made.link.gates.values():
            gate.open()
        made.link.fault = made.link.late_fault = lambda batch: None
        made.stack.close()


def resident(requests: Sequence[Request], prompts: Sequence[Sequence[int]]) -> list[Request]:
    """The same prompts, on a device that never evicts and has no tiers, by the same schedule."""
    engine = Engine(DECODER, DevicePool(SHAPE, 4096, CPU))
    replayed = {}
    for at in sorted(range(len(requests)), key=lambda at: requests[at].schedule.turn):
        replayed[at] = engine.submit(prompts[at], len(requests[at].logits), requests[at].schedule)
        engine.run()
    return [replayed[at] for at in range(len(requests))]


def same_bits(one: Request, other: Request) -> bool:
    """Whether all logits are the same, bit for bit."""
    pairs = zip(one.logits, other.logits, strict=True)
    return one.tokens == other.tokens and all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def tokens(seed: int, count: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    drawn: list[int] = torch.randint(0, SHAPE.vocab, (count,), generator=random).tolist()
    return drawn


def wanting(count: int) -> Request:
    return Request([], 0, [], logits=[torch.zeros(0)] * count)
