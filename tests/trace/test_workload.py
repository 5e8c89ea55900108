"""Prompts share prefixes exactly where the trace did, and the counts say what a perfect cache could serve."""

import itertools
import statistics
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.errors import ConfigError, TraceError
from longshore.trace import TraceRequest, Workload, read_excerpt, tokens_of

VOCAB = 1024


def request(input_length: int, *ids: int, output: int = 100) -> TraceRequest:
    return TraceRequest(0.0, input_length, output, ids)


def build(*requests: TraceRequest, block_tokens: int = 32, **options: int) -> Workload:
    return Workload.from_trace(requests, vocab_size=VOCAB, block_tokens=block_tokens, **options)


def test_prompt_is_its_ids_runs_the_last_cut() -> None:
    (only,) = build(request(512 + 256, 5, 9))
    assert only.prompt == tokens_of(5, 32, VOCAB) + tokens_of(9, 16, VOCAB)
    assert (only.index, only.hash_ids, only.full_blocks) == (0, (5, 9), 1)


@pytest.mark.parametrize(
    ("input_length", "blocks", "expected"),
    [
        (1, 1, 1),
        (15, 1, 1),  # scales to less than a token, and is one
        (16, 1, 1),
        (32, 1, 2),
        (511, 1, 31),  # partial stays partial
        (512, 1, 32),  # whole stays whole
        (513, 2, 33),  # one token over the boundary stays over it
        (1024, 2, 64),
    ],
)
def test_scaled_length(input_length: int, blocks: int, expected: int) -> None:
    (only,) = build(request(input_length, *range(blocks)))
    assert len(only.prompt) == expected
    assert only.full_blocks == input_length // 512


@given(st.integers(1, 5000), st.integers(6, 1100))
def test_scaling_keeps_the_number_of_full_and_partial_blocks(input_length: int, block: int) -> None:
    ids = tuple(range(-(-input_length // 512)))
    (only,) = build(request(input_length, *ids), block_tokens=block)
    assert -(-len(only.prompt) // block) == len(ids)
    assert len(only.prompt) // block == input_length // 512


def test_block_tokens_512_is_the_trace_itself() -> None:
    (only,) = build(request(1300, 1, 2, 3), block_tokens=512)
    assert len(only.prompt) == 1300


def test_reuse_of_a_conversation() -> None:
    work = build(
        request(600, 0, 1),  # 0 whole, 1 partial
        request(1500, 0, 2, 3),  # shares 0 only
        request(2100, 0, 2, 4, 5, 6),  # shares 0 and 2: 3 was partial, and became 4
        request(2100, 0, 2, 4, 5, 6),  # the same again
    )
    assert [r.reusable_blocks for r in work] == [0, 1, 2, 4]
    assert work.common_blocks == 1
    assert [r.returning for r in work] == [False, False, True, True]
    assert (work.unique_blocks, work.longest_blocks, work.total_blocks) == (4, 4, 1 + 2 + 4 + 4)


def test_partial_block_is_not_reusable_despite_an_equal_id() -> None:
    work = build(request(512 + 100, 1, 2), request(1024 + 5, 1, 2, 3), request(1024 + 5, 1, 2, 4))
    assert [r.reusable_blocks for r in work] == [0, 1, 2]


def test_the_block_that_ends_the_prompt_is_computed() -> None:
    work = build(request(1024, 1, 2), request(1024, 1, 2), request(1025, 1, 2, 3))
    assert [r.reusable_blocks for r in work] == [0, 1, 2]


def test_an_id_after_another_prefix_is_another_block() -> None:
    work = build(request(1100, 1, 2, 9), request(1100, 3, 2, 9))
    assert work.unique_blocks == 4
    assert [r.reusable_blocks for r in work] == [0, 0]


def test_repeated_ids_inside_a_prompt_are_different_blocks() -> None:
    work = build(request(1100, 1, 1, 1), request(1700, 1, 1, 1, 1))
    assert work.unique_blocks == 3
    assert [r.reusable_blocks for r in work] == [0, 2]


paths = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=8)


@given(paths, st.data())
def test_reuse_agrees_with_the_tokens_themselves(ids: list[list[int]], data: st.DataObject) -> None:
    """The oracle knows no ids: it compares tokens."""
    lengths = [data.draw(st.integers((len(p) - 1) * 512 + 1, len(p) * 512)) for p in ids]
    work = build(*(request(n, *p) for n, p in zip(lengths, ids, strict=True)), block_tokens=8)
    seen: set[tuple[int, ...]] = set()
    for r in work:
        prefixes = [r.prompt[:end] for end in range(8, len(r.prompt) + 1, 8)]
        usable = [p for p in prefixes if len(p) < len(r.prompt)]
        assert r.reusable_blocks == sum(1 for _ in itertools.takewhile(seen.__contains__, usable))
        seen.update(prefixes)
    assert work.unique_blocks == len(seen)
    shared = sum(
        all(r.prompt[:end] == work.requests[0].prompt[:end] and len(r.prompt) >= end for r in work)
        for end in range(8, len(work.requests[0].prompt) + 1, 8)
    )
    assert work.common_blocks == shared
    assert [r.returning for r in work] == [r.reusable_blocks > shared for r in work]


def test_outputs_are_scaled_and_bounded() -> None:
    trace = [request(100, 1, output=n) for n in (0, 1, 100, 320, 2000)]
    assert [r.output_tokens for r in build(*trace, max_new_tokens=16)] == [1, 1, 6, 16, 16]
    assert [r.output_tokens for r in build(*trace, min_new_tokens=2, max_new_tokens=5)] == [2, 2, 5, 5, 5]


def test_limit_reads_no_further() -> None:
    def endless() -> Iterator[TraceRequest]:
        yield request(10, 1)
        yield request(10, 2)
        raise RuntimeError("read too far")

    assert len(Workload.from_trace(endless(), vocab_size=VOCAB, limit=2)) == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"block_tokens": 1}, "block_tokens"),
        ({"block_tokens": 4}, "block_tokens: expected at least 5"),
        ({"vocab_size": 16}, "vocab_size"),
        ({"limit": 0}, "limit"),
        ({"min_new_tokens": 0}, "min_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "max_new_tokens"),
        ({"trace_block_tokens": 0}, "trace_block_tokens"),
    ],
)
def test_impossible_arguments_are_named(options: dict[str, int], complaint: str) -> None:
    arguments = {"vocab_size": VOCAB} | options
    with pytest.raises(ConfigError, match=complaint):
        Workload.from_trace([request(10, 1)], **arguments)


def test_impossible_traces_are_refused() -> None:
    with pytest.raises(TraceError, match="at least one request"):
        build()
    with pytest.raises(TraceError, match="2 hash ids"):
        build(request(600, 1))
    with pytest.raises(TraceError):
        build(request(0))


def lost_by_lru(work: Workload, capacity: int) -> float:
    """Share of reusable blocks gone from an LRU of `capacity` blocks, each request's blocks used tail first."""
    resident: dict[tuple[int, ...], None] = {}
    hits = reusable = 0
    for r in work:
        blocks = [r.prompt[: (i + 1) * work.block_tokens] for i in range(r.full_blocks)]
        leading = list(itertools.takewhile(resident.__contains__, blocks[: r.reusable_blocks]))
        hits += max(0, len(leading) - work.common_blocks)
        reusable += max(0, r.reusable_blocks - work.common_blocks)
        for block in reversed(blocks):
            resident.pop(block, None)
            resident[block] = None
            if len(resident) > capacity:
                del resident[next(iter(resident))]
    return 1 - hits / reusable


def test_the_excerpt_is_worth_demonstrating() -> None:
    work = Workload.from_trace(read_excerpt(), vocab_size=VOCAB, block_tokens=8)
    returning = [r for r in work if r.returning]
    assert 64 <= len(work) <= 80
    assert 600 <= work.total_blocks <= 1100
    assert work.common_blocks == 1
    assert work.longest_blocks <= 0.14 * work.unique_blocks
    assert len(returning) >= 0.6 * len(work)
    assert statistics.median(r.reusable_blocks * 8 / len(r.prompt) for r in returning) >= 0.7
    assert lost_by_lru(work, work.unique_blocks // 4) > 0.6
    assert 1 / 3 < lost_by_lru(work, work.unique_blocks // 2) < 0.7
    assert lost_by_lru(work, work.unique_blocks) == 0
