"""Runs a small test case (a story) in all orders, or in random ones.

Exhaustive: depth first, each run from the start with other choices (stateless search, as in Godefroid, "Model Checking
for Programming Languages using VeriSoft", POPL 1997). A run stops at a state that was reached before.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from longshore.errors import LongshoreError
from longshore.testing.simulated_device.simulation import Simulation


class Story(Protocol):
    """One run in a world."""

    def play(self) -> None:
        """Run the story."""

    def verify(self) -> None:
        """Raise if the result is wrong."""

    def state(self) -> int:
        """A value that identifies the state of the world."""


@dataclass(slots=True)
class Explored:
    """Statistics of an exploration.

    Attributes:
        runs: Number of runs, complete or not.
        orders: Number of distinct complete orders.
        states: Number of distinct states with a choice; 0 for random orders.
        steps: Number of steps of all runs.
    """

    runs: int = 0
    orders: int = 0
    states: int = 0
    steps: int = 0


class WrongError(LongshoreError):
    """A story failed; the message has the order."""


class _SeenError(BaseException):
    """From here on everything has been tried. Not an `Exception`: nobody on the way may take it for one."""


class _Choices:
    """The choices of one run: those given, then the first of each, until a state comes that was `seen`."""

    def __init__(self, given: list[int], seen: set[int]) -> None:
        self.given = given
        self.seen = seen
        self.counts: list[int] = []
        self.story: Story | None = None

    def choose(self, count: int) -> int:
        at = len(self.counts)
        if at >= len(self.given) and self.story is not None:
            state = self.story.state()
            if state in self.seen:
                raise _SeenError
            self.seen.add(state)
        self.counts.append(count)
        return self.given[at] if at < len(self.given) else 0

    def others(self) -> Iterator[list[int]]:
        """The paths that leave this one where it was the first to come."""
        choices = self.given + [0] * (len(self.counts) - len(self.given))
        for at in range(len(self.given), len(self.counts)):
            yield from ([*choices[:at], other] for other in range(1, self.counts[at]))


def explore(make: Callable[[Simulation], Story], *, max_runs: int = 200_000) -> Explored:
    """Try every order of the story that `make` creates.

    Raises:
        WrongError: An order failed, or there are more than `max_runs`.
    """
    explored = Explored()
    seen: set[int] = set()
    todo: list[list[int]] = [[]]
    while todo:
        if explored.runs == max_runs:
            raise WrongError(f"more than {max_runs} runs: the test case has too many interleavings to try them all")
        path = _Choices(todo.pop(), seen)
        world = Simulation(path.choose)
        path.story = make(world)
        with contextlib.suppress(_SeenError):
            _run(path.story, world)
            explored.orders += 1
        explored.runs += 1
        explored.steps += len(world.schedule)
        todo += path.others()
    explored.states = len(seen)
    return explored


def sample(make: Callable[[Simulation, random.Random], Story], seeds: range) -> Explored:
    """Run the story once per seed, in an order that depends on the seed.

    Raises:
        WrongError: A run failed; the message has the seed.
    """
    explored = Explored()
    orders: set[int] = set()
    for seed in seeds:
        chance = random.Random(seed)  # noqa: S311 - the same seed, the same order
        world = Simulation(chance.randrange)
        try:
            _run(make(world, chance), world)
        except WrongError as error:
            raise WrongError(f"seed {seed}: {error}") from error
        explored.runs += 1
        explored.steps += len(world.schedule)
        orders.add(hash(tuple(world.schedule)))
    explored.orders = len(orders)
    return explored


def _run(story: Story, world: Simulation) -> None:
    try:
        story.play()
        story.verify()
    except Exception as error:
        raise WrongError(f"{type(error).__name__}: {error}\nin the order: {' | '.join(world.schedule)}") from error
    if world.checker.conflicts:
        raise WrongError(f"{world.checker.conflicts[0]}\nin the order: {' | '.join(world.schedule)}")
