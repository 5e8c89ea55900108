"""`TieredCache`: what is where, what moves, what is evicted.

    match ─► Hold ─► onboard ─► outcome ─► release          a prompt that returns
    commit (or offer)                                       blocks that are complete, or about to be evicted
    take() ─► commands            apply(results) ◄─         nothing else goes in or out

Sans I/O: no torch, no threads, no clock and no randomness of its own; the same calls give the same log. Every method
validates before it changes anything. The interface stands in three modules: `reading` (the first line above),
`offering` (the second) and this one, for all else; `core` is what they share. The books are kept in `store`, the
transfers in `flow`, and decided upon in `loading` and `storing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from longshore.boundary import DEVICE, Command, Key, ProbeResult, Result, TransferResult
from longshore.cache.adopting import Chunk, Found, adopt
from longshore.cache.device import DeviceBlocks
from longshore.cache.events import EVICTED, Event
from longshore.cache.moving import make_way
from longshore.cache.offering import Offering
from longshore.cache.reading import Reading
from longshore.cache.resizing import resize
from longshore.cache.types import MissReason, Resident, TierStats
from longshore.errors import CacheError


class TieredCache(Reading, Offering):
    """The control plane of one engine: an index over `tiers`, warmest first, below the engine's own device cache."""

    # ------------------------------------------------------------------ life

    def adopt(self, tier: str, found: Iterable[Chunk | tuple[int, Key, Key | None]], others: Sequence[int] = ()) -> int:
        """Take in what a persistent tier holds at start: (slot, key, parent, pool), oldest first; says how many.

        Slots of `others` hold what is not for this cache, least useful first: they are given out after all empty ones.
        Chunks whose parents are gone cannot be reached: their slots stay free. Two chunks in one slot, or two of one
        key, are a `CacheError`, and nothing is taken in.
        """
        chunks = list(found)
        named = set(map(len, chunks)) <= {4}  # as from a tier, where there may be half a million of them
        whole = cast("list[Chunk]", chunks) if named else [Found(*each) for each in chunks]
        adopted = adopt(self._store, self._tier(tier), whole)
        self._store.pools[self._tier(tier)].give_last(others)
        return adopted

    def sleep(self) -> bool:
        """The device's memory is about to be freed: cancel what touches it, and take no orders that would.

        Says whether nothing touches it any more; until then it must stay, and this is to be asked again when results
        have been applied. The tiers keep what they have; to forget that too, `reset`.
        """
        self._device.asleep = True
        return self._flow.leave_device()

    def wake(self) -> None:
        """The device's memory is back, and empty."""
        self._device.asleep = False

    def resize(self, tier: str, slots: int, *, discard: bool = False, move: bool = False) -> int | None:
        """Have `slots` slots (slabs, where images have several sizes) in `tier`; the caller gives or takes the memory.

        What lies in slots above the new size is in the way: that is a `CapacityError`, unless it is to be discarded,
        and nothing works on it, holds it, or needs it to be reached. Nothing has changed after an error.

        With `move` it is copied to lower slots instead, by one job, which is returned: ask again when that has ended.
        `None` says that the tier has its new size. What could not be copied stays, and is in the way as before. It is a
        `CacheError` where nothing copies from slot to slot (`TierSpec.moves`).
        """
        at = self._tier(tier)
        if move and discard:
            raise CacheError("what is in the way is moved, or discarded, not both")
        if move and not self._store.levels[at].moves:
            raise CacheError(f"nothing copies from slot to slot of tier {tier!r}: what is in the way can be discarded")
        job = make_way(self._flow, at, slots) if move and slots >= 0 else None
        if job is None:
            resize(self._store, at, slots, discard=discard)
        return job

    def reset(self) -> int:
        """Forget everything, here and after a restart; returns the new generation.

        Jobs in flight are cancelled; they own their slots until their results come, and change nothing else. Nothing
        that was onboarded before counts as arrived.
        """
        for record in self._holds:
            if record.load is not None:
                self._count_misses(record.load, record.load.revoke())
        self._flow.forget()
        self._holds.forget_step()
        self._prefetching.clear()
        self._exchange.clear()
        return self.generation

    def resize_device(self, blocks: int | None) -> None:
        """The device pool is another one, of so many blocks; no job works on the one before it any more."""
        routes = [job.transfer.route for job in self._flow.jobs.values()]
        if busy := sum(DEVICE in (route.source, route.destination) for route in routes):
            raise CacheError(f"{busy} jobs in flight read or write blocks of the device pool: it cannot be replaced")
        self._device = DeviceBlocks(blocks)

    def end_step(self) -> None:
        """The engine's step is over: what `peek` protected no longer is, and pending backups are ordered."""
        self._holds.end_step()
        self._proceed()

    def tick(self, now: float) -> None:
        """Time has passed: order what is due, and end the waits whose deadline has come.

        Their movers are told, and own their slots until they end.
        """
        self._check_time(now)
        self._advance(now)
        self._proceed()

    def take(self) -> list[Command]:
        """Commands since the last call, in order, each exactly once."""
        commands, self._flow.outbox = self._flow.outbox, []
        return commands + self._store.discards()

    def apply(self, results: Sequence[Result], now: float) -> None:
        """What became of earlier commands.

        A job or probe that is not in flight, or reported twice by a rank, is a `JobError`, and nothing is applied.
        """
        self._check_time(now)
        answers = [result for result in results if isinstance(result, ProbeResult)]
        self._exchange.check(answers)
        loads = self._flow.apply([result for result in results if isinstance(result, TransferResult)])
        self._advance(now)
        self._exchange.hear(answers)
        for load in loads:
            if load.outcome is None and not load.pending:
                self._conclude(load, MissReason.CANCELLED)
        self._proceed()

    # ------------------------------------------------------------------ watching

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        return self._store.watching.stats()

    def residents(self) -> list[Resident]:
        """Every chunk that has a slot and can be found, or soon can, once for each tier that it is in."""
        return self._store.watching.residents()

    def events(self, limit: int | None = None) -> list[Event]:
        """What happened since the last call, in order, as far as it was kept (`CacheSettings.events`).

        At most `limit` events, and one more that says how many are missing, if some are; what is left comes next time.
        """
        if limit is not None and limit < 1:
            raise CacheError(f"a limit of events is at least 1, got {limit}")
        return self._store.log.pull(limit)

    def hide(self, key: Key | None) -> None:
        """Until the next call, leave `key` out of hits, of what routes have moved, and of the events.

        For a test of the tiers, which sends a chunk of its own through them.
        """
        self._store.log.hidden = key

    def note_device(
        self, came: Sequence[tuple[Key, Key | None]] = (), gone: Sequence[Key] = (), *, cause: str = EVICTED
    ) -> None:
        """Chunks came to the device, each told with the one before it, or have `gone` from it: for the events alone.

        For whoever keeps the device's blocks (`DevicePool`). Raises `CacheError` for what cannot be a key.
        """
        self._store.watching.log_device(came, gone, cause)

    @property
    def held(self) -> int:
        """Holds that were not released, those of `peek` included."""
        return len(self._holds)

    @property
    def jobs_in_flight(self) -> int:
        """Jobs whose results have not come."""
        return len(self._flow.jobs)

    def check_integrity(self) -> None:
        """Walk every structure; raise `CacheError` where two of them disagree."""
        self._store.watching.check_integrity()
        self._flow.check_integrity()
        self._holds.check_integrity()
        self._exchange.check_integrity()
