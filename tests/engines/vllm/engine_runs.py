"""Runs of real engines, each in a process of its own, and what the tests ask of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from serving import MARK
from tiny_models import MODELS, VOCABULARY, save

Steps = list[list[Any]]
Answers = list[dict[str, Any]]


class Served(NamedTuple):
    """What one engine answered, and what its tiers counted."""

    answers: Answers
    counters: dict[str, Any]


Serve = Callable[..., Served]


def run_engine(
    directory: Path,
    model: str,
    steps: Steps,
    extra: dict[str, Any] | None,
    blocks: int,
    *,
    script: str = "serving.py",
    **more: Any,
) -> Served:
    """Have an engine take `steps`; with tiers as `extra` says, or without any. Models and orders lie in `directory`."""
    orders = directory / "orders.json"
    path = save(model, directory)
    asked_for = {"model": str(path), "dtype": MODELS[model].dtype, "extra": extra, "blocks": blocks, "steps": steps}
    orders.write_text(json.dumps({**asked_for, **more}))
    command = [sys.executable, Path(__file__).with_name(script), orders]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        raise AssertionError(f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
    said = json.loads(lines[-1].removeprefix(MARK))
    return Served([each for each in said["results"] if each], said["counters"])


def ask_oracle(serve: Serve, model: str, plain: dict[str, Any] | None = None, **more: Any) -> Answers:
    """Three cold answers, then three warm ones, of an engine that keeps everything.

    The schedule is that of the tiers: one request at a time, and as many tokens from a cache. The cache is vLLM's own
    on the device; where it has none on the CPU, or only at the ends of some blocks, it is `PlainSpec`, as it is where
    that has settings of its own, `plain`.
    """
    ask = asked(prompts())
    if MODELS[model].is_cached_by_vllm and plain is None:
        return serve(model, ask * 2, None, 600, **more).answers
    return serve(model, [*ask, ["reset"], *ask], None, 600, plain=plain or {}, **more).answers


def prompts(seed: int = 3) -> list[list[int]]:
    """Three, of lengths that are no multiples of a block; the third begins as the first."""
    chooser = random.Random(seed)
    first, second = ([chooser.randrange(3, VOCABULARY) for _ in range(length)] for length in (613, 421))
    return [first, second, first[:333] + [9] * 77]


def asked(each: list[list[int]]) -> Steps:
    return [["ask", tokens] for tokens in each]


def tiers(path: Path) -> dict[str, Any]:
    # Models as small as these compute sooner than they load: the gate would not read a thing.
    return {"host_size": "96MiB", "file_path": str(path), "file_size": "256MiB", "gate": False}
