"""Eviction policies in the plainest words, lists only: what the real ones are held against.

A model has `blocks`, a list of what is resident, and `access(block)`; none has more than `slots` blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.cache.eviction.promise import AGES, Promises, age_of, kind_of


def hits_of(model: Model, paths: Sequence[Sequence[int]]) -> list[int]:
    """For each request how many of its leading blocks were resident, before it was served."""
    found = []
    for path in paths:
        gone = [i for i, block in enumerate(path) if block not in model.blocks]
        found.append(gone[0] if gone else len(path))
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
    """Uses, spans and departures in plain lists; what they promise is the real thing, which has tests of its own."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.promises = Promises()
        self.state: dict[int, tuple[int, int]] = {}  # block -> uses (0: the end of a prompt), step of the last one
        self.departed: list[tuple[int, tuple[int, int]] | None] = []
        self.accesses = self.step = 0
        self.table = self.promises.table()

    def access(self, block: int, *, leaf: bool = False) -> None:
        state = self.state.get(block)
        if block not in self.blocks:
            if len(self.blocks) == self.slots:
                victim = min(self.blocks, key=self.rank)
                self.blocks.remove(victim)
                self.departed = [*self.departed, (victim, self.state.pop(victim))][-6 * self.slots :]
            left = [entry for entry in self.departed if entry and entry[0] == block]
            state = left[0][1] if left else None
            self.departed = [None if entry in left else entry for entry in self.departed]
        else:
            self.blocks.remove(block)
        self.blocks.append(block)  # the last one was used last
        uses = 0 if leaf else 1
        if state is not None:
            self.promises.came_back.append(kind_of(state[0]) * AGES + age_of(self.step - state[1]))
            uses = min(state[0] + 1, 32) if state[0] else 2
        self.promises.became.append(kind_of(uses))
        self.state[block] = uses, self.step
        self.accesses += 1
        if self.accesses % max(64, self.slots // 8) == 0:
            self.step += 1
            self.promises.learn()
            self.table = self.promises.table()

    def rank(self, block: int) -> tuple[float, int, int]:
        """What is promised; of equals the oldest goes first, then the least used."""
        uses, step = self.state[block]
        last = self.last_with(step)
        return self.table[kind_of(uses), age_of(self.step - last)], last, kind_of(uses)

    def last_with(self, step: int) -> int:
        """The last step that counts as old as `step`: neighbours are joined once they lie twice their length back."""
        length = 1
        while self.step + 1 - (step | 2 * length - 1) >= 2 * length:
            length *= 2
        return step | length - 1


MODELS: dict[str, type[Model]] = {
    "fifo": FIFOModel,
    "lru": LRUModel,
    "lru-2": LRU2Model,
    "arc": ARCModel,
    "s3-fifo": S3FIFOModel,
    "gittins": GittinsModel,
}
