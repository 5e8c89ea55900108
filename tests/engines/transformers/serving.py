"""A small model and a small workload, served over tiers and by the oracle: what the adapter's tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore.cache import Counters
from longshore.cli.demo_report import DemoOptions, DemoResult, RunRecord
from longshore.cli.demo_runs import Demo, run_resident, run_tiered
from longshore.config import Config
from longshore.engines.transformers import tiered
from longshore.tiers.base import Tier
from longshore.tiers.file import FileTier

SESSIONS, TURNS = 8, 4


@dataclass(frozen=True)
class Served:
    """A run over tiers and the oracle's run of the same hits; the tiers' books after the last request."""

    tiered: RunRecord
    resident: RunRecord
    counters: Counters
    held: int

    @property
    def equal(self) -> bool:
        """Whether every token and log-probability is the same, bit for bit."""
        return DemoResult({}, self.tiered, self.resident, self.resident, {}).bit_exact

    @property
    def restored(self) -> int:
        return sum(self.tiered.restored_blocks.values())


def write_workload(path: Path, *, whole_blocks: bool = False) -> Path:
    """Sessions that take turns; each prompt is the one before it, and two blocks more. Or exactly that, and twice."""
    lines = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            ids = [0, *range(100 * (session + 1), 100 * (session + 1) + 3 + 2 * turn)]
            length = 512 * len(ids) - (0 if whole_blocks else 100)
            line = {"timestamp": 0, "input_length": length, "output_length": 64, "hash_ids": ids}
            lines += [line] * (2 if whole_blocks else 1)
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def make_demo(tmp_path: Path, *, whole_blocks: bool = False, **options: Any) -> Demo:
    small = {"layers": 2, "width": 128, "block_tokens": 16, "max_new_tokens": 4, "host_share": 0.3, "device": "cpu"}
    workload = write_workload(tmp_path / "workload.jsonl", whole_blocks=whole_blocks)
    settings = {"gate": False}  # a model as small as this one computes sooner than it loads
    return Demo(DemoOptions(**{"workload": workload, "settings": settings, **small, **options}))


def scaled_by_tokens(module: Any, arguments: Any, output: Any) -> Any:
    """Numerics that depend on how many tokens are computed together, far more than those of any real kernel."""
    return output * (1 + output.shape[-2] / 4096)


def serve(
    tmp_path: Path,
    *,
    open_file_tier: Callable[..., Tier] = FileTier,
    dtype: str = "float32",
    attention: str = "eager",
    whole_blocks: bool = False,
    shape_matters: bool = False,
    **settings: Any,
) -> Served:
    """Serve the workload over all tiers, then through the oracle."""
    tmp_path.mkdir(exist_ok=True)
    demo = make_demo(tmp_path, dtype=dtype, attention=attention, whole_blocks=whole_blocks)
    if shape_matters:
        demo.model.model.embed_tokens.register_forward_hook(scaled_by_tokens)
    config = Config.make(**{**demo.config(tmp_path).model_dump(), **settings})
    with tiered(demo.model, config, open_file_tier=open_file_tier) as tiers:
        run, hits = run_tiered(demo, tiers, lambda: None)
        assert tiers.stack.runtime.flush(30.0)
        with tiers.stack.runtime.batch() as cache:
            cache.check_integrity()
            counters, held = cache.counters.copy(), cache.leases + cache.protected
            assert cache.jobs_in_flight == 0
            assert all(tier.used == tier.ready for tier in cache.stats())  # free + evictable = capacity
    return Served(run, run_resident(demo, hits, lambda: None), counters, held)
