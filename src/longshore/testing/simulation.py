"""Runs concurrent actors in one thread, one step at a time, in a chosen order.

    script     a plain function; other actors may run before each of its actions, and while it waits
    lanes      the engine's own generators; each continues when its condition is met
    queues     streams of the device; operations run later than submitted, copies in two halves

If several actors can continue, `choose(count)` selects one: at random, or each in turn (`explore`).

Accesses without an order are found by vector clocks. A clock has, for each actor, the number of operations that are
known to have ended:

    host     {compute: 3}                   "the third operation of the compute stream, and all before it, have ended"
    copies   {compute: 3, copies: 1}        an operation knows what its stream knew, what the submitting actor knew, and
                                            the events that it waits for

Two accesses to the same bytes, one of which writes, must be so ordered when the second is *submitted*, whatever happens
to run first this time. The method is that of happens-before race detectors (Lamport 1978; Flanagan and Freund,
"FastTrack", PLDI 2009), with one entry for each actor that read or wrote.

`explore` runs a small test case (a story) in all orders, `sample` in random ones. Exhaustive exploration is depth
first, each run from the start with other choices (stateless search, as in Godefroid, "Model Checking for Programming
Languages using VeriSoft", POPL 1997). A run stops at a state that was reached before.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from longshore.errors import LongshoreError
from longshore.transfer.ordering import Access, Hazards, LaneDriver, QueuePosition, WaitCondition

Clock = dict[str, int]


def join(clock: Clock, other: Clock) -> None:
    """Merge `other` into `clock`."""
    for actor, number in other.items():
        if clock.get(actor, 0) < number:
            clock[actor] = number


class Conflict(NamedTuple):
    """Two accesses without an order. `kind`: `RAW`, `WAR` or `WAW`, the later access first."""

    kind: str
    earlier: str
    later: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.later} is not ordered after {self.earlier}"


class _Entry(NamedTuple):
    number: int
    label: str


@dataclass(slots=True)
class _Cell:
    """The newest write and read of some bytes, by actor."""

    writes: dict[str, _Entry] = field(default_factory=dict)
    reads: dict[str, _Entry] = field(default_factory=dict)


class Checker:
    """All accesses so far, by cell. A cell is read or written as a unit."""

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self._cells: dict[Hashable, _Cell] = {}

    def access(
        self, actor: str, clock: Clock, label: str, *, reads: Iterable[Hashable], writes: Iterable[Hashable]
    ) -> None:
        """Record that operation `clock[actor]` of `actor`, with the knowledge `clock`, accesses these cells."""
        entry = _Entry(clock[actor], label)
        for name in reads:
            cell = self._cell(name)
            self._compare("RAW", cell.writes, clock, label)
            cell.reads[actor] = entry
        for name in writes:
            cell = self._cell(name)
            self._compare("WAW", cell.writes, clock, label)
            self._compare("WAR", cell.reads, clock, label)
            cell.writes[actor] = entry

    def _cell(self, name: Hashable) -> _Cell:
        cell = self._cells.get(name)
        if cell is None:
            cell = self._cells[name] = _Cell()
        return cell

    def _compare(self, kind: str, earlier: dict[str, _Entry], clock: Clock, label: str) -> None:
        for actor, entry in earlier.items():
            if clock.get(actor, 0) < entry.number:
                self.conflicts.append(Conflict(kind, entry.label, label))


SCRIPT = "script"


class StuckError(LongshoreError):
    """Deadlock: an actor waits, and no actor can continue."""


class BlockedError(LongshoreError):
    """A lane would have blocked outside a wait condition."""


class Operation(NamedTuple):
    """An operation of a queue: `parts` run one by one, after `after` have ended."""

    label: str
    after: tuple[Mark, ...]
    parts: tuple[Callable[[], None], ...]


class Mark(NamedTuple):
    """The end of operation `number` of a queue."""

    queue: SimulatedQueue
    number: int
    clock: Clock

    def has_passed(self) -> bool:
        """Whether it has ended."""
        return self.queue.ended >= self.number


@dataclass(slots=True, eq=False)
class SimulatedQueue:
    """A stream of the device. `given` and `ended` count operations; `half` counts executed parts of the first one."""

    name: str
    waiting: deque[Operation] = field(default_factory=deque)
    given: int = 0
    ended: int = 0
    half: int = 0
    clock: Clock = field(default_factory=dict)
    holds: list[Mark] = field(default_factory=list)

    def can_run(self) -> bool:
        """Whether its first operation, or the rest of it, can run."""
        return bool(self.waiting) and all(mark.has_passed() for mark in self.waiting[0].after)

    def run(self) -> None:
        """Run the next part."""
        operation = self.waiting[0]
        operation.parts[self.half]()
        self.half += 1
        if self.half == len(operation.parts):
            self.waiting.popleft()
            self.half = 0
            self.ended += 1


@dataclass(slots=True)
class _LaneActor:
    name: str
    steps: Generator[WaitCondition, None, None]
    condition: WaitCondition | None = None
    is_running: bool = False


class Simulation(LaneDriver):
    """The scheduler and the checker. Drives one engine."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        """`choose(count)` picks one of `[0, count)`."""
        self.lock = contextlib.nullcontext()  # only one actor runs at a time
        self.checker = Checker()
        self.actor = SCRIPT
        self.queues: list[SimulatedQueue] = []
        self.lanes: list[_LaneActor] = []
        self.schedule: list[str] = []
        self._choose = choose
        self._clocks: dict[str, Clock] = {SCRIPT: {}}

    # What actors do

    def queue(self, name: str) -> SimulatedQueue:
        """A new stream of the device."""
        self._check_new(name)
        self.queues.append(SimulatedQueue(name))
        return self.queues[-1]

    def give(
        self,
        queue: SimulatedQueue,
        label: str,
        parts: tuple[Callable[[], None], ...],
        *,
        after: tuple[Mark, ...] = (),
        reads: Collection[Hashable] = (),
        writes: Collection[Hashable] = (),
    ) -> Mark:
        """Submit an operation of the current actor to `queue`; its accesses are checked now."""
        holds = (*queue.holds, *after)
        queue.holds.clear()
        queue.given += 1
        for known in (self.clock, *(mark.clock for mark in holds)):
            join(queue.clock, known)
        queue.clock[queue.name] = queue.given
        self.checker.access(queue.name, queue.clock, label, reads=reads, writes=writes)
        queue.waiting.append(Operation(label, holds, parts))
        return self.mark(queue)

    def mark(self, queue: SimulatedQueue) -> Mark:
        """The end of all work submitted to `queue`."""
        return Mark(queue, queue.given, dict(queue.clock))

    def touch(self, label: str, *, reads: Collection[Hashable] = (), writes: Collection[Hashable] = ()) -> None:
        """Record an access of the current actor."""
        self.clock[self.actor] = self.clock.get(self.actor, 0) + 1
        self.checker.access(self.actor, self.clock, label, reads=reads, writes=writes)

    def knows(self, clock: Clock) -> None:
        """Merge `clock` into the knowledge of the current actor."""
        join(self.clock, clock)

    @property
    def clock(self) -> Clock:
        """The knowledge of the current actor."""
        return self._clocks[self.actor]

    # Driver: the engine's side

    def wait_for(self, is_met: Callable[[], bool], timeout: float | None = None) -> bool:
        """Let other actors run until `is_met`; a timeout may expire at any moment."""
        while not is_met():
            if not self._step(None if timeout is None else "time passes"):
                return False
        return True

    def notify(self) -> None:
        """No effect: conditions are checked at every step."""

    def start(self, name: str, lane: Generator[WaitCondition, None, None], stop: Callable[[], None]) -> None:
        """Add an actor."""
        self._check_new(name)
        self.lanes.append(_LaneActor(name, lane))
        self._clocks[name] = {}

    def join(self) -> None:
        """Let other actors run until no lane is left."""
        self.wait_for(lambda: not self.lanes)

    def watch(self, hazards: Hazards) -> Hazards:
        """`hazards`, wrapped so that its answers add to the knowledge of the actor."""
        return WatchedHazards(hazards, self)

    # The scheduler

    def pause(self) -> None:
        """Let other actors run before the next action of the script."""
        while self._step(SCRIPT):
            pass

    def settle(self) -> None:
        """Run all actors until none can continue."""
        while self._options():
            self._step(None)

    def _check_new(self, name: str) -> None:
        if name in self._clocks or any(queue.name == name for queue in self.queues):
            raise ValueError(f"two actors cannot both be called {name!r}")

    def _options(self) -> list[tuple[str, Callable[[], None]]]:
        lanes = [(lane.name, lambda lane=lane: self._resume(lane)) for lane in self.lanes if self._can_resume(lane)]
        queues = [(queue.name, queue.run) for queue in self.queues if queue.can_run()]
        return lanes + queues

    def _step(self, other: str | None) -> bool:
        """One of those that can go on does. Returns `False` when `other` was chosen instead."""
        options = self._options()
        names = [name for name, _ in options] + ([other] if other else [])
        if not names:
            raise StuckError(
                f"deadlock: {self.actor} waits, and no lane can proceed: {', '.join(lane.name for lane in self.lanes)}"
            )
        index = self._choose(len(names)) if len(names) > 1 else 0
        self.schedule.append(names[index])
        if index == len(options):
            return False
        options[index][1]()
        return True

    def _can_resume(self, lane: _LaneActor) -> bool:
        if lane.condition is None or lane.is_running:
            return not lane.is_running
        with _Turn(self, lane.name):
            return lane.condition.is_met()

    def _resume(self, lane: _LaneActor) -> None:
        with _Turn(self, lane.name):
            lane.is_running = True
            lane.condition = next(lane.steps, None)
            lane.is_running = False
        if lane.condition is None:
            self.lanes.remove(lane)


class _Turn:
    """While it lasts, another actor is at hand."""

    def __init__(self, world: Simulation, actor: str) -> None:
        self._world, self._actor = world, actor

    def __enter__(self) -> None:
        self._before, self._world.actor = self._world.actor, self._actor

    def __exit__(self, *_: object) -> None:
        self._world.actor = self._before


class WatchedHazards(Hazards):
    """An engine's hazards: an actor that is told of a job's end learns what the ending actor knew.

    Attributes:
        newest: The last ticket.
        waits: Number of admitted jobs with dependencies.
    """

    def __init__(self, hazards: Hazards, world: Simulation) -> None:
        self.newest: QueuePosition | None = None
        self.waits = 0
        self._inner = hazards
        self._world = world
        self._told: dict[QueuePosition, Clock] = {}
        self._ends: dict[tuple[int, int], Clock] = {}

    def add(self, queue: int, accesses: Sequence[Access]) -> QueuePosition:
        """As `Hazards.add`; the actor that runs the job learns what the submitting actor knows."""
        self.newest = self._inner.add(queue, accesses)
        self._told[self.newest] = dict(self._world.clock)
        self.waits += not self._inner.is_clear(self.newest)
        return self.newest

    def is_clear(self, ticket: QueuePosition) -> bool:
        """As the engine's own."""
        is_clear = self._inner.is_clear(ticket)
        if is_clear:
            self._world.knows(self._told[ticket])
            for turn in enumerate(ticket.needs):
                self._world.knows(self._ends.get(turn, {}))
        return is_clear

    def end(self, ticket: QueuePosition) -> None:
        """As the engine's own."""
        self._inner.end(ticket)
        self._ends[ticket.queue, ticket.number] = dict(self._world.clock)

    def learn(self, ticket: QueuePosition) -> None:
        """Record that the current actor was told of the end of `ticket`."""
        self._world.knows(self._ends[ticket.queue, ticket.number])

    def learn_all(self) -> None:
        """Record that the current actor sees the jobs in flight, and thus that the others have ended."""
        for clock in self._ends.values():
            self._world.knows(clock)


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
