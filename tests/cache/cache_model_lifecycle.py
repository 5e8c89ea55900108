"""The rest of what an engine can do to a `World`: another device pool, resize, copy inside the device, and listen.

What the events say is added up in `heard`, which must at any time be what the cache says it has.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache_kit import Setup
from cache_model import World
from cache_movers import POISON
from object_state import state_of

from longshore.boundary import DEVICE, Key, Slot
from longshore.cache import DeviceCopy, Event, EventKind, SlotState
from longshore.errors import CacheError, CapacityError


class Life(World):
    """A world whose device is replaced, whose tiers grow and shrink, and that listens to the events."""

    def __init__(self, setup: Setup) -> None:
        self.heard: set[tuple[Key, str]] = set()
        self.numbers = 0
        super().__init__(setup)

    def replace_device(self) -> None:
        """Another device pool takes the place of this one, unless jobs work on it."""
        if any(DEVICE in job.transfer.route for job in self.jobs.values()):
            self.refused(CacheError, "replace_device", self.setup.device_blocks)
            return
        self.call("replace_device", self.setup.device_blocks)
        for rank in self.movers.device:
            rank[:] = [POISON] * len(rank)
        self.settle()

    def copy_inside(self, count: int) -> None:
        """Copy some device blocks over others."""
        if len(self.free_blocks) < 2 * count:
            return
        blocks = self.take_blocks(2 * count)
        sources = [Slot(DEVICE, 0, block) for block in blocks[:count]]
        job = self.call("load", {0: DeviceCopy(sources, 3)}, {0: tuple(blocks[count:])}).jobs[0].job
        self.carry()
        self.jobs[job].blocks = blocks
        assert self.jobs[job].transfer.sections[0].blocks == tuple(blocks[count:])
        assert [item.source for item in self.jobs[job].transfer.items] == sources
        self.check()

    def resize(self, tier: str, slots: int, discard: bool) -> bool:
        """Have `slots` slots in `tier`, if what lies above may go; says whether that was so."""
        in_the_way = [slot for slot in self.touched(tier) if slot.index not in self.setup.indices(slots)]
        before, books = set(self.resident), state_of(self.cache)
        above = {key for (key, where), each in self.resident.items() if where == tier and each.slot in in_the_way}
        try:
            self.call("resize", tier, slots, discard=discard)
        except CapacityError as error:
            assert in_the_way, f"{slots} slots of {tier} were refused, and nothing lies above"
            assert state_of(self.cache) == books
            self.answers.append(f"CapacityError: {error}")
            self.sound = True
            return False
        assert discard or not in_the_way
        self.sizes[tier] = slots
        self.settle()
        assert {key for key, where in before - set(self.resident) if where == tier} >= above
        return True

    def taken(self, tier: str) -> int:
        """How many slabs of `tier` (slots, with one image size) have something in them."""
        stride = len(self.setup.indices(1))
        return len({slot.index // stride for slot in self.touched(tier)})

    def touched(self, tier: str) -> list[Slot]:
        """Slots of `tier` that somebody has."""
        slots = {each.slot for each in self.resident.values() if each.slot.tier == tier}
        return sorted(slots | self.slots_of_jobs(tier))

    def slots_of_jobs(self, tier: str) -> set[Slot]:
        """Slots of `tier` that jobs read or write."""
        ends = {s for job in self.jobs.values() for i in job.transfer.items for s in (i.source, i.destination) if s}
        return {slot for slot in ends if slot.tier == tier}

    def look(self) -> None:
        super().look()
        if self.setup.events:
            self.hear(self.call("events", 1 << 20))

    def hear(self, events: Sequence[Event]) -> None:
        """Add up what has happened."""
        for event in events:
            self.numbers += 1
            assert event.number == self.numbers, "events are numbered without a gap"
            if event.kind in (EventKind.STORED, EventKind.MOVED):
                assert event.key is not None
                assert (event.key, event.tier) not in self.heard
                self.heard.add((event.key, event.tier))
            elif event.kind is EventKind.REMOVED:
                assert event.key is not None
                self.heard.remove((event.key, event.tier))
            elif event.kind is EventKind.RESET:
                self.heard.clear()

    def check(self) -> None:
        super().check()
        if self.setup.events:
            assert self.heard == self.to_be_heard()

    def to_be_heard(self) -> set[tuple[Key, str]]:
        """What is where, as the events should tell."""
        return {each for each, r in self.resident.items() if r.state is SlotState.READY}
