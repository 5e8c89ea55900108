"""An operator's own A/B: one vLLM with Longshore and one without, asked the same in turns.

    first turns        in batches, nothing is shared         what storing costs                    zero-reuse
    second turns       one by one, from host memory          time to first token                   ttft-host
    ── restart of the engine with Longshore ──
    third turns        one by one, from files                the same                              ttft-file

Sessions take turns, so that a device with room for fewer than there are has lost each when it returns. A trace has no
turns: its requests are asked in order, once, and those that share a beginning with an earlier one are compared.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longshore.bench.harness import Case
from longshore.engines.kv_transfer import kv_transfer
from longshore.errors import BenchError
from longshore.trace.readers import read_trace
from longshore.trace.tokens import FIRST_TOKEN, tokens_of

WITHOUT = "the same vLLM without Longshore"
_BATCH = 4
"""First turns that are asked at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked.

    Attributes:
        sessions: Conversations that take turns.
        prompt: Tokens of a first turn.
        more: Tokens that each later turn adds.
        answer: Tokens of each answer.
        host_size: As in the settings, as is the next one.
        file_size: Of the file tier, in a directory that the caller gives.
        settings: Further settings of Longshore.
        engine: Further arguments of `vllm.LLM`.
    """

    sessions: int = 20
    prompt: int = 512
    more: int = 64
    answer: int = 16
    host_size: str = "1GiB"
    file_size: str = "2GiB"
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any]


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

    def __init__(self, model: Path, options: Mapping[str, Any], log: Path) -> None:
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
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
            raise BenchError(f"an engine of vLLM has ended; its output is in {self._log.name}")
        said: dict[str, Any] = json.loads(line)
        return said


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


def run(model: Path, scratch: Path, plan: Plan) -> Iterator[Case]:
    """All figures for `model`; the file tier and logs lie in `scratch`, which is the caller's to remove."""
    with ExitStack() as plain:
        theirs = plain.enter_context(Arm(model, plan.engine, scratch / "without.log"))
        sessions = Sessions(plan, theirs.facts)
        with Arm(model, _with(plan, scratch), scratch / "with.log") as ours:
            both = Both(ours, theirs)
            yield from sessions.begin(both)
            yield from sessions.go_on(both, "host")
        with Arm(model, _with(plan, scratch), scratch / "again.log") as ours:
            yield from sessions.go_on(Both(ours, theirs), "file")


def run_trace(model: Path, trace: Path, scratch: Path, plan: Plan, requests: int) -> Iterator[Case]:
    """The same for the first requests of a trace, without a restart; prompts too long for the model are cut."""
    with (
        Arm(model, plan.engine, scratch / "without.log") as theirs,
        Arm(model, _with(plan, scratch), scratch / "with.log") as ours,
    ):
        both, seen = Both(ours, theirs), set[tuple[int, ...]]()
        returns = Returns()
        for request in islice(read_trace(trace), requests):
            size = -(-request.input_length // max(1, len(request.hash_ids)))
            text = [token for each in request.hash_ids for token in tokens_of(each, size, theirs.facts["vocabulary"])]
            prompt = text[: min(request.input_length, theirs.facts["longest"] - plan.answer)]
            said = both.ask([[prompt], [prompt]], plan.answer)
            if request.hash_ids[:1] in seen:
                returns.note(len(prompt), said)
            seen.add(request.hash_ids[:1])
        if not returns.asked:
            raise BenchError(f"of {requests} requests of {trace} none begins like an earlier one: ask for more")
        yield from returns.cases("trace")


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

    def cases(self, tier: str) -> Iterator[Case]:
        """Times to first token in ms, and which share of the prompts' tokens was not computed."""
        for name, share in (("p50", 0.5), ("p95", 0.95)):
            ours, theirs = (1e3 * sorted(each)[min(len(each) - 1, int(share * len(each)))] for each in self._times)
            yield Case(f"ttft-{tier}/{name}", ours, "ms", WITHOUT, theirs, theirs / ours)
        had = [cached / self.asked for cached in self._cached]
        yield Case(f"found-{tier}", had[0], "share", WITHOUT, had[1], had[0] / max(had[1], 1 / self.asked))


class Sessions:
    """Conversations that take turns, one history for each engine: answers may differ in their last bits."""

    def __init__(self, plan: Plan, facts: Mapping[str, int]) -> None:
        self._plan = plan
        self._dice = random.Random(plan.sessions)  # noqa: S311 - text to measure with
        self._vocabulary = facts["vocabulary"]
        longest = plan.prompt + 3 * plan.answer + 2 * plan.more
        if longest > facts["longest"]:
            raise BenchError(f"three turns have {longest} tokens, the model takes {facts['longest']}")
        self._histories: list[list[list[int]]] = [[], []]

    def begin(self, both: Both) -> Iterator[Case]:
        """First turns, in batches: nothing is found, all is stored. A batch before that warms both engines up."""
        cold = [self._text(self._plan.prompt) for _ in range(_BATCH)]
        both.ask([cold, cold], self._plan.answer)
        texts = [self._text(self._plan.prompt) for _ in range(self._plan.sessions)]
        pairs: list[list[dict[str, Any]]] = []
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            pairs.append(both.ask([batch, batch], self._plan.answer))
            self._note([batch, batch], pairs[-1])
        tokens = _BATCH * (self._plan.prompt + self._plan.answer)
        speeds = [statistics.median(tokens / pair[side]["seconds"] for pair in pairs) for side in (0, 1)]
        ratios = [pair[1]["seconds"] / pair[0]["seconds"] for pair in pairs]
        yield Case("zero-reuse", speeds[0], "tokens/s", WITHOUT, speeds[1], statistics.median(ratios))
        cpu = [sum(pair[side]["cpu_seconds"] for pair in pairs) for side in (0, 1)]
        yield Case("zero-reuse/cpu", cpu[0], "s", WITHOUT, cpu[1], cpu[1] / cpu[0])

    def go_on(self, both: Both, tier: str) -> Iterator[Case]:
        """The next turn of each session, one by one."""
        returns = Returns()
        for each in range(self._plan.sessions):
            more = self._text(self._plan.more)
            prompts = [[[*history[each], *more]] for history in self._histories]
            said = both.ask(prompts, self._plan.answer)
            returns.note(len(prompts[0][0]), said)
            for history, mine, side in zip(self._histories, prompts, said, strict=True):
                history[each] = [*mine[0], *side["answers"][0]["tokens"]]
        yield from returns.cases(tier)

    def _note(self, prompts: Sequence[Sequence[list[int]]], said: Sequence[dict[str, Any]]) -> None:
        for history, mine, side in zip(self._histories, prompts, said, strict=True):
            history += [[*prompt, *one["tokens"]] for prompt, one in zip(mine, side["answers"], strict=True)]

    def _text(self, tokens: int) -> list[int]:
        return [self._dice.randrange(FIRST_TOKEN, self._vocabulary) for _ in range(tokens)]


def _with(plan: Plan, scratch: Path) -> dict[str, Any]:
    extra = {
        **plan.settings,
        "host_size": plan.host_size,
        "file_path": str(scratch / "tier"),
        "file_size": plan.file_size,
    }
    return {**plan.engine, "kv_transfer_config": kv_transfer(extra)}
