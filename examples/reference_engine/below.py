"""What lies below the device: Longshore's tiers, or nothing.

An engine asks in this order:

    match      how far do device and tiers have this prompt?     Found; what the tiers have is held
    onboard    into these device blocks, please                  an Arrival for each group; the hold goes with it
    copy       the first tokens of one block into another        an Arrival
        arrival.layer(3)    before layer 3 is computed: may it be?
        arrival.whole()     before a result is used: has all of it arrived, and did nothing fail afterwards?
        arrival.close()     nobody waits for it any more
    commit     these blocks are complete                         copies go down while the engine computes on

Whenever the answer is no, the engine recomputes: a miss, never an error.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from examples.reference_engine.model import Group
from examples.reference_engine.pool import DevicePool
from longshore.boundary import DEVICE, HOST, Key, Slot, Status
from longshore.cache import Hold, Match
from longshore.errors import PlanError
from longshore.runtime.guard import BlockGuard
from longshore.runtime.stack import Stack


class Arrival(ABC):
    """Device `blocks` that are being filled."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = tuple(blocks)

    @abstractmethod
    def layer(self, layer: int) -> bool:
        """Wait until `layer` may be computed on; whether it may. On an accelerator the compute stream waits for it."""

    @abstractmethod
    def whole(self) -> bool:
        """Wait until all has arrived; whether it has."""

    @abstractmethod
    def close(self) -> bool:
        """Nobody waits any more: cancel what has not begun. Whether all had arrived."""


class Found(NamedTuple):
    """The device and the tiers have the first `tokens` of a prompt.

    For each group, `matches` says from which block on the device has no more, and how many the tiers have there.
    """

    tokens: int
    matches: tuple[Match, ...]


class Below(ABC):
    """What the engine asks of whatever lies below its device."""

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self.groups = pool.shape.groups

    @abstractmethod
    def begin_step(self) -> None:
        """Copies ordered from here on wait for what has been given to the device to compute."""

    @abstractmethod
    def end_step(self) -> None:
        """The step's layers have been computed."""

    def match(self, paths: Sequence[Sequence[Key]], most: int) -> Found:
        """The longest prefix, at most `most` tokens, of which every group has what the next token sees.

        `paths` are the keys of the prompt, for each group. What the tiers have is held until it is closed, or dropped.
        """
        unit = math.lcm(*(group.block_size for group in self.groups))
        reach = most // unit * unit
        while True:
            matches = tuple(
                self._match_group(group, path[: reach // group.block_size], reach)
                for group, path in zip(self.groups, paths, strict=True)
            )
            ends = [
                (match.start + match.length) * group.block_size
                for match, group in zip(matches, self.groups, strict=True)
            ]
            if min(ends) == reach:
                return Found(reach, matches)
            self.drop(Found(reach, matches))
            reach = min(ends) // unit * unit

    def _match_group(self, group: Group, path: Sequence[Key], reach: int) -> Match:
        start = group.first_needed(reach)
        while start < len(path) and path[start] in self.pool.index:
            start += 1
        return self.hold(path, start) if start < len(path) else Match(start, 0, None)

    @abstractmethod
    def hold(self, path: Sequence[Key], start: int) -> Match:
        """What the tiers have of `path[start:]`, held."""

    @abstractmethod
    def onboard(self, found: Found, group: int, blocks: Sequence[int]) -> Arrival:
        """Fill `blocks` with what was found of `group`."""

    @abstractmethod
    def drop(self, found: Found) -> None:
        """It will not be onboarded after all."""

    @abstractmethod
    def copy(self, group: int, source: int, block: int, tokens: int) -> Arrival:
        """Copy the first `tokens` tokens of block `source`, which may itself be on its way, into `block`."""

    @abstractmethod
    def commit(self, group: int, path: Sequence[Key], blocks: Sequence[int], first: int) -> set[int]:
        """The blocks of `path[first:]` are complete. Returns the positions that no tier has from another request."""

    @abstractmethod
    def sleep(self, *, clear: bool) -> None:
        """Let go of the device memory: when this returns, nothing touches it. `clear` forgets what the tiers have."""


class Tiers(Below):
    """Longshore.

    Args:
        stack: From `longshore.runtime.stack.open_stack`, over the pool's layout.
        pool: The device's blocks.
        compute: The stream that the model computes on; `None` on the CPU.
        by_layer: Whether compute may begin before all layers have arrived.
        patience: Seconds that a request waits for what it was promised, before it recomputes.
    """

    def __init__(
        self, stack: Stack, pool: DevicePool, compute: object = None, *, by_layer: bool = True, patience: float = 10.0
    ) -> None:
        super().__init__(pool)
        self.stack = stack
        self.overlapped = 0
        """Layers on which compute began while later ones of the same job were still travelling."""
        self.patience = patience
        self._compute = compute
        self.by_layer = by_layer
        self._guard = pool.guard = BlockGuard(stack.runtime, patience)

    def begin_step(self) -> None:
        """As `TransferEngine.begin_step`."""
        self.stack.engine.begin_step(self._compute)

    def end_step(self) -> None:
        """Compute has waited, layer by layer, for what it read, and the guard keeps the rest: no jobs are named."""
        self.stack.engine.end_step(self._compute, jobs=())

    def hold(self, path: Sequence[Key], start: int) -> Match:
        """A match of the control plane: one for each group, whose keys have a root of their own."""
        with self.stack.runtime.control() as cache:
            return cache.match(path, self.stack.runtime.clock(), start=start)

    def onboard(self, found: Found, group: int, blocks: Sequence[int]) -> Arrival:
        """One job where all is in host memory: then it can go layer by layer. What must be read first comes whole."""
        hold = found.matches[group].hold
        if hold is None:
            raise ValueError(f"nothing was found of group {group}")
        with self.stack.runtime.control() as cache:
            holds = [match.hold for match in found.matches if match.hold is not None]
            by_layer = self.by_layer and all(run.tier == HOST for each in holds for run in cache.runs(each))
            order = cache.onboard(hold, blocks, group=group, by_layer=by_layer)
            for part in order.parts:
                self._guard.add(part.job, blocks)
        job = order.parts[0].job if by_layer and order.parts else None
        return _Load(self, blocks, hold, job, self.groups[group].layers[-1])

    def drop(self, found: Found) -> None:
        """Release the holds."""
        with self.stack.runtime.control() as cache:
            for match in found.matches:
                if match.hold is not None:
                    cache.release(match.hold)

    def copy(self, group: int, source: int, block: int, tokens: int) -> Arrival:
        """A transfer inside the device pool: if `source` is still on its way, the copy waits for it."""
        slot = Slot(DEVICE, self.stack.layout.pools[group], source)
        with self.stack.runtime.control() as cache:
            job = cache.copy_inside([slot], [block], tokens=tokens, group=group)
            self._guard.add(job, (source, block))
        return _Copy(self, block, job)

    def commit(self, group: int, path: Sequence[Key], blocks: Sequence[int], first: int) -> set[int]:
        """Offload what no tier has. The guard keeps those blocks until they have been read."""
        with self.stack.runtime.control() as cache:
            offload = cache.commit(path, blocks, first=first, group=group)
            written = {placement.position for placement in offload.accepted}
            if offload.job is not None:
                self._guard.add(offload.job, [blocks[position - first] for position in written])
        return written | set(range(max(first, offload.kept), len(path)))

    def sleep(self, *, clear: bool) -> None:
        """Raises `TimeoutError` if copies do not end: the memory must stay then; call it again."""
        runtime = self.stack.runtime
        runtime.flush(self.patience)  # let what is on its way down arrive,
        self.stack.layout.free()  # refuse what is asked from now on, end what has not begun,
        if not runtime.flush(self.patience):  # and wait for what has
            raise TimeoutError("copies still touch the device memory")
        self._guard.drain()
        if clear:
            with runtime.control() as cache:
                cache.reset()

    def wait_layer(self, job: int, layer: int, deadline: float) -> bool:
        """Whether `layer` of `job` may be computed on."""
        timeout = max(0.0, deadline - self.stack.runtime.clock())
        try:
            return self.stack.engine.wait_layer(job, layer, timeout) is Status.OK
        except PlanError:  # its mover refused the job, and does not know it
            return False

    def note_overlap(self, job: int) -> None:
        """A layer of `job` is about to be computed that is not its last."""
        self.stack.runtime.pump()
        self.overlapped += self.stack.runtime.in_flight(job)


class _Load(Arrival):
    """What a hold is on, by one `job` that goes layer by layer, `last` the last, or else by any number of jobs."""

    def __init__(self, tiers: Tiers, blocks: Sequence[int], hold: Hold, job: int | None, last: int) -> None:
        super().__init__(blocks)
        self._last = last
        self._tiers = tiers
        self._hold = hold
        self._job = job
        self._deadline = tiers.stack.runtime.clock() + tiers.patience

    def layer(self, layer: int) -> bool:
        """By the layer's event, or by the end of everything."""
        if self._job is None:
            return self.whole()
        is_here = self._tiers.wait_layer(self._job, layer, self._deadline)
        if is_here and layer != self._last:
            self._tiers.note_overlap(self._job)
        return is_here

    def whole(self) -> bool:
        """By the outcome: on an accelerator a copy can still fail after compute was made to wait for it."""
        runtime = self._tiers.stack.runtime
        timeout = max(0.0, self._deadline - runtime.clock())
        return runtime.wait_onboarded(self._hold, timeout).chunks == len(self.blocks)

    def close(self) -> bool:
        """Release the hold, and cancel what has not arrived."""
        with self._tiers.stack.runtime.control() as cache:
            outcome = cache.outcome(self._hold)
            cache.release(self._hold)
        return outcome is not None and outcome.chunks == len(self.blocks)


class _Copy(Arrival):
    """A copy inside the device pool; nothing is held for it."""

    def __init__(self, tiers: Tiers, block: int, job: int) -> None:
        super().__init__([block])
        self._tiers = tiers
        self._job = job
        self._deadline = tiers.stack.runtime.clock() + tiers.patience

    def layer(self, layer: int) -> bool:
        """By the layer's event, or by the end of everything."""
        return self._tiers.wait_layer(self._job, layer, self._deadline) if self._tiers.by_layer else self.whole()

    def whole(self) -> bool:
        """By the end of the job, and then by what is said of its last layer."""
        runtime, last = self._tiers.stack.runtime, self._tiers.stack.layout.num_layers - 1
        has_ended = runtime.wait_ended([self._job], max(0.0, self._deadline - runtime.clock()))
        return has_ended and self._tiers.wait_layer(self._job, last, 0.0)

    def close(self) -> bool:
        """Nothing to let go of, and nobody else can find the block."""
        return True


class DeviceOnly(Below):
    """No tiers: what is not on the device is computed. Copies are plain assignments, in the order of compute."""

    def begin_step(self) -> None:
        """Nothing to order."""

    def end_step(self) -> None:
        """Nothing to order."""

    def hold(self, path: Sequence[Key], start: int) -> Match:
        """Nothing."""
        return Match(start, 0, None)

    def onboard(self, found: Found, group: int, blocks: Sequence[int]) -> Arrival:
        """Nothing is ever found."""
        raise ValueError(f"nothing was found of group {group}")

    def drop(self, found: Found) -> None:
        """Nothing is held."""

    def copy(self, group: int, source: int, block: int, tokens: int) -> Arrival:
        """Copy in each of the group's layers."""
        for layer in self.pool.shape.groups[group].layers:
            for part in self.pool.pages[layer]:
                part[block, :tokens] = part[source, :tokens]
        return _Here([block])

    def commit(self, group: int, path: Sequence[Key], blocks: Sequence[int], first: int) -> set[int]:
        """There is no other version."""
        return set(range(first, len(path)))

    def sleep(self, *, clear: bool) -> None:
        """Nothing is under way."""
        self.pool.layout.free()


class _Here(Arrival):
    """It has arrived."""

    def layer(self, layer: int) -> bool:
        """At once."""
        return True

    def whole(self) -> bool:
        """At once."""
        return True

    def close(self) -> bool:
        """Nothing to let go of."""
        return True
