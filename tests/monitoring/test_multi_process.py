"""The multi-process mode of `prometheus_client`, which SGLang uses: another process answers scrapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from longshore.monitoring.metric_names import METRICS

WRITER = """
from longshore.boundary import Route, Status, TransferResult
from longshore.cache import GroupKeys, TieredCache, TierSpec
from longshore.metrics import LongshoreCollector, MirroredMetrics
from longshore.runtime import Runtime
from scripted import Scripted

runtime = Runtime(TieredCache([TierSpec("host", 4, 4096)]), [mover := Scripted(Route("device", "host"))])
mirrored = MirroredMetrics(LongshoreCollector(runtime), {"tp_rank": "1"})
for number in range(2):
    with runtime.batch() as cache:
        cache.store({0: GroupKeys([bytes([number]) * 32])}, {0: (0,)})
    mover.end(Status.OK)
    runtime.pump()
    mirrored.update()
mirrored.update()
"""


def test_what_a_process_writes_is_scraped_from_another(tmp_path: Path) -> None:
    here = Path(__file__).parents[1]
    path = os.pathsep.join((str(here.parent / "src"), str(here)))
    shared = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", WRITER], env=shared, check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))
    labels = {"route": "device->host", "tp_rank": "1"}
    assert registry.get_sample_value("longshore_moved_bytes_total", labels) == 2 * 4096
    assert registry.get_sample_value("longshore_transfer_size_bytes_sum", labels) == 2 * 4096
    assert registry.get_sample_value("longshore_transfer_size_bytes_bucket", labels | {"le": "4096.0"}) is None
    assert registry.get_sample_value("longshore_transfer_size_bytes_bucket", labels | {"le": "16384.0"}) == 2
    found = {metric.name for metric in registry.collect()}
    assert found <= METRICS.keys()
    assert "longshore_miss_chunks" in found
