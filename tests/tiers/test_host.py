"""The host tier: where its slots are."""

import pytest

from longshore.boundary import Slabs
from longshore.errors import PlanError, TierError
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.host import HostSlabs


@pytest.fixture
def arena() -> Arena:
    return Arena(8 * DISK_PAGE)


def test_slots_lie_one_after_the_other(arena: Arena) -> None:
    tier = HostSlabs(arena, Slabs.of_one_size(2 * DISK_PAGE, 3))
    assert (
        [tier.slabs.offset(0, slot) for slot in range(3)]
        == tier.slabs.offsets(0, range(3)).tolist()
        == [0, 2 * DISK_PAGE, 4 * DISK_PAGE]
    )


@pytest.mark.parametrize("slot", [-1, 3])
def test_missing_slot_has_no_offset(arena: Arena, slot: int) -> None:
    with pytest.raises(PlanError, match=rf"got {slot}$"):
        HostSlabs(arena, Slabs.of_one_size(DISK_PAGE, 3)).slabs.offset(0, slot)


@pytest.mark.parametrize(("slots", "image_bytes"), [(0, DISK_PAGE), (1, DISK_PAGE + 1), (9, DISK_PAGE)])
def test_impossible_geometry_is_refused(arena: Arena, slots: int, image_bytes: int) -> None:
    with pytest.raises(TierError):
        HostSlabs(arena, Slabs.of_one_size(image_bytes, slots))


@pytest.mark.parametrize(("pool", "slot"), [(1, 1), (2, 0), (-1, 0), (0, 4)])
def test_slot_missing_in_its_pool_has_no_offset(arena: Arena, pool: int, slot: int) -> None:
    with pytest.raises(PlanError, match=r"expected a size class in \[0, 2\)|size class \d has slots"):
        HostSlabs(arena, Slabs(2 * DISK_PAGE, (DISK_PAGE, 2 * DISK_PAGE), 2)).slabs.offset(pool, slot)
