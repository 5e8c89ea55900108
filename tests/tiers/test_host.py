"""The host tier: the conformance suite, and what only it has."""

from pathlib import Path

import pytest

from longshore.errors import TierClosedError, TierError
from longshore.testing import TierTests
from longshore.tiers.arena import PAGE, Arena
from longshore.tiers.base import Op, Tier, TierOp
from longshore.tiers.host import HostTier


class TestHostTier(TierTests):
    reserved_bytes = PAGE + TierTests.slots * TierTests.image_bytes

    def open_tier(self, arena: Arena, directory: Path) -> Tier:
        return HostTier(arena, slots=self.slots, image_bytes=self.image_bytes, base=PAGE)


@pytest.fixture
def arena() -> Arena:
    return Arena(8 * PAGE)


def test_slots_lie_one_after_the_other_from_the_base(arena: Arena) -> None:
    tier = HostTier(arena, slots=3, image_bytes=2 * PAGE, base=PAGE)
    assert [tier.offset(slot) for slot in range(3)] == [PAGE, 3 * PAGE, 5 * PAGE]


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_that_does_not_exist_has_no_offset(arena: Arena, slot: int) -> None:
    with pytest.raises(TierError, match=rf"slot {slot} does not lie in \[0, 3\)"):
        HostTier(arena, slots=3, image_bytes=PAGE).offset(slot)


@pytest.mark.parametrize(
    ("slots", "image_bytes", "base"),
    [(0, PAGE, 0), (1, 0, 0), (1, PAGE + 1, 0), (1, -PAGE, 0), (1, PAGE, 1), (1, PAGE, -PAGE), (8, PAGE, PAGE)],
)
def test_impossible_geometry_is_refused(arena: Arena, slots: int, image_bytes: int, base: int) -> None:
    with pytest.raises(TierError):
        HostTier(arena, slots=slots, image_bytes=image_bytes, base=base)


@pytest.mark.parametrize("offset", [0, PAGE - 1, 3 * PAGE, 4 * PAGE - 1])
def test_a_copy_into_its_own_slots_is_refused(arena: Arena, offset: int) -> None:
    tier = HostTier(arena, slots=4, image_bytes=PAGE)
    with pytest.raises(TierError, match="own slots"):
        tier.submit([TierOp(Op.READ, 0, bytes(32), None, offset, PAGE, 0)], 1e18)


def test_a_closed_arena_is_an_error_before_anything_moves(arena: Arena) -> None:
    tier = HostTier(arena, slots=4, image_bytes=PAGE)
    arena.close()
    with pytest.raises(TierClosedError):
        tier.submit([TierOp(Op.WRITE, 0, bytes(32), None, 4 * PAGE, PAGE, 0)], 1e18)
