"""Reports of the ranks on their parts of jobs: tables in shared memory.

    slot │ rank 0   rank 1   rank 2
    ─────┼──────────────────────────
       5 │ 41 done  41 done  40 done        job 41: rank 2 has not reported its part of this image yet

A rank writes its report after its last byte is in place. An image that not all ranks have reported is incomplete: it
is neither found nor written to a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from longshore.errors import PlanError
from longshore.tiers.arena import Arena, ArenaSettings

PENDING, FAILED, DONE, INTERNAL_ERROR = range(4)
"""What a rank has reported of a slot or a load. `INTERNAL_ERROR`: it has failed because of a bug of Longshore."""

U64 = npt.NDArray[np.uint64]


class RankReports:
    """One number per slot and rank: the ticket of the job that filled the part, and its outcome (the lowest two bits).

    A second table has the last `LOADS` loads that have ended, by rank; a third has for each rank how often weights have
    changed and how often it has gone to sleep or woken, whether it lacks host memory, whether it is to give that back,
    and how often all were given a function to call; a fourth has the digests of the LoRA adapters that each rank has
    loaded.

    Attributes:
        memory: The shared memory, to attach to.
        world: Number of ranks.
    """

    LOADS = 4096
    ADAPTERS = 1024

    def __init__(self, memory: Arena, slots: int, world: int, ranks: int) -> None:
        """The first `ranks` of `world` ranks fill parts of an image. Tickets start at 1; each is used once."""
        if not 0 < ranks <= world or memory.nbytes < self.nbytes(slots, world):
            raise PlanError(
                f"expected 1 to {world} ranks and {self.nbytes(slots, world)} bytes, got {ranks} and {memory.nbytes}"
            )
        self.memory = memory
        self.world = world
        self._ranks = ranks
        numbers = memory.array.view(np.uint64)
        self._slots: U64 = numbers[: slots * world].reshape(slots, world)
        self._loads: U64 = numbers[slots * world : (slots + self.LOADS) * world].reshape(self.LOADS, world)
        states, rest = numbers[(slots + self.LOADS) * world :], numbers[(slots + self.LOADS + 5) * world :]
        states = states[: 5 * world].reshape(5, world)
        self._changes, self._sleep_changes, self._without_memory, self._orders, self._calls = states
        self._adapters: U64 = rest[: 4 * self.ADAPTERS * world].reshape(self.ADAPTERS, world, 4)
        self._expected: dict[int, int] = {}
        """The load whose reports are expected in each row of the second table, in the process that begins loads."""

    @classmethod
    def nbytes(cls, slots: int, world: int) -> int:
        """Bytes of all tables."""
        return 8 * (slots + cls.LOADS + 5 + 4 * cls.ADAPTERS) * world

    @classmethod
    def make(cls, slots: int, world: int, ranks: int) -> Self:
        """New tables in shared memory that other processes can attach to."""
        settings = ArenaSettings(numa_node=None, huge_pages=False, shared=True)
        return cls(Arena(cls.nbytes(slots, world), settings), slots, world, ranks)

    def stored(self, ticket: int, rank: int, good: Sequence[int], bad: Sequence[int], failure: int = FAILED) -> None:
        """Report for `ticket` that `rank` has filled its part of the slots `good`, and failed for `bad`.

        `failure` is `FAILED` or `INTERNAL_ERROR`.
        """
        self._slots[np.array(bad, np.int64), rank] = 4 * ticket + failure
        self._slots[np.array(good, np.int64), rank] = 4 * ticket + DONE

    def loaded(self, ticket: int, rank: int, *, good: bool, failure: int = FAILED) -> None:
        """Report that `rank` has ended the load `ticket`; `good`: it has read all slots, else `failure` says why not.

        `failure` is `FAILED` or `INTERNAL_ERROR`.
        """
        self._loads[ticket % self.LOADS, rank] = 4 * ticket + (DONE if good else failure)

    def begin_load(self, ticket: int) -> bool:
        """Expect reports on the load `ticket`, until `end_load`; false if they would overwrite some on another one."""
        return self._expected.setdefault(ticket % self.LOADS, ticket) == ticket

    def end_load(self, ticket: int) -> None:
        """Nobody needs the reports on the load `ticket` any more."""
        if self._expected.get(ticket % self.LOADS) == ticket:
            del self._expected[ticket % self.LOADS]

    def outcomes(self, ticket: int, slots: Sequence[int]) -> U64:
        """Reports on `slots` for `ticket`, one of the four constants each; shape `(len(slots), ranks)`."""
        return _outcomes_of(self._slots[np.array(slots, np.int64), : self._ranks], ticket)

    def load_has_ended(self, ticket: int) -> bool:
        """Whether all ranks have ended the load `ticket`."""
        return bool((self._load_outcomes(ticket) != PENDING).all())

    def load_has_failed(self, ticket: int) -> bool:
        """Whether a rank could not read all slots of the load `ticket`."""
        return bool(np.isin(self._load_outcomes(ticket), (FAILED, INTERNAL_ERROR)).any())

    def load_has_internal_error(self, ticket: int) -> bool:
        """Whether a bug of Longshore made the load `ticket` fail on a rank."""
        return bool((self._load_outcomes(ticket) == INTERNAL_ERROR).any())

    def _load_outcomes(self, ticket: int) -> U64:
        return _outcomes_of(self._loads[ticket % self.LOADS], ticket)

    def weights_changed(self, rank: int) -> None:
        """Count a possible change of the weights of `rank`."""
        self._changes[rank] += np.uint64(1)

    def workers_called(self) -> None:
        """Count a possible change of the weights of all ranks, of which the scheduler's process knows."""
        self._calls += np.uint64(1)

    @property
    def weight_changes(self) -> int:
        """Number of weight changes, over all ranks."""
        return int(self._changes.sum() + self._calls.sum())

    def sleep_changed(self, rank: int) -> None:
        """The device memory of `rank` has gone, or is back: each counts."""
        self._sleep_changes[rank] += np.uint64(1)

    @property
    def sleep_changes(self) -> int:
        """Number of times that device memory has gone or come back, over all ranks."""
        return int(self._sleep_changes.sum())

    def is_asleep(self, rank: int | None = None) -> bool:
        """Whether the device memory of `rank`, or of any rank, has gone."""
        asleep = self._sleep_changes % np.uint64(2)
        return bool(asleep.any() if rank is None else asleep[rank])

    def set_lacks_memory(self, rank: int, *, lacks: bool) -> None:
        """`rank` has given host memory back, or has it again."""
        self._without_memory[rank] = lacks

    def lacks_memory(self, rank: int | None = None) -> bool:
        """Whether `rank`, or any rank, has no host memory."""
        return bool(self._without_memory.any() if rank is None else self._without_memory[rank])

    @property
    def frees_host_memory(self) -> bool:
        """Whether ranks that go to sleep are to give host memory back."""
        return bool(self._orders[0])

    @frees_host_memory.setter
    def frees_host_memory(self, order: bool) -> None:
        self._orders[0] = order

    def adapter_loaded(self, rank: int, tag: int, number: int, digest: int) -> bool:
        """Record an adapter that `rank` has loaded as `tag` and `number`; returns whether its row had another `digest`.

        `digest` is 0 if the loaded bytes are unknown.
        """
        row = self._adapters[self.adapter_row(tag), rank]
        known = row.tolist()
        changed = known[0] != 0 and (known[0] != tag or known[2] != digest or digest == 0)
        row[:] = (tag, number, digest, known[3] + changed)
        return bool(changed)

    def adapter(self, tag: int) -> tuple[int, int] | None:
        """Number and digest of the adapter that all ranks loaded last under `tag`; `None` if they differ."""
        rows = set(map(tuple, self._adapters[self.adapter_row(tag), :, :3].tolist()))
        (found,) = rows if len(rows) == 1 else ((0, 0, 0),)
        return found[1:] if found[0] == tag else None

    def adapter_row(self, tag: int) -> int:
        """The row of `tag` in `adapter_changes`."""
        return tag % self.ADAPTERS

    def adapter_changes(self) -> U64:
        """Number of changes of the bytes behind a tag, by row and rank; shape `(ADAPTERS, world)`."""
        return self._adapters[:, :, 3].copy()

    def close(self) -> None:
        """Unmap the memory."""
        self._slots = self._loads = self._adapters = np.empty((0, 0), np.uint64)
        self._changes = self._sleep_changes = self._without_memory = np.empty(0, np.uint64)
        self._orders = self._calls = np.empty(0, np.uint64)
        self.memory.close()


def _outcomes_of(reports: U64, ticket: int) -> U64:
    """The outcome in each number of a table; `PENDING` where it is a report on another ticket."""
    outcomes: U64 = np.where(reports >> np.uint64(2) == ticket, reports & np.uint64(3), np.uint64(PENDING))
    return outcomes
