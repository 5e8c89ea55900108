"""What operators see of a real run: `longshore explain` over the file that it wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import make_demo
from typer.testing import CliRunner

from longshore.boundary import DEVICE, FILE, HOST
from longshore.cache import DropReason
from longshore.cli.app import app
from longshore.cli.demo_runs import run_tiered
from longshore.config import Config
from longshore.engines.transformers import tiered

WIDE = {"COLUMNS": "160"}


def explained(path: Path, *options: str) -> Any:
    told = CliRunner().invoke(app, ["explain", str(path), *options, "--json"])
    assert told.exit_code == 0, told.output
    return json.loads(told.stdout)


def test_explain_names_source_or_miss_reason_of_each_block(tmp_path: Path) -> None:
    events = tmp_path / "events"
    demo = make_demo(tmp_path)
    # Little host memory and few file slots: prompts that return find blocks in both, and some have been evicted.
    image = demo.image_bytes
    config = demo.config(tmp_path).model_dump() | {"events_path": events, "host_size": 10 * image}
    with tiered(demo.model, Config.make(**config)) as tiers:
        run_tiered(demo, tiers, lambda: None)
        records = tiers.records
    assert [each["request"] for each in explained(events)["requests"]] == [
        record.request for record in records if record.prompt_tokens > record.block_size
    ]
    verdicts: set[str] = set()
    for record in records:
        if record.prompt_tokens <= record.block_size:
            continue
        chunks = explained(events, "--request", record.request)["chunks"]
        came = [chunk for chunk in chunks if chunk["verdict"] in ("device", "found")]
        assert chunks[: len(came)] == came
        assert [DEVICE if chunk["verdict"] == "device" else "" for chunk in came] == [
            source if source == DEVICE else "" for source in record.sources
        ]
        assert {source for source in record.sources if source != DEVICE} <= {HOST, FILE}
        assert all(chunk["tier"] in (HOST, FILE) for chunk in came if chunk["verdict"] == "found")
        verdicts |= {chunk["verdict"] for chunk in chunks}
    assert {"device", "found", "never seen"} <= verdicts
    returned = next(record for record in records if HOST in record.sources or FILE in record.sources)
    told = CliRunner().invoke(app, ["explain", str(events), "--request", returned.request], env=WIDE)
    assert told.exit_code == 0
    assert "found" in told.stdout


@pytest.mark.parametrize(("prompt_only", "device_share"), [(False, 4.0), (True, 4.0), (True, 0.9)])
def test_an_answer_is_not_kept_where_only_prompts_are_wanted(
    tmp_path: Path, prompt_only: bool, device_share: float
) -> None:
    """Neither when it is complete, nor when the device evicts it."""
    requests = [
        {"timestamp": 0, "input_length": 1500, "output_length": 1500, "hash_ids": [0, 10 * turn + 1, 10 * turn + 2]}
        for turn in range(1, 7)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, requests)))
    demo = make_demo(
        tmp_path, workload=tmp_path / "own.jsonl", max_new_tokens=40, device_share=device_share, host_share=4.0
    )
    config = demo.config(tmp_path).model_dump() | {"prompt_only": prompt_only, "background": False}
    with tiered(demo.model, Config.make(**config)) as tiers:
        run_tiered(demo, tiers, lambda: None)
        with tiers.stack.runtime.batch() as cache:
            answers, stored = (
                cache.counters.drops[HOST][DropReason.GENERATED],
                cache.counters.routes["device->host"].chunks,
            )
    assert (answers > 0) == prompt_only
    assert (stored > 6 * 2 + 4) != prompt_only  # two chunks of a prompt each, one of them shared; and the warm-up's
