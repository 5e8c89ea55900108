"""Whatever the file tier does, requests end, equal to the oracle; misses are counted under their reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from serving import Served, serve

from longshore.boundary import FILE
from longshore.cache import DropReason, MissReason
from longshore.testing import Fault, FaultPlan, FaultyTier, Rule
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier

PATIENT = {"load_timeout": 120.0}
"""A load ends when its reads have ended, also on a busy machine."""


def later(op: Op, fault: Fault, seconds: float = 0.0) -> Rule:
    return Rule(op, fault, nth=frozenset(range(2, 10_000)), seconds=seconds)


def run(tmp_path: Path, *rules: Rule, **settings: Any) -> tuple[Served, FaultyTier]:
    made: list[FaultyTier] = []

    def open_file_tier(*args: Any, arena: Any, **kwargs: Any) -> FaultyTier:
        made.append(FaultyTier(FileTier(*args, arena=arena, **kwargs), FaultPlan(rules, seed=1), arena))
        return made[-1]

    return serve(tmp_path, open_file_tier=open_file_tier, **settings), made[-1]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.FAIL, MissReason.IO_ERROR),
        (Fault.SHORT, MissReason.SHORT),
        (Fault.CORRUPT, MissReason.CORRUPT),
    ],
)
def test_every_read_fails(tmp_path: Path, fault: Fault, reason: MissReason) -> None:
    served, faulty = run(tmp_path, later(Op.READ, fault))
    assert faulty.fired[fault] > 0
    assert served.counters.misses[reason] > 0
    assert served.tiered.restored_blocks["file"] == 0
    assert served.tiered.restored_blocks["host"] > 0
    assert served.equal
    assert served.held == 0


@pytest.mark.parametrize("fault", [Fault.FAIL, Fault.FULL])
def test_every_write_fails(tmp_path: Path, fault: Fault) -> None:
    served, faulty = run(tmp_path, later(Op.WRITE, fault))
    assert faulty.fired[fault] > 0
    assert served.counters.drops[FILE][DropReason.WRITE_FAILED] == faulty.fired[fault]
    assert served.counters.misses[MissReason.ABSENT] > 0
    assert served.tiered.restored_blocks == {"host": served.tiered.restored_blocks["host"], "file": 0}
    assert served.tiered.restored_blocks["host"] > 0
    assert served.equal
    assert served.held == 0


def test_reads_slower_than_the_deadline(tmp_path: Path) -> None:
    served, faulty = run(tmp_path, later(Op.READ, Fault.DELAY, seconds=0.6), load_timeout=0.25)
    assert faulty.fired[Fault.DELAY] > 0
    assert served.counters.misses[MissReason.DEADLINE] > 0
    assert served.tiered.restored_blocks["file"] == 0
    assert served.equal
    assert served.held == 0


def test_some_of_everything(tmp_path: Path) -> None:
    kinds = [(Op.READ, Fault.FAIL), (Op.READ, Fault.CORRUPT), (Op.READ, Fault.SHORT), (Op.WRITE, Fault.FAIL)]
    rules = [Rule(op, fault, nth=frozenset(range(start, 10_000, 9))) for start, (op, fault) in enumerate(kinds, 3)]
    served, faulty = run(tmp_path, *rules)
    assert all(faulty.fired[fault] > 0 for _, fault in kinds[:3])
    assert served.restored > 0
    assert served.equal
    assert served.held == 0


def test_silent_corruption_is_what_only_the_oracle_can_see(tmp_path: Path) -> None:
    served, faulty = run(tmp_path, later(Op.READ, Fault.SILENT), **PATIENT)
    assert faulty.fired[Fault.SILENT] > 0
    assert not served.equal


def test_what_is_slow_to_read_is_computed_instead(tmp_path: Path) -> None:
    slow = Rule(Op.READ, Fault.DELAY, probability=1.0, seconds=0.25)
    free, _ = run(tmp_path / "free", slow, **PATIENT)
    gated, faulty = run(tmp_path / "gated", slow, gate=True, prefill_speed=20_000, **PATIENT)  # however busy it is
    assert faulty.fired[Fault.DELAY] > 0
    assert gated.tiered.restored_blocks["file"] < free.tiered.restored_blocks["file"] / 2
    assert gated.tiered.restored_blocks["host"] > 0
    assert gated.equal
    assert gated.held == 0
