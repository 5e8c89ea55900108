"""Real kills: a process that writes to a file tier is killed with SIGKILL at a random instant, again and again.

    python tests/tiers/kill_kit.py --kills 300 [--directory D] [--seed S]

After each kill another process opens the tier, and reads every key that was ever written to each slot. What is served
must be what was written under that key; what the dead process had reported as written, and not begun to overwrite,
must be listed and served. There are two image sizes, and slabs change theirs all the time. Most of those processes are
killed in turn. The last line is `N kills, R records served, W wrong`; the exit status says whether W is 0 and nothing
was lost. No torch is loaded.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import Slabs, Status
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_of

KEYS, PLACES = 32, 6
SLABS = Slabs(64 << 10, (16 << 10, 64 << 10), 10)
PLACE = SLABS.slab_bytes
LONGEST_LIFE = 0.1

_BEGUN, _DONE = 0, 1
_LINE = struct.Struct("<BIIQ")  # begun or done, slot, number of the key, generation
_VERDICT = struct.Struct("<IIIQ")  # served, wrong, lost, generation


class Verdict(NamedTuple):
    """What a process found after a kill: records served, wrong ones, reported ones that were not there; generation."""

    served: int
    wrong: int
    lost: int
    generation: int


def size_class_of(number: int) -> int:
    """The image size of the `number`th key."""
    return number % 2


def image(number: int) -> npt.NDArray[np.uint8]:
    """What is written under the `number`th key."""
    pattern = np.frombuffer(struct.pack("<QQ", number, ~number & 2**64 - 1) * 3 + b"longshore", np.uint8)
    return np.resize(pattern, SLABS.image_bytes[size_class_of(number)] - DISK_PAGE)


def ended(holds: dict[int, int], slot: int, number: int) -> dict[int, int]:
    """What is left of `holds` once `number` is being written to `slot`: nothing else there, nor of another size."""
    slab, size_class = SLABS.slab_of(slot), size_class_of(number)
    return {
        each: held
        for each, held in holds.items()
        if each != slot and (SLABS.slab_of(each) != slab or size_class_of(held) == size_class)
    }


def main() -> int:
    """Kill, look, and say how it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        served, wrong, lost = rounds(arguments.kills, Path(scratch) / "tier", random.Random(arguments.seed))
    if "torch" in sys.modules:
        raise SystemExit("torch was loaded")
    if lost:
        print(f"{lost} records that had been reported were not served after a kill")
    print(f"{arguments.kills} kills, {served} records served, {wrong} wrong")
    return int(wrong > 0 or lost > 0 or served == 0)


def rounds(kills: int, directory: Path, dice: random.Random) -> tuple[int, int, int]:
    """So many kills; records served, wrong, and lost in all of them."""
    holds: dict[int, int] = {}
    generation = served = wrong = lost = 0
    for _ in range(kills):
        seed = dice.randrange(2**32)
        lines = child(lambda out, s=seed: write(directory, s, out), dice.uniform(0.0, LONGEST_LIFE))
        for kind, slot, number, at in _LINE.iter_unpack(lines[: len(lines) // _LINE.size * _LINE.size]):
            if at > generation:
                generation, holds = at, {}
            holds = ended(holds, slot, number)
            if kind == _DONE:
                holds[slot] = number
        verdict = look(directory, holds, generation, close=dice.random() < 0.25)
        served, wrong, lost = served + verdict.served, wrong + verdict.wrong, lost + verdict.lost
        if verdict.generation > generation:  # a reset was durable before it could be told
            generation, holds = verdict.generation, {}
    return served, wrong, lost


def write(directory: Path, seed: int, out: int) -> None:
    """Write without end, checkpoint and forget at times; tell `out` what was begun and what is done."""
    dice = random.Random(seed)
    with opened(directory) as (tier, arena):
        while True:
            pairs, batches = [], dice.choice([1, 2, PLACES])  # together, which is by the disk's queue, or one by one
            for place, slab in enumerate(dice.sample(range(SLABS.slabs), PLACES)):
                number = dice.randrange(KEYS // 2) * 2 + (slab + (dice.random() < 0.3)) % 2
                slot = dice.choice(SLABS.slots_of(slab, size_class_of(number)))
                written = image(number)
                arena.array[place * PLACE : place * PLACE + len(written)] = written
                os.write(out, _LINE.pack(_BEGUN, slot, number, tier.generation))
                pairs.append((slot, number))
            ops = [operation(tier, Op.WRITE, *pair, place) for place, pair in enumerate(pairs)]
            flying = {tier.submit(ops[at::batches], math.inf): pairs[at::batches] for at in range(batches)}
            while flying:
                for result in tier.poll():
                    if set(result.statuses) != {Status.OK}:
                        raise RuntimeError(f"writes ended as {result.statuses}")
                    for pair in flying.pop(result.ticket):
                        os.write(out, _LINE.pack(_DONE, *pair, tier.generation))
            if dice.random() < 0.05:
                tier._index.checkpoint()
            if dice.random() < 0.02:
                tier.reset(tier.generation + 1)


def look(directory: Path, holds: dict[int, int], generation: int, *, close: bool) -> Verdict:
    """The verdict of another process on what is there; it closes the tier, or is killed."""
    found = child(lambda out: os.write(out, _VERDICT.pack(*judge(directory, holds, generation, close=close))))
    if len(found) != _VERDICT.size:
        raise SystemExit("the process that looks has failed")
    return Verdict(*_VERDICT.unpack(found))


def judge(directory: Path, holds: dict[int, int], generation: int, *, close: bool) -> Verdict:
    """Read every key from every slot; `holds` is what must be there, unless a reset came in between."""
    with opened(directory, close=close) as (tier, arena):
        listed = {chunk.slot: number_of(chunk.key) for chunk in tier.recover()}
        good: set[tuple[int, int]] = set()
        wrong = 0
        asked = [
            (slot, number)
            for slab in range(SLABS.slabs)
            for number in range(KEYS)
            for slot in SLABS.slots_of(slab, size_class_of(number))
        ]
        for first in range(0, len(asked), PLACES):
            pairs = asked[first : first + PLACES]
            reads = [operation(tier, Op.READ, *pair, place) for place, pair in enumerate(pairs)]
            tier.submit(reads, math.inf)
            while not (results := tier.poll()):
                time.sleep(0)
            for place, (pair, status) in enumerate(zip(pairs, results[0].statuses, strict=True)):
                if status is Status.OK:
                    good.add(pair)
                    expected = image(pair[1])
                    found = arena.array[place * PLACE : place * PLACE + len(expected)]
                    wrong += not np.array_equal(found, expected)
        reported = holds.items() if tier.generation == generation else set()
        lost = sum(pair not in good or pair[1] not in listed.values() for pair in reported)
        unserved = sum(pair not in good for pair in listed.items())
        return Verdict(len(good), wrong, lost + unserved, tier.generation)


@contextmanager
def opened(directory: Path, *, close: bool = False) -> Iterator[tuple[FileTier, Arena]]:
    """The tier, and an arena of `PLACES` images."""
    arena = Arena(PLACES * PLACE)
    sizes = [nbytes - DISK_PAGE for nbytes in SLABS.image_bytes]
    tier = FileTier(directory, capacity=capacity_of(SLABS), image_bytes=sizes, arena=arena, scope=bytes(32), threads=4)
    if tier.slabs != SLABS:
        raise RuntimeError(f"expected {SLABS}, got {tier.slabs}")
    yield tier, arena
    if close:
        tier.close()


def operation(tier: FileTier, op: Op, slot: int, number: int, place: int) -> TierOp:
    """Move the image of the `number`th key between `slot` and `place`."""
    size_class = size_class_of(number)
    length = SLABS.image_bytes[size_class] - DISK_PAGE
    return TierOp(op, slot, number.to_bytes(32, "little"), None, place * PLACE, length, tier.generation, size_class)


def number_of(key: bytes) -> int:
    """The number of a key."""
    return int.from_bytes(key, "little")


def child(work: Callable[[int], object], seconds: float = math.inf) -> bytes:
    """What a process that does `work` writes to the descriptor that it is given, until it ends or is killed."""
    readable, writable = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(readable)
            work(writable)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - it must not go on as its parent
            traceback.print_exc()
            os._exit(1)
    os.close(writable)
    if seconds < math.inf:
        killer = threading.Timer(seconds, os.kill, (pid, signal.SIGKILL))
        killer.start()
    parts = []
    while part := os.read(readable, 1 << 16):
        parts.append(part)
    os.close(readable)
    os.waitpid(pid, 0)
    return b"".join(parts)


if __name__ == "__main__":
    sys.exit(main())
