"""Tries orders of one small story: each that differs, or as many as asked by chance.

Exhaustive: depth first, each run from the start with other choices (stateless search, as in Godefroid, "Model Checking
for Programming Languages using VeriSoft", POPL 1997), except that a run stops where it comes to a state that was seen
before: what can happen from there has been tried.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from longshore.errors import LongshoreError
from longshore.transfer.device.simulated.world import World


class Story(Protocol):
    """One run in a world."""

    def play(self) -> None:
        """Do all of it."""

    def verify(self) -> None:
        """Raise if it ended otherwise than it should."""

    def state(self) -> int:
        """Tells the state that the world is in from any other."""


@dataclass(slots=True)
class Explored:
    """What was tried.

    Attributes:
        runs: Times that the story was told, or begun.
        orders: Distinct orders in which it came to its end.
        states: Distinct states in which there was a choice; 0 where the orders were drawn by chance.
        steps: Steps of all runs.
    """

    runs: int = 0
    orders: int = 0
    states: int = 0
    steps: int = 0


class WrongError(LongshoreError):
    """A story went wrong; says in which order."""


class _SeenError(BaseException):
    """From here on everything has been tried. Not an `Exception`: nobody on the way may take it for one."""


class _Path:
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


def explore(make: Callable[[World], Story], *, max_runs: int = 200_000) -> Explored:
    """Try every order of the story that `make` tells.

    Raises:
        WrongError: In one of them something went wrong, or there are more than `max_runs`.
    """
    explored = Explored()
    seen: set[int] = set()
    todo: list[list[int]] = [[]]
    while todo:
        if explored.runs == max_runs:
            raise WrongError(f"more than {max_runs} runs: the test case has too many interleavings to try them all")
        path = _Path(todo.pop(), seen)
        world = World(path.choose)
        path.story = make(world)
        with contextlib.suppress(_SeenError):
            _run(path.story, world)
            explored.orders += 1
        explored.runs += 1
        explored.steps += len(world.schedule)
        todo += path.others()
    explored.states = len(seen)
    return explored


def sample(make: Callable[[World, random.Random], Story], seeds: range) -> Explored:
    """Tell the story once for each seed, in an order that the seed decides.

    Raises:
        WrongError: In one of them something went wrong; names the seed.
    """
    explored = Explored()
    orders: set[int] = set()
    for seed in seeds:
        chance = random.Random(seed)  # noqa: S311 - the same seed, the same order
        world = World(chance.randrange)
        try:
            _run(make(world, chance), world)
        except WrongError as error:
            raise WrongError(f"seed {seed}: {error}") from error
        explored.runs += 1
        explored.steps += len(world.schedule)
        orders.add(hash(tuple(world.schedule)))
    explored.orders = len(orders)
    return explored


def _run(story: Story, world: World) -> None:
    try:
        story.play()
        story.verify()
    except Exception as error:
        raise WrongError(f"{type(error).__name__}: {error}\nin the order: {' | '.join(world.schedule)}") from error
    if world.checker.conflicts:
        raise WrongError(f"{world.checker.conflicts[0]}\nin the order: {' | '.join(world.schedule)}")
