"""A plain model of what `TieredCache` promises.

The model knows nothing of eviction orders, reach counts or copies. From the commands and results alone, and from what
the simulated movers have in place, it says what every outcome, miss count and in-flight count must be, and it checks
after each call that what the cache calls ready really is there.
"""

from __future__ import annotations

from typing import Self

from cache_kit import FRESH, depth, group_of, path_of
from cache_model_lookup import Reading
from cache_model_store import Storing

from longshore.boundary import HOST
from longshore.cache import Lease, MissReason, Outcome, SlotState
from longshore.cache.settings import DEFAULT_PRIORITY
from residents import residents_of


class World(Reading, Storing):
    """One cache under test, the movers below it, and the model beside it."""

    def stored(self, *paths: str, before_eviction: bool = False) -> Self:
        """Store each of `paths`, one after the other, until all copies that follow have ended."""
        for path in paths:
            self.store(path, 0, before_eviction)
            self.settle_all()
        return self

    def lease(self, path: str, request: str | None = None) -> Lease:
        """The lease on what a lookup of `path` finds."""
        lease = self.lookup(path, 0, request)
        assert lease is not None
        return lease

    def loading(self, path: str, count: int | None = None) -> Lease:
        """A lease on `path`, of which a load of `count` chunks, or of all that was found, is under way."""
        lease = self.lease(path)
        self.load(lease, len(self.holds[lease].keys) if count is None else count, 0, 0)
        return lease

    def reset(self, keep: tuple[str, ...] = ()) -> None:
        """Forget all but what is ready, and can be reached, in the tiers to `keep`."""
        ready = {at for at, each in self.resident.items() if each.state is SlotState.READY and at[1] in keep}
        kept = {at for at in ready if all(any((each, tier) in ready for tier in keep) for each in self.line(at[0]))}
        self.generation += not keep
        assert self.call("reset", keep=keep) == self.generation
        for model in self.holds.values():
            model.excused = True
            if model.has_load and model.outcome is None:
                self.misses.update([MissReason.CANCELLED] * sum(len(job.told) for job in model.parts) + model.cut)
            if model.has_load:
                model.outcome = Outcome(0, ())
            model.reading = ()
        if not keep:
            self.forget_remote()
        self.seen_in_step.clear()
        self.warm.clear()
        assert {(each.key, each.slot.tier) for each in residents_of(self.cache)} == kept
        self.settle()
        assert self.cache.generation == self.generation

    def end_step(self) -> None:
        self.call("end_step")
        self.seen_in_step.clear()
        self.warm.clear()
        self.settle()

    def flush(self) -> bool:
        done = self.call("back_up_all")
        self.settle()
        assert done == all(job in self.host_stores for job in self.jobs.values())
        return bool(done)

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes. Whoever's time is over has what has arrived, whatever is still under way."""
        self.now += seconds
        self.call("apply_results", (), self.now)
        for model in self.holds.values():
            if model.has_load and model.outcome is None and model.deadline <= self.now:
                self.conclude(model, MissReason.DEADLINE)
        self.settle()

    # ------------------------------------------------------------------ the end

    def drain(self) -> None:
        """Let go of everything, wait for everything: then nothing is held, and all slots are free or ready."""
        for hold in list(self.holds):
            self.release(hold)
        self.end_step()
        self.settle_all()
        while not self.flush():
            self.settle_all()
        assert (self.cache.leases, self.cache.protected, self.cache.jobs_in_flight) == (0, 0, 0)
        self.check_device_is_free()
        for stats in self.cache.stats():
            assert stats.used == stats.ready, "a slot is neither free nor ready"

    def check_device_is_free(self) -> None:
        assert sorted(self.free_blocks) == list(range(self.setup.device_blocks))

    def evict_all(self) -> None:
        """Nothing is held: then all of it can make way."""
        leaves = {each for each, _ in self.resident}
        for tier in self.sizes:
            for leaf in sorted(leaves, key=lambda each: (-depth(each), each)):
                self.discard(path_of(leaf), tier, group_of(leaf))
            assert self.free(tier) == len(self.slots(tier)), f"something in the {tier} tier cannot be evicted"
        if self.setup.priority_floor > DEFAULT_PRIORITY:
            return
        fresh = FRESH[: len(self.slots(HOST))]
        for _ in range(self.setup.threshold if self.setup.offload == "write_through_selective" else 1):
            self.store_by_host(fresh, 0)
        self.settle_all()
        assert not self.resident or self.cache.stats()[0].ready == min(len(fresh), self.setup.max_writes)

    def slots(self, tier: str) -> range:
        """The indices of a tier's slots."""
        return self.setup.indices(self.sizes[tier])
