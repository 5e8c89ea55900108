"""The two sides of an A/B under vLLM: an engine with Longshore and one without, each in a process of its own.

Arm              one engine, asked by lines of JSON (`vllm_engine`)
Both             the two of them, asked the same in turns
ReturnedTurns    what prompts that came back took on either side, and how much of them was not computed
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longshore.bench.harness import Case, has_vllm
from longshore.engines.kv_transfer import kv_transfer
from longshore.errors import BenchError
from longshore.tiers.file.audit import Audit, inspect
from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import TRACE_BLOCK_TOKENS, read_trace
from longshore.trace.workload import FIRST_TOKEN, tokens_of

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


class ReturnedTurns:
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


_BATCH = 4
"""First turns that are asked at once."""

_BATCHES = 12
"""Batches of first turns, at least: what storing costs is a few hundredths. The first of them never come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
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


def run_sessions(model: Path, scratch: Path, plan: SessionPlan, *, tell: Tell = lambda line: None) -> Iterator[Case]:
    """All figures for `model`; the file tier and logs lie in `scratch`, which is the caller's to remove.

    Raises `BenchError` where there is no model, or an engine ends.
    """
    check(model)
    with ExitStack() as plain:
        theirs = plain.enter_context(Arm(model, plan.engine, scratch / "without.log", tell))
        sessions = Sessions(plan, theirs.facts, tell)
        with Arm(model, with_longshore(plan, scratch), scratch / "with.log", tell) as ours:
            both = Both(ours, theirs)
            yield from sessions.begin(both)
            yield from sessions.go_on(both, "host")
            tell("closing, all is written to files")
        with Arm(model, with_longshore(plan, scratch), scratch / "with.log", tell) as ours:
            yield from sessions.go_on(Both(ours, theirs), "file")


def storing(
    model: Path,
    scratch: Path,
    plan: SessionPlan,
    *,
    pairs: int = 10,
    prompt: int = 1000,
    tell: Tell = lambda line: None,
) -> Iterator[Case]:
    """What storing costs a vLLM that has its own process: `pairs` batches of prompts that share nothing.

    Each batch has four prompts of so many tokens, and is asked of both engines in turns. Every chunk is written to its
    file at once (`backup` is `write_through`), and the last figure says which share of all whole chunks is there at the
    end. Raises `BenchError` as `run` does.
    """
    check(model)
    plan = replace(plan, settings={"backup": "write_through", **plan.settings})
    dice = random.Random(prompt)  # noqa: S311 - text to measure with
    with ExitStack() as engines:
        theirs = engines.enter_context(Arm(model, plan.engine, scratch / "without.log", tell, own_process=True))
        options = with_longshore(plan, scratch)
        with Arm(model, options, scratch / "with.log", tell, own_process=True) as ours:
            both, said = Both(ours, theirs), []
            for each in range(pairs + 1):
                tell(f"prompts that share nothing: pair {each} of {pairs}")
                top = theirs.facts["vocabulary"]
                batch = [[dice.randrange(FIRST_TOKEN, top) for _ in range(prompt)] for _ in range(_BATCH)]
                said.append(both.ask([batch, batch], plan.answer))
    said = said[1:]  # the first batch warms both engines up
    tokens = _BATCH * (prompt + plan.answer)
    speeds = [statistics.median(tokens / pair[side]["seconds"] for pair in said) for side in (0, 1)]
    ratios = [pair[1]["seconds"] / pair[0]["seconds"] for pair in said]
    yield Case("storing/speed", speeds[0], "tokens/s", WITHOUT, speeds[1], statistics.median(ratios))
    cpu = [sum(pair[side]["cpu_seconds"] for pair in said) for side in (0, 1)]
    yield Case("storing/cpu", cpu[0], "s", WITHOUT, cpu[1], cpu[1] / cpu[0])
    chunk = plan.engine.get("block_size", 16) * plan.settings.get("blocks_per_chunk", 1)
    eligible = (pairs + 1) * _BATCH * (prompt // chunk)
    with Audit(scratch / "tier") as audit:
        records = inspect(audit, iter(()), 0.0).records
    yield Case("storing/files", records, "chunks", "whole chunks of all prompts", eligible, records / eligible)


class Sessions:
    """Conversations that take turns, one history for each engine: answers may differ in their last bits."""

    def __init__(self, plan: SessionPlan, facts: Mapping[str, int], tell: Tell) -> None:
        self._plan = plan
        self._tell = tell
        self._dice = random.Random(plan.sessions)  # noqa: S311 - text to measure with
        self._vocabulary = facts["vocabulary"]
        longest = plan.prompt + 3 * plan.answer + 2 * plan.more
        if longest > facts["longest"]:
            raise BenchError(f"three turns have {longest} tokens, the model takes {facts['longest']}")
        self._histories: list[list[list[int]]] = [[], []]

    def begin(self, both: Both) -> Iterator[Case]:
        """First turns, in batches: nothing is found, all is stored. A batch before that warms both engines up."""
        cold = [self._text(self._plan.prompt) for _ in range(_BATCH)]
        self._tell("first turns: a batch to warm up")
        both.ask([cold, cold], self._plan.answer)
        sessions = self._plan.sessions
        others = max(0, _BATCH * _BATCHES - sessions)
        texts = [self._text(self._plan.prompt) for _ in range(others + sessions)]
        pairs: list[list[dict[str, Any]]] = []
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            self._tell(f"first turns: {start + len(batch)} of {len(texts)}")
            pairs.append(both.ask([batch, batch], self._plan.answer))
            self._note([batch, batch], pairs[-1])
        self._histories = [history[others:] for history in self._histories]
        tokens = _BATCH * (self._plan.prompt + self._plan.answer)
        speeds = [statistics.median(tokens / pair[side]["seconds"] for pair in pairs) for side in (0, 1)]
        ratios = [pair[1]["seconds"] / pair[0]["seconds"] for pair in pairs]
        yield Case("zero-reuse", speeds[0], "tokens/s", WITHOUT, speeds[1], statistics.median(ratios))
        cpu = [sum(pair[side]["cpu_seconds"] for pair in pairs) for side in (0, 1)]
        yield Case("zero-reuse/cpu", cpu[0], "s", WITHOUT, cpu[1], cpu[1] / cpu[0])

    def go_on(self, both: Both, tier: str) -> Iterator[Case]:
        """The next turn of each session, one by one."""
        returns = ReturnedTurns()
        for each in range(self._plan.sessions):
            self._tell(f"turns that find the {tier} tier: {each + 1} of {self._plan.sessions}")
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


def with_longshore(plan: SessionPlan, scratch: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the side with Longshore, whose files lie in `scratch`."""
    extra = {
        **plan.settings,
        "host_size": plan.host_size,
        "file_path": str(scratch / "tier"),
        "file_size": plan.file_size,
    }
    return {**plan.engine, "kv_transfer_config": kv_transfer(extra)}


_IDLE = "; the device kept what came back: give it fewer blocks, num_gpu_blocks_override in --engine"


def run_trace(
    model: Path,
    trace: Path,
    scratch: Path,
    plan: SessionPlan,
    *,
    requests: int,
    block_tokens: int = TRACE_BLOCK_TOKENS,
    tell: Tell = lambda line: None,
) -> Iterator[Case]:
    """All figures for the first `requests` of `trace`, whose blocks have so many tokens. `plan` says how to ask.

    Raises `TraceError` for a trace that cannot be read, and `BenchError` where none of its requests returns, or there
    is no model, both before an engine is started.
    """
    check(model)
    asked = _read(trace, requests, block_tokens)
    with (
        Arm(model, plan.engine, scratch / "without.log", tell) as theirs,
        Arm(model, with_longshore(plan, scratch), scratch / "with.log", tell) as ours,
    ):
        yield from _ask(asked, Both(ours, theirs), plan.answer, theirs.facts, block_tokens, tell)


def _read(trace: Path, requests: int, block_tokens: int) -> list[TraceRequest]:
    """The first requests of a trace, some of which begin like earlier ones."""
    asked = list(islice(read_trace(trace, block_tokens=block_tokens), requests))
    firsts = {request.hash_ids[:1] for request in asked}
    if len(firsts) == len(asked):
        raise BenchError(f"of {len(asked)} requests of {trace} none begins like an earlier one: ask for more")
    return asked


def _ask(
    asked: Sequence[TraceRequest], both: Both, answer: int, facts: dict[str, int], block_tokens: int, tell: Tell
) -> Iterator[Case]:
    returns, seen = ReturnedTurns(), set[tuple[int, ...]]()
    served, total, loaded = [0, 0], 0, 0
    for number, request in enumerate(asked, 1):
        tell(f"request {number} of {len(asked)}")
        prompt = _prompt(request, block_tokens, facts["vocabulary"])[: facts["longest"] - answer]
        said = both.ask([[prompt], [prompt]], answer)
        total += len(prompt)
        loaded = sum(said[0]["loaded"].values())
        for side, each in enumerate(said):
            served[side] += len(each["answers"][0]["tokens"]) == answer
        if request.hash_ids[:1] in seen:
            returns.note(len(prompt), said)
        seen.add(request.hash_ids[:1])
    yield Case("served-trace", served[0], "requests", WITHOUT, served[1], served[0] / max(1, served[1]))
    yield Case(
        "loaded-trace", loaded, "tokens", "tokens of all prompts" + ("" if loaded else _IDLE), total, loaded / total
    )
    yield from returns.cases("trace")


def _prompt(request: TraceRequest, block_tokens: int, vocabulary: int) -> list[int]:
    """Tokens that are equal where the trace says so."""
    text = [token for each in request.hash_ids for token in tokens_of(each, block_tokens, vocabulary)]
    return text[: request.input_length]
