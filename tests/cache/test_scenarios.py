"""Small stories that must come out right."""

from __future__ import annotations

from cache_model import World
from cache_setup import IMAGE_BYTES, Setup, chunks, key

from longshore.boundary import FILE, HOST, Status, TransferResult
from longshore.cache import Hold, TieredCache, TierSpec


def stored(paths: list[list[bytes]], slots: int) -> TieredCache:
    """A cache with one tier that has these paths."""
    cache = TieredCache([TierSpec(HOST, slots, IMAGE_BYTES)])
    for path in paths:
        offload = cache.offer(path)
        assert offload.job is not None
        cache.apply([TransferResult(offload.job, (Status.OK,) * len(offload.slots))], 0.0)
    return cache


def evictable(cache: TieredCache, paths: list[list[bytes]]) -> int:
    """How many copies go when all of these paths are discarded."""
    return sum(cache.discard(path, HOST) for path in paths)


def test_a_hundred_branches_over_a_shared_prefix_fifty_released() -> None:
    trunk = chunks("abc")
    branches = [[*trunk, b"branch" + bytes([i])] for i in range(100)]
    cache = stored(branches, 200)
    holds = [cache.match(branch, 0.0).hold for branch in branches]
    for hold in holds[:50]:
        assert hold is not None
        cache.release(hold)
    assert cache.held == 50
    cache.check_integrity()
    assert evictable(cache, branches) == 50
    assert all(cache.match(branch, 0.0).length == 4 for branch in branches[50:])


def test_five_users_of_one_block() -> None:
    cache = stored([[key("a")]], 1)
    holds = [cache.match([key("a")], 0.0).hold for _ in range(5)]
    for users_left, hold in zip((5, 4, 3, 2, 1), holds, strict=True):
        assert cache.held == users_left
        assert evictable(cache, [[key("a")]]) == 0
        assert hold is not None
        cache.release(hold)
    assert cache.held == 0
    assert evictable(cache, [[key("a")]]) == 1


def test_down_to_the_file_up_again_and_gone() -> None:
    world = World(Setup(host=1, file=1, backup="write_through"))
    world.commit("a", 0, False)
    assert world.where("a") == {HOST: "filling"}
    world.end(world.on("device->host")[0])
    assert world.where("a") == {HOST: "ready", FILE: "filling"}
    world.end(world.on("host->file")[0])
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    assert world.discard("a", HOST) == 1
    assert world.where("a") == {FILE: "ready"}
    hold = world.match("a", 0, None)
    assert isinstance(hold, Hold)
    world.onboard(hold, 1, 0, 0)
    assert world.where("a") == {HOST: "filling", FILE: "ready"}
    world.end(world.on("file->host")[0])
    assert world.where("a") == {HOST: "ready", FILE: "ready"}
    world.end(world.on("host->device")[0])
    assert world.cache.outcome(hold) == (1, (FILE,))
    assert world.discard("a", FILE) == 1
    assert world.where("a") == {HOST: "ready"}
    assert world.discard("a", HOST) == 0  # it is held
    world.release(hold)
    assert world.discard("a", HOST) == 1
    assert world.where("a") == {}
    world.drain()


def test_what_is_held_has_an_address_for_each_chunk() -> None:
    cache = stored([chunks("abcd")], 8)
    hold = cache.match(chunks("abcde"), 0.0, start=1).hold
    assert hold is not None
    at = {r.key: r.slot for r in cache.residents()}
    assert cache.slots(hold) == [at[each] for each in chunks("abcd")[1:]]


def test_held_chunks_in_several_tiers_have_the_address_of_the_warmest() -> None:
    world = World(Setup(host=4, file=4, backup="write_through"))
    world.commit("abcd", 0, False)
    world.settle_all()
    world.discard("abcd", HOST)
    warm = world.match("ab", 0, None)
    assert warm is not None
    world.onboard(warm, 2, 0, 0)
    world.settle_all()
    hold = world.match("abcd", 0, None)
    assert hold is not None
    assert [slot.tier for slot in world.cache.slots(hold)] == [HOST, HOST, FILE, FILE]
