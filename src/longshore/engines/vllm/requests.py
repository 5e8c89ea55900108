"""What the manager keeps of a request, and of the slots that the workers have been told of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import LookupResult, OffloadKey

from longshore.boundary import Key, Slots, Status, TransferResult
from longshore.cache import Hold, Sight, TieredCache
from longshore.engines.vllm.keys import ours

OK = Status.OK


@dataclass(slots=True)
class Request:
    """What is known of one request.

    Attributes:
        answers: Those of this step, for all chunks of the request that vLLM has told of.
        told: These chunks, by vLLM's keys.
        sight: What the cache has of them.
        colder: What of that is in a colder tier alone.
        wanted: What of that vLLM has asked for.
        waits: Whether vLLM was told to wait for some of it.
        worth: The token up to which chunks are worth reading from a colder tier, once that was asked.
        since: When it was first told to wait.
        holds: What was brought up for it, until it is loaded.
        origin: Chunks that came from a colder tier.
        loan: The ticket of what workers read for it.
        windows: Of each group that slides, by our number, the chunks of its last window that were offered.
        barred: A load for it has failed: it gets no other, or it might fail for ever.
        finished: Nothing will be asked for it any more.
        counted: What it misses has been counted.
    """

    answers: dict[OffloadKey, LookupResult] = field(default_factory=dict)
    told: list[OffloadKey] = field(default_factory=list)
    sight: Sight | None = None
    colder: set[OffloadKey] = field(default_factory=set)
    wanted: dict[OffloadKey, None] = field(default_factory=dict)
    waits: bool = False
    worth: float | None = None
    since: float | None = None
    holds: list[Hold] = field(default_factory=list)
    origin: set[OffloadKey] = field(default_factory=set)
    loan: Ticket | None = None
    windows: dict[int, list[OffloadKey]] = field(default_factory=dict)
    barred: bool = False
    finished: bool = False
    counted: bool = False

    def seen(self, theirs: list[OffloadKey]) -> Sight | list[Key]:
        """Some chunks: they were seen already if they are a part of what vLLM has told of in this step."""
        if self.sight is not None and theirs and theirs[0] in self.answers:
            begin = self.told.index(theirs[0])
            end = begin + len(theirs)
            if self.told[begin:end] == theirs:
                return self.sight.part(begin, end)
        return ours(theirs)

    def want(self, key: OffloadKey) -> None:
        """vLLM has asked for `key`, and was told to wait."""
        if key in self.colder:
            self.wanted[key] = None

    def end_step(self) -> None:
        """What was found in this step may change."""
        self.answers, self.told, self.sight = {}, [], None
        self.colder, self.wanted, self.waits = set(), {}, False


@dataclass(slots=True)
class Ticket:
    """Slots that the workers fill, or read: the cache's `jobs`, with the slots of each. Its number is used once."""

    number: int
    since: float
    jobs: list[tuple[int, Slots]] = field(default_factory=list)
    keys: list[OffloadKey] = field(default_factory=list)

    @property
    def slots(self) -> list[int]:
        """All of them."""
        return [slot for _, run in self.jobs for slot in run.indices]

    def end(
        self, cache: TieredCache, good: Sequence[bool], now: float, image_bytes: Sequence[int]
    ) -> list[TransferResult]:
        """Tell the cache that all jobs have ended, and in which slots well, in order; none stands for all.

        `image_bytes` are those of each pool. Returns what it was told.
        """
        said, results = iter(good), []
        for job, run in self.jobs:
            if all(good):
                statuses = (OK,) * len(run.indices)
            else:
                statuses = tuple(OK if next(said) else Status.IO_ERROR for _ in run.indices)
            nbytes = statuses.count(OK) * image_bytes[run.pool]
            results.append(TransferResult(job, statuses, nbytes, (now - self.since) / len(self.jobs)))
        cache.apply(results, now)
        return results
