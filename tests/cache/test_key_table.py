"""The table of keys does what a dictionary does, whichever keys share a bucket."""

from __future__ import annotations

import random

import numpy as np
import pytest

from longshore.cache import columns
from longshore.cache.columns import KeyTable, as_i32, i32_view
from longshore.errors import CacheError


@pytest.mark.parametrize("buckets", [1, 8, None])
@pytest.mark.parametrize("most", [5, 200])
@pytest.mark.parametrize("lengths", [[32], [7, 32]])
def test_keys_are_found_as_in_a_dictionary(lengths: list[int], buckets: int | None, most: int) -> None:
    dice, size = random.Random(most), 600
    table, model, free = KeyTable(size), dict[bytes, int](), list(range(1, size))
    if buckets is not None:
        table._mask = buckets - 1  # so many keys share a bucket
    for _ in range(300):
        count = min(dice.randint(1, most), len(free))
        if free and dice.random() < 0.55:
            keys = [dice.randbytes(dice.choice(lengths)) for _ in range(count)]
            nodes = [free.pop(dice.randrange(len(free))) for _ in keys]
            if dice.random() < 0.5:
                assert table.find(keys) == [0] * len(keys)
            table.insert(as_i32(nodes), keys)
            model.update(zip(keys, nodes, strict=True))
        elif model:
            gone = dice.sample(sorted(model), min(count, len(model)))
            nodes = [model.pop(key) for key in gone]
            table.remove(nodes)
            free += nodes
            assert [table[node] for node in nodes] == [None] * len(nodes)
        asked = [*dice.sample(sorted(model), min(most, len(model))), *(dice.randbytes(32) for _ in range(most))]
        assert table.find(asked) == [model.get(key, 0) for key in asked]
        assert [table.get(key) for key in asked] == [model.get(key, 0) for key in asked]
        there = [key for key in asked if key in model]
        at = as_i32([model[key] for key in there])
        assert table.are(at, there)
        assert len(there) < 2 or not table.are(at, [*there[1:], there[0]])
        assert len(there) < 2 or not table.are(at[1:], there)
    table.check_integrity()
    assert len(table) == len(model) and table.nodes().tolist() == sorted(model.values())
    assert table[list(model.values())].tolist() == list(model)
    table.grow(5000)
    table.check_integrity()
    assert table.find(list(model)) == list(model.values())


def test_keys_of_another_length_are_not_found() -> None:
    table = KeyTable(100)
    table.insert(as_i32([7, 9]), [b"a" * 16, b"b" * 16])
    table.insert(as_i32([]), [])
    assert table._rows.dtype == "V16"  # not separate objects
    assert table.find([b"a" * 15, b"a" * 17] * 40) == [0] * 80 and table.get(b"a" * 17) == 0


def test_list_changed_after_a_lookup_is_inserted_as_it_is() -> None:
    table, count = KeyTable(200), columns._FEW_KEYS
    keys = [bytes([number]) * 32 for number in range(2 * count)]
    asked = keys[:count]
    assert not table.find_all(asked).any()
    asked[:] = keys[count:]
    table.insert(np.arange(1, count + 1, dtype=np.int32), asked)
    assert table.find(keys) == [*[0] * count, *range(1, count + 1)]
    table.check_integrity()


@pytest.mark.parametrize("key", [b"", 7, None, "text", bytearray(16)])
@pytest.mark.parametrize("count", [1, columns._FEW_KEYS])
def test_what_is_no_key_is_refused(key: bytes, count: int) -> None:
    table = KeyTable(100)
    table.insert(as_i32([7]), [b"a" * 16])
    with pytest.raises(CacheError, match="expected a key"):
        table.find([*[b"a" * 16] * (count - 1), key])


def test_damaged_links_are_noticed() -> None:
    for damage in range(3):
        table = KeyTable(200)
        table.insert(np.arange(1, 150, dtype=np.int32), [i.to_bytes(32, "big") for i in range(149)])
        table.check_integrity()
        if damage == 0:
            table._rows[5] = table._rows[6]
        elif damage == 1:
            table._before[5] = 0
        else:
            table._first[int(i32_view(table._first).argmax())] = 0
        with pytest.raises(CacheError):
            table.check_integrity()
