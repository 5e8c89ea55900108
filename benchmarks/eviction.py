"""Eviction policies on synthetic traffic of every family, and on recorded traces: hit ratios beside the best possible.

    python benchmarks/eviction.py [--requests 3000] [--seed 0] [--load 1.0] [--trace FILE] [--family NAME] [--no-hints]
                                  [--json]

For each traffic, sizes from 1 to 40 % of its unique blocks; the plain policy experiment (`longshore.trace.experiment`).
`design` is what the design of the default policy reached in a simulation, before it was written, where that was done.
`hints` are the default policy's hit ratios with a hint for each request, made from the trace's own future, of which 0,
10 or 30 % were replaced by those of other requests. Cells are shared out among the processors, and shown as they are
done; what is under way stands on the last line.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache

from longshore.cache import ReuseHint
from longshore.cache.eviction_policies import Gittins
from longshore.trace import TraceRequest, read_mooncake
from longshore.trace.analysis import Paths, optimal_hits
from longshore.trace.experiment import Experiment, experiment, policy_named
from traffic import FAMILIES, synthesize

BLOCK_TOKENS = 512
POLICIES = ("gittins", "lru", "arc", "lru-2", "s3-fifo")
SHARES = (0.01, 0.03, 0.10, 0.20, 0.40)
WRONG = (0.0, 0.1, 0.3)
CONTESTED = 0.95
"""A cell is contested where the best of the four references is below this share of the best possible."""

DESIGN = {
    "mooncake_conversation": (0.111, 0.184, 0.295, 0.348),
    "agent_a": (0.257, 0.545, 0.906),
    "agent_dense": (0.130, 0.275, 0.603, 0.805),
    "agent_sparse": (0.404, 0.776),
}
"""What the design reached in a simulation (C++, the same experiment), at the first of `SHARES`."""


@dataclass(frozen=True)
class Cell:
    traffic: str
    share: float
    slots: int
    best: float
    hit_ratio: dict[str, float]

    def of_best(self, policy: str) -> float:
        return self.hit_ratio[policy] / self.best if self.best else 1.0

    @property
    def is_contested(self) -> bool:
        return max(map(self.of_best, POLICIES[1:])) < CONTESTED

    @property
    def design(self) -> float | None:
        known = DESIGN.get(self.traffic.removesuffix(".jsonl"), ())
        at = SHARES.index(self.share)
        return known[at] if at < len(known) else None


@dataclass(frozen=True)
class Traffic:
    """A recorded trace, or a family of synthetic traffic."""

    name: str
    file: str = ""
    requests: int = 0
    seed: int = 0
    load: float = 1.0

    def read(self) -> list[TraceRequest]:
        if self.file:
            return list(read_mooncake(self.file))
        return list(synthesize(self.name, requests=self.requests, seed=self.seed, load=self.load))


@cache
def requests_of(traffic: Traffic) -> tuple[list[TraceRequest], Paths]:
    """Its requests and their blocks, read once per process."""
    requests = traffic.read()
    return requests, Paths(request.hash_ids for request in requests)


def foreseen(requests: list[TraceRequest]) -> list[ReuseHint]:
    """What a host that knows the future says: when the last complete block of each request is used again, if ever."""
    following: dict[int, float] = {}
    found = []
    for request in reversed(requests):
        complete = request.hash_ids[: request.input_length // BLOCK_TOKENS]
        again = following.get(complete[-1]) if complete else None
        seconds = None if again is None else (again - request.timestamp_ms) / 1000
        found.append(ReuseHint(ends=again is None, seconds=seconds))
        following.update(dict.fromkeys(request.hash_ids, request.timestamp_ms))
    return found[::-1]


def with_hints(requests: list[TraceRequest], slots: int, wrong: float) -> float:
    """The default policy's hit ratio with hints, of which a part, `wrong`, are those of other requests."""
    said, tier = foreseen(requests), Experiment(Gittins, slots)
    dice = random.Random(1)  # noqa: S311 - the same each time
    for request, right in zip(requests, said, strict=True):
        hint = dice.choice(said) if dice.random() < wrong else right
        tier.serve(request.hash_ids, request.timestamp_ms / 1000, hint)
    return tier.totals().ratio


def measure(traffic: Traffic, share: float, hints: bool) -> Cell:
    requests, paths = requests_of(traffic)
    slots = max(1, round(share * paths.unique))
    ratios = {name: experiment(paths, policy_named(name)[1], slots).ratio for name in POLICIES}
    for wrong in WRONG if hints else ():
        ratios[f"hints {wrong:.0%}"] = with_hints(requests, slots, wrong)
    return Cell(traffic.name, share, slots, optimal_hits(paths, slots) / len(paths.blocks), ratios)


def traffics(options: argparse.Namespace) -> Iterator[Traffic]:
    for file in options.trace:
        yield Traffic(file.rsplit("/", 1)[-1], file)
    for family in options.family or FAMILIES:
        yield Traffic(family, "", options.requests, options.seed, options.load)


def show(cells: list[Cell]) -> None:
    for cell in cells:
        ratios = "  ".join(f"{ratio:9.3f}" for ratio in cell.hit_ratio.values())
        design = "        -" if cell.design is None else f"{cell.design:9.3f}"
        print(f"{cell.traffic:26} {cell.share:5.0%}  {cell.best:9.3f}  {design}  {ratios}{' *' * cell.is_contested}")
    summary(cells[0].traffic, cells)
    print(flush=True)


def summary(what: str, cells: list[Cell]) -> None:
    """Mean shares of the best possible, of all cells and of those that are contested."""
    for name, some in (("all", cells), ("contested *", [cell for cell in cells if cell.is_contested])):
        if some:
            means = (sum(cell.of_best(policy) for cell in some) / len(some) for policy in some[0].hit_ratio)
            print(f"{what:26} mean share of best, {name:11}  {'  '.join(f'{mean:9.3f}' for mean in means)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="requests of each synthetic family (default 3000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the synthetic traffic (default 0)")
    parser.add_argument(
        "--load", type=float, default=1.0, help="factor of the arrival rate of synthetic traffic (default 1)"
    )
    parser.add_argument("--trace", action="append", default=[], help="a trace in Mooncake's format; repeatable")
    parser.add_argument(
        "--family", action="append", choices=sorted(FAMILIES), help="only this family; repeatable; default: all"
    )
    parser.add_argument("--no-hints", dest="hints", action="store_false", help="omit the runs with hints")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of tables")
    options = parser.parse_args()
    if not options.json:
        names = [*POLICIES, *(f"hints {wrong:.0%}" for wrong in WRONG if options.hints)]
        print(f"{'traffic':26}  size  {'best':>9}  {'design':>9}  {'  '.join(f'{name:>9}' for name in names)}")
    every: list[Cell] = []
    chosen = list(traffics(options))
    with ProcessPoolExecutor() as pool:
        under_way = [[pool.submit(measure, traffic, share, options.hints) for share in SHARES] for traffic in chosen]
        for traffic, cells in zip(chosen, under_way, strict=True):
            for done, _ in enumerate(as_completed(cells), 1):
                print(f"{traffic.name}: {done} of {len(SHARES)} sizes", end="\r", file=sys.stderr, flush=True)
            every += [cell.result() for cell in cells]
            if not options.json:
                show(every[-len(SHARES) :])
    if not options.json:
        summary("everything", every)
    else:
        json.dump([asdict(cell) for cell in every], sys.stdout, indent=1)


if __name__ == "__main__":
    main()
