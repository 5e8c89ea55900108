"""`LongshoreConnector`: vLLM's `OffloadingConnector`, with failed loads, loads and stores in parts, and step times.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "LongshoreConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "longshore.engines.vllm.connector", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"spec_name": "LongshoreSpec", "spec_module_path": "longshore.engines.vllm", ...}}'

Which method answers a method of vLLM's `KVConnectorBase_V1`. In the scheduler, vLLM's `OffloadingConnectorScheduler`
or this connector calls `LongshoreManager` (manager.py):

    on_new_request                  set_adapter, on_new_request
    get_num_new_matched_tokens      lookup, for one chunk after the other
    get_external_cache_hit_sources  get_load_source
    update_state_after_alloc        prepare_load (load_jobs.py)
    build_connector_meta            on_schedule_end, prepare_store (store_jobs.py), on_request_finished, take_parts
    update_connector_output         complete_load, complete_store, observe_prefill
    request_finished                will_finish
    request_finished_all_groups     will_finish
    has_pending_push_work           has_pending_work
    reset_cache                     reset_cache, on_reset_flushed
    bind_kv_cache_manager           device_was_reset, at each reset of vLLM's prefix cache
    take_events                     take_events (metrics.py)
    get_kv_connector_stats          get_stats (metrics.py)
    shutdown                        shutdown

In each worker, vLLM's `OffloadingConnectorWorker` or this connector calls `LongshoreWorker` (worker.py):

    register_kv_caches              LongshoreSpec.get_worker (spec.py)
    start_load_kv                   submit_store (stores of the step before), submit_load, submit_parts, wait
    handle_preemptions              submit_store, wait
    get_transfer_results            get_finished, take_failed
    get_finished                    get_finished
    shutdown                        shutdown

`wait_for_save` only queues stores for the next step. `wait_for_layer_load` and `save_kv_layer` do nothing: chunks are
copied whole, not layer by layer. With the plain `OffloadingConnector` a load that fails stops the engine; with this one
its request is recomputed. It also measures in steps how fast prompts are computed, for the gate (load or
recompute); without it, set `prefill_speed`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from longshore.engines.vllm import contract
from longshore.engines.vllm.metrics import zero
from longshore.engines.vllm.worker import LongshoreWorker

_OPEN_STEPS = 2
"""Steps that are planned and have not ended, at most."""

_COMPUTED_SECONDS = 0.5e-3
"""A longer step has computed something, or slept."""

_SLEEP_SECONDS = 0.2e-3


class GilYield:
    """Yields the GIL to other threads: sleeps for 0.2 ms in steps without computation while copies are in flight.

    A step that finds nothing to compute returns at once. vLLM's own process then sleeps for a millisecond. An engine in
    the process of its caller (VLLM_ENABLE_V1_MULTIPROCESSING=0) does not: it polls, and releases and takes the GIL so
    often that another thread may wait for it for hundreds of milliseconds.
    """

    def __init__(self) -> None:
        self._last_step = -math.inf

    def step_planned(self, in_flight: Callable[[], bool]) -> None:
        """A step was planned: sleep if the last one has computed nothing and copies are `in_flight`."""
        if time.monotonic() - self._last_step < _COMPUTED_SECONDS and in_flight():
            time.sleep(_SLEEP_SECONDS)
        self._last_step = time.monotonic()


class _Step(NamedTuple):
    tokens: int
    most: int
    pairs: float
    planned_at: float


class StepTimer:
    """Measures how long vLLM takes to compute prompts: planned(step) ─► the workers compute ─► ended().

    Plans and ends come in the same order, but with asynchronous scheduling a step is planned before the one before it
    has ended. A step whose end is not reported counts as lasting until the next report. It then appears slower than it
    was, which favours loading.

    Calls `on_step(context, tokens, seconds)` for each step that computed at least `least` tokens of some prompt, with
    the `context` of one request of as many tokens that would take as much attention as the whole step.
    """

    def __init__(self, on_step: Callable[[int, int, float], None], least: int) -> None:
        self._on_step = on_step
        self._least = least
        self._open: deque[_Step] = deque(maxlen=_OPEN_STEPS)
        self._last_end = 0.0

    def planned(self, scheduled: Iterable[tuple[int, int]], now: float) -> None:
        """A step was scheduled; for each request, the tokens to compute and the tokens before them."""
        tokens, most, pairs = 0, 0, 0.0
        for new, behind in scheduled:
            tokens, most = tokens + new, max(most, new)
            pairs += new * (behind + new / 2)
        self._open.append(_Step(tokens, most, pairs, now))

    def ended(self, now: float) -> None:
        """The oldest planned step has ended."""
        if not self._open:
            return
        step = self._open.popleft()
        begun, self._last_end = max(step.planned_at, self._last_end), now
        if step.most >= self._least:
            self._on_step(max(0, round(step.pairs / step.tokens - step.tokens / 2)), step.tokens, now - begun)


def tokens_of(output: Any) -> list[tuple[int, int]]:
    """Of vLLM's `SchedulerOutput`: for each request the tokens to compute, and those before them."""
    cached = output.scheduled_cached_reqs
    behind = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    behind.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(tokens, behind[request]) for request, tokens in output.num_scheduled_tokens.items()]


class LongshoreConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's offloading connector, with calls of `LongshoreManager` and `LongshoreWorker` that vLLM's own one lacks.

    Of the manager: `set_adapter`, `will_finish`, `take_parts`, `observe_prefill`, `device_was_reset`, `allow_parts`.
    Of the worker: `submit_parts`, `take_failed`. vLLM calls all other methods of the table at the top.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_scheduler is not None:
            policy = vllm_config.kv_transfer_config.kv_load_failure_policy
            self.connector_scheduler.manager.allow_parts(loads=policy == "recompute")

    # ------------------------------------------------------------------ in the scheduler

    def on_new_request(self, request: Any) -> None:
        """A request has arrived; the manager is told its LoRA adapter first."""
        if request.lora_request is not None:
            self.connector_scheduler.manager.set_adapter(request.request_id, request.lora_request)
        super().on_new_request(request)

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        """A request has ended; in the next step its blocks are offered for the last time."""
        self.connector_scheduler.manager.will_finish(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        """A request with several KV cache groups has ended."""
        self.connector_scheduler.manager.will_finish(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """A step was planned: its metadata has the next parts of loads and stores, for the workers."""
        self._step_timer.planned(tokens_of(scheduler_output), time.monotonic())
        meta = super().build_connector_meta(scheduler_output)
        meta.parts = self.connector_scheduler.manager.take_parts()
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """A step has ended."""
        super().update_connector_output(connector_output)
        self._step_timer.ended(time.monotonic())

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Wrap the reset of vLLM's prefix cache, so that the manager knows when the device was emptied."""
        contract.check_has(self.connector_scheduler, "manager", "config")
        contract.check_has(kv_cache_manager, "reset_prefix_cache")
        super().bind_kv_cache_manager(kv_cache_manager)
        reset, manager = kv_cache_manager.reset_prefix_cache, self.connector_scheduler.manager

        def reset_and_notify(*arguments: Any, **named: Any) -> Any:
            done = reset(*arguments, **named)
            if done:
                manager.device_was_reset()
            return done

        kv_cache_manager.reset_prefix_cache = reset_and_notify
        manager.observes_device_resets = True

    @cached_property
    def _step_timer(self) -> StepTimer:
        scheduler = self.connector_scheduler
        return StepTimer(
            scheduler.manager.observe_prefill, min(each.tokens_per_chunk for each in scheduler.config.kv_group_configs)
        )

    # ------------------------------------------------------------------ in the workers

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Make the worker, one that reports failed loads instead of stopping the engine."""
        contract.check_has(self.connector_worker, "spec", "worker", "_load_jobs")
        self.connector_worker.spec.reports_failures = True
        super().register_kv_caches(kv_caches)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> Any:
        """vLLM's metrics. Those of Longshore are exported at zero before the first step."""
        metrics = super().build_prom_metrics(*arguments, **named)
        for engine in metrics.per_engine_labelvalues:
            metrics.observe(zero().data, engine)
        return metrics

    def start_load_kv(self, forward_context: Any, **named: Any) -> None:
        """Submit loads, stores of the step before, and the next parts of both."""
        super().start_load_kv(forward_context, **named)
        self._longshore_worker.submit_parts(self._connector_metadata.parts)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Requests whose transfers have ended, and those of them whose loads have failed."""
        requests = dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= {requests[job] for job in self._longshore_worker.take_failed(requests)}
        return results

    @property
    def _longshore_worker(self) -> LongshoreWorker:
        worker = self.connector_worker.worker
        if not isinstance(worker, LongshoreWorker):
            raise TypeError(f"expected the worker of LongshoreSpec, got {type(worker).__name__}")
        return worker
