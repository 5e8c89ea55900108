"""Groups with images of different sizes: each in slots of its own size, in host memory that all sizes share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from longshore.boundary import HOST, Item, Items, Route, Section, Slabs, Slot, Slots, Status, Transfer
from longshore.errors import PlanError
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.host import HostSlabs
from longshore.transfer import D2H, H2D, CpuDevice, TransferEngine

BLOCKS = 8
FULL, WINDOW = 0, 1
SMALL, LARGE = 0, 1
KEY = bytes(32)
TIMEOUT = 30.0


class Machine:
    """Two groups, three layers and one, over tensors of their own; slabs of three pages."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.tensors = [torch.from_numpy(random.integers(0, 256, BLOCKS * DISK_PAGE, np.uint8)) for _ in range(4)]
        refs = [PageRef(tensor, 0, DISK_PAGE, DISK_PAGE) for tensor in range(4)]
        groups = [KVGroup("full", 1, 1, tuple(refs[:3])), KVGroup("window", 1, 1, tuple(refs[3:]))]
        self.layout = KVLayout(groups, self.tensors, BLOCKS)
        self.arena = Arena(12 * DISK_PAGE)
        self.host = HostSlabs(self.arena, Slabs(3 * DISK_PAGE, (DISK_PAGE, 3 * DISK_PAGE), 4))
        self.engine = TransferEngine(self.layout, CpuDevice(), self.host)

    def run(self, *transfers: Transfer) -> None:
        for transfer in transfers:
            self.engine.submit(transfer)
        assert self.engine.wait([transfer.job for transfer in transfers], TIMEOUT)
        assert all(set(result.statuses) == {Status.OK} for result in self.engine.poll())

    def page(self, tensor: int, block: int) -> bytes:
        return bytes(self.tensors[tensor][block * DISK_PAGE : (block + 1) * DISK_PAGE].numpy())


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.engine.close()
    made.arena.close()


def moving(job: int, route: Route, group: int, blocks: tuple[int, ...], pool: int, slots: tuple[int, ...]) -> Transfer:
    """As the control plane orders it: items in columns."""
    side = Slots(HOST, pool, slots)
    source, destination = (None, side) if route == D2H else (side, None)
    items = Items((KEY,) * len(slots), (None,) * len(slots), source, destination)
    return Transfer(job, route, items, (Section(group, 0, blocks),))


def test_each_size_lies_in_its_own_slots_and_comes_back(machine: Machine) -> None:
    before = [[machine.page(tensor, block) for block in range(BLOCKS)] for tensor in range(4)]
    machine.run(moving(1, D2H, FULL, (0, 1), LARGE, (0, 6)), moving(2, D2H, WINDOW, (0, 1, 2, 3), SMALL, (3, 4, 5, 9)))
    array = machine.arena.array
    for slab, block in ((0, 0), (2, 1)):
        image = bytes(array[slab * 3 * DISK_PAGE : (slab + 1) * 3 * DISK_PAGE])
        assert image == b"".join(before[tensor][block] for tensor in range(3))
    for page, block in ((3, 0), (4, 1), (5, 2), (9, 3)):
        assert bytes(array[page * DISK_PAGE : (page + 1) * DISK_PAGE]) == before[3][block]
    machine.run(moving(3, H2D, FULL, (7, 6), LARGE, (0, 6)), moving(4, H2D, WINDOW, (4, 5), SMALL, (9, 3)))
    for tensor in range(3):
        assert [machine.page(tensor, block) for block in (7, 6)] == before[tensor][:2]
    assert [machine.page(3, block) for block in (4, 5)] == [before[3][3], before[3][0]]


def test_image_is_refused_for_a_slot_that_is_too_small(machine: Machine) -> None:
    with pytest.raises(PlanError, match=f"item 0: {3 * DISK_PAGE} image bytes exceed a slot of {DISK_PAGE}"):
        machine.engine.submit(moving(1, D2H, FULL, (0,), SMALL, (3,)))
    assert machine.engine.poll() == []


@pytest.mark.parametrize(("pool", "slot"), [(LARGE, 1), (LARGE, 12), (SMALL, -1), (2, 0)])
def test_a_slot_that_its_pool_does_not_have_is_refused(machine: Machine, pool: int, slot: int) -> None:
    with pytest.raises(PlanError):
        machine.engine.submit(moving(1, D2H, WINDOW, (0,), pool, (slot,)))


def test_two_sizes_in_one_slab_are_refused(machine: Machine) -> None:
    items = (Item(KEY, None, None, Slot(HOST, LARGE, 3)), Item(KEY, None, None, Slot(HOST, SMALL, 5)))
    with pytest.raises(PlanError, match="different image sizes overlap in one slab"):
        machine.engine.submit(Transfer(1, D2H, items, (Section(FULL, 0, (0,)), Section(WINDOW, 0, (0,)))))
    apart = (items[0], items[1]._replace(destination=Slot(HOST, SMALL, 6)))
    machine.run(Transfer(1, D2H, apart, (Section(FULL, 0, (0,)), Section(WINDOW, 0, (0,)))))
    assert bytes(machine.arena.array[6 * DISK_PAGE : 7 * DISK_PAGE]) == machine.page(3, 0)


def test_resized_slab_is_written_after_its_readers(machine: Machine) -> None:
    """The hazard is between slots of different numbers: image 5 of the small size lies in image 3 of the large one."""
    before = [machine.page(tensor, 0) for tensor in range(3)]
    for job in range(1, 60, 3):  # many times: the last two go down two lanes at once
        machine.run(moving(job, D2H, FULL, (0,), LARGE, (3,)))
        machine.run(moving(job + 1, H2D, FULL, (5,), LARGE, (3,)), moving(job + 2, D2H, WINDOW, (1,), SMALL, (5,)))
        assert [machine.page(tensor, 5) for tensor in range(3)] == before
