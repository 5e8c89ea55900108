"""Snippets of README.md and docs/*.md run as they are written, with small sizes and a small model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from event_file import write_events
from longshore.cache import Event, EventKind
from longshore.cli.demo_report import DemoOptions
from longshore.cli.demo_runs import load_model
from longshore.config import Config
from longshore.engines.transformers import tiered

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

SIZES = {
    "--host-size 64GiB": "--host-size 8MiB",
    "--file-size 1TiB": "--file-size 64MiB",
    "host_size=16GiB": "host_size=8MiB",
    'host_size="64GiB"': 'host_size="8MiB"',
    'host_size="8GiB"': 'host_size="8MiB"',
    'file_size="1TiB"': 'file_size="64MiB"',
    "/nvme/longshore": "{scratch}/kv",
    "/var/log/longshore/events": "{scratch}/events",
    "MODEL": "model",
}
"""What is written, and what a test's machine has instead."""

INSTEAD = {
    "vllm": 'test "$1 $3" = "serve --kv-transfer-config" && python -c "import json, sys; json.loads(sys.argv[1])" "$4"',
    "sglang": 'test "$1 $2" = "serve --model-path" && for last; do :; done && '
    'python -c "import json, sys; json.loads(sys.argv[1])" "$last"',
    "pip": 'test "$*" = "install ."',
    "make": 'command make -n -C "$ROOT" "$@" > /dev/null',
}
"""Commands that are not run, and what is checked of their arguments."""

NOT_RUN = ("longshore bench vllm --model DIR [", "longshore bench sglang --model DIR")
"""A synopsis; `tests/engines/vllm/test_vllm_bench.py` runs the command."""


def snippets(language: str) -> Iterator[Any]:
    """Those of all documents: `python` ones of a document together, in order."""
    for document in DOCUMENTS:
        found = re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)
        bodies = [body for label, body in found if label == language and not body.startswith(NOT_RUN)]
        if language == "python" and bodies:
            yield pytest.param(bodies, id=document.name)
        elif language != "python":
            yield from (pytest.param(body, id=f"{document.name}-{i}") for i, body in enumerate(bodies))


def small(text: str, scratch: Path) -> str:
    for written, instead in SIZES.items():
        text = text.replace(written, instead.format(scratch=scratch))
    return text


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    excerpt = resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl")
    (tmp_path / "trace.jsonl").write_bytes(excerpt.read_bytes())
    return tmp_path


@pytest.mark.parametrize("body", snippets("sh"))
def test_commands_run(body: str, scratch: Path) -> None:
    key = bytes([1]) * 32
    write_events(scratch / "events", [Event(1, EventKind.REQUEST, 3.0, request="req_1138", keys=(key,))])
    functions = "".join(f"{name}() {{ {code}; }}\n" for name, code in INSTEAD.items())
    environment = {"ROOT": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", functions + small(body, scratch)],
        capture_output=True,
        text=True,
        cwd=scratch,
        env={**os.environ, **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bodies", snippets("python"))
def test_python_runs(bodies: list[str], scratch: Path) -> None:
    import prometheus_client
    from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

    from longshore.metrics import LongshoreCollector

    model = load_model(DemoOptions(layers=2, width=128, device="cpu"))
    tokens = list(range(100, 164))
    generation = GenerationConfig(max_new_tokens=2, do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
    batching = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=128, use_cuda_graph=False)
    asked = {"generation_config": generation, "continuous_batching_config": batching}
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), past_key_values=DynamicCache(), use_cache=True).past_key_values
    with tiered(model, Config.make(host_size="8MiB")) as tiers:
        model.generate_batch([tokens], **asked)
        names: dict[str, Any] = {
            "model": model,
            "tokens": tokens,
            "ids": torch.tensor([tokens]),
            "cache": cache,
            "prompts": [tokens],
            "generation": generation,
            "batching": batching,
            "tiers": tiers,
            "REGISTRY": prometheus_client.CollectorRegistry(),
            "LongshoreCollector": LongshoreCollector,
            "Config": Config,
        }
        uses_these, others = [], []
        for body in bodies:
            (uses_these if re.search(r"\btiers\.", body) and "with tiered" not in body else others).append(body)
        for body in uses_these:
            exec(small(body, scratch), names)  # noqa: S102 - our own documents
    for body in others:
        exec(small(body, scratch), names)  # noqa: S102


def test_no_command_stands_in_a_block_that_is_not_run() -> None:
    for document in DOCUMENTS:
        labels = set()
        for label, body in re.findall(r"^```(\w*)\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE):
            labels.add(label)
            assert label or not re.search(r"^\s*(longshore|make|vllm|pip|python) ", body, re.MULTILINE), body
        assert labels <= {"", "sh", "python"}, document
