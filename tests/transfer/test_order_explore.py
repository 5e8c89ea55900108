"""Every order of small stories, and some of larger ones; `order_soak.py` tells more."""

from __future__ import annotations

import pytest
from order_cases import STORIES, Chance
from order_kit import Tale, tale

from depth import deep
from longshore.testing.simulated_device import SimulatedDevice
from longshore.testing.simulation import (
    BlockedError,
    Checker,
    Conflict,
    Simulation,
    StuckError,
    WrongError,
    explore,
    sample,
)

LONG = {"layers while others leave", "two each way, layers, cancel", "a step around copies"}
"""Those with the most orders: `make orders` tells them, and these tests do at night."""


@pytest.mark.parametrize("name", [name for name in STORIES if name not in deep(LONG, ())])
def test_every_order_of_a_story_ends_as_it_should(name: str) -> None:
    script, options = STORIES[name]
    explored = explore(tale(script, **options))
    assert explored.states > explored.orders > 1


def test_stories_by_chance() -> None:
    chance = Chance()
    explored = sample(chance.make, range(200))
    assert explored.runs == 200
    assert explored.orders > 190
    assert chance.count() > 200


def test_the_same_seed_tells_the_same_story() -> None:
    assert sample(Chance().make, range(7, 8)).steps == sample(Chance().make, range(7, 8)).steps


# Controls: the judge can say no.


def test_steps_after_a_timed_out_wait_are_tried() -> None:
    def script(told: Tale) -> None:
        job = told.onboard([0], [0], by_layer=True)
        told.wait_layer(job, 0, timeout=1.0)
        told.reads(0, layers=[0])

    with pytest.raises(WrongError, match="RAW: compute"):
        explore(tale(script))


def test_two_operations_of_one_name_are_two() -> None:
    checker = Checker()
    for actor in "ab":
        checker.access(actor, {actor: 1}, "compute writes 0", reads=[], writes=[1])
    assert len(checker.conflicts) == 1


def test_actors_have_names_of_their_own() -> None:
    world = Simulation(lambda count: 0)
    world.queue("copies")
    for name in ("copies", "script"):
        with pytest.raises(ValueError, match="two actors"):
            world.queue(name)


def test_accesses_that_nothing_orders_are_reported_by_kind() -> None:
    checker = Checker()
    checker.access("a", {"a": 1}, "first", reads=[], writes=[1])
    checker.access("b", {"b": 1}, "second", reads=[1], writes=[])
    checker.access("c", {"c": 1, "a": 1}, "third", reads=[], writes=[1])
    checker.access("d", {"d": 1, "b": 1, "c": 1}, "fourth", reads=[], writes=[1])
    assert checker.conflicts == [
        Conflict("RAW", "first", "second"),
        Conflict("WAR", "second", "third"),
        Conflict("WAW", "first", "fourth"),
    ]
    assert str(checker.conflicts[0]) == "RAW: second is not ordered after first"


def test_every_order_is_tried() -> None:
    """Two streams of two operations in two halves each: all that can be told apart are told."""
    ends: set[str] = set()

    class Marks:
        def __init__(self, world: Simulation) -> None:
            self.world = world
            self.log = ""
            for name in "ab":
                queue = world.queue(name)
                for _ in range(2):
                    world.give(queue, name, (lambda name=name: self.note(name), lambda: None))

        def note(self, name: str) -> None:
            self.log += name

        def play(self) -> None:
            self.world.settle()
            ends.add(self.log)

        def verify(self) -> None:
            pass

        def state(self) -> int:
            return hash((self.log, tuple((queue.ended, queue.half) for queue in self.world.queues)))

    explore(Marks)
    assert ends == {"aabb", "abab", "abba", "baab", "baba", "bbaa"}


def test_a_wait_that_nothing_can_end_is_found() -> None:
    def script(told: Tale) -> None:
        told.world.wait_for(lambda: False)

    with pytest.raises(WrongError, match="StuckError: deadlock: script waits"):
        explore(tale(script))
    with pytest.raises(StuckError):
        Simulation(lambda count: 0).wait_for(lambda: False)


def test_too_long_story_is_an_error_not_cut() -> None:
    script, options = STORIES["a step around copies"]
    with pytest.raises(WrongError, match="more than 5 runs"):
        explore(tale(script, **options), max_runs=5)


def test_a_lane_that_would_block_is_found() -> None:
    """It must say what it waits for, so that others can go on."""

    def script(told: Tale) -> None:
        stream = SimulatedDevice(told.world, told.compute, name="more copies").stream(told.memory.layout, "host")
        stream.bind()
        told.offload([0], [0])
        batch = told.engine._state.jobs[1].plan.batch
        with pytest.raises(BlockedError, match="finish would have blocked"):
            stream.copy(batch, ()).finish()

    tale(script)(Simulation(lambda count: count - 1)).play()
