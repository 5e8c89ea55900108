"""Groups with images of different sizes in one tier: bytes go to whoever needs them, and each image keeps its own."""

from __future__ import annotations

import numpy as np
import pytest
from cache_kit import key, lookup, store
from hypothesis import given
from hypothesis import strategies as st
from object_state import state_of

from depth import examples
from longshore.boundary import DEVICE, FILE, HOST, Cancel, Reset, Slabs, Status, Transfer, TransferResult
from longshore.cache import (
    CacheSettings,
    DropReason,
    GroupKeys,
    Lease,
    Retention,
    ScheduledStore,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.cache.eviction_policies import ARC, LRU
from longshore.cache.transfers import TierSlots
from longshore.errors import CacheError, CapacityError
from residents import residents_of

SMALL, LARGE = 0, 1
SIZES = (3, 12)
"""Bytes of an image: of groups 0 and 1, that is of pools 0 and 1."""


def path(group: int, of: str) -> list[bytes]:
    """The keys of a prompt in one group: no two groups have a key in common."""
    return [key(f"{'SL'[group]}{of[: i + 1]}") for i in range(len(of))]


class Bytes:
    """Tiers as plain bytes: each mover copies tags, and a read must find every byte of its image as it was written."""

    def __init__(
        self, host: int, file: int = 0, slab: int = 12, sizes: tuple[int, ...] = SIZES, **more: object
    ) -> None:
        geometry = {HOST: Slabs(slab, sizes, host)} | ({FILE: Slabs(slab, sizes, file)} if file else {})
        policy = more.pop("policy", LRU)
        tiers = [TierSpec(name, slabs, policy=policy) for name, slabs in geometry.items()]  # type: ignore[arg-type]
        self.cache = TieredCache(tiers, CacheSettings(size_classes=(SMALL, LARGE), **more))  # type: ignore[arg-type]
        self.slabs = geometry
        self.memory = {name: np.zeros(slabs.nbytes, np.int64) for name, slabs in geometry.items()}
        self.tags: dict[bytes, int] = {}
        self.running: dict[int, Transfer] = {}
        self.checked = 0

    def store(self, group: int, of: str, **more: object) -> ScheduledStore:
        keys = path(group, of)
        offload = store(self.cache, keys, range(len(keys)), group=group, **more)  # type: ignore[arg-type]
        self.take()
        return offload

    def lookup(self, group: int, of: str) -> tuple[int, Lease | None]:
        found = lookup(self.cache, path(group, of), 0.0, group=group)
        return found.num_chunks, found.lease

    def take(self) -> None:
        for command in self.cache.take_commands():
            if isinstance(command, Transfer):
                self.running[command.job] = command
            assert isinstance(command, Transfer | Cancel | Reset)
        self.check()

    def end(self, job: int, status: Status = Status.OK) -> None:
        """One job's bytes move now, those of failed ones become garbage."""
        transfer = self.running.pop(job)
        for item in transfer.items:
            tag = self.tags.setdefault(item.key, len(self.tags) + 1)
            if item.source is not None:
                found = self.bytes_of(item.source)
                if status is Status.OK:
                    assert (found == tag).all(), f"job {job} reads {found} for {tag}"
                    self.checked += 1
            if item.destination is not None:
                self.bytes_of(item.destination)[:] = tag if status is Status.OK else -1
        statuses = (status,) * len(transfer.items)
        self.cache.apply_results([TransferResult(job, statuses)], 0.0)
        self.take()

    def settle(self) -> None:
        while ready := [job for job, each in self.running.items() if not set(each.after) & set(self.running)]:
            self.end(min(ready))

    def bytes_of(self, slot: object) -> np.ndarray:
        slabs = self.slabs[slot.tier]  # type: ignore[attr-defined]
        at = slabs.offset(slot.size_class, slot.index)  # type: ignore[attr-defined]
        return self.memory[slot.tier][at : at + slabs.image_bytes[slot.size_class]]  # type: ignore[attr-defined]

    def check(self) -> None:
        """Capacity is a bound, what is in flight included; and no byte is in two images."""
        self.cache.check_integrity()
        for stats in self.cache.stats():
            assert stats.used_bytes <= stats.nbytes
            assert sum(each.used for each in stats.sizes) == stats.used
            assert sum(each.slabs for each in stats.sizes) <= self.slabs[stats.name].slabs
        owned = {name: np.zeros(len(memory), np.int64) for name, memory in self.memory.items()}
        for resident in residents_of(self.cache):
            slabs = self.slabs[resident.slot.tier]
            at = slabs.offset(resident.slot.size_class, resident.slot.index)
            owned[resident.slot.tier][at : at + slabs.image_bytes[resident.slot.size_class]] += 1
        assert all(memory.max(initial=0) <= 1 for memory in owned.values())

    def where(self, group: int, of: str) -> set[str]:
        return {each.slot.tier for each in residents_of(self.cache) if each.key == path(group, of)[-1]}

    def kept(self, group: int, *paths: str) -> list[str]:
        return [of for of in paths if HOST in self.where(group, of)]


def test_each_group_has_slots_of_its_size() -> None:
    world = Bytes(host=4)
    small, large = world.store(SMALL, "abc"), world.store(LARGE, "ab")
    assert [(slot.size_class, slot.index) for slot in small.slots] == [(0, 0), (0, 1), (0, 2)]
    assert [(slot.size_class, slot.index) for slot in large.slots] == [(1, 4), (1, 8)]
    world.settle()
    (stats,) = world.cache.stats()
    assert (stats.used_bytes, stats.nbytes) == (3 * 3 + 2 * 12, 48)
    assert [tuple(each) for each in stats.sizes] == [(3, 1, 3), (12, 2, 2)]
    length, hold = world.lookup(LARGE, "abc")
    assert length == 2
    assert hold is not None
    at = {each.key: each.slot for each in residents_of(world.cache)}
    assert [(at[each].size_class, at[each].index) for each in path(LARGE, "ab")] == [(1, 4), (1, 8)]


def test_one_image_size_can_fill_a_tier_and_lose_it() -> None:
    world = Bytes(host=3)
    for prompt in "abcdefghijkl":
        world.store(SMALL, prompt)
        world.settle()
    assert [each.slabs for each in world.cache.stats()[0].sizes] == [3, 0]
    for prompt in "abc":
        assert world.store(LARGE, prompt).stored_prefix == 1
        world.settle()
    assert [each.slabs for each in world.cache.stats()[0].sizes] == [0, 3]
    assert world.cache.counters.evictions[HOST] == 12
    world.store(SMALL, "z")
    assert [each.slabs for each in world.cache.stats()[0].sizes] == [1, 2]
    assert world.kept(LARGE, *"abc") == ["b", "c"], "the oldest slab went"


def test_image_size_evicts_its_own_unless_another_is_older() -> None:
    world = Bytes(host=3)
    for prompt in "abcd":
        world.store(SMALL, prompt)
    for prompt in "xy":
        world.store(LARGE, prompt)
    world.settle()
    world.store(SMALL, "a")  # a use: all of its slab is younger than the large ones now
    world.store(LARGE, "z")
    world.settle()
    assert (world.kept(SMALL, *"abcd"), world.kept(LARGE, *"xyz")) == (list("abcd"), ["y", "z"])
    world.store(LARGE, "y")
    world.store(LARGE, "z")
    world.store(LARGE, "w")
    world.settle()
    assert (world.kept(SMALL, *"abcd"), world.kept(LARGE, *"yzw")) == ([], ["y", "z", "w"])


def test_slab_with_held_image_stays_and_next_is_emptied() -> None:
    world = Bytes(host=2)
    for prompt in "abcdefgh":
        world.store(SMALL, prompt)
        world.settle()
    _, hold = world.lookup(SMALL, "a")
    assert hold is not None
    assert world.store(LARGE, "x").stored_prefix == 1
    assert world.kept(SMALL, *"abcdefgh") == list("abcd")
    world.store(LARGE, "y")
    assert world.cache.counters.drops[HOST][DropReason.NO_ROOM] == 1, "what is left is held, or being filled"
    world.cache.release(hold)
    assert world.store(LARGE, "y").stored_prefix == 1
    assert world.kept(SMALL, *"abcd") == []


def test_slab_is_emptied_only_after_its_only_copies_are_written() -> None:
    world = Bytes(host=2, file=4)
    for prompt in "abcdefgh":
        world.store(SMALL, prompt)
        world.settle()
    for _ in range(2):
        assert world.store(LARGE, "x").job is None, "copies are under way"
        world.settle()
    assert world.store(LARGE, "x").job is not None
    assert world.cache.counters.drops[HOST][DropReason.BACKPRESSURE] == 2
    assert all(world.where(SMALL, prompt) for prompt in "abcdefgh")


def test_a_slab_that_jobs_read_or_write_stays() -> None:
    world = Bytes(host=1)
    world.store(SMALL, "a")
    assert world.store(LARGE, "x").job is None, "it is being written"
    world.settle()
    _, hold = world.lookup(SMALL, "a")
    world.cache.load(hold, {0: [0]})
    world.cache.release(hold)
    world.take()
    assert world.store(LARGE, "x").job is None, "it is being read"
    world.settle()
    assert world.store(LARGE, "x").job is not None


def test_chunks_behind_one_go_with_its_slab_tails_first() -> None:
    world = Bytes(host=3, events=100)
    world.store(SMALL, "abcdefg")  # heads in slab 0, the tail in slab 1
    world.store(LARGE, "x")
    world.settle()
    world.store(SMALL, "z")  # and slab 1 is younger than slab 0
    world.settle()
    world.cache.events()
    world.store(LARGE, "y")
    assert world.kept(SMALL, *("abcdefg"[: n + 1] for n in range(7)), "z") == ["z"]
    gone = [event.key for event in world.cache.events() if event.kind.value == "removed"]
    assert gone == path(SMALL, "abcdefg")[::-1]


def test_size_with_nothing_to_give_takes_a_younger_slab() -> None:
    world = Bytes(host=2)
    world.store(LARGE, "x")
    world.settle()
    _, hold = world.lookup(LARGE, "x")
    assert hold is not None
    world.store(SMALL, "a")
    world.settle()
    world.store(LARGE, "y")
    assert (world.kept(LARGE, "x", "y"), world.kept(SMALL, "a")) == (["x", "y"], [])


def test_backups_and_loads_stay_in_their_pools() -> None:
    world = Bytes(host=3, file=3, backup=WritePolicy.THROUGH)
    world.store(SMALL, "abcd")
    world.store(LARGE, "xy")
    world.settle()
    for group, of in ((SMALL, "abcd"), (LARGE, "xy")):
        assert world.where(group, of) == {HOST, FILE}
        assert world.cache.discard(path(group, of), HOST) == len(of)
        length, hold = world.lookup(group, of)
        world.cache.load(hold, {group: range(length)})
        world.take()
        world.settle()
        outcome = world.cache.progress(hold).outcome
        assert (outcome.num_chunks, set(outcome.sources)) == (len(of), {FILE})
        world.cache.release(hold)
    assert world.checked >= 18


def test_groups_and_paths_of_wrong_size_are_refused_unchanged() -> None:
    world = Bytes(host=3)
    world.store(SMALL, "ab")
    world.settle()
    _, hold = world.lookup(SMALL, "ab")
    assert hold is not None
    before = state_of(world.cache)
    keys = path(SMALL, "abc")
    for call in (
        lambda: store(world.cache, keys, [0, 1, 2], group=LARGE),
        lambda: store(world.cache, keys, [0], first=2, group=LARGE),
        lambda: store(world.cache, keys, [0, 1, 2], group=2),
        lambda: store(world.cache, keys, [0, 1, 2], group=-1),
        lambda: store(world.cache, keys, group=LARGE),
        lambda: world.cache.load(hold, {LARGE: [0]}),
    ):
        with pytest.raises(CacheError):
            call()
        assert state_of(world.cache) == before


def test_tiers_have_the_same_size_classes() -> None:
    two, one = Slabs(12, SIZES, 2), Slabs.of_one_size(12, 2)
    for tiers, size_classes in (([two, one], ()), ([one, two], (0,)), ([two], (0, 2)), ([two], (-1,)), ([one], (0, 1))):
        with pytest.raises(CacheError, match="expected image sizes for the size classes"):
            specs = [TierSpec(name, slabs) for name, slabs in zip((HOST, FILE), tiers, strict=False)]
            TieredCache(specs, CacheSettings(size_classes=size_classes))


def test_chunks_of_a_slab_before_its_resize_are_not_adopted() -> None:
    world = Bytes(host=2, file=2)
    (a, b), (x,) = path(SMALL, "ab"), path(LARGE, "x")
    found = [(0, a, None, SMALL), (5, b, a, SMALL), (0, x, None, LARGE)]
    assert world.cache.adopt(FILE, found) == 2
    assert (world.where(LARGE, "x"), world.where(SMALL, "a"), world.where(SMALL, "ab")) == ({FILE}, set(), {FILE})
    world.check()


def test_adopted_chunks_are_of_the_size_of_their_parent() -> None:
    world = Bytes(host=2, file=3)
    (a, b) = path(SMALL, "ab")
    assert world.cache.adopt(FILE, [(0, a, None, SMALL), (4, b, a, LARGE)]) == 1
    world.check()


def test_a_tier_of_slabs_shrinks_by_slabs() -> None:
    world = Bytes(host=4)
    world.store(SMALL, "abcde")
    world.store(LARGE, "x")
    world.settle()
    before = state_of(world.cache)
    with pytest.raises(CapacityError):
        world.cache.resize(HOST, 2)
    assert state_of(world.cache) == before
    world.cache.resize(HOST, 2, discard=True)
    world.slabs[HOST] = Slabs(12, SIZES, 2)
    assert (world.kept(LARGE, "x"), world.kept(SMALL, "a", "abcde")) == ([], ["a", "abcde"])
    world.check()
    world.cache.resize(HOST, 6)
    world.slabs[HOST] = Slabs(12, SIZES, 6)
    world.memory[HOST] = np.zeros(72, np.int64)
    assert len(world.store(LARGE, "vwxy").slots) == 4
    world.check()


def test_a_reset_leaves_slabs_that_jobs_touch_to_their_size() -> None:
    world = Bytes(host=2)
    world.store(SMALL, "a")
    world.store(LARGE, "x")
    world.cache.reset()
    world.take()
    assert [each.slabs for each in world.cache.stats()[0].sizes] == [1, 1]
    assert world.store(LARGE, "y").job is None
    world.settle()
    assert [each.slabs for each in world.cache.stats()[0].sizes] == [0, 0]
    assert world.store(LARGE, "yz").stored_prefix == 2


PROMPTS = ("a", "ab", "abc", "abd", "abcde", "f", "fg", "fgh", "ij", "ijklm", "n", "no")


@examples(60)
@given(st.data())
def test_whatever_is_done_bytes_stay_with_their_chunks(data: st.DataObject) -> None:
    draw = data.draw
    sizes = draw(st.sampled_from([(3, 12), (4, 6), (5, 12)]))
    world = Bytes(
        host=draw(st.integers(1, 5)),
        file=draw(st.integers(0, 5)),
        sizes=sizes,
        policy=draw(st.sampled_from([LRU, ARC])),
        backup=draw(st.sampled_from(list(WritePolicy))),
    )
    holds: list[tuple[int, Lease, int]] = []
    onboarded: set[Lease] = set()
    steps = draw(st.lists(st.sampled_from(["store", "lookup", "load", "release", "end", "fail", "step"]), max_size=60))
    for step in steps:
        group = draw(st.sampled_from([SMALL, LARGE]))
        if step == "store":
            keep = draw(st.sampled_from([(), (Retention(0, 1, 90),), (Retention(0, None, 10),)]))
            world.store(group, draw(st.sampled_from(PROMPTS)), retention=keep)
        elif step == "lookup":
            length, hold = world.lookup(group, draw(st.sampled_from(PROMPTS)))
            if hold is not None:
                holds.append((group, hold, length))
        elif step == "load" and holds:
            group, hold, length = draw(st.sampled_from(holds))
            if hold not in onboarded:
                onboarded.add(hold)
                world.cache.load(hold, {group: range(length)})
        elif step == "release" and holds:
            world.cache.release(holds.pop(draw(st.integers(0, len(holds) - 1)))[1])
        elif step in ("end", "fail"):
            ready = [job for job, each in world.running.items() if not set(each.after) & set(world.running)]
            if ready:
                job = draw(st.sampled_from(sorted(ready)))
                moves_up = (
                    world.running[job].route.destination in (DEVICE, HOST) and world.running[job].route.source != DEVICE
                )
                bad = Status.CANCELLED if moves_up else Status.IO_ERROR
                fails_through_upstream = any(
                    item.source is not None and (world.bytes_of(item.source) == -1).any()
                    for item in world.running[job].items
                )
                world.end(job, bad if step == "fail" or fails_through_upstream else Status.OK)
        elif step == "step":
            world.cache.end_step()
        world.take()
    for _, hold, _ in holds:
        world.cache.release(hold)
    world.take()
    for job in sorted(world.running):
        world.end(job, Status.CANCELLED)
    world.cache.reset()
    assert [stats.used for stats in world.cache.stats()] == [0] * len(world.slabs)


def test_the_same_calls_give_the_same_log_with_several_sizes() -> None:
    def script() -> list[object]:
        world = Bytes(host=3, file=3, events=1000)
        log: list[object] = []
        for prompt in PROMPTS * 2:
            for group in (SMALL, LARGE):
                log.append(world.store(group, prompt))
            world.settle()
            log.append(world.cache.events())
        return log

    assert script() == script()


def test_a_fetch_behind_a_chunk_of_another_size_is_refused() -> None:
    tiers = [TierSpec(HOST, Slabs(12, SIZES, 4))]
    cache = TieredCache(tiers, CacheSettings(size_classes=(SMALL, LARGE)), remote=("far",))
    keys = path(0, "ab")
    job = store(cache, keys[:1], [0], group=0).job
    cache.apply_results([TransferResult(job, (Status.OK,))], 0.0)
    before = state_of(cache)
    with pytest.raises(CacheError, match="images of size class 0"):
        cache.prefetch({1: GroupKeys(keys)}, 0.0)
    assert state_of(cache) == before


def test_quarter_is_protected_also_among_the_largest_images() -> None:
    bytes_ = Bytes(8, 64, backup=WritePolicy.BACK)
    for each in "abcdefgh":
        bytes_.store(LARGE, each)
        bytes_.settle()
    below = [each for each in residents_of(bytes_.cache) if each.slot.tier == FILE]
    assert len(below) == 2


def test_slots_of_any_two_sizes_are_not_of_one() -> None:
    cache = TieredCache([TierSpec(HOST, Slabs(12, (3, 4, 12), 4))], CacheSettings(size_classes=(0, 1, 2)))
    slots = [store(cache, [key(str(group))], [0], group=group).slots[0].index for group in range(3)]
    classes = [
        cache._transfers._size_classes(TierSlots(0, each)) for each in (slots, slots[:2], slots[1:], slots[:1], [])
    ]
    assert classes == [{0, 1, 2}, {0, 1}, {1, 2}, {0}, set()]
