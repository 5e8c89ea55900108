"""The host tier: the conformance suite, and what only it has."""

import math
from pathlib import Path

import pytest

from longshore.boundary import Slabs, Status
from longshore.errors import PlanError, TierClosedError, TierError
from longshore.testing import TierTests
from longshore.tiers.arena import PAGE, Arena
from longshore.tiers.base import Op, Tier, TierOp
from longshore.tiers.host import HostTier


class TestHostTier(TierTests):
    reserved_bytes = PAGE + TierTests.slots * TierTests.image_bytes

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return HostTier(arena, Slabs.of_one_size(self.image_bytes, self.slots), base=PAGE)


@pytest.fixture
def arena() -> Arena:
    return Arena(8 * PAGE)


def test_slots_lie_one_after_the_other_from_the_base(arena: Arena) -> None:
    tier = HostTier(arena, Slabs.of_one_size(2 * PAGE, 3), base=PAGE)
    assert (
        [tier.offset(0, slot) for slot in range(3)] == tier.offsets(0, range(3)).tolist() == [PAGE, 3 * PAGE, 5 * PAGE]
    )


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_does_not_exist_has_no_offset(arena: Arena, slot: int) -> None:
    with pytest.raises(PlanError, match=rf"got {slot}$"):
        HostTier(arena, Slabs.of_one_size(PAGE, 3)).offset(0, slot)


@pytest.mark.parametrize(
    ("slots", "image_bytes", "base"),
    [(0, PAGE, 0), (1, PAGE + 1, 0), (1, PAGE, 1), (1, PAGE, -PAGE), (8, PAGE, PAGE)],
)
def test_impossible_geometry_is_refused(arena: Arena, slots: int, image_bytes: int, base: int) -> None:
    with pytest.raises(TierError):
        HostTier(arena, Slabs.of_one_size(image_bytes, slots), base=base)


def test_slab_serves_only_the_size_it_last_held(arena: Arena) -> None:
    tier = HostTier(arena, Slabs(2 * PAGE, (PAGE, 2 * PAGE), 2))
    small = [TierOp(Op.WRITE, slot, bytes([slot]) * 32, None, 4 * PAGE, PAGE, 0, pool=0) for slot in (0, 1, 2)]
    large = TierOp(Op.WRITE, 0, bytes(32), None, 6 * PAGE, 2 * PAGE, 0, pool=1)
    arena.array[4 * PAGE :] = 7

    def read(*ops: TierOp) -> tuple[Status, ...]:
        tier.submit([op._replace(op=Op.READ) for op in ops], math.inf)
        return tier.poll()[-1].statuses

    tier.submit(small, math.inf)
    assert read(*small, large) == (Status.OK,) * 3 + (Status.MISMATCH,)
    tier.submit([large], math.inf)
    assert read(*small, large) == (Status.MISMATCH, Status.MISMATCH, Status.OK, Status.OK)
    tier.submit(small[1:2], math.inf)
    assert read(*small, large) == (Status.MISMATCH, Status.OK, Status.OK, Status.MISMATCH)


@pytest.mark.parametrize(("pool", "slot"), [(1, 1), (2, 0), (-1, 0), (0, 4)])
def test_a_slot_that_its_pool_does_not_have_is_refused(arena: Arena, pool: int, slot: int) -> None:
    tier = HostTier(arena, Slabs(2 * PAGE, (PAGE, 2 * PAGE), 2))
    with pytest.raises(TierError, match=r"operation 0 of 1: (expected a pool in \[0, 2\)|pool \d has slots)"):
        tier.submit([TierOp(Op.WRITE, slot, bytes(32), None, 4 * PAGE, PAGE, 0, pool=pool)], math.inf)


@pytest.mark.parametrize("offset", [0, PAGE - 1, 3 * PAGE, 4 * PAGE - 1])
def test_a_copy_into_its_own_slots_is_refused(arena: Arena, offset: int) -> None:
    tier = HostTier(arena, Slabs.of_one_size(PAGE, 4))
    with pytest.raises(TierError, match="own slots"):
        tier.submit([TierOp(Op.READ, 0, bytes(32), None, offset, PAGE, 0)], 1e18)


def test_a_closed_arena_is_an_error_before_anything_moves(arena: Arena) -> None:
    tier = HostTier(arena, Slabs.of_one_size(PAGE, 4))
    arena.close()
    with pytest.raises(TierClosedError):
        tier.submit([TierOp(Op.WRITE, 0, bytes(32), None, 4 * PAGE, PAGE, 0)], 1e18)
