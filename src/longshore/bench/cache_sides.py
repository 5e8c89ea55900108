"""The sides of `longshore bench cache`: our manager, vLLM's CPU offloading manager, or else an ordered dictionary.

Each rival is driven through the same four verbs, over the same keys in the same order:

    match    look up a resident prompt, lease it, count it as used, release it
    known    store blocks that are all resident
    store    store blocks, with evictions if there is no room, until their copies have ended
    slots    resolve the slots of a resident prompt
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

from longshore.bench.harness import SEED, is_installed
from longshore.boundary import FILE, HOST, Key, Status, Transfer, TransferResult
from longshore.cache import CacheSettings, GroupKeys, Retention, TieredCache, TierSpec, WritePolicy
from longshore.cache.columns import LISTS
from longshore.cache.eviction_policies import DEFAULT_POLICY, Gittins
from longshore.errors import BenchError

_GROUP = bytes(4)
"""The end of vLLM's keys: the KV cache group."""


class Rival(Protocol):
    """Another manager of one tier."""

    name: str

    def match(self, keys: Sequence[Key]) -> None: ...

    def known(self, keys: Sequence[Key]) -> None: ...

    def store(self, keys: Sequence[Key]) -> None: ...

    def slots(self, keys: Sequence[Key]) -> None: ...


class PlainLRU:
    """The minimum: one dictionary in order of use, and a list of free slots."""

    name = "an ordered dictionary, key by key"

    def __init__(self, slots: int) -> None:
        self._slots: OrderedDict[Key, int] = OrderedDict()
        self._free = list(range(slots))

    def match(self, keys: Sequence[Key]) -> None:
        known = self._slots
        for key in reversed(keys):
            if key in known:
                known.move_to_end(key)

    def known(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._slots.get(key)

    def store(self, keys: Sequence[Key]) -> None:
        known, free = self._slots, self._free
        for key in keys:
            if not free:
                free.append(known.popitem(last=False)[1])
            known[key] = free.pop()

    def slots(self, keys: Sequence[Key]) -> None:
        [self._slots[key] for key in keys]


class VllmManager:
    """`vllm.v1.kv_offload`'s manager of CPU blocks, called as its scheduler calls it."""

    def __init__(self, slots: int, policy: str) -> None:
        self._base = importlib.import_module("vllm.v1.kv_offload.base")
        manager = importlib.import_module("vllm.v1.kv_offload.cpu.manager").CPUOffloadingManager
        self._manager: Any = manager(slots, cache_policy=policy)
        self.name = f"vLLM's {policy.upper()} manager"

    def match(self, keys: Sequence[Key]) -> None:
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
        request = self._request()
        self._manager.prepare_store([key + _GROUP for key in keys], request)
        self._manager.on_request_finished(request)

    def store(self, keys: Sequence[Key]) -> None:
        request, ours = self._request(), [key + _GROUP for key in keys]
        output = self._manager.prepare_store(ours, request)
        if output is None:
            raise BenchError("vLLM's manager refused a store; the benchmark needs all of them")
        self._manager.complete_store(output.keys_to_store, request)
        self._manager.on_request_finished(request)

    def slots(self, keys: Sequence[Key]) -> None:
        request, ours = self._request(), [key + _GROUP for key in keys]
        self._manager.prepare_load(ours, request)
        self._manager.complete_load(ours, request)

    def _request(self) -> Any:
        request = self._base.ReqContext(req_id="bench")
        self._manager.on_new_request(request)
        return request


def makers_of_rivals() -> list[Callable[[int], Rival]]:
    """Constructors, by number of slots, of vLLM's two managers if it is installed, else of the ordered dictionary."""
    if not is_installed("vllm"):
        return [PlainLRU]
    try:
        VllmManager(64, "lru")
    except (ImportError, AttributeError, TypeError) as error:
        raise BenchError(f"the manager of the installed vLLM has another interface: {error}") from error
    return [partial(VllmManager, policy="lru"), partial(VllmManager, policy="arc")]


T = TypeVar("T")

PIECE = 1024
"""Blocks that are stored at a time."""


class AdmitsAll(Gittins):
    """The default policy without admission, because evictions are measured and rivals admit all blocks."""

    def admit(self, keys: Sequence[Key], make_room: Callable[[int], int], *, least: int = 1) -> int:
        return make_room(len(keys))


class Policy:
    """The default policy alone, over `slots` slots. It keeps no keys, so that only its own memory is measured."""

    def __init__(self, slots: int) -> None:
        self._policy = DEFAULT_POLICY(slots, np.empty(0, object))
        self._policy.grow(LISTS + slots)
        self._unused = range(LISTS, LISTS + slots)
        self._turn = 0

    def store(self, keys: Sequence[Key]) -> None:
        policy, count = self._policy, len(keys)
        nodes, self._unused = list(self._unused[:count]), self._unused[count:]
        while len(nodes) < count:
            victims = policy.next_victims(count - len(nodes))
            policy.remove_victims(victims, [key[::-1] for key in keys[len(nodes) :][: len(victims)]])
            nodes += victims
        policy.keys = np.broadcast_to(np.array(keys[0], object), (max(nodes) + 1,))
        self._turn += 1
        policy.begin(self._turn, count)
        policy.insert(nodes[::-1], leaf=True)


class Ours:
    """`TieredCache` with one tier of `slots` slots, and the longest call so far."""

    name = "longshore"

    def __init__(self, slots: int) -> None:
        self.cache = TieredCache([TierSpec(HOST, slots, 1, AdmitsAll)], CacheSettings(max_writes=PIECE))
        self.longest = 0.0

    def match(self, keys: Sequence[Key]) -> None:
        lease = self._call(lambda: self.cache.lookup({0: GroupKeys(keys)}, 0.0)).lease
        if lease is not None:
            self._call(lambda: self.cache.release(lease))

    def known(self, keys: Sequence[Key]) -> None:
        self._call(lambda: self.cache.store({0: GroupKeys(keys)}, {0: range(len(keys))}))

    def store(self, keys: Sequence[Key], first: int = 0, *, before_eviction: bool = False) -> None:
        for start in range(first, len(keys), PIECE):
            path, blocks = keys[: start + PIECE], range(min(PIECE, len(keys) - start))
            store = partial(self.cache.store, {0: GroupKeys(path, start)}, {0: blocks})
            offload = (store() if before_eviction else self._call(store))[0]
            if offload.job is None or len(offload.slots) != len(blocks):
                raise BenchError(
                    f"{len(offload.slots)} of {len(blocks)} blocks were stored; the benchmark needs all of them"
                )
            self._call(self.cache.take_commands)
            result = TransferResult(offload.job, (Status.OK,) * len(blocks))
            self._call(partial(self.cache.apply_results, (result,), 0.0))

    def onboard(self, keys: Sequence[Key]) -> float:
        """Load a resident prompt to the end; returns the seconds of the order alone."""
        lease = self.cache.lookup({0: GroupKeys(keys)}, 0.0).lease
        if lease is None:
            raise BenchError("the lookup of a resident prompt missed")
        begun = time.thread_time()
        parts = self._call(partial(self.cache.load, lease, {0: range(len(keys))})).jobs
        self.cache.take_commands()
        taken = time.thread_time() - begun
        results = [TransferResult(part.job, (Status.OK,) * part.num_chunks) for part in parts]
        self._call(partial(self.cache.apply_results, results, 0.0))
        self._call(partial(self.cache.release, lease))
        return taken

    def lookup(self, keys: Sequence[Key]) -> float:
        """Look up a resident prompt; returns the seconds, without those of its release."""
        begun = time.thread_time()
        found = self.cache.lookup({0: GroupKeys(keys)}, 0.0)
        taken = time.thread_time() - begun
        if found.num_chunks != len(keys) or found.lease is None:
            raise BenchError(f"{found.num_chunks} of {len(keys)} resident blocks were found")
        self.cache.release(found.lease)
        return taken

    def lend(self, keys: Sequence[Key]) -> float:
        """A load without a lease, whose bytes the inference engine moves; returns seconds of order and result."""
        begun = time.thread_time()
        (part,) = self.cache.load({0: GroupKeys(keys)}).jobs
        self.cache.apply_results([TransferResult(part.job, (Status.OK,) * part.num_chunks)], 0.0)
        return time.thread_time() - begun

    def prefer(self, keys: Sequence[Key]) -> None:
        """A store of resident blocks with a priority; the first one allocates the structures of priorities."""
        path = GroupKeys(keys, retention=(Retention(0, None, 90),))
        self._call(partial(self.cache.store, {0: path}, {0: range(len(keys))}))

    def _call(self, method: Callable[[], T]) -> T:
        begun = time.thread_time()
        answer = method()
        self.longest = max(self.longest, time.thread_time() - begun)
        return answer


class TwoTiers(Ours):
    """The same over a second tier of as many slots, with write-through."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        tiers = [TierSpec(name, slots, 1) for name in (HOST, FILE)]
        self.cache = TieredCache(tiers, CacheSettings(max_writes=PIECE, backup=WritePolicy.THROUGH))

    def store(self, keys: Sequence[Key], first: int = 0, *, before_eviction: bool = False) -> None:
        for start in range(first, len(keys), PIECE):
            path = keys[: start + PIECE]
            self.cache.store({0: GroupKeys(path, start)}, {0: range(len(path) - start)})
            while orders := [command for command in self.cache.take_commands() if isinstance(command, Transfer)]:
                self.cache.apply_results(
                    [TransferResult(each.job, (Status.OK,) * len(each.items)) for each in orders], 0.0
                )


LONGEST = 8192


class PromptSet:
    """Prompts with shared prefixes and `blocks` distinct keys, the same for all sides."""

    def __init__(self, blocks: int, seed: int = SEED) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - keys to measure with, not to keep
        self.blocks = blocks
        self.prompts: list[list[Key]] = []
        """The prompts that fill the tier; each begins with a part of an earlier one, or is new."""
        self.shared: list[int] = []
        """For each prompt, the number of leading blocks shared with an earlier one."""
        left = blocks
        while left:
            prompt, shared = self._prompt()
            del prompt[shared + left :]
            self.prompts.append(prompt)
            self.shared.append(shared)
            left -= len(prompt) - shared
        self.longest = max(self.prompts, key=len)

    def _prompt(self) -> tuple[list[Key], int]:
        """A prompt of 8 to 8,192 blocks, at most a quarter of all, log-uniform; and its shared blocks."""
        longest = max(8, min(LONGEST, self.blocks // 4))
        if not self.prompts:
            return self.fresh(longest), 0
        length, shared = int(8 * (longest / 8) ** self._dice.random()), 0
        elder = self._dice.choice(self.prompts)
        if self._dice.random() < 0.5:
            shared = self._dice.randrange(min(len(elder), length))
        return [*elder[:shared], *self.fresh(length - shared)], shared

    def fresh(self, count: int) -> list[Key]:
        return [self._dice.randbytes(32) for _ in range(count)]

    def sample(self, blocks: int) -> list[list[Key]]:
        """Resident prompts with about `blocks` blocks in total."""
        picked: list[list[Key]] = []
        while sum(map(len, picked)) < blocks:
            picked.append(self._dice.choice(self.prompts))
        return picked


def lengths(total: int) -> list[int]:
    """Prompt lengths 8, 16, ... `LONGEST`, repeated, with a sum of `total`."""
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
    """A side that stores prompts, with evictions."""

    def store(self, keys: Sequence[Key]) -> None: ...


def bytes_per_block(make: Callable[[int], Filled], blocks: int, refills: int = 0) -> tuple[float, float]:
    """Bytes that `make(blocks)` takes per block when filled, and bytes added by `refills` further fillings.

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
        raise BenchError("the process that measures memory has ended without a result") from None
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

    warm = make(_WARM_UP)  # kept alive, so that its memory is not reused
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
