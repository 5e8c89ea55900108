"""One vLLM engine in a process of its own, driven by lines of JSON: python -m longshore.bench.vllm_engine

    ◄─ {"model": DIRECTORY, ...}                 arguments of `vllm.LLM`
    ─► {"vocabulary": 32000, "longest": 4096}
    ◄─ ["ask", [[TOKENS], ...], ANSWER]          prompts that are sent together, tokens of each answer
    ─► {"seconds": ..., "cpu_seconds": ..., "settle_seconds": ..., "loaded": {"host": 0, ...},
        "answers": [{"ttft": ..., "tokens": [...], "cached": 96}, ...]}

`seconds` is the time to the last complete answer, `settle_seconds` the time from then until all blocks are stored.
`loaded` counts the tokens loaded from each tier since the start, `cached` the tokens of a prompt that were not
computed. The process ends at the end of its input.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import count
from typing import Any

_TIMEOUT = 60.0


class Engine:
    """vLLM without a tokenizer."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM  # noqa: PLC0415 - only this process needs it

        self._llm = LLM(**options)
        self._core = self._llm.llm_engine.engine_core
        self._names = count()

    def facts(self) -> dict[str, int]:
        """Limits of prompts: size of the vocabulary, and largest length."""
        config = self._llm.llm_engine.model_config
        return {"vocabulary": config.get_vocab_size(), "longest": config.max_model_len}

    def ask(self, prompts: list[list[int]], answer: int) -> dict[str, Any]:
        """Send `prompts` together, for `answer` tokens each."""
        from vllm import SamplingParams  # noqa: PLC0415

        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        names = [str(next(self._names)) for _ in prompts]
        begun, cpu = time.perf_counter(), _cpu_seconds()
        first: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        cached: dict[str, int] = {}
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                first.setdefault(output.request_id, time.perf_counter() - begun)
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens or 0
        seconds = time.perf_counter() - begun
        self._settle()
        return {
            "seconds": seconds,
            "settle_seconds": time.perf_counter() - begun - seconds,
            "cpu_seconds": _cpu_seconds() - cpu,
            "loaded": self._loaded(),
            "answers": [{"ttft": first[name], "tokens": tokens[name], "cached": cached[name]} for name in names],
        }

    def close(self) -> None:
        """Shut down regularly, so that stored blocks are there for the next engine."""
        self._core.shutdown()

    def _settle(self) -> None:
        """Run until all stores have ended."""
        deadline = time.perf_counter() + _TIMEOUT
        if not hasattr(self._core, "engine_core"):  # in a process of its own, which runs by itself
            _wait_until_idle(deadline)
            return
        while self._scheduler.has_requests() and time.perf_counter() < deadline:
            self._llm.llm_engine.step()
        if self._manager is not None:
            self._manager.flush(_TIMEOUT)

    def _loaded(self) -> dict[str, int]:
        """Loaded tokens by tier; empty without tiers, or if vLLM runs in a process of its own."""
        if not hasattr(self._core, "engine_core"):
            return {}
        return {} if self._manager is None else dict(self._manager.loaded_tokens)

    @property
    def _scheduler(self) -> Any:
        return self._core.engine_core.scheduler

    @property
    def _manager(self) -> Any:
        """Longshore's manager in the scheduler, if there is one."""
        connector = self._scheduler.connector
        return None if connector is None else connector.connector_scheduler.manager


def _wait_until_idle(deadline: float) -> None:
    """Return when all processes together used less than a tenth of a core for half a second."""
    before = _cpu_seconds()
    while time.perf_counter() < deadline:
        time.sleep(0.5)
        used, before = _cpu_seconds() - before, _cpu_seconds()
        if used < 0.05:
            return


def _cpu_seconds() -> float:
    """CPU time of this process and its children, including a tier host."""
    import psutil  # type: ignore[import-untyped]  # noqa: PLC0415 - vLLM has it

    me = psutil.Process()
    times = [each.cpu_times() for each in (me, *me.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def main() -> None:
    """Serve the process at the other end of the pipe."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of vLLM is not an answer
    engine = Engine(json.loads(sys.stdin.readline()))
    print(json.dumps(engine.facts()), file=answers)
    for line in sys.stdin:
        verb, *arguments = json.loads(line)
        if verb != "ask":
            raise ValueError(f"expected an order to ask, got {verb!r}")
        print(json.dumps(engine.ask(*arguments)), file=answers)
    engine.close()


if __name__ == "__main__":
    main()
