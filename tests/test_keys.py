"""Keys are a persistent format: what they are today they must be in every process, on every machine, for ever."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longshore.errors import TokenError
from longshore.keys import KeyChain, MediaItem, Scope, chain, items_in, pack

ROOT = bytes(32)
SCOPE = Scope(model="m", weights="w", dtype="torch.bfloat16", layout="l", block_size=4)

# Computed with nothing but hashlib and struct, so that no line of ours is asked what it should say:
#   hashlib.sha256(bytes(32) + struct.pack("<2I", 1, 2)).hexdigest()
#   hashlib.sha256(bytes.fromhex("e7ca17d6...") + struct.pack("<2I", 3, 4)).hexdigest()
GOLDEN_CHAIN = (
    "e7ca17d6581d126af7e0c8574cdd8987ed93319969b54a5e2a272d585a38f3ea",
    "a9edfe541f21e65d5b60b9415fa27b3f4f5719355cfb89fe6027548c9d21d5dd",
)
#   hashlib.sha256(b'longshore scope 1\0{"attention":"","block_size":4,"blocks_per_chunk":1,"dtype":"torch.bfloat16",'
#     b'"group":"","hash_algorithm":"sha256-le32","layout":"l","lora":"","model":"m","ranks":1,"salt":"",'
#     b'"weights":"w"}').hexdigest()
GOLDEN_ROOT = "998982484c300b2704c868a37b628a16c607a94c224169b1e394130c48f01183"
#   hashlib.sha256(bytes.fromhex("99898248...") + struct.pack("<4I", 0, 1, 2, 3)).hexdigest()
#   hashlib.sha256(bytes.fromhex("01d21be6...") + struct.pack("<4I", 4, 5, 6, 7)).hexdigest()
GOLDEN_SCOPED = (
    "01d21be668315350219613b465f75cd00c0e656ad4b7d13d16261f1b427f3004",
    "7766f58c699d8c77bc488178dd22b0374c3d1eaba1e0130a89e15cc1a8ab07c4",
)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def hexes(keys: list[bytes]) -> tuple[str, ...]:
    return tuple(key.hex() for key in keys)


def test_golden_chain() -> None:
    assert hexes(chain(ROOT, [1, 2, 3, 4], 2)) == GOLDEN_CHAIN


def test_golden_scope() -> None:
    assert SCOPE.digest.hex() == GOLDEN_ROOT


def test_golden_chain_in_a_scope_omits_partial_chunks() -> None:
    assert hexes(chain(SCOPE.digest, range(10), 4)) == GOLDEN_SCOPED


def test_the_chain_is_plain_sha256() -> None:
    first = hashlib.sha256(ROOT + b"\x01\0\0\0\x02\0\0\0").digest()
    second = hashlib.sha256(first + b"\xff\xff\xff\xff\0\0\0\x80").digest()
    assert chain(ROOT, [1, 2, 2**32 - 1, 2**31], 2) == [first, second]


@pytest.mark.parametrize("hash_seed", ["0", "7"])
def test_trap_32_keys_are_the_same_in_another_process(hash_seed: str) -> None:
    script = (
        "from longshore.keys import Scope, chain\n"
        "scope = Scope(model='m', weights='w', dtype='torch.bfloat16', layout='l', block_size=4)\n"
        "print(*(key.hex() for key in chain(scope.digest, range(10), 4)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
    )
    assert tuple(done.stdout.decode().split()) == GOLDEN_SCOPED


CHANGES: dict[str, Any] = {
    "model": "m2",
    "weights": "w2",
    "dtype": "torch.float16",
    "layout": "l2",
    "block_size": 8,
    "blocks_per_chunk": 2,
    "group": "sliding",
    "ranks": 2,
    "attention": "eager",
    "lora": "adapter",
    "salt": "tenant",
    "hash_algorithm": "other",
}


def test_trap_31_every_field_of_the_scope_changes_the_root() -> None:
    assert set(CHANGES) == {field.name for field in fields(Scope)}
    roots = [SCOPE.digest] + [replace(SCOPE, **{name: value}).digest for name, value in CHANGES.items()]
    assert len(set(roots)) == 1 + len(CHANGES)


def test_a_value_does_not_count_for_its_neighbour() -> None:
    assert replace(SCOPE, lora="a", salt="").digest != replace(SCOPE, lora="", salt="a").digest
    assert replace(SCOPE, lora='","salt":"x', salt="").digest != replace(SCOPE, lora="", salt="x").digest


def test_a_key_depends_on_all_tokens_before_it() -> None:
    base = chain(ROOT, range(12), 3)
    for changed in range(12):
        other = chain(ROOT, [99 if i == changed else i for i in range(12)], 3)
        assert [a == b for a, b in zip(base, other, strict=True)] == [i < changed // 3 for i in range(4)]


def test_chunks_of_another_length_have_other_keys() -> None:
    assert not set(chain(ROOT, range(12), 3)) & set(chain(ROOT, range(12), 4))


@given(tokens, st.integers(1, 5))
def test_lists_and_arrays_give_the_same_keys(ids: list[int], chunk: int) -> None:
    expected = chain(ROOT, ids, chunk)
    assert len(expected) == len(ids) // chunk
    for dtype in ("<u4", ">u4", "<i8", ">u8"):
        assert chain(ROOT, np.array(ids, dtype=dtype), chunk) == expected
    assert chain(ROOT, np.repeat(np.array(ids, dtype=np.uint32), 2)[::2], chunk) == expected  # strided
    assert chain(ROOT, tuple(map(np.int64, ids)), chunk) == expected


@given(tokens, st.integers(1, 5), st.lists(st.integers(0, 10), max_size=8))
def test_piece_by_piece_is_the_same_as_at_once(ids: list[int], chunk: int, pieces: list[int]) -> None:
    growing, start, fresh = KeyChain(ROOT, chunk), 0, []
    for piece in [*pieces, len(ids)]:
        fresh += growing.extend(ids[start : start + piece])
        start += piece
    assert fresh == growing.keys == chain(ROOT, ids, chunk)


def test_no_tokens_have_no_keys() -> None:
    assert chain(ROOT, [], 4) == []
    assert chain(ROOT, np.array([], dtype=np.int64), 4) == []
    assert pack([]) == b""


@pytest.mark.parametrize(
    "bad",
    [
        [-1],
        [2**32],
        [1.5],
        ["1"],
        [None],
        "12",
        b"\x01\0\0\0",
        bytearray(4),
        5,
        [[1, 2]],
        np.array([-1]),
        np.array([2**32]),
        np.array([1.0]),
        np.array([True]),
        np.array(3),
        np.array([[1, 2]]),
        np.array(["1"]),
    ],
    ids=repr,
)
def test_what_is_no_token_is_refused_and_changes_nothing(bad: Any) -> None:
    growing = KeyChain(ROOT, 2)
    growing.extend([1])
    with pytest.raises(TokenError, match="token"):
        growing.extend(bad)
    assert hexes(growing.extend([2, 3, 4])) == GOLDEN_CHAIN


@pytest.mark.parametrize("root", [b"", bytes(31), bytes(33), "0" * 32, None])
def test_a_root_that_is_no_digest_is_refused(root: Any) -> None:
    with pytest.raises(TokenError, match="a root key of 32 bytes"):
        chain(root, [1], 1)


@pytest.mark.parametrize("chunk", [0, -4])
def test_a_chunk_without_tokens_is_refused(chunk: int) -> None:
    with pytest.raises(TokenError, match=f"chunk_tokens of at least 1, got {chunk}"):
        chain(ROOT, [1], chunk)


ITEMS = (MediaItem(2, 5, b"h0"), MediaItem(8, 12, b"h1"), MediaItem(14, 16, b"h2"))


def belonging(items: tuple[MediaItem, ...], chunk: int, size: int = 4) -> list[str]:
    return [item.digest.decode() for item in items_in(items, chunk * size, (chunk + 1) * size)]


@pytest.mark.parametrize(("chunk", "expected"), [(0, ["h0"]), (1, ["h0"]), (2, ["h1"]), (3, ["h2"]), (4, [])])
def test_item_belongs_to_every_chunk_with_its_tokens(chunk: int, expected: list[str]) -> None:
    assert belonging(ITEMS, chunk) == expected


@pytest.mark.parametrize(
    ("start", "end", "chunks"),
    [
        (0, 4, [0]),  # ends exactly where chunk 1 begins
        (4, 5, [1]),  # starts exactly where chunk 0 ends
        (3, 4, [0]),
        (3, 5, [0, 1]),
        (2, 13, [0, 1, 2, 3]),  # spans several
        (4, 12, [1, 2]),
        (15, 16, [3]),
    ],
)
def test_items_at_the_edges_of_chunks(start: int, end: int, chunks: list[int]) -> None:
    assert [chunk for chunk in range(5) if belonging((MediaItem(start, end, b"x"),), chunk)] == chunks


def test_several_items_in_a_chunk_all_enter_its_key() -> None:
    items = (MediaItem(0, 1, b"a"), MediaItem(1, 2, b"b"), MediaItem(3, 4, b"c"))
    assert belonging(items, 0) == ["a", "b", "c"]
    for i in range(3):
        other = [*items[:i], items[i]._replace(digest=b"z"), *items[i + 1 :]]
        assert chain(ROOT, range(4), 4, other) != chain(ROOT, range(4), 4, items)


def test_item_content_changes_keys_of_its_and_later_chunks() -> None:
    plain, known = chain(ROOT, range(20), 4), chain(ROOT, range(20), 4, ITEMS)
    other = chain(ROOT, range(20), 4, [ITEMS[0], ITEMS[1]._replace(digest=b"other"), ITEMS[2]])
    assert known[0] != plain[0]
    assert [a == b for a, b in zip(known, other, strict=True)] == [True, True, False, False, False]
    late = chain(ROOT, range(20), 4, [MediaItem(16, 18, b"late")])
    assert [a == b for a, b in zip(plain, late, strict=True)] == [True] * 4 + [False]


def test_another_part_of_the_same_item_is_another_key() -> None:
    whole = chain(ROOT, [7] * 8, 4, [MediaItem(0, 8, b"x")])
    shifted = chain(ROOT, [7] * 8, 4, [MediaItem(1, 8, b"x")])
    assert whole[0] != shifted[0]
    longer = chain(ROOT, [7] * 4, 4, [MediaItem(0, 3, b"x")])
    assert len({whole[0], shifted[0], longer[0]}) == 3


# hashlib.sha256(bytes(32) + struct.pack("<4I", 0, 1, 2, 3) + b"longshore items 1\0" + struct.pack("<3q", -2, 2, 4)
#   + hashlib.sha256(b"h0").digest()).hexdigest()
GOLDEN_ITEM = "97bb0f28d96bc7c240d69349a306e0784be5f9f0fbafc495cf84a26c04e53eb5"


def test_golden_item() -> None:
    assert chain(ROOT, range(4), 4, ITEMS[:1])[0].hex() == GOLDEN_ITEM


@given(cuts=st.lists(st.integers(0, 20), max_size=6))
def test_tokens_may_come_in_any_pieces_with_items_too(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 20]
    grown = KeyChain(ROOT, 4, ITEMS)
    for begin, end in pairwise(edges):
        grown.extend(range(begin, end))
    assert grown.keys == chain(ROOT, range(20), 4, ITEMS)


@pytest.mark.parametrize(
    "items",
    [
        [MediaItem(3, 3, b"x")],
        [MediaItem(-1, 3, b"x")],
        [MediaItem(4, 3, b"x")],
        [MediaItem(0, 3, b"")],
        [MediaItem(0, 3, b"x"), MediaItem(2, 4, b"y")],
        [MediaItem(5, 6, b"x"), MediaItem(2, 4, b"y")],
    ],
)
def test_items_that_cannot_be_are_refused(items: list[MediaItem]) -> None:
    with pytest.raises(TokenError, match="in order, without overlap"):
        KeyChain(ROOT, 4, items)
