"""Select the excerpt of Mooncake's conversation trace that ships inside the package.

    python benchmarks/select_excerpt.py conversation_trace.jsonl          prints what it found
    python benchmarks/select_excerpt.py conversation_trace.jsonl --write  and replaces the excerpt

Lines are taken verbatim, in the order of the trace; nothing is altered. A conversation is all requests that agree
in the block after the one that every request of the trace shares. Conversations are taken whole: all their turns
or none, so every turn returns as it did. Between two turns other conversations pass, in the order of the trace.

A candidate is a window of the trace and a number of conversations: of those that lie in the window, the ones with
the longest pause between two turns, in lines of the trace, because a pause is what a small cache does not survive;
and a number of single requests from between. All candidates of a small grid are judged by `Facts`; those that miss
a bound are dropped, and the one nearest to the wished-for losses wins; ties go to the first. There is no chance in
it: the same trace gives the same excerpt.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longshore.trace import TraceRequest, Workload, parse_mooncake, read_mooncake

EXCERPT = Path(__file__).parent.parent / "src/longshore/trace/data/conversation_excerpt.jsonl"

TURNS = range(2, 6)  # of a conversation
BLOCKS = range(7, 31)  # of every prompt
LEAST_REUSE = 0.6  # of a later turn's blocks, seen in the turn before

STARTS = range(0, 9000, 250)
WIDTHS = (1000, 1500, 2000, 3000, 4000)
COUNTS = range(16, 29)
SINGLES = (0, 3, 6, 9)

CAPACITIES = (0.25, 0.5, 0.75)
WISHED_LOSSES = (0.80, 0.50, 0.25)


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides whether requests make a good demonstration.

    `losses` has, for each of `CAPACITIES` as a share of the working set, the share of reusable blocks (beyond the
    prefix that all requests share) that an LRU cache of that size has lost by the time they return.
    """

    requests: int
    total_blocks: int
    unique_blocks: int
    longest: float
    returning: float
    reusable_median: float
    losses: tuple[float, ...]

    def acceptable(self) -> bool:
        return (
            64 <= self.requests <= 80
            and 600 <= self.total_blocks <= 1100
            and self.longest <= 0.12
            and self.returning >= 0.62
            and self.reusable_median >= 0.8
            and self.losses[0] >= 0.6
            and self.losses[1] >= 0.4
            and self.losses[2] >= 0.15
        )

    def distance(self) -> float:
        """From the wished-for losses: less is better."""
        return sum((a - b) ** 2 for a, b in zip(self.losses, WISHED_LOSSES, strict=True))

    def __str__(self) -> str:
        lost = ", ".join(f"{loss:.1%} at {share:.0%}" for loss, share in zip(self.losses, CAPACITIES, strict=True))
        return (
            f"{self.requests} requests, {self.total_blocks} full blocks, {self.unique_blocks} of them different; "
            f"longest prompt {self.longest:.1%} of the working set; {self.returning:.0%} of requests return, with "
            f"{self.reusable_median:.0%} of their prompt reusable (median); reusable blocks lost by LRU: {lost}"
        )


def lost_by_lru(workload: Workload, capacity: int) -> float:
    """Share of reusable blocks that an LRU cache of `capacity` blocks no longer has.

    A request's hits are its leading run of resident blocks, counted before it changes anything; then its blocks are
    used one by one, tail first.
    """
    resident: OrderedDict[tuple[int, ...], None] = OrderedDict()
    reusable = hits = 0
    for request in workload:
        # ids of this trace imply their prefix; the path is spelt out so that this need not be believed
        paths = [request.hash_ids[: depth + 1] for depth in range(request.full_blocks)]
        leading = sum(1 for _ in itertools.takewhile(resident.__contains__, paths[: request.reusable_blocks]))
        reusable += max(0, request.reusable_blocks - workload.common_blocks)
        hits += max(0, leading - workload.common_blocks)
        for path in reversed(paths):
            resident[path] = None
            resident.move_to_end(path)
            if len(resident) > capacity:
                resident.popitem(last=False)
    return 1 - hits / reusable if reusable else 0.0


def facts_of(requests: Sequence[TraceRequest]) -> Facts:
    workload = Workload.from_trace(requests, vocab_size=4096, block_tokens=8)
    shares = [r.reusable_blocks * workload.block_tokens / len(r.prompt) for r in workload if r.returning]
    unique = workload.unique_blocks
    return Facts(
        requests=len(workload),
        total_blocks=workload.total_blocks,
        unique_blocks=unique,
        longest=workload.longest_blocks / unique,
        returning=len(shares) / len(workload),
        reusable_median=statistics.median(shares) if shares else 0.0,
        losses=tuple(lost_by_lru(workload, int(share * unique)) for share in CAPACITIES),
    )


def conversations(trace: Sequence[TraceRequest]) -> list[list[int]]:
    """Line indices of each conversation, ordered by first turn."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(trace):
        if len(request.hash_ids) > 1:
            groups.setdefault(request.hash_ids[:2], []).append(index)
    return sorted(groups.values())


def eligible(trace: Sequence[TraceRequest], turns: Sequence[int]) -> bool:
    """Whether all prompts are of a good size, and each extends the one before."""
    prompts = [trace[index].hash_ids for index in turns]
    if not all(len(prompt) in BLOCKS for prompt in prompts):
        return False
    return all(
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(earlier, later, strict=False)))
        >= LEAST_REUSE * len(later)
        for earlier, later in itertools.pairwise(prompts)
    )


def longest_pause(turns: Sequence[int]) -> int:
    return max(later - earlier for earlier, later in itertools.pairwise(turns))


def evenly(lines: Sequence[int], count: int) -> list[int]:
    """`count` of `lines`, or all if there are fewer, spread over them."""
    return [lines[(2 * i + 1) * len(lines) // (2 * count)] for i in range(count)] if count < len(lines) else list(lines)


def candidates(trace: Sequence[TraceRequest]) -> Iterator[list[int]]:
    """Line indices of each selection on the grid."""
    groups = [group for group in conversations(trace) if eligible(trace, group)]
    several = sorted((group for group in groups if len(group) in TURNS), key=longest_pause, reverse=True)
    single = [group[0] for group in groups if len(group) == 1]
    for start, width in itertools.product(STARTS, WIDTHS):
        inside = [group for group in several if start <= group[0] and group[-1] < start + width]
        for count in (count for count in COUNTS if count <= len(inside)):
            turns = list(itertools.chain.from_iterable(inside[:count]))
            between = [index for index in single if min(turns) < index < max(turns)]
            for singles in SINGLES:
                yield sorted(turns + evenly(between, singles))


def select(trace: Sequence[TraceRequest]) -> list[int]:
    """Line indices of the best selection."""
    best: tuple[float, list[int]] | None = None
    for lines in candidates(trace):
        facts = facts_of([trace[index] for index in lines]) if 64 <= len(lines) <= 80 else None
        if facts and facts.acceptable() and (best is None or facts.distance() < best[0]):
            best = (facts.distance(), lines)
    if best is None:
        raise SystemExit("no selection of this trace meets the bounds")
    return best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="the whole trace, in Mooncake's format")
    parser.add_argument("--write", action="store_true", help=f"replace {EXCERPT.name} in the package")
    arguments = parser.parse_args()
    trace = list(read_mooncake(arguments.trace))
    selected = select(trace)
    raw = arguments.trace.read_bytes().splitlines(keepends=True)
    lines = [raw[index] for index in selected]
    excerpt = list(parse_mooncake(lines))
    if excerpt != [trace[index] for index in selected]:
        raise SystemExit("lines and requests of this trace do not correspond (blank lines?)")
    sys.stdout.write(f"{facts_of(excerpt)}\nlines {[index + 1 for index in selected]}\n")
    if arguments.write:
        EXCERPT.write_bytes(b"".join(lines))


if __name__ == "__main__":
    main()
