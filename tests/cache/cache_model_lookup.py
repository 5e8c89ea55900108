"""What a prompt asks of the cache, and what it must get: lookup, load, prefetch, release."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, takewhile

from cache_kit import LOAD, PREFETCH, chunks, group_of, parent, text_of
from cache_model_leases import ModelHold
from cache_model_remote import Remote

from longshore.boundary import HOST, Key, Urgency
from longshore.cache import (
    GroupKeys,
    Lease,
    LookupResult,
    MissReason,
    PrefetchPolicy,
    Progress,
    Protection,
    ScheduledLoad,
)


class Reading(Remote):
    """Calls of one request after the other."""

    told: set[Key]

    def lookup(self, path: str, start: int, request: str | None) -> Lease | None:
        keys = chunks(path)
        end = self.ready_end(keys, start)
        remote = self.miss(keys, end)
        found = self.call_lookup(keys, start, request)
        assert (found.num_chunks, found.remote, found.partial) == (end - start, remote, None)
        return self.looked_up(found, ModelHold(keys[start:end], request, start=start))

    def count_later(self, path: str, start: int, request: str | None) -> Lease | None:
        """The same for a request that a scheduler asks for again and again: it is counted apart."""
        keys, before = chunks(path), self.cache.counters.misses.copy()
        end = self.ready_end(keys, start)
        path = {0: GroupKeys(keys, start)}
        found: LookupResult = self.call("lookup", path, self.now, request=request, count=False)
        assert self.cache.counters.misses == before
        assert (found.num_chunks, found.remote) == (end - start, self.miss(keys, end))
        self.call("lookup", path, self.now, protect=Protection.NONE, request=request)
        return self.looked_up(found, ModelHold(keys[start:end], request, start=start))

    def lookup_text(self, path: str, start: int, request: str | None) -> Lease | None:
        """The same by keys and tokens: where nobody has the next chunk, one that begins like it is held, too."""
        keys, text = chunks(path), text_of(path, self.setup.per_chunk)
        end = self.ready_end(keys, start)
        remote, alike = self.miss(keys, end), self.alike(keys, end)
        found: LookupResult = self.call(
            "lookup", {0: GroupKeys(keys, start, prompt_tokens=text)}, self.now, request=request
        )
        assert (found.num_chunks, found.remote) == (end - start, remote)
        assert (found.partial is None) == (not alike)
        held = keys[start:end]
        if found.partial is not None:
            assert found.partial.key in alike
            assert (found.partial.tokens, found.partial.device) == (len(text.tokens) // len(keys) // 2, False)
            held.append(found.partial.key)
        return self.looked_up(found, ModelHold(held, request, start=start))

    def alike(self, keys: Sequence[Key], end: int) -> set[Key]:
        """What can be read in the place of `keys[end]`, and begins like it as far as the cache was told."""
        if end == len(keys):
            return set()
        return {each for each in self.told if parent(each) == parent(keys[end]) and self.is_rooted(each)}

    def looked_up(self, found: LookupResult, model: ModelHold) -> Lease | None:
        """What was found is as the model says."""
        self.held(found.lease, model)
        self.carry()
        assert found.probes == self.probes()
        self.check()
        return found.lease

    def call_lookup(self, keys: Sequence[Key], start: int, request: str | None) -> LookupResult:
        found: LookupResult = self.call("lookup", {0: GroupKeys(keys, start)}, self.now, request=request)
        return found

    def miss(self, keys: Sequence[Key], end: int) -> int:
        """A request gets no further than to before `keys[end]`; how many of the rest are known to be remote."""
        begin, remote = self.beyond(keys, end)
        known = range(begin, begin + remote)
        self.misses.update(MissReason.REMOTE if at in known else self.reason(keys[at]) for at in range(end, len(keys)))
        return remote

    def held(self, hold: Lease | None, model: ModelHold) -> None:
        """Something was found, or nothing; what is leased can be found where the cache says."""
        assert (hold is None) == (not model.keys)
        if hold is None:
            return
        progress: Progress = self.call("progress", hold)
        assert (progress.is_over, progress.outcome) == (True, None)
        assert [run.tier for run in progress.runs for _ in range(run.num_chunks)] == list(map(self.warmest, model.keys))
        assert hold not in self.holds
        self.holds[hold] = model

    def lookup_each(self, *keys: Key) -> str:
        """Where each of `keys` is, and the answer for the last."""
        answer = ""
        asked = {0: GroupKeys(keys)}
        found: LookupResult = self.call("lookup", asked, self.now, protect=Protection.STEP, independent=True)
        for of, presence in zip(keys, found.residency[0].presences, strict=True):
            answer = str(presence.value)
            if self.is_readable(of):
                self.seen_in_step[of] = False
                self.warm |= {of} if self.is_ready(of, HOST) else set()
                assert answer == ("host" if self.is_ready(of, HOST) else "colder")
            else:
                assert answer == ("absent" if self.is_absent(of) else "in_flight")
        self.settle()
        return answer

    def load(self, hold: Lease, count: int, skip: int, short: int, timeout: float | None = None) -> None:
        """Load the leading `count` chunks, without `skip` blocks at the front and `short` at the end."""
        model, per_chunk = self.holds[hold], self.setup.per_chunk
        blocks = self.take_blocks(count * per_chunk - skip - short)
        if not blocks:
            return
        keys = model.keys[:count]
        readable = [self.is_readable(each) for each in keys]
        leading = next((i for i, each in enumerate(readable) if not each), count)
        sources = [self.warmest(each) for each in keys[:leading]]
        before, free = dict(self.resident), self.free(HOST)
        self.load_timeout = timeout or LOAD
        model.deadline = self.now + self.load_timeout
        answer: ScheduledLoad = self.call("load", hold, {0: tuple(blocks)}, skip=skip, timeout=timeout)
        assert answer.num_chunks == sum(part.num_chunks for part in answer.jobs) <= leading
        for each in keys[answer.num_chunks : leading]:
            model.cut.append(MissReason.AFTER_MISS if (each, HOST) in before else MissReason.NO_ROOM)
        model.cut += [self.reason(each) for each in keys[leading:]]
        cold = [each for each in keys[:leading] if (each, HOST) not in before]
        assert answer.num_chunks == leading or free < len(cold), "chunks were left out although there was room"
        model.has_load, model.blocks = True, blocks
        model.sources = sources[: answer.num_chunks]
        self.loads.append(model)
        self.carry()
        model.parts = [self.jobs[part.job] for part in answer.jobs]
        for part, job in zip(answer.jobs, model.parts, strict=True):
            assert len(job.transfer.items) == part.num_chunks
        assert [i.key for job in model.parts for i in job.transfer.items] == keys[: answer.num_chunks]
        used = [b for job in model.parts for s in job.transfer.sections for b in s.blocks]
        assert used == blocks[: max(0, answer.num_chunks * per_chunk - skip)]
        first = [job.transfer.sections[0].first_block for job in model.parts[:1]]
        assert first in ([], [model.start * per_chunk + skip])
        if not model.parts:
            self.conclude(model, MissReason.CANCELLED)
        self.check()

    def prefetch(
        self, hold: Lease, policy: PrefetchPolicy | None = None, timeout: float | None = None
    ) -> tuple[int, ...]:
        """Held chunks come up from colder tiers, what only these have, and nothing else. What is coming is joined."""
        model = self.holds[hold]
        known = self.left_of(model)
        cold = [each for each in known if (each, HOST) not in self.resident]
        coming = {each for each in known if not self.is_ready(each, HOST) and (each, HOST) in self.resident}
        before = set(self.jobs)
        jobs: tuple[int, ...] = self.call("prefetch", hold, self.now, policy=policy, timeout=timeout)
        model.reading, model.reading_until = jobs, self.now + (timeout or PREFETCH)
        if policy is not PrefetchPolicy.TIMEOUT:
            model.reading_until = self.now + LOAD
        model.patient = policy in (PrefetchPolicy.WAIT, PrefetchPolicy.TIMEOUT)
        self.carry()
        ordered = [item.key for job in jobs if job not in before for item in self.jobs[job].transfer.items]
        joined = {item.key for job in jobs if job in before for item in self.jobs[job].transfer.items}
        assert sorted(ordered, key=model.keys.index) == cold[: len(ordered)]
        assert coming <= joined
        assert all(self.jobs[job].transfer.urgency is Urgency.PREFETCH for job in jobs if job not in before)
        self.check()
        return jobs

    def left_of(self, model: ModelHold) -> list[Key]:
        """The held chunks of each group, up to the first that was lost."""
        found: list[Key] = []
        for _, part in groupby(model.keys, group_of):
            found += takewhile(lambda each: each not in model.lost and self.is_readable(each), part)
        return found

    def release(self, hold: Lease) -> None:
        self.call("release", hold)
        self.let_go(hold)
        self.settle()

    def release_request(self, request: str) -> None:
        for hold in [hold for hold, model in self.holds.items() if model.request == request]:
            self.release(hold)

    def let_go(self, hold: Lease) -> None:
        model = self.holds.pop(hold)
        if model.has_load and model.outcome is None:
            self.conclude(model, MissReason.CANCELLED)

    # ------------------------------------------------------------------ checks

    def check_books(self) -> None:
        super().check_books()
        for hold, model in self.holds.items():
            progress = self.cache.progress(hold)
            if model.has_load:
                assert progress == (model.outcome is not None, model.outcome, (), False)
                continue
            patient = model.patient and self.now < model.reading_until
            reads = any(job in self.jobs for job in model.reading)
            known = self.left_of(model)
            leading = next((i for i, each in enumerate(known) if not self.is_ready(each, HOST)), len(known))
            found = progress.leading(HOST) if progress.is_over else None
            if found is None and patient and not reads:
                assert leading < len(known), "it waits, and lacks nothing"
                assert self.jobs or self.seen_in_step or len(self.holds) > 1, "it waits for room that nothing will make"
            else:
                assert found == (None if patient and reads else leading)
