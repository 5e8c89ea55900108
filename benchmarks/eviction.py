"""Eviction policies on synthetic traffic of every family, and on recorded traces: hit ratios beside the best possible.

    python benchmarks/eviction.py [--requests 3000] [--seed 0] [--load 1.0] [--trace FILE] [--family NAME] [--json]

For each traffic, sizes from 1 to 40 % of its unique blocks; the plain policy experiment (`longshore.trace.experiment`).
Cells are shared out among the processors, and shown as they are done; what is under way stands on the last line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache

from longshore.trace import FAMILIES, read_mooncake, synthesize
from longshore.trace.experiment import experiment
from longshore.trace.optimum import optimal_hits
from longshore.trace.paths import Paths
from longshore.trace.policies import policy_named

POLICIES = ("gittins", "lru", "arc", "lru-2", "s3-fifo")
SHARES = (0.01, 0.03, 0.10, 0.20, 0.40)


@dataclass(frozen=True)
class Cell:
    traffic: str
    share: float
    slots: int
    best: float
    hit_ratio: dict[str, float]

    def of_best(self, policy: str) -> float:
        return self.hit_ratio[policy] / self.best if self.best else 1.0


@dataclass(frozen=True)
class Traffic:
    """A recorded trace, or a family of made-up ones."""

    name: str
    file: str = ""
    requests: int = 0
    seed: int = 0
    load: float = 1.0

    def paths(self) -> Paths:
        if self.file:
            return Paths(request.hash_ids for request in read_mooncake(self.file))
        made = synthesize(self.name, requests=self.requests, seed=self.seed, load=self.load)
        return Paths(request.hash_ids for request in made)


@cache
def paths_of(traffic: Traffic) -> Paths:
    """Once in each process."""
    return traffic.paths()


def measure(traffic: Traffic, share: float) -> Cell:
    paths = paths_of(traffic)
    slots = max(1, round(share * paths.unique))
    ratios = {name: experiment(paths, policy_named(name)[1], slots).ratio for name in POLICIES}
    return Cell(traffic.name, share, slots, optimal_hits(paths, slots) / len(paths.blocks), ratios)


def traffics(options: argparse.Namespace) -> Iterator[Traffic]:
    for file in options.trace:
        yield Traffic(file.rsplit("/", 1)[-1], file)
    for family in options.family or FAMILIES:
        yield Traffic(family, "", options.requests, options.seed, options.load)


def show(cells: list[Cell]) -> None:
    for cell in cells:
        ratios = "  ".join(f"{cell.hit_ratio[name]:.3f}" for name in POLICIES)
        print(f"{cell.traffic:26} {cell.share:5.0%}  {cell.best:.3f}  {ratios}")
    means = "  ".join(f"{sum(cell.of_best(name) for cell in cells) / len(cells):.3f}" for name in POLICIES)
    print(f"{cells[0].traffic:26}  mean share of best  {means}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--trace", action="append", default=[])
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="only these families; all if none")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.json:
        print(f"{'traffic':26}  size   best  {'  '.join(POLICIES)}")
    every: list[Cell] = []
    chosen = list(traffics(options))
    with ProcessPoolExecutor() as pool:
        under_way = [[pool.submit(measure, traffic, share) for share in SHARES] for traffic in chosen]
        for traffic, cells in zip(chosen, under_way, strict=True):
            for done, _ in enumerate(as_completed(cells), 1):
                print(f"{traffic.name}: {done} of {len(SHARES)} sizes", end="\r", file=sys.stderr, flush=True)
            every += [cell.result() for cell in cells]
            if not options.json:
                show(every[-len(SHARES) :])
    if options.json:
        json.dump([asdict(cell) for cell in every], sys.stdout, indent=1)


if __name__ == "__main__":
    main()
