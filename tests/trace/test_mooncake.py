"""The reader takes what Mooncake wrote, and says of everything else which line and why."""

import json
from pathlib import Path

import pytest

from longshore.cache import ReuseHint
from longshore.errors import LongshoreError, TraceError
from longshore.trace import TraceRequest, parse_mooncake, read_excerpt, read_mooncake, read_trace

GOOD = {"timestamp": 3, "input_length": 1025, "output_length": 9, "hash_ids": [7, 0, 2**64 - 1]}


def line(**changes: object) -> bytes:
    return json.dumps(GOOD | changes).encode() + b"\n"


def test_reads_lines_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line() + b"\n  \n" + line(timestamp=4.5, input_length=512, hash_ids=[1], kind="chat"))
    assert list(read_mooncake(path)) == [
        TraceRequest(3.0, 1025, 9, (7, 0, 2**64 - 1)),
        TraceRequest(4.5, 512, 9, (1,)),
    ]


def test_hints_of_requests_and_of_turns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    said = {"ends": True}, {"returns_in": 2.5, "class": "chat"}, {"class": "batch"}, {"ends": False}
    path.write_bytes(b"".join(line(**each) for each in said))
    expected = [ReuseHint(ends=True), ReuseHint(seconds=2.5, of="chat"), ReuseHint(of="batch"), None]
    assert [request.reuse_hint for request in read_mooncake(path)] == expected
    sessions = tmp_path / "sessions.jsonl"
    turn = {"timestamp": 1, "input_length": 512, "hashes": ["a"], "ends": True}
    sessions.write_text(json.dumps({"turns": [turn]}))
    assert [request.reuse_hint for request in read_trace(sessions)] == [ReuseHint(ends=True)]


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"ends": 1}, "ends: .*boolean"),
        ({"class": 2}, "class: .*string"),
        ({"class": None}, "class: .*string, got 'None'"),
        ({"class": "x" * 65}, "class: .*at most 64 characters"),
        ({"returns_in": -1}, "returns_in: .*greater than or equal to 0"),
        ({"returns_in": True}, "returns_in: .*number"),
        ({"returns_in": 10**400}, "returns_in: .*number"),
        ({"returns_in": 1, "ends": True}, "got both"),
    ],
)
def test_invalid_hints_in_a_trace_name_the_line(said: dict[str, object], complaint: str) -> None:
    with pytest.raises(TraceError, match=rf"line 2.*{complaint}"):
        list(parse_mooncake(iter([line(), line(**said)])))


def test_is_lazy() -> None:
    stream = parse_mooncake(iter([line(), b"no json"]))
    assert next(stream).input_length == 1025
    with pytest.raises(TraceError):
        next(stream)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (b"{", "JSON object"),
        (b"\xff\xfe", "UTF-8"),
        (b"[1, 2]", "expected a JSON object, got"),
        (b"[" * 200_000, "JSON object"),
        (line(timestamp=float("nan")), "NaN"),
        (line(timestamp=float("inf")), "Infinity"),
        (line(timestamp=-1), "'timestamp'"),
        (line(timestamp=True), "'timestamp'"),
        (line(timestamp="3"), "'timestamp'"),
        (line(timestamp=10**400), "'timestamp'"),
        (b'{"timestamp": 1e999, "input_length": 5, "output_length": 1, "hash_ids": [1]}', "'timestamp'"),
        (b'{"timestamp": ' + b"9" * 5000 + b"}", "JSON object"),
        (line(input_length=0), "'input_length' to be an integer of at least 1, got 0"),
        (line(input_length=True), "'input_length'"),
        (line(input_length=1025.0), "'input_length'"),
        (line(output_length=-1), "'output_length'"),
        (line(output_length=None), "'output_length'"),
        (line(hash_ids=7), "'hash_ids' to be a list"),
        (line(hash_ids=[7, 0, -1]), "hash id"),
        (line(hash_ids=[7, 0, 2**64]), "hash id"),
        (line(hash_ids=[7, 0, False]), "hash id"),
        (line(hash_ids=[7, 0, "1"]), "hash id"),
        (line(hash_ids=[7, 0]), "expected 3 hash ids for 1025 tokens of input in blocks of 512, got 2"),
        (line(hash_ids=[7, 0, 1, 2]), "expected 3 hash ids"),
        (line(input_length=1024), "expected 2 hash ids"),
    ],
)
def test_bad_line_is_named(bad: bytes, complaint: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(parse_mooncake([line(), b"\n", bad], source="my.jsonl"))
    assert "my.jsonl, line 3" in str(caught.value)
    assert complaint in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", list(GOOD))
def test_missing_field_is_named(name: str) -> None:
    short = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(TraceError, match=f"line 1: expected a field '{name}'"):
        list(parse_mooncake([json.dumps(short).encode()]))


def test_errors_are_ours_and_values() -> None:
    assert issubclass(TraceError, LongshoreError)
    assert issubclass(TraceError, ValueError)


def test_other_block_sizes() -> None:
    (request,) = parse_mooncake([line(input_length=33)], block_tokens=16)
    assert request.input_length == 33
    with pytest.raises(TraceError, match="block_tokens"):
        list(parse_mooncake([line()], block_tokens=0))


def test_unreadable_file_is_typed(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read trace .*absent"):
        list(read_mooncake(tmp_path / "absent"))
    with pytest.raises(TraceError, match="cannot read trace"):
        list(read_mooncake(tmp_path))


def test_excerpt_reads() -> None:
    requests = list(read_excerpt())
    assert len(requests) == 74
    stamps = [request.timestamp_ms for request in requests]
    assert stamps == sorted(stamps)
    assert {request.hash_ids[0] for request in requests} == {0}
