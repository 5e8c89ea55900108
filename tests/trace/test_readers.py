"""Readers: each form into the same requests, and a word on every line that is no good."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from event_file import write_events
from longshore.boundary import HOST
from longshore.cache import CacheSettings, GroupKeys, TieredCache, TierSpec
from longshore.errors import LongshoreError, TraceError
from longshore.keys import Scope, chain
from longshore.trace import parsing
from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import Form, form_of, read_trace

TURN = {"timestamp": 10, "input_length": 40, "output_length": 3, "hashes": ["a", "b", "c"]}
MOONCAKE = {"timestamp": 1, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]}


def put(path: Path, *lines: object) -> Path:
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines))
    return path


def ids(path: Path, **options: object) -> list[tuple[int, ...]]:
    return [request.hash_ids for request in read_trace(path, block_tokens=16, **options)]  # type: ignore[arg-type]


def test_sessions_share_prefixes_and_come_by_time(tmp_path: Path) -> None:
    later = {**TURN, "timestamp": 30, "input_length": 50, "hashes": ["a", "b", "x", "c"]}
    other = {**TURN, "timestamp": 20, "hashes": ["z", "b", "c"]}
    path = put(tmp_path / "t.jsonl", {"turns": [TURN, later]}, {"turns": [other], "block_size": 20})
    with pytest.raises(TraceError, match=r"line 2, turn 1: expected 2 hash ids for 40 tokens .* of 20, got 3"):
        list(read_trace(path, block_tokens=16))
    path = put(tmp_path / "t.jsonl", {"turns": [TURN, later]}, {"turns": [other]})
    first, second, third = read_trace(path, block_tokens=16)
    assert [each.timestamp_ms for each in (first, second, third)] == [10, 20, 30]
    assert first.hash_ids[:2] == third.hash_ids[:2]
    assert first.hash_ids[2] != third.hash_ids[3]  # the same hash after another prefix
    assert not set(first.hash_ids) & set(second.hash_ids)
    assert (third.input_length, third.output_length) == (50, 3)


def test_sessions_are_merged_by_time_not_file_order(tmp_path: Path) -> None:
    dice = random.Random(4)
    times = [sorted(dice.randrange(1000) for _ in range(dice.randint(1, 6))) for _ in range(40)]
    sessions = [
        {
            "turns": [
                {**TURN, "timestamp": at, "hashes": [f"{name}a", "b", "c"]} for at in dice.sample(turns, len(turns))
            ]
        }
        for name, turns in enumerate(times)
    ]
    path = put(tmp_path / "t.jsonl", *sessions, b"", {"turns": []})
    found = list(read_trace(path, block_tokens=16))
    assert [each.timestamp_ms for each in found] == sorted(at for turns in times for at in turns)
    assert len({each.hash_ids for each in found}) == 40


def test_sessions_that_are_over_take_no_memory(tmp_path: Path) -> None:
    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for i in range(count):
                turns = [{**TURN, "timestamp": 10 * i + j, "hashes": [f"{i}", "b", "c"]} for j in range(4)]
                file.write(json.dumps({"turns": turns}) + "\n")
        tracemalloc.start()
        assert sum(1 for _ in read_trace(path, Form.SESSIONS, block_tokens=16)) == 4 * count
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(50)
    assert peak(1000) - peak(100) < 900 * 80  # where each begins, and when; not the four turns of each


def test_lengths_have_no_reuse_and_say_so(tmp_path: Path) -> None:
    path = put(
        tmp_path / "azure.csv",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r",
        b"2023-11-16 18:15:46.6805900,374,44\r",
        b'"2023-11-16 18:15:47.6805900",16,1\r',
    )
    assert not form_of(path).shows_reuse
    assert list(read_trace(path, block_tokens=256)) == [
        TraceRequest(0.0, 374, 44, (0, 1)),
        TraceRequest(pytest.approx(1000.0), 16, 1, (2,)),
    ]
    plain = put(tmp_path / "plain.txt", b"timestamp, input_length, output_length", b"5.5,1,0", b"6,512,2")
    assert [each.timestamp_ms for each in read_trace(plain)] == [0.0, 500.0]


def test_the_event_log_gives_the_requests_that_were_made(tmp_path: Path) -> None:
    cache = TieredCache([TierSpec(HOST, 8, 64)], CacheSettings(events=100))
    keys = chain(Scope(model="m", weights="w", dtype="d", layout="l", block_size=4).digest, list(range(12)), 4)
    cache.lookup({0: GroupKeys(keys[:2])}, 5.0, request="one")
    cache.lookup({0: GroupKeys(keys)}, 5.25, request="two")
    write_events(tmp_path / "events.jsonl", cache.events())
    first, second = read_trace(tmp_path / "events.jsonl", block_tokens=4)
    assert (first.timestamp_ms, second.timestamp_ms) == (0.0, 250.0)
    assert first.hash_ids == second.hash_ids[:2]
    assert (second.input_length, len(second.hash_ids)) == (12, 3)


def test_prompts_are_hashed_by_our_keys(tmp_path: Path) -> None:
    path = put(
        tmp_path / "prompts.jsonl",
        {"tokens": list(range(40)), "timestamp": 7, "output_length": 2},
        {"tokens": [*range(32), 99]},
        {"prompt": "a" * 64 + "b"},
        {"prompt": "a" * 64 + "c"},
    )
    first, second, third, fourth = read_trace(path, block_tokens=16)
    assert (first.timestamp_ms, first.input_length, first.output_length, len(first.hash_ids)) == (7.0, 40, 2, 3)
    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert first.hash_ids[2] != second.hash_ids[2]
    assert (third.input_length, third.hash_ids[0]) == (17, fourth.hash_ids[0])
    assert third.hash_ids[1] != fourth.hash_ids[1]
    assert [each.timestamp_ms for each in (first, second, third)] == [7.0, 1007.0, 2007.0]
    assert [each.assumed_time for each in (first, second, third)] == [False, True, True]


HOSTILE: list[tuple[Form, object, str]] = [
    (Form.MOONCAKE, b"{", "JSON object"),
    (Form.MOONCAKE, {**MOONCAKE, "hash_ids": [1]}, "expected 3 hash ids"),
    (Form.SESSIONS, b"\xff\xfe", "UTF-8"),
    (Form.SESSIONS, {"turns": 3}, "'turns' to be a list"),
    (Form.SESSIONS, {"turns": [7]}, "turn 1: expected a JSON object"),
    (Form.SESSIONS, {"turns": [{**TURN, "hashes": ["a", "b", ""]}]}, "every hash to be text or an integer"),
    (Form.SESSIONS, {"turns": [{**TURN, "hashes": ["a", "b", None]}]}, "every hash to be text or an integer"),
    (Form.SESSIONS, {"turns": [{**TURN, "hashes": ["a", "b", True]}]}, "every hash to be text or an integer"),
    (Form.SESSIONS, {"turns": [TURN], "block_size": 0}, "'block_size'"),
    (Form.SESSIONS, b"[" * 100_000, "JSON object"),
    (Form.LENGTHS, b"1,2", "expected 3 cells, got 2"),
    (Form.LENGTHS, b"1,-2,3", "at least 1, got '-2'"),
    (Form.LENGTHS, b"1,0,3", "at least 1, got '0'"),
    (Form.LENGTHS, b"1," + b"9" * 5000 + b",3", "a number of tokens"),
    (Form.LENGTHS, b"1,999999999999999,3", "at most 4194304 blocks of 16 tokens, got 999999999999999 tokens"),
    (Form.LENGTHS, b"nan,2,3", "seconds or a date, got 'nan'"),
    (Form.LENGTHS, b"yesterday,2,3", "seconds or a date"),
    (Form.LENGTHS, b'"1,2,3', "line of CSV"),
    (Form.LENGTHS, b"\xff,2,3", "UTF-8"),
    (Form.LENGTHS, "1,²,3".encode(), "a number of tokens"),
    (Form.EVENTS, {"kind": "party"}, "expected an event"),
    (Form.EVENTS, {"kind": "request", "keys": ["zz"]}, "expected an event"),
    (Form.EVENTS, {"kind": "request", "keys": ["00"], "at": "noon"}, "'at' to be seconds"),
    (Form.EVENTS, {"keys": ["00"]}, "expected a field|expected an event"),
    (Form.PROMPTS, {"prompt": ""}, "at least one token"),
    (Form.PROMPTS, {"prompt": 7}, "'prompt' to be text"),
    (Form.PROMPTS, {"tokens": [1, 2**32]}, "every token to be an integer"),
    (Form.PROMPTS, {"tokens": [1.5]}, "every token to be an integer"),
    (Form.PROMPTS, {"text": "no"}, "expected a field 'prompt'"),
    (Form.PROMPTS, {"prompt": "a", "timestamp": -1}, "'timestamp'"),
]
GOOD: dict[Form, tuple[object, ...]] = {
    Form.MOONCAKE: (MOONCAKE,),
    Form.SESSIONS: ({"turns": [TURN]},),
    Form.LENGTHS: (b"timestamp,input_length,output_length", b"1,2,3"),
    Form.EVENTS: ({"kind": "request", "keys": ["00" * 32]},),
    Form.PROMPTS: ({"prompt": "a"},),
}


@pytest.mark.parametrize(("form", "bad", "complaint"), HOSTILE)
def test_a_bad_line_is_named_and_refused_or_skipped(tmp_path: Path, form: Form, bad: object, complaint: str) -> None:
    good = GOOD[form]
    path = put(tmp_path / "trace", *good, b"", bad, good[-1])
    number = len(good) + 2
    with pytest.raises(TraceError, match=f"line {number}.*(?:{complaint})"):
        list(read_trace(path, form, block_tokens=16))
    skipped: list[TraceError] = []
    found = list(read_trace(path, form, block_tokens=16, skip=skipped.append))
    assert len(found) == 2
    assert [f"line {number}" in str(error) for error in skipped] == [True]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "MAX_LINE", 200)
    path = put(tmp_path / "t.jsonl", MOONCAKE, b"x" * 1000, MOONCAKE)
    skipped: list[TraceError] = []
    assert len(list(read_trace(path, block_tokens=16, skip=skipped.append))) == 2
    assert ["line 2: expected a line of less than 200 bytes" in str(error) for error in skipped] == [True]


@pytest.mark.parametrize("form", list(Form))
def test_a_byte_order_mark_changes_nothing(tmp_path: Path, form: Form) -> None:
    plain = put(tmp_path / "plain", *GOOD[form])
    marked = tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes())
    assert form_of(marked) is form
    assert list(read_trace(marked, block_tokens=16)) == list(read_trace(plain, block_tokens=16))


@pytest.mark.parametrize("form", list(Form))
def test_the_form_is_found_by_the_first_line(tmp_path: Path, form: Form) -> None:
    path = put(tmp_path / "trace", b"", *GOOD[form])
    assert form_of(path) is form
    assert list(read_trace(path, block_tokens=16)) == list(read_trace(path, form, block_tokens=16))
    assert form.shows_reuse is (form is not Form.LENGTHS)


@pytest.mark.parametrize(
    "open_it",
    [
        lambda path: form_of(path / "absent"),
        lambda path: list(read_trace(path / "absent", Form.PROMPTS)),
        lambda path: list(read_trace(path)),
        lambda path: form_of(put(path / "empty")),
        lambda path: form_of(put(path / "odd", {"what": 1})),
        lambda path: form_of(put(path / "odd", b"\x00\x01")),
        lambda path: read_trace(path, Form.PROMPTS, block_tokens=0),
    ],
)
def test_what_is_no_trace_is_said_to_be_none(tmp_path: Path, open_it: Callable[[Path], object]) -> None:
    with pytest.raises(LongshoreError):
        open_it(tmp_path)


def test_traces_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    path = put(tmp_path / "t", MOONCAKE, b"no json")
    stream = read_trace(path, block_tokens=16)
    assert next(stream).input_length == 40
    with pytest.raises(TraceError, match="line 2"):
        next(stream)
