"""The cache manager's own time and memory, at a given number of tracked blocks.

    match    lookup with a lease, and its release          ns per block, over prompts of 8 to 8,192 blocks
    commit   store blocks that the tier has already        ns per block
    offload  store into free slots, until the copies end    ns per block
    evict    store into a full tier                        ns per block
    below    the same over another full tier, which stores a copy of each and evicts one        ns per block
    prompt   lookup of one resident prompt                 us, of up to 8,192 blocks
    slots    resolve its slots, and end the load           us
    onboard  lease it, and order its transfer              us
    hash     keys of 131,072 tokens                        ms
    memory   bytes per tracked block, key and policy       bytes
    policy   the eviction policy alone: bytes per resident block                               bytes
    ghosts   bytes per block for evicted ones (0 without a ghost list)                         bytes
    pause    longest single call outside eviction          ms

Ours and the rivals (`longshore.bench.cache_sides`) see the same keys in the same order, in turn; the reference is the
fastest of them. Times are processor times of the calling thread. They include garbage collection and page faults, and
exclude waiting on a busy machine.
"""

from __future__ import annotations

import gc
import hashlib
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from longshore.bench.cache_sides import (
    Ours,
    Policy,
    PromptSet,
    Rival,
    TwoTiers,
    bytes_per_block,
    lengths,
    makers_of_rivals,
)
from longshore.bench.harness import Case, chosen, compare, medians, timed
from longshore.boundary import Key
from longshore.errors import BenchError
from longshore.keys import Scope, chain

LEAST = 64
"""Least number of tracked blocks."""

BYTES_PER_BLOCK = 1 << 11
"""Upper bound of the memory per block that `run` takes at a time, for keys and all sides."""

_TOKENS = 131_072
_BLOCK = 16
_PREFERRED = 64
_REFILLS = 7
"""Number of further fillings after which the ghost list of the default policy is full."""

_BOUNDS = {"policy": 20.0, "ghosts": 60.0}
"""Bytes per block that the default policy may take."""

_PER_SIZE = (
    "match",
    "commit",
    "offload",
    "evict",
    "below",
    "prompt",
    "slots",
    "onboard",
    "memory",
    *_BOUNDS,
    "pause",
)


def run(*, blocks: Sequence[int], repeats: int = 5, only: Sequence[str] = ()) -> Iterator[Case]:
    """All cases, or those in `only`, for each number of tracked blocks."""
    if any(size < LEAST for size in blocks):
        raise BenchError(f"a number of blocks is at least {LEAST}, got {list(blocks)}")
    names = chosen([*(f"{kind}/{size}" for size in blocks for kind in _PER_SIZE), "hash"], only)
    for size in blocks:
        kinds = [kind for kind in _PER_SIZE if f"{kind}/{size}" in names]
        if kinds:
            yield from _sized(size, kinds, repeats)
    if "hash" in names:
        yield _hash(repeats)


def _sized(size: int, kinds: Sequence[str], repeats: int) -> Iterator[Case]:
    load = PromptSet(size)
    gc.collect()
    gc.freeze()  # as engines do at their start
    yield from _times(size, kinds, repeats, load)
    gc.collect()
    if "pause" in kinds:
        yield _pause(size, load)
    if "memory" in kinds:
        yield _memory(size)
    if "policy" in kinds or "ghosts" in kinds:
        refills = _REFILLS if "ghosts" in kinds else 0
        for kind, bound, taken in zip(_BOUNDS, _BOUNDS.values(), bytes_per_block(Policy, size, refills), strict=True):
            if kind in kinds:
                yield Case(f"{kind}/{size}", max(0.0, taken), "bytes", "the bound", bound, bound / max(taken, 1.0))


def _times(size: int, kinds: Sequence[str], repeats: int, load: PromptSet) -> Iterator[Case]:
    """The cases of ours beside rivals, all filled with the same prompts."""
    ours, others = Ours(size), [make(size) for make in makers_of_rivals()]
    filled = _fill([ours, *others], load)
    if "offload" in kinds:
        yield _per_block(f"offload/{size}", filled, others, size)
    for kind, verb, most in (("match", "match", 100_000), ("commit", "known", 50_000)):
        if kind in kinds:
            prompts = load.sample(min(4 * size, most))
            taken = medians([_over_all(getattr(side, verb), prompts) for side in (ours, *others)], repeats=repeats)
            yield _per_block(f"{kind}/{size}", taken, others, sum(map(len, prompts)))
    singles = {"prompt": (ours.lookup, "match"), "slots": (ours.lend, "slots"), "onboard": (ours.onboard, "slots")}
    for kind, (call, verb) in singles.items():
        if kind in kinds:
            seconds = statistics.median(call(load.longest) for _ in range(4 * repeats))
            best, whose = min(_median(other, verb, load.longest, repeats) for other in others)
            yield Case(f"{kind}/{size}", seconds * 1e6, "us", whose, best * 1e6, best / seconds)
    if "evict" in kinds:
        yield _evict(f"evict/{size}", ours, others, load, repeats)
    if "below" in kinds:
        two = TwoTiers(size)
        _fill([two], load)
        yield _evict(f"below/{size}", two, others, load, repeats)


def _median(side: Rival, verb: str, keys: Sequence[Key], repeats: int) -> tuple[float, str]:
    """Seconds of a verb of a rival, and its name."""
    once = _timed(partial(getattr(side, verb), keys))
    return statistics.median(once() for _ in range(repeats)), side.name


def _fill(sides: Sequence[Ours | Rival], load: PromptSet) -> list[float]:
    """Store all prompts on one side after the other; seconds of each."""
    taken = []
    for side in sides:
        begun = time.thread_time()
        for prompt, first in zip(load.prompts, load.shared, strict=True):
            if isinstance(side, Ours):
                side.store(prompt, first)
            else:
                side.store(prompt[first:])
        taken.append(time.thread_time() - begun)
        gc.collect()
        gc.freeze()  # so that no side is charged for the objects of another
    return taken


def _evict(name: str, ours: Ours, others: Sequence[Rival], load: PromptSet, repeats: int) -> Case:
    """New prompts into a full tier, sides in turn: equally many blocks each time, at most a quarter of the tier."""
    batches = [[load.fresh(n) for n in lengths(min(load.blocks // 4, 30_000))] for _ in range(repeats)]

    def refilled(store: Callable[[Sequence[Key]], None]) -> Callable[[], float]:
        left = iter(batches)
        return _timed(lambda: deque(map(store, next(left)), maxlen=0))

    stores: list[Callable[[Sequence[Key]], None]] = [
        partial(ours.store, before_eviction=True),
        *(o.store for o in others),
    ]
    taken = medians(list(map(refilled, stores)), repeats=repeats, warm_ups=0)
    return _per_block(name, taken, others, sum(map(len, batches[0])))


def _pause(size: int, load: PromptSet) -> Case:
    """The longest call without evictions, including a first priority, without other sides in memory."""
    ours = Ours(size)
    _fill([ours], load)
    for prompt in load.sample(2 * size):
        ours.match(prompt)
        ours.known(prompt)
    for _ in range(8):
        ours.onboard(load.longest)
    ours.prefer(load.longest[:_PREFERRED])
    ours.prefer(load.longest)
    return Case(f"pause/{size}", ours.longest * 1e3, "ms", "the bound", 5.0, 5e-3 / ours.longest)


def _memory(size: int) -> Case:
    """Memory of a full tier, including its keys."""
    filled = max(0.0, bytes_per_block(Ours, size)[0])
    rivals = {make(64).name: max(0.0, bytes_per_block(make, size)[0]) for make in makers_of_rivals()}
    best = min(rivals, key=rivals.__getitem__)
    return Case(f"memory/{size}", filled, "bytes", best, rivals[best], rivals[best] / max(filled, 1.0))


def _hash(repeats: int) -> Case:
    """Keys of 131,072 tokens, beside bare hashlib over the same bytes, packed beforehand."""
    dice = random.Random(2)  # noqa: S311
    tokens = [dice.randrange(150_000) for _ in range(_TOKENS)]
    root = Scope(model="m", weights="w", dtype="d", layout="l", block_size=_BLOCK).digest
    step = 4 * _BLOCK
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)

    def bare() -> None:
        tip = root
        for start in range(0, len(packed), step):
            tip = hashlib.sha256(tip + packed[start : start + step]).digest()

    taken = compare(_timed(lambda: chain(root, tokens, _BLOCK)), _timed(bare), repeats=2 * repeats + 1)
    return Case("hash", taken.ours * 1e3, "ms", "bare hashlib", taken.reference * 1e3, taken.reference / taken.ours)


def _over_all(verb: Callable[[Sequence[Key]], None], prompts: Sequence[Sequence[Key]]) -> Callable[[], float]:
    return _timed(lambda: deque(map(verb, prompts), maxlen=0))


def _per_block(name: str, taken: Sequence[float], others: Sequence[Rival], blocks: int) -> Case:
    """Nanoseconds per block of ours, whose seconds are first in `taken`, and of the fastest of `others`."""
    best, which = min([(seconds, other.name) for seconds, other in zip(taken[1:], others, strict=True)])
    return Case(name, taken[0] / blocks * 1e9, "ns", which, best / blocks * 1e9, best / taken[0])


_timed = partial(timed, clock=time.thread_time)
"""`timed`, in processor seconds of the calling thread."""
