"""`LongshoreStorage`: what SGLang's hierarchical cache is told to load as its storage back end.

    SGLang's host memory ◄──copies──► staging area in shared memory ◄──tier host──► files
                                      with stores: a host tier of `host_size` ◄──tier hosts──► files, stores

SGLang asks from threads of its own, which block until a call returns. It takes the pages of a call back as soon as that
returns, so no copy may touch them then. Only this process touches them, by copies between them and a staging
area: a call can return at its deadline, however long a disk takes. A tier host that mapped SGLang's memory could not be
called back from a hung disk. A store returns when its pages are in the staging area; the files are written behind.

Every rank has a process, files, and a scope of its own. Whatever fails makes fewer pages: the calls raise nothing.

    weights change ─► nothing is found or stored ─► SGLang's caches are flushed ─► another namespace, of this run alone
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import (
    STORAGE_BATCH_SIZE,
    HiCacheStorage,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.utils import get_hash_str

from longshore.boundary import Key
from longshore.cache import UNKNOWN_START, GroupKeys, LookupResult, Presence, Protection, TieredCache
from longshore.config import Config
from longshore.engines.sglang import contract, identity
from longshore.engines.sglang.flags import PREFIX_KEYS, of_pool, read
from longshore.engines.sglang.tiers import HostPages, PoolTiers, digests
from longshore.engines.weight_files import MEMO
from longshore.errors import EngineError, LongshoreError
from longshore.metrics import LongshoreCollector, MirroredMetrics
from longshore.runtime.commands import ControlledEngine, ControlledGroup
from longshore.runtime.control import ControlServer
from longshore.runtime.error_handler import with_fallback
from longshore.runtime.loop import Runtime
from longshore.runtime.remote_fetch import count_fetchable, fetch_and_wait
from longshore.runtime.stack import Stack

_log = logging.getLogger(__name__)

_SERVED = frozenset({PoolName.SWA})
"""Host pools that are served beside that of the keys and values: sliding windows."""

_ASKED, _OF_CALL = 1 << 20, 64
"""Keys of look-ups that are kept until their pages are loaded, 75 bytes each at most; a call counts as so many more."""

_UNTOLD = "untold"
_last_hash: ContextVar[str | None] = ContextVar("last_hash", default=_UNTOLD)
"""SGLang's key of the page before those that are asked for; `None` at the beginning of a prompt."""

_NOT_OPEN: Any = SimpleNamespace(fault=EngineError("the tiers are not open"))

_open = weakref.WeakSet["LongshoreStorage"]()


class _LookedUp(NamedTuple):
    """What was looked up: the number of the request, and the pages with those before them, if these are known.

    Its `share` of `_ASKED` counts what it has of a path together with other batches.
    """

    request_number: int | None = None
    path: GroupKeys | None = None
    share: int = 0


class LongshoreStorage(HiCacheStorage):  # type: ignore[misc]
    """A file tier behind SGLang's host memory."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """`storage_config` is a `HiCacheStorageConfig`. Raises `ConfigError`, `ContractError` or `EngineError`."""
        contract.check()
        self._told = identity.settings()
        identity.check_served(storage_config, self._told)
        self._check_prefix_keys()
        rank, ranks = storage_config.tp_rank, storage_config.tp_size
        self.settings: Config = read(storage_config.extra_config, f"rank-{rank}-of-{ranks}", ranks)
        self._storage_config = storage_config
        self._asked: OrderedDict[Key, _LookedUp] = OrderedDict()
        self._shares = 0
        self._lock = threading.Lock()
        self._why_off = "not open yet"
        self._has_changed = False
        self._pools: dict[str, tuple[Any, HostPages]] = {}
        self._tiers: dict[str, PoolTiers] = {}
        self._kv: PoolTiers
        self._opened = contextlib.ExitStack()
        self._metrics: Sequence[MirroredMetrics] = ()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool of the keys and values. Raises `EngineError` if its pages cannot be served."""
        super().register_mem_pool_host(mem_pool_host)
        self._add_pool(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a host pool beside it. Raises `EngineError` for one that is not served, and closes the tiers."""
        if host_pool_name == PoolName.KV:
            return
        try:
            if host_pool_name not in _SERVED:
                raise EngineError(f"models with a host pool {host_pool_name!s} beside their KV cache are not served")
            if self.settings.remote:
                raise EngineError(
                    f"remote is not served for models with a host pool {host_pool_name!s} beside their KV cache: "
                    "remove it, or set --disable-hybrid-swa-memory"
                )
            if self._tiers:
                raise EngineError(f"expected the host pool {host_pool_name!s} before the tiers were opened")
            self._add_pool(host_pool_name, host_pool)
        except LongshoreError:
            self.close()
            raise

    def on_host_pools_registered(self) -> None:
        """Open the tiers of each pool, and test them. Raises `LongshoreError`, with nothing left open."""
        told, rank = self._storage_config, self._storage_config.tp_rank
        memo = None if self.settings.file_path is None else self.settings.file_path.parent / MEMO
        sizes = {name: pages.layout.num_blocks * pages.layout.image_bytes for name, (_, pages) in self._pools.items()}
        with contextlib.ExitStack() as undo:
            tiers = {}
            for name, (pool, pages) in self._pools.items():
                beside = "" if name == PoolName.KV else str(name)
                config = of_pool(self.settings, beside, sizes[name] / sum(sizes.values()))
                scope = identity.scope_of(told, self._told, pages.layout, config.salt, memo, beside)
                tiers[name] = PoolTiers(pages, config, scope, undo)
                tiers[name].test(pool)
            if told.enable_storage_metrics:
                self._metrics = [
                    MirroredMetrics(_collector(of.stack), {"tp_rank": str(rank), "pool": str(name)})
                    for name, of in tiers.items()
                ]
            _watch()
            self._tiers, self._kv = tiers, tiers[PoolName.KV]
            if self.settings.control:
                undo.callback(ControlServer(self.settings.control, self._controlled()).close)
            self._opened = undo.pop_all()
        self._why_off = ""
        _open.add(self)

    def _controlled(self) -> ControlledEngine:
        """What `longshore ctl` looks into: pages of each host pool, by the keys of prompts without adapter and salt."""
        size, window = self._kv.pages.page_size, None
        if len(self._tiers) > 1:
            window = int(identity.model_config().sliding_window_size)

        def groups() -> list[ControlledGroup]:
            return [
                ControlledGroup(tiers.runtime, size, None if tiers is self._kv else window)
                for tiers in (() if self._why_off else self._tiers.values())
            ]

        def keys(tokens: Sequence[int]) -> list[list[Key]]:
            whole = list(tokens[: len(tokens) // size * size])
            found = digests(get_hash_str(whole, None, size)) if whole else []
            return [found for _ in self._tiers]

        def metrics() -> Iterator[Any]:
            for pool, tiers in self._tiers.items():
                for metric in _collector(tiers.stack).collect():
                    named = [each._replace(labels={**each.labels, "pool": str(pool)}) for each in metric.samples]
                    metric.samples = named
                    yield metric

        return ControlledEngine(groups, keys, metrics)

    def _add_pool(self, name: Any, pool: Any) -> None:
        identity.check_pool(pool)
        self._pools[name] = (pool, HostPages(pool))

    # ------------------------------------------------------------------ pages, from SGLang's threads

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many of `keys`, pages that follow one another, lead that are stored."""
        return self._count(keys, getattr(extra_info, "prefix_keys", None))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Read the pages of `keys` into host memory; whether each is there, of which a leading run is."""
        found = self._load(keys, host_indices)
        return [True] * found + [False] * (len(keys) - found)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages of host memory under `keys`; whether each was taken, or is stored."""
        kept = self._store(getattr(extra_info, "prefix_keys", None), keys, host_indices)
        return [True] * kept + [False] * (len(keys) - kept)

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """At which of `keys` a prompt can be continued: pages before it, and what each other pool needs there."""
        count = self._count(keys, getattr(extra_info, "prefix_keys", None))
        others, there = list(pool_transfers or ()), dict[str, Sequence[bool]]()
        for other in others if count else ():
            tiers = self._beside(other.name)
            there[other.name] = [False] * count if tiers is None else tiers.present(keys[:count])
        return restorable(count, others, there)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Read the pages of other pools; whether each is there, of which a leading run is, by pool."""
        result = {}
        for transfer in transfers:
            tiers, keys = self._beside(transfer.name), transfer.keys or []
            found = 0 if tiers is None else tiers.load(keys, transfer.host_indices)
            found = 0 if self._why_off else found  # weights have changed meanwhile
            result[transfer.name] = [True] * found + [False] * (len(keys) - found)
        return result

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store the pages of other pools; whether each was taken, or is stored, by pool."""
        result = {}
        for transfer in transfers:
            tiers, keys = self._beside(transfer.name), transfer.keys or []
            no = [False] * len(keys)
            result[transfer.name] = no if tiers is None else tiers.store(keys, transfer.host_indices)
        return result

    def _beside(self, pool: str) -> PoolTiers | None:
        """The tiers of a pool, unless nothing is stored or read now."""
        if self._why_off:
            return None
        if pool not in self._tiers:
            known = list(map(str, self._tiers))
            _log.error("expected a host pool of %s, got %s; its pages are misses; report this", known, pool)
        return self._tiers.get(pool)

    @with_fallback(lambda self, names, ancestor_names: 0, expected=(LongshoreError,))
    def _count(self, names: Sequence[str], ancestor_names: Sequence[str] | None) -> int:
        keys = digests(names)
        if not keys or self._why_off or self._kv.is_stuck():
            return 0
        stack, runtime = self._kv.stack, self._runtime
        with runtime.batch() as cache:
            with runtime.lookup_counters.seconds.timed():
                found = cache.lookup({0: GroupKeys(keys, UNKNOWN_START)}, runtime.clock(), remote_tiers=())
            path = _whole_path(cache, keys, found.ancestor_keys, runtime.clock()) if stack.remote else None
        runtime.lookup_counters.requests += 1
        runtime.lookup_counters.attempts += 1
        self._note(_LookedUp(found.request_number, path), keys)
        count = 0
        if found.lease is not None:
            try:
                count = runtime.worth_loading(found.lease, len(ancestor_names or ()) * self._kv.pages.page_size)
            finally:
                with runtime.batch() as cache:
                    cache.release(found.lease)
        if path is None or count < found.num_chunks:
            return count
        size = self._kv.pages.page_size
        return count + count_fetchable(runtime, path, path.start * size, size, self.settings.load_timeout)

    @with_fallback(lambda self, names, indices: 0, expected=(LongshoreError,))
    def _load(self, names: Sequence[str], indices: torch.Tensor) -> int:
        keys = digests(names)
        if not keys or self._why_off or self._kv.is_stuck():
            return 0
        pages, runtime, done = self._kv.pages.pages(indices, len(keys)), self._runtime, 0
        with self._lock:
            asked = self._asked.get(keys[0], _LookedUp())
        deadline, has_fetched = runtime.clock() + self.settings.load_timeout, False
        while done < len(keys) and (left := deadline - runtime.clock()) > 0:
            if asked.path is None:
                part = GroupKeys(keys, UNKNOWN_START)
            else:
                first = asked.path.start
                path = [*asked.path.keys[:first], *keys]  # of another prompt the look-up may be, which begins alike
                part = GroupKeys(path, first + done)
            loaded = self._load_part(part, pages[done:], asked.request_number, left)
            done += loaded
            if asked.path is None or (has_fetched and not loaded):
                break
            if has_fetched := not loaded:  # our tiers first, so that no store takes the time that files need
                size, left = self._kv.pages.page_size, deadline - runtime.clock()
                fetch_and_wait(runtime, part, part.start * size, size, left, is_agreed=True)  # by `count_fetchable`
        if self._kv.staging is not None and runtime.clock() >= deadline:
            self._kv.no_wait_until = deadline + self.settings.load_timeout
        return 0 if self._why_off else done

    def _load_part(self, part: GroupKeys, pages: Sequence[int], request_number: int | None, timeout: float) -> int:
        """Fill `pages` with what leads of `part` and our tiers have, in `timeout` seconds; how many that are."""
        jobs, runtime = list[int](), self._runtime
        with runtime.batch() as cache:
            found = cache.lookup(
                {0: part}, runtime.clock(), remote_tiers=(), request_number=request_number, count=False
            )
        if found.lease is None:
            return 0
        if part.start == UNKNOWN_START:
            part = GroupKeys([*found.ancestor_keys, *part.keys], len(found.ancestor_keys))
        try:
            mine = pages[: found.num_chunks]
            return len(
                self._kv.stack.start_load(found, part, mine, lambda job, blocks: jobs.append(job), timeout=timeout)()
            )
        finally:
            with contextlib.suppress(LongshoreError), runtime.batch() as cache:
                cache.release(found.lease)
            self._kv.let_go(jobs)

    @with_fallback(lambda self, ancestor_names, names, indices: 0, expected=(LongshoreError,))
    def _store(self, ancestor_names: Sequence[str] | None, names: Sequence[str], indices: torch.Tensor) -> int:
        if self._why_off or not names or self._kv.is_stuck():
            return 0
        if ancestor_names is None:
            raise EngineError(f"SGLang does not say what precedes a page: set {PREFIX_KEYS} in its extra configuration")
        pages = self._kv.pages.pages(indices, len(names))
        part = GroupKeys(digests([*ancestor_names, *names]), len(ancestor_names))
        timeout = self.settings.write_timeout
        waits = self._kv.staging is None and self._runtime.clock() >= self._kv.no_wait_until
        with self._kv.bounded(timeout) as jobs:
            wait = timeout if waits else 0.0
            kept = self._kv.stack.store_path(part, pages, lambda job, blocks: jobs.append(job), timeout=wait)
        return max(0, kept - len(ancestor_names))

    def _note(self, asked: _LookedUp, keys: Sequence[Key]) -> None:
        """Keep what was looked up for each call that may load some of `keys`."""
        batches = range(0, len(keys), STORAGE_BATCH_SIZE)
        share = _OF_CALL + (0 if asked.path is None else len(asked.path.keys) // len(batches))
        with self._lock:
            for at in batches:
                path = asked.path and asked.path._replace(start=asked.path.start + at)
                self._shares += share - self._asked.pop(keys[at], _LookedUp()).share
                self._asked[keys[at]] = _LookedUp(asked.request_number, path, share)
            while self._shares > _ASKED and len(self._asked) > len(batches):
                self._shares -= self._asked.popitem(last=False)[1].share

    # ------------------------------------------------------------------ the rest

    @with_fallback(lambda self: None, expected=(LongshoreError,))
    def clear(self) -> None:
        """Forget all pages in files, also after a restart."""
        for tiers in self._tiers.values():
            with tiers.runtime.batch() as cache:
                cache.reset()

    def flush(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until all pages that were taken are in files; returns whether they are."""
        done = [tiers.runtime.flush(timeout) for tiers in self._tiers.values()]
        return all(done)

    def close(self) -> None:
        """Write what was taken, and close the tiers. Idempotent."""
        self._why_off = self._why_off or "closed"
        self._opened.close()

    @with_fallback(lambda self: None, expected=(LongshoreError,))
    def get_stats(self) -> None:
        """Write our metrics, which have names of their own, for SGLang's `/metrics`. SGLang asks now and then."""
        for each in self._metrics:
            each.update()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: pages are read by `batch_get_v1`."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Nothing: pages are read by `batch_get_v1`."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Refused: pages are stored by `batch_set_v1`."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Refused: pages are stored by `batch_set_v1`."""
        return False

    def exists(self, key: str) -> bool:
        """Whether the page of `key` is stored, and all before it."""
        return self.batch_exists([key]) == 1

    @property
    def _runtime(self) -> Runtime:
        """Of the keys and values; where the tiers could not be opened, one that has failed."""
        return self._kv.runtime if self._tiers else _NOT_OPEN

    def weights_change(self) -> None:
        """Weights are about to change: nothing is found or stored until SGLang has flushed its caches."""
        if not self._why_off:
            _log.warning(
                "weights change: nothing is stored or read until SGLang's caches are flushed; pages stored then are "
                "of this run alone. Restart the server to store pages that outlive it"
            )
            self._why_off, self._has_changed = "weights have changed", True

    @with_fallback(lambda self: None, expected=(LongshoreError,))
    def caches_flushed(self) -> None:
        """Device and host memory of SGLang are empty. After a change of weights: begin another namespace."""
        if self._has_changed:
            for tiers in self._tiers.values():
                with tiers.runtime.batch() as cache:
                    cache.reset(weights=True)
            with self._lock:
                self._asked.clear()
                self._shares = 0
            self._why_off, self._has_changed = "", False

    def _check_prefix_keys(self) -> None:
        """Raise `EngineError` if SGLang was started with this back end, and not told to say what precedes a page."""
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: PLC0415

        if self._told["hicache_storage_backend"] != "dynamic":  # attached later, with a configuration of its own
            return
        extra = self._told["hicache_storage_backend_extra_config"]
        if not HybridCacheController.parse_storage_backend_extra_config(extra)[4]:
            raise EngineError(f"expected {PREFIX_KEYS} to be true in --hicache-storage-backend-extra-config")


def restorable(count: int, others: Sequence[PoolTransfer], there: Mapping[str, Sequence[bool]]) -> PoolTransferResult:
    """At which of `count` leading pages all pools can be continued; `there` says which of these pages others have.

    A pool of which all pages are needed has a leading run; one of which the last are needed, as many as its transfer
    has keys before that page.
    """
    hits, ends = ({PoolName.KV: count} if count else {}), list(range(1, count + 1))
    for other in others:
        here = there.get(other.name, [False] * count)
        if other.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            last = max(1, len(other.keys or ()))
            good = [end for end in range(1, count + 1) if all(here[max(0, end - last) : end])]
        elif other.hit_policy == PoolHitPolicy.ALL_PAGES:
            good = [end for end in range(1, count + 1) if all(here[:end])]
        else:
            continue  # another form of the same pages, which decides nothing
        if good:
            hits[other.name] = good[-1]
        ends = sorted(set(ends).intersection(good))
    return PoolTransferResult(ends[-1] if ends else 0, hits, ends)


def _collector(stack: Stack) -> LongshoreCollector:
    return LongshoreCollector(stack.runtime, stack.host, stack.transfer_engine, stack.events, stack.file, stack.remote)


def _look(cache: TieredCache, keys: Sequence[Key], now: float) -> LookupResult:
    """What tiers have of `keys`, and before them. Keeps nothing, and counts for nothing."""
    return cache.lookup({0: GroupKeys(keys, UNKNOWN_START)}, now, protect=Protection.NONE, count=False, remote_tiers=())


def _whole_path(cache: TieredCache, keys: Sequence[Key], ancestor_keys: Sequence[Key], now: float) -> GroupKeys | None:
    """`keys` with the pages before them, from the first of the prompt on; `None` where these are not known."""
    last = _last_hash.get()
    if not ancestor_keys and last is not None:
        if last is _UNTOLD:
            return None
        key = digests([last])
        found = _look(cache, key, now)
        if not found.num_chunks:
            return None
        ancestor_keys = [*found.ancestor_keys, *key]
    if ancestor_keys:  # of an orphan they begin with one that no tier has
        first = cache.lookup({0: GroupKeys(ancestor_keys[:1])}, now, protect=Protection.NONE, independent=True)
        if first.residency[0].presences[0] is Presence.ABSENT:
            return None
    return GroupKeys([*ancestor_keys, *keys], len(ancestor_keys))


def _watch() -> None:
    """Wrap what tells of weights, of flushed caches, and of what precedes a page that is asked for. Once a process."""
    from sglang.srt.managers.cache_controller import HiCacheController  # noqa: PLC0415
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: PLC0415
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater  # noqa: PLC0415

    if getattr(WeightUpdater, "longshore_watches", False):
        return
    for name in contract.UPDATES:
        _wrap(WeightUpdater, name, _weights_change)
    _wrap(HiCacheController, "reset", _flush)
    _wrap(HiCacheController, "_stop_storage_threads", _stop_threads)
    _wrap(HybridCacheController, "_storage_hit_query", _look_up)
    WeightUpdater.longshore_watches = True


def _wrap(owner: Any, name: str, around: Callable[..., contextlib.AbstractContextManager[None]]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def call(*arguments: Any, **named: Any) -> Any:
        with around(*arguments, **named):
            return method(*arguments, **named)

    setattr(owner, name, call)


@contextlib.contextmanager
def _weights_change(*arguments: Any, run_post_load: bool = True, **named: Any) -> Iterator[None]:
    """`run_post_load` is false at the end of a session whose weights were loaded by a method that was called before."""
    for storage in list(_open) if run_post_load else ():
        storage.weights_change()
    yield


@contextlib.contextmanager
def _flush(*arguments: Any, **named: Any) -> Iterator[None]:
    yield
    for storage in list(_open):
        storage.caches_flushed()


@contextlib.contextmanager
def _stop_threads(*arguments: Any, **named: Any) -> Iterator[None]:
    """SGLang waits a few seconds for its threads, and ends if one is in a call then: of an aborted request, say."""
    runtimes = [tiers.runtime for storage in list(_open) for tiers in storage._tiers.values()]
    for each in runtimes:
        each.gives_up = True
    try:
        yield
    finally:
        for each in runtimes:
            each.gives_up = False


@contextlib.contextmanager
def _look_up(controller: Any, operation: Any, **named: Any) -> Iterator[None]:
    """SGLang passes the pages before those that it asks for, without the last ones."""
    token = _last_hash.set(operation.last_hash)
    try:
        yield
    finally:
        _last_hash.reset(token)
