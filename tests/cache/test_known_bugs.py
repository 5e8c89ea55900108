"""Bugs that systems before this one shipped, one test each; the numbers are those of the project's list of traps.

18 allocate(0) took all       21 shrank by counts     24 reset left work    27 one list twice     31 keys without scope
19 back, and never evicted    22 heads before tails   25 changed, then      28 leaked pins        32 keys by process
20 source for destination     23 suffix at the root      could not          29 sizes per rank     33 edges of an item
                                                      26 whose tier?        30 swallowed errors   34 one rank for all

29 stands in tests/test_config.py, 31 and 32 in tests/test_keys.py, of 34 the question to others in test_remote.py, the
rest here.
"""

from pathlib import Path
from typing import Any

import pytest
from cache_kit import LOAD, Setup, chunks, key, lookup, path_of, store
from cache_model import World
from object_state import state_of

from longshore.boundary import DEVICE, FILE, HOST, Slabs, Status, TransferResult
from longshore.cache import DropReason, GroupKeys
from longshore.cache.eviction_policies import LRU
from longshore.cache.pool import SlotPool
from longshore.cache.slab_pool import SlabPool
from longshore.errors import CacheError, CapacityError, JobError, LeaseError
from longshore.keys import MediaItem, chain

BOTH = Setup(host=4, file=8, backup="write_through")


def test_trap_8_submitted_copy_does_not_free_its_slot() -> None:
    world = World(Setup(host=1)).stored("a", before_eviction=True)
    hold = world.loading("a")
    world.release(hold)
    world.store("x", 0, False)
    assert world.where("x") == {}
    world.settle_all()
    world.store("x", 0, False)
    assert world.where("x") == {HOST: "filling"}


def test_trap_18_allocating_nothing_does_not_take_everything() -> None:
    pool = SlotPool(4)
    assert pool.allocate(0) == []
    assert pool.room() == 4


def test_trap_19_chunk_from_colder_tier_can_be_evicted_again() -> None:
    world = World(BOTH).stored("abcd", before_eviction=True)
    world.discard("abcd", HOST)
    hold = world.loading("abcd")
    world.settle_all()
    world.release(hold)
    assert world.cache.stats()[0].ready == 4
    world.store("wxyz", 0, True)
    assert world.where("wxyz") == {HOST: "filling"}


def test_trap_20_source_and_destination_are_never_swapped() -> None:
    world = World(Setup(host=4, file=8, backup="write_through", found=((5, key("x"), None),)))
    world.store("a", 0, False)
    (down,) = world.on("device->host")
    ((_, _, source, destination),) = down.transfer.items
    assert (source, destination.tier, destination.index) == (None, HOST, 0)
    world.end(down)
    (further,) = world.on("host->file")
    ((_, _, source, destination),) = further.transfer.items
    assert (source.tier, source.index, destination.tier, destination.index) == (HOST, 0, FILE, 0)
    world.loading("x")
    (up,), (home,) = world.on("file->host"), world.on("host->device")
    ((_, _, source, destination),) = up.transfer.items
    assert (source.tier, source.index, destination.tier, destination.index) == (FILE, 5, HOST, 1)
    ((_, _, source, destination),) = home.transfer.items
    assert (source.tier, source.index, destination) == (HOST, 1, None)


def test_trap_21_smaller_tier_recovers_no_slots_above_its_size() -> None:
    world = World(Setup(host=1, file=4))
    world.refused(CacheError, "adopt", FILE, ((0, key("a"), None), (5, key("b"), None)))


@pytest.mark.parametrize("heads_first", [False, True])
def test_trap_22_tails_go_before_heads_under_any_policy(heads_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the policy's order is the wrong one: what is before something cannot go, and is passed over."""
    if heads_first:
        for name in ("insert", "touch"):
            monkeypatch.setattr(LRU, name, with_heads_coldest(getattr(LRU, name)))
    world = World(Setup(host=3))
    for path, first in (("a", 0), ("ab", 1), ("abc", 2)):
        world.store(path, first, False)
        world.settle_all()
    world.store("xy", 0, False)
    assert sorted(path_of(each) for each, _ in world.resident) == ["a", "x", "xy"]


def with_heads_coldest(method: Any) -> Any:
    """A policy's method, which is told of a path head first."""
    return lambda self, nodes, **options: method(self, list(nodes)[::-1], **options)


def test_trap_23_loaded_suffix_keeps_its_parent_and_position() -> None:
    world = World(Setup(host=8, file=8, backup="write_through", per_chunk=2)).stored("ab", "abcd", before_eviction=True)
    world.discard("abcd", HOST)
    world.loading("ab")
    world.settle_all()
    hold = world.lookup("abcd", 1, None)
    world.load(hold, 3, 1, 0)
    warm_part, cold_part = (job.transfer for job in world.on("host->device"))
    assert [item.parent for item in warm_part.items] == [key("a")]
    assert (warm_part.sections[0].first_block, len(warm_part.sections[0].blocks)) == (3, 1)
    assert [item.parent for item in cold_part.items] == [key("ab"), key("abc")]
    assert (cold_part.sections[0].first_block, len(cold_part.sections[0].blocks)) == (4, 4)


def test_trap_24_pending_work_does_not_reach_a_new_generation() -> None:
    world = World(BOTH)
    world.store("ab", 0, False)
    world.reset()
    world.settle_all()
    assert not world.resident
    assert [stats.used for stats in world.cache.stats()] == [0, 0]


@pytest.mark.parametrize("status", [Status.OK, Status.IO_ERROR])
def test_trap_24_late_results_leave_new_generation_keys_alone(status: Status) -> None:
    world = World(BOTH)
    world.store("ab", 0, False)
    world.reset()
    world.store("ab", 0, False)
    old, new = world.on("device->host")
    world.end(old, status)
    assert (world.where("ab"), world.lookup("ab", 0, None)) == ({HOST: "filling"}, None)
    world.end(new)
    assert world.where("ab") == {HOST: "ready", FILE: "filling"}  # of which generation, the world has checked


def test_trap_25_impossible_is_refused_before_anything_changes() -> None:
    world = World(Setup(host=1, per_chunk=2)).stored("a", before_eviction=True)
    hold = world.lookup("a", 0, None)
    world.refused(CacheError, "load", hold, {0: (0, 1, 2)})
    world.refused(CacheError, "store", {0: GroupKeys(chunks("xy"))}, {0: (0, 1, 2)})
    world.refused(JobError, "apply_results", (TransferResult(99, (Status.OK,)),), 0.0)


@pytest.mark.parametrize("pool", [SlotPool(4), SlabPool(Slabs(6, (2, 3), 2))], ids=["one size", "two sizes"])
def test_trap_25_an_allocation_that_fails_takes_nothing(pool: SlotPool) -> None:
    pool.allocate(1, 0)
    before = state_of(pool)
    with pytest.raises(CapacityError):
        pool.allocate(6, 0)
    assert state_of(pool) == before


def test_trap_26_device_block_is_no_slot_copies_name_tiers() -> None:
    world = World(BOTH).stored("ab", before_eviction=True)
    for block in list(world.free_blocks[:20]):
        world.free_blocks.remove(block)
    world.loading("ab")
    (transfer,) = (job.transfer for job in world.on("host->device"))
    assert min(transfer.sections[0].blocks) >= 4 > max(i.source.index for i in transfer.items if i.source)
    assert {r.slot.tier for r in world.resident.values() if r.key == key("a")} == {HOST, FILE}


def test_trap_27_no_two_books_are_the_same_list() -> None:
    world = World(Setup(host=1, file=1))
    world.lookup("a", 0, None)
    world.store("abc", 1, False)
    drops = world.cache.counters.drops
    assert (drops[HOST][DropReason.NO_PARENT], drops[FILE][DropReason.NO_PARENT]) == (1, 0)
    assert world.setup.build().counters.drops[HOST].total() == 0
    offloaded_twice = World(BOTH).stored("a", "b", before_eviction=True)
    slots = {(r.slot.tier, r.slot.index) for r in offloaded_twice.resident.values()}
    assert len(slots) == 4


@pytest.mark.parametrize("moment", ["before onboarding", "in a prefetch", "during", "after", "after its time"])
def test_trap_28_no_pin_leaks_whenever_a_request_goes_away(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was read for it alone is called off."""
    world = World(BOTH).stored("abc", before_eviction=True)
    cancelled: set[int] = set()
    monkeypatch.setattr(world, "check_cancel", cancelled.add)
    world.discard("abc", HOST)
    hold = world.lease("abc", "request")
    if moment == "in a prefetch":
        world.prefetch(hold)
    elif moment != "before onboarding":
        world.load(hold, 3, 0, 0)
    if moment == "after":
        world.settle_all()
    if moment == "after its time":
        world.tick(LOAD)
        assert world.cache.progress(hold).outcome is not None
    for_it_alone = {
        number
        for number, job in world.jobs.items()
        if moment == "in a prefetch" or (moment == "during" and job.transfer.route.destination == DEVICE)
    }
    assert bool(for_it_alone) == (moment in {"in a prefetch", "during"})
    world.release_request("request")
    assert for_it_alone <= cancelled
    world.drain()
    world.evict_all()


def test_trap_28_a_store_that_failed_is_not_visible() -> None:
    world = World(BOTH)
    world.store("ab", 0, False)
    world.end(world.on("device->host")[0], Status.IO_ERROR)
    assert world.lookup("ab", 0, None) is None
    assert world.lookup_each(key("a")) == "absent"
    assert world.cache.counters.drops[HOST][DropReason.WRITE_FAILED] == 2
    world.drain()


def test_trap_30_errors_are_typed_and_name_expected_and_actual() -> None:
    cache = BOTH.build()
    with pytest.raises(LeaseError, match="expected a lease of this cache that was not released, got None"):
        cache.release(None)  # type: ignore[arg-type]
    with pytest.raises(CacheError, match=r"start: expected a position in \[0, 1\], got 2"):
        lookup(cache, [key("a")], 0.0, first=2)
    with pytest.raises(CacheError, match=r"expected a tier of \['host', 'file'\], got 'attic'"):
        cache.discard([key("a")], "attic")
    with pytest.raises(CacheError, match=r"expected device blocks in \[0, 48\), got 48 to 48"):
        store(cache, [key("a")], (48,))
    with pytest.raises(CacheError, match=r"expected device blocks in \[0, 48\), got \[1180591620717411303424\]"):
        store(cache, [key("a")], (2**70,))
    with pytest.raises(CacheError, match=r"expected distinct device blocks"):
        store(cache, [key("a"), key("b")], bytes(2))  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="expected 1 blocks of 1 chunks, got 2"):
        store(cache, [key("a")], (0, 1))


def test_trap_33_item_belongs_to_chunks_of_its_tokens() -> None:
    def first_that_differs(start: int, end: int) -> int:
        """The first chunk whose key tells two images at `[start, end)` apart."""
        cat, dog = (chain(bytes(32), [7] * 12, 4, [MediaItem(start, end, image)]) for image in (b"cat", b"dog"))
        return [one != other for one, other in zip(cat, dog, strict=True)].index(True)

    assert first_that_differs(3, 4) == 0  # its only token is the last of chunk 0
    assert first_that_differs(3, 5) == 0
    assert first_that_differs(4, 8) == 1  # it starts where chunk 0 ends
    text = chain(bytes(32), [7] * 4, 4)
    assert chain(bytes(32), [7] * 4, 4, [MediaItem(4, 8, b"cat")]) == text


@pytest.mark.parametrize("said", [(Status.OK, Status.IO_ERROR), (Status.IO_ERROR, Status.OK)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_trap_34_chunk_on_one_rank_is_not_on_others(order: tuple[int, int], said: tuple[Status, Status]) -> None:
    """Whichever rank has failed, and whichever speaks last."""
    world = World(Setup(host=2, ranks=2))
    world.store("a", 0, False)
    (job,) = world.on(f"{DEVICE}->{HOST}")
    for rank, now in zip(order, ("in_flight", "absent"), strict=True):
        world.deliver(job, rank, [said[rank]])
        world.apply(world.results[:])
        assert world.lookup_each(key("a")) == now


@pytest.mark.parametrize("number", range(18, 35))
def test_each_control_plane_trap_has_a_numbered_test(number: int) -> None:
    tests = Path(__file__).parents[1]
    files = (tests / "cache" / "test_known_bugs.py", tests / "test_config.py", tests / "test_keys.py")
    assert any(f"def test_trap_{number}_" in path.read_text() for path in files)
