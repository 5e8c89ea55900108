"""A chunk never outlives its parents, in each tier and all colder ones together."""

import random

import pytest
from cache_kit import Setup, chunks, key, lookup, path_of, store
from cache_model import World

from longshore.boundary import FILE, HOST, Status, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Protection, TieredCache, TierSpec
from longshore.cache.index import Index
from longshore.cache.nodes import ROOT
from longshore.cache.pool import SlotPool
from longshore.errors import CacheError


def on(world: World, tier: str) -> list[str]:
    return sorted(path_of(each) for each, where in world.resident if where == tier)


def test_tails_go_before_heads() -> None:
    world = World(Setup(host=3)).stored("abc")
    for newcomer, left in (("x", ["a", "ab", "x"]), ("y", ["a", "x", "y"])):
        world.stored(newcomer)
        assert on(world, HOST) == left


def test_old_heads_go_as_soon_as_their_tails_have() -> None:
    world = World(Setup(host=3))
    for path in ("a", "ab", "abc"):
        world.stored(path)
    world.store("xyz", 0, False)
    assert on(world, HOST) == ["x", "xy", "xyz"]


def test_a_branch_keeps_the_trunk() -> None:
    world = World(Setup(host=4)).stored("ab", "ac")
    world.lookup("ac", 0, None)
    world.store("xy", 0, False)
    assert on(world, HOST) == ["a", "ac", "x", "xy"]


def test_backups_go_heads_first() -> None:
    world = World(Setup(host=4, file=4, backup="write_through"))
    world.store("abc", 0, False)
    world.end(world.on("device->host")[0])
    (backup,) = world.on("host->file")
    assert [item.key for item in backup.transfer.items] == chunks("abc")


def test_failed_backup_in_the_middle_takes_what_follows() -> None:
    world = World(Setup(host=4, file=4, backup="write_through"))
    world.store("abc", 0, False)
    world.end(world.on("device->host")[0])
    world.end(world.on("host->file")[0], Status.OK, Status.NO_SPACE, Status.OK)
    assert on(world, FILE) == ["a"]
    assert on(world, HOST) == ["a", "ab", "abc"]


def test_failed_offload_in_the_middle_takes_what_follows() -> None:
    world = World(Setup(host=4))
    world.store("abc", 0, False)
    world.end(world.on("device->host")[0], Status.OK, Status.IO_ERROR, Status.OK)
    assert on(world, HOST) == ["a"]
    assert world.cache.counters.lost[HOST] == 2


def test_a_corrupt_parent_takes_its_subtree() -> None:
    world = World(Setup(host=4, file=4, backup="write_through")).stored("ab", "ac")
    for path in ("ab", "ac"):
        world.discard(path, HOST)
    hold = world.loading("ab")
    world.end(world.on("file->host")[0], Status.CORRUPT, Status.OK)
    assert not world.resident
    world.end(world.on("host->device")[0])
    assert world.cache.progress(hold).outcome == (0, ())
    world.drain()


def test_children_survive_a_corrupt_parent_that_has_a_good_copy() -> None:
    world = World(Setup(host=4, file=4, backup="write_through")).stored("ab")
    world.discard("ab", HOST)
    world.loading("a")
    world.end(world.on("file->host")[0])
    world.end(world.on("host->device")[0], Status.CORRUPT)  # the host copy is bad, that in the file is not
    assert on(world, HOST) == []
    assert on(world, FILE) == ["a", "ab"]


def test_a_hold_on_the_tail_keeps_the_whole_path() -> None:
    world = World(Setup(host=3)).stored("abc")
    hold = world.lease("abc")
    world.store("xyz", 0, False)
    assert on(world, HOST) == ["a", "ab", "abc"]
    world.release(hold)
    world.store("xyz", 0, False)
    assert on(world, HOST) == ["x", "xy", "xyz"]


def test_a_hold_on_the_head_lets_the_tail_go() -> None:
    world = World(Setup(host=3)).stored("abc")
    world.lookup("a", 0, None)
    world.store("xyz", 0, False)
    assert on(world, HOST) == ["a", "x", "xy"]


def test_parent_stays_in_tier_of_child_or_a_colder_one() -> None:
    world = World(Setup(host=4, file=4, backup="write_through")).stored("ab")
    assert world.discard("a", FILE) == 0
    assert world.discard("a", HOST) == 1
    assert world.discard("ab", FILE) == 1  # the tail goes; the head must stay for the tail's host copy
    assert (on(world, HOST), on(world, FILE)) == (["ab"], ["a"])
    assert world.discard("a", FILE) == 0
    assert world.discard("ab", HOST) == 1
    assert world.discard("a", FILE) == 1


def test_keys_that_do_not_follow_one_another_are_refused() -> None:
    world = World(Setup(host=4)).stored("ab")
    for method, keys, args in (
        ("lookup", chunks("ab")[::-1], (0.0,)),
        ("store", chunks("ab")[::-1], ()),
        ("store", [key("x"), key("a")], ()),
        ("store", [key("x"), key("ab")], ({0: (0, 1)},)),
        # Where the search for what can be read does not come by, but that for what is known does.
        ("lookup", [key("a"), key("x"), key("y"), key("ab"), key("z")], (1.0,)),
    ):
        world.refused(CacheError, method, {0: GroupKeys(keys)}, *args)


def test_long_orphan_path_is_readable_once_its_head_arrives() -> None:
    keys = [position.to_bytes(32) for position in range(1, 2501)]
    cache = TieredCache([TierSpec(HOST, len(keys))], CacheSettings(max_writes=len(keys)))
    head, tail = store(cache, keys[:10], range(10)), store(cache, keys, range(10, len(keys)), first=10)
    for offload, found in ((tail, 0), (head, len(keys))):
        cache.apply_results([TransferResult(offload.job, (Status.OK,) * len(offload.positions))], 0.0)
        assert lookup(cache, keys, 0.0).num_chunks == found
    cache.check_integrity()


def test_keys_of_a_path_are_located_as_each_by_itself() -> None:
    path, other, unknown = ([bytes([kind, position]) * 16 for position in range(200)] for kind in range(3))
    branch, orphans = [*path[:90], *other[:80]], [*unknown[100:101], *other[100:]]
    cache = TieredCache([TierSpec(HOST, 500)], CacheSettings(max_writes=500))
    for keys, first in ((path, 0), (branch, 90), (orphans, 1)):
        offload = store(cache, keys, range(len(keys) - first), first=first)
        cache.apply_results([TransferResult(offload.job, (Status.OK,) * len(offload.positions))], 0.0)
    index, dice = cache._state.index, random.Random(1)
    assert len(index.orphans) == 1
    for keys in (
        path,
        path[60:],
        branch,
        orphans[1:],
        orphans,
        [*path[:120], *unknown],
        [*path[:95], *branch[95:]],
        [*path[:90], *path[91:]],
        path[::-1],
        dice.sample(path, 100),
        unknown,
        path[:5],
        [],
    ):
        assert index.locate(keys).tolist() == [index.get(each) for each in keys]


@pytest.mark.parametrize("wrong", ["x" * 32, bytearray(32), 7, None])
def test_key_that_is_not_bytes_is_refused_in_a_path(wrong: object) -> None:
    keys = [bytes([position]) * 32 for position in range(1, 101)]
    cache = TieredCache([TierSpec(HOST, 100)], CacheSettings(max_writes=100))
    offload = store(cache, keys, range(100))
    cache.apply_results([TransferResult(offload.job, (Status.OK,) * 100)], 0.0)
    keys[50] = bytearray(keys[50]) if isinstance(wrong, bytearray) else wrong  # type: ignore[call-overload]
    for protect in Protection:
        with pytest.raises(CacheError, match="expected a key"):
            cache.lookup({0: GroupKeys(keys)}, 0.0, protect=protect, independent=True)


def index_of(*tiers: int) -> Index:
    """An index over tiers with so many slots, all of them taken by nobody yet."""
    return Index([SlotPool(slots) for slots in tiers])


def test_batch_of_copies_is_refused_for_one_orphan_or_duplicate() -> None:
    index = index_of(4, 4)
    a, ab = index.link(ROOT, chunks("ab"), 0, [0, 1])
    (c,) = index.link(ROOT, chunks("c"), 0, [2])
    with pytest.raises(CacheError, match=f"chunk {key('ab').hex()[:12]} has a copy in tier 1 already, or no parent"):
        index.add_copies([c, ab], 1, [0, 1])
    with pytest.raises(CacheError, match=f"chunk {key('c').hex()[:12]} has a copy in tier 0 already"):
        index.add_copies([c], 0, [3])
    assert [index.coldest_tier(node) for node in (a, ab, c)] == [0, 0, 0]
    index.check_integrity()
    index.add_copies([a, c, ab], 1, [0, 1, 2])
    assert [index.coldest_tier(node) for node in (a, ab, c)] == [1, 1, 1]
    with pytest.raises(CacheError, match=f"chunk {key('ab').hex()[:12]} has a copy in tier 1 already"):
        index.add_copies([ab], 1, [3])
    index.check_integrity()


def test_reused_number_knows_nothing_of_its_former_chunk() -> None:
    index = index_of(4)
    a, ab = index.link(ROOT, chunks("ab"), 0, [0, 1])
    (ac,) = index.link(a, [key("ac")], 0, [2])
    assert index.drop_copy(ab, 0)
    (b,) = index.link(ROOT, [key("b")], 0, [1])
    assert (b, index.parent[b], list(index.children(b))) == (ab, ROOT, [])
    assert (list(index.children(a)), index.get(key("ab"))) == ([ac], ROOT)
    index.check_integrity()


def test_more_chunks_than_slots_are_refused() -> None:
    index = index_of(1)
    index.link(ROOT, [key("a")], 0, [0])
    with pytest.raises(CacheError, match="room for 1 chunks, one for each slot"):
        index.link(ROOT, [key("b")], 0, [0])


def test_the_longest_prefix_is_found_without_looking_at_each_chunk() -> None:
    looks = 0

    class Keys(list):  # type: ignore[type-arg]
        def __getitem__(self, at: object) -> object:
            nonlocal looks
            looks += 1
            return super().__getitem__(at)  # type: ignore[index]

    world = World(Setup(host=64, device_blocks=64))
    world.store("a" * 40, 0, False)
    world.settle_all()
    found = lookup(world.cache, Keys(chunks("a" * 60)), 0.0)
    assert found.num_chunks == 40
    assert looks < 30
    assert lookup(world.cache, chunks("a" * 60), 0.0, first=39).num_chunks == 1
    assert lookup(world.cache, chunks("a" * 60), 0.0, first=50).num_chunks == 0


def test_integrity_notices_a_child_that_lies_colder_than_its_parent() -> None:
    index = index_of(2, 2)
    a, _ = index.link(ROOT, chunks("ab"), 1, [0, 1])
    index.pools[0].node[0], index.pools[1].node[0] = a, ROOT
    index.slot[0][a], index.slot[1][a] = 0, -1
    with pytest.raises(CacheError, match="is in a colder tier than its parent"):
        index.check_integrity()
