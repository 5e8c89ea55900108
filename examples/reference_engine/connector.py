"""The engine's connection to the tiers: Longshore's, or none.

An engine calls in this order:

    lookup     the longest prefix in device and tiers            LookupResult; what the tiers have is leased
    load       fill these device blocks                          a PendingCopy, which owns the lease
    copy       the first tokens of one block into another        a PendingCopy
        pending.wait_layer(3)    before layer 3 is computed: has it arrived?
        pending.wait_all()       before a result is used: have all bytes arrived?
        pending.close()          no request waits for it any more
    store      these blocks are complete                         they are offloaded while the engine computes

Whenever the answer is no, the engine recomputes: a miss, never an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from examples.reference_engine.model import Shape
from examples.reference_engine.pool import DevicePool
from longshore.boundary import DEVICE, HOST, Key, Slot, Status
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    DeviceCopy,
    GroupKeys,
    Lease,
    LookupResult,
    PromptTokens,
    TieredCache,
    TierSpec,
)
from longshore.errors import PlanError
from longshore.runtime.block_guard import BlockGuard
from longshore.runtime.stack import Stack


def cache_groups(shape: Shape) -> tuple[CacheGroup, ...]:
    """For Longshore: what the next token sees of each group. A window counts the token itself, Longshore does not."""
    return tuple(
        CacheGroup(block_size=group.block_size, window=group.window and group.window - 1) for group in shape.groups
    )


class NoTiers:
    """No tiers: blocks that are not on the device are computed. Copies are assignments, in the order of compute."""

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        settings = CacheSettings(groups=cache_groups(pool.shape))
        self._cache = TieredCache([TierSpec(HOST, 0, pool.layout.image_bytes)], settings)

    def begin_step(self) -> None:
        """Copies ordered from now on wait for work submitted to the device before."""

    def end_step(self) -> None:
        """The step's layers have been computed."""

    def lookup(self, paths: Mapping[int, GroupKeys]) -> LookupResult:
        """The longest prefix of which every group has what the next token sees; its chunks in the tiers are leased."""
        return self._cache.lookup(paths, 0.0)

    def release(self, found: LookupResult) -> None:
        """Release the lease of a prefix that is not loaded."""

    def load(self, lease: Lease, blocks: Mapping[int, Sequence[int]]) -> PendingCopy:
        """Fill device blocks, by group, with the leased chunks."""
        raise ValueError("nothing is ever found")

    def copy(self, group: int, source: int, block: int, tokens: int) -> PendingCopy | None:
        """Copy the first `tokens` tokens of block `source` into `block`; `None` if the copy has ended."""
        for layer in self.pool.shape.groups[group].layers:
            for part in self.pool.pages[layer]:
                part[block, :tokens] = part[source, :tokens]
        return None

    def store(self, group: int, path: Sequence[Key], blocks: Sequence[int], first: int, text: PromptTokens) -> set[int]:
        """The blocks of `path[first:]` are complete. Returns the positions that no tier has from another request."""
        return set(range(first, len(path)))

    def sleep(self, *, clear: bool) -> None:
        """Release the device memory: no copy uses it afterwards. `clear` discards the blocks in the tiers."""
        self.pool.layout.free()


class Tiers(NoTiers):
    """Longshore.

    Args:
        stack: From `longshore.runtime.stack.open_stack`, over the pool's layout and `cache_groups`.
        pool: The device's blocks.
        compute: The stream that the model computes on; `None` on the CPU.
        by_layer: Whether compute may begin before all layers have arrived.
        timeout: Seconds that a request waits for its blocks before it recomputes.
    """

    def __init__(
        self, stack: Stack, pool: DevicePool, compute: object = None, *, by_layer: bool = True, timeout: float = 10.0
    ) -> None:
        self.pool = pool
        self.stack = stack
        self.overlapped = 0
        """Layers on which compute began while later layers of the same job were in flight."""
        self.timeout = timeout
        self._compute = compute
        self.by_layer = by_layer
        self._guard = pool.guard = BlockGuard(stack.runtime, timeout)

    def begin_step(self) -> None:
        """As `TransferEngine.begin_step`."""
        self.stack.transfer_engine.begin_step(self._compute)

    def end_step(self) -> None:
        """No jobs are named: compute has waited for each layer that it read, and the guard keeps the other blocks."""
        self.stack.transfer_engine.end_step(self._compute, jobs=())

    def lookup(self, paths: Mapping[int, GroupKeys]) -> LookupResult:
        """One lookup of the control plane for all groups, each of whose keys have a root of their own."""
        with self.stack.runtime.batch() as cache:
            return cache.lookup(paths, self.stack.runtime.clock())

    def release(self, found: LookupResult) -> None:
        """Release the lease."""
        if found.lease is not None:
            with self.stack.runtime.batch() as cache:
                cache.release(found.lease)

    def load(self, lease: Lease, blocks: Mapping[int, Sequence[int]]) -> PendingCopy:
        """One job for all groups, layer by layer if so configured; it begins when all reads from files have ended."""
        filled = [block for each in blocks.values() for block in each]
        with self.stack.runtime.batch() as cache:
            order = cache.load(lease, blocks, by_layer=self.by_layer)
            for part in order.jobs:
                self._guard.add(part.job, filled)
        job = order.jobs[0].job if order.jobs else 0
        return PendingLoad(self, filled, job, lease)

    def copy(self, group: int, source: int, block: int, tokens: int) -> PendingCopy | None:
        """A transfer inside the device pool; if `source` is in flight, the copy waits for it."""
        slot = Slot(DEVICE, self.stack.layout.pools[group], source)
        with self.stack.runtime.batch() as cache:
            job = cache.load({group: DeviceCopy([slot], tokens)}, {group: [block]}).jobs[0].job
            self._guard.add(job, (source, block))
        return PendingCopy(self, [block], job)

    def store(self, group: int, path: Sequence[Key], blocks: Sequence[int], first: int, text: PromptTokens) -> set[int]:
        """Offload the blocks that no tier has. The guard keeps them until they have been read."""
        with self.stack.runtime.batch() as cache:
            offload = cache.store({group: GroupKeys(path, first, prompt_tokens=text)}, {group: blocks})[group]
            if offload.job is not None:
                self._guard.add(offload.job, [blocks[position - first] for position in offload.positions])
        return set(range(first, len(path))).difference(offload.already_stored)

    def sleep(self, *, clear: bool) -> None:
        """Raises `TimeoutError` if copies do not end: the memory must stay then; call it again."""
        runtime = self.stack.runtime
        runtime.flush(self.timeout)  # let offloads end,
        self.stack.layout.free()  # refuse new jobs, end those that have not begun,
        if not runtime.flush(self.timeout):  # and wait for the others
            raise TimeoutError("copies still touch the device memory")
        self._guard.drain()
        if clear:
            with runtime.batch() as cache:
                cache.reset()


class PendingCopy:
    """Device `blocks` that `job` fills."""

    def __init__(self, tiers: Tiers, blocks: Sequence[int], job: int) -> None:
        self.blocks = tuple(blocks)
        self.tiers = tiers
        self.job = job
        self._deadline = tiers.stack.runtime.clock() + tiers.timeout

    @property
    def timeout(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._deadline - self.tiers.stack.runtime.clock())

    def wait_layer(self, layer: int) -> bool:
        """Wait until `layer` may be computed, and return whether. On an accelerator the compute stream waits for it."""
        return self._has_arrived(layer, self.timeout) if self.tiers.by_layer else self.wait_all()

    def wait_all(self) -> bool:
        """Wait until all bytes have arrived, and return whether: a copy may fail after compute was made to wait for it.

        A copy inside the device pool has arrived if its job has ended and its last layer is `OK`.
        """
        has_ended = self.tiers.stack.runtime.wait_jobs([self.job], self.timeout)
        return has_ended and self._has_arrived(self.tiers.stack.layout.num_layers - 1, 0.0)

    def _has_arrived(self, layer: int, timeout: float) -> bool:
        """Whether `layer` has arrived, waiting for reads from files and then for the layer."""
        if not self.tiers.stack.runtime.wait_dependencies(self.job, timeout):
            return False
        try:
            return self.tiers.stack.transfer_engine.wait_layer(self.job, layer, timeout) is Status.OK
        except PlanError:  # its mover refused the job, and does not know it
            return False

    def close(self) -> bool:
        """No request waits any more: cancel the copies that have not begun. Returns whether the blocks are valid."""
        return True


class PendingLoad(PendingCopy):
    """A load of the leased chunks from the tiers, layer by layer or as a whole."""

    def __init__(self, tiers: Tiers, blocks: Sequence[int], job: int, lease: Lease) -> None:
        super().__init__(tiers, blocks, job)
        self._lease = lease

    def wait_layer(self, layer: int) -> bool:
        """As for other copies; counts the layers that are computed while others are in flight."""
        has_arrived = super().wait_layer(layer)
        if self.tiers.by_layer and has_arrived and layer < self.tiers.stack.layout.num_layers - 1:
            self.tiers.stack.runtime.pump()
            self.tiers.overlapped += self.tiers.stack.runtime.in_flight(self.job)
        return has_arrived

    def wait_all(self) -> bool:
        """Wait for the outcome of the load."""
        outcome = self.tiers.stack.runtime.wait_load(self._lease, self.timeout).outcome
        return outcome is not None and outcome.num_chunks == len(self.blocks)

    def close(self) -> bool:
        """Release the lease."""
        with self.tiers.stack.runtime.batch() as cache:
            outcome = cache.progress(self._lease).outcome
            cache.release(self._lease)
        return outcome is not None and outcome.num_chunks == len(self.blocks)
