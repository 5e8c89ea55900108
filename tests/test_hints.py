"""What requests say of their own blocks."""

from __future__ import annotations

from typing import Any

import pytest

from longshore.cache import Retention, ReuseHint
from longshore.errors import HintError
from longshore.hints import RequestHints


def test_hints_that_say_nothing_store_and_load_everything() -> None:
    assert RequestHints.parse({}) == RequestHints()
    assert (RequestHints().store, RequestHints().load, RequestHints().chunks(16)) == (
        True,
        ("host", "file", "remote"),
        (),
    )


def test_token_ranges_become_chunks_that_have_one_of_their_tokens() -> None:
    said = {"retention": [{"start": 17, "end": 64, "priority": 90, "seconds": 60}, {"start": 100, "priority": 1}]}
    hints = RequestHints.parse(said)
    assert hints.chunks(16) == (Retention(1, 4, 90, 60), Retention(6, None, 1))
    assert hints.chunks(16, first=3) == (Retention(0, 1, 90, 60), Retention(3, None, 1))
    assert hints.chunks(16, first=9) == (Retention(0, None, 1),)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"stor": False}, "stor: Extra inputs are not permitted, got 'False'"),
        ({"store": "no"}, "store: Input should be a valid boolean, got 'no'"),
        ({"load": ["disk"]}, "load.0: Input should be 'host', 'file' or 'remote', got 'disk'"),
        ({"load": ["file"]}, "load must name host if it names file: its blocks are loaded through host memory"),
        ({"load": ["remote"]}, "load must name host if it names remote: its blocks are loaded through host memory"),
        ({"retention": [{"priority": 101}]}, "retention.0.priority: Input should be less than or equal to 100"),
        ({"retention": [{"start": 5, "end": 5}]}, "expected start before end, got 5 and 5"),
        ({"retention": [{"seconds": float("inf")}]}, "retention.0.seconds: Input should be a finite number"),
        ({"retention": {"priority": 90}}, "retention"),
        ("store", "expected an object"),
        ([], "expected an object, got '[]'"),
        ({"retention": [{}] * 65}, "retention: Tuple should have at most 64 items"),
        (7, "expected an object"),
    ],
)
def test_hints_that_cannot_be_read_name_field_and_value(said: Any, problem: str) -> None:
    with pytest.raises(HintError, match=r"^request hints: ") as raised:
        RequestHints.parse(said)
    assert problem in str(raised.value)


def test_hints_nested_too_deep_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    for said in ("[" * 100_000, '{"class":' * 100_000, deep, {"more": deep}, {"retention": deep}):
        with pytest.raises(HintError, match=r"^request hints: "):
            RequestHints.parse(said)  # type: ignore[arg-type]


def test_known_return_is_told_with_the_first_lookup() -> None:
    assert RequestHints.parse({}).reuse_hint is None
    assert RequestHints.parse({"ends": True}).reuse_hint == ReuseHint(ends=True)
    assert RequestHints.parse({"returns_in": 0, "class": "chat"}).reuse_hint == ReuseHint(seconds=0, of="chat")
    assert RequestHints(kind="batch").reuse_hint == ReuseHint(of="batch")


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"ends": True, "returns_in": 3.0}, "expected ends or returns_in, got both"),
        ({"returns_in": -1}, "returns_in: Input should be greater than or equal to 0"),
        ({"returns_in": float("nan")}, "returns_in: Input should be"),
        ({"class": 7}, "class: Input should be a valid string"),
        ({"class": "x" * 65}, "class: String should have at most 64"),
    ],
)
def test_hints_of_a_return_that_cannot_be_are_refused(said: Any, problem: str) -> None:
    with pytest.raises(HintError, match=r"^request hints: ") as raised:
        RequestHints.parse(said)
    assert problem in str(raised.value)
