"""Random lives of caches with two to four tiers, beside a plain statement of what a waterfall is.

Nobody holds anything here, no write fails, and each tier has room for all that is above it and what that needs. Then
a chunk is given up only by the last tier, and only when that is full; every other tier parts with a copy only when a
colder one has it; and no tier ever has more than its slots.
"""

from __future__ import annotations

import hashlib
import random

import pytest
from cache_kit import Setup, path_of
from cache_model import World

from depth import deep
from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import GroupKeys, TieredCache, TierSpec
from longshore.cache.eviction_policies import ARC, LRU, Gittins
from longshore.cache.evictor import Evictor

PATHS = [a + b * n for a in "abcdefghijklmnopqrstuvw" for b in "xy" for n in range(4)]


def setup_of(dice: random.Random) -> Setup:
    tiers = dice.randint(2, 4)
    sizes = [dice.randint(1, 3)]
    while len(sizes) < tiers:
        sizes.append(4 * sizes[-1] + dice.randint(0, 3))  # room for all that is above, and what is before it
    policies = ("write_through", "write_back", "write_through_selective")
    names = list(Setup(host=1, file=1, more=(1,) * (tiers - 2)).sizes)
    write_rules = tuple((name, dice.choice(policies[:2]), 2) for name in names[1:])
    policy = dice.choice(("lru", "arc"))
    return Setup(
        host=sizes[0], file=sizes[1], more=tuple(sizes[2:]), write_rules=write_rules, policy=policy, device_blocks=64
    )


class Waterfall:
    """A world, and the plain statement."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.world = World(setup_of(self.dice))
        self.tiers = list(self.world.sizes)
        self.given_up = 0

    def ready(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {tier: set() for tier in self.tiers}
        for (key, tier), resident in self.world.resident.items():
            if resident.state.value == "ready":
                found[tier].add(path_of(key))
        return found

    def live(self) -> None:
        """One call, or one result; and what must be so after it."""
        before = self.ready()
        match self.dice.randrange(8):
            case 0 | 1 | 2:
                self.world.store(self.dice.choice(PATHS), 0, True)
            case 3 | 4 | 5:
                for job, rank in self.dice.sample(runnable := self.world.runnable(), min(1, len(runnable))):
                    self.world.deliver(job, rank, [Status.OK])
                    self.world.apply(self.world.results[:])
            case 6:
                self.world.flush()
            case _:
                hold = self.world.lookup(self.dice.choice(PATHS), 0, None)
                if hold is not None:
                    self.world.release(hold)
        self.check(before)

    def check(self, before: dict[str, set[str]]) -> None:
        after = self.ready()
        anywhere = set().union(*after.values())
        for tier, was in before.items():
            for path in was - after[tier]:
                colder = self.tiers[self.tiers.index(tier) + 1 :]
                if path in anywhere:
                    assert any(path in after[each] for each in colder), f"{path} left {tier}"
                else:
                    assert tier == self.tiers[-1], f"{path} was given up by {tier}"
                    assert self.world.free(tier) == 0, f"{path} was given up for nothing"
                    self.given_up += 1
        for stats in self.world.cache.stats():
            assert stats.used <= stats.slots


@pytest.mark.parametrize("first", range(0, deep(8, 24), 8))
def test_only_the_last_tier_gives_anything_up(first: int) -> None:
    given_up = 0
    for seed in range(first, first + 8):
        life = Waterfall(seed)
        for _ in range(120):
            life.live()
        given_up += life.given_up
        life.world.drain()
    assert given_up > 20, "nothing was ever given up: the lives are too quiet"


@pytest.mark.parametrize("seed", range(deep(3, 8)))
def test_batched_copies_equal_those_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = Waterfall(seed)
    for _ in range(120):
        together.live()
    settled = 0

    def one_by_one(self: Evictor, *_: object, **__: object) -> tuple[int, int, list[int], int]:
        nonlocal settled
        settled += 1
        return 0, 0, [], 1

    monkeypatch.setattr(Evictor, "_evict_batch", one_by_one)
    alone = Waterfall(seed)
    for _ in range(120):
        alone.live()
    assert settled
    assert alone.world.calls == together.world.calls
    assert alone.world.answers == together.world.answers


def names(step: int, count: int) -> list[Key]:
    return [hashlib.sha256(b"%d %d" % (step, i)).digest() for i in range(count)]


class Prompts:
    """Long prompts through three tiers, of which any may be the smallest; copies end late, or fail in the middle."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        policy, slots = dice.choice([LRU, ARC, Gittins]), [dice.choice([60, 150, 300])]
        slots += [dice.choice([40, 200, 400, 900]) for _ in range(2)]
        tiers = zip((HOST, FILE, "cold"), slots, strict=True)
        self.cache = TieredCache([TierSpec(name, count, 1, policy) for name, count in tiers])
        self.failing = dice.choice([0, 0.05, 0.3, 1.0])
        self.moving: list[Transfer] = []

    def move(self) -> None:
        dice, moving = self.dice, self.moving
        moving += [each for each in self.cache.take_commands() if isinstance(each, Transfer)]
        ended = len(moving) if dice.random() < 0.8 else dice.randrange(len(moving) + 1)
        for each in moving[:ended]:
            good, fails = len(each.items), self.failing / (10 if each.route.destination == HOST else 1)
            if dice.random() < fails:
                good = dice.randrange(good)
            statuses = [Status.OK] * good + [Status.IO_ERROR] * (len(each.items) - good)
            self.cache.apply_results([TransferResult(each.job, tuple(statuses), 1)], 0.0)
        del moving[:ended]

    def live(self, steps: int) -> None:
        dice, cache, leases, prompts = self.dice, self.cache, [], [names(0, 30)]
        for step in range(1, steps + 1):
            prompt = dice.choice(prompts[-12:])
            asked = prompt[: dice.choice([0, 0, dice.randrange(len(prompt)), len(prompt)])]
            found = cache.lookup({0: GroupKeys(asked)}, 0.0)
            if found.lease is not None:
                leases.append(found.lease)
                if dice.random() < 0.5:
                    cache.load(found.lease, {0: range(found.num_chunks)})
            prompts.append([*prompt[: found.num_chunks], *names(step, int(3 * 40 ** dice.random()))])
            new = len(prompts[-1]) - found.num_chunks
            cache.store(
                {0: GroupKeys(prompts[-1], found.num_chunks)}, {0: range(new)}, request_number=found.request_number
            )
            self.move()
            while leases and (len(leases) > 3 or dice.random() < 0.7):
                cache.release(leases.pop(dice.randrange(len(leases))))
            if dice.random() < 0.3:
                cache.end_step()
            if dice.random() < 0.1:
                cache.back_up_all()
            self.move()
        cache.check_integrity()


@pytest.mark.parametrize("seed", [39, 59, 82, 116])
def test_chunk_back_in_a_warmer_tier_is_kept_below(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    spared = 0
    is_passed_over = Evictor._is_passed_over

    def spy(self: Evictor, node: int, tier: int, pool: int) -> bool:
        nonlocal spared
        passed = is_passed_over(self, node, tier, pool)
        spared += passed and self._is_warmer(node, tier) and self.can_evict(node, tier)
        return passed

    monkeypatch.setattr(Evictor, "_is_passed_over", spy)
    Prompts(seed).live(120)
    assert spared
