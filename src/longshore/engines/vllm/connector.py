"""`LongshoreConnector`: vLLM's offloading connector, which also says when a load has failed.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "LongshoreConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "longshore.engines.vllm.connector", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"spec_name": "LongshoreSpec", "spec_module_path": "longshore.engines.vllm", ...}}'

The plain connector takes every load for a success. With this one the request is computed instead.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from longshore.engines.vllm.tally import zero
from longshore.engines.vllm.worker import LongshoreWorker


class LongshoreConnector(OffloadingConnector):  # type: ignore[misc]
    """Reports the requests whose blocks could not be loaded."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        """The worker is made here, one that reports failures instead of stopping the engine."""
        self.connector_worker.spec.reports_failures = True
        super().register_kv_caches(kv_caches)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any, **named: Any) -> Any:
        """vLLM's metrics, of which ours are there, at zero, before the engine has worked."""
        metrics = super().build_prom_metrics(*arguments, **named)
        for engine in metrics.per_engine_labelvalues:
            metrics.observe(zero().data, engine)
        return metrics

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What has ended, and which of the requests that have were not loaded after all."""
        requests = dict(self.connector_worker._load_jobs)
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= {requests[job] for job in self._ours.take_failed(requests)}
        return results

    @property
    def _ours(self) -> LongshoreWorker:
        worker = self.connector_worker.worker
        if not isinstance(worker, LongshoreWorker):
            raise TypeError(f"expected the worker of LongshoreSpec, got {type(worker).__name__}")
        return worker
