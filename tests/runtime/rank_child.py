"""A rank in a process of its own: it fills its part of slots, a little at a time, and does so until its input ends.

    python rank_child.py ARENA STAMPS SLOTS IMAGE WORLD RANK

Each line of input is an order: a job, its slots and their keys, and who is to stop in the midst of a part, and say so.
What a rank writes follows from key and rank alone (`part_of`), so that others know it, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from longshore.boundary import DEVICE, HOST, Item, Key, Route, Slot, Status, Transfer, TransferResult
from longshore.runtime.ranks import Rank
from longshore.runtime.stamps import Stamps
from longshore.tiers.arena import Arena

STEP = 512
"""Bytes that are written at once."""


def part_of(key: Key, rank: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """What `rank` has to say of a chunk."""
    return np.frombuffer(hashlib.shake_128(key + bytes([rank])).digest(nbytes), np.uint8)


class SlowMover:
    """Fills one part after the other, `STEP` bytes with each `poll`."""

    def __init__(self, arena: Arena, image: int, world: int, rank: int) -> None:
        self.routes = frozenset((Route(DEVICE, HOST),))
        self.stop_in: set[int] = set()
        self._arena = arena
        self._image = image
        self._part = image // world
        self._rank = rank
        self._left: list[tuple[int, int, npt.NDArray[np.uint8], int]] = []
        self._open: dict[int, int] = {}

    def submit(self, transfer: Transfer) -> None:
        self._open[transfer.job] = len(transfer.items)
        for item in transfer.items:
            assert item.destination is not None
            offset = item.destination.index * self._image + self._rank * self._part
            data = part_of(item.key, self._rank, self._part)
            pieces = [(transfer.job, offset + at, data[at : at + STEP], at) for at in range(0, self._part, STEP)]
            self._left += pieces

    def poll(self) -> list[TransferResult]:
        if not self._left:
            ended = [TransferResult(job, (Status.OK,) * items) for job, items in self._open.items()]
            self._open.clear()
            return ended
        job, offset, data, at = self._left.pop(0)
        if at >= self._part // 2 and job in self.stop_in:
            print("midway", flush=True)
            time.sleep(600)
        self._arena.array[offset : offset + len(data)] = data
        return []

    def cancel(self, job: int) -> None:
        """Nothing: it goes on to its end."""

    def close(self) -> None:
        """Nothing to give back."""


def main() -> None:
    slots, image, world, number = map(int, sys.argv[3:])
    arena = Arena.attach(Path(sys.argv[1]), slots * image)
    stamps = Stamps(Arena.attach(Path(sys.argv[2]), Stamps.nbytes(slots, world)), slots, world, world)
    mover = SlowMover(arena, image, world, number)
    rank = Rank(mover, stamps, number)
    print("ready", flush=True)
    unread, busy = b"", False
    while True:
        if select.select([0], [], [], 0 if busy else None)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                items = [Item(bytes.fromhex(key), None, None, Slot(HOST, 0, slot), 1) for slot, key in order["items"]]
                if number in order["stop"]:
                    mover.stop_in.add(order["job"])
                rank.obey(Transfer(order["job"], Route(DEVICE, HOST), items))
        busy = rank.pump()


if __name__ == "__main__":
    main()
