"""Real engines of vLLM on the CPU: log-probabilities bit-equal to those of an engine whose device keeps everything.

The oracle has the same schedule: one request at a time, and as many tokens cached on its device as come from our tiers.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import MARK
from tiny_models import VOCABULARY, save

Serve = Callable[..., "Served"]
Steps = list[list[Any]]


class Served(NamedTuple):
    """What one engine answered, and what its tiers counted."""

    answers: list[dict[str, Any]]
    counters: dict[str, Any]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Runs one engine in a process of its own."""
    directory = tmp_path_factory.mktemp("engines")

    def run(model: str, steps: Steps, extra: dict[str, Any] | None, blocks: int, **more: Any) -> Served:
        orders = directory / "orders.json"
        path = save(model, directory)
        orders.write_text(json.dumps({"model": str(path), "extra": extra, "blocks": blocks, "steps": steps, **more}))
        script = Path(__file__).with_name("serving.py")
        command = [sys.executable, script, orders]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
        assert lines, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        said = json.loads(lines[-1].removeprefix(MARK))
        return Served([each for each in said["results"] if each], said["counters"])

    return run


def prompts(seed: int = 3) -> list[list[int]]:
    """Three, of lengths that are no multiples of a block; the third begins as the first."""
    chooser = random.Random(seed)
    first, second = ([chooser.randrange(3, VOCABULARY) for _ in range(length)] for length in (613, 421))
    return [first, second, first[:333] + [9] * 77]


def asked(each: list[list[int]]) -> Steps:
    return [["ask", tokens] for tokens in each]


@pytest.fixture(scope="session")
def oracles(serve: Serve) -> Callable[[str], list[dict[str, Any]]]:
    """By model, the answers of an engine that keeps all on its device: three cold ones, then three warm ones."""
    known: dict[str, list[dict[str, Any]]] = {}

    def of(model: str) -> list[dict[str, Any]]:
        if model not in known:
            known[model] = serve(model, asked(prompts()) * 2, None, 600).answers
        return known[model]

    return of


def tiers(path: Path) -> dict[str, Any]:
    return {"host_size": "96MiB", "file_path": str(path), "file_size": "256MiB"}


@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_every_answer_is_that_of_the_oracle(model: str, serve: Serve, oracles: Any, tmp_path: Path) -> None:
    """From the host tier, from the file tier, and from the file tier after a restart."""
    oracle, ask = oracles(model), asked(prompts())
    steps = [*ask, ["reset"], *ask, ["drop_host"], ["reset"], *ask, ["settle"]]
    first = serve(model, steps, tiers(tmp_path / "tier"), 160)
    assert first.answers == [*oracle, *oracle[3:]]
    assert first.counters["hits"]["host"] > 0
    assert first.counters["held"] == 0
    second = serve(model, ask, tiers(tmp_path / "tier"), 160)
    assert [each["cached"] for each in second.answers] == [each["cached"] for each in oracle[3:]]
    assert second.answers == oracle[3:]
    assert second.counters["hits"]["host"] > 0


def test_a_bit_that_flips_in_the_host_tier_is_seen(serve: Serve, oracles: Any) -> None:
    """The control: the comparison above must fail where blocks are wrong."""
    ask = asked(prompts())
    flipped = serve("llama", [*ask, ["reset"], ["flip"], *ask], {"host_size": "96MiB"}, 160)
    oracle = oracles("llama")
    assert flipped.answers[:3] == oracle[:3]
    assert [each["cached"] for each in flipped.answers[3:]] == [each["cached"] for each in oracle[3:]]
    assert all(
        ours["logprobs"] != theirs["logprobs"] for ours, theirs in zip(flipped.answers[3:], oracle[3:], strict=True)
    )


def test_rotten_files_cost_time_and_nothing_else(serve: Serve, oracles: Any, tmp_path: Path) -> None:
    path, ask = tmp_path / "tier", asked(prompts())
    serve("llama", [*ask, ["settle"]], tiers(path), 160)
    segment = path / "segment"
    content = bytearray(segment.read_bytes())
    content[2048::4096] = bytes(byte ^ 1 for byte in content[2048::4096])
    segment.write_bytes(content)
    rotten = serve("llama", ask, tiers(path), 160)
    assert rotten.answers[:2] == oracles("llama")[:2]
    assert [each["tokens"] for each in rotten.answers] == [each["tokens"] for each in oracles("llama")[:3]]
    assert rotten.counters["misses"]["corrupt"] + rotten.counters["lost"]["file"] > 0


def test_requests_whose_loads_fail_are_computed(serve: Serve, oracles: Any) -> None:
    ask = asked(prompts()[:2])
    connector = {
        "kv_connector": "LongshoreConnector",
        "kv_connector_module_path": "longshore.engines.vllm.connector",
        "kv_load_failure_policy": "recompute",
    }
    steps = [*ask, ["reset"], ["refuse_loads"], *ask]
    served = serve("llama", steps, {"host_size": "96MiB"}, 160, connector=connector)
    assert served.counters["refused"] >= 2
    assert served.counters["held"] == 0
    cold = oracles("llama")[:2]
    assert [each["tokens"] for each in served.answers] == [each["tokens"] for each in cold * 2]
    assert [each["logprobs"] for each in served.answers] == [each["logprobs"] for each in cold * 2]
