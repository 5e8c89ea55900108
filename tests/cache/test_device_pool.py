"""A device that the engine hands over: references, eviction by way of the tiers, sleep; each call is all or nothing."""

from __future__ import annotations

from typing import Any

import pytest
from cache_kit import IMAGE_BYTES, chunks, key, lookup, path_of
from object_state import state_of

from longshore.boundary import DEVICE, FILE, HOST, Status, Transfer, TransferResult
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    DevicePool,
    EventKind,
    GroupKeys,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.cache.eviction import LRU
from longshore.errors import CacheError, CapacityError


class Device:
    """A pool over a host tier, and a file tier if there is one; jobs end when the test says so."""

    def __init__(self, blocks: int, host: int = 8, file: int = 0, **more: Any) -> None:
        tiers = [TierSpec(HOST, host, IMAGE_BYTES, LRU)] + ([TierSpec(FILE, file, IMAGE_BYTES, LRU)] if file else [])
        self.cache = TieredCache(tiers, CacheSettings(device_blocks=blocks, **more))
        self.pool = DevicePool(self.cache, blocks)
        self.running: dict[int, Transfer] = {}
        self.now = 0.0

    def take(self) -> None:
        self.running.update({each.job: each for each in self.cache.take() if isinstance(each, Transfer)})

    def end(self, job: int, status: Status = Status.OK) -> None:
        statuses = (status,) * len(self.running.pop(job).items)
        self.cache.apply([TransferResult(job, statuses)], self.now)
        self.take()

    def settle(self) -> None:
        self.take()
        while ready := [job for job, each in self.running.items() if not set(each.after) & set(self.running)]:
            self.end(min(ready))

    def serve(self, of: str, *, keep: bool = False) -> tuple[list[int], int]:
        """A request that takes what the device has, then what is below; its blocks, and how many came from below."""
        keys = chunks(of)
        found = self.pool.lookup(keys, self.now)
        mine = self.pool.allocate(len(keys) - len(found.blocks))
        if found.below.lease is not None:
            self.pool.load(found.below.lease, mine[: found.below.chunks])
            self.settle()
            outcome = self.cache.progress(found.below.lease).outcome
            assert outcome.chunks == found.below.chunks
            self.cache.release(found.below.lease)
        blocks = [*found.blocks, *mine]
        self.pool.store(GroupKeys(keys), blocks)
        self.settle()
        if not keep:
            self.pool.release(blocks)
        self.check()
        return blocks, found.below.chunks

    def on_device(self, of: str) -> bool:
        return self.pool.find([key(of)]) != [None]

    def where(self, of: str) -> set[str]:
        below = {each.slot.tier for each in self.cache.residents() if each.key == key(of)}
        return below | ({"device"} if self.on_device(of) else set())

    def check(self) -> None:
        self.pool.check_integrity()
        self.cache.check_integrity()


def test_a_hundred_branches_over_a_shared_prefix() -> None:
    device = Device(102, host=200)
    prefix, _ = device.serve("ab", keep=True)
    branches = []
    for branch in range(100):
        keys = [*chunks("ab"), key(f"ab{branch:03}")]
        found = device.pool.lookup(keys, 0.0)
        assert found.blocks == tuple(prefix)
        (own,) = device.pool.allocate(1)
        device.pool.store(GroupKeys(keys), [*prefix, own])
        branches.append([*prefix, own])
    device.settle()
    device.pool.release(prefix)
    assert device.pool.stats().references == 300
    with pytest.raises(CapacityError):
        device.pool.allocate(1)
    for branch in branches[:50]:
        device.pool.release(branch)
    stats = device.pool.stats()
    assert (stats.references, stats.idle, stats.used) == (50 + 50 + 50, 50, 52), "50 to each block of the prefix"
    assert len(device.pool.allocate(50)) == 50
    with pytest.raises(CapacityError):
        device.pool.allocate(1)
    device.check()


def test_five_users_of_one_block_take_five_releases() -> None:
    device = Device(2)
    (block, *_), _ = device.serve("a", keep=True)
    for _ in range(4):
        assert device.pool.lookup(chunks("a"), 0.0).blocks == (block,)
    for users in (4, 3, 2, 1):
        device.pool.release([block])
        assert device.pool.stats()[2:4] == (1, 0), f"{users} left"
    device.pool.release([block])
    assert device.pool.stats()[2:4] == (0, 1)
    with pytest.raises(CacheError, match="has 0 references, not 1"):
        device.pool.release([block])


def test_trap_18_allocating_nothing_gives_nothing() -> None:
    device = Device(4)
    assert device.pool.allocate(0) == []
    assert device.pool.stats().free == 4


@pytest.mark.parametrize(
    ("call", "args"),
    [
        ("allocate", (-1,)),
        ("allocate", (4,)),
        ("release", ([3],)),
        ("release", ([-1],)),
        ("release", ([4],)),
        ("release", ([0, 0],)),
        ("release", ([0, 3],)),
        ("hold", ([3],)),
        ("hold", ([7],)),
        ("hold", (["a"],)),
        ("store", (GroupKeys(chunks("ab")), [0, 3])),
        ("store", (GroupKeys(chunks("x")), [1])),
        ("store", (GroupKeys(chunks("a")), [0, 2])),
        ("copy", ([0], [1])),
        ("copy", ([3], [2])),
        ("sleep", ()),
    ],
)
def test_what_cannot_be_done_is_a_typed_error_and_changes_nothing(call: str, args: tuple[Any, ...]) -> None:
    device = Device(4)
    device.serve("ab", keep=True)
    assert device.pool.allocate(1) == [2]
    before = state_of(device.pool)
    with pytest.raises(CacheError):
        getattr(device.pool, call)(*args)
    assert state_of(device.pool) == before


def test_a_pool_has_no_less_than_no_blocks() -> None:
    with pytest.raises(CacheError, match="zero or more device blocks, got -1"):
        DevicePool(TieredCache([TierSpec(HOST, 1, 1)]), -1)


def test_a_hold_cannot_be_onboarded_into_blocks_that_others_find() -> None:
    device = Device(3)
    blocks, _ = device.serve("ab", keep=True)
    hold = lookup(device.cache, chunks("a"), 0.0).lease
    for bad in (blocks[0], 2):
        with pytest.raises(CacheError):
            device.pool.load(hold, [bad])
    device.pool.load(hold, device.pool.allocate(1))


def test_a_block_that_is_still_being_filled_is_not_found_on_the_device() -> None:
    device = Device(4)
    device.serve("ab")
    device.serve("wxyz")
    found = device.pool.lookup(chunks("ab"), 0.0)
    blocks = device.pool.allocate(2)
    assert found.below.lease is not None
    device.pool.load(found.below.lease, blocks)
    device.take()
    before = state_of(device.pool)
    with pytest.raises(CacheError, match=f"device block {blocks[0]} cannot be stored"):
        device.pool.store(GroupKeys(chunks("ab")), blocks)
    assert state_of(device.pool) == before
    assert device.pool.lookup(chunks("ab"), 0.0).blocks == ()
    device.settle()
    device.pool.store(GroupKeys(chunks("ab")), blocks)
    assert device.pool.lookup(chunks("ab"), 0.0).blocks == tuple(blocks)
    copy = device.pool.allocate(1)
    device.pool.copy(blocks[:1], copy, tokens=1)
    with pytest.raises(CacheError, match="cannot be stored"):
        device.pool.store(GroupKeys(chunks("q")), copy)


def test_a_block_that_a_job_reads_is_not_handed_out_when_its_request_goes() -> None:
    device = Device(1)
    blocks = device.pool.allocate(1)
    device.pool.store(GroupKeys(chunks("a")), blocks)
    device.take()
    device.pool.release(blocks)
    with pytest.raises(CapacityError):
        device.pool.allocate(1)
    device.pool.reset()
    assert device.pool.stats()[1:5] == (0, 0, 0, 1)
    with pytest.raises(CapacityError):
        device.pool.allocate(1)
    device.settle()
    assert device.pool.allocate(1) == [0]


def test_trap_19_what_came_back_from_below_can_be_evicted_again() -> None:
    device = Device(2)
    device.serve("ab")
    device.serve("xy")
    assert device.where("ab") == {HOST}
    assert device.serve("ab")[1] == 2
    assert device.pool.stats().idle == 2
    assert len(device.pool.allocate(2)) == 2


def test_tails_leave_the_device_before_heads() -> None:
    device = Device(4)
    device.serve("abcd")
    device.pool.allocate(1)
    assert [device.on_device("abcd"[: n + 1]) for n in range(4)] == [True, True, True, False]
    assert device.pool.lookup(chunks("abcd"), 0.0).below.chunks == 1, "the tail is below"


def test_what_was_used_last_stays_longest() -> None:
    device = Device(3)
    for prompt in "abc":
        device.serve(prompt)
    device.serve("a")
    device.pool.allocate(1)
    assert [device.on_device(prompt) for prompt in "abc"] == [True, False, True]


def test_with_write_back_what_leaves_the_device_is_offloaded_first_heads_before_tails() -> None:
    device = Device(3, offload=WritePolicy.BACK)
    device.serve("abc")
    assert device.where("abc") == {"device"}
    with pytest.raises(CapacityError, match="cannot allocate 1 blocks: 0 of 3 are free"):
        device.pool.allocate(1)
    assert device.pool.make_way(1) == 0
    device.take()
    (job,) = device.running.values()
    assert [item.key for item in job.items] == chunks("abc")
    assert (device.where("abc"), device.where("ab")) == ({HOST}, {HOST, "device"})
    device.settle()
    assert len(device.pool.allocate(1)) == 1
    assert device.pool.make_way(2) == 2, "the others have copies already"
    assert not device.running
    device.check()


def test_what_no_tier_takes_makes_way_all_the_same() -> None:
    device = Device(2, host=0)
    device.serve("ab")
    with pytest.raises(CapacityError):
        device.pool.allocate(2)
    assert device.pool.make_way(2) == 2
    assert device.where("ab") == set()


def test_a_write_that_fails_frees_the_block_when_it_has_ended() -> None:
    device = Device(1, offload=WritePolicy.BACK)
    device.serve("a")
    device.pool.make_way(1)
    device.take()
    (job,) = device.running
    device.end(job, Status.CANCELLED)
    assert device.pool.allocate(1) == [0]
    assert device.where("a") == set()


def test_device_host_file_host_device_gone() -> None:
    device = Device(1, host=1, file=1, backup=WritePolicy.THROUGH)
    device.serve("a")
    assert device.where("a") == {"device", HOST, FILE}
    device.pool.release(device.pool.allocate(1))
    assert device.where("a") == {HOST, FILE}
    device.cache.discard(chunks("a"), HOST)
    assert device.where("a") == {FILE}
    assert device.serve("a")[1] == 1
    assert device.where("a") == {"device", HOST, FILE}
    for tier in (HOST, FILE):
        assert device.cache.discard(chunks("a"), tier) == 1
    assert device.where("a") == {"device"}
    assert device.pool.lookup(chunks("a"), 0.0).blocks == (0,)
    device.pool.release([0])
    device.pool.reset()
    device.settle()
    assert device.where("a") == set()
    assert device.pool.stats().free == 1


def test_groups_share_the_blocks_of_one_pool() -> None:
    device = Device(4)
    full, window = device.pool.allocate(2), device.pool.allocate(1)
    device.pool.store(GroupKeys(chunks("ab")), full, group=0)
    device.pool.store(GroupKeys(chunks("w")), window, group=1)
    assert set(full).isdisjoint(window)
    assert device.pool.find([key("a"), key("w"), key("x")]) == [(full[0],), (window[0],), None]
    with pytest.raises(CacheError, match="another chunk"):
        device.pool.store(GroupKeys(chunks("v")), window, group=0)


@pytest.mark.parametrize("clear", [False, True])
def test_sleep_and_wake_with_transfers_in_flight_both_ways(clear: bool) -> None:
    device = Device(4)
    device.serve("ab")
    device.pool.make_way(4)
    device.pool.reset() if clear else None
    device.serve("ab")
    found = device.pool.lookup(chunks("xy"), 0.0)
    blocks = device.pool.allocate(2)
    device.pool.store(GroupKeys(chunks("xy")), blocks)
    device.take()
    device.pool.release(blocks)
    assert found.blocks == ()
    assert not device.pool.sleep(), "it is being read"
    assert device.on_device("ab"), "nothing is forgotten yet"
    for job in list(device.running):
        device.end(job, Status.CANCELLED)
    assert device.pool.sleep()
    assert device.pool.stats()[1:] == (4, 0, 0, 0, 0)
    with pytest.raises(CacheError, match="the device is asleep"):
        device.pool.store(GroupKeys(chunks("a")), device.pool.allocate(1))
    device.pool.wake()
    if clear:
        device.pool.reset()
        assert device.where("ab") == set()
    else:
        assert device.where("ab") == {HOST}
        assert device.pool.lookup(chunks("ab"), 0.0).below.chunks == 2


def test_chunks_of_several_blocks_go_as_a_whole() -> None:
    device = Device(6, blocks_per_chunk=2)
    blocks = device.pool.allocate(4)
    device.pool.store(GroupKeys(chunks("ab")), blocks)
    device.settle()
    assert device.pool.lookup(chunks("abc"), 0.0).blocks == tuple(blocks)
    device.pool.release(blocks)
    device.pool.release(blocks[1:])
    assert device.pool.stats().idle == 2, "of the first chunk one block is still used"
    assert len(device.pool.allocate(3)) == 3
    assert (device.on_device("a"), device.on_device("ab")) == (True, False)
    device.check()


def test_a_chunk_that_finds_no_room_below_is_dropped_once_by_a_call() -> None:
    device = Device(8, host=0, offload=WritePolicy.BACK)
    device.serve("abcdefgh")
    assert device.pool.make_way(8) == 8
    assert device.cache.counters.drops[HOST].total() == 8
    device.check()


def test_a_block_that_is_copied_often_remembers_only_what_is_in_flight() -> None:
    device = Device(2)
    (source,) = device.pool.allocate(1)
    for _ in range(20):
        blocks = device.pool.allocate(1)
        device.pool.copy([source], blocks)
        device.settle()
        device.pool.release(blocks)
    assert len(device.pool._jobs[source]) == 1


def test_no_blocks_are_handed_out_while_their_memory_is_away() -> None:
    device = Device(2)
    assert device.pool.sleep()
    with pytest.raises(CacheError, match="the device is asleep"):
        device.pool.allocate(1)
    assert device.pool.sleep()
    device.pool.wake()
    assert len(device.pool.allocate(2)) == 2


def test_what_comes_to_the_device_and_leaves_it_is_among_the_events() -> None:
    device = Device(2, events=100)
    device.serve("ab")
    device.serve("x")  # for which `ab`, the tail, makes way

    def heard() -> list[tuple[str, str, str, str]]:
        changes = (EventKind.STORED, EventKind.MOVED, EventKind.REMOVED)
        events = [each for each in device.cache.events() if each.kind in changes]
        return [(e.kind.value, path_of(e.key or b""), e.tier, e.source or e.cause) for e in events]

    assert heard() == [
        ("stored", "a", "device", ""),
        ("stored", "ab", "device", ""),
        ("stored", "a", HOST, ""),
        ("stored", "ab", HOST, ""),
        ("removed", "ab", "device", "evicted"),
        ("stored", "x", "device", ""),
        ("stored", "x", HOST, ""),
    ]
    device.serve("ab")
    assert heard() == [("removed", "x", "device", "evicted"), ("moved", "ab", "device", HOST)]
    assert device.pool.sleep()
    assert heard() == [("removed", "a", "device", "asleep"), ("removed", "ab", "device", "asleep")]


def test_what_comes_to_the_device_is_told_with_what_it_needs_to_be_reached() -> None:
    groups = (CacheGroup(block_size=4), CacheGroup(block_size=4, window=6))
    device = Device(6, events=100, groups=groups)
    paths = chunks("abc"), chunks("xyz", 1)
    for group, keys in enumerate(paths):
        device.pool.store(GroupKeys(keys), device.pool.allocate(3), group=group)
    came = {each.key: each.parent for each in device.cache.events() if each.tier == DEVICE}
    (a, ab, abc), alone = paths
    assert came == {a: None, ab: a, abc: ab} | dict.fromkeys(alone)


@pytest.mark.parametrize("wrong", [b"", None])
def test_what_cannot_be_a_key_is_no_event(wrong: Any) -> None:
    device = Device(1, events=100)
    with pytest.raises(CacheError, match="expected a key as a digest"):
        device.pool.store(GroupKeys([wrong]), device.pool.allocate(1))
    assert device.cache.events() == []
