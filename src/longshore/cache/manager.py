"""`TieredCache`: what is where, what moves, what is evicted.

    match ─► Hold ─► onboard ─► outcome ─► release          a prompt that returns
    commit (or offer)                                       blocks that are complete, or about to be evicted
    take() ─► commands            apply(results) ◄─         nothing else goes in or out

Sans I/O: no torch, no threads, no clock and no randomness of its own; the same calls give the same log. Every method
validates before it changes anything. This module is the interface; the books are kept in `store`, the transfers in
`flow`, the write policies in `writing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from longshore.boundary import DEVICE, Command, Key, Route, Slot, TransferResult
from longshore.cache.eviction import LRU, EvictionPolicy
from longshore.cache.flow import CacheSettings, Flow
from longshore.cache.index import Entry
from longshore.cache.jobs import Hold as HoldRecord
from longshore.cache.jobs import Load
from longshore.cache.pool import SlotPool
from longshore.cache.store import Level, Store
from longshore.cache.types import (
    Counters,
    Hold,
    Match,
    MissReason,
    Offload,
    Onboarding,
    Outcome,
    Part,
    Presence,
    Resident,
    Run,
    TierStats,
)
from longshore.errors import CacheError, HoldError


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One owned tier: its name, its slots, the bytes of one image, and the eviction policy to make for it."""

    name: str
    slots: int
    image_bytes: int
    policy: type[EvictionPolicy] = LRU


class TieredCache:
    """The control plane of one engine: an index over `tiers`, warmest first, below the engine's own device cache."""

    def __init__(
        self, tiers: Sequence[TierSpec], settings: CacheSettings | None = None, *, generation: int = 0
    ) -> None:
        names = tuple(tier.name for tier in tiers)
        if not 1 <= len(names) <= 2 or len(set(names)) != len(names) or DEVICE in names:
            raise CacheError(f"a cache has one or two tiers below the device, of different names; got {names}")
        self.settings = settings or CacheSettings()
        pairs = [(DEVICE, names[0]), *pairwise(names)]
        routes = tuple(str(Route(*p)) for pair in pairs for p in (pair, pair[::-1]))
        self.counters = Counters.zero(names, routes)
        levels = [Level(t.name, SlotPool(t.slots), t.policy(), t.image_bytes) for t in tiers]
        self._store = Store(levels, self.counters)
        self._flow = Flow(self._store, self.settings, generation)
        self._holds: dict[int, HoldRecord] = {}
        self._step_holds: list[Entry] = []

    @property
    def generation(self) -> int:
        """How many resets there were, over all processes that shared the persistent tier."""
        return self._flow.generation

    # ------------------------------------------------------------------ reading

    def match(self, keys: Sequence[Key], now: float, *, start: int = 0, request: str | None = None) -> Match:
        """The longest run of ready chunks among `keys[start:]`, and a hold on it.

        `keys` is the path from the first chunk of the prompt; chunks before `start` are the engine's own. Every chunk
        behind the run is counted as a miss.
        """
        self._check_path(keys, start)
        self._advance(now)
        index = self._store.index
        path: list[Entry] = []
        for key in keys[start:]:
            entry = index.get(key)
            if entry is None or entry.warmest_ready() is None:
                break
            path.append(entry)
        self.counters.misses.update(self._store.miss(key) for key in keys[start + len(path) :])
        if not path:
            return Match(start, 0, (), None)
        self._store.touch(path)
        path[-1].holds += 1
        hold = Hold(self._flow.new_id())
        self._holds[hold.id] = HoldRecord([entry.key for entry in path], start, path[-1], request)
        return Match(start, len(path), self._runs(path), hold)

    def peek(self, key: Key) -> Presence:
        """Where `key` is, for hosts that ask key by key. What is ready stays so until `end_step`."""
        entry = self._store.index.get(key)
        if entry is None:
            return Presence.ABSENT
        copy = entry.warmest_ready()
        if copy is None:
            return Presence.IN_FLIGHT
        entry.holds += 1
        self._step_holds.append(entry)
        return Presence.READY if copy.tier == 0 else Presence.COLDER

    def onboard(
        self, hold: Hold, blocks: Sequence[int], *, skip: int = 0, group: int = 0, by_layer: bool = False
    ) -> Onboarding:
        """Order the held chunks into device `blocks`; ends with `outcome(hold)`.

        Args:
            hold: From `match`; serves one onboarding.
            blocks: Device blocks in logical order. The first is sub-block `skip` of the first held chunk; the last
                may be any sub-block of a held chunk.
            skip: Leading sub-blocks of the first chunk that the device has already.
            group: The KV cache group that the keys and blocks are of.
            by_layer: Have each job go layer after layer, so that compute may begin before all have arrived.

        Chunks for which the host tier cannot make room now are left out, and counted as misses.
        """
        record = self._hold(hold)
        if record.load is not None:
            raise HoldError(f"hold {hold.id} was onboarded before")
        per_chunk = self.settings.blocks_per_chunk
        chunks = -(-(skip + len(blocks)) // per_chunk)
        if not 0 <= skip < per_chunk or not blocks or chunks > len(record.keys):
            raise CacheError(
                f"{len(blocks)} blocks after {skip} of {per_chunk} do not lie within {len(record.keys)} held chunks"
            )
        self._check_blocks(blocks)
        first_block = record.start * per_chunk + skip
        record.load = load = self._flow.load(record.keys[:chunks], blocks, first_block, group, by_layer=by_layer)
        if not load.parts:
            self._conclude(load, MissReason.CANCELLED)
        parts = tuple(Part(job.transfer.job, len(job.statuses)) for job in load.parts)
        return Onboarding(sum(part.chunks for part in parts), parts)

    def outcome(self, hold: Hold) -> Outcome | None:
        """How the onboarding of `hold` ended; `None` while it has not. Raises `HoldError` if none was ordered."""
        return self._load(hold).outcome

    def give_up(self, hold: Hold) -> Outcome:
        """The deadline has come: what has arrived is the outcome, what has not is a miss by deadline, and cancelled.

        Device blocks of parts that are still `in_flight` must not be reused before those have ended.
        """
        load = self._load(hold)
        if load.outcome is None:
            self._flow.abandon(load)
            self._conclude(load, MissReason.DEADLINE)
        return load.outcome or Outcome(0, ())

    def release(self, hold: Hold) -> None:
        """Let go of a match. Loads onto the device that have not ended are cancelled. Twice is a `HoldError`."""
        record = self._hold(hold)
        if record.load is not None and record.load.outcome is None:
            self._flow.abandon(record.load)
            self._conclude(record.load, MissReason.CANCELLED)
        del self._holds[hold.id]
        record.tail.holds -= 1

    def abort(self, request: str) -> int:
        """Release every hold that was taken for `request`, at any moment; says how many there were."""
        held = [Hold(id_) for id_, record in self._holds.items() if record.request == request]
        for hold in held:
            self.release(hold)
        return len(held)

    def in_flight(self, job: int) -> bool:
        """Whether `job` has not ended, so that its device blocks may still be read or written."""
        return job in self._flow.jobs

    # ------------------------------------------------------------------ writing

    def copy_inside(
        self, sources: Sequence[Slot], blocks: Sequence[int], *, tokens: int | None = None, group: int = 0
    ) -> int:
        """Order copies of device blocks into other device `blocks`, layer by layer; returns the job.

        For partial reuse: `tokens` are the leading tokens to copy of the last block, `None` all. `sources` are slots
        of the group's device pool, one for each block. The tiers have no part in it; the job keeps its place and its
        deadline among all others, and whether it succeeded is known to the mover's `wait_layer`.
        """
        if len(sources) != len(blocks) or not blocks or any(source.tier != DEVICE for source in sources):
            raise CacheError(f"expected a device slot to copy from for each of {len(blocks)} blocks, got {sources}")
        self._check_blocks(blocks)
        return self._flow.copy_inside(sources, blocks, tokens, group)

    def commit(
        self, keys: Sequence[Key], blocks: Sequence[int], *, first: int = 0, evicting: bool = False, group: int = 0
    ) -> Offload:
        """Chunks `keys[first:]` are complete on the device, in `blocks`, or about to be evicted from it.

        The write policy decides whether they are offloaded now; their blocks must stay unchanged until the job has
        ended. `keys` is the path from the first chunk of the prompt; what a tier has already is not written again.
        """
        self._check_path(keys, first)
        expected = (len(keys) - first) * self.settings.blocks_per_chunk
        if len(blocks) != expected:
            raise CacheError(f"{len(keys) - first} chunks have {expected} blocks, got {len(blocks)}")
        self._check_blocks(blocks)
        if not self.settings.offload.wants(evicting=evicting):
            return Offload(None, ())
        return self._flow.offload(keys, first, blocks, group)

    def offer(self, keys: Sequence[Key], *, first: int = 0) -> Offload:
        """Which of the chunks `keys[first:]` to store, and where; the host moves the bytes, and reports the job."""
        self._check_path(keys, first)
        return self._flow.offload(keys, first, None)

    def discard(self, keys: Iterable[Key], tier: str) -> int:
        """Remove the copies of a path in `tier` that nothing holds, reads or needs to be reached; says how many."""
        return self._store.discard(list(keys), self._tier(tier))

    def flush(self) -> bool:
        """Order backups of all that a restart would lose; says whether there is nothing left to order or wait for."""
        self._flow.clean(at_least=len(self._store.dirty))
        return not self._flow.jobs

    # ------------------------------------------------------------------ life

    def adopt(self, tier: str, found: Iterable[tuple[int, Key, Key | None]]) -> int:
        """Take in what a persistent tier holds at start: (slot, key, parent), oldest first; says how many.

        Chunks whose parents are gone cannot be reached: their slots stay free. Two chunks in one slot, or two of one
        key, are a `CacheError`, and nothing is taken in.
        """
        level = self._tier(tier)
        known = list(found)
        children: dict[Key | None, list[tuple[int, Key]]] = {}
        for slot, key, parent in known:
            children.setdefault(parent, []).append((slot, key))
        reachable: list[tuple[int, Key, Key | None]] = []
        queue: list[Key | None] = [None]
        for parent in queue:
            ours = children.pop(parent, [])
            reachable += [(slot, key, parent) for slot, key in ours]
            queue += [key for _, key in ours]
        self._store.adopt(level, reachable)
        adopted = {key for _, key, _ in reachable}
        self._store.age(level, [key for _, key, _ in known if key in adopted])
        return len(adopted)

    def reset(self) -> int:
        """Forget everything, here and after a restart; returns the new generation.

        Jobs in flight are cancelled; they own their slots until their results come, and change nothing else. Nothing
        that was onboarded before counts as arrived.
        """
        for record in self._holds.values():
            if record.load is not None:
                self.counters.misses.update(record.load.revoke())
        self._flow.forget()
        return self.generation

    def end_step(self) -> None:
        """The engine's step is over: what `peek` protected no longer is, and pending backups are ordered."""
        for entry in self._step_holds:
            entry.holds -= 1
        self._step_holds.clear()
        self._flow.clean()

    def tick(self, now: float) -> None:
        """Time has passed: order what is due."""
        self._advance(now)
        self._flow.clean()

    def take(self) -> list[Command]:
        """Commands since the last call, in order, each exactly once."""
        commands, self._flow.outbox = self._flow.outbox, []
        return commands

    def apply(self, results: Sequence[TransferResult], now: float) -> None:
        """What became of earlier commands.

        A job that is not in flight, or reported twice by a rank, is a `JobError`, and nothing is applied.
        """
        loads = self._flow.apply(results)
        self._advance(now)
        for load in loads:
            if load.outcome is None and not load.pending:
                self._conclude(load, MissReason.CANCELLED)
        self._flow.clean()

    # ------------------------------------------------------------------ watching

    def stats(self) -> tuple[TierStats, ...]:
        """Occupancy per tier, warmest first."""
        return self._store.stats()

    def residents(self) -> list[Resident]:
        """Every chunk that has a slot and can be found, or soon can, once for each tier that it is in."""
        return [
            Resident(entry.key, entry.parent_key, self._store.slot(copy), copy.state)
            for entry in self._store.index
            for copy in entry.copies
            if copy is not None
        ]

    @property
    def held(self) -> int:
        """Holds that were not released, those of `peek` included."""
        return len(self._holds) + len(self._step_holds)

    @property
    def jobs_in_flight(self) -> int:
        """Jobs whose results have not come."""
        return len(self._flow.jobs)

    def check_integrity(self) -> None:
        """Walk every structure; raise `CacheError` where two of them disagree."""
        self._store.check_integrity()
        self._flow.check_integrity()
        holds: dict[int, int] = {}
        for entry in (*(record.tail for record in self._holds.values()), *self._step_holds):
            holds[id(entry)] = holds.get(id(entry), 0) + 1
        for entry in self._store.index:
            if entry.holds != holds.get(id(entry), 0):
                raise CacheError(
                    f"chunk {entry.key.hex()[:12]} counts {entry.holds} holds, not {holds.get(id(entry), 0)}"
                )

    # ------------------------------------------------------------------ inside

    def _advance(self, now: float) -> None:
        self._flow.now = max(self._flow.now, now)

    def _hold(self, hold: Hold) -> HoldRecord:
        record = self._holds.get(hold.id) if isinstance(hold, Hold) else None
        if record is None:
            raise HoldError(f"expected a hold of this cache that was not released, got {hold!r}")
        return record

    def _load(self, hold: Hold) -> Load:
        load = self._hold(hold).load
        if load is None:
            raise HoldError(f"hold {hold.id} was not onboarded")
        return load

    def _conclude(self, load: Load, unfinished: MissReason) -> None:
        self.counters.misses.update(load.conclude(unfinished))
        if load.outcome is not None:
            self.counters.hits.update(load.outcome.sources)

    def _tier(self, name: str) -> int:
        for tier, level in enumerate(self._store.levels):
            if level.name == name:
                return tier
        raise CacheError(f"no tier is called {name!r}; there are {[level.name for level in self._store.levels]}")

    def _runs(self, path: Sequence[Entry]) -> tuple[Run, ...]:
        names = [self._store.levels[copy.tier].name for entry in path if (copy := entry.warmest_ready())]
        return tuple(Run(name, len(list(run))) for name, run in groupby(names))

    def _check_path(self, keys: Sequence[Key], first: int) -> None:
        if not 0 <= first <= len(keys):
            raise CacheError(f"the first chunk lies in [0, {len(keys)}], got {first}")
        if len(set(keys)) != len(keys):
            raise CacheError(f"the {len(keys)} keys of a path differ, only {len(set(keys))} do")
        self._store.index.check_path(keys, first)

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        limit = self.settings.device_blocks
        if len(set(blocks)) != len(blocks):
            raise CacheError(f"device blocks are distinct, got {list(blocks)[:8]}")
        if blocks and (min(blocks) < 0 or (limit is not None and max(blocks) >= limit)):
            raise CacheError(f"device blocks lie in [0, {limit}), got {min(blocks)} to {max(blocks)}")
