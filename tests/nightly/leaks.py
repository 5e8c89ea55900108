"""Opens and closes tiers again and again, then uses one store for long, and looks for what grows.

    python tests/nightly/leaks.py --seconds 600 [--seed 0]

    reopened     a `PrefixStore` with a file tier: opened, used, closed
    hosted       a file tier in a tier host, and its arena: opened, written, read, closed
    long-lived   one `PrefixStore`, whose tiers are full: prefixes are stored, restored and evicted
    cache        a `TieredCache` over two full tiers: requests without bytes

The first third of the rounds is warm-up. File descriptors, threads, child processes and files in /dev/shm are counted
after each round, and anonymous memory is read; a count that is larger in each round of the last third than in any of
the second has grown, and so has memory that has grown by more than `NOISE` bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

NOISE = 2 << 20
LEAST_ROUNDS = 12

Sample = dict[str, int]
Round = Callable[[], None]


def sample() -> Sample:
    """What this process has now."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    task = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "children": len(task.read_text().split()) if task.exists() else 0,
        "shared memory files": len(list(Path("/dev/shm").glob("*longshore*"))),  # noqa: S108 - looked at only
        "memory": 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")),
    }


def growth(samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """What has grown: the most of the second third of the rounds, and the least of the last one."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    found = {}
    for what in samples[0]:
        most, least = max(each[what] for each in middle), min(each[what] for each in last)
        if least > most + (NOISE if what == "memory" else 0):
            found[what] = most, least
    return found


def reopened(folder: Path, dice: random.Random) -> Iterator[Round]:
    """Open, store, restore, close."""
    from longshore.engines.transformers import PrefixStore

    model, states = _model()

    def turn() -> None:
        with PrefixStore(model, _config(folder / "reopened"), block_size=16) as store:
            _use(store, states, dice, 2)

    yield turn


def hosted(folder: Path, dice: random.Random) -> Iterator[Round]:
    """Open with a process, write, read, close."""
    from longshore.boundary import DISK_PAGE, Status
    from longshore.runtime.tier_host import HostedFileTier
    from longshore.tiers.arena import Arena, ArenaSettings
    from longshore.tiers.base import Op, TierOp
    from longshore.tiers.file.recovery import capacity_for

    size = 4 * DISK_PAGE

    def turn() -> None:
        arena = Arena(8 * size, ArenaSettings(shared=True, huge_pages=False))
        capacity = capacity_for(8, size)
        tier = HostedFileTier(folder / "hosted", capacity=capacity, image_bytes=size, arena=arena, scope=bytes(32))
        try:
            keys = [dice.randbytes(32) for _ in range(8)]
            for op in (Op.WRITE, Op.READ):
                tier.submit([TierOp(op, at, key, None, at * size, size, 0) for at, key in enumerate(keys)], math.inf)
                end = time.monotonic() + 60
                while not (results := tier.poll()) and time.monotonic() < end:
                    time.sleep(0.001)
                if [status for each in results for status in each.statuses] != [Status.OK] * 8:
                    raise AssertionError(f"{op}: {results}")
        finally:
            tier.close()
            arena.close()

    yield turn


def long_lived(folder: Path, dice: random.Random) -> Iterator[Round]:
    """Store and restore, with evictions from both tiers."""
    from longshore.engines.transformers import PrefixStore

    model, states = _model()
    with PrefixStore(model, _config(folder / "long"), block_size=16) as store:
        yield lambda: _use(store, states, dice, 20)


def cache(folder: Path, dice: random.Random) -> Iterator[Round]:
    """Requests of a control plane over two full tiers."""
    from longshore.boundary import FILE, HOST, Status, Transfer, TransferResult
    from longshore.cache import CacheSettings, GroupKeys, TieredCache, TierSpec

    made, recent = TieredCache([TierSpec(HOST, 500, 1), TierSpec(FILE, 2000, 1)], CacheSettings()), list[list[bytes]]()

    def turn() -> None:
        for _ in range(100):
            elder = dice.choice(recent) if recent and dice.random() < 0.6 else []
            keys = [*elder[: dice.randint(0, len(elder))], *(dice.randbytes(32) for _ in range(dice.randint(1, 80)))]
            recent.append(keys)
            del recent[:-50]
            found = made.lookup({0: GroupKeys(keys)}, 0.0)
            if found.lease is not None:
                made.load(found.lease, {0: range(found.num_chunks)})
            made.store(
                {0: GroupKeys(keys, found.num_chunks)},
                {0: range(len(keys) - found.num_chunks)},
                request_number=found.request_number,
            )
            while orders := [each for each in made.take_commands() if isinstance(each, Transfer)]:
                made.apply_results([TransferResult(each.job, (Status.OK,) * len(each.items)) for each in orders], 0.0)
            if found.lease is not None:
                made.release(found.lease)
            made.end_step()
        made.check_integrity()

    yield turn


def _model() -> tuple[object, Callable[[list[int]], object]]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, num_key_value_heads=2, **shape)).eval()

    def states(tokens: list[int]) -> object:
        with torch.no_grad():
            return model(torch.tensor([tokens]), past_key_values=DynamicCache(), use_cache=True).past_key_values

    return model, states


def _config(path: Path) -> object:
    from longshore.config import Config

    return Config.make(host_size="1MiB", file_path=path, file_size="4MiB", backup="write_through")


def _use(store: object, states: Callable[[list[int]], object], dice: random.Random, times: int) -> None:
    for _ in range(times):
        tokens = [dice.randrange(256) for _ in range(16 * dice.randint(2, 12))]
        store.store_prefix(tokens, states(tokens))
        if store.restore_prefix([*tokens, 1])[1] == 0:
            raise AssertionError("a prefix that was just stored is not found")


LOOPS = {"reopened": reopened, "hosted": hosted, "long-lived": long_lived, "cache": cache}


def watch(turn: Round, seconds: float) -> list[Sample]:
    """Samples after each round, for so many seconds, and of `LEAST_ROUNDS` at least."""
    samples, end = list[Sample](), time.monotonic() + seconds
    while len(samples) < LEAST_ROUNDS or time.monotonic() < end:
        turn()
        samples.append(sample())
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=LOOPS)
    given = parser.parse_args()
    names, failed = [given.only] if given.only else list(LOOPS), False
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            loop = LOOPS[name](Path(folder), random.Random(given.seed))
            samples = watch(next(loop), given.seconds / len(names))
            loop.close()
            grown = growth(samples)
            failed |= bool(grown)
            said = (
                ", ".join(f"{what} {most:,} -> {least:,}" for what, (most, least) in grown.items())
                or "nothing has grown"
            )
            print(f"{name}: {len(samples)} rounds, {said}; at last {json.dumps(samples[-1])}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
