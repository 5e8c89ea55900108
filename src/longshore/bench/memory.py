"""Memory that a cache manager takes for each block that it tracks, as the system sees it.

Counted are the anonymous pages that a fresh process has more when a tier has been filled than before: what allocators
do not count (mapped columns), and what they waste, is in it. Keys belong to it; nobody else keeps them.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from longshore.boundary import Key
from longshore.errors import BenchError

_PROMPT = 64  # blocks
_WARM_UP = 100 * _PROMPT


class Side(Protocol):
    """What stores prompts, and makes room for them."""

    def store(self, keys: Sequence[Key]) -> None:
        """Store a prompt of which nothing is known."""


def bytes_per_block(make: Callable[[int], Side], blocks: int, refills: int = 0) -> tuple[float, float]:
    """What `make(blocks)` takes for each of `blocks` blocks; and what more after so many further fillings.

    `make` is called in another process, and must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(there, make, blocks, refills))
    process.start()
    there.close()
    try:
        with here:
            filled, more = here.recv()
    except EOFError:
        raise BenchError("the process that was to measure memory has ended") from None
    finally:
        process.join()
    return float(filled), float(more)


def _measure(answer: Connection, make: Callable[[int], Side], blocks: int, refills: int) -> None:
    dice = random.Random(1)  # noqa: S311 - keys to measure with, not to keep

    def fill(side: Side, count: int) -> int:
        for _ in range(count // _PROMPT):
            side.store([dice.randbytes(32) for _ in range(_PROMPT)])
        gc.collect()
        return _anonymous_bytes()

    warm = make(_WARM_UP)  # is kept: what it gave back would be taken again, unseen
    before = fill(warm, _WARM_UP)
    side = make(blocks)
    filled = fill(side, blocks)
    after = filled
    for _ in range(refills):
        after = fill(side, blocks)
    stored = blocks // _PROMPT * _PROMPT
    answer.send(((filled - before) / stored, (after - filled) / stored))
    del warm


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()  # exact, which those of `status` are not
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
