"""Synthetic traffic with the reuse of real traffic, for tests and `eviction.py`.

`synthesize` generates traces of several families of traffic (`FAMILIES`), each a mixture of sources. A source begins
sessions as a Poisson process; a session is a generator of prompts and the waits before them. Lengths, waits and numbers
of turns have long tails (log-normal, geometric), and popularity follows Zipf's law. Blocks are numbered in the order of
creation. The same arguments give the same requests in every process, from one seeded generator. The patterns follow
publications on such services; the parameters are not fitted to any data.
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
from longshore.trace import TRACE_BLOCK_TOKENS, TraceRequest

Work = Generator[tuple[float, list[int]], None, None]
"""The prompts of one session: seconds to wait before each, and its complete blocks."""


@dataclass(slots=True)
class _World:
    """What all sources share: the random generator, and the counter of blocks."""

    dice: random.Random
    numbers: Iterator[int] = field(default_factory=count)

    def fresh(self, blocks: float) -> list[int]:
        """New blocks, at least one."""
        return [next(self.numbers) for _ in range(max(1, round(blocks)))]

    def about(self, median: float, spread: float = 0.8) -> float:
        """A log-normal number; `spread` is the standard deviation of its logarithm."""
        return median * math.exp(self.dice.gauss(0.0, spread))

    def turns(self, mean: float) -> int:
        """A geometric number of turns, at least one."""
        return 1 + int(math.log(1.0 - self.dice.random()) / math.log(1.0 - 1.0 / mean)) if mean > 1 else 1

    def rank(self, ranks: int) -> int:
        """A rank from Zipf's distribution; 0 is the most popular."""
        return int(ranks ** self.dice.random()) - 1


class _Source(ABC):
    """Begins sessions of one kind."""

    def __init__(self, world: _World) -> None:
        self.world = world

    @abstractmethod
    def work(self) -> Work: ...


class _Chats(_Source):
    """Conversations: a few system prompts, turns minutes apart, some prompts repeated unchanged."""

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
    """Agents: sessions of quick steps after long instructions, which do not return."""

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
    """Questions on documents of different popularity, which are replaced over time."""

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


class _OneOffs(_Source):
    """Prompts without reuse, except for a common first block."""

    def __init__(self, world: _World) -> None:
        super().__init__(world)
        self._system = world.fresh(1)

    def work(self) -> Work:
        yield 0.0, [*self._system, *self.world.fresh(self.world.about(16.0, 1.0))]


class _Scans(_Source):
    """A batch job that repeats the same texts in the same order."""

    def __init__(self, world: _World, *, texts: int = 300) -> None:
        super().__init__(world)
        self._texts = [world.fresh(world.about(12.0)) for _ in range(texts)]
        self._next = 0

    def work(self) -> Work:
        text = self._texts[self._next]
        self._next = (self._next + 1) % len(self._texts)
        yield 0.0, text


class _Bursts(_Source):
    """One prompt repeated many times within seconds, and never again."""

    def work(self) -> Work:
        world = self.world
        path = world.fresh(world.about(16.0))
        for turn in range(world.turns(8.0)):
            yield world.about(3.0) if turn else 0.0, path


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sources and their sessions per second; with a `period`, the sources are active in turn for that many seconds."""

    sources: tuple[tuple[Callable[[_World], _Source], float], ...]
    period: float = 0.0

    def arrival(self, which: int, active: float) -> float:
        """The time at which source `which` has been active for `active` seconds."""
        if not self.period:
            return active
        turns, rest = divmod(active, self.period)
        return (turns * len(self.sources) + which) * self.period + rest


FAMILIES = {
    "chats": Traffic(((_Chats, 1.0), (_OneOffs, 0.2))),
    "slow chats": Traffic(((lambda world: _Chats(world, think=400.0, turns=6.0, opening=2.0), 0.6), (_OneOffs, 0.6))),
    "agents": Traffic(((_Agents, 0.5), (_OneOffs, 1.0))),
    "documents": Traffic(((_Documents, 2.0), (_OneOffs, 0.5))),
    "scans": Traffic(((_Scans, 1.5), (_Chats, 0.5))),
    "bursts": Traffic(((_Bursts, 0.3), (_Chats, 0.4), (_OneOffs, 0.5))),
    "drift": Traffic(((_Chats, 1.0), (_Documents, 2.0), (_Agents, 0.4), (_Scans, 3.0)), period=400.0),
    "mixed": Traffic(
        ((_Chats, 0.4), (_Agents, 0.1), (_Documents, 0.7), (_OneOffs, 0.5), (_Scans, 0.4), (_Bursts, 0.05)),
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
        load: Factor of the rate at which sessions begin.
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
    """An endless stream of requests, in order of arrival."""
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
            _schedule(agenda, now, sources[which].work(), order)
        now, _, work, path = heapq.heappop(agenda)
        yield TraceRequest(
            timestamp_ms=round(1000 * now),
            input_length=len(path) * block_tokens + world.dice.randrange(1, block_tokens),
            output_length=max(1, round(world.about(block_tokens / 2))),
            hash_ids=(*path, *world.fresh(1)),
        )
        _schedule(agenda, now, work, order)


def _schedule(agenda: list[tuple[float, int, Work, list[int]]], now: float, work: Work, order: Iterator[int]) -> None:
    """Schedule the next prompt of `work`, if it has one."""
    prompt = next(work, None)
    if prompt is not None:
        wait, path = prompt
        heapq.heappush(agenda, (now + wait, next(order), work, path))
