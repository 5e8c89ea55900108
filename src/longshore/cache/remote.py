"""Remote tiers: addressed by key. Which keys they have is known from their answers only, and they may remove any.

    unknown ──probe──► asked ──answer──► present or absent ──after `probe_life`──► unknown
                         └──no answer before the deadline──► unknown, and counted

No call waits for an answer. A lookup uses the answers known; the engine may repeat it when the probe has ended.

Admission. How full a store is, and what it removes for a new chunk, is not known. That a chunk which was stored is
absent says that the store is full, and for how many requests it keeps a chunk that is not read. From then on, it gets
chunks that are expected to bring, for their time, at least the hits of an average chunk of that age, by the tables of
the host tier. Others are offered again when they are used again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from longshore.boundary import Key, Probe, ProbeResult, Status
from longshore.cache.events import EventKind
from longshore.cache.settings import OfferFilter, WritePolicy, WriteRule
from longshore.cache.transfers import Job, TierSlots, Transfers
from longshore.cache.types import Answer, DropReason, MissReason
from longshore.errors import JobError

MAX_ANSWERS = 1 << 16
"""Answers kept of one remote tier; the oldest are removed first."""

MAX_ANNOUNCED = 1 << 20
"""Copies in one remote tier that events tell of; beyond it, the one stored or read longest ago is withdrawn."""

_GONE = frozenset({Status.NOT_FOUND, Status.CORRUPT, Status.MISMATCH, Status.SHORT})
"""How reads end of what a remote tier does not have, or has damaged: it is absent until it is stored again."""


class RemoteKeys:
    """The keys that the remote tier `name` is known to have or lack, and the probes in flight."""

    def __init__(self, name: str, transfers: Transfers) -> None:
        self.name = name
        self._transfers = transfers
        self._known: dict[Key, tuple[bool, float]] = {}
        """Whether the tier has a key, and until when the answer is valid."""
        self._sent: dict[Key, int] = {}
        """Keys that were stored or are queued, so that they are not stored again unless found missing. With each, the
        number of the request at which it was stored or read last; 0 while it is queued."""
        self.keeps: int | None = None
        """For how many requests the tier keeps what is stored, by its answers; `None` until it has lost a chunk."""
        self._asked: dict[Key, int] = {}
        """Keys of probes in flight: the number of the probe."""
        self._probes: dict[int, _ProbeInFlight] = {}
        self._announced: dict[Key, None] | None = None
        if transfers.settings.remote_events and transfers.settings.events:
            self._announced = {}
        """Chunks that events say the tier has, those stored or read last at the end."""

    @property
    def announced(self) -> Collection[Key]:
        """Chunks that events say the tier has."""
        return self._announced or ()

    def has(self, key: Key) -> bool | None:
        """Whether the tier has `key`, by its last answer; `None` if there is no valid answer."""
        answer = self._known.get(key)
        return answer[0] if answer is not None and self._transfers.now < answer[1] else None

    def ask(self, keys: Sequence[Key]) -> list[int]:
        """Probe those of `keys` without a valid answer; returns the probes in flight for them.

        At most `max_probes` keys are in flight; keys beyond that are counted, and stay unknown.
        """
        settings, unknown = self._transfers.settings, [key for key in keys if self.has(key) is None]
        new = [key for key in dict.fromkeys(unknown) if key not in self._asked]
        room = max(0, settings.max_probes - len(self._asked))
        self._transfers.state.counters.probes[self.name][Answer.NOT_SENT] += len(new) - len(new[:room])
        if asked := tuple(new[:room]):
            number, deadline = self._transfers.new_id(), self._transfers.now + settings.probe_timeout
            probe = Probe(number, self.name, asked, deadline, self._transfers.generation, settings.ranks)
            self._transfers.commands.append(probe)
            self._probes[number] = _ProbeInFlight(probe, set(range(probe.ranks)), [True] * len(asked))
            self._asked.update(dict.fromkeys(asked, number))
        return sorted({self._asked[key] for key in unknown if key in self._asked})

    def is_asking(self, probe: int) -> bool:
        """Whether `probe` has not ended."""
        return probe in self._probes

    def check(self, result: ProbeResult) -> None:
        """Raise `JobError` unless `result` is of a rank that has not answered, with a value for each key."""
        asked = self._probes[result.probe]
        if result.rank not in asked.waiting:
            raise JobError(f"probe {result.probe}: expected answers of ranks {asked.waiting}, got {result.rank}")
        if len(result.present) != len(asked.probe.keys):
            raise JobError(f"probe {result.probe}: expected {len(asked.probe.keys)} values, got {len(result.present)}")

    def apply(self, result: ProbeResult) -> None:
        """A rank has answered. A key is present if the parts of all ranks are."""
        asked = self._probes[result.probe]
        asked.waiting.discard(result.rank)
        asked.answered &= result.status is Status.OK
        asked.present = [before and now for before, now in zip(asked.present, result.present, strict=True)]
        if not asked.waiting:
            self._end(self._probes.pop(result.probe))

    def learn(self, key: Key, *, present: bool) -> None:
        """Record that `key` is present or not, at the present time."""
        self._known.pop(key, None)
        self._known[key] = present, self._transfers.now + self._transfers.settings.probe_life
        if not present:
            self._sent.pop(key, None)
        if len(self._known) > MAX_ANSWERS:
            del self._known[next(iter(self._known))]

    def arrived(self, key: Key) -> None:
        """`key` was stored in the tier, or read from it."""
        self.learn(key, present=True)
        if key in self._sent:
            self._sent[key] = self._transfers.state.last_request
        if key in self._asked:
            self._probes[self._asked[key]].overtaken.add(key)
        if self._announced is not None and key in self._announced:
            self._announced[key] = self._announced.pop(key)

    def announce(self, key: Key) -> None:
        """Record the event that the tier has `key`, if events tell of remote tiers."""
        if self._announced is None or key in self._announced:
            return
        self._announced[key] = None
        self._transfers.state.log.record(EventKind.SHARED, [key], tier=self.name)
        if len(self._announced) > MAX_ANNOUNCED:
            self.withdraw(next(iter(self._announced)), "limit")

    def withdraw(self, key: Key, cause: str) -> None:
        """Record the event that the tier does not have `key` any more, if it was said to have it."""
        if self._announced is not None and key in self._announced:
            del self._announced[key]
            self._transfers.state.log.record(EventKind.LAPSED, [key], tier=self.name, cause=cause)

    def was_sent(self, key: Key) -> bool:
        """Whether `key` need not be stored: it is present, or was stored before."""
        return key in self._sent or bool(self.has(key))

    def mark_sent(self, keys: Sequence[Key]) -> None:
        """Stores of `keys` were queued."""
        self._sent.update(dict.fromkeys(keys, 0))
        while len(self._sent) > MAX_ANSWERS:
            del self._sent[next(iter(self._sent))]

    def unmark_sent(self, keys: Sequence[Key]) -> None:
        """Stores of `keys` were removed from the queue."""
        for key in keys:
            self._sent.pop(key, None)

    def forget(self, key: Key) -> None:
        """A copy from or to the tier has failed for `key`: remove what is known of it."""
        self._known.pop(key, None)
        self._sent.pop(key, None)

    def clear(self) -> None:
        """Remove all answers. Probes in flight have no effect any more."""
        self.keeps = None
        self._known.clear()
        self._sent.clear()
        self._asked.clear()
        if self._announced is not None:
            self._announced.clear()

    def check_integrity(self) -> None:
        """Raise `JobError` if a key waits for a probe that does not contain it."""
        for key, number in self._asked.items():
            if number not in self._probes or key not in self._probes[number].probe.keys:
                raise JobError(f"chunk {key.hex()[:12]} waits for probe {number}, which does not contain it")

    def _observe(self, key: Key, *, present: bool) -> None:
        """Learn from an answer about a chunk that was stored for how long the tier keeps chunks."""
        since = self._sent.get(key)
        if not since:
            return
        age = self._transfers.state.last_request - since
        if not present:
            self.keeps = age if self.keeps is None else min(self.keeps, age)
        elif self.keeps is not None:
            self.keeps = max(self.keeps, age)

    def _end(self, asked: _ProbeInFlight) -> None:
        if asked.probe.generation != self._transfers.generation:
            return
        counts = self._transfers.state.counters.probes[self.name]
        for key, present in zip(asked.probe.keys, asked.present, strict=True):
            del self._asked[key]
            if asked.answered:
                self._observe(key, present=present)
                if present or self.name not in self._transfers.settings.read_only:
                    self.learn(key, present=present)
                if not present and key not in asked.overtaken:
                    self.withdraw(key, Status.NOT_FOUND.value)
            answer = (Answer.PRESENT if present else Answer.ABSENT) if asked.answered else Answer.NO_ANSWER
            counts[answer] += 1


@dataclass(slots=True)
class _ProbeInFlight:
    """A probe in flight: the ranks that have not answered, and the answers of the others.

    Keys that were stored or read meanwhile are `overtaken`: an answer that they are absent may be older.
    """

    probe: Probe
    waiting: set[int]
    present: list[bool]
    answered: bool = True
    overtaken: set[Key] = field(default_factory=set)


FETCH_BATCH = 16
"""Chunks read by one job."""

OFFER_FILTER_SIZE = 1 << 16
"""Chunks whose offers a selective write policy counts."""

_MOST_AHEAD = 256
"""Chunks that tiers which get what is about to be evicted are sent at a time, at most."""

_SHARE = 16
"""Stores in flight read at most one sixteenth of the slots of the host tier."""


class RemoteTiers:
    """Reads from and stores to the remote `tiers`. A chunk is read from the first tier that has it."""

    def __init__(self, transfers: Transfers, tiers: Sequence[str], rules: Sequence[WriteRule]) -> None:
        self._transfers = transfers
        self._state = transfers.state
        self.tiers = [RemoteKeys(name, transfers) for name in tiers]
        """Callers skip all other methods if there is none."""
        self._seen = [OfferFilter(rule.threshold, OFFER_FILTER_SIZE) if rule.selective else None for rule in rules]
        self._late = [rule.policy is WritePolicy.BACK for rule in rules]
        """Which tiers get what is about to be evicted from the host tier, and nothing else."""
        self._queues: list[deque[Key]] = [deque() for _ in tiers]
        """Chunks to store in each tier, heads first."""
        self._in_flight: dict[int, tuple[RemoteKeys, Job]] = {}
        transfers.writing.update(dict.fromkeys(tiers, 0))
        transfers.arrived_from_device = [] if tiers else None

    # ------------------------------------------------------------------ probes

    def known_after(self, keys: Sequence[Key], end: int, *, probe: bool = True) -> tuple[int, tuple[int, ...]]:
        """How many chunks directly after `keys[:end]`, which are in own tiers, remote tiers are known to have; and
        probes.

        With `probe`, keys after these without a valid answer are probed.
        """
        if end and not self._state.index.get(keys[end - 1]):
            return 0, ()  # the chunk before is in no own tier, so these would not be loadable
        known = 0
        while end + known < len(keys) and self.has(keys[end + known]) and not self._state.index.get(keys[end + known]):
            known += 1
        return known, self.ask(keys[end + known :]) if probe else ()

    def ask(self, keys: Sequence[Key], tiers: Collection[str] | None = None) -> tuple[int, ...]:
        """Probe those of `keys` without a valid answer, in `tiers` or in all; returns the probes in flight."""
        asked = [tier for tier in self.tiers if tiers is None or tier.name in tiers] if keys else []
        return tuple(probe for tier in asked for probe in tier.ask(keys))

    def has(self, key: Key) -> bool:
        """Whether a remote tier is known to have `key`."""
        return self._source(key) is not None

    def sources(self, keys: Sequence[Key]) -> list[str]:
        """The remote tier that each of `keys` is known to be in, the first there is; empty for none."""
        return ["" if (tier := self._source(key)) is None else tier.name for key in keys]

    def _source(self, key: Key) -> RemoteKeys | None:
        return next((tier for tier in self.tiers if tier.has(key)), None)

    def is_asking(self, probe: int) -> bool:
        """Whether `probe` is in flight."""
        return any(tier.is_asking(probe) for tier in self.tiers)

    def check(self, results: Iterable[ProbeResult]) -> None:
        """Raise `JobError` unless all `results` are of probes in flight, one for each rank."""
        seen: set[tuple[int, int]] = set()
        for result in results:
            tier = next((tier for tier in self.tiers if tier.is_asking(result.probe)), None)
            if tier is None or (result.probe, result.rank) in seen:
                raise JobError(f"probe {result.probe} is not in flight, or rank {result.rank} has answered it twice")
            tier.check(result)
            seen.add((result.probe, result.rank))

    def apply(self, results: Iterable[ProbeResult]) -> None:
        """Apply answers, which were checked."""
        for result in results:
            next(tier for tier in self.tiers if tier.is_asking(result.probe)).apply(result)

    # ------------------------------------------------------------------ fetching

    def fetch(
        self, keys: Sequence[Key], end: int, path: Sequence[int], size_class: int, deadline: float
    ) -> tuple[int, ...]:
        """Read chunks of `size_class` after `keys[:end]`, which remote tiers are known to have, into the host tier.

        `path` are the nodes of chunks after these that are in flight already. Returns all jobs, also of these. No
        dirty chunk is evicted for it.
        """
        begin = end + len(path)
        known, _ = self.known_after(keys, begin)
        parent_key, index = keys[begin - 1] if begin else None, self._state.index
        kept = () if parent_key is None else (index.get(parent_key),)
        return self._fetch(keys[begin : begin + known], path, kept, size_class, deadline, parent_key=parent_key)

    def fetch_independent(
        self, keys: Sequence[Key], nodes: Sequence[int], size_class: int, deadline: float
    ) -> tuple[int, ...]:
        """`fetch` for independent `keys`, with these `nodes`. The last ones get room first."""
        absent = [key for key, node in zip(keys, nodes, strict=True) if not node]
        self.ask([key for key in absent if not self.has(key)])
        return self._fetch(
            [key for key in absent if self.has(key)], nodes, nodes, size_class, deadline, independent=True
        )

    def _fetch(
        self,
        wanted: Sequence[Key],
        path: Sequence[int],
        kept: Sequence[int],
        size_class: int,
        deadline: float,
        *,
        parent_key: Key | None = None,
        independent: bool = False,
    ) -> tuple[int, ...]:
        """Read `wanted`, after the key `parent_key`, as far as there is room while the nodes `kept` are not evicted."""
        state, writer, transfers = self._state, self._state.pools[0].writer, self._transfers
        jobs = dict.fromkeys(writer[slot] for node in path if node and (slot := state.index.slot[0][node]) in writer)
        state.log.evicted_for = wanted[-1 if independent else 0] if wanted else None
        refs = [state.add_ref(node) for node in kept if node and wanted]
        room = transfers.evictor.make_room(0, len(wanted), size_class, clean_only=True)
        for ref in refs:
            state.remove_ref(ref)
        for tier, batch in self._batches(wanted[len(wanted) - room :] if independent else wanted[:room]):
            job = transfers.new_id()
            parent_keys: list[Key | None] = [None] * len(batch)
            if independent:
                slots = state.allocate_independent(batch, job, size_class)
            else:
                parent_keys, slots = [parent_key, *batch[:-1]], state.allocate(batch, parent_key, job, size_class)
                parent_key = batch[-1]
            record = transfers.schedule(
                job, batch, parent_keys, None, TierSlots(0, slots), remote=tier.name, deadline=deadline, prefetch=True
            )
            self._in_flight[job] = tier, record
            jobs[job] = None
        return tuple(jobs)

    def _batches(self, keys: Sequence[Key]) -> Iterator[tuple[RemoteKeys, list[Key]]]:
        """`keys`, which remote tiers are known to have, in batches of one job each."""
        for tier, run in groupby(keys, self._source):
            batch = list(run)
            for start in range(0, len(batch), FETCH_BATCH):
                if tier is not None:
                    yield tier, batch[start : start + FETCH_BATCH]

    # ------------------------------------------------------------------ storing

    def offer(self, keys: Sequence[Key]) -> None:
        """Chunks have come from the device."""
        for number, (seen, late) in enumerate(zip(self._seen, self._late, strict=True)):
            if not late:
                self._send(number, keys if seen is None else keys[: seen.leading(keys)])

    def _send(self, number: int, keys: Sequence[Key]) -> None:
        """Queue a store of those of `keys` that the tier is not known to have, and that are not on their way."""
        tier, queue = self.tiers[number], self._queues[number]
        if tier.name in self._transfers.settings.read_only:
            return
        fresh = self._admitted(number, [key for key in keys if not tier.was_sent(key)])
        taken = fresh[: max(0, self._transfers.settings.max_writes - len(queue))]
        queue.extend(taken)
        tier.mark_sent(taken)
        self._count_drop(tier, len(fresh) - len(taken), DropReason.BACKPRESSURE)

    def _admitted(self, number: int, keys: list[Key]) -> list[Key]:
        """Those of `keys`, heads first, that promise no less than what the tier removes for them; counts the others.

        After a chunk that is left out, or is not in the host tier, none is admitted.
        """
        tier, index, policy = self.tiers[number], self._state.index, self._state.policies[0]
        if not keys or tier.keeps is None or not self._rejects(number):
            return keys
        nodes, left_out, admitted, rejected = index.find(keys), set[int](), list[Key](), 0
        for key, node, enough in zip(keys, nodes, policy.outrank(nodes, tier.keeps).tolist(), strict=True):
            there = not node or index.is_ready(node, 0)
            if there and (enough or not node) and index.parent[node] not in left_out:
                admitted.append(key)
            else:
                left_out.add(node)
                rejected += there
        if not self._late[number]:  # else the same chunks are offered until they are evicted
            self._count_drop(tier, rejected, DropReason.ADMISSION)
        return admitted

    def _rejects(self, number: int) -> bool:
        """Whether the tier may be denied chunks that promise too few hits; they are offered again when used."""
        is_on = self._transfers.settings.admission and self._state.policies[0].rejects
        return is_on and self.tiers[number].keeps is not None

    def _leaving(self, num_arrived: int) -> list[Key]:
        """What the host tier would evict for twice as many chunks as have arrived."""
        state = self._state
        lacking = min(2 * num_arrived - state.pools[0].room(), _MOST_AHEAD)
        return [state.index.key[node] for node in state.policies[0].next_victims(lacking)] if lacking > 0 else []

    def found(self, keys: Sequence[Key]) -> None:
        """Chunks of a path were found by a lookup, which counts for selective write policies."""
        for number, (seen, late) in enumerate(zip(self._seen, self._late, strict=True)):
            if not late and (seen is not None or self._rejects(number)):
                self._send(number, keys if seen is None else keys[: seen.leading(keys)])

    def proceed(self) -> None:
        """Process ended jobs, queue chunks that have arrived, and schedule stores within the limits."""
        self._conclude()
        if arrived_keys := self._transfers.arrived_from_device:
            self.offer(arrived_keys)
            for number in [number for number, late in enumerate(self._late) if late]:
                self._send(number, self._leaving(len(arrived_keys)))
            arrived_keys.clear()
        limit = min(self._transfers.settings.max_writes, max(1, self._state.pools[0].capacity // _SHARE))
        for tier, queue in zip(self.tiers, self._queues, strict=True):
            count = min(len(queue), limit - self._transfers.writing[tier.name])
            if count > 0:
                self._store_some(tier, [queue.popleft() for _ in range(count)])

    def _store_some(self, tier: RemoteKeys, keys: Sequence[Key]) -> None:
        """Schedule a store of those of `keys` that are in the host tier, and not known to be in the remote one."""
        index, pool = self._state.index, self._state.pools[0]
        # A chunk that was found missing may have been queued twice.
        wanted = [key for key in dict.fromkeys(keys) if not tier.has(key)]
        nodes = [node for node in index.find(wanted) if index.depth[node] >= 0 and index.is_ready(node, 0)]
        if len(nodes) < len(wanted):  # evicted from the host tier since, or orphans
            here = set(index.key[nodes].tolist())
            gone = [key for key in wanted if key not in here]
            tier.unmark_sent(gone)
            self._count_drop(tier, len(gone), DropReason.BACKPRESSURE)
        if not nodes:
            return
        slots = [index.slot[0][node] for node in nodes]
        for slot in slots:
            pool.readers[slot] += 1
        job, parent_keys = self._transfers.new_id(), index.parent_keys(nodes)
        record = self._transfers.schedule(
            job, [index.key[node] for node in nodes], parent_keys, TierSlots(0, slots), None, remote=tier.name
        )
        self._in_flight[job] = tier, record

    def _count_drop(self, tier: RemoteKeys, count: int, reason: DropReason) -> None:
        self._state.counters.drops[tier.name][reason] += count

    # ------------------------------------------------------------------ results

    def _conclude(self) -> None:
        """Process ended jobs: record which keys are present, and count misses and failed stores."""
        for job in [job for job in self._in_flight if job not in self._transfers.jobs]:
            tier, record = self._in_flight.pop(job)
            if record.transfer.generation != self._transfers.generation:
                continue
            storing, missed = record.source is not None, False
            for item, status in zip(record.transfer.items, record.statuses, strict=True):
                if status is Status.OK:
                    tier.arrived(item.key)
                    if storing:
                        tier.announce(item.key)
                    self._state.counters.misses[MissReason.AFTER_MISS] += missed and item.parent is not None
                elif storing:
                    tier.forget(item.key)
                    self._count_drop(tier, 1, DropReason.of(status))
                else:
                    tier.forget(item.key)
                    self._state.counters.misses[MissReason.of(status)] += 1
                    missed = True
                    if status in _GONE:
                        tier.withdraw(item.key, status.value)

    def clear(self) -> None:
        """A reset: remove all answers, and queued stores."""
        for tier, queue in zip(self.tiers, self._queues, strict=True):
            tier.clear()
            queue.clear()

    def check_integrity(self) -> None:
        """Raise `JobError` if a recorded job is not in flight."""
        for tier in self.tiers:
            tier.check_integrity()
        for job in self._in_flight:
            if job not in self._transfers.jobs:
                raise JobError(f"job {job} of a remote tier has ended, but was not processed")
