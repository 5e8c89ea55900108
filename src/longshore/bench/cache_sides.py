"""What the cache manager is measured against: vLLM's own CPU offloading manager, or an ordered dictionary without it.

Each rival is driven through the same four verbs, over the same keys in the same order:

    match    is all of it here? protect it, count it as used, let go again
    known    offer blocks that are all here already
    store    take in blocks, evicting for room where there is none, and hear that they have arrived
    slots    resolve the slots of a prompt that is here
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from longshore.bench.harness import has_vllm
from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Retention, TieredCache, TierSpec, WritePolicy
from longshore.cache.columns import LISTS
from longshore.cache.eviction import DEFAULT_POLICY, Gittins
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


T = TypeVar("T")

PIECE = 1024
"""Blocks that are stored at a time."""


class TakesAll(Gittins):
    """The default policy, which lets nothing pass: evictions are measured, and rivals take all blocks."""

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int], *, copies: bool = False) -> tuple[int, int]:
        """As many as there is room for."""
        return make_room(len(keys)), 0


class Policy:
    """The default policy alone, over `slots` slots. Whatever it allocates is its own: keys are not kept."""

    def __init__(self, slots: int) -> None:
        self._policy = DEFAULT_POLICY(slots, np.empty(0, object))
        self._policy.grow(LISTS + slots)
        self._unused = range(LISTS, LISTS + slots)
        self._turn = 0

    def store(self, keys: Sequence[Key]) -> None:
        """A prompt becomes resident, which is a request; where there is no room, as many blocks are evicted."""
        policy, count = self._policy, len(keys)
        nodes, self._unused = list(self._unused[:count]), self._unused[count:]
        while len(nodes) < count:
            victims = policy.ahead(count - len(nodes))
            policy.leave(victims, [key[::-1] for key in keys[len(nodes) :][: len(victims)]])  # stand for their keys
            nodes += victims
        policy.names = np.broadcast_to(np.array(keys[0], object), (max(nodes) + 1,))
        self._turn += 1
        policy.begin(self._turn, count)
        policy.insert(nodes[::-1], leaf=True)


class Ours:
    """`TieredCache` with one tier of `slots` slots, and the longest call so far."""

    name = "longshore"

    def __init__(self, slots: int) -> None:
        self.cache = TieredCache([TierSpec(HOST, slots, 1, TakesAll)], CacheSettings(max_writes=PIECE))
        self.longest = 0.0

    def match(self, keys: Sequence[Key]) -> None:
        """Match, hold and release."""
        lease = self._call(lambda: self.cache.lookup({0: GroupKeys(keys)}, 0.0)).lease
        if lease is not None:
            self._call(lambda: self.cache.release(lease))

    def known(self, keys: Sequence[Key]) -> None:
        """A store of which nothing is taken."""
        self._call(lambda: self.cache.store({0: GroupKeys(keys)}, {0: range(len(keys))}))

    def store(self, keys: Sequence[Key], first: int = 0, *, evicting: bool = False) -> None:
        """A store, its command, and its result."""
        for start in range(first, len(keys), PIECE):
            path, blocks = keys[: start + PIECE], range(min(PIECE, len(keys) - start))
            store = partial(self.cache.store, {0: GroupKeys(path, start)}, {0: blocks})
            offload = (store() if evicting else self._call(store))[0]
            if offload.job is None or len(offload.slots) != len(blocks):
                raise BenchError(f"{len(offload.slots)} of {len(blocks)} blocks were taken")
            self._call(self.cache.take)
            result = TransferResult(offload.job, (Status.OK,) * len(blocks))
            self._call(partial(self.cache.apply, (result,), 0.0))

    def onboard(self, keys: Sequence[Key]) -> float:
        """Order the loading of a resident prompt, and let it arrive; the seconds that the order took."""
        lease = self.cache.lookup({0: GroupKeys(keys)}, 0.0).lease
        if lease is None:
            raise BenchError("a resident prompt was not found")
        begun = time.thread_time()
        parts = self._call(partial(self.cache.load, lease, {0: range(len(keys))})).parts
        self.cache.take()
        taken = time.thread_time() - begun
        results = [TransferResult(part.job, (Status.OK,) * part.chunks) for part in parts]
        self._call(partial(self.cache.apply, results, 0.0))
        self._call(partial(self.cache.release, lease))
        return taken

    def lend(self, keys: Sequence[Key]) -> None:
        """A load of a resident prompt whose bytes the host moves: the order, and its result."""
        (part,) = self.cache.load({0: GroupKeys(keys)}).parts
        self.cache.apply([TransferResult(part.job, (Status.OK,) * part.chunks)], 0.0)

    def prefer(self, keys: Sequence[Key]) -> None:
        """A store of resident blocks that gives them a priority: before the first one no book knows of any."""
        path = GroupKeys(keys, retention=(Retention(0, None, 90),))
        self._call(partial(self.cache.store, {0: path}, {0: range(len(keys))}))

    def _call(self, method: Callable[[], T]) -> T:
        begun = time.thread_time()
        answer = method()
        self.longest = max(self.longest, time.thread_time() - begun)
        return answer


class Two(Ours):
    """The same with a tier of as many slots below, into which everything is written through."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        tiers = [TierSpec(name, slots, 1) for name in (HOST, FILE)]
        self.cache = TieredCache(tiers, CacheSettings(max_writes=PIECE, backup=WritePolicy.THROUGH))

    def store(self, keys: Sequence[Key], first: int = 0, *, evicting: bool = False) -> None:
        """A store, and all that follows from it."""
        for start in range(first, len(keys), PIECE):
            path = keys[: start + PIECE]
            self.cache.store({0: GroupKeys(path, start)}, {0: range(len(path) - start)})
            while orders := [command for command in self.cache.take() if isinstance(command, Transfer)]:
                self.cache.apply([TransferResult(each.job, (Status.OK,) * len(each.items)) for each in orders], 0.0)


LONGEST = 8192


class PromptSet:
    """Prompts that share prefixes, `blocks` different keys in all: what both sides are filled with and asked for."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - keys to measure with, not to keep
        self.blocks = blocks
        self.prompts: list[list[Key]] = []
        """Every prompt that is resident after the fill; each begins with a part of an earlier one, or afresh."""
        self.shared: list[int] = []
        """How many of its leading blocks a prompt shares with an earlier one."""
        left = blocks
        while left:
            prompt, shared = self._prompt()
            del prompt[shared + left :]
            self.prompts.append(prompt)
            self.shared.append(shared)
            left -= len(prompt) - shared
        self.longest = max(self.prompts, key=len)

    def _prompt(self) -> tuple[list[Key], int]:
        """A new prompt of 8 to 8,192 blocks (but at most a quarter of all), all sizes alike; how much it shares."""
        longest = max(8, min(LONGEST, self.blocks // 4))
        if not self.prompts:
            return self.fresh(longest), 0
        length, shared = int(8 * (longest / 8) ** self._dice.random()), 0
        elder = self._dice.choice(self.prompts)
        if self._dice.random() < 0.5:
            shared = self._dice.randrange(min(len(elder), length))
        return [*elder[:shared], *self.fresh(length - shared)], shared

    def fresh(self, count: int) -> list[Key]:
        """Keys that nobody has seen."""
        return [self._dice.randbytes(32) for _ in range(count)]

    def sample(self, blocks: int) -> list[list[Key]]:
        """Resident prompts of about so many blocks in all."""
        picked: list[list[Key]] = []
        while sum(map(len, picked)) < blocks:
            picked.append(self._dice.choice(self.prompts))
        return picked


def lengths(total: int) -> list[int]:
    """Prompt lengths from 8 on, doubling, over and over until there are `total` blocks."""
    lengths: list[int] = []
    length = 8
    while total:
        lengths.append(min(length, total))
        total -= lengths[-1]
        length = 8 if length >= LONGEST else 2 * length
    return lengths


_PROMPT = 64  # blocks
_WARM_UP = 100 * _PROMPT


class Filled(Protocol):
    """What stores prompts, and makes room for them."""

    def store(self, keys: Sequence[Key]) -> None:
        """Store a prompt of which nothing is known."""


def bytes_per_block(make: Callable[[int], Filled], blocks: int, refills: int = 0) -> tuple[float, float]:
    """What `make(blocks)` takes for each of `blocks` blocks; and what more after so many further fillings.

    `make` is called in another process, and must be picklable.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(there, make, blocks, refills))
    process.start()
    there.close()
    try:
        with here:
            filled, more = here.recv()
    except EOFError:
        raise BenchError("the process that was to measure memory has ended") from None
    finally:
        process.join()
    return float(filled), float(more)


def _measure(answer: Connection, make: Callable[[int], Filled], blocks: int, refills: int) -> None:
    dice = random.Random(1)  # noqa: S311 - keys to measure with, not to keep

    def fill(side: Filled, count: int) -> int:
        for _ in range(count // _PROMPT):
            side.store([dice.randbytes(32) for _ in range(_PROMPT)])
        gc.collect()
        return _anonymous_bytes()

    warm = make(_WARM_UP)  # is kept: what it gave back would be taken again, unseen
    before = fill(warm, _WARM_UP)
    side = make(blocks)
    filled = fill(side, blocks)
    after = filled
    for _ in range(refills):
        after = fill(side, blocks)
    stored = blocks // _PROMPT * _PROMPT
    answer.send(((filled - before) / stored, (after - filled) / stored))
    del warm


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()  # exact, which those of `status` are not
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))
