"""Workloads: prompts for a model from any trace.

    trace     hash ids   |  17   |  23   |  91   |  40 (partial)      512 tokens each
                             |       |       |       |
    workload  tokens     | run17 | run23 | run91 | run4               `block_tokens` each, the last one cut

Every id becomes the same tokens wherever it appears, so prompts share prefixes exactly as in the trace. Lengths shrink
by `block_tokens` / 512. The tokens are derived from the id alone:

    digest[c]  = BLAKE2b(id, c as two little-endian uint64; person "longshore.tokens")     64 bytes: 8 words
    token[i]   = FIRST_TOKEN + word[i] mod (vocab_size - FIRST_TOKEN)                      words little-endian

Equal ids give equal tokens in every process, on every platform, with every version of every library; a longer run
begins with the shorter one. Golden vectors in the tests fix this format.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from longshore.errors import ConfigError, TraceError
from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import TRACE_BLOCK_TOKENS

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
        both = zip(min(paths), max(paths), strict=False)  # what these two share, all share
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        nodes: dict[tuple[int, int], int] = {}  # the tree of blocks so far: an edge is an id, a node is a prefix
        requests = []
        for index, (source, prompt, path) in enumerate(zip(taken, prompts, paths, strict=True)):
            node, before = 0, len(nodes)
            for hash_id in path:
                node = nodes.setdefault((node, hash_id), len(nodes) + 1)
            reusable = min(len(path) - (len(nodes) - before), (len(prompt) - 1) // block_tokens)
            output = max(min_new_tokens, min(max_new_tokens, shaper.length(source.output_length)))
            requests.append(
                WorkloadRequest(index, prompt, output, source.hash_ids, len(path), reusable, reusable > common)
            )
        return cls(tuple(requests), block_tokens, vocab_size, len(nodes), common)

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
