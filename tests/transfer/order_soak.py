"""Tell the stories of order in every order, then stories by chance: so many, or for so long.

python tests/transfer/order_soak.py --schedules 10000
python tests/transfer/order_soak.py --minutes 30 --first-seed 10000
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import time
from collections.abc import Iterator

from order_cases import STORIES, Chance
from order_kit import tale

from longshore.testing.simulation import explore, sample

SHARE = 250
"""Seeds that one process takes at a time."""


def tell(name: str) -> str:
    script, options = STORIES[name]
    explored = explore(tale(script, **options))
    return f"{name:<28}{explored.states:>8} states {explored.orders:>8} orders {explored.steps:>10} steps"


def draw(seeds: range) -> tuple[int, int, int]:
    chance = Chance()
    explored = sample(chance.make, seeds)
    return explored.runs, explored.orders, chance.count()


def shares(first: int, schedules: int | None, until: float) -> Iterator[range]:
    start = first
    while (schedules is None or start < first + schedules) and time.monotonic() < until:
        stop = start + SHARE if schedules is None else min(start + SHARE, first + schedules)
        yield range(start, stop)
        start = stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, help="how many stories by chance; without it, as --minutes say")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long at most (default 10)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    begun = time.monotonic()
    runs = orders = conflicts = 0
    with concurrent.futures.ProcessPoolExecutor(given.processes) as pool:
        for line in pool.map(tell, STORIES):
            print(line, flush=True)
        waiting: set[concurrent.futures.Future[tuple[int, int, int]]] = set()
        todo = shares(given.first_seed, given.schedules, begun + 60 * given.minutes)
        while True:
            while len(waiting) < given.processes and (seeds := next(todo, None)) is not None:
                waiting.add(pool.submit(draw, seeds))
            if not waiting:
                break
            done, waiting = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                run, order, conflict = future.result()
                runs, orders, conflicts = runs + run, orders + order, conflicts + conflict
    if given.schedules is not None and runs < given.schedules:
        raise SystemExit(f"only {runs} of {given.schedules} schedules in {given.minutes} minutes")
    seconds = time.monotonic() - begun
    print(f"{runs} schedules by chance: {orders} distinct orders, {conflicts} jobs that had to wait; {seconds:.0f} s")


if __name__ == "__main__":
    main()
