"""Random paths over several KV cache groups, images of two sizes, independent chunks, hosts that move bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cache_kit import COLDER, Setup, chunks, key, letters
from cache_machine import PUBLIC, REQUESTS, Machine, WrongCall, run, small
from cache_model_groups import Groups
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from longshore.boundary import FILE, HOST, Status, TransferResult
from longshore.cache import EDGES, GroupKeys, Lease, SlotState
from longshore.errors import CacheError, JobError, LeaseError

PROMPTS = ("aaaaaa", "aaaabb", "aabaaa", "bbaaaa")

prompts = st.sampled_from(PROMPTS)
ends = st.integers(1, 6)
has = st.lists(st.sampled_from((False, False, False, True)), max_size=6)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    slabs = draw(st.booleans())
    file = draw(st.sampled_from((None, None, 0, 2, 3, 5) if slabs else (None, None, 0, 3, 8, 12)))
    return Setup(
        groups=draw(st.sampled_from((2, 3, 3))),
        slabs=slabs,
        host=draw(st.sampled_from((0, 1, 2, 3, 4) if slabs else (0, 2, 4, 6, 9, 12))),
        file=file,
        more=draw(st.sampled_from(((), (), (3,)))) if file is not None else (),
        ranks=draw(st.integers(1, 2)),
        per_chunk=draw(st.integers(1, 2)),
        offload=draw(st.sampled_from(("write_through", "write_through", "write_back", "write_through_selective"))),
        backup=draw(st.sampled_from(("write_through", "write_back"))),
        events=draw(st.sampled_from((0, 10_000))),
        max_writes=draw(st.sampled_from((1024, 3))),
        policy=draw(st.sampled_from(("lru", "arc", "gittins"))),
        remote=draw(st.sampled_from(((), ("near",)))),
        device_blocks=96,
    )


class Several(Machine):
    """Requests whose layers attend in different ways, and hosts that keep the books of their device themselves."""

    @initialize(setup=setups())
    def build(self, setup: Setup) -> None:
        self.begin(Groups(setup))

    @rule()
    def replace_device(self) -> None:
        self.world.replace_device()

    # requests

    @rule(path=prompts, device=st.lists(has, min_size=3, max_size=3), request=st.sampled_from(REQUESTS))
    def lookup_groups(self, path: str, device: list[list[bool]], request: str | None) -> None:
        self.world.lookup_groups(path, device, request)

    @rule(path=prompts, device=has, by_layer=st.booleans(), timeout=st.sampled_from((None, 0.5)))
    def come_back(self, path: str, device: list[bool], by_layer: bool, timeout: float | None) -> None:
        """A prompt of which the device has a part in the first group alone."""
        hold = self.world.lookup_groups(path, [device, [], []], "one")
        if hold is not None:
            self.world.load_groups(hold, by_layer, timeout)

    @precondition(lambda self: self.to_load())
    @rule(pick=small)
    def load_groups(self, pick: int) -> None:
        holds = self.to_load()
        self.world.load_groups(holds[pick % len(holds)], pick % 2 == 0)

    def to_load(self) -> list[Lease]:
        return [hold for hold, model in self.world.holds.items() if model.joint and not model.has_load]

    @rule(path=prompts, group=st.integers(0, 2), end=ends)
    def lookup_each(self, path: str, group: int, end: int) -> None:
        if group < self.world.setup.groups:
            self.world.lookup_each(chunks(path, group)[-(-end // letters(group)) - 1])

    @rule(one=prompts, other=prompts, group=st.integers(0, 2), first=st.integers(0, 2), new=prompts)
    def look_at_the_same_and_store(self, one: str, other: str, group: int, first: int, new: str) -> None:
        """Two requests of a step look at paths that may overlap, and a store in the same step needs room."""
        group = self.known(group)
        self.world.lookup_each(*chunks(one, group))
        self.world.lookup_each(*chunks(other, group)[first:])
        self.store_by_host(new, group, 6)
        self.world.end_step()

    # blocks

    @rule(path=prompts, end=ends, first=st.sampled_from((0, 0, 1, 2)), before_eviction=st.booleans())
    def store(self, path: str, end: int, first: int, before_eviction: bool) -> None:
        """All groups have come so far."""
        for group in range(self.world.setup.groups):
            count = end // letters(group)
            if first < count and group:
                self.world.store_independent(path[: count * letters(group)], group, first, before_eviction)
            elif first < count:
                self.world.store(path[:count], first, before_eviction)

    @rule(path=prompts)
    def store_and_settle(self, path: str) -> None:
        self.store(path, 6, 0, True)
        self.world.settle_all()

    @rule(path=prompts, group=st.integers(0, 2), end=ends)
    def store_by_host(self, path: str, group: int, end: int) -> None:
        if group and group < self.world.setup.groups:
            self.world.store_independent_by_host(path[:end], group, 0)
        elif not group:
            self.world.store_by_host(path[:end], 0)

    @rule(path=prompts, group=st.integers(1, 2), some=st.sets(st.integers(0, 5)), request=st.sampled_from(REQUESTS))
    def lease_each(self, path: str, group: int, some: set[int], request: str | None) -> None:
        self.world.lease_each(self.independent(path, group, some), self.known(group), request)

    @rule(path=prompts, group=st.integers(1, 2), some=st.sets(st.integers(0, 5)))
    def load_by_host(self, path: str, group: int, some: set[int]) -> None:
        self.world.load_by_host(self.independent(path, group, some), self.known(group))

    @rule(path=prompts, group=st.integers(1, 2), end=ends)
    def slide(self, path: str, group: int, end: int) -> None:
        """A window has moved on: of what it has slid past all are as ready as before."""
        past_window = chunks(path[:end], self.known(group))
        self.world.call("store", {self.known(group): GroupKeys((), past_window=past_window)})
        self.world.settle()

    def known(self, group: int) -> int:
        return min(group, self.world.setup.groups - 1)

    def independent(self, path: str, group: int, some: set[int]) -> list[bytes]:
        """Independent chunks of a group: `some` of those that are ready, or else of all."""
        keys = chunks(path, self.known(group))
        ready = [each for each in keys if self.world.is_readable(each)]
        return [each for at, each in enumerate(ready or keys) if at in some or not some]

    @rule(path=prompts, end=ends, group=st.integers(0, 2), tier=st.sampled_from((HOST, FILE, *COLDER)))
    def discard(self, path: str, end: int, group: int, tier: str) -> None:
        if tier in self.world.sizes and group < self.world.setup.groups:
            self.world.discard(path[:end], tier, group)

    # remote tiers

    @precondition(lambda self: self.world.setup.remote)
    @rule(path=prompts, there=st.integers(1, 6), lapsed=st.integers(0, 6))
    def others_have(self, path: str, there: int, lapsed: int) -> None:
        """Another engine has stored the beginning of `path`, of all groups; a chunk of the windows has lapsed."""
        for group in range(self.world.setup.groups):
            self.world.others_store(path, there // letters(group), "near", group)
        self.world.lapse(path, lapsed, "near", 1)

    @precondition(lambda self: self.world.setup.remote)
    @rule(path=prompts, group=st.integers(0, 2))
    def prefetch_remote(self, path: str, group: int) -> None:
        if self.known(group):
            self.world.prefetch_remote_independent(path, self.known(group))
        else:
            self.world.prefetch_remote(path, 0)

    @precondition(lambda self: self.world.setup.remote)
    @rule(path=prompts, there=st.sampled_from((2, 4, 6, 6)), lapsed=st.integers(0, 9), settle=st.booleans())
    def come_from_remote(self, path: str, there: int, lapsed: int, settle: bool) -> None:
        """A request that waits for all that others have of its prompt, group by group."""
        self.others_have(path, there, lapsed)
        for group in range(self.world.setup.groups):
            self.prefetch_remote(path, group)
        for number, question in list(self.world.questions.items()):
            for rank in sorted(question.waiting):
                self.world.answer(number, rank, True, Status.OK)
        for group in range(self.world.setup.groups):
            self.prefetch_remote(path, group)
        if settle:
            self.world.settle_all()

    # misuse

    def wrong_calls(self, pick: int) -> list[WrongCall]:
        world, keys, per_chunk = self.world, chunks("aab"), self.world.setup.per_chunk
        groups = world.setup.groups
        gone = self.gone[pick % len(self.gone)] if self.gone else Lease(10**9)
        window = chunks("aab", 1)
        wanted = {group: GroupKeys(chunks("aa", group), device=()) for group in range(groups)}
        rest, blocks = {group: path for group, path in wanted.items() if group}, tuple(range(3 * per_chunk))
        windows, twice = GroupKeys(window), GroupKeys([window[0], window[0]])
        calls: list[WrongCall] = [
            (CacheError, "lookup", (rest, world.now), {}),
            (CacheError, "lookup", ({}, world.now), {}),
            (CacheError, "lookup", ({**rest, 0: wanted[0]._replace(device=(True,) * 3)}, world.now), {}),
            (LeaseError, "load", (gone,), {}),
            (CacheError, "store", ({groups: windows}, {groups: blocks}), {}),
            (CacheError, "store", ({-1: windows}, {-1: blocks}), {}),
            (CacheError, "store", ({1: twice}, {1: blocks[: 2 * per_chunk]}), {}),
            (CacheError, "store", ({1: twice},), {}),
            (CacheError, "store", ({0: GroupKeys((), past_window=keys)},), {}),
            (CacheError, "load", ({1: GroupKeys(())},), {}),
            (CacheError, "lookup", ({9: GroupKeys(keys)}, world.now), {"independent": True}),
            (CacheError, "load", ({1: GroupKeys([key("y", 1)])},), {}),
            (CacheError, "load", ({9: GroupKeys(keys)},), {}),
            (JobError, "release", (10**9,), {}),
            (CacheError, "prefetch", ({groups: windows}, world.now), {}),
            (CacheError, "prefetch", ({0: GroupKeys(keys, 4)}, world.now), {}),
            (CacheError, "prefetch", ({1: twice}, world.now), {}),
            (CacheError, "prefetch", (rest, world.now), {}),
            (CacheError, "prefetch", (dict.fromkeys(wanted, wanted[0]), world.now), {}),
            (CacheError, "prefetch", ({**rest, 0: GroupKeys([b""])}, world.now), {}),
            (JobError, "apply_results", ((TransferResult(10**9, (Status.OK,)),), world.now), {}),
        ]
        for hold, model in list(world.holds.items())[:1]:
            calls += self.wrong_loads(hold, len(model.keys), model.joint, model.has_load)
        if world.jobs:
            calls += self.wrong_results(list(world.jobs)[pick % len(world.jobs)])
        return calls[pick % 8 :] + calls[: pick % 8]

    def wrong_loads(self, hold: Lease, held: int, joint: bool, has_load: bool) -> list[Any]:
        groups = self.world.setup.groups
        if not joint or has_load:
            return [
                (LeaseError, "load", (hold,), {}),
                (LeaseError, "load", (hold, {0: (0,)}), {}),
            ]
        return [
            (CacheError, "load", (hold,), {}),
            (CacheError, "load", (hold, {groups: (0,)}), {}),
            (CacheError, "load", (hold, {0: tuple(range(held * self.world.setup.per_chunk + 1))}), {}),
        ]


@pytest.mark.usefixtures("short_batches")
def test_random_paths_of_several_groups_keep_every_promise(
    edges_taken: Counter[tuple[SlotState, SlotState]], methods_called: set[str]
) -> None:
    thorough = run(Several, 1)
    assert set(edges_taken) <= set(EDGES), "an illegal edge was taken"
    assert methods_called >= PUBLIC - {"adopt"} or not thorough, "a public method was never called"
