"""Three tiers below the device, with real bytes: device -> host -> file -> attic, and back from there."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from longshore.boundary import FILE, HOST, Item, Route, Slot, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, DropReason, TieredCache, TierSpec, WritePolicy
from longshore.errors import PlanError
from longshore.layout import from_rows
from longshore.runtime import Runtime, TierChain
from longshore.slabs import Slabs
from longshore.testing import Fault, FaultPlan, FaultyTier, Rule
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.host import HostTier
from longshore.transfer.device import device_for
from longshore.transfer.engine import TransferEngine

ATTIC = "attic"
BLOCKS, ROW, SLOTS, STAGES = 24, 6 * 1000, 4, 2
KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(4)]
PATIENCE = 60.0
DOWN = Route(FILE, ATTIC)


class House:
    """A device, a host tier of four slots and two stages, and two file tiers of which the lower one may be faulty."""

    def __init__(self, path: Path, plan: FaultPlan | None = None) -> None:
        self.rows = torch.zeros((BLOCKS, ROW), dtype=torch.uint8)
        layout = from_rows(self.rows, pages_per_block=6, block_size=10)
        size = layout.image_bytes
        self.arena = Arena((SLOTS + STAGES) * size)
        host = HostTier(self.arena, Slabs.of_one_size(size, SLOTS + STAGES))
        device = device_for(layout)
        device.reach(self.arena.in_one_piece)
        self.file, self.attic = (
            FileTier(path / name, capacity=capacity_for(8, size), image_bytes=size, arena=self.arena, scope=bytes(32))
            for name in (FILE, ATTIC)
        )
        self.attic.name = ATTIC
        lower = self.attic if plan is None else FaultyTier(self.attic, plan, self.arena)
        self.chain = TierChain([self.file, lower], host, STAGES)
        tiers = [TierSpec(HOST, SLOTS, size), TierSpec(FILE, 8, size), TierSpec(ATTIC, 8, size)]
        self.cache = TieredCache(tiers, CacheSettings(backup=WritePolicy.THROUGH))
        movers = [TransferEngine(layout, device, host), self.chain]
        self.runtime = Runtime(self.cache, movers, [self.file, lower])

    def store(self) -> torch.Tensor:
        """All keys come from the device, and go down as far as they can."""
        noise = torch.randint(0, 256, (len(KEYS), ROW), dtype=torch.uint8, generator=torch.manual_seed(1))
        self.rows[: len(KEYS)] = noise
        with self.runtime.control() as cache:
            cache.commit(KEYS, range(len(KEYS)))
        give_up = time.monotonic() + PATIENCE
        while self.runtime.pump():
            assert time.monotonic() < give_up
            time.sleep(0.0005)
        return noise

    def discard(self, *tiers: str) -> None:
        with self.runtime.control() as cache:
            assert [cache.discard(KEYS, tier) for tier in tiers] == [len(KEYS)] * len(tiers)

    def load(self) -> tuple[str, ...]:
        self.rows[:] = 0xEE
        with self.runtime.control() as cache:
            hold = cache.match(KEYS, self.runtime.clock()).hold
            assert hold is not None
            cache.onboard(hold, range(12, 12 + len(KEYS)))
        sources = self.runtime.wait_onboarded(hold, PATIENCE).sources
        with self.runtime.control() as cache:
            cache.release(hold)
        return sources

    def close(self) -> None:
        self.runtime.close(PATIENCE)
        self.cache.check_integrity()
        assert self.cache.jobs_in_flight == 0
        self.arena.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    opened = House(tmp_path)
    yield opened
    opened.close()


def test_down_to_the_third_tier_and_up_again(house: House) -> None:
    written = house.store()
    assert house.cache.counters.routes["file->attic"].chunks == len(KEYS)
    house.discard(HOST, FILE)
    assert house.load() == (ATTIC,) * len(KEYS)
    assert torch.equal(house.rows[12 : 12 + len(KEYS)], written)


def test_along_a_path_that_lies_in_three_tiers(house: House) -> None:
    written = house.store()
    with house.runtime.control() as cache:
        assert (cache.discard(KEYS[:3], HOST), cache.discard(KEYS[1:2], FILE)) == (3, 1)
    assert house.load() == (FILE, ATTIC, FILE, HOST)
    assert torch.equal(house.rows[12 : 12 + len(KEYS)], written)


def test_more_images_than_stages_take_turns(house: House) -> None:
    assert len(KEYS) > STAGES
    house.store()
    assert house.cache.counters.routes["file->attic"].bytes == len(KEYS) * house.file.image_bytes[0]


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FULL])
def test_a_write_that_fails_leaves_the_copy_above(tmp_path: Path, fault: Fault) -> None:
    house = House(tmp_path, FaultPlan((Rule(Op.WRITE, fault, nth=frozenset({3})),)))
    written = house.store()
    lower = house.chain._movers[ATTIC].tier
    assert isinstance(lower, FaultyTier)
    assert lower.fired[fault] == 1
    assert house.cache.counters.drops[ATTIC][DropReason.WRITE_FAILED] == 1
    with house.runtime.observe() as cache:
        assert [r.key for r in cache.residents() if r.slot.tier == ATTIC] == KEYS[:2]  # nor what is behind that one
    house.discard(HOST)
    assert house.load() == (FILE,) * len(KEYS)
    assert torch.equal(house.rows[12 : 12 + len(KEYS)], written)
    house.close()


def relay(count: int, job: int = 7) -> Transfer:
    """Images of the first slots of the file tier go down."""
    return Transfer(job, DOWN, tuple(Item(KEYS[i], None, Slot(FILE, 0, i), Slot(ATTIC, 0, i), 1) for i in range(count)))


def end_of(house: House) -> TransferResult:
    give_up = time.monotonic() + PATIENCE
    while not (results := house.chain.poll()):
        assert time.monotonic() < give_up
        time.sleep(0.0005)
    (result,) = results
    return result


def test_what_was_never_written_above_is_not_written_below(house: House) -> None:
    house.chain.submit(relay(2))
    assert set(end_of(house).statuses) <= {Status.MISMATCH, Status.CORRUPT, Status.SHORT}
    assert len(house.chain._free) == STAGES


def test_what_has_not_begun_can_be_cancelled(house: House) -> None:
    house.chain.submit(relay(4))
    house.chain.cancel(7)
    result = end_of(house)
    assert result.statuses[STAGES:] == (Status.CANCELLED,) * 2
    assert len(house.chain._free) == STAGES


def test_a_chain_that_is_closed_ends_everything(house: House) -> None:
    house.chain.submit(relay(4))
    house.chain.close()
    result = end_of(house)
    assert result.statuses[STAGES:] == (Status.TIER_OFF,) * 2
    assert Status.OK not in result.statuses
    house.chain.submit(relay(1, job=8))
    assert end_of(house).statuses == (Status.TIER_OFF,)


@pytest.mark.parametrize(
    "item",
    [
        Item(KEYS[0], None, None, Slot(ATTIC, 0, 0), 1),
        Item(KEYS[0], None, Slot(FILE, 0, 0), None, 1),
        Item(KEYS[0], None, Slot(FILE, 0, 8), Slot(ATTIC, 0, 0), 1),
        Item(KEYS[0], None, Slot(FILE, 0, 0), Slot(ATTIC, 0, -1), 1),
    ],
)
def test_a_relay_that_cannot_be_is_refused_before_any_of_it_begins(house: House, item: Item) -> None:
    with pytest.raises(PlanError):
        house.chain.submit(Transfer(7, DOWN, (*relay(1).items, item)))
    assert house.chain.poll() == []


@pytest.mark.parametrize("stages", [0, SLOTS + STAGES])
def test_stages_that_cannot_be_are_refused(house: House, stages: int) -> None:
    with pytest.raises(PlanError, match="expected stages among the"):
        TierChain([house.file], house.chain._host, stages)
