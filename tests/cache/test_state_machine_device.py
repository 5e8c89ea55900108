"""Random paths over a handed-over device: requests load, compute, store and go, while the movers do as they like."""

from __future__ import annotations

from collections import Counter

import pytest
from cache_kit import Setup, chunks
from cache_machine import LEAVES, PATHS, PUBLIC, REQUESTS, Machine, WrongCall, run, small
from cache_model_device_pool import HandedOver
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from longshore.cache import EDGES, GroupKeys, State
from longshore.errors import CacheError, CapacityError

paths = st.sampled_from(PATHS)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    file = draw(st.sampled_from((None, None, 0, 3, 8)))
    return Setup(
        device_blocks=draw(st.sampled_from((4, 8, 12, 20))),
        host=draw(st.sampled_from((0, 2, 4, 6, 8))),
        file=file,
        ranks=draw(st.integers(1, 2)),
        per_chunk=draw(st.integers(1, 2)),
        offload=draw(st.sampled_from(("write_through", "write_back", "write_through_selective"))),
        backup=draw(st.sampled_from(("write_through", "write_back"))),
        events=draw(st.sampled_from((0, 10_000))),
        max_writes=draw(st.sampled_from((1024, 1, 3))),
        policy=draw(st.sampled_from(("lru", "arc", "gittins"))),
    )


class OnDevice(Machine):
    """An engine whose blocks the pool keeps."""

    world: HandedOver

    @initialize(setup=setups())
    def build(self, setup: Setup) -> None:
        self.begin(HandedOver(setup))

    @precondition(lambda self: not self.world.asleep)
    @rule(path=paths, request=st.sampled_from(REQUESTS))
    def arrive(self, path: str, request: str | None) -> None:
        self.world.arrive(path, request)

    @precondition(lambda self: not self.world.asleep)
    @rule(path=st.sampled_from(LEAVES), evicting=st.booleans())
    def serve(self, path: str, evicting: bool) -> None:
        """A request from its beginning to its end, with nothing in its way."""
        visit = self.world.arrive(path, None)
        if visit is not None:
            self.world.settle_all()
            self.world.finish_visit(visit, evicting)
            self.world.leave(visit)

    @precondition(lambda self: not self.world.asleep)
    @rule(path=st.sampled_from(LEAVES), evicting=st.booleans())
    def hurry(self, path: str, evicting: bool) -> None:
        """A request that is over before anything has been moved."""
        visit = self.world.arrive(path, None)
        if visit is not None:
            self.world.finish_visit(visit, evicting)
            self.world.leave(visit)

    @precondition(lambda self: self.world.visits)
    @rule(pick=small, evicting=st.booleans())
    def finish_visit(self, pick: int, evicting: bool) -> None:
        visits = self.world.visits
        self.world.finish_visit(visits[pick % len(visits)], evicting)

    @precondition(lambda self: self.world.visits)
    @rule(pick=small)
    def leave(self, pick: int) -> None:
        visits = self.world.visits
        self.world.leave(visits[pick % len(visits)])

    @precondition(lambda self: self.world.visits)
    @rule(pick=small)
    def hold_more(self, pick: int) -> None:
        visits = self.world.visits
        self.world.hold_more(visits[pick % len(visits)])

    @precondition(lambda self: self.world.extra)
    @rule()
    def let_go_of_more(self) -> None:
        self.world.let_go_of_more()

    @precondition(lambda self: len(self.world.visits) > 1)
    @rule(pick=small)
    def copy_between(self, pick: int) -> None:
        one, *others = self.world.visits
        self.world.copy_between(one.blocks[0], others[pick % len(others)])

    @rule(count=st.integers(0, 20))
    def make_way(self, count: int) -> None:
        if not self.world.asleep:
            free = self.world.call("pool.make_way", count)
            self.world.settle()
            assert free == self.world.pool.stats().free

    # misuse

    def wrong_calls(self, pick: int) -> list[WrongCall]:
        world, blocks, keys = self.world, self.world.setup.device_blocks, chunks("aab")
        free = next((b for b in range(blocks) if not world.references()[b]), blocks)
        calls: list[WrongCall] = [
            (CacheError, "pool.allocate", (-1,), {}),
            (CacheError if world.asleep else CapacityError, "pool.allocate", (blocks + 1,), {}),
            (CacheError, "pool.release", ([free],), {}),
            (CacheError, "pool.release", ([-1],), {}),
            (CacheError, "pool.release", ([blocks],), {}),
            (CacheError, "pool.hold", ([blocks],), {}),
            (CacheError, "pool.store", (GroupKeys(keys), [free] * 3), {}),
            (CacheError, "pool.copy", ([free], [free]), {}),
            (CacheError, "pool.store", (GroupKeys([b""]), [free]), {}),
        ]
        if world.jobs:
            calls += self.wrong_results(list(world.jobs)[pick % len(world.jobs)])
        return calls[pick % 8 :] + calls[: pick % 8]


@pytest.mark.usefixtures("short_batches")
def test_random_paths_over_a_device_pool_keep_every_promise(
    edges_taken: Counter[tuple[State, State]], methods_called: set[str]
) -> None:
    thorough = run(OnDevice, 1)
    assert set(edges_taken) <= set(EDGES), "an illegal edge was taken"
    assert methods_called >= PUBLIC - {"adopt", "prefetch"} or not thorough, "a public method was never called"
