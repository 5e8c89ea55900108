"""SGLang with Longshore beside the same SGLang alone, and beside its own `file` back end: three servers, in one run.

All servers have `--sleep-on-idle`: schedulers that poll while they have no request take the others' processor time.

first turns      prompts that nobody has asked before, in turn to each server        throughput: what storing costs
/flush_cache     device and host memory are empty
returning turns  the same prompts and a few tokens more, in turn to each server      time to the first token
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Annotated

import typer

from longshore.bench.harness import Case, Tell, check_engine, first_tokens
from longshore.bench.sglang_server import ServerAnswer, SglangServer
from longshore.engines.sglang.flags import server_flags
from longshore.trace.workload import FIRST_TOKEN

ALONE, OWN = "the same SGLang without storage", "SGLang's file back end"
_OURS = "SGLang with Longshore"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPlan:
    """The prompts to send; `flags` of all servers, and those `of_cache`, SGLang's hierarchical cache."""

    sessions: Annotated[int, typer.Option(min=1, max=10**6, help="Number of prompts, each of which returns.")] = 24
    prompt: Annotated[int, typer.Option(min=1, max=10**7, help="Prompt tokens of a first turn.")] = 512
    more: Annotated[
        int, typer.Option("--turn-tokens", min=1, max=10**7, help="Prompt tokens that the second turn adds.")
    ] = 64
    answer: Annotated[int, typer.Option("--output-tokens", min=1, max=10**7, help="Tokens of each answer.")] = 16
    file_size: Annotated[str, typer.Option(help="Disk space for pages.")] = "2GiB"
    threshold: Annotated[int, typer.Option(min=1, help="SGLang's prefetch_threshold, in tokens.")] = 64
    flags: Sequence[str] = ()
    of_cache: Sequence[str] = ()


def run(model: Path, scratch: Path, plan: TurnPlan, *, tell: Tell = lambda line: None) -> Iterator[Case]:
    """All cases for `model`; the files of storage and the logs are in `scratch`, which the caller removes.

    Raises `BenchError` if there is no model, or a server ends.
    """
    check_engine("SGLang", model)
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    dice = random.Random(plan.sessions)  # noqa: S311 - text for measurements

    def text(tokens: int) -> list[int]:
        return [dice.randrange(FIRST_TOKEN, vocabulary) for _ in range(tokens)]

    with ExitStack() as running:
        servers: dict[str, SglangServer] = {}
        for name, (flags, environment) in _kinds(scratch, plan).items():
            tell(f"starting {name}")
            log = scratch / f"{len(servers)}.log"
            started = SglangServer(model, log, ["--sleep-on-idle", *plan.flags, *flags], environment)
            servers[name] = running.enter_context(started)
        tell("a prompt to warm up")
        _in_turn(servers, dict.fromkeys(servers, text(plan.prompt)), plan.answer, 0)
        firsts = []
        for turn in range(plan.sessions):
            tell(f"first turns: {turn + 1} of {plan.sessions}")
            prompt = text(plan.prompt)
            said = _in_turn(servers, dict.fromkeys(servers, prompt), plan.answer, turn)
            firsts.append((prompt, said))
        yield from _throughput(firsts, plan)
        tell("flushing device and host memory")
        for server in servers.values():
            server.flush()
        returns = []
        for turn, (prompt, said) in enumerate(firsts):
            tell(f"returning turns: {turn + 1} of {plan.sessions}")
            more = text(plan.more)
            asked = {name: [*prompt, *said[name][1].tokens, *more] for name in servers}
            returns.append(_in_turn(servers, asked, plan.answer, turn))
    yield from _returned(returns, plan)


def _kinds(scratch: Path, plan: TurnPlan) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Flags and variables of the environment of each server."""
    common = {"prefetch_threshold": plan.threshold}
    ours = server_flags({"file_path": str(scratch / "tier"), "file_size": plan.file_size}, common)
    theirs = [*ours]
    theirs[theirs.index("dynamic")] = "file"
    theirs[-1] = json.dumps(common)
    directory = scratch / "own"
    directory.mkdir()
    at = theirs.index("--hicache-storage-backend")
    alone = theirs[:at]
    return {
        _OURS: ([*ours, *plan.of_cache], {}),
        ALONE: ([*alone, *plan.of_cache], {}),
        OWN: ([*theirs, *plan.of_cache], {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory)}),
    }


Said = Mapping[str, tuple[float, ServerAnswer]]
"""Seconds that each server took, and what it said."""


def _in_turn(servers: Mapping[str, SglangServer], asked: Mapping[str, list[int]], answer: int, turn: int) -> Said:
    """Ask all servers, one after the other, in each order equally often: what one writes late slows the next one."""
    orders = list(permutations(servers))
    said = {}
    for name in orders[turn % len(orders)]:
        said[name] = servers[name].timed(asked[name], answer)
    return said


def _throughput(firsts: Sequence[tuple[list[int], Said]], plan: TurnPlan) -> Iterator[Case]:
    tokens = (plan.prompt + plan.answer) * len(firsts)
    speeds = {name: tokens / sum(said[name][0] for _, said in firsts) for name in firsts[0][1]}
    for other, short in ((ALONE, "alone"), (OWN, "file")):
        yield Case(
            f"zero-reuse/{short}", speeds[_OURS], "tokens/s", other, speeds[other], speeds[_OURS] / speeds[other]
        )


def _returned(returns: Sequence[Said], plan: TurnPlan) -> Iterator[Case]:
    asked = len(returns) * (plan.prompt + plan.answer + plan.more)
    for other, short in ((ALONE, "alone"), (OWN, "file")):
        ours, theirs = ([said[side][1].ttft for said in returns] for side in (_OURS, other))
        yield from first_tokens(f"ttft-returning/{{}}/{short}", ours, theirs, other)
    restored = {name: sum(said[name][1].storage for said in returns) for name in returns[0]}
    ratio = restored[_OURS] / max(restored[OWN], 1)
    yield Case("restored", restored[_OURS], "tokens", OWN, restored[OWN], ratio)
    yield Case("restored/share", restored[_OURS] / asked, "share", OWN, restored[OWN] / asked, ratio)
