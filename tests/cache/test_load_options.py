"""What an engine of its own kind says of its copies: their group, layer by layer, and those inside the device."""

import pytest
from cache_kit import lookup, store

from longshore.boundary import DEVICE, HOST, Item, Route, Section, Slot, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, DeviceCopy, TieredCache, TierSpec
from longshore.errors import CacheError
from residents import residents_of

KEYS = [bytes([i]) * 32 for i in range(3)]


def one(cache: TieredCache) -> Transfer:
    (command,) = cache.take_commands()
    assert isinstance(command, Transfer)
    return command


def end(cache: TieredCache, transfer: Transfer, status: Status = Status.OK) -> None:
    cache.apply_results([TransferResult(transfer.job, (status,) * len(transfer.items), bytes=8)], 0.0)


@pytest.fixture
def cache() -> TieredCache:
    return TieredCache([TierSpec(HOST, 8, 4096)], CacheSettings(device_blocks=16))


def test_blocks_of_a_group_go_and_return_as_that_group(cache: TieredCache) -> None:
    store(cache, KEYS, [4, 5, 6], group=2)
    down = one(cache)
    assert down.sections == (Section(2, 0, (4, 5, 6)),)
    assert not down.by_layer
    end(cache, down)
    hold = lookup(cache, KEYS, 0.0, 1, group=2).lease
    cache.load(hold, {2: [7, 8]}, by_layer=True)
    up = one(cache)
    assert (up.route, up.sections, up.by_layer) == (Route(HOST, DEVICE), (Section(2, 1, (7, 8)),), True)


@pytest.mark.parametrize("status", [Status.OK, Status.IO_ERROR])
def test_copy_inside_the_device_is_an_ordinary_job(cache: TieredCache, status: Status) -> None:
    slot = Slot(DEVICE, 1, 3)
    job = cache.load({1: DeviceCopy([slot], 5)}, {1: [9]}).jobs[0].job
    transfer = one(cache)
    assert transfer.items == (Item(b"", None, slot, None),)
    assert (transfer.job, transfer.route, transfer.tokens) == (job, Route(DEVICE, DEVICE), 5)
    assert (transfer.sections, transfer.by_layer) == ((Section(1, 0, (9,)),), True)
    assert not cache.progress(job).is_over
    cache.check_integrity()
    end(cache, transfer, status)
    assert cache.progress(job).is_over
    moved = cache.counters.routes["device->device"]
    assert (moved.chunks, moved.failed) == ((1, 0) if status is Status.OK else (0, 1))
    assert not residents_of(cache)


@pytest.mark.parametrize(
    ("sources", "blocks"),
    [
        ([], []),
        ([Slot(DEVICE, 0, 1)], [2, 3]),
        ([Slot(HOST, 0, 1)], [2]),
        ([Slot(DEVICE, 0, 1)], [16]),
        ([Slot(DEVICE, 0, 1)] * 2, [2, 2]),
    ],
)
def test_a_copy_inside_the_device_that_cannot_be_is_refused(
    cache: TieredCache, sources: list[Slot], blocks: list[int]
) -> None:
    with pytest.raises(CacheError):
        cache.load({0: DeviceCopy(sources)}, {0: blocks})
    assert not cache.take_commands()
    assert not cache.jobs_in_flight
