"""What the cache manager is measured against: vLLM's own CPU offloading manager, or an ordered dictionary without it.

Each rival is driven through the same four verbs, over the same keys in the same order:

    match    is all of it here? protect it, count it as used, let go again
    known    offer blocks that are all here already
    store    take in blocks, evicting for room where there is none, and hear that they have arrived
    slots    resolve the slots of a prompt that is here
"""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from longshore.bench.machine import has_vllm
from longshore.boundary import Key
from longshore.errors import BenchError

_GROUP = bytes(4)
"""vLLM's keys end with the KV cache group."""


class Rival(Protocol):
    """Somebody else's manager of one tier."""

    name: str

    def match(self, keys: Sequence[Key]) -> None:
        """Look up, protect, touch, release."""

    def known(self, keys: Sequence[Key]) -> None:
        """Offer what is stored already."""

    def store(self, keys: Sequence[Key]) -> None:
        """Take in what is new, and complete the store."""

    def slots(self, keys: Sequence[Key]) -> None:
        """The slots of what is stored."""


class PlainLRU:
    """The least that any manager does: one dictionary in order of use, and a list of free slots."""

    name = "an ordered dictionary, key by key"

    def __init__(self, slots: int) -> None:
        self._slots: OrderedDict[Key, int] = OrderedDict()
        self._free = list(range(slots))

    def match(self, keys: Sequence[Key]) -> None:
        """Look up and touch, tail first."""
        known = self._slots
        for key in reversed(keys):
            if key in known:
                known.move_to_end(key)

    def known(self, keys: Sequence[Key]) -> None:
        """Look up."""
        for key in keys:
            self._slots.get(key)

    def store(self, keys: Sequence[Key]) -> None:
        """Insert, evicting the oldest where nothing is free."""
        known, free = self._slots, self._free
        for key in keys:
            if not free:
                free.append(known.popitem(last=False)[1])
            known[key] = free.pop()

    def slots(self, keys: Sequence[Key]) -> None:
        """Look up."""
        [self._slots[key] for key in keys]


class VllmManager:
    """`vllm.v1.kv_offload`'s manager of CPU blocks, called as its scheduler calls it."""

    def __init__(self, slots: int, policy: str) -> None:
        self._base = importlib.import_module("vllm.v1.kv_offload.base")
        manager = importlib.import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
        self._manager: Any = manager(slots, cache_policy=policy)
        self.name = f"vLLM's {policy.upper()} manager"

    def match(self, keys: Sequence[Key]) -> None:
        """Lookups until the first miss, a load that begins and ends, and a touch."""
        manager, request, ours = self._manager, self._request(), [key + _GROUP for key in keys]
        hit = self._base.LookupResult.HIT
        found = 0
        for key in ours:
            if manager.lookup(key, request) is not hit:
                break
            found += 1
        manager.prepare_load(ours[:found], request)
        manager.touch(ours[:found], request)
        manager.complete_load(ours[:found], request)
        manager.on_request_finished(request)

    def known(self, keys: Sequence[Key]) -> None:
        """An offer of which nothing is taken."""
        request = self._request()
        self._manager.prepare_store([key + _GROUP for key in keys], request)
        self._manager.on_request_finished(request)

    def store(self, keys: Sequence[Key]) -> None:
        """A store that begins and ends."""
        request, ours = self._request(), [key + _GROUP for key in keys]
        output = self._manager.prepare_store(ours, request)
        if output is None:
            raise BenchError("vLLM's manager refused a store that the benchmark counts on")
        self._manager.complete_store(output.keys_to_store, request)
        self._manager.on_request_finished(request)

    def slots(self, keys: Sequence[Key]) -> None:
        """A load that begins and ends: its specification names the blocks."""
        request, ours = self._request(), [key + _GROUP for key in keys]
        self._manager.prepare_load(ours, request)
        self._manager.complete_load(ours, request)

    def _request(self) -> Any:
        request = self._base.ReqContext(req_id="bench")
        self._manager.on_new_request(request)
        return request


def makers_of_rivals() -> list[Callable[[int], Rival]]:
    """How to make, for a number of slots, vLLM's two managers where it is installed; else the ordered dictionary."""
    if not has_vllm():
        return [PlainLRU]
    try:
        VllmManager(64, "lru")
    except (ImportError, AttributeError, TypeError) as error:
        raise BenchError(f"vLLM is installed, but not a version whose manager is known here: {error}") from error
    return [partial(VllmManager, policy="lru"), partial(VllmManager, policy="arc")]
