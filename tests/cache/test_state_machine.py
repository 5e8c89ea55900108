"""Random paths over `TieredCache`, against the model in `cache_model`, with movers that fail, dawdle and reorder."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cache_kit import COLDER, Setup, chunks, key, parent, path_of
from cache_machine import LEAVES, PATHS, PUBLIC, REQUESTS, RETENTION, Machine, run, small
from cache_model_groups import Groups
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from longshore.boundary import DEVICE, FILE, HOST, Slot, Status, TransferResult
from longshore.cache import EDGES, DeviceCopy, GroupKeys, Lease, Retention, SlotState
from longshore.errors import CacheError, JobError, LeaseError

paths = st.sampled_from(PATHS)
long_paths = st.sampled_from(LEAVES)


def copies(*sources: Slot) -> dict[int, DeviceCopy]:
    """What `load` is told of blocks to copy."""
    return {0: DeviceCopy(sources)}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    file = draw(st.sampled_from((None, None, None, 0, 1, 2, 3, 5, 8, 12)))
    found = draw(st.lists(st.sampled_from(PATHS), unique=True, max_size=file)) if file else []
    more = draw(st.sampled_from(((), (), (0,), (2,), (5,), (3, 4)))) if file is not None else ()
    return Setup(
        more=more,
        write_rules=(("third", draw(st.sampled_from(("write_through", "write_back", "write_through_selective"))), 2),)
        if more
        else (),
        host=draw(st.sampled_from((0, 1, 2, 3, 4, 5, 6, 8))),
        file=file,
        ranks=draw(st.integers(1, 2)),
        per_chunk=draw(st.integers(1, 2)),
        offload=draw(st.sampled_from(("write_through", "write_through", "write_back", "write_through_selective"))),
        backup=draw(st.sampled_from(("write_through", "write_back"))),
        threshold=draw(st.integers(2, 3)),
        prompt_only=draw(st.booleans()),
        priority_floor=draw(st.sampled_from((0, 0, 0, 30, 60))),
        events=draw(st.sampled_from((0, 10_000))),
        max_writes=draw(st.sampled_from((1024, 1, 3))),
        found=tuple((slot, key(path), parent(key(path))) for slot, path in enumerate(found)),
        generation=draw(st.sampled_from((0, 3))),
        policy=draw(st.sampled_from(("lru", "arc", "gittins"))),
        remote=draw(st.sampled_from(((), (), ("near",), ("near", "far")))),
        max_probes=draw(st.sampled_from((8192, 8192, 3))),
        partial=draw(st.booleans()),
    )


class Tiers(Machine):
    """Everything that an engine, its movers, and a careless caller can do."""

    begun_alike = 0
    """Partial matches that were found, on all paths."""

    @initialize(setup=setups())
    def build(self, setup: Setup) -> None:
        self.begin(Groups(setup))

    # reading

    @rule(path=long_paths, start=st.sampled_from((0, 0, 0, 1, 2)), request=st.sampled_from(REQUESTS))
    def lookup(self, path: str, start: int, request: str | None) -> None:
        self.world.lookup(path, start, request)

    @rule(path=long_paths, start=st.sampled_from((0, 0, 1)), request=st.sampled_from(REQUESTS))
    def count_later(self, path: str, start: int, request: str | None) -> None:
        self.world.count_later(path, start, request)

    @rule()
    def replace_device(self) -> None:
        self.world.replace_device()

    @precondition(lambda self: self.world.setup.partial)
    @rule(path=long_paths, start=st.sampled_from((0, 0, 0, 1)), request=st.sampled_from(REQUESTS))
    def lookup_text(self, path: str, start: int, request: str | None) -> None:
        hold = self.world.lookup_text(path, start, request)
        Tiers.begun_alike += hold is not None and not set(self.world.holds[hold].keys) <= set(chunks(path))

    @rule(path=paths)
    def lookup_each(self, path: str) -> None:
        self.world.lookup_each(key(path))

    @rule(one=long_paths, other=long_paths, first=st.integers(0, 2), new=long_paths)
    def look_at_the_same_and_store(self, one: str, other: str, first: int, new: str) -> None:
        """Two requests of a step look at paths that may overlap, and a store in the same step needs room."""
        self.world.lookup_each(*chunks(one))
        self.world.lookup_each(*chunks(other)[first:])
        self.world.store_by_host(new, 0)
        self.world.end_step()

    @precondition(lambda self: any(not m.has_load for m in self.world.holds.values()))
    @rule(
        pick=small,
        leave=st.sampled_from((0, 0, 1, 2)),
        skip=st.integers(0, 1),
        short=st.integers(0, 1),
        timeout=st.sampled_from((None, None, 0.5, 3.0)),
    )
    def load(self, pick: int, leave: int, skip: int, short: int, timeout: float | None) -> None:
        """The held chunks, or some of them; with two blocks a chunk, also parts of the first and last."""
        holds = [hold for hold, model in self.world.holds.items() if not model.has_load]
        hold = holds[pick % len(holds)]
        count, spare = max(1, len(self.world.holds[hold].keys) - leave), self.world.setup.per_chunk - 1
        self.world.load(hold, count, skip * spare, short * spare, timeout)

    @rule(path=long_paths, request=st.sampled_from(REQUESTS))
    def lookup_and_load(self, path: str, request: str | None) -> None:
        hold = self.world.lookup(path, 0, request)
        if hold is not None:
            self.world.load(hold, len(self.world.holds[hold].keys), 0, 0)

    @precondition(lambda self: self.world.resident)
    @rule(pick=st.integers(0, 15), skip=st.integers(0, 1))
    def come_back(self, pick: int, skip: int) -> None:
        """A prompt that some tier knows, or is about to."""
        known = list(self.world.resident)
        tail, _ = known[pick % len(known)]
        hold = self.world.lookup(path_of(tail), 0, None)
        if hold is not None:
            skip = min(skip, self.world.setup.per_chunk - 1)
            self.world.load(hold, len(self.world.holds[hold].keys), skip, 0)

    # remote tiers

    @precondition(lambda self: self.world.setup.remote)
    @rule(path=long_paths, start=st.sampled_from((0, 0, 1)))
    def prefetch_remote(self, path: str, start: int) -> None:
        self.world.prefetch_remote(path, start)

    # writing

    @rule(
        path=paths,
        first=st.sampled_from((0, 0, 1, 2)),
        before_eviction=st.booleans(),
        retention=st.sampled_from(RETENTION),
        prompt=st.sampled_from((None, None, 1, 3)),
    )
    def store(
        self, path: str, first: int, before_eviction: bool, retention: tuple[Retention, ...], prompt: int | None
    ) -> None:
        self.world.store(path, min(first, len(path) - 1), before_eviction, retention, prompt)

    @rule(path=long_paths)
    def store_and_settle(self, path: str) -> None:
        self.world.store(path, 0, True)
        self.world.settle_all()

    @rule(path=paths, first=st.sampled_from((0, 0, 1)))
    def store_by_host(self, path: str, first: int) -> None:
        self.world.store_by_host(path, first)

    @rule(path=paths, tier=st.sampled_from((HOST, FILE, *COLDER)))
    def discard(self, path: str, tier: str) -> None:
        if tier in self.world.sizes:
            self.world.discard(path, tier)

    @rule(count=st.integers(1, 3))
    def copy_inside(self, count: int) -> None:
        self.world.copy_inside(count)

    # misuse

    def wrong_calls(self, pick: int) -> list[tuple[type[CacheError], str, tuple[Any, ...], dict[str, Any]]]:
        world, keys = self.world, chunks("aab")
        path, twice = {0: GroupKeys(keys)}, {0: GroupKeys([keys[0], keys[0]])}
        size, per_chunk = world.setup.device_blocks, world.setup.per_chunk
        gone = self.gone[pick % len(self.gone)] if self.gone else Lease(10**9)
        calls: list[tuple[type[CacheError], str, tuple[Any, ...], dict[str, Any]]] = [
            (CacheError, "load", (copies(Slot(HOST, 0, 0)), {0: (1,)}), {}),
            (CacheError, "load", (copies(), {0: ()}), {}),
            (CacheError, "load", (copies(Slot(DEVICE, 0, 0)), {0: (size,)}), {}),
            (CacheError, "resize", (HOST, -1), {}),
            (CacheError, "resize", (HOST, -1), {"discard": True}),
            (CacheError, "resize", ("attic", 1), {"discard": True}),
            (CacheError, "events", (0,), {}),
            (LeaseError, "progress", (gone,), {}),
            (JobError, "release", (10**9,), {}),
            (LeaseError, "release", (gone,), {}),
            (LeaseError, "load", (gone, {0: (0,)}), {}),
            (LeaseError, "release", (None,), {}),
            (LeaseError, "prefetch", (gone, world.now), {}),
            (CacheError, "lookup", ({0: GroupKeys(keys, 4)}, world.now), {}),
            (CacheError, "lookup", ({0: GroupKeys(keys, -1)}, world.now), {}),
            (CacheError, "store", (twice,), {}),
            (CacheError, "lookup", ({0: GroupKeys([b"", keys[0]])}, world.now), {}),
            (CacheError, "lookup", ({0: GroupKeys(["a", 7])}, world.now), {}),  # type: ignore[list-item]
            (CacheError, "lookup", ({0: GroupKeys(["a", 7])}, world.now), {"independent": True}),  # type: ignore[list-item]
            (CacheError, "lookup", (path, world.now), {"request_number": 10**9}),
            (CacheError, "store", (path, {0: tuple(range(3 * per_chunk))}), {"request_number": 0}),
            (CacheError, "store", (path,), {"request_number": 10**9}),
            (CacheError, "store", (path, {0: tuple(range(3 * per_chunk - 1))}), {}),
            (CacheError, "store", (path, {0: (-1, *range(3 * per_chunk - 1))}), {}),
            (CacheError, "store", (path, {0: (*range(3 * per_chunk - 1), size)}), {}),
            (CacheError, "store", (path, {0: (*range(1, 3 * per_chunk), 1)}), {}),
            (CacheError, "store", ({0: GroupKeys(keys, 5)},), {}),
            (CacheError, "discard", (keys, "attic"), {}),
            (CacheError, "adopt", ("attic", ()), {}),
            (CacheError, "adopt", (HOST, ((0, key("y"), None), (0, key("x"), None))), {}),
            (CacheError, "adopt", (HOST, ((world.sizes[HOST], key("y"), None),)), {}),
            (JobError, "apply_results", ((TransferResult(10**9, (Status.OK,)),), world.now), {}),
        ]
        for each, _ in list(world.resident)[pick : pick + 1]:  # a path that is no chain of keys
            calls.append((CacheError, "store", ({0: GroupKeys([key("y"), each])},), {}))
            calls.append((CacheError, "lookup", ({0: GroupKeys([key("y"), each], 1)}, world.now), {}))
            calls.append((CacheError, "lookup", ({0: GroupKeys([each, each])}, world.now), {}))
        for hold, model in list(world.holds.items())[:1]:
            calls += self.wrong_loads(hold, len(model.keys), model.has_load)
        if world.jobs:
            calls += self.wrong_results(list(world.jobs)[pick % len(world.jobs)])
        return calls[pick % 8 :] + calls[: pick % 8]

    def wrong_loads(self, hold: Lease, held: int, has_load: bool) -> list[Any]:
        per_chunk = self.world.setup.per_chunk
        if has_load:
            return [(LeaseError, "load", (hold, {0: (0,)}), {})]
        return [
            (CacheError, "load", (hold,), {}),
            (CacheError, "load", (hold, {0: (-1,)}), {}),
            (CacheError, "load", (hold, {0: (self.world.setup.device_blocks,)}), {}),
            (CacheError, "load", (hold, {0: (0,)}), {"skip": per_chunk}),
            (CacheError, "load", (hold, {0: tuple(range(held * per_chunk + 1))}), {}),
        ]


@pytest.mark.usefixtures("short_batches")
def test_random_paths_keep_every_promise(
    edges_taken: Counter[tuple[SlotState, SlotState]], methods_called: set[str]
) -> None:
    Tiers.begun_alike = 0
    thorough = run(Tiers, 3)
    if thorough and not (Tiers.begun_alike and set(edges_taken) == set(EDGES)):
        run(Tiers, 12)  # the paths depend on the constants of all modules that are loaded: the first ones may lack some
    assert Tiers.begun_alike or not thorough, "no partial match was found"
    assert set(edges_taken) <= set(EDGES), "an illegal edge was taken"
    assert set(edges_taken) == set(EDGES) or not thorough, "a legal edge was never taken"
    assert methods_called >= PUBLIC or not thorough, "a public method has no rule"
