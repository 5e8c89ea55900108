"""A trace under vLLM with Longshore, and under the same without: its requests in order, one by one, each once.

Nothing is restarted. Requests that begin like an earlier one are compared; what a trace says of times is left out, as
two engines on one machine could not keep to it. A prompt too long for the model loses its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from longshore.bench.harness import Case
from longshore.bench.vllm_arms import WITHOUT, Arm, Both, Returns, Tell, check
from longshore.bench.vllm_sessions import Plan, with_longshore
from longshore.errors import BenchError
from longshore.trace.mooncake import TRACE_BLOCK_TOKENS
from longshore.trace.readers import read_trace
from longshore.trace.request import TraceRequest
from longshore.trace.tokens import tokens_of

_IDLE = "; the device kept what came back: give it fewer blocks, num_gpu_blocks_override in --engine"


def run(
    model: Path,
    trace: Path,
    scratch: Path,
    plan: Plan,
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
    returns, seen = Returns(), set[tuple[int, ...]]()
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
