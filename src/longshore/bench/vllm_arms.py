"""The two sides of an A/B under vLLM: an engine with Longshore and one without, each in a process of its own.

Arm        one engine, asked by lines of JSON (`vllm_engine`)
Both       the two of them, asked the same in turns
Returns    what prompts that came back took on either side, and how much of them was not computed
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longshore.bench.harness import Case
from longshore.bench.machine import has_vllm
from longshore.errors import BenchError

WITHOUT = "the same vLLM without Longshore"

Tell = Callable[[str], None]
"""Takes a line that says how far a benchmark is."""

_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""For the C library of both sides: whether it gives the memory of each step's tensors back, to fault it in again, hangs
on where small blocks happen to lie in its heap, and is worth a sixth of a step on the CPU. So both keep it."""

_LAST_LINES = 8
"""Of an engine's output, in the error that says that it has ended."""


def check(model: Path) -> None:
    """Raise `BenchError` where there is no vLLM, or no model in that directory: before minutes are spent on starts."""
    if not has_vllm():
        raise BenchError("vLLM is not installed beside Longshore: run this with the Python that runs vLLM")
    if not (model / "config.json").is_file():
        raise BenchError(f"expected the directory of a model, {model / 'config.json'} is not there")


def options_of(text: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` from JSON. Raises `BenchError` for anything else."""
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise BenchError(f"expected arguments of vllm.LLM as JSON, got {text!r}: {error}") from error
    if not isinstance(options, dict):
        raise BenchError(f"expected arguments of vllm.LLM as a JSON object, got {text!r}")
    return options


class Arm:
    """One engine, in a process of its own, and what it was asked."""

    def __init__(
        self, model: Path, options: Mapping[str, Any], log: Path, tell: Tell, *, own_process: bool = False
    ) -> None:
        """Start it, which takes up to a minute; what it prints goes to `log`. Raises `BenchError` if it cannot.

        With `own_process` vLLM runs its scheduler and workers in a process of its own, as it does for a server.
        """
        tell(f"starting vLLM {log.stem} Longshore")
        environment = {**_KEEP_MEMORY, **os.environ, "VLLM_NO_USAGE_STATS": "1"}
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "longshore.bench.vllm_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.facts = self._say({"model": str(model), "skip_tokenizer_init": True, **options})

    def ask(self, prompts: Sequence[Sequence[int]], answer: int) -> dict[str, Any]:
        """What became of prompts that were asked at once. Raises `BenchError` if the engine has died."""
        return self._say(["ask", prompts, answer])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the engine, which writes back what a restart would lose."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._log.close()

    def _say(self, order: object) -> dict[str, Any]:
        if self._process.stdin is None or self._process.stdout is None:
            raise BenchError("the engine has no pipes")
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the log says why
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"an engine of vLLM has ended; the end of its output:\n{self._last_words()}")
        said: dict[str, Any] = json.loads(line)
        return said

    def _last_words(self) -> str:
        self._log.flush()
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        wrong = [line for line in lines if "Error" in line or "error" in line]
        return "\n".join((wrong or lines)[-_LAST_LINES:])


class Both:
    """The two engines, asked the same in turns; who goes first changes each time."""

    def __init__(self, ours: Arm, theirs: Arm) -> None:
        self._arms = (ours, theirs)
        self._turn = 0

    def ask(self, prompts: Sequence[Sequence[Sequence[int]]], answer: int) -> list[dict[str, Any]]:
        """What both say, ours first; `prompts` are those of each, which are asked at once."""
        self._turn += 1
        said: list[dict[str, Any]] = [{}, {}]
        for side in (self._turn % 2, 1 - self._turn % 2):
            said[side] = self._arms[side].ask(prompts[side], answer)
        return said


class Returns:
    """Turns that came back: what both sides took for them, and had of them."""

    def __init__(self) -> None:
        self.asked = 0
        """Tokens of all prompts."""
        self._times: tuple[list[float], list[float]] = ([], [])
        self._cached = [0, 0]

    def note(self, tokens: int, said: Sequence[Mapping[str, Any]]) -> None:
        """Both were asked for one prompt of so many tokens."""
        self.asked += tokens
        for side, each in enumerate(said):
            self._times[side].append(each["answers"][0]["ttft"])
            self._cached[side] += each["answers"][0]["cached"]

    def cases(self, tier: str) -> list[Case]:
        """Times to first token in ms, and which share of the prompts' tokens was not computed."""
        found = []
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            ours, theirs = (1e3 * sorted(each)[min(len(each) - 1, int(share * len(each)))] for each in self._times)
            found.append(Case(f"ttft-{tier}/{name}", ours, "ms", WITHOUT, theirs, theirs / ours))
        had = [cached / self.asked for cached in self._cached]
        return [*found, Case(f"found-{tier}", had[0], "share", WITHOUT, had[1], had[0] / max(had[1], 1 / self.asked))]
