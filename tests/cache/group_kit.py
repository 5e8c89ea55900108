"""Requests over several KV cache groups: keys that can be read, and the commits and results that bring them about."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from cache_kit import IMAGE_BYTES

from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import CacheGroup, CacheSettings, GroupKeys, TieredCache, TierSpec
from longshore.cache.eviction_policies import LRU
from residents import residents_of

FULL = CacheGroup(block_size=4)
WINDOW = CacheGroup(block_size=2, window=5)
STATE = CacheGroup(block_size=8, recurrent=True)


def keys_of(group: int, count: int, prompt: str = "a") -> list[Key]:
    """The keys of the first chunks of `prompt`, of one group."""
    return [f"{prompt}{group}.{position:03}".encode().ljust(32, b".") for position in range(count)]


def grouped(*groups: CacheGroup, host: int = 256, file: int | None = None, **settings: Any) -> TieredCache:
    """A cache for these groups."""
    tiers = [TierSpec(HOST, host, IMAGE_BYTES, LRU)]
    if file is not None:
        tiers.append(TierSpec(FILE, file, IMAGE_BYTES, LRU))
    return TieredCache(tiers, CacheSettings(groups=groups, **settings))


def orders(cache: TieredCache) -> list[Transfer]:
    """The transfers among the commands since the last call."""
    return [command for command in cache.take_commands() if isinstance(command, Transfer)]


def end(cache: TieredCache, transfers: Iterable[Transfer], status: Status = Status.OK, now: float = 0.0) -> None:
    """These transfers end on all ranks, all their items likewise."""
    for transfer in transfers:
        statuses = (status,) * len(transfer.items)
        cache.apply_results([TransferResult(transfer.job, statuses, rank=rank) for rank in range(transfer.ranks)], now)


def settle(cache: TieredCache, now: float = 0.0) -> list[Transfer]:
    """All that was ordered ends well, and what that brings about; the transfers."""
    done: list[Transfer] = []
    while ordered := orders(cache):
        end(cache, ordered, now=now)
        done += ordered
    cache.check_integrity()
    return done


def store(cache: TieredCache, group: int, keys: Sequence[Key], first: int = 0) -> None:
    """`keys[first:]` of one group are complete, and have gone down as far as they will."""
    blocks = range((len(keys) - first) * cache.settings.blocks_per_chunk)
    cache.store({group: GroupKeys(keys, first)}, {group: blocks})
    settle(cache)


def resident(cache: TieredCache, tier: str = HOST) -> list[str]:
    """The chunks in `tier`, by name."""
    return sorted(each.key.rstrip(b".").decode() for each in residents_of(cache) if each.slot.tier == tier)


def wanted(*paths: Sequence[Key]) -> dict[int, GroupKeys]:
    """A request for the paths of all groups, of which the device has nothing."""
    return {group: GroupKeys(path, device=()) for group, path in enumerate(paths)}
