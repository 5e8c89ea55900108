"""Workloads: synthetic traces with the reuse of real traffic, and prompts for a model from any trace.

    trace     hash ids   |  17   |  23   |  91   |  40 (partial)      512 tokens each
                             |       |       |       |
    workload  tokens     | run17 | run23 | run91 | run4               `block_tokens` each, the last one cut

Every id becomes the same tokens wherever it appears, so prompts share prefixes exactly as in the trace. Lengths shrink
by `block_tokens` / 512. The tokens are derived from the id alone:

    digest[c]  = BLAKE2b(id, c as two little-endian uint64; person "longshore.tokens")     64 bytes: 8 words
    token[i]   = FIRST_TOKEN + word[i] mod (vocab_size - FIRST_TOKEN)                      words little-endian

Equal ids give equal tokens in every process, on every platform, with every version of every library; a longer run
begins with the shorter one. Golden vectors in the tests fix this format.

`synthesize` generates traces of several families of traffic (`FAMILIES`), each a mixture of sources. A source begins
sessions as a Poisson process; a session is a generator of prompts and the waits before them. Lengths, waits and numbers
of turns have long tails (log-normal, geometric), and popularity follows Zipf's law. Blocks are numbered in the order of
creation. The same arguments give the same requests in every process, from one seeded generator. The patterns follow
publications on such services; the parameters are not fitted to any data.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from longshore.errors import ConfigError, TraceError
from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import TRACE_BLOCK_TOKENS

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


FIRST_TOKEN = 8
"""Smaller token ids are not used: vocabularies have padding, begin, end and unknown there."""

MIN_VOCAB = 64
"""The smallest supported vocabulary."""

MIN_BLOCK_BITS = 48
"""Least information of a block in bits, so that two ids do not have the same tokens by chance."""

_WORDS = struct.Struct("<8Q")
_INPUT = struct.Struct("<QQ")


def tokens_of(hash_id: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """The first `length` tokens for `hash_id` (0 to 2**64 - 1)."""
    usable = vocab_size - FIRST_TOKEN
    words: list[int] = []
    for counter in range(-(-length // 8)):
        block = _INPUT.pack(hash_id, counter)
        words += _WORDS.unpack(hashlib.blake2b(block, person=b"longshore.tokens").digest())
    return tuple(FIRST_TOKEN + word % usable for word in words[:length])


def check_alphabet(vocab_size: int, block_tokens: int) -> None:
    """Raise `ConfigError` for a vocabulary or a block too small to distinguish ids."""
    if vocab_size < MIN_VOCAB:
        raise ConfigError(f"vocab_size: expected at least {MIN_VOCAB}, got {vocab_size}")
    bits = block_tokens * math.log2(vocab_size - FIRST_TOKEN)
    if bits < MIN_BLOCK_BITS:
        least = math.ceil(MIN_BLOCK_BITS / math.log2(vocab_size - FIRST_TOKEN))
        raise ConfigError(
            f"block_tokens: expected at least {least} with a vocabulary of {vocab_size}, "
            f"so that every block of the trace has distinct tokens, got {block_tokens}"
        )


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One prompt, with the blocks that an unlimited cache could serve.

    Attributes:
        index: Position in the workload.
        prompt: Token ids, at least one.
        output_tokens: Number of tokens to generate.
        hash_ids: The trace's ids, one per block of the prompt.
        full_blocks: Number of complete blocks of the prompt.
        reusable_blocks: Leading full blocks seen in earlier prompts. The block that ends with the prompt never
            counts, because a prompt's last token is always computed.
        returning: Whether these are more than the prefix that all requests of the workload share.
    """

    index: int
    prompt: tuple[int, ...]
    output_tokens: int
    hash_ids: tuple[int, ...]
    full_blocks: int
    reusable_blocks: int
    returning: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts in order of arrival.

    Attributes:
        requests: At least one.
        block_tokens: Tokens per block.
        vocab_size: Upper bound (exclusive) of token ids.
        unique_blocks: Number of distinct full blocks (content and prefix): the working set.
        common_blocks: Leading full blocks that all prompts share.
    """

    requests: tuple[WorkloadRequest, ...]
    block_tokens: int
    vocab_size: int
    unique_blocks: int
    common_blocks: int

    @classmethod
    def from_trace(
        cls,
        trace: Iterable[TraceRequest],
        *,
        vocab_size: int,
        block_tokens: int = 32,
        limit: int | None = None,
        min_new_tokens: int = 1,
        max_new_tokens: int = 16,
        trace_block_tokens: int = TRACE_BLOCK_TOKENS,
    ) -> Workload:
        """Build prompts from `trace`.

        Args:
            trace: Read lazily, in order of arrival.
            vocab_size: Of the model.
            block_tokens: Tokens generated per block of the trace.
            limit: Number of requests to take; `None` for all.
            min_new_tokens: Least number of tokens to generate. Engines may store nothing of a request that ends with
                its first token; 2 avoids that.
            max_new_tokens: Largest number of tokens to generate.
            trace_block_tokens: Tokens per hash id of the trace.

        Raises:
            ConfigError: An invalid argument.
            TraceError: The trace has no requests, or a request whose ids do not cover its input.
        """
        _check(block_tokens, limit, min_new_tokens, max_new_tokens, trace_block_tokens)
        check_alphabet(vocab_size, block_tokens)
        shaper = _Shaper(vocab_size, block_tokens, trace_block_tokens)
        taken = list(islice(trace, limit))
        if not taken:
            raise TraceError("expected a trace of at least one request, got none")
        prompts = [shaper.prompt(request) for request in taken]
        paths = [request.hash_ids[: len(p) // block_tokens] for request, p in zip(taken, prompts, strict=True)]
        common = _common_prefix(paths)
        seen = _Seen()
        requests = []
        for index, (source, prompt, path) in enumerate(zip(taken, prompts, paths, strict=True)):
            reusable = min(seen.add(path), (len(prompt) - 1) // block_tokens)
            output = max(min_new_tokens, min(max_new_tokens, shaper.length(source.output_length)))
            requests.append(
                WorkloadRequest(index, prompt, output, source.hash_ids, len(path), reusable, reusable > common)
            )
        return cls(tuple(requests), block_tokens, vocab_size, seen.count, common)

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        return iter(self.requests)

    @property
    def longest_blocks(self) -> int:
        """Full blocks of the longest prompt."""
        return max(request.full_blocks for request in self.requests)

    @property
    def total_blocks(self) -> int:
        """Full blocks of all prompts, repeats included."""
        return sum(request.full_blocks for request in self.requests)


class _Shaper:
    """Scales lengths and builds prompts."""

    def __init__(self, vocab_size: int, block_tokens: int, trace_block_tokens: int) -> None:
        self._vocab_size = vocab_size
        self._block_tokens = block_tokens
        self._trace_block_tokens = trace_block_tokens
        self._runs: dict[int, tuple[int, ...]] = {}

    def length(self, trace_length: int) -> int:
        """`trace_length` scaled: whole blocks stay whole, a partial block stays partial and never empty."""
        full, rest = divmod(trace_length, self._trace_block_tokens)
        partial = max(1, rest * self._block_tokens // self._trace_block_tokens) if rest else 0
        return full * self._block_tokens + partial

    def prompt(self, request: TraceRequest) -> tuple[int, ...]:
        length = self.length(request.input_length)
        blocks = -(-length // self._block_tokens)
        if length < 1 or len(request.hash_ids) < blocks:
            raise TraceError(
                f"request at {request.timestamp_ms} ms: expected input of at least one token and {blocks} hash ids "
                f"for {request.input_length} tokens, got {len(request.hash_ids)}"
            )
        tokens = [token for hash_id in request.hash_ids[:blocks] for token in self._run(hash_id)]
        return tuple(tokens[:length])

    def _run(self, hash_id: int) -> tuple[int, ...]:
        run = self._runs.get(hash_id)
        if run is None:
            run = self._runs[hash_id] = tokens_of(hash_id, self._block_tokens, self._vocab_size)
        return run


class _Seen:
    """The tree of full blocks seen so far: an edge is an id, a node is a prefix."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], int] = {}

    @property
    def count(self) -> int:
        return len(self._nodes)

    def add(self, path: tuple[int, ...]) -> int:
        """Add `path`; returns how many of its leading blocks were known."""
        node, before = 0, len(self._nodes)
        for hash_id in path:
            node = self._nodes.setdefault((node, hash_id), len(self._nodes) + 1)
        return len(path) - (len(self._nodes) - before)


def _common_prefix(paths: list[tuple[int, ...]]) -> int:
    """Length of the prefix that all `paths` have in common."""
    low, high = min(paths), max(paths)  # the common prefix of the least and the greatest path is common to all
    for i, (a, b) in enumerate(zip(low, high, strict=False)):
        if a != b:
            return i
    return min(len(low), len(high))


def _check(block: int, limit: int | None, least: int, most: int, trace_block: int) -> None:
    """Raise `ConfigError` for invalid arguments."""
    if block < 2:
        raise ConfigError(f"block_tokens: expected at least 2, so that a block can be partial, got {block}")
    if trace_block < 1:
        raise ConfigError(f"trace_block_tokens: expected at least 1, got {trace_block}")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit: expected at least 1 request, or None for all, got {limit}")
    if not 1 <= least <= most:
        raise ConfigError(f"min_new_tokens, max_new_tokens: expected 1 <= min <= max, got {least} and {most}")
