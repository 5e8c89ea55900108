"""Ranks in processes of their own write parts of one image, and one dies in the midst: no torn image is ever served."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from rank_child import part_of

import longshore
from longshore.boundary import DEVICE, FILE, HOST, Cancel, Item, Key, Route, Slot, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, TieredCache, TierSpec, WritePolicy
from longshore.errors import PlanError, QueueFullError, TierClosedError
from longshore.runtime import Rank, RankMover, Runtime, TierMover
from longshore.runtime import ranks as ranks_module
from longshore.runtime.stamps import GOOD, Stamps
from longshore.slabs import Slabs
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.host import HostTier
from scripted import Scripted

WORLD, SLOTS, FILE_SLOTS, PART = 3, 4, 16, 4096
IMAGE = WORLD * PART
PATIENCE = 60.0
DOWN, UP = Route(DEVICE, HOST), Route(HOST, DEVICE)


def key(number: int) -> Key:
    return number.to_bytes(32, "little")


class Process:
    """One rank."""

    def __init__(self, arena: Arena, stamps: Stamps, rank: int) -> None:
        program = [
            sys.executable,
            str(Path(__file__).parent / "rank_child.py"),
            str(arena.path),
            str(stamps.memory.path),
        ]
        paths = os.pathsep.join([str(Path(longshore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        self.popen = subprocess.Popen(
            [*program, *map(str, (SLOTS, IMAGE, WORLD, rank))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
        )

    def hear(self, word: str) -> None:
        assert self.popen.stdout is not None
        assert self.popen.stdout.readline() == f"{word}\n".encode()

    def tell(self, order: bytes) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(order)
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.kill()
        self.close()

    def close(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            pipe.close()
        self.popen.wait(PATIENCE)


class Engine:
    """The owner's process: cache, runtime, file tier; and three ranks."""

    def __init__(self, directory: Path, kind: type[RankMover] = RankMover) -> None:
        self.directory = directory
        self.arena = Arena(SLOTS * IMAGE, ArenaSettings(numa_node=None, huge_pages=False, shared=True))
        self.stamps = Stamps.make(SLOTS, WORLD, WORLD)
        self.stop: list[int] = []
        self.ranks = [Process(self.arena, self.stamps, rank) for rank in range(WORLD)]
        for rank in self.ranks:
            rank.hear("ready")
        host = HostTier(self.arena, Slabs.of_one_size(IMAGE, SLOTS))
        self.file = open_file(directory, self.arena)
        self.mover = kind(host, self.stamps, self.tell)
        self.cache = TieredCache(
            [TierSpec(HOST, SLOTS, IMAGE), TierSpec(FILE, FILE_SLOTS, IMAGE)],
            CacheSettings(backup=WritePolicy.THROUGH),
        )
        self.runtime = Runtime(self.cache, [self.mover, TierMover(self.file, host)], [self.file])

    def tell(self, command: Transfer | Cancel) -> None:
        if isinstance(command, Transfer):
            items = [(item.destination.index, item.key.hex()) for item in command.items if item.destination]
            order = {"job": command.job, "items": items, "stop": self.stop}
            for rank in self.ranks:
                rank.tell(json.dumps(order).encode() + b"\n")

    def store(self, numbers: Sequence[int]) -> None:
        with self.runtime.control() as cache:
            cache.commit([key(number) for number in numbers], list(range(len(numbers))))

    def until(self, what: Callable[[], bool], *, pumping: bool = True) -> None:
        give_up = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < give_up, "it did not come to that"
            if pumping:
                self.runtime.pump()
            time.sleep(0.0005)

    def settle(self) -> None:
        """Wait until nothing is in flight."""
        self.until(lambda: not self.runtime.pump())

    def replace(self, rank: int) -> None:
        """Kill it, and say so; then there is another one."""
        self.ranks[rank].kill()
        with self.runtime.control():
            self.mover.lost(rank)
        self.settle()
        self.ranks[rank] = Process(self.arena, self.stamps, rank)
        self.ranks[rank].hear("ready")
        with self.runtime.control():
            self.mover.joined(rank)

    def reach(self, numbers: Sequence[int]) -> int:
        """How many of these, from the first on, are found."""
        with self.runtime.control() as cache:
            match = cache.match([key(number) for number in numbers], self.runtime.clock())
            if match.hold is not None:
                cache.release(match.hold)
        return match.length

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.runtime.close(0.0)
        self.stamps.close()
        self.arena.close()


def open_file(directory: Path, arena: Arena) -> FileTier:
    return FileTier(
        directory,
        capacity=capacity_for(FILE_SLOTS, IMAGE),
        image_bytes=IMAGE,
        arena=arena,
        scope=bytes(32),
        threads=2,
    )


def served(directory: Path) -> dict[Key, bytes]:
    """What the next process finds, and reads."""
    arena = Arena(FILE_SLOTS * IMAGE)
    tier = open_file(directory, arena)
    chunks = tier.recover()
    batch = [
        TierOp(Op.READ, chunk.slot, chunk.key, None, at * IMAGE, IMAGE, tier.generation)
        for at, chunk in enumerate(chunks)
    ]
    tier.submit(batch, time.monotonic() + PATIENCE)
    while not (results := tier.poll()):
        time.sleep(0.0005)
    found = {
        chunk.key: bytes(arena.view(op.offset, IMAGE))
        for chunk, op, status in zip(chunks, batch, results[0].statuses, strict=True)
        if status is Status.OK
    }
    tier.close()
    arena.close()
    return found


def whole(number: int) -> bytes:
    return b"".join(bytes(part_of(key(number), rank, PART)) for rank in range(WORLD))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path / "tier")
    yield engine
    engine.close()


def test_what_all_ranks_have_written_is_written_to_a_file_and_served(engine: Engine) -> None:
    engine.store([1, 2, 3])
    engine.settle()
    assert engine.reach([1, 2, 3]) == 3
    engine.file.close()
    assert served(engine.directory) == {key(number): whole(number) for number in (1, 2, 3)}


def test_a_rank_that_is_killed_in_the_midst_of_its_part_leaves_no_torn_image(engine: Engine) -> None:
    engine.store([1])
    engine.settle()
    engine.stop = [1]
    engine.store([1, 2])
    engine.ranks[1].hear("midway")
    engine.until(lambda: all(_has_written(engine, 2, rank, PART) for rank in (0, 2)))
    assert _has_written(engine, 2, 1, PART // 2)
    assert not _has_written(engine, 2, 1, PART)
    engine.stop = []
    assert engine.runtime.pump(), "two of three ranks have stamped it: it is not whole"
    assert engine.reach([1, 2]) == 1
    engine.replace(1)
    assert engine.reach([1, 2]) == 1
    assert engine.cache.counters.routes[str(DOWN)].failed == 1
    engine.store([1, 2, 3])
    engine.settle()
    assert engine.reach([1, 2, 3]) == 3, "the slot is as good as any, and so is the new rank"
    engine.file.close()
    assert served(engine.directory) == {key(number): whole(number) for number in (1, 2, 3)}


def _has_written(engine: Engine, number: int, rank: int, nbytes: int) -> bool:
    """Whether some slot has the first bytes of a part."""
    images = engine.arena.array.reshape(SLOTS, IMAGE)[:, rank * PART :][:, :nbytes]
    return bool((images == part_of(key(number), rank, nbytes)).all(axis=1).any())


class Hasty(RankMover):
    """The negative control: one rank's word is enough."""

    def _said(self, job: ranks_module._Job) -> ranks_module.U64:
        said = super()._said(job)
        said[:] = np.where((said == GOOD).any(axis=1, keepdims=True), GOOD, said)
        return said


def test_with_the_word_of_one_rank_alone_a_torn_image_is_served(tmp_path: Path) -> None:
    found: list[bytes] = []
    for attempt in range(5):  # on a busy machine the file tier may have seen a part change, and refused the image
        engine = Engine(tmp_path / f"tier{attempt}", Hasty)
        engine.stop = [1]
        engine.store([1])
        engine.ranks[1].hear("midway")
        # Else one of them could still write while the file tier does: then the checksum tells.
        engine.until(lambda engine=engine: all(_has_written(engine, 1, rank, PART) for rank in (0, 2)), pumping=False)
        engine.settle()
        engine.ranks[1].kill()
        engine.ranks.pop(1)
        engine.close()
        found = list(served(engine.directory).values())
        if found:
            break
    assert len(found) == 1
    assert found[0] != whole(1)


def test_ranks_that_are_killed_at_any_time_leave_nothing_but_whole_images(engine: Engine) -> None:
    chance = random.Random(5)
    last = 0
    for _ in range(6):
        numbers = [last + 1, last + 2]
        last += 2
        engine.store(numbers)
        give_up = time.monotonic() + chance.random() * 0.02
        while time.monotonic() < give_up:
            engine.runtime.pump()
        engine.replace(chance.randrange(WORLD))
    engine.store([100])
    engine.settle()
    engine.file.close()
    found = served(engine.directory)
    assert key(100) in found
    assert all(image == whole(int.from_bytes(number, "little")) for number, image in found.items())


# ---------------------------------------------------------------------- without processes


class Pair:
    """Owner and ranks in one process, over scripted movers."""

    def __init__(self) -> None:
        self.arena = Arena(SLOTS * IMAGE)
        self.stamps = Stamps.make(SLOTS, 2, 2)
        self.movers = [Scripted(DOWN, UP) for _ in range(2)]
        self.ranks = [Rank(mover, self.stamps, rank) for rank, mover in enumerate(self.movers)]
        self.now = 0.0
        host = HostTier(self.arena, Slabs.of_one_size(IMAGE, SLOTS))
        self.mover = RankMover(host, self.stamps, self.tell, clock=self.tick)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def tell(self, command: Transfer | Cancel) -> None:
        for rank in self.ranks:
            rank.obey(command)

    def pump(self) -> list[TransferResult]:
        for rank in self.ranks:
            rank.pump()
        return self.mover.poll()

    def close(self) -> None:
        self.stamps.close()
        self.arena.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def down(job: int, *slots: int) -> Transfer:
    return Transfer(job, DOWN, tuple(Item(key(slot), None, None, Slot(HOST, 0, slot), 1) for slot in slots))


def up(job: int, *slots: int) -> Transfer:
    return Transfer(job, UP, tuple(Item(key(slot), None, Slot(HOST, 0, slot), None, 1) for slot in slots))


def test_a_store_ends_item_by_item_when_all_ranks_have_spoken(pair: Pair) -> None:
    pair.mover.submit(down(0, 2, 3))
    pair.movers[0].end(Status.OK, Status.OK)
    assert pair.pump() == []
    pair.movers[1].end(Status.OK, Status.IO_ERROR)
    (result,) = pair.pump()
    assert (result.job, result.statuses, result.bytes) == (0, (Status.OK, Status.IO_ERROR), IMAGE)
    assert pair.pump() == []


def test_a_load_is_good_when_all_ranks_have_read_it(pair: Pair) -> None:
    pair.mover.submit(up(0, 1, 2))
    pair.mover.submit(up(1, 1))
    for mover in pair.movers:
        mover.end(job=1)
    assert [result.job for result in pair.pump()] == [1]
    pair.movers[0].end()
    pair.movers[1].end(Status.CORRUPT, Status.OK)
    (result,) = pair.pump()
    assert result.statuses == (Status.IO_ERROR, Status.IO_ERROR)


def test_what_a_rank_said_by_another_ticket_does_not_count(pair: Pair) -> None:
    pair.mover.submit(down(0, 2))
    for mover in pair.movers:
        mover.end()
    assert len(pair.pump()) == 1
    pair.mover.submit(down(1, 2))
    pair.movers[0].end()
    assert pair.pump() == []


def test_a_load_does_not_take_the_stamp_of_one_that_has_not_ended(pair: Pair) -> None:
    pair.mover.submit(up(3, 1))
    pair.movers[0].end()
    assert pair.pump() == []
    later = 3 + Stamps.LOADS
    with pytest.raises(QueueFullError, match=f"job {later} would reuse the stamps of load 3"):
        pair.mover.submit(up(later, 2))
    pair.mover.submit(down(later, 2))  # slots have stamps of their own
    pair.movers[1].end(job=3)
    assert [result.job for result in pair.pump()] == [3]
    pair.mover.submit(up(later + Stamps.LOADS, 1))
    for mover in pair.movers:
        mover.end(job=later + Stamps.LOADS)
    assert [result.statuses for result in pair.pump()] == [(Status.OK,)]


def test_what_is_cancelled_ends_when_no_rank_touches_it_any_more(pair: Pair) -> None:
    pair.mover.submit(down(0, 2))
    pair.mover.cancel(0)
    pair.mover.cancel(99)
    assert [mover.cancelled for mover in pair.movers] == [[0], [0]]
    pair.movers[0].end(Status.CANCELLED)
    assert pair.pump() == []
    pair.movers[1].end(Status.OK)
    assert [result.statuses for result in pair.pump()] == [(Status.CANCELLED,)]


def test_a_rank_that_refuses_fails_the_job_and_no_other(pair: Pair) -> None:
    pair.movers[1].refuse = PlanError("not mine")
    pair.mover.submit(down(0, 2))
    pair.movers[1].refuse = None
    pair.mover.submit(down(1, 3))
    for mover in pair.movers:
        mover.end(job=1)
    pair.movers[0].end(job=0)
    assert {result.job: result.statuses for result in pair.pump()} == {0: (Status.IO_ERROR,), 1: (Status.OK,)}


def test_a_lost_rank_is_not_waited_for_and_gets_nothing_until_it_is_back(pair: Pair) -> None:
    pair.mover.submit(down(0, 1, 2))
    pair.movers[0].end()
    pair.mover.lost(1)
    assert [result.statuses for result in pair.pump()] == [(Status.AWAY, Status.AWAY)]
    with pytest.raises(TierClosedError, match=r"ranks \[1\] were lost"):
        pair.mover.submit(down(1, 1))
    pair.mover.joined(1)
    pair.mover.submit(down(2, 1))
    assert pair.pump() == [], "it is waited for again"


def test_what_cannot_be_told_is_refused_before_anything_is_told(pair: Pair) -> None:
    for wrong in (
        Transfer(0, Route(HOST, FILE), down(0, 1).items),
        Transfer(0, UP, down(0, 1).items),
        down(0, 1, SLOTS),
    ):
        with pytest.raises(PlanError):
            pair.mover.submit(wrong)
    for call in (pair.mover.lost, pair.mover.joined, lambda rank: Rank(pair.movers[0], pair.stamps, rank)):
        with pytest.raises(PlanError, match="expected a rank below 2, got 2"):
            call(2)
    with pytest.raises(PlanError, match="expected 1 to 2 ranks"):
        Stamps(pair.stamps.memory, SLOTS, 2, 3)
    assert [mover.submitted for mover in pair.movers] == [[], []]
    assert pair.pump() == []


def test_close_waits_and_gives_up_on_ranks_that_say_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "CLOSE_PATIENCE", 5.0)
    pair.mover.submit(down(0, 1))
    pair.mover.submit(down(1, 2))
    for mover in pair.movers:
        mover.end(job=0)
    for rank in pair.ranks:
        rank.pump()
    pair.mover.close()
    assert {each.job: each.statuses for each in pair.mover.poll()} == {0: (Status.OK,), 1: (Status.TIER_OFF,)}
    with pytest.raises(TierClosedError, match="closed"):
        pair.mover.submit(down(2, 1))
