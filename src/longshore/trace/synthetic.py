"""Synthetic traffic, for patterns that no recorded trace at hand shows.

    family = sources, each with the share of the requests that it makes

    source      somebody begins a piece of work every now and then, each piece a generator of prompts
                work ──wait──► prompt ──wait──► prompt ──► over

Lengths, waits and numbers of turns have long tails (log-normal, geometric); popularity follows Zipf's law. Blocks are
numbered in the order of creation. The same arguments give the same requests in every process, from one seeded
generator. The patterns follow publications on such services (multi-turn chats with think times, agents that work in
quick steps after long instructions, questions on documents); the parameters are not fitted to any data.
"""

from __future__ import annotations

import heapq
import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from longshore.errors import TraceError
from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import TRACE_BLOCK_TOKENS

Work = Generator[tuple[float, list[int]], None, None]
"""Prompts of one piece of work: seconds to wait before each, and its complete blocks."""


@dataclass(slots=True)
class _World:
    """What all works share: chance, and the numbers of blocks."""

    dice: random.Random
    numbers: Iterator[int] = field(default_factory=count)

    def fresh(self, blocks: float) -> list[int]:
        """Blocks that nobody has seen, at least one."""
        return [next(self.numbers) for _ in range(max(1, round(blocks)))]

    def about(self, median: float, spread: float = 0.8) -> float:
        """A positive number: log-normal, `spread` is the deviation of its logarithm."""
        return median * math.exp(self.dice.gauss(0.0, spread))

    def turns(self, mean: float) -> int:
        """At least one: geometric."""
        return 1 + int(math.log(1.0 - self.dice.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1

    def rank(self, ranks: int) -> int:
        """Zipf's: 0 is the most popular."""
        return int(ranks ** self.dice.random()) - 1


class _Source(ABC):
    """Begins works of one kind."""

    def __init__(self, world: _World) -> None:
        self.world = world

    @abstractmethod
    def work(self) -> Work: ...


class _Chats(_Source):
    """People who talk: a few system prompts, turns minutes apart, some asked again as they were."""

    def __init__(self, world: _World, *, think: float = 60.0, turns: float = 4.0, opening: float = 6.0) -> None:
        super().__init__(world)
        self._think, self._turns, self._opening = think, turns, opening
        self._systems = [world.fresh(world.about(2.0)) for _ in range(6)]

    def work(self) -> Work:
        world, wait = self.world, 0.0
        path = [*self._systems[world.rank(len(self._systems))], *world.fresh(world.about(self._opening, 1.1))]
        for _ in range(world.turns(self._turns)):
            yield wait, path
            wait = world.about(self._think)
            if world.dice.random() > 0.1:
                path = [*path, *world.fresh(world.about(2.0))]


class _Agents(_Source):
    """Programs that work in quick steps behind long instructions, and then never come back."""

    def __init__(self, world: _World) -> None:
        super().__init__(world)
        self._instructions = [world.fresh(world.about(24.0, 0.5)) for _ in range(12)]

    def work(self) -> Work:
        world, wait = self.world, 0.0
        path = [*self._instructions[world.rank(len(self._instructions))], *world.fresh(world.about(2.0))]
        for _ in range(world.turns(12.0)):
            yield wait, path
            wait = world.about(6.0)
            path = [*path, *world.fresh(world.about(1.0))]


class _Documents(_Source):
    """Questions on documents, of which some are popular, and all are replaced in time."""

    def __init__(self, world: _World, *, documents: int = 400, replaced: float = 0.03) -> None:
        super().__init__(world)
        self._replaced = replaced
        self._library = [world.fresh(world.about(20.0)) for _ in range(documents)]

    def work(self) -> Work:
        world, library = self.world, self._library
        if world.dice.random() < self._replaced:
            library[world.dice.randrange(len(library))] = world.fresh(world.about(20.0))
        document = library[world.rank(len(library))]
        for turn in range(world.turns(1.5)):
            yield world.about(20.0) if turn else 0.0, document


class _Strangers(_Source):
    """Prompts that nobody ever asks again; only their first block is known."""

    def __init__(self, world: _World) -> None:
        super().__init__(world)
        self._system = world.fresh(1)

    def work(self) -> Work:
        yield 0.0, [*self._system, *self.world.fresh(self.world.about(16.0, 1.0))]


class _Scans(_Source):
    """A batch job that goes over the same texts again and again, in the same order."""

    def __init__(self, world: _World, *, texts: int = 300) -> None:
        super().__init__(world)
        self._texts = [world.fresh(world.about(12.0)) for _ in range(texts)]
        self._next = 0

    def work(self) -> Work:
        text = self._texts[self._next]
        self._next = (self._next + 1) % len(self._texts)
        yield 0.0, text


class _Bursts(_Source):
    """One prompt asked many times within seconds, and never again."""

    def work(self) -> Work:
        world = self.world
        path = world.fresh(world.about(16.0))
        for turn in range(world.turns(8.0)):
            yield world.about(3.0) if turn else 0.0, path


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sources and their works per second; with a `period`, the sources are active in turn for that many seconds."""

    sources: tuple[tuple[Callable[[_World], _Source], float], ...]
    period: float = 0.0

    def arrival(self, which: int, active: float) -> float:
        """The time at which source `which` has been active for `active` seconds."""
        if not self.period:
            return active
        turns, rest = divmod(active, self.period)
        return (turns * len(self.sources) + which) * self.period + rest


FAMILIES = {
    "chats": Traffic(((_Chats, 1.0), (_Strangers, 0.2))),
    "slow chats": Traffic(((lambda world: _Chats(world, think=400.0, turns=6.0, opening=2.0), 0.6), (_Strangers, 0.6))),
    "agents": Traffic(((_Agents, 0.5), (_Strangers, 1.0))),
    "documents": Traffic(((_Documents, 2.0), (_Strangers, 0.5))),
    "scans": Traffic(((_Scans, 1.5), (_Chats, 0.5))),
    "bursts": Traffic(((_Bursts, 0.3), (_Chats, 0.4), (_Strangers, 0.5))),
    "drift": Traffic(((_Chats, 1.0), (_Documents, 2.0), (_Agents, 0.4), (_Scans, 3.0)), period=400.0),
    "mixed": Traffic(
        ((_Chats, 0.4), (_Agents, 0.1), (_Documents, 0.7), (_Strangers, 0.5), (_Scans, 0.4), (_Bursts, 0.05)),
    ),
}
"""Families of traffic by name."""


def synthesize(
    family: str, *, requests: int, seed: int = 0, load: float = 1.0, block_tokens: int = TRACE_BLOCK_TOKENS
) -> Iterator[TraceRequest]:
    """Requests of one of `FAMILIES`, in order of arrival, as a stream.

    Args:
        family: One of `FAMILIES`.
        requests: Number of requests, at least 1.
        seed: Seed of the generator.
        load: Factor of the rate at which works begin.
        block_tokens: Tokens per block, at least 2. Each prompt ends with a partial block, as in recorded traces.

    Raises:
        TraceError: An invalid argument.
    """
    if family not in FAMILIES:
        raise TraceError(f"expected a family of {', '.join(FAMILIES)}, got {family!r}")
    if requests < 1 or block_tokens < 2 or not 0 < load < math.inf:
        raise TraceError(
            f"expected a request, 2 tokens per block and a finite load, got {requests}, {block_tokens}, {load}"
        )
    world = _World(random.Random(seed))  # noqa: S311 - traffic to measure with
    return islice(_traffic(FAMILIES[family], world, load, block_tokens), requests)


def _traffic(family: Traffic, world: _World, load: float, block_tokens: int) -> Iterator[TraceRequest]:
    """Requests without end: works begin as Poisson processes, and go on until they are over."""
    sources = [make(world) for make, _ in family.sources]
    rates = [load * rate for _, rate in family.sources]
    active = [world.dice.expovariate(rate) for rate in rates]
    begins = [(family.arrival(which, seconds), which) for which, seconds in enumerate(active)]
    heapq.heapify(begins)
    agenda: list[tuple[float, int, Work, list[int]]] = []
    order = count()
    while True:
        while not agenda or begins[0][0] <= agenda[0][0]:
            now, which = begins[0]
            active[which] += world.dice.expovariate(rates[which])
            heapq.heapreplace(begins, (family.arrival(which, active[which]), which))
            _note(agenda, now, sources[which].work(), order)
        now, _, work, path = heapq.heappop(agenda)
        yield TraceRequest(
            timestamp_ms=round(1000 * now),
            input_length=len(path) * block_tokens + world.dice.randrange(1, block_tokens),
            output_length=max(1, round(world.about(block_tokens / 2))),
            hash_ids=(*path, *world.fresh(1)),
        )
        _note(agenda, now, work, order)


def _note(agenda: list[tuple[float, int, Work, list[int]]], now: float, work: Work, order: Iterator[int]) -> None:
    """Put the next prompt of `work` on the agenda, if it has one."""
    prompt = next(work, None)
    if prompt is not None:
        wait, path = prompt
        heapq.heappush(agenda, (now + wait, next(order), work, path))
