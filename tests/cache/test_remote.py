"""Tiers that are not ours: asked, never waited for, fetched from by key, and stored to as far as is easy."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from cache_kit import chunks, key, lookup, path_of, store
from object_state import state_of

from longshore.boundary import FILE, HOST, Probe, ProbeResult, Route, Status, Transfer, TransferResult, Urgency
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    DropReason,
    GroupKeys,
    LookupResult,
    MissReason,
    Protection,
    TieredCache,
    TierSpec,
    WritePolicy,
    WriteRule,
)
from longshore.cache.types import Answer
from longshore.errors import CacheError, JobError
from residents import residents_of

STORE = "store"


class Desk:
    """A cache with one remote tier (or `names`), its commands as they come, and a clock that stands still."""

    def __init__(self, slots: int = 8, names: Sequence[str] = (STORE,), **settings: Any) -> None:
        self.now = 0.0
        tiers = [TierSpec(HOST, slots, 4096)]
        self.cache = TieredCache(tiers, CacheSettings(**settings), remote=names)
        self.transfers: list[Transfer] = []
        self.probes: list[Probe] = []

    def look(self) -> None:
        for command in self.cache.take_commands():
            assert pickle.loads(pickle.dumps(command)) == command  # noqa: S301 - our own bytes
            if isinstance(command, Probe):
                self.probes.append(command)
            elif isinstance(command, Transfer):
                self.transfers.append(command)
        self.cache.check_integrity()

    def lookup(self, path: str) -> LookupResult:
        found = lookup(self.cache, chunks(path), self.now)
        self.look()
        return found

    def prefetch(self, path: str) -> tuple[int, ...]:
        jobs = self.cache.prefetch({0: GroupKeys(chunks(path))}, self.now)
        self.look()
        return jobs

    def answer(self, there: str, **changes: Any) -> None:
        """The oldest probe is answered: of the path `there` all is present."""
        probe = self.probes.pop(0)
        present = tuple(each in chunks(there) for each in probe.keys)
        self.cache.apply_results([ProbeResult(probe.probe, **{"present": present, **changes})], self.now)
        self.look()

    def end(self, *statuses: Status) -> Transfer:
        """The oldest transfer ends, item by item as `statuses`, the last of which repeats."""
        transfer = self.transfers.pop(0)
        said = [*(statuses or (Status.OK,))]
        said += said[-1:] * (len(transfer.items) - len(said))
        self.cache.apply_results([TransferResult(transfer.job, tuple(said))], self.now)
        self.look()
        return transfer

    def store(self, path: str) -> None:
        """`path` comes from the device; what follows waits."""
        store(self.cache, chunks(path), range(len(path)))
        self.look()
        self.transfers.insert(0, self.transfers.pop())
        self.end()

    def misses(self) -> dict[MissReason, int]:
        return {reason: count for reason, count in self.cache.counters.misses.items() if count}

    def answers(self, tier: str = STORE) -> dict[Answer, int]:
        return {answer: count for answer, count in self.cache.counters.probes[tier].items() if count}

    def resident(self) -> set[str]:
        return {path_of(each.key) for each in residents_of(self.cache) if each.state.value == "ready"}


def keys_of(transfer: Transfer) -> list[str]:
    return [path_of(item.key) for item in transfer.items]


def known(path: str, there: str, **settings: Any) -> Desk:
    """A desk that knows of `path` that `there` is in the store."""
    desk = Desk(**settings)
    desk.lookup(path)
    desk.answer(there)
    return desk


def test_unknown_keys_are_probed_and_not_waited_for() -> None:
    desk = Desk(probe_timeout=0.5)
    desk.now = 3.0
    found = desk.lookup("abc")
    (probe,) = desk.probes
    assert found == LookupResult(probes=(probe.probe,), request_number=1)
    assert (probe.tier, probe.keys, probe.deadline, probe.ranks) == (STORE, tuple(chunks("abc")), 3.5, 1)
    assert not desk.cache.progress(probe.probe).is_over
    assert desk.lookup("abcd").probes == (probe.probe, desk.probes[1].probe)  # only "abcd" is asked for anew
    assert desk.probes[1].keys == (key("abcd"),)
    desk.answer("ab")
    assert desk.cache.progress(probe.probe).is_over
    assert desk.lookup("abc")[:-3] == LookupResult(remote=2)[:-3]
    assert desk.misses() == {MissReason.ABSENT: 3 + 4 + 1, MissReason.REMOTE: 2}
    assert desk.answers() == {Answer.PRESENT: 2, Answer.ABSENT: 1}


def test_single_chunks_are_asked_for_without_a_request() -> None:
    desk = Desk()
    paths = {0: GroupKeys(chunks("abc"))}
    quiet = desk.cache.lookup(paths, 0.0, protect=Protection.NONE, independent=True)
    assert (quiet.probes, quiet.remote_sources) == ((), {0: ["", "", ""]})
    found = desk.cache.lookup(paths, 0.0, protect=Protection.NONE, independent=True, remote_tiers=[STORE])
    assert (found.request_number, found.lease, len(found.probes)) == (None, None, 1)
    desk.look()
    desk.answer("ab")
    found = desk.cache.lookup(paths, 0.0, protect=Protection.NONE, independent=True, remote_tiers=[STORE])
    assert (found.probes, found.remote_sources) == ((), {0: [STORE, STORE, ""]})
    for wrong in (
        {"independent": True},
        {"protect": Protection.NONE},
        {"independent": True, "protect": Protection.STEP},
    ):
        with pytest.raises(CacheError, match="remote_tiers"):
            desk.cache.lookup(paths, 0.0, remote_tiers=[STORE], **wrong)


def test_only_what_our_tiers_have_not_is_asked_for() -> None:
    desk = Desk()
    desk.store("ab")
    found = desk.lookup("abc")
    assert (found.num_chunks, desk.probes[0].keys) == (2, (key("abc"),))


def test_present_keys_are_fetched_into_host_memory_and_matched() -> None:
    desk = known("abcd", "abc")
    (job,) = desk.prefetch("abcd")
    (transfer,) = desk.transfers
    assert (transfer.job, transfer.route, transfer.urgency) == (job, Route(STORE, HOST), Urgency.PREFETCH)
    assert [(item.key, item.parent) for item in transfer.items] == [
        (key("a"), None),
        (key("ab"), key("a")),
        (key("abc"), key("ab")),
    ]
    assert all(item.source is None and item.destination is not None for item in transfer.items)
    assert desk.lookup("abcd").num_chunks == 0
    assert desk.prefetch("abcd") == (job,)  # it is joined
    desk.end()
    found = desk.lookup("abcd")
    assert (found.num_chunks, found.remote) == (3, 0)
    desk.cache.load(found.lease, {0: [0, 1, 2]})
    desk.look()
    desk.end()
    assert desk.cache.progress(found.lease).outcome == (3, (HOST,) * 3)
    assert desk.cache.counters.routes["store->host"].chunks == 3


def test_fetch_continues_after_local_chunks_and_chunks_in_flight() -> None:
    desk = Desk()
    desk.store("a")
    desk.lookup("abc")
    desk.answer("abc")
    desk.transfers.clear()
    assert desk.lookup("abc").remote == 2
    store(desk.cache, chunks("ab"), [7], first=1)  # comes from the device meanwhile
    desk.look()
    assert desk.lookup("abc").remote == 1
    assert len(desk.prefetch("abc")) == 2
    offload, fetch = desk.transfers
    assert (keys_of(offload), keys_of(fetch)) == (["ab"], ["abc"])
    desk.end(Status.IO_ERROR)  # then nothing behind it can be reached
    desk.end()
    assert desk.resident() == {"a"}


def test_lapsed_chunk_is_a_counted_miss_and_probed_again() -> None:
    desk = known("abc", "abc")
    desk.prefetch("abc")
    desk.end(Status.OK, Status.NOT_FOUND, Status.OK)
    assert desk.resident() == {"a"}
    assert desk.misses() == {MissReason.ABSENT: 3, MissReason.NOT_FOUND: 1, MissReason.AFTER_MISS: 1}
    found = desk.lookup("abc")
    assert (found.num_chunks, found.remote) == (1, 0)
    assert desk.probes[-1].keys == (key("ab"),)


@pytest.mark.parametrize("status", [Status.DEADLINE, Status.TIER_OFF])
def test_a_store_that_never_answers_costs_nothing_but_counted_misses(status: Status) -> None:
    desk = Desk(slots=32)
    for path in ("abcd", "wxyz"):
        for _ in range(3):
            found = desk.lookup(path)
            assert (found.num_chunks, found.remote) == (0, 0)
            desk.answer("", present=(False,) * 4, status=status)
    assert desk.answers() == {Answer.NO_ANSWER: 24}
    assert desk.misses() == {MissReason.ABSENT: 24}
    desk.store("abcd")
    for _ in range(2):  # two slots of 32 at a time are kept for stores
        desk.end(Status.DEADLINE)
    assert desk.cache.counters.drops[STORE][DropReason.WRITE_FAILED] == 4
    assert (desk.cache.jobs_in_flight, desk.lookup("abcd").num_chunks) == (0, 4)


def test_an_answer_counts_for_so_long() -> None:
    desk = known("a", "a", probe_life=5.0)
    desk.now = 4.9
    assert desk.lookup("a").remote == 1
    desk.now = 5.0
    assert desk.lookup("a").remote == 0
    assert len(desk.probes) == 1


def test_no_more_is_asked_than_may_be_under_way() -> None:
    desk = Desk(max_probes=3)
    desk.lookup("abcde")
    assert desk.probes[0].keys == tuple(chunks("abc"))
    assert desk.lookup("x").probes == ()
    assert desk.answers() == {Answer.NOT_SENT: 3}
    desk.answer("")
    assert len(desk.lookup("x").probes) == 1


def test_trap_34_chunk_is_present_when_all_ranks_have_parts() -> None:
    desk = Desk(ranks=2)
    desk.lookup("ab")
    (probe,) = desk.probes
    desk.cache.apply_results([ProbeResult(probe.probe, (True, True), rank=1)], 0.0)
    assert not desk.cache.progress(probe.probe).is_over
    desk.cache.apply_results([ProbeResult(probe.probe, (True, False), rank=0)], 0.0)
    assert desk.lookup("ab").remote == 1


def test_an_answer_that_lacks_a_rank_says_nothing() -> None:
    desk = Desk(ranks=2)
    desk.lookup("a")
    number = desk.probes[0].probe
    desk.cache.apply_results(
        [ProbeResult(number, (True,)), ProbeResult(number, (False,), Status.DEADLINE, rank=1)], 0.0
    )
    assert (desk.lookup("a").remote, desk.answers()) == (0, {Answer.NO_ANSWER: 1})


@pytest.mark.parametrize("wrong", ["unknown", "twice", "rank", "length"])
def test_unrequested_answers_are_refused_and_nothing_is_applied(wrong: str) -> None:
    desk = Desk()
    desk.lookup("ab")
    number = desk.probes[0].probe
    right = ProbeResult(number, (True, True))
    results = {
        "unknown": [right, ProbeResult(99, (True,))],
        "twice": [right, right],
        "rank": [ProbeResult(number, (True, True), rank=1)],
        "length": [ProbeResult(number, (True,))],
    }[wrong]
    before = state_of(desk.cache)
    with pytest.raises(JobError):
        desk.cache.apply_results(results, 0.0)
    assert state_of(desk.cache) == before
    desk.answer("ab")
    assert desk.lookup("ab").remote == 2


def test_a_reset_forgets_what_was_known_and_what_was_asked() -> None:
    desk = known("ab", "ab")
    desk.prefetch("ab")
    desk.lookup("xy")
    desk.cache.reset()
    desk.look()
    desk.end()
    desk.answer("xy")
    assert (desk.lookup("ab").remote, desk.lookup("xy").remote) == (0, 0)
    assert [(probe.generation, len(probe.keys)) for probe in desk.probes] == [(1, 2), (1, 2)]
    assert desk.misses()[MissReason.ABSENT] == 2 + 2 + 2 + 2
    assert desk.cache.stats()[0].used == 0


def test_chunk_stored_before_a_reset_is_stored_again_after() -> None:
    desk = Desk(slots=64)
    store(desk.cache, chunks("ab"), range(2))
    desk.look()
    desk.cache.reset()
    desk.end()
    assert desk.transfers == []
    desk.store("ab")
    assert [keys_of(each) for each in desk.transfers] == [["a", "ab"]]


def test_what_comes_from_the_device_is_stored_once_heads_first() -> None:
    desk = Desk(slots=64)
    desk.store("abc")
    (transfer,) = desk.transfers
    assert (transfer.route, transfer.urgency, keys_of(transfer)) == (
        Route(HOST, STORE),
        Urgency.WRITE,
        ["a", "ab", "abc"],
    )
    assert all(item.source is not None and item.destination is None for item in transfer.items)
    desk.end()
    desk.store("abcd")
    assert keys_of(desk.transfers[0]) == ["abcd"]
    assert desk.cache.discard(chunks("abcd"), HOST) == 0  # it is being read, and what is before it is needed
    desk.end()
    assert desk.transfers == []


def test_what_was_stored_is_known_to_be_there() -> None:
    desk = Desk(slots=64)
    desk.store("ab")
    desk.end()
    assert desk.cache.discard(chunks("ab"), HOST) == 2
    assert desk.lookup("ab")[:-3] == LookupResult(remote=2)[:-3]


def test_answers_tell_for_how_many_requests_a_store_keeps_chunks() -> None:
    desk = Desk(slots=64)
    tier = desk.cache._remote.tiers[0]

    def ask(path: str, *, there: bool, after: int) -> int | None:
        """What is known once a question about `path` is answered, `after` requests after it was stored."""
        desk.lookup("")
        desk.store(path)
        desk.end()
        assert desk.cache.discard(chunks(path), HOST) == len(path)
        for _ in range(after - 1):
            desk.lookup("")
        desk.now += 1000.0  # the answer that it was stored is too old
        desk.lookup(path)
        desk.answer(path if there else "")
        return tier.keeps

    desk.lookup("x")
    desk.answer("")  # never stored: says nothing
    assert ask("a", there=True, after=9) is None
    assert ask("b", there=False, after=7) == 7
    assert ask("c", there=False, after=30) == 7  # it may have been removed long before
    assert ask("d", there=True, after=12) == 12
    assert ask("e", there=False, after=3) == 3
    desk.cache.reset()
    assert tier.keeps is None


def test_what_was_fetched_is_not_stored_again() -> None:
    desk = known("ab", "ab", slots=64)
    desk.prefetch("ab")
    desk.end()
    desk.cache.apply_results((), 1.0)
    desk.look()
    assert desk.transfers == []


def test_a_selective_store_takes_what_comes_back() -> None:
    desk = Desk(slots=64, write_rules={STORE: WriteRule(WritePolicy.SELECTIVE, 2)})
    desk.store("ab")
    assert desk.transfers == []
    found = desk.lookup("a")
    desk.cache.release(found.lease)
    desk.cache.end_step()
    desk.look()
    assert keys_of(desk.transfers[0]) == ["a"]


def test_write_back_store_takes_what_is_about_to_leave() -> None:
    desk = Desk(slots=40, write_rules={STORE: WriteRule(WritePolicy.BACK)})
    desk.store("abcdefghijkl")
    assert desk.transfers == []
    desk.store("mnopqrstuvwx")
    assert keys_of(desk.transfers[0])[0] == "abcdefghijkl"  # the leaf of what was used first
    sent = set[str]()
    for path in ("ABCDEFGHIJKL", "0123456789+-"):
        while desk.transfers:
            sent.update(keys_of(desk.end()))
        desk.store(path)
    gone = {"abcdefghijkl"[: end + 1] for end in range(12)} - desk.resident()
    assert gone and gone <= sent
    desk.transfers.clear()
    found = desk.lookup("abcdefghijkl")
    assert found.num_chunks + found.remote == 12 and found.remote == len(gone)


def test_remote_writes_hold_few_slots_and_drops_are_counted() -> None:
    desk = Desk(slots=32, max_writes=3)
    for path in ("abc", "xyz"):
        desk.store(path)
    (transfer,) = desk.transfers
    assert len(transfer.items) == 2
    assert desk.cache.counters.drops[STORE][DropReason.BACKPRESSURE] == 1
    assert sum(desk.cache.discard(chunks(path), HOST) for path in ("abc", "xyz")) == 4
    desk.end()  # what was to follow is gone from the host tier
    assert desk.transfers == []
    assert desk.cache.counters.drops[STORE][DropReason.BACKPRESSURE] == 1 + 2


def test_chunk_evicted_before_its_store_is_stored_on_return() -> None:
    desk = Desk(slots=16)  # of which one is kept for stores under way
    desk.store("ab")
    assert desk.cache.discard(chunks("ab"), HOST) == 1
    assert keys_of(desk.end()) == ["a"]
    desk.store("ab")
    assert [keys_of(each) for each in desk.transfers] == [["ab"]]


def test_the_first_store_that_has_a_chunk_is_read() -> None:
    desk = Desk(names=("near", "far"))
    assert len(desk.lookup("abc").probes) == 2
    desk.answer("a")
    desk.answer("abc")
    assert desk.lookup("abc").remote == 3
    desk.prefetch("abc")
    assert [(str(t.route), keys_of(t)) for t in desk.transfers] == [("near->host", ["a"]), ("far->host", ["ab", "abc"])]
    desk.end()
    desk.end()
    assert desk.lookup("abc").num_chunks == 3


def test_a_fetch_takes_no_room_from_what_others_hold() -> None:
    desk = Desk(slots=2)
    desk.store("x")
    desk.transfers.clear()
    assert desk.lookup("x").lease is not None
    desk.lookup("abc")
    desk.answer("abc")
    desk.prefetch("abc")
    assert [keys_of(transfer) for transfer in desk.transfers] == [["a"]]


def test_fetch_takes_no_room_from_chunks_without_backup() -> None:
    desk = Desk()
    desk.cache = TieredCache([TierSpec(HOST, 2, 4096), TierSpec(FILE, 4, 4096)], remote=(STORE,))
    for path in "ab":
        store(desk.cache, chunks(path), [0])
        desk.look()
        while desk.transfers:
            desk.end()
    desk.lookup("x")
    desk.answer("x")
    assert desk.prefetch("x") == ()
    assert {path_of(each.key) for each in residents_of(desk.cache)} == {"a", "b"}


def test_a_fetch_takes_no_room_from_what_it_follows() -> None:
    desk = Desk(slots=2)
    desk.store("a")
    desk.end()
    found = desk.lookup("abc")
    desk.answer("abc")
    desk.cache.release(found.lease)
    desk.prefetch("abc")
    assert [keys_of(transfer) for transfer in desk.transfers] == [["ab"]]
    assert desk.resident() == {"a"}


def test_fetch_of_standalone_chunks_evicts_none_of_its_request() -> None:
    desk = Desk(slots=2, groups=(CacheGroup(block_size=4, window=1 << 40),))
    keys = [key(path) for path in "abc"]
    for some in (keys[:1], keys):
        desk.cache.prefetch({0: GroupKeys(some)}, 0.0)
        desk.look()
        desk.answer("", present=(True,) * len(desk.probes[0].keys))
        desk.cache.prefetch({0: GroupKeys(some)}, 0.0)
        desk.look()
        if some != keys:
            desk.end()
    assert [[item.key for item in transfer.items] for transfer in desk.transfers] == [keys[2:]]
    assert desk.resident() == {"a"}


def test_names_and_rules_that_cannot_be_are_refused() -> None:
    with pytest.raises(CacheError, match="different names"):
        TieredCache([TierSpec(HOST, 1, 1)], remote=(HOST,))
    with pytest.raises(CacheError, match="a positive number of seconds"):
        CacheSettings(probe_timeout=0.0)


@pytest.mark.parametrize("call", ["lookup", "prefetch"])
def test_keys_that_are_no_path_are_not_fetched(call: str) -> None:
    desk = known("ab", "ab")
    before = state_of(desk.cache)
    with pytest.raises(CacheError, match="distinct new keys of a path"):
        getattr(desk.cache, call)({0: GroupKeys([key("a"), key("a")])}, 1.0)
    assert state_of(desk.cache) == before


def test_chunks_after_device_only_chunks_are_not_probed() -> None:
    desk = known("abc", "abc")
    assert lookup(desk.cache, chunks("abc"), 0.0, first=1)[:-3] == LookupResult()[:-3]
    assert desk.cache.prefetch({0: GroupKeys(chunks("abc"), 1)}, 0.0) == ()
    assert desk.cache.prefetch({0: GroupKeys(chunks("abc"))}, 0.0) != ()


def test_a_chunk_that_was_queued_twice_is_stored_once() -> None:
    rule = {STORE: WriteRule(WritePolicy.SELECTIVE, 2)}
    desk = Desk(64, max_writes=2, write_rules=rule)
    desk.lookup("a")
    for each in "axy":
        desk.store(each)

    def use(path: str) -> None:
        lease = lookup(desk.cache, chunks(path), 0.0, request=path).lease
        if lease is not None:
            desk.cache.release(lease)
        desk.cache.end_step()
        desk.look()

    for each in "xay":
        use(each)
    stores = [keys_of(each) for each in desk.transfers]
    assert stores == [["x"], ["a"]]
    desk.answer("")
    use("a")
    desk.transfers.reverse()
    desk.end(Status.IO_ERROR)
    use("a")
    assert [keys_of(each) for each in desk.transfers] == [["x"], ["y"]]
    ended = [TransferResult(each.job, (Status.OK,)) for each in desk.transfers]
    desk.transfers.clear()
    desk.cache.apply_results(ended, 0.0)
    desk.look()
    assert [keys_of(each) for each in desk.transfers] == [["a"]]
    desk.end()
    assert desk.cache.jobs_in_flight == 0


def test_chunks_that_stand_alone_are_fetched_each_for_itself() -> None:
    desk = Desk(groups=(CacheGroup(block_size=4, window=1 << 40),))
    keys = [key(path) for path in "abc"]
    assert desk.cache.prefetch({0: GroupKeys(keys)}, 0.0) == ()
    desk.look()
    (probe,) = desk.probes
    assert probe.keys == tuple(keys)
    desk.cache.apply_results([ProbeResult(probe.probe, (True, False, True))], 0.0)
    (job,) = desk.cache.prefetch({0: GroupKeys(keys)}, 0.0)
    desk.look()
    (transfer,) = desk.transfers
    assert [(item.key, item.parent) for item in transfer.items] == [(keys[0], None), (keys[2], None)]
    assert desk.cache.prefetch({0: GroupKeys(keys)}, 0.0) == (job,)  # it is joined
    desk.end(Status.NOT_FOUND, Status.OK)
    assert desk.resident() == {"c"}
    assert desk.misses() == {MissReason.NOT_FOUND: 1}, "what came is independent: it is not behind what lapsed"


def test_a_chunk_that_is_named_twice_is_asked_for_once() -> None:
    desk = Desk()
    (a,) = chunks("a")
    desk.cache.lookup({0: GroupKeys([a, a])}, 0.0, protect=Protection.NONE, independent=True, remote_tiers=[STORE])
    desk.look()
    desk.answer("a")
    assert desk.lookup("a").remote == 1
