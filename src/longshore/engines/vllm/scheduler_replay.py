"""Requests of a trace through vLLM's offloading interface and `LongshoreManager`: no engine, no bytes, no time.

    on_new_request    lookup of each key, head first, up to the first miss
    a step that loads      prepare_load, on_schedule_end, complete_load               if there are hits
    a step that computes   on_schedule_end, prepare_store, of hits too if the manager asks for it, complete_store
    the step after it      on_schedule_end, on_request_finished

These are the calls of vLLM 0.32's `OffloadingConnectorScheduler`, in its order, for one request at a time whose prompt
is computed in one step and whose blocks the device does not keep. A simulated device reports every copy as done.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from longshore.cache.eviction_policies import EvictionPolicy
from longshore.cache.eviction_policies.hit_rates import ReuseHint
from longshore.config import Config
from longshore.engines.vllm.manager import LongshoreManager
from longshore.engines.vllm.model import ModelIdentity
from longshore.engines.vllm.rendezvous import EngineMemory
from longshore.engines.vllm.requests import HINTS
from longshore.engines.vllm.tiers import SchedulerTiers, SleepControl, make_cache
from longshore.errors import IntegrityError
from longshore.runtime import Runtime
from longshore.runtime.loop import BackgroundLoop
from longshore.runtime.rank_reports import RankReports
from longshore.trace.replay import keys_of

_TOKENS = 16
"""Of a block. Nothing depends on their number."""


class VllmReplay:
    """A manager of the tier in `tiers`, called as vLLM's scheduler calls it."""

    def __init__(self, tiers: SchedulerTiers, manager: OffloadingManager | None = None) -> None:
        self._tiers = tiers
        self._manager = manager or LongshoreManager(tiers, [0], 60.0)
        self._requests = 0

    def serve(self, path: Sequence[int], now: float = 0.0, reuse_hint: ReuseHint | None = None) -> int:
        """Serve one request for the blocks `path` (ids from 0 to 2**64 - 1, first block first); returns its hits.

        `reuse_hint` is passed in `kv_transfer_params`. The manager has a clock of its own; `now` is not used.

        Raises `IntegrityError` where the control plane fails, or does not say at once whether it has a block.
        """
        manager, keys = self._manager, [make_offload_key(key, 0) for key in keys_of(path)]
        self._requests += 1
        said = reuse_hint and {"ends": reuse_hint.ends, "returns_in": reuse_hint.seconds, "class": reuse_hint.of}
        request = ReqContext(req_id=str(self._requests), kv_transfer_params={HINTS: said} if said else None)
        offers_hits = manager.on_new_request(request).policy is OffloadPolicy.REQUEST_LEVEL
        for position, key in enumerate(keys, 1):
            request.set_offload_key_position(key, position * _TOKENS)
        hits = self._hits(keys, request)
        if hits:
            spec = manager.prepare_load(keys[:hits], request)
            manager.on_schedule_end(_step())
            self._tiers.reports.loaded(spec.ticket, 0, good=True)
            manager.complete_load(set(keys[:hits]), request)
        manager.on_schedule_end(_step(request))
        computed = keys if offers_hits else keys[hits:]
        is_stored = self._is_stored(computed, request)
        manager.on_schedule_end(_step())
        if not is_stored:  # vLLM offers again what was refused, once more when the request has finished
            self._is_stored(computed, request)
        manager.on_request_finished(request)
        if fault := self._tiers.runtime.fault:
            raise IntegrityError(f"the control plane failed in request {self._requests}: {fault}") from fault
        return hits

    def close(self) -> None:
        """Close the manager and its tier."""
        self._manager.shutdown()

    def _hits(self, keys: Sequence[OffloadKey], request: ReqContext) -> int:
        """How many of the leading `keys` can be loaded."""
        for position, key in enumerate(keys):
            found = self._manager.lookup(key, request)
            if found is LookupResult.MISS:
                return position
            if found is not LookupResult.HIT:
                raise IntegrityError(
                    f"block {position} of request {self._requests} is {found}, but no copy is in flight"
                )
        return len(keys)

    def _is_stored(self, keys: Sequence[OffloadKey], request: ReqContext) -> bool:
        """Offer `keys`, and store what is taken; whether the manager has decided."""
        offer = self._manager.prepare_store(keys, request) if keys else None
        if offer is not None and offer.keys_to_store:
            self._tiers.reports.stored(offer.store_spec.ticket, 0, offer.store_spec.indices, [])
            self._manager.complete_store(set(offer.keys_to_store), request)
        return not keys or offer is not None


def open_replay(blocks: int, policy: str) -> VllmReplay:
    """A replay through host memory of `blocks` blocks. Raises `ConfigError` for an unknown policy."""
    return VllmReplay(open_tiers(blocks, Config.make(eviction=policy)))


def open_tiers(blocks: int, config: Config, policy: type[EvictionPolicy] | None = None) -> SchedulerTiers:
    """The scheduler's side of host memory for `blocks` blocks without bytes; all but its size is as in `config`.

    If there is a `policy`, it evicts, and not the one of `config`.

    There is one rank, and one KV cache group of full attention with one block a chunk.
    """
    model = ModelIdentity(windows=(None,))
    memory = EngineMemory(
        "", "", 4096, (4096,), blocks, (0,), ranks=1, world=1, fingerprint="", device="cpu", model=model
    )
    cache = make_cache(config, memory, None, [SimpleNamespace(tokens_per_block=_TOKENS)], 0, policy)
    runtime, reports = Runtime(cache, [], clock=lambda: 0.0), RankReports.make(blocks, 1, 1)
    loop, sleeps = BackgroundLoop(runtime), SleepControl(runtime, reports, blocks, config)
    return SchedulerTiers(runtime, reports, reports.memory, loop, file=None, windows=model.windows, sleeps=sleeps)


def _step(*new: ReqContext) -> ScheduleEndContext:
    """The end of a step, in which these requests were computed first."""
    return ScheduleEndContext(new_req_ids=[request.req_id for request in new], preempted_req_ids=())
