"""What all calls of `TieredCache` share: the books, the parts that decide, and what becomes of time and of loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from longshore.boundary import DEVICE, Key, Route
from longshore.cache.device import DeviceBlocks
from longshore.cache.exchange import Exchange
from longshore.cache.flow import Flow
from longshore.cache.holds import Holds
from longshore.cache.jobs import Load
from longshore.cache.joint import Joint
from longshore.cache.loading import Loading
from longshore.cache.prefetching import Prefetching
from longshore.cache.settings import CacheSettings, TierSpec
from longshore.cache.store import Level, Store
from longshore.cache.storing import Storing
from longshore.cache.types import (
    Counters,
    MissReason,
    Onboarding,
    Part,
)
from longshore.errors import CacheError


class Core:
    """The control plane's parts over one `Store`."""

    def __init__(
        self,
        tiers: Sequence[TierSpec],
        settings: CacheSettings | None = None,
        *,
        foreign: Sequence[str] = (),
        generation: int = 0,
    ) -> None:
        names, theirs = tuple(tier.name for tier in tiers), tuple(foreign)
        if not names or len({DEVICE, *names, *theirs}) != 1 + len(names) + len(theirs):
            raise CacheError(f"there is one tier or more below the device, of different names; got {names}, {theirs}")
        self.settings = settings or CacheSettings()
        self.made_of = tuple(tiers), self.settings, theirs, generation
        """Arguments of the constructor, for the log of a fault."""
        rules = self.settings.rules(names, theirs)
        # Down from neighbour to neighbour, up straight into the host tier: all tiers reach its memory.
        down, up = pairwise((DEVICE, *names)), ((name, names[0] if tier else DEVICE) for tier, name in enumerate(names))
        to_and_fro = [route for name in theirs for route in ((names[0], name), (name, names[0]))]
        routes = tuple(str(Route(*route)) for route in (*down, *up, *to_and_fro))
        self.counters = Counters.zero(names, routes, theirs)
        levels = [Level(tier.name, tier.make_pool(), tier.policy, tier.moves) for tier in tiers]
        sizes = {len(level.pool.slabs.image_bytes) for level in levels}
        if len(sizes) > 1 or any(not 0 <= pool < min(sizes) for pool in self.settings.pools):
            raise CacheError(f"all tiers have the pools of {self.settings.pools}, got {sorted(sizes)} image sizes")
        thresholds = [rule.threshold if rule.selective else 0 for rule in rules[1 : len(names)]]
        events, width = self.settings.events, self.settings.token_width
        self._store = Store(levels, self.counters, thresholds=thresholds, events=events, token_width=width)
        self._flow = Flow(self._store, self.settings, generation)
        self._loading = Loading(self._flow)
        self._storing = Storing(self._flow, rules[: len(names)], is_only=len(names) == 1 and not theirs)
        self._exchange = Exchange(self._flow, theirs, rules[len(names) :])
        self._holds = Holds(self._store)
        self._prefetching = Prefetching(self._flow, self._storing, self._holds)
        self._joint = Joint(self._flow, self._holds, self._exchange)
        self._device = DeviceBlocks(self.settings.device_blocks)

    @property
    def generation(self) -> int:
        """How many resets there were, over all processes that shared the persistent tier."""
        return self._flow.generation

    @staticmethod
    def _check_time(now: float) -> None:
        """Raise `CacheError` for what is no clock's reading: time never comes back from infinity."""
        if not math.isfinite(now):
            raise CacheError(f"a time is a finite number of seconds, got {now}")

    def _advance(self, now: float) -> None:
        self._flow.now = self._store.log.now = max(self._flow.now, now)
        if self._store.retention.used:
            self._store.retention.expire(self._flow.now)
        for wait in self._flow.waits.due(self._flow.now):
            if wait.load is not None and wait.load.outcome is None:
                self._flow.abandon(wait.load)
                self._conclude(wait.load, MissReason.DEADLINE)
            self._flow.leave(wait)

    def _ordered(self, load: Load) -> Onboarding:
        """What was ordered of `load`; nothing at all is an outcome already."""
        if not load.parts:
            self._conclude(load, MissReason.CANCELLED)
        parts = tuple(Part(job.transfer.job, len(job.statuses)) for job in load.parts)
        return Onboarding(sum(part.chunks for part in parts), parts)

    def _proceed(self) -> None:
        """Order what was waiting for room or for its time: prefetches, then writes."""
        self._prefetching.proceed()
        self._storing.clean()
        if self._exchange:
            self._exchange.proceed()

    def _conclude(self, load: Load, unfinished: MissReason) -> None:
        self._count_misses(load, load.conclude(unfinished))
        hidden = self._store.log.hidden
        if load.outcome is not None and (hidden is None or all(hidden not in keys for _, keys in load.asked)):
            self.counters.hits.update(load.outcome.sources)
        self._flow.waits.close(load.wait)

    def _count_misses(self, load: Load, misses: Sequence[MissReason]) -> None:
        self.counters.misses.update(misses)
        if self._store.log.on and load.outcome is not None:
            self._store.log.loaded(load.asked, load.outcome.chunks, misses)

    def _tier(self, name: str) -> int:
        for tier, level in enumerate(self._store.levels):
            if level.name == name:
                return tier
        raise CacheError(f"no tier is called {name!r}; there are {[level.name for level in self._store.levels]}")

    def _check_tokens(self, tokens: int | None, group: int) -> None:
        """Raise `CacheError` unless a block of `group`, whose size is known if there are `groups`, has `tokens`."""
        most = self.settings.group(group)[0].block_size if self.settings.groups else tokens
        if tokens is not None and not 0 < tokens <= (most or 0):
            raise CacheError(f"of a block of group {group} 1 to {most} tokens are moved, not {tokens}")

    def _check_first(self, keys: Sequence[Key], first: int) -> None:
        if not 0 <= first <= len(keys):
            raise CacheError(f"the first chunk lies in [0, {len(keys)}], got {first}")
