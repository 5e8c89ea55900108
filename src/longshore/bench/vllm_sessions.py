"""An operator's own A/B: one vLLM with Longshore and one without, asked the same in turns.

    first turns        in batches, nothing is shared         what storing costs                    zero-reuse
    second turns       one by one, from host memory          time to first token                   ttft-host
    ── restart of the engine with Longshore ──
    third turns        one by one, from files                the same                              ttft-file

Sessions take turns, so that a device with room for fewer than there are has lost each when it returns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longshore.bench.harness import Case
from longshore.bench.vllm_arms import WITHOUT, Arm, Both, Returns, Tell, check
from longshore.engines.kv_transfer import kv_transfer
from longshore.errors import BenchError
from longshore.tiers.file.audit import Audit
from longshore.tiers.file.inspection import inspect
from longshore.trace.tokens import FIRST_TOKEN

_BATCH = 4
"""First turns that are asked at once."""

_BATCHES = 12
"""Batches of first turns, at least: what storing costs is a few hundredths. The first of them never come back."""


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


def run(model: Path, scratch: Path, plan: Plan, *, tell: Tell = lambda line: None) -> Iterator[Case]:
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
    model: Path, scratch: Path, plan: Plan, *, pairs: int = 10, prompt: int = 1000, tell: Tell = lambda line: None
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

    def __init__(self, plan: Plan, facts: Mapping[str, int], tell: Tell) -> None:
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
        returns = Returns()
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


def with_longshore(plan: Plan, scratch: Path) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for the side with Longshore, whose files lie in `scratch`."""
    extra = {
        **plan.settings,
        "host_size": plan.host_size,
        "file_path": str(scratch / "tier"),
        "file_size": plan.file_size,
    }
    return {**plan.engine, "kv_transfer_config": kv_transfer(extra)}
