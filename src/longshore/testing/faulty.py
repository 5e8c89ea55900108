"""A tier that fails on purpose, on a plan.

    FaultyTier(inner, FaultPlan((
        Rule(Op.READ, Fault.CORRUPT, probability=0.01),
        Rule(Op.WRITE, Fault.FULL, nth=frozenset({3})),
    ), seed=7), arena)

    submit ──► plan ──┬── fail, full ─────────────────────────────► ended, inner never called
                      ├── delay ─────── waits ───► inner ─────────► ended
                      └── all others ────────────► inner ── harm ─► ended

The plan depends on its seed and on the count of operations alone, so a run can be repeated. `FaultyTier.fired` counts
what really happened: a test of faults must assert that there were some. `Fault.SILENT` is the negative control: wrong
bytes, reported as right, which any test of exactness must notice.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from longshore.boundary import Status, StoredChunk
from longshore.errors import ConfigError, TierClosedError, TierError
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, OpBatch, Tier, TierOp, TierResult, check_batch


class Fault(enum.Enum):
    """A fault of an operation."""

    FAIL = "fail"  # IO_ERROR, the inner tier is not called
    FULL = "full"  # NO_SPACE, the inner tier is not called; writes only
    SHORT = "short"  # SHORT, the second half of the destination is as before; reads only
    CORRUPT = "corrupt"  # CORRUPT, the whole destination is scrambled; reads only
    DELAY = "delay"  # begins later; DEADLINE when that is too late
    SILENT = "silent"  # OK, but bits of the destination are flipped; reads only


_ONLY = {Fault.FULL: Op.WRITE, Fault.SHORT: Op.READ, Fault.CORRUPT: Op.READ, Fault.SILENT: Op.READ}
_WITHOUT_INNER = {Fault.FAIL: Status.IO_ERROR, Fault.FULL: Status.NO_SPACE}


@dataclass(frozen=True, slots=True)
class Rule:
    """When `fault` befalls an operation of kind `op`.

    Attributes:
        probability: Of each operation, independently.
        nth: Besides, the operations with these numbers; the first one of its kind is 1.
        seconds: How long a `Fault.DELAY` takes.
    """

    op: Op
    fault: Fault
    probability: float = 0.0
    nth: frozenset[int] = frozenset()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if _ONLY.get(self.fault, self.op) is not self.op:
            raise ConfigError(f"{self.fault.value} befalls only {_ONLY[self.fault].value}, got {self.op.value}")
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"a probability lies in [0, 1], got {self.probability}")
        if any(number < 1 for number in self.nth):
            raise ConfigError(f"operations are counted from 1, got {sorted(self.nth)}")
        if (self.fault is Fault.DELAY) != (self.seconds > 0):
            raise ConfigError(f"a delay, and only that, takes seconds; got {self.fault.value} of {self.seconds}")


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Rules in order of precedence, and the seed of their dice."""

    rules: tuple[Rule, ...] = ()
    seed: int = 0

    def rule(self, op: Op, number: int) -> Rule | None:
        """The fault of the `number`th operation (from 1) of kind `op`: that of the first matching rule."""
        for index, rule in enumerate(self.rules):
            if rule.op is op and (number in rule.nth or self._roll(index, number) < rule.probability):
                return rule
        return None

    def _roll(self, index: int, number: int) -> float:
        """A number in [0, 1), the same for the same arguments and seed."""
        dice = f"{self.seed}:{index}:{number}".encode()
        return int(xxhash.xxh3_64_intdigest(dice)) / 2**64


class _Passed(NamedTuple):
    """Operations that the inner tier has, under one of its tickets."""

    batch: OpBatch
    positions: tuple[int, ...]
    rules: tuple[Rule | None, ...]
    before: dict[int, bytes]


class _Delayed(NamedTuple):
    batch: OpBatch
    position: int
    due: float


class FaultyTier(Tier):
    """`inner`, with the faults of `plan`. `arena` is the one that `inner` moves to and from.

    Attributes:
        inner: The tier that does the work.
        fired: How often each fault has struck.
    """

    def __init__(self, inner: Tier, plan: FaultPlan, arena: Arena) -> None:
        self.inner = inner
        self.name = inner.name
        self.slabs = inner.slabs
        self.image_bytes = inner.image_bytes
        self.fired: Counter[Fault] = Counter()
        self._plan = plan
        self._arena = arena
        self._seen: Counter[Op] = Counter()
        self._tickets = 0
        self._open: dict[int, OpBatch] = {}
        self._passed: dict[int, _Passed] = {}
        self._delayed: list[_Delayed] = []
        self._results: list[TierResult] = []
        self._closed = False

    def submit(self, batch: Sequence[TierOp], deadline: float) -> int:
        """Begin the operations of `batch` that the plan does not fail."""
        if self._closed:
            raise TierClosedError("the tier was closed")
        check_batch(
            batch, deadline, slabs=self.slabs, image_bytes=self.image_bytes, arena_bytes=self._arena.array.nbytes
        )
        now = time.monotonic()
        state = OpBatch(self._tickets, batch, deadline, now)
        rules = [None] * len(state.ops) if state.late(now) else self._rules_for(state.ops)
        passed = [
            position
            for position, rule in enumerate(rules)
            if rule is None or (rule.fault not in _WITHOUT_INNER and rule.fault is not Fault.DELAY)
        ]
        self._pass_on(state, passed, rules)  # first: it may be refused, and then nothing has changed
        self._seen.update(op.op for op in state.ops)
        self._tickets += 1
        self._open[state.ticket] = state
        for position, rule in enumerate(rules):
            if rule is not None and position not in passed:
                self._inject(state, position, rule, now)
        self._settle()
        return state.ticket

    def poll(self) -> list[TierResult]:
        """Results since the last call, harmed as planned."""
        self._release_delayed()
        for result in self.inner.poll():
            self._take(result)
        self._settle()
        results, self._results = self._results, []
        return results

    def cancel(self, ticket: int) -> None:
        """End operations of `ticket` that have not begun, here and in the inner tier."""
        if ticket in self._open:
            self._open[ticket].end_pending(Status.CANCELLED, time.monotonic())
            self._settle()
            for inner_ticket in [key for key, passed in self._passed.items() if passed.batch.ticket == ticket]:
                self.inner.cancel(inner_ticket)

    def close(self) -> None:
        """End delayed operations, close the inner tier."""
        self._closed = True
        for batch in self._open.values():
            batch.end_pending(Status.TIER_OFF, time.monotonic())
        self._settle()
        self.inner.close()

    def recover(self) -> Sequence[StoredChunk]:
        """As the inner tier."""
        return self.inner.recover()

    def other_scope_slots(self) -> Sequence[int]:
        """The inner tier's."""
        return self.inner.other_scope_slots()

    def delete_records(self, slots: Sequence[int]) -> None:
        """The inner tier discards."""
        self.inner.delete_records(slots)

    def reset(self, generation: int) -> None:
        """The inner tier forgets."""
        self.inner.reset(generation)

    def weights_changed(self) -> None:
        """The inner tier hears of it."""
        self.inner.weights_changed()

    @property
    def generation(self) -> int:
        """The inner tier's."""
        return self.inner.generation

    def _rules_for(self, ops: Sequence[TierOp]) -> list[Rule | None]:
        seen = self._seen.copy()
        rules = []
        for op in ops:
            seen[op.op] += 1
            rules.append(self._plan.rule(op.op, seen[op.op]))
        return rules

    def _pass_on(self, batch: OpBatch, positions: Sequence[int], rules: Sequence[Rule | None]) -> None:
        """Submit the operations at `positions` to the inner tier; `rules` has one for each operation of the batch."""
        if not positions:
            return
        before = {
            position: bytes(self._second_half(batch.ops[position]))
            for position in positions
            if (rule := rules[position]) is not None and rule.fault is Fault.SHORT
        }
        ticket = self.inner.submit([batch.ops[position] for position in positions], batch.deadline)
        self._passed[ticket] = _Passed(batch, tuple(positions), tuple(rules[p] for p in positions), before)
        now = time.monotonic()
        for position in positions:
            batch.begin(position, now)

    def _inject(self, batch: OpBatch, position: int, rule: Rule, now: float) -> None:
        """Carry out a fault that the inner tier does not see, or not yet."""
        self.fired[rule.fault] += 1
        if rule.fault is Fault.DELAY:
            self._delayed.append(_Delayed(batch, position, now + rule.seconds))
        else:
            batch.end(position, _WITHOUT_INNER[rule.fault], now)

    def _release_delayed(self) -> None:
        now = time.monotonic()
        waiting, self._delayed = self._delayed, []
        for delayed in waiting:
            batch, position, due = delayed
            if not batch.pending(position):
                continue
            if batch.late(now):
                batch.end(position, Status.DEADLINE, now)
            elif due > now:
                self._delayed.append(delayed)
            else:
                self._begin_delayed(batch, position)

    def _begin_delayed(self, batch: OpBatch, position: int) -> None:
        try:
            self._pass_on(batch, [position], [None] * len(batch.ops))
        except TierError:  # a check that only the inner tier knows: too late to refuse the batch
            batch.end(position, Status.IO_ERROR, time.monotonic())

    def _take(self, result: TierResult) -> None:
        batch, positions, rules, before = self._passed.pop(result.ticket)
        now = time.monotonic()
        for position, rule, status in zip(positions, rules, result.statuses, strict=True):
            if rule is None or status is not Status.OK:
                batch.end(position, status, now)
            else:
                self.fired[rule.fault] += 1
                batch.end(position, self._apply_fault(batch.ops[position], rule.fault, before.get(position, b"")), now)

    def _apply_fault(self, op: TierOp, fault: Fault, before: bytes) -> Status:
        """Change the bytes that were read; returns the status to report."""
        if fault is Fault.SHORT:
            self._second_half(op)[:] = before
            return Status.SHORT
        image = self._arena.array[op.offset : op.offset + op.length]
        if fault is Fault.CORRUPT:
            image ^= 0xA5
            return Status.CORRUPT
        # From the last byte on, so that little-endian numbers of 2 and 4 bytes lose an exponent bit.
        image[::-64] ^= 0x40
        return Status.OK

    def _second_half(self, op: TierOp) -> memoryview:
        arrived = op.length // 2
        return self._arena.view(op.offset + arrived, op.length - arrived)

    def _settle(self) -> None:
        for batch in [batch for batch in self._open.values() if batch.ended]:
            del self._open[batch.ticket]
            self._results.append(batch.result())
