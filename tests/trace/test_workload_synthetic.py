"""Made-up traffic: the same each time, prefixes that make sense, and each family what it says it is."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise

import pytest

from longshore.errors import TraceError
from longshore.trace import TraceRequest, parse_mooncake
from traffic import FAMILIES, synthesize

REQUESTS = 800


def made(family: str, requests: int = REQUESTS, **options: float) -> list[TraceRequest]:
    return list(synthesize(family, requests=requests, **options))  # type: ignore[arg-type]


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_equal_arguments_give_equal_requests_and_traces_are_prefixes(family: str) -> None:
    assert made(family, 300) == made(family)[:300]
    assert len(made(family)) == REQUESTS
    assert made(family, seed=1) != made(family)


def test_a_block_always_follows_the_same_prefix(family: str) -> None:
    before: dict[int, tuple[int, int]] = {}
    for request in made(family):
        for place in enumerate(pairwise((-1, *request.hash_ids))):
            depth, (parent, block) = place
            assert before.setdefault(block, (depth, parent)) == (depth, parent)


def test_requests_are_in_order_and_end_with_own_partial_block(family: str) -> None:
    trace = made(family, block_tokens=64)
    assert all(a.timestamp_ms <= b.timestamp_ms for a, b in pairwise(trace))
    assert all(0 < request.input_length - 64 * (len(request.hash_ids) - 1) < 64 for request in trace)
    last = Counter(request.hash_ids[-1] for request in trace)
    assert set(last.values()) == {1}
    assert not any(block in last for request in trace for block in request.hash_ids[:-1])


def test_they_can_be_written_and_read_as_a_recorded_trace(family: str) -> None:
    trace = made(family)
    lines = [
        json.dumps(
            {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
            }
        ).encode()
        for request in trace
    ]
    assert list(parse_mooncake(lines)) == trace


def reuse(trace: list[TraceRequest]) -> float:
    """The share of blocks that an endless cache would hit."""
    blocks = [block for request in trace for block in request.hash_ids]
    return 1 - len(set(blocks)) / len(blocks)


def test_families_differ_in_what_comes_back() -> None:
    shares = {name: reuse(made(name, 3000)) for name in ("slow chats", "chats", "agents")}
    assert shares["slow chats"] < shares["chats"] < shares["agents"]


def test_more_load_brings_more_works_in_between() -> None:
    light, heavy = (made("chats", 2000, load=load) for load in (1.0, 4.0))
    assert heavy[-1].timestamp_ms < light[-1].timestamp_ms / 2
    assert reuse(heavy) < reuse(light)


def test_scan_repeats_its_texts_in_one_order() -> None:
    beginnings = [request.hash_ids[0] for request in made("scans", 3000)]
    often = Counter(beginnings)
    one_round = list(dict.fromkeys(text for text in beginnings if 2 < often[text] < 50))
    scanned = [text for text in beginnings if text in set(one_round)]
    assert len(one_round) > 100
    assert scanned == [one_round[i % len(one_round)] for i in range(len(scanned))]


def test_while_one_source_is_active_the_others_begin_nothing() -> None:
    drift = FAMILIES["drift"]
    period, sources = drift.period, len(drift.sources)
    for which in range(sources):
        assert drift.arrival(which, 1.0) == which * period + 1.0
        assert drift.arrival(which, period + 1.0) == (sources + which) * period + 1.0


@pytest.mark.parametrize(
    "wrong",
    [{"family": "cats"}, {"requests": 0}, {"block_tokens": 1}, {"load": 0.0}, {"load": float("inf")}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_impossible_argument_is_refused_at_once(wrong: dict[str, object]) -> None:
    arguments: dict[str, object] = {"family": "chats", "requests": 1, **wrong}
    with pytest.raises(TraceError, match="expected"):
        synthesize(arguments.pop("family"), **arguments)  # type: ignore[arg-type]
