"""Tiers that outlive the process are told which slots hold nothing any more."""

from __future__ import annotations

from cache_kit import store

from longshore.boundary import FILE, HOST, Cancel, DeleteRecords, Reset, Status, StoredChunk, Transfer, TransferResult
from longshore.cache import CacheSettings, TieredCache, TierSpec, WritePolicy
from residents import residents_of


def key(number: int) -> bytes:
    return bytes([number]) * 32


def cache_with(files: int, found: int, *, outlives: bool = True) -> TieredCache:
    """Host memory for four chunks, a file tier that was found with chunks of which each follows the one before."""
    settings = CacheSettings(blocks_per_chunk=1, backup=WritePolicy("write_through"), admission=False)
    cache = TieredCache([TierSpec(HOST, 4), TierSpec(FILE, files, outlives=outlives)], settings)
    parents = [None, *map(key, range(found - 1))]
    cache.adopt(FILE, [StoredChunk(slot, key(slot), parent) for slot, parent in enumerate(parents[:found])])
    return cache


def carry_out(cache: TieredCache) -> list[Transfer | DeleteRecords]:
    """All that is ordered until nothing more is; every transfer goes well."""
    seen: list[Transfer | DeleteRecords] = []
    while commands := cache.take_commands():
        for command in commands:
            assert isinstance(command, Transfer | DeleteRecords)
            seen.append(command)
            if isinstance(command, Transfer):
                statuses = (Status.OK,) * len(command.items)
                cache.apply_results([TransferResult(command.job, statuses)], 0.0)
        cache.end_step()
    return seen


def test_what_is_discarded_is_told_once() -> None:
    cache = cache_with(4, 4)
    assert cache.discard([key(3)], FILE) == 1
    assert cache.take_commands() == [DeleteRecords(FILE, (3,))]
    assert cache.take_commands() == []


def test_what_nobody_would_find_again_is_not_told() -> None:
    cache = cache_with(4, 4, outlives=False)
    assert cache.discard([key(3)], FILE) == 1
    assert cache.take_commands() == []


def test_reused_slot_is_reported_by_its_new_record() -> None:
    cache = cache_with(2, 2)
    keys = [bytes([9, at]) * 16 for at in range(2)]
    store(cache, keys, [0, 1])
    seen = carry_out(cache)
    (write,) = [each for each in seen if isinstance(each, Transfer) and each.route.destination == FILE]
    assert {item.destination.index for item in write.items if item.destination} == {0, 1}
    assert [each for each in seen if isinstance(each, DeleteRecords)] == []


def test_evicted_record_is_discarded_before_its_slot_is_rewritten() -> None:
    cache = cache_with(6, 6)
    listed = {slot: key(slot) for slot in range(6)}
    for prompt in range(20):
        store(cache, [bytes([20 + prompt, at]) * 16 for at in range(1 + prompt % 3)], list(range(1 + prompt % 3)))
        for command in carry_out(cache):
            if isinstance(command, DeleteRecords):
                for slot in command.slots:
                    listed.pop(slot, None)
            elif command.route.destination == FILE:
                listed.update({item.destination.index: item.key for item in command.items if item.destination})
        residents = {each.slot.index: each.key for each in residents_of(cache) if each.slot.tier == FILE}
        assert listed == residents, "what the tier lists is what the cache has there"
    assert not {key(slot) for slot in range(6)} & set(listed.values()), "all that was there at first has left"


def test_a_reset_says_it_all() -> None:
    cache = cache_with(4, 4)
    cache.discard([key(3)], FILE)
    cache.reset()
    assert [command for command in cache.take_commands() if not isinstance(command, Cancel)] == [Reset(1)]
