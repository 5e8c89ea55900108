"""Chunks of window and recurrent groups: they may outlive what came before them, and go when a window has passed."""

from __future__ import annotations

import pytest
from group_kit import FULL, STATE, WINDOW, end, grouped, keys_of, orders, resident, settle, store, wanted

from longshore.boundary import FILE, HOST, Section, Status, TransferResult
from longshore.cache import DropReason, GroupKeys, MissReason, Retention, WritePolicy
from longshore.errors import CacheError
from residents import residents_of


def test_an_orphan_is_taken_and_served() -> None:
    """What was before it was never stored: a window, or a state, is of use without."""
    cache = grouped(WINDOW, STATE)
    paths = [keys_of(0, 16), keys_of(1, 4)]
    store(cache, 0, paths[0], first=13)
    store(cache, 1, paths[1], first=3)
    assert cache.lookup(wanted(*paths), 0.0).tokens == 32
    assert cache.lookup(wanted(paths[0][:15], paths[1]), 0.0).tokens == 0


def test_what_a_window_has_passed_goes_first() -> None:
    """Before chunks that nobody has used for longer."""
    cache = grouped(FULL, WINDOW, host=12)
    store(cache, 0, keys_of(0, 2, "old"))
    store(cache, 1, keys_of(1, 10))  # window: 5 tokens, the last three chunks
    store(cache, 0, keys_of(0, 7, "new"))
    names = resident(cache)
    assert [name for name in names if name.startswith("a")] == ["a1.007", "a1.008", "a1.009"]
    assert len([name for name in names if name.startswith("old")]) == 2


def test_an_answer_that_grows_leaves_its_old_chunks_behind() -> None:
    """One chunk at a time, as while decoding: what slides out of the window goes before what is older."""
    cache = grouped(FULL, WINDOW, host=8)
    store(cache, 0, keys_of(0, 2, "old"))
    path = keys_of(1, 6)
    for count in range(1, 7):
        store(cache, 1, path[:count], first=count - 1)
    store(cache, 0, keys_of(0, 3, "new"))
    assert resident(cache)[:3] == ["a1.003", "a1.004", "a1.005"]
    assert len(resident(cache)) == 8


def test_a_window_that_served_a_match_keeps_its_place() -> None:
    """The end of a prompt that others share: their own growth does not push it out."""
    cache = grouped(FULL, WINDOW, host=10)
    path = keys_of(1, 6)
    store(cache, 0, keys_of(0, 3))
    store(cache, 1, path[:3])
    hold = cache.lookup(wanted(keys_of(0, 3), path[:3]), 0.0).lease  # four tokens
    cache.release(hold)
    store(cache, 1, path, first=3)
    store(cache, 0, keys_of(0, 3, "new"))  # takes two slots that are not free
    assert {"a1.000", "a1.001"} <= set(resident(cache))
    assert "a1.002" not in resident(cache)


def test_a_commit_does_not_push_out_its_own_window() -> None:
    cache = grouped(WINDOW, host=2)
    path = keys_of(0, 5)
    store(cache, 0, path[:3], first=1)
    store(cache, 0, path, first=2)
    assert resident(cache) == ["a0.002", "a0.004"]


def test_the_last_window_gets_the_room_there_is() -> None:
    cache = grouped(WINDOW, host=4)
    offload = cache.store({0: GroupKeys(keys_of(0, 10))}, {0: range(10)})[0]
    assert list(offload.positions) == [6, 7, 8, 9]
    assert cache.counters.drops[HOST][DropReason.NO_ROOM] == 6
    assert offload.stored_prefix == 0


def test_only_what_is_missing_is_stored_in_runs() -> None:
    cache = grouped(WINDOW, blocks_per_chunk=2)
    path = keys_of(0, 6)
    store(cache, 0, path)
    for at in (1, 2, 4):
        assert cache.discard([path[at]], HOST) == 1
    blocks = range(10, 22)
    offload = cache.store({0: GroupKeys(path)}, {0: blocks})[0]
    assert list(offload.positions) == [1, 2, 4]
    assert len(offload.slots) == 3
    assert offload.stored_prefix == 6
    (transfer,) = orders(cache)
    assert transfer.sections == (Section(0, 2, (12, 13, 14, 15)), Section(0, 8, (18, 19)))
    assert [item.key for item in transfer.items] == [path[1], path[2], path[4]]
    assert [item.parent for item in transfer.items] == [None] * 3


def test_a_backup_waits_for_no_parent() -> None:
    cache = grouped(WINDOW, host=8, file=8, backup=WritePolicy.THROUGH)
    path = keys_of(0, 8)
    store(cache, 0, path, first=5)
    assert resident(cache, FILE) == ["a0.005", "a0.006", "a0.007"]
    assert cache.discard([path[5]], FILE) == 1  # from the middle of a path
    assert resident(cache, FILE) == ["a0.006", "a0.007"]
    cache.check_integrity()


def test_orphans_are_adopted_after_a_restart() -> None:
    before = grouped(WINDOW, host=8, file=8, backup=WritePolicy.THROUGH)
    path = keys_of(0, 8)
    store(before, 0, path, first=4)
    found = [(each.slot.index, each.key, each.parent, 0) for each in residents_of(before) if each.slot.tier == FILE]
    after = grouped(WINDOW, host=8, file=8, backup=WritePolicy.THROUGH)
    assert after.adopt(FILE, found) == 4
    after.check_integrity()
    assert after.lookup(wanted(path), 0.0).tokens == 16


def test_a_copy_that_is_lost_takes_nothing_with_it() -> None:
    cache = grouped(WINDOW)
    path = keys_of(0, 3)
    store(cache, 0, path)
    hold = cache.lookup(wanted(path), 0.0).lease
    cache.load(hold, {0: [0, 1, 2]})
    (load,) = orders(cache)
    end(cache, [load], Status.CORRUPT)
    assert resident(cache) == []
    cache.release(hold)
    store(cache, 0, path)
    cache.check_integrity()
    assert cache.counters.lost[HOST] == 3


def test_a_reset_forgets_them_and_what_slid() -> None:
    cache = grouped(WINDOW, host=6)
    store(cache, 0, keys_of(0, 6))
    cache.reset()
    assert resident(cache) == []
    store(cache, 0, keys_of(0, 3, "b"))  # in the places of what had slid
    store(cache, 0, keys_of(0, 3, "c"))
    store(cache, 0, keys_of(0, 2, "d"))
    assert sorted(name[0] for name in resident(cache)) == ["b", "c", "c", "c", "d", "d"]


def test_numbers_that_are_used_again_have_not_slid() -> None:
    """A chunk with full attention in the place of one that a window had passed is none."""
    cache = grouped(FULL, WINDOW, host=9)
    store(cache, 0, keys_of(0, 3, "old"))
    store(cache, 1, keys_of(1, 6))
    assert cache.discard(keys_of(1, 6), HOST) == 6
    store(cache, 0, keys_of(0, 3, "full"))
    store(cache, 0, keys_of(0, 5, "new"))
    assert [name for name in resident(cache) if not name.startswith("new")] == [
        "full0.000",
        "full0.001",
        "full0.002",
        "old0.000",
    ]


def test_the_write_policy_asks_of_each_chunk() -> None:
    cache = grouped(WINDOW, offload=WritePolicy.SELECTIVE, prompt_only=True, priority_floor=30)
    path = keys_of(0, 6)
    low = [Retention(1, 2, 10)]
    assert cache.store({0: GroupKeys(path, prompt_end=4, retention=low)}, {0: range(6)})[0].job is None
    offload = cache.store({0: GroupKeys(path, prompt_end=4, retention=low)}, {0: range(6)})[0]
    assert list(offload.positions) == [0, 2, 3]
    drops = cache.counters.drops[HOST]
    assert (drops[DropReason.GENERATED], drops[DropReason.PRIORITY], drops[DropReason.BELOW_THRESHOLD]) == (4, 2, 3)


def test_a_priority_outweighs_what_slid() -> None:
    cache = grouped(FULL, WINDOW, host=8)
    cache.store({1: GroupKeys(keys_of(1, 5), retention=[Retention(0, 2, 90)])}, {1: range(5)})
    settle(cache)
    store(cache, 0, keys_of(0, 4, "new"))
    assert {"a1.000", "a1.001"} <= set(resident(cache))


def test_hosts_that_move_the_bytes_are_offered_slots_too() -> None:
    cache = grouped(FULL, WINDOW)
    offload = cache.store({1: GroupKeys(keys_of(1, 4), 2)})[1]
    assert list(offload.positions) == [2, 3]
    assert orders(cache) == []
    cache.release(offload.job)
    assert resident(cache) == []
    cache.check_integrity()


def test_they_are_prefetched_and_named() -> None:
    cache = grouped(WINDOW, host=4, file=4, backup=WritePolicy.THROUGH)
    path = keys_of(0, 4)
    store(cache, 0, path)
    assert cache.discard(path, HOST) == 4
    hold = cache.lookup(wanted(path), 0.0).lease
    assert cache.progress(hold).runs == ((FILE, 3),)
    assert len(cache.prefetch(hold, 0.0)) == 1
    settle(cache)
    assert cache.progress(hold).runs == ((HOST, 3),)


def test_a_failed_offload_of_one_leaves_the_others() -> None:
    cache = grouped(WINDOW)
    path = keys_of(0, 3)
    cache.store({0: GroupKeys(path)}, {0: range(3)})
    (transfer,) = orders(cache)
    cache.apply_results([TransferResult(transfer.job, (Status.OK, Status.IO_ERROR, Status.OK))], 0.0)
    cache.check_integrity()
    assert resident(cache) == ["a0.000", "a0.002"]
    assert cache.lookup(wanted(path), 0.0).tokens == 2
    assert cache.counters.misses[MissReason.ABSENT] == 1


def test_hosts_without_whole_paths_say_what_has_slid() -> None:
    cache = grouped(FULL, WINDOW, host=8)
    store(cache, 0, keys_of(0, 2, "old"))
    path = keys_of(1, 6)
    for at in range(6):
        offer = cache.store({1: GroupKeys(path[at : at + 1])})[1]
        cache.apply_results([TransferResult(offer.job, (Status.OK,))], 0.0)
        past_window = [*path[max(0, at - 3) : max(0, at - 2)], *keys_of(1, 1, "unknown")]
        assert cache.store({1: GroupKeys((), past_window=past_window)})[1].job is None
    store(cache, 0, keys_of(0, 3, "new"))
    assert resident(cache)[:3] == ["a1.003", "a1.004", "a1.005"]
    assert len(resident(cache)) == 8


@pytest.mark.parametrize("offload", list(WritePolicy))
def test_repeated_keys_are_refused_whatever_the_write_policy(offload: WritePolicy) -> None:
    cache = grouped(WINDOW, offload=offload)
    (key,) = keys_of(0, 1)
    with pytest.raises(CacheError, match="distinct keys of a path, got 1"):
        cache.store({0: GroupKeys([key, key])}, {0: [0, 1]})
