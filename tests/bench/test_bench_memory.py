"""Memory of managers is what the system says: what is mapped counts, and what was given back does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from longshore.bench.cache_sides import bytes_per_block
from longshore.boundary import Key
from longshore.cache.columns import sparse
from longshore.errors import BenchError

BLOCKS = 20_000


class Allocating:
    """Keeps 1,000 bytes for each of so many blocks, and a tenth of that for what came after."""

    def __init__(self, slots: int) -> None:
        self.slots, self.kept = slots, list[bytes]()

    def store(self, keys: Sequence[Key]) -> None:
        self.kept += [bytes(1000 if len(self.kept) < self.slots else 100) for _ in keys]


class Mapping:
    """Touches 4,096 bytes for each block, where no allocator sees it."""

    def __init__(self, slots: int) -> None:
        self.places, self.next = sparse(4096 * slots, np.uint8), 0

    def store(self, keys: Sequence[Key]) -> None:
        for _ in keys:
            self.places[4096 * self.next] = 1
            self.next += 1


class Failing:
    def __init__(self, slots: int) -> None:
        raise SystemExit(0)


def test_what_allocators_give_is_counted() -> None:
    filled, more = bytes_per_block(Allocating, BLOCKS, refills=2)
    assert 1000 < filled < 1100
    assert 200 < more < 340


def test_what_is_mapped_is_counted_once_it_is_touched() -> None:
    filled, more = bytes_per_block(Mapping, BLOCKS)
    assert 4000 < filled < 4200
    assert abs(more) < 100


def test_a_process_that_ends_is_an_error() -> None:
    with pytest.raises(BenchError, match="has ended"):
        bytes_per_block(Failing, 64)
