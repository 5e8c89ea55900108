"""Items in columns read as a sequence of items."""

from __future__ import annotations

import pickle

import pytest

from longshore.boundary import FILE, HOST, Item, Items, Slot, Slots

KEYS = tuple(bytes([i]) * 32 for i in range(3))
COLUMNS = Items(KEYS, (None, *KEYS[:2]), Slots(FILE, 0, (7, 8, 5)), None)
ITEMS = (
    Item(KEYS[0], None, Slot(FILE, 0, 7), None),
    Item(KEYS[1], KEYS[0], Slot(FILE, 0, 8), None),
    Item(KEYS[2], KEYS[1], Slot(FILE, 0, 5), None),
)


def test_columns_are_read_as_items() -> None:
    assert tuple(COLUMNS) == ITEMS
    assert all(type(item) is Item and type(item.source) is Slot for item in COLUMNS)
    assert len(COLUMNS) == 3
    assert (COLUMNS[1], COLUMNS[-1]) == (ITEMS[1], ITEMS[2])
    assert COLUMNS[1:] == ITEMS[1:]
    with pytest.raises(IndexError):
        COLUMNS[3]


def test_columns_equal_the_same_items_however_they_are_kept() -> None:
    moved = Items(KEYS, (None, *KEYS[:2]), None, Slots(HOST, 0, (7, 8, 5)))
    assert COLUMNS == ITEMS
    assert pickle.loads(pickle.dumps(COLUMNS)) == COLUMNS  # noqa: S301 - our own bytes
    assert hash(COLUMNS) == hash(ITEMS)
    assert moved != COLUMNS
    assert moved[0].destination == Slot(HOST, 0, 7)
    assert COLUMNS != 3
