"""Tiers that are not ours: addressed by key, known only from what they answer, and free to lose what they had.

    unknown ──ask──► asked ──answer──► present or absent ──some seconds later──► unknown
                       └──no answer in time──► unknown, and counted

Nobody waits for an answer: who asks looks at what is known, and may look again when the probe has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

from longshore.boundary import Key, Probe, ProbeResult, Status
from longshore.cache.settings import AdmissionFilter, WritePolicy, WriteRule
from longshore.cache.transfers import Job, TierSlots, Transfers
from longshore.cache.types import Answer, DropReason, MissReason
from longshore.errors import JobError

KNOWN = 1 << 16
"""Keys of one foreign tier whose last answer is remembered; the oldest answers are forgotten first."""


class Foreign:
    """What is known of the tier `name`, and what it was asked."""

    def __init__(self, name: str, transfers: Transfers) -> None:
        self.name = name
        self._transfers = transfers
        self._known: dict[Key, tuple[bool, float]] = {}
        """Whether a key was there, and until when that counts."""
        self._sent: dict[Key, None] = {}
        """Keys of which a store was ordered, or is to be: once is enough, as long as nobody finds that one has gone."""
        self._asked: dict[Key, int] = {}
        """Keys under way, by probe."""
        self._probes: dict[int, _UnderWay] = {}

    def has(self, key: Key) -> bool | None:
        """What the last answer said of `key`; `None` without one that still counts."""
        answer = self._known.get(key)
        return answer[0] if answer is not None and self._transfers.now < answer[1] else None

    def ask(self, keys: Sequence[Key]) -> list[int]:
        """Have the tier asked for those of `keys` that nothing is known of; the probes that are about one of these.

        It is asked for so many at a time only; keys beyond that are counted, and stay unknown.
        """
        settings, unknown = self._transfers.settings, [key for key in keys if self.has(key) is None]
        new = [key for key in unknown if key not in self._asked]
        room = max(0, settings.max_probes - len(self._asked))
        self._transfers.store.counters.probes[self.name][Answer.UNASKED] += len(new) - len(new[:room])
        if asked := tuple(new[:room]):
            number, deadline = self._transfers.new_id(), self._transfers.now + settings.probe_timeout
            probe = Probe(number, self.name, asked, deadline, self._transfers.generation, settings.ranks)
            self._transfers.outbox.append(probe)
            self._probes[number] = _UnderWay(probe)
            self._asked.update(dict.fromkeys(asked, number))
        return sorted({self._asked[key] for key in unknown if key in self._asked})

    def is_asking(self, probe: int) -> bool:
        """Whether `probe` has not ended."""
        return probe in self._probes

    def check(self, result: ProbeResult) -> None:
        """Raise `JobError` unless `result` is one that is waited for."""
        asked = self._probes[result.probe]
        if result.rank not in asked.waiting:
            raise JobError(f"probe {result.probe} does not wait for rank {result.rank}, only for {asked.waiting}")
        if len(result.present) != len(asked.probe.keys):
            raise JobError(f"probe {result.probe} has {len(asked.probe.keys)} keys, its result {len(result.present)}")

    def hear(self, result: ProbeResult) -> None:
        """One rank has answered. A key is there when all ranks' parts are."""
        asked = self._probes[result.probe]
        asked.waiting.discard(result.rank)
        asked.answered &= result.status is Status.OK
        asked.present = [before and now for before, now in zip(asked.present, result.present, strict=True)]
        if not asked.waiting:
            self._end(self._probes.pop(result.probe))

    def learn(self, key: Key, *, present: bool) -> None:
        """`key` is there, or not, as of now."""
        self._known.pop(key, None)
        self._known[key] = present, self._transfers.now + self._transfers.settings.probe_life
        if not present:
            self._sent.pop(key, None)
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def was_sent(self, key: Key) -> bool:
        """Whether `key` need not be stored: it is there, or was sent before."""
        return key in self._sent or bool(self.has(key))

    def sending(self, keys: Sequence[Key]) -> None:
        """A store of `keys` is to be ordered."""
        self._sent.update(dict.fromkeys(keys))
        while len(self._sent) > KNOWN:
            del self._sent[next(iter(self._sent))]

    def not_sending(self, keys: Sequence[Key]) -> None:
        """A store of `keys` is not to be ordered after all."""
        for key in keys:
            self._sent.pop(key, None)

    def forget(self, key: Key) -> None:
        """What was known of `key`, or thought of it, has turned out not to be so."""
        self._known.pop(key, None)
        self._sent.pop(key, None)

    def clear(self) -> None:
        """Nothing of what was known counts any more, nor what is still to be answered."""
        self._known.clear()
        self._sent.clear()
        self._asked.clear()

    def check_integrity(self) -> None:
        """Raise `JobError` where a key waits for a probe that does not ask for it."""
        for key, number in self._asked.items():
            if number not in self._probes or key not in self._probes[number].probe.keys:
                raise JobError(f"probe {number} is waited for, and does not ask for chunk {key.hex()[:12]}")

    def _end(self, asked: _UnderWay) -> None:
        if asked.probe.generation != self._transfers.generation:
            return
        counts = self._transfers.store.counters.probes[self.name]
        for key, present in zip(asked.probe.keys, asked.present, strict=True):
            del self._asked[key]
            if asked.answered:
                self.learn(key, present=present)
            answer = (Answer.PRESENT if present else Answer.ABSENT) if asked.answered else Answer.NONE
            counts[answer] += 1


class _UnderWay:
    """A probe under way: the ranks that have not answered, and what the others said."""

    __slots__ = ("answered", "present", "probe", "waiting")

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.waiting = set(range(probe.ranks))
        self.present = [True] * len(probe.keys)
        self.answered = True


FETCH_BATCH = 16
"""Chunks that are fetched by one job."""

ADMISSION_FILTER_SIZE = 1 << 16
"""Chunks of which a selective write policy remembers how often they came."""

_MOST_AHEAD = 256
"""Chunks that tiers which get what is about to be evicted are sent at a time, at most."""

_SHARE = 16
"""At most one in so many slots of the host tier is kept for stores under way."""


class Exchange:
    """Fetches and stores over one `Transfers`, from and to `tiers`, the first that has a chunk being asked first."""

    def __init__(self, transfers: Transfers, tiers: Sequence[str], rules: Sequence[WriteRule]) -> None:
        self._transfers = transfers
        self._store = transfers.store
        self.tiers = [Foreign(name, transfers) for name in tiers]
        """Without one, callers need not ask anything here."""
        self._seen = [
            AdmissionFilter(rule.threshold, ADMISSION_FILTER_SIZE) if rule.selective else None for rule in rules
        ]
        self._late = [rule.policy is WritePolicy.BACK for rule in rules]
        """Which tiers get what is about to be evicted from the warmest, and nothing else."""
        self._queues: list[deque[Key]] = [deque() for _ in tiers]
        """What is to be stored in each tier, heads first."""
        self._under_way: dict[int, tuple[Foreign, Job]] = {}
        transfers.writing.update(dict.fromkeys(tiers, 0))
        transfers.offloaded = [] if tiers else None

    # ------------------------------------------------------------------ what is known

    def look(self, keys: Sequence[Key], end: int, *, asks: bool = True) -> tuple[int, tuple[int, ...]]:
        """How many chunks foreign tiers are known to have right behind `keys[:end]`, which we have, or will have.

        If it `asks`, what is not known behind these is asked for; also returned are the probes under way about it.
        """
        if end and not self._store.index.get(keys[end - 1]):
            return 0, ()  # what is before these is not ours: they could not be reached
        known = 0
        while end + known < len(keys) and self.has(keys[end + known]) and not self._store.index.get(keys[end + known]):
            known += 1
        return known, self.ask(keys[end + known :]) if asks else ()

    def ask(self, keys: Sequence[Key], tiers: Collection[str] | None = None) -> tuple[int, ...]:
        """Have what is not known of `keys` asked for, of those `tiers` or of all; the probes under way about it."""
        asked = [tier for tier in self.tiers if tiers is None or tier.name in tiers] if keys else []
        return tuple(probe for tier in asked for probe in tier.ask(keys))

    def has(self, key: Key) -> bool:
        """Whether a foreign tier is known to have `key`."""
        return self._source(key) is not None

    def sources(self, keys: Sequence[Key]) -> list[str]:
        """The foreign tier that each of `keys` is known to be in, the first there is; empty for none."""
        return ["" if (tier := self._source(key)) is None else tier.name for key in keys]

    def _source(self, key: Key) -> Foreign | None:
        return next((tier for tier in self.tiers if tier.has(key)), None)

    def is_asking(self, probe: int) -> bool:
        """Whether this is a probe that has not ended."""
        return any(tier.is_asking(probe) for tier in self.tiers)

    def check(self, results: Iterable[ProbeResult]) -> None:
        """Raise `JobError` unless each of `results` is waited for, once."""
        seen: set[tuple[int, int]] = set()
        for result in results:
            tier = next((tier for tier in self.tiers if tier.is_asking(result.probe)), None)
            if tier is None or (result.probe, result.rank) in seen:
                raise JobError(f"probe {result.probe} is not under way, or was answered twice by rank {result.rank}")
            tier.check(result)
            seen.add((result.probe, result.rank))

    def hear(self, results: Iterable[ProbeResult]) -> None:
        """Answers have come, of which `check` says that they are waited for."""
        for result in results:
            next(tier for tier in self.tiers if tier.is_asking(result.probe)).hear(result)

    # ------------------------------------------------------------------ fetching

    def fetch(self, keys: Sequence[Key], end: int, path: Sequence[int], pool: int) -> tuple[int, ...]:
        """Order what foreign tiers are known to have behind `keys[:end]` into `pool` of the warmest tier; all jobs.

        `path` are the nodes of what is on its way behind these already, which is joined. Nothing that is not backed up
        makes way.
        """
        store, writer = self._store, self._store.pools[0].writer
        begin = end + len(path)
        known, _ = self.look(keys, begin)
        jobs = dict.fromkeys(writer[slot] for node in path if (slot := store.index.slot[0][node]) in writer)
        before, wanted = keys[begin - 1] if begin else None, keys[begin : begin + known]
        pin = store.pin(store.index.get(before)) if before is not None and wanted else None
        store.log.by = wanted[0] if wanted else None
        wanted = wanted[: self._transfers.evictor.make_room(0, len(wanted), pool, spare_dirty=True)]
        if pin is not None:
            store.unpin(pin)
        for tier, batch in self._batches(wanted):
            job, above = self._transfers.new_id(), [before, *batch[:-1]]
            jobs[self._fetch(tier, job, batch, above, store.place(batch, before, job, pool))] = None
            before = batch[-1]
        return tuple(jobs)

    def fetch_alone(self, keys: Sequence[Key], nodes: Sequence[int], pool: int) -> tuple[int, ...]:
        """The same for `keys` that stand alone, each for itself; `nodes` are theirs. The last get room first."""
        store, writer = self._store, self._store.pools[0].writer
        absent = [key for key, node in zip(keys, nodes, strict=True) if not node]
        self.ask([key for key in absent if not self.has(key)])
        wanted = [key for key in absent if self.has(key)]
        jobs = dict.fromkeys(writer[slot] for node in nodes if node and (slot := store.index.slot[0][node]) in writer)
        pins = [store.pin(node) for node in nodes if node]
        store.log.by = wanted[-1] if wanted else None
        wanted = wanted[len(wanted) - self._transfers.evictor.make_room(0, len(wanted), pool, spare_dirty=True) :]
        for pin in pins:
            store.unpin(pin)
        for tier, batch in self._batches(wanted):
            job = self._transfers.new_id()
            slots = store.place_alone(batch, job, pool)
            jobs[self._fetch(tier, job, batch, [None] * len(batch), slots)] = None
        return tuple(jobs)

    def _batches(self, keys: Sequence[Key]) -> Iterator[tuple[Foreign, list[Key]]]:
        """`keys`, which foreign tiers are known to have, as far as one job fetches them together."""
        for tier, run in groupby(keys, self._source):
            batch = list(run)
            for start in range(0, len(batch), FETCH_BATCH):
                if tier is not None:
                    yield tier, batch[start : start + FETCH_BATCH]

    def _fetch(
        self, tier: Foreign, job: int, keys: Sequence[Key], parents: Sequence[Key | None], slots: list[int]
    ) -> int:
        deadline = self._transfers.now + self._transfers.settings.load_timeout
        record = self._transfers.order(
            job, keys, parents, None, TierSlots(0, slots), foreign=tier.name, deadline=deadline, prefetch=True
        )
        self._under_way[job] = tier, record
        return job

    # ------------------------------------------------------------------ storing

    def came(self, keys: Sequence[Key]) -> None:
        """Chunks have come from the device, or were found by a request."""
        for at, (seen, late) in enumerate(zip(self._seen, self._late, strict=True)):
            if not late:
                self._send(at, keys if seen is None else keys[: seen.leading(keys)])

    def _send(self, at: int, keys: Sequence[Key]) -> None:
        """Queue a store of those of `keys` that the tier is not known to have, and that are not on their way."""
        tier, queue = self.tiers[at], self._queues[at]
        fresh = [key for key in keys if not tier.was_sent(key)]
        taken = fresh[: max(0, self._transfers.settings.max_writes - len(queue))]
        queue.extend(taken)
        tier.sending(taken)
        self._drop(tier, len(fresh) - len(taken), DropReason.BACKPRESSURE)

    def _leaving(self, arrived: int) -> list[Key]:
        """What the warmest tier would evict for twice as many chunks as have `arrived`."""
        store = self._store
        lacking = min(2 * arrived - store.pools[0].room(), _MOST_AHEAD)
        return [store.index.key[node] for node in store.policies[0].next_victims(lacking)] if lacking > 0 else []

    def found(self, keys: Sequence[Key]) -> None:
        """Chunks of a path were found by a request: selective write policies may want them now."""
        if any(seen is not None for seen in self._seen):
            self.came(keys)

    def proceed(self) -> None:
        """Take note of what has ended and arrived, and order stores, as far as not too many are under way."""
        self._conclude()
        if arrived := self._transfers.offloaded:
            self.came(arrived)
            for at in [at for at, late in enumerate(self._late) if late]:
                self._send(at, self._leaving(len(arrived)))
            arrived.clear()
        limit = min(self._transfers.settings.max_writes, max(1, self._store.pools[0].capacity // _SHARE))
        for tier, queue in zip(self.tiers, self._queues, strict=True):
            count = min(len(queue), limit - self._transfers.writing[tier.name])
            if count > 0:
                self._store_some(tier, [queue.popleft() for _ in range(count)])

    def _store_some(self, tier: Foreign, keys: Sequence[Key]) -> None:
        """Order a store of those of `keys` that are still in the warmest tier, and not known to be there by now."""
        index, pool = self._store.index, self._store.pools[0]
        # What was thought to be there, and is not, may have been queued once more.
        wanted = [key for key in dict.fromkeys(keys) if not tier.has(key)]
        nodes = [node for node in index.find(wanted) if index.depth[node] >= 0 and index.is_ready(node, 0)]
        if len(nodes) < len(wanted):  # these waited too long, or are orphans
            here = set(index.key[nodes])
            gone = [key for key in wanted if key not in here]
            tier.not_sending(gone)
            self._drop(tier, len(gone), DropReason.BACKPRESSURE)
        if not nodes:
            return
        slots = [index.slot[0][node] for node in nodes]
        for slot in slots:
            pool.readers[slot] += 1
        job, above = self._transfers.new_id(), index.before(nodes)
        record = self._transfers.order(
            job, [index.key[node] for node in nodes], above, TierSlots(0, slots), None, foreign=tier.name
        )
        self._under_way[job] = tier, record

    def _drop(self, tier: Foreign, count: int, reason: DropReason) -> None:
        self._store.counters.drops[tier.name][reason] += count

    # ------------------------------------------------------------------ what became of it

    def _conclude(self) -> None:
        """Some jobs may have ended: what was found there is known now, and what was not is a miss."""
        for job in [job for job in self._under_way if job not in self._transfers.jobs]:
            tier, record = self._under_way.pop(job)
            if record.transfer.generation != self._transfers.generation:
                continue
            storing, missed = record.source is not None, False
            for item, status in zip(record.transfer.items, record.statuses, strict=True):
                if status is Status.OK:
                    tier.learn(item.key, present=True)
                    self._store.counters.misses[MissReason.BEHIND] += missed and item.parent is not None
                elif storing:
                    tier.forget(item.key)
                    self._drop(tier, 1, DropReason.WRITE_FAILED)
                else:
                    tier.forget(item.key)
                    self._store.counters.misses[MissReason.of(status)] += 1
                    missed = True

    def clear(self) -> None:
        """A reset: nothing is known, and nothing is to be stored."""
        for tier, queue in zip(self.tiers, self._queues, strict=True):
            tier.clear()
            queue.clear()

    def check_integrity(self) -> None:
        """Raise `JobError` where what is under way is not in flight."""
        for tier in self.tiers:
            tier.check_integrity()
        for job in self._under_way:
            if job not in self._transfers.jobs:
                raise JobError(f"job {job} of a foreign tier has ended, and was not heard of")
