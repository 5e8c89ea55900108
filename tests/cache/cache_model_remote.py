"""Remote tiers beside the cache under test: what it asks them, may think of them, fetches, and stores there.

An answer counts for a time, a transfer tells as much as an answer, and a reset forgets all of it. That is all that the
model knows; in which order chunks are stored it does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from cache_kit import PROBE, PROBE_LIFE, Setup, chunks
from cache_model_base import Stage
from cache_movers import Job

from longshore.boundary import HOST, Key, Probe, ProbeResult, Status, Transfer
from longshore.cache import DropReason, GroupKeys, MissReason
from longshore.cache.types import Answer


class Question:
    """A probe under way."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.waiting = set(range(probe.ranks))
        self.present = [True] * len(probe.keys)
        self.answered = True


class Remote(Stage):
    """What a cache may know of remote tiers."""

    def __init__(self, setup: Setup) -> None:
        self.known: dict[str, dict[Key, tuple[bool, float]]] = {name: {} for name in setup.remote}
        self.questions: dict[int, Question] = {}
        self.expected: list[tuple[str, list[Key]]] = []
        """What tiers are to be asked by the call that is under way."""
        self.asks_about: list[Sequence[Key]] = []
        """What that call wants to know of, asked for already or not."""
        self.ended_remote: list[tuple[str, Job]] = []
        self.heard_of = {name: Counter[Answer]() for name in setup.remote}
        self.not_stored = Counter[str]()
        super().__init__(setup)

    def has(self, name: str, of: Key) -> bool | None:
        """What may be thought of `of` being in a tier; `None` if nothing."""
        present, until = self.known[name].get(of, (False, -1.0))
        return present if self.now < until else None

    def source(self, of: Key) -> str | None:
        """The first remote tier that is known to have `of`."""
        return next((name for name in self.setup.remote if self.has(name, of)), None)

    def beyond(self, keys: Sequence[Key], end: int) -> tuple[int, int]:
        """What is on its way behind `keys[:end]` ends here; and how many chunks follow that are known to be remote.

        What is not known behind these is expected to be asked for.
        """
        while end < len(keys) and not self.is_absent(keys[end]):
            end += 1
        if end and self.is_absent(keys[end - 1]):
            return end, 0
        count = len(list(takewhile(lambda each: self.source(each) and self.is_absent(each), keys[end:])))
        self.expect(keys[end + count :])
        return end, count

    def expect(self, wanted: Sequence[Key]) -> None:
        """Of `wanted`, what is not known and not asked for yet is to be asked for, as far as that is allowed."""
        self.asks_about.append(wanted)
        for name in self.setup.remote:
            under_way = {*self.asked(name), *(each for tier, keys in self.expected if tier == name for each in keys)}
            new = [each for each in wanted if self.has(name, each) is None and each not in under_way]
            room = max(0, self.setup.max_probes - len(under_way))
            self.heard_of[name][Answer.NOT_SENT] += len(new[room:])
            if new[:room]:
                self.expected.append((name, new[:room]))

    def asked(self, name: str) -> dict[Key, int]:
        """Keys that a tier has been asked for, in this generation, without having answered; and the probes."""
        ours = [q.probe for q in self.questions.values() if q.probe.tier == name]
        return {each: probe.probe for probe in ours if probe.generation == self.generation for each in probe.keys}

    def probes(self) -> tuple[int, ...]:
        """The probes whose answers may say more of what the last call wanted to know."""
        found: list[int] = []
        for wanted in self.asks_about:
            for name in self.setup.remote:
                asked = self.asked(name)
                found += sorted({asked[each] for each in wanted if each in asked and self.has(name, each) is None})
        self.asks_about.clear()
        return tuple(found)

    def ask(self, probe: Probe) -> None:
        assert (probe.tier, list(probe.keys)) == self.expected.pop(0)
        assert (probe.deadline, probe.generation, probe.ranks) == (self.now + PROBE, self.generation, self.setup.ranks)
        assert not self.cache.progress(probe.probe).is_over
        assert probe.probe not in self.questions
        self.questions[probe.probe] = Question(probe)
        self.last_job = max(self.last_job, probe.probe)

    def answer(self, number: int, rank: int, there: bool, status: Status) -> None:
        """One rank answers; that what it has is `there`, or that it has nothing."""
        question = self.questions[number]
        probe, store = question.probe, self.movers.stores[question.probe.tier]
        present = tuple(there and (each, probe.generation, rank) in store for each in probe.keys)
        self.call("apply_results", (ProbeResult(number, present, status, rank),), self.now)
        question.waiting.discard(rank)
        question.answered &= status is Status.OK
        question.present = [one and other for one, other in zip(question.present, present, strict=True)]
        if not question.waiting:
            self.end_of(self.questions.pop(number))
        self.settle()

    def end_of(self, question: Question) -> None:
        probe, counts = question.probe, self.heard_of[question.probe.tier]
        if probe.generation != self.generation:
            return
        for each, present in zip(probe.keys, question.present, strict=True):
            if question.answered:
                self.learn(probe.tier, each, present=present)
            counts[(Answer.PRESENT if present else Answer.ABSENT) if question.answered else Answer.NO_ANSWER] += 1

    def learn(self, name: str, of: Key, *, present: bool) -> None:
        self.known[name][of] = present, self.now + PROBE_LIFE

    def others_store(self, path: str, there: int, name: str, group: int = 0) -> None:
        """Another engine has stored the first chunks of `path`, and what follows has lapsed."""
        store = self.movers.stores.get(name, set())
        for at, each in enumerate(chunks(path, group)):
            (store.update if at < there else store.difference_update)(self.tags(each))

    def lapse(self, path: str, at: int, name: str, group: int) -> None:
        """The chunk at `at` is not there any more."""
        for each in chunks(path, group)[at : at + 1]:
            self.movers.stores[name].difference_update(self.tags(each))

    def tags(self, of: Key) -> set[tuple[Key, int, int]]:
        """What all ranks have of a chunk."""
        return {(of, self.generation, rank) for rank in range(self.setup.ranks)}

    def prefetch_remote(self, path: str, start: int) -> None:
        """What is known to be remote behind the ready prefix comes into the host tier, as far as there is room."""
        keys = chunks(path)
        coming, wanted = self.behind(keys, start)
        self.prefetched_remote(self.call("prefetch", {0: GroupKeys(keys, start)}, self.now), coming, wanted)

    def behind(self, keys: Sequence[Key], start: int = 0) -> tuple[list[Key], list[Key]]:
        """What is on its way behind the ready prefix of a path, and what is known to be remote behind that."""
        end = self.ready_end(keys, start)
        begin, count = self.beyond(keys, end)
        return list(keys[end:begin]), list(keys[begin : begin + count])

    def apart(self, keys: Sequence[Key]) -> tuple[list[Key], list[Key]]:
        """The same of independent `keys`: those on their way, and those that are known to be remote."""
        absent = [each for each in keys if self.is_absent(each)]
        self.expect([each for each in absent if self.source(each) is None])
        return [each for each in keys if each not in absent], [each for each in absent if self.source(each)]

    def prefetched_remote(self, jobs: tuple[int, ...], coming: Sequence[Key], wanted: Sequence[Key]) -> None:
        """`jobs` bring what was `wanted`, each chunk from the first tier that has it, and what is `coming` anyway."""
        self.asks_about.clear()
        before, free = set(self.jobs), self.free(HOST)
        sources = {each: self.source(each) for each in wanted}
        coming = [each for each in coming if (each, HOST) in self.resident and not self.is_ready(each, HOST)]
        self.carry()
        joined = {item.key for job in jobs if job in before for item in self.jobs[job].transfer.items}
        assert set(coming) <= joined
        new = [self.jobs[job].transfer for job in jobs if job not in before]
        found = [(item.key, t.route.source) for t in new for item in t.items]
        assert len(dict(found)) == len(found)
        assert all(sources[each] == source for each, source in found)
        assert len(found) == len(wanted) or self.setup.slabs or free < len(wanted), (
            "chunks were left, and there was room"
        )
        assert not self.expected
        self.check()

    # ------------------------------------------------------------------ transfers

    def check_transfer(self, t: Transfer, commanded: bool) -> None:
        if t.route.destination in self.known:
            assert not any(self.has(t.route.destination, item.key) for item in t.items), "it is there already"
            most = max(1, len(self.setup.indices(self.sizes[HOST])) // 16)
            assert len(t.items) + self.writing(t.route) <= most
        super().check_transfer(t, commanded)

    def finish(self, job: Job) -> None:
        super().finish(job)
        if job.transfer.generation == self.generation:
            names = {job.transfer.route.source, job.transfer.route.destination}.intersection(self.known)
            self.ended_remote += [(name, job) for name in names]

    def carry(self) -> None:
        for name, job in sorted(self.ended_remote, key=lambda each: each[1].transfer.job):
            self.note(name, job)
        self.ended_remote.clear()
        super().carry()

    def note(self, name: str, job: Job) -> None:
        """What was fetched or stored is known to be there; what was not is a miss, or a drop."""
        missed = False
        for item, status in zip(job.transfer.items, job.told, strict=True):
            if status is Status.OK:
                self.learn(name, item.key, present=True)
                self.misses[MissReason.AFTER_MISS] += missed and item.parent is not None
                continue
            self.known[name].pop(item.key, None)
            if job.transfer.route.source == HOST:
                self.not_stored[name] += 1
            else:
                self.misses[MissReason(status.value)] += 1
                missed = True

    def forget_remote(self) -> None:
        """A reset: nothing is known any more."""
        for known in self.known.values():
            known.clear()

    def check_books(self) -> None:
        super().check_books()
        assert not self.expected, "a question was expected"
        assert not any(self.cache.progress(probe).is_over for probe in self.questions)
        for name in self.setup.remote:
            assert +self.cache.counters.probes[name] == +self.heard_of[name]
            assert self.cache.counters.drops[name][DropReason.WRITE_FAILED] == self.not_stored[name]
