"""`longshore bench vllm`: an engine with Longshore beside one without, each in a process of its own.

EngineProcess    one engine, driven by lines of JSON (`vllm_engine`)
EnginePair       both of them, which get the same prompts in turn
ReturnedTurns    time to first token of prompts that return, and the share of their tokens that was not computed
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
from typing import Annotated, Any, Self

import typer

from longshore.bench.harness import Case, Tell, check_engine, first_tokens
from longshore.engines.kv_transfer_config import kv_transfer_config
from longshore.errors import BenchError
from longshore.trace.parsing import TraceRequest
from longshore.trace.readers import TRACE_BLOCK_TOKENS, read_trace
from longshore.trace.workload import FIRST_TOKEN, tokens_of

WITHOUT = "the same vLLM without Longshore"

_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(16 << 30)}
"""For the C library of both engines. Whether it returns the memory of each step's tensors to the system, and faults it
in again, depends on the layout of its heap, and takes a sixth of a step on the CPU. So both keep it."""

_LAST_LINES = 8
"""Lines of an engine's output that the error shows when it has ended."""


def options_of(text: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` from a JSON object. Raises `BenchError` for other text."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BenchError(f"expected arguments of vllm.LLM as JSON, got {text[:80]!r}: {error}") from error
    if not isinstance(options, dict):
        raise BenchError(f"expected arguments of vllm.LLM as a JSON object, got {text[:80]!r}")
    return options


class EngineProcess:
    """One engine in a process of its own."""

    def __init__(
        self, model: Path, options: Mapping[str, Any], log: Path, tell: Tell, *, own_process: bool = False
    ) -> None:
        """Start it, which takes up to a minute; its output goes to `log`. Raises `BenchError` if that fails.

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
        """Send prompts at the same time; returns its answers. Raises `BenchError` if the engine has ended."""
        return self._say(["ask", prompts, answer])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the engine, which first writes to files what a restart would lose."""
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
            pass  # the log has the reason
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


class EnginePair:
    """The two engines, which get the same prompts in turn; the order changes each time."""

    def __init__(self, ours: EngineProcess, theirs: EngineProcess) -> None:
        self._engines = (ours, theirs)
        self._turn = 0

    def ask(self, prompts: Sequence[Sequence[Sequence[int]]], answer: int) -> list[dict[str, Any]]:
        """The answers of both, ours first; `prompts` are those of each, sent at the same time."""
        self._turn += 1
        said: list[dict[str, Any]] = [{}, {}]
        for side in (self._turn % 2, 1 - self._turn % 2):
            said[side] = self._engines[side].ask(prompts[side], answer)
        return said


class ReturnedTurns:
    """Prompts that return: times to first token of both engines, and tokens that were not computed."""

    def __init__(self) -> None:
        self.asked = 0
        """Tokens of all these prompts."""
        self._times: tuple[list[float], list[float]] = ([], [])
        self._cached = [0, 0]

    def add(self, tokens: int, said: Sequence[Mapping[str, Any]]) -> None:
        """Add the answers of both to one prompt of `tokens` tokens."""
        self.asked += tokens
        for side, each in enumerate(said):
            self._times[side].append(each["answers"][0]["ttft"])
            self._cached[side] += each["answers"][0]["cached"]

    def cases(self, tier: str) -> list[Case]:
        """Times to first token in ms, and the share of prompt tokens that was not computed."""
        found = first_tokens(f"ttft-{tier}/{{}}", *self._times, WITHOUT)
        had = [cached / self.asked for cached in self._cached]
        return [*found, Case(f"found-{tier}", had[0], "share", WITHOUT, had[1], had[0] / max(had[1], 1 / self.asked))]


BATCH = 4
"""Requests that are sent at the same time."""

_BATCHES = 12
"""Least number of batches of first turns, because storing costs only a few percent. The first batches do not return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlan:
    """The prompts to send, further settings of Longshore, and further arguments of `vllm.LLM`."""

    sessions: Annotated[int, typer.Option(min=1, max=10**6, help="Number of interleaved conversations.")] = 20
    prompt: Annotated[int, typer.Option(min=1, max=10**7, help="Prompt tokens of a first turn.")] = 512
    more: Annotated[
        int, typer.Option("--turn-tokens", min=1, max=10**7, help="Prompt tokens that each later turn adds.")
    ] = 64
    answer: Annotated[int, typer.Option("--output-tokens", min=1, max=10**7, help="Tokens of each answer.")] = 16
    host_size: Annotated[str, typer.Option(help="Host memory for blocks.")] = "1GiB"
    file_size: Annotated[str, typer.Option(help="Disk space for blocks.")] = "2GiB"
    settings: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def run_sessions(model: Path, scratch: Path, plan: SessionPlan, *, tell: Tell = lambda line: None) -> Iterator[Case]:
    """All cases for `model`; the file tier and logs are in `scratch`, which the caller removes.

    Raises `BenchError` if there is no model, or an engine ends.
    """
    check_engine("vLLM", model)
    with ExitStack() as plain:
        theirs = plain.enter_context(EngineProcess(model, plan.engine, scratch / "without.log", tell))
        sessions = Sessions(plan, theirs.facts, tell)
        with EngineProcess(model, with_longshore(plan, scratch), scratch / "with.log", tell) as ours:
            both = EnginePair(ours, theirs)
            yield from sessions.begin(both)
            yield from sessions.go_on(both, "host")
            tell("closing; all blocks are written to files")
        with EngineProcess(model, with_longshore(plan, scratch), scratch / "with.log", tell) as ours:
            yield from sessions.go_on(EnginePair(ours, theirs), "file")


def costs(speed: str, cpu: str, pairs: Sequence[Sequence[Mapping[str, Any]]], tokens: int) -> Iterator[Case]:
    """Throughput and CPU time of both engines over batches of `tokens` tokens; `pairs` are the answers, ours first."""
    speeds = [statistics.median(tokens / pair[side]["seconds"] for pair in pairs) for side in (0, 1)]
    ratios = [pair[1]["seconds"] / pair[0]["seconds"] for pair in pairs]
    yield Case(speed, speeds[0], "tokens/s", WITHOUT, speeds[1], statistics.median(ratios))
    seconds = [sum(pair[side]["cpu_seconds"] for pair in pairs) for side in (0, 1)]
    yield Case(cpu, seconds[0], "s", WITHOUT, seconds[1], seconds[1] / seconds[0])


class Sessions:
    """Interleaved conversations, with a history per engine, because answers may differ in their last bits."""

    def __init__(self, plan: SessionPlan, facts: Mapping[str, int], tell: Tell) -> None:
        self._plan = plan
        self._tell = tell
        self._dice = random.Random(plan.sessions)  # noqa: S311 - text for measurements
        self._vocabulary = facts["vocabulary"]
        longest = plan.prompt + 3 * plan.answer + 2 * plan.more
        if longest > facts["longest"]:
            raise BenchError(f"three turns have {longest} tokens, the model takes {facts['longest']}")
        self._histories: list[list[list[int]]] = [[], []]

    def begin(self, both: EnginePair) -> Iterator[Case]:
        """First turns, in batches: no hits, all blocks are stored. One batch before them warms both engines up."""
        cold = [self._text(self._plan.prompt) for _ in range(BATCH)]
        self._tell("first turns: a batch to warm up")
        both.ask([cold, cold], self._plan.answer)
        sessions = self._plan.sessions
        others = max(0, BATCH * _BATCHES - sessions)
        texts = [self._text(self._plan.prompt) for _ in range(others + sessions)]
        pairs: list[list[dict[str, Any]]] = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            self._tell(f"first turns: {start + len(batch)} of {len(texts)}")
            pairs.append(both.ask([batch, batch], self._plan.answer))
            self._record([batch, batch], pairs[-1])
        self._histories = [history[others:] for history in self._histories]
        yield from costs("zero-reuse", "zero-reuse/cpu", pairs, BATCH * (self._plan.prompt + self._plan.answer))

    def go_on(self, both: EnginePair, tier: str) -> Iterator[Case]:
        """The next turn of each session, one after the other."""
        returns = ReturnedTurns()
        for each in range(self._plan.sessions):
            self._tell(f"turns that find the {tier} tier: {each + 1} of {self._plan.sessions}")
            more = self._text(self._plan.more)
            prompts = [[[*history[each], *more]] for history in self._histories]
            said = both.ask(prompts, self._plan.answer)
            returns.add(len(prompts[0][0]), said)
            for history, mine, side in zip(self._histories, prompts, said, strict=True):
                history[each] = [*mine[0], *side["answers"][0]["tokens"]]
        yield from returns.cases(tier)

    def _record(self, prompts: Sequence[Sequence[list[int]]], said: Sequence[dict[str, Any]]) -> None:
        for history, mine, side in zip(self._histories, prompts, said, strict=True):
            history += [[*prompt, *one["tokens"]] for prompt, one in zip(mine, side["answers"], strict=True)]

    def _text(self, tokens: int) -> list[int]:
        return [self._dice.randrange(FIRST_TOKEN, self._vocabulary) for _ in range(tokens)]


def with_longshore(plan: SessionPlan, scratch: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the engine with Longshore, whose files are in `scratch`."""
    extra = {
        **plan.settings,
        "host_size": plan.host_size,
        "file_path": str(scratch / "tier"),
        "file_size": plan.file_size,
    }
    return {**plan.engine, "kv_transfer_config": kv_transfer_config(extra)}


_IDLE = "; the device kept all returning blocks: set a smaller num_gpu_blocks_override in --engine"


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
    """All cases for the first `requests` of `trace`, with blocks of `block_tokens` tokens.

    Before an engine is started, raises `TraceError` if the trace cannot be read, and `BenchError` if none of its
    requests returns or there is no model.
    """
    check_engine("vLLM", model)
    asked = _read(trace, requests, block_tokens)
    with (
        EngineProcess(model, plan.engine, scratch / "without.log", tell) as theirs,
        EngineProcess(model, with_longshore(plan, scratch), scratch / "with.log", tell) as ours,
    ):
        yield from _ask(asked, EnginePair(ours, theirs), plan.answer, theirs.facts, block_tokens, tell)


def _read(trace: Path, requests: int, block_tokens: int) -> list[TraceRequest]:
    """The first requests of a trace; raises `BenchError` if none has the first block of an earlier one."""
    asked = list(islice(read_trace(trace, block_tokens=block_tokens), requests))
    firsts = {request.hash_ids[:1] for request in asked}
    if len(firsts) == len(asked):
        raise BenchError(f"{trace}: none of {len(asked)} requests begins like an earlier one: raise --requests")
    return asked


def _ask(
    asked: Sequence[TraceRequest], both: EnginePair, answer: int, facts: dict[str, int], block_tokens: int, tell: Tell
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
            returns.add(len(prompt), said)
        seen.add(request.hash_ids[:1])
    yield Case("served-trace", served[0], "requests", WITHOUT, served[1], served[0] / max(1, served[1]))
    yield Case(
        "loaded-trace", loaded, "tokens", "tokens of all prompts" + ("" if loaded else _IDLE), total, loaded / total
    )
    yield from returns.cases("trace")


def _prompt(request: TraceRequest, block_tokens: int, vocabulary: int) -> list[int]:
    """A prompt with equal tokens for equal ids."""
    text = [token for each in request.hash_ids for token in tokens_of(each, block_tokens, vocabulary)]
    return text[: request.input_length]
