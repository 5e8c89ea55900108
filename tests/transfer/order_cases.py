"""Stories for every order, and the maker of those by chance; `order_soak.py` and the tests tell them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from order_kit import BLOCKS, SLOTS, Tale

from longshore.boundary import Status, Urgency
from longshore.testing.simulation import Simulation

Script = Callable[[Tale], None]


def two_jobs_each_way(told: Tale) -> None:
    """All of them on two blocks and two slots."""
    told.offload([0], [0])
    told.onboard([0], [1])
    told.offload([1], [1])
    told.onboard([1], [0])


def a_step_around_copies(told: Tale) -> None:
    told.writes(0)
    told.begin_step()
    told.offload([0], [0])
    told.onboard([1], [1])
    told.end_step()
    told.reads(1)
    told.writes(0)
    told.begin_step()
    told.onboard([0], [0])
    told.end_step()
    told.reads(0)


def layers_while_others_leave(told: Tale) -> None:
    told.begin_step()
    told.offload([1], [1], urgency=Urgency.WRITE)
    job = told.onboard([0], [0], by_layer=True)
    for layer in range(2):
        assert told.wait_layer(job, layer) is Status.OK
        told.reads(0, layers=[layer])
    told.end_step([job])
    told.writes(0)


def cancelled_on_shared_slots(told: Tale) -> None:
    told.offload([0], [0])
    told.cancel(told.onboard([0], [1]))
    told.offload([1], [1])
    told.end_step()
    told.writes(0)


def two_each_way_layers_and_a_cancel(told: Tale) -> None:
    told.offload([0], [0], urgency=Urgency.WRITE)
    job = told.onboard([0], [1], by_layer=True)
    told.offload([1], [0])
    told.cancel(told.onboard([1], [2]))
    assert told.wait_layer(job, 0) is Status.OK
    told.reads(0, layers=[0])


def reuse_of_a_block_in_flight(told: Tale) -> None:
    told.begin_step()
    told.onboard([0], [0])
    told.inside(0, 1, tokens=1)
    told.offload([1], [1])
    told.end_step()
    told.reads(1)


def urgent_between_batches(told: Tale) -> None:
    told.offload([0, 1], [0, 1], urgency=Urgency.WRITE)
    told.offload([2], [2], urgency=Urgency.DEMAND)
    told.onboard([1], [2], urgency=Urgency.PREFETCH)


def asleep_in_the_middle(told: Tale) -> None:
    """The engine's memory goes while jobs are in flight both ways, and comes back when they have ended."""
    out = told.offload([0], [0])
    back = told.onboard([1], [0], by_layer=True)
    told.forget(blocks=[1], slots=[0])
    told.free()
    assert told.wait_layer(back, 1) in {Status.OK, Status.TIER_OFF}
    told.wait(out, back)
    told.take_back()
    told.onboard([2], [1])
    told.end_step()
    told.reads(2)


STORIES: dict[str, tuple[Script, dict[str, Any]]] = {
    "two jobs each way": (two_jobs_each_way, {}),
    "a step around copies": (a_step_around_copies, {}),
    "layers while others leave": (layers_while_others_leave, {}),
    "cancelled on shared slots": (cancelled_on_shared_slots, {}),
    "two each way, layers, cancel": (two_each_way_layers_and_a_cancel, {}),
    "reuse of a block in flight": (reuse_of_a_block_in_flight, {}),
    "urgent between batches": (urgent_between_batches, {"max_batch_bytes": 32, "depth": 1}),
    "asleep in the middle": (asleep_in_the_middle, {"max_batch_bytes": 32}),
}


class Chance:
    """Makes stories by chance, and counts the conflicts that came up in them."""

    def __init__(self, jobs: int = 7) -> None:
        self.jobs = jobs
        self.tales: list[Tale] = []
        self.conflicts = 0

    def make(self, world: Simulation, chance: random.Random) -> Tale:
        self.count()
        options = {"max_batch_bytes": chance.choice([16, 32, 1 << 20]), "depth": chance.choice([1, 2, 3])}
        self.tales.append(Tale(world, lambda told: self._script(told, chance), **options))
        return self.tales[-1]

    def count(self) -> int:
        """Jobs so far that had to wait for another."""
        self.conflicts += sum(tale._hazards().waits for tale in self.tales)
        self.tales.clear()
        return self.conflicts

    def _script(self, told: Tale, chance: random.Random) -> None:
        kinds = ["offload", "onboard", *chance.choices(["offload", "onboard", "inside"], k=self.jobs - 2)]
        chance.shuffle(kinds)
        jobs: list[int] = []
        for kind in kinds:
            self._compute(told, chance)
            jobs.append(self._job(told, chance, kind))
            if chance.random() < 0.1:
                told.cancel(jobs[-1])
        told.end_step()
        told.reads(chance.randrange(BLOCKS))

    def _compute(self, told: Tale, chance: random.Random) -> None:
        if chance.random() < 0.4:
            told.end_step()
            told.reads(chance.randrange(BLOCKS))
            told.writes(chance.randrange(BLOCKS))
            if chance.random() < 0.7:
                told.begin_step()
        elif chance.random() < 0.1:
            told.begin_step()

    def _job(self, told: Tale, chance: random.Random, kind: str) -> int:
        fields: dict[str, Any] = {"urgency": Urgency(chance.randrange(3))}
        count = chance.randint(1, 2)
        blocks, slots = chance.sample(range(BLOCKS), count), chance.sample(range(SLOTS), count)
        if kind == "inside":
            source, target = chance.sample(range(BLOCKS), 2)
            return told.inside(source, target, tokens=chance.choice([None, 1]), **fields)
        fields |= {"by_layer": chance.random() < 0.3, "tokens": chance.choice([None, None, 1])}
        return (told.offload if kind == "offload" else told.onboard)(blocks, slots, **fields)
