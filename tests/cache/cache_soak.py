"""Drives `TieredCache` as busy engines do, by chance, and checks every structure after each call.

    python tests/cache/cache_soak.py --calls 1000000 [--first-seed 0] [--processes 2]

The random paths of the state machines are short and judged by a model. This has no model, but many requests that
overlap: several look at one prefix in a step, paths are as long as every threshold in the code (24, 48, 64, 256),
chunks are evicted within the step that has looked at them, in all policies, priorities and image sizes. A call that
raises, does not end, or leaves two structures in disagreement is a failure, told with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import faulthandler
import os
import random
import time
from collections import Counter
from collections.abc import Sequence

from longshore.boundary import FILE, HOST, Key, Slabs, Status, Transfer, TransferResult
from longshore.cache import (
    CacheGroup,
    CacheSettings,
    GroupKeys,
    Lease,
    PrefetchPolicy,
    Presence,
    Protection,
    Retention,
    ReuseHint,
    ScheduledStore,
    TieredCache,
    TierSpec,
    WritePolicy,
)
from longshore.cache.eviction_policies import POLICIES, Gittins
from residents import residents_of

IMAGE = 4096
THIRD = "third"
ROUNDS = 200
"""In which a flush ends."""
HINTS = (None, None, ReuseHint(ends=True), ReuseHint(seconds=2.0), ReuseHint(of="one"), ReuseHint(of="two"))
LENGTHS = (3, 8, 20, 30, 50, 70, 130, 300)
"""Chunks of a path, on both sides of every threshold."""
VERBS = (
    "lookup_each",
    "lookup_each",
    "lookup_each",
    "store",
    "store",
    "store",
    "lookup_and_load",
    "load_by_host",
    "prefetch",
    "release",
    "results",
    "results",
)
VERBS += ("end_step", "store_orphans", "store_orphans", "slide", "priority", "store_blocks", "discard", "rare")
BAD = (Status.IO_ERROR, Status.DEVICE_ERROR, Status.CORRUPT, Status.CANCELLED, Status.DEADLINE)
CALLS_OF_A_SEED = 400
SECONDS_OF_A_SEED = 600
"""After which all threads are shown, and the process ends: a call does not."""


class Storm:
    """One cache, and all that happens to it for one seed."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        chosen = Gittins if draw.random() < 0.4 else None
        self.calls: Counter[str] = Counter()
        self.length = draw.choice(LENGTHS)
        self.alone = draw.random() < 0.4
        several = draw.random() < 0.3
        windows = [1 << 40 if self.alone else None] + [draw.choice((16, 400))] * several
        self.groups = len(windows)
        host = max(4, int(self.length * draw.choice((0.4, 1, 1.1, 2, 8))))
        policy = chosen or POLICIES[draw.choice(sorted(POLICIES))]
        tiers = [TierSpec(HOST, self._slots(host, several=several), IMAGE, policy)]
        for name, share in ((FILE, 0.8), (THIRD, 0.2)):
            if draw.random() < share:
                more = max(4, int(host * draw.choice((0.5, 1.5, 4))))
                policy = chosen or POLICIES[draw.choice(sorted(POLICIES))]
                tiers.append(TierSpec(name, self._slots(more, several=several), IMAGE, policy, outlives=True))
        settings = CacheSettings(
            groups=tuple(CacheGroup(block_size=4, window=window) for window in windows),
            size_classes=(0, 1) if several else (),
            backup=draw.choice((WritePolicy.BACK, WritePolicy.THROUGH)),
            offload=draw.choice((WritePolicy.THROUGH, WritePolicy.THROUGH, WritePolicy.SELECTIVE)),
            max_writes=draw.choice((1 << 14, 1 << 14, max(2, host // 2))),
            admission=draw.random() < 0.8,
            events=draw.choice((0, 1000)),
        )
        self.tiers = tiers
        self.cache = TieredCache(tiers, settings)
        self.jobs: dict[int, int] = {}
        """Jobs in flight, and how many chunks each has."""
        self.host_jobs: set[int] = set()
        """Those of which the host moves the bytes."""
        self.holds: list[Lease] = []
        self.refused: tuple[int, list[Key], int] | None = None
        """Group, path and first chunk of the offer that is to be made again."""
        self.again = 0
        self.now = 0.0
        self.fresh = 0
        self.trunks = [self._new(draw.choice((1, self.length // 2, self.length))) for _ in range(3)]

    @staticmethod
    def _slots(count: int, *, several: bool) -> int | Slabs:
        return Slabs(6 * IMAGE, (2 * IMAGE, 3 * IMAGE), max(2, count // 2)) if several else count

    def _new(self, count: int) -> list[int]:
        self.fresh += count
        return list(range(self.fresh - count, self.fresh))

    def path(self) -> list[int]:
        """A prompt: a part of a trunk, and something new or something known behind it."""
        draw, trunk = self.draw, self.draw.choice(self.trunks)
        path = trunk[: draw.randint(0, len(trunk))]
        if draw.random() < 0.6:
            path = path + self._new(draw.randint(0, max(1, self.length - len(path))))
        if len(path) > 1 and draw.random() < 0.2:
            self.trunks[draw.randrange(3)] = path
        return path or trunk[:1]

    def keys(self, path: list[int], group: int = 0) -> list[Key]:
        return [at.to_bytes(31, "little") + bytes([group]) for at in path]

    def step(self) -> None:
        """One call, and a look at every structure."""
        verb = self.draw.choice(VERBS)
        getattr(self, verb)()
        self.calls[verb] += 1
        self.cache.check_integrity()
        for command in self.cache.take_commands():
            if isinstance(command, Transfer):
                self.jobs[command.job] = len(command.items)

    def lookup_each(self) -> None:
        """Two or three requests look at overlapping parts of a path in one step."""
        keys = self.keys(self.path(), self.draw.randrange(self.groups))
        for _ in range(self.draw.randint(1, 3)):
            begin = self.draw.randint(0, len(keys) - 1)
            mine = keys[begin : self.draw.randint(begin + 1, len(keys))]
            self.seen(mine)
            self.cache.check_integrity()

    def store(self) -> None:
        """A whole path is offered, or chunks behind a part of it, or once more what was to be offered again.

        Like vLLM's adapter: the host is patient where the tiers know the chunk before those that are offered.
        """
        draw, refused = self.draw, self.refused
        self.refused = None
        if refused is not None and draw.random() < 0.8:
            group, keys, begin = refused
        else:
            group = draw.randrange(self.groups)
            keys = self.keys(self.path(), group)
            begin = draw.choice((0, draw.randrange(len(keys))))
        patient = begin > 0 and self.is_known(keys[begin - 1]) and draw.random() < 0.8
        offload = self.cache.store({group: GroupKeys(keys, begin)}, all_or_retry=patient)[group]
        if offload.retry:
            self.refused = group, keys, begin
            self.again += 1
        self.note_host_store(offload)

    def store_orphans(self) -> None:
        """What follows a chunk that no tier has is offered, in free slots; or what is between it and the first one."""
        draw, keys = self.draw, self.keys(self.path())
        if draw.random() < 0.5:
            end = draw.randint(1, len(keys))
            for tier in self.tiers:
                self.cache.discard(keys[: draw.randint(end, len(keys))], tier.name)
            self.cache.discard(self.keys(draw.choice(self.trunks)), HOST)
            self.note_host_store(self.cache.store({0: GroupKeys(keys, end - 1)})[0])
        else:
            self.note_host_store(self.cache.store({0: GroupKeys(keys[: draw.randint(1, len(keys))])})[0])

    def is_known(self, key: Key) -> bool:
        """Whether some tier has `key`, or is getting it."""
        found = self.cache.lookup({0: GroupKeys([key])}, self.now, protect=Protection.NONE, independent=True)
        return found.residency[0].presences[0] is not Presence.ABSENT

    def note_host_store(self, order: ScheduledStore) -> None:
        """The host will report what it was told to move."""
        if order.job is not None:
            self.jobs[order.job] = len(order.positions)
            self.host_jobs.add(order.job)

    def priority(self) -> None:
        if self.draw.random() < 0.3:
            some = (
                Retention(0, self.draw.randint(1, 40), self.draw.choice((10, 35, 90)), self.draw.choice((None, 3.0))),
            )
            self.note_host_store(self.cache.store({0: GroupKeys(self.keys(self.path()), retention=some)})[0])

    def store_blocks(self) -> None:
        path = self.path()
        before_eviction = self.draw.random() < 0.5
        self.cache.store({0: GroupKeys(self.keys(path))}, {0: range(len(path))}, before_eviction=before_eviction)

    def lookup_and_load(self) -> None:
        """A prompt that returns, in the manner of engines that tell paths."""
        if self.alone:
            return
        keys = self.keys(self.path())
        found = self.cache.lookup({0: GroupKeys(keys)}, self.now, reuse_hint=self.draw.choice(HINTS))
        if found.lease is not None:
            self.holds.append(found.lease)
            if self.draw.random() < 0.6:
                self.cache.load(found.lease, {0: range(found.num_chunks)})
        if self.draw.random() < 0.5:
            self.note_host_store(
                self.cache.store({0: GroupKeys(keys, found.num_chunks)}, request_number=found.request_number)[0]
            )

    def seen(self, keys: list[Key]) -> Sequence[Presence]:
        """Where each of `keys` is, which stays so until the step ends."""
        return (
            self.cache.lookup({0: GroupKeys(keys)}, self.now, protect=Protection.STEP, independent=True)
            .residency[0]
            .presences
        )

    def ready(self, wanted: tuple[Presence, ...]) -> tuple[list[Key], int]:
        """Chunks that are in these states, and have been looked at; and their group."""
        group = self.draw.randrange(self.groups)
        keys = self.keys(self.path(), group)
        found = zip(keys, self.seen(keys), strict=True)
        return [key for key, presence in found if presence in wanted], group

    def prefetch(self) -> None:
        keys, group = self.ready((Presence.HOST, Presence.COLDER))
        if keys:
            lease = self.cache.lookup({group: GroupKeys(keys)}, self.now, independent=True).lease
            if lease is None:
                raise AssertionError("what is ready was not leased")
            self.holds.append(lease)
            self.cache.check_integrity()
            self.cache.prefetch(lease, self.now, policy=self.draw.choice(list(PrefetchPolicy)))

    def load_by_host(self) -> None:
        keys, group = self.ready((Presence.HOST,))
        if keys:
            (part,) = self.cache.load({group: GroupKeys(keys)}).jobs
            self.jobs[part.job] = len(keys)
            self.host_jobs.add(part.job)

    def slide(self) -> None:
        group = 0 if self.alone else self.groups - 1
        if self.cache.settings.is_independent(group):
            self.cache.store({group: GroupKeys((), past_window=self.keys(self.path(), group))})

    def release(self) -> None:
        if self.holds:
            self.cache.release(self.holds.pop(self.draw.randrange(len(self.holds))))

    def discard(self) -> None:
        self.cache.discard(self.keys(self.path()), HOST)

    def end_step(self) -> None:
        self.cache.end_step()

    def results(self) -> None:
        """Some jobs end, in any order, and now and then badly."""
        ended = self.draw.sample(sorted(self.jobs), self.draw.randint(0, len(self.jobs)))
        self.now += self.draw.random()
        told = []
        for job in ended:
            items = self.jobs.pop(job)
            statuses = [Status.OK] * items
            if self.draw.random() < 0.1:
                statuses[self.draw.randrange(items) :] = [self.draw.choice(BAD)]
                statuses += [Status.CANCELLED] * (items - len(statuses))
            told.append(TransferResult(job, tuple(statuses)))
        self.cache.apply_results(told, self.now)

    def rare(self) -> None:
        names = [tier.name for tier in self.tiers]
        match self.draw.randrange(14):
            case 0:
                self.cache.reset(keep=names[self.draw.randint(1, len(names)) :])
            case 1:
                self.cache.back_up_all()
            case 4:
                self.end()
            case 5:
                self.end()
                self.restart()
            case 2:
                self.cache.events()
            case 3:
                offers = sorted(self.host_jobs.intersection(self.jobs))
                if offers:
                    withdrawn = self.draw.choice(offers)
                    del self.jobs[withdrawn]
                    self.cache.release(withdrawn)
            case _:
                self.now += self.draw.random()
                self.cache.apply_results((), self.now)

    def end(self) -> None:
        """All jobs end well, and a flush does: what can be read from the first chunk on is safe, or was refused."""
        cache, store = self.cache, self.cache._state
        for lease in self.holds:
            cache.release(lease)
        self.holds.clear()
        cache.end_step()
        for _ in range(ROUNDS):
            self.jobs.update(
                {each.job: len(each.items) for each in cache.take_commands() if isinstance(each, Transfer)}
            )
            if cache.back_up_all() and not self.jobs:
                break
            self.jobs.update(
                {each.job: len(each.items) for each in cache.take_commands() if isinstance(each, Transfer)}
            )
            ended = [TransferResult(job, (Status.OK,) * items) for job, items in self.jobs.items()]
            self.jobs.clear()
            cache.apply_results(ended, self.now)
            cache.check_integrity()
        else:
            raise AssertionError("a flush does not end")
        self.host_jobs.clear()
        cache.check_integrity()
        for stats in cache.stats():
            if stats.used != stats.ready:
                raise AssertionError(f"{stats}: a slot is neither free nor ready")
        waiting, index = store.index.orphans_by_parent, store.index
        for key, orphans in waiting.items():
            above = index.get(key)
            if above and any(index.coldest_tier(each) <= index.coldest_tier(above) for each in orphans):
                raise AssertionError("an orphan waits for a chunk that is there")

    def restart(self) -> None:
        """Another process finds what the files hold, in any order, and not all of it."""
        kept = [each for each in residents_of(self.cache) if each.slot.tier != HOST]
        lost = self.draw.choice((0, 0, 0.1))
        self.cache.reset(keep=[tier.name for tier in self.tiers[1:]])
        if set(residents_of(self.cache)) != set(kept):
            raise AssertionError("a reset that keeps tiers forgets something there")
        self.cache, self.refused = TieredCache(self.tiers, self.cache.settings), None
        for tier in reversed(self.tiers[1:]):
            mine = [each for each in kept if each.slot.tier == tier.name and self.draw.random() >= lost]
            self.draw.shuffle(mine)
            self.cache.adopt(tier.name, [(slot.index, key, parent, slot.size_class) for key, parent, slot, _ in mine])
            self.cache.check_integrity()


def run(seed: int, calls: int = CALLS_OF_A_SEED) -> Counter[str]:
    """So many calls of one seed. Raises what a call raises, with the seed."""
    storm = Storm(seed)
    for number in range(calls):
        try:
            storm.step()
        except Exception as error:
            raise AssertionError(f"seed {seed}, call {number}: {type(error).__name__}: {error}") from error
    return storm.calls


def _watched(seed: int) -> Counter[str]:
    faulthandler.dump_traceback_later(SECONDS_OF_A_SEED, exit=True)
    try:
        return run(seed)
    finally:
        faulthandler.cancel_dump_traceback_later()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    begun, total, seeds = time.monotonic(), Counter[str](), -(-given.calls // CALLS_OF_A_SEED)
    with concurrent.futures.ProcessPoolExecutor(given.processes) as pool:
        for done, calls in enumerate(pool.map(_watched, range(given.first_seed, given.first_seed + seeds)), 1):
            total += calls
            if done % 100 == 0 or done == seeds:
                print(f"{total.total():,} calls in {time.monotonic() - begun:.0f} s", flush=True)
    print(", ".join(f"{verb} {count:,}" for verb, count in sorted(total.items())))


if __name__ == "__main__":
    main()
