"""Eviction policies in the plainest words, lists only: what the real ones are held against.

A model has `blocks`, a list of what is resident, and `access(block)`; none has more than `slots` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.cache.eviction_policies.ghosts import GhostList
from longshore.cache.eviction_policies.hit_rates import (
    AGAIN,
    AGE_OF,
    BECAME,
    FORGOTTEN,
    GAP,
    GAP_OF,
    HOW,
    KIND_OF,
    LEAF,
    OLDEST,
    ONCE,
    PLAIN,
    REQUEST,
    RETURNED,
    USES,
    HitRates,
    Spans,
)
from longshore.trace.experiment import key_of


def hits_of(model: Model, paths: Sequence[Sequence[int]]) -> list[int]:
    """For each request how many of its leading blocks were resident, before it was served."""
    found = []
    for path in paths:
        gone = [i for i, block in enumerate(path) if block not in model.blocks]
        found.append(gone[0] if gone else len(path))
        if isinstance(model, GittinsModel):
            model.begin(path)
        for block in reversed(path):
            if isinstance(model, GittinsModel):
                model.access(block, leaf=block == path[-1])
            else:
                model.access(block)
            assert len(model.blocks) <= model.slots
            assert len(set(model.blocks)) == len(model.blocks)
    return found


class Model:
    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.blocks: list[int] = []

    def access(self, block: int) -> None:
        raise NotImplementedError


class FIFOModel(Model):
    def access(self, block: int) -> None:
        if block not in self.blocks:
            self.blocks = [*self.blocks, block][-self.slots :]


class LRUModel(Model):
    def access(self, block: int) -> None:
        self.blocks = [*(b for b in self.blocks if b != block), block][-self.slots :]


class LRU2Model(Model):
    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.uses: list[int] = []

    def access(self, block: int) -> None:
        if block not in self.blocks:
            if len(self.blocks) == self.slots:
                self.blocks.remove(min(self.blocks, key=self.rank))
            self.blocks.append(block)
        self.uses.append(block)

    def rank(self, block: int) -> tuple[int, int]:
        at = [-1, *(i for i, used in enumerate(self.uses) if used == block)]
        return at[-2], at[-1]


class ARCModel(Model):
    """Two lists of residents, two of ghosts; each list of ghosts forgets the oldest of those that are in it.

    A list of ghosts is a ring: a ghost that was taken back leaves a hole, and the newest goes where the oldest stands.
    """

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.lists: tuple[list[int], list[int]] = ([], [])
        self.ghosts: tuple[list[int | None], list[int | None]] = ([None] * slots, [None] * slots)
        self.target = 0.0

    @property
    def blocks(self) -> list[int]:
        return self.lists[0] + self.lists[1]

    @blocks.setter
    def blocks(self, blocks: list[int]) -> None:
        assert not blocks

    def access(self, block: int) -> None:
        once, often = self.lists
        if block in self.blocks:
            (once if block in once else often).remove(block)
            often.append(block)
            return
        if len(self.blocks) == self.slots:
            first = 0 if len(once) > self.target else 1
            which = first if self.lists[first] else 1 - first
            ghosts = self.ghosts[which]
            ghosts.pop(0)
            ghosts.append(self.lists[which].pop(0))
        counts = [sum(ghost is not None for ghost in ghosts) for ghosts in self.ghosts]
        for which, ghosts in enumerate(self.ghosts):
            if block in ghosts:
                ghosts[ghosts.index(block)] = None
                counts[which] -= 1
                step = max(1.0, counts[1 - which] / (counts[which] + 1))
                self.target = min(max(self.target + (-step if which else step), 0.0), float(self.slots))
                often.append(block)
                return
        once.append(block)


class S3FIFOModel(Model):
    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.small: list[list[int]] = []
        self.main: list[list[int]] = []
        self.ghosts: list[int] = []

    @property
    def blocks(self) -> list[int]:
        return [block for block, _ in self.small + self.main]

    @blocks.setter
    def blocks(self, blocks: list[int]) -> None:
        assert not blocks

    def access(self, block: int) -> None:
        for entry in self.small + self.main:
            if entry[0] == block:
                entry[1] = min(3, entry[1] + 1)
                return
        if len(self.small) + len(self.main) == self.slots:
            self.make_room()
        if block in self.ghosts:
            self.ghosts.remove(block)
            self.main.append([block, 0])
        else:
            self.small.append([block, 0])

    def make_room(self) -> None:
        if len(self.small) >= max(1, self.slots // 10) or not self.main:
            while self.small:
                block, uses = self.small.pop(0)
                if not uses:
                    self.ghosts = [*self.ghosts, block][-self.slots :]
                    return
                self.main.append([block, uses])
        while True:
            block, uses = self.main.pop(0)
            if not uses:
                return
            self.main.append([block, uses - 1])


class GittinsModel(Model):
    """Uses, gaps and spans in plain lists; what they promise and what is remembered are the real things."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.hit_rates, self.spans, self.ghosts = HitRates(), Spans(), GhostList(4 * slots)
        self.state: dict[int, tuple[int, int]] = {}  # block -> bits, tick of the last use
        self.now = self.length = self.last = self.since = self.new = 0
        self.stale, self.rank = True, dict[tuple[int, int], int]()

    def begin(self, path: Sequence[int]) -> None:
        self.now += 1
        if self.since >= max(64, self.slots // 32):
            self.new, self.since = self.new + self.since, 0
            for row, older in self.spans.begin(self.now):
                self.hit_rates.join(row, older)
            self.stale = True
        self.length = len(path).bit_length() << REQUEST
        lead = next((i for i, block in enumerate(path) if block not in self.blocks), len(path))
        when = self.ghosts.latest([key_of(block) for block in path[lead:]])
        if when is None and lead:
            when = self.state[path[lead - 1]][1]
        self.last = 0 if when is None else GAP_OF[self.age(when)]

    def access(self, block: int, *, leaf: bool = False) -> None:
        state = self.state.get(block)
        if block in self.blocks:
            self.blocks.remove(block)
        else:
            if len(self.blocks) == self.slots:
                self.evict()
            ((_, when, left),) = self.ghosts.take_all([key_of(block)])
            if left:
                state = left, when
        if state is None:
            new = (LEAF if leaf else max(ONCE, self.last & USES)) | self.last & GAP | self.length
        elif state[1] == self.now:
            new = state[0]
        else:
            self.hit_rates.record(RETURNED, *state, self.age(state[1]))
            new = AGAIN[state[0] & HOW] | GAP_OF[self.age(state[1])] | self.length
        if state is None or state[1] != self.now:
            self.hit_rates.record(BECAME, new, self.now)
        self.blocks.append(block)  # the last one was used last
        self.state[block] = new, self.now
        self.last = new
        self.since += 1

    def evict(self) -> None:
        if self.stale:
            self.stale = False
            if self.new >= max(64, self.slots // 16):
                self.hit_rates.learn(self.spans, self.now)
                self.hit_rates.fade(0.5 ** (self.new / (64 * max(1, self.slots))))
                self.new = 0
            order = self.hit_rates.order(self.spans.ages(self.now)).tolist()
            self.rank = {(self.spans.rows[each // PLAIN], each % PLAIN): place for place, each in enumerate(order)}
        victim = min(self.blocks, key=lambda block: self.rank[self.list_of(block)])
        state, when = self.state.pop(victim)
        self.blocks.remove(victim)
        if forgotten := self.ghosts.insert(key_of(victim), when, state):
            self.hit_rates.record(FORGOTTEN, forgotten[1], forgotten[0], self.age(forgotten[0]))

    def list_of(self, block: int) -> tuple[int, int]:
        state, when = self.state[block]
        return self.spans.row(when), KIND_OF[state & HOW]

    def age(self, when: int) -> int:
        return AGE_OF[min(self.now - when, OLDEST)]


MODELS: dict[str, type[Model]] = {
    "fifo": FIFOModel,
    "lru": LRUModel,
    "lru-2": LRU2Model,
    "arc": ARCModel,
    "s3-fifo": S3FIFOModel,
    "gittins": GittinsModel,
}
