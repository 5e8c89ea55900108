"""An engine with many requests at once, some of which go away, and a reset while they run: see `serving.py`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import serving
from tiny_models import VOCABULARY
from watched_spec import WITNESS


class Crowd(serving.Engine):
    """`serving.Engine` with a crowd."""

    def crowd(self, requests: int, families: int, seed: int, damages: bool = False) -> dict[str, Any]:
        """Ask `requests` prompts of a few `families` at once; every eighth is aborted, and a reset comes in between.

        With `damages`, the host tier's policy loses all its chunks then, instead.
        """
        from vllm import SamplingParams

        chooser, engine = random.Random(seed), self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=70, detokenize=False, ignore_eos=True)
        beginnings = [[chooser.randrange(3, VOCABULARY) for _ in range(200)] for _ in range(families)]
        preempted, preempt = 0, self.scheduler._preempt_request

        def count(*arguments: Any, **named: Any) -> Any:
            nonlocal preempted
            preempted += 1
            return preempt(*arguments, **named)

        self.scheduler._preempt_request = count
        names = [f"{seed}-{each}" for each in range(requests)]
        for each, name in enumerate(names):
            rest = [chooser.randrange(3, VOCABULARY) for _ in range(chooser.randrange(20, 120))]
            engine.add_request(name, {"prompt_token_ids": beginnings[each % families] + rest}, sampling)
        ended, steps, before_reset = 0, 0, 0
        aborted, is_reset = set[str](), False
        while engine.has_unfinished_requests():
            ended += sum(output.finished for output in engine.step())
            steps += 1
            if steps % 12 == 0 and len(aborted) < requests // 8:
                name = names[8 * len(aborted) + 7]
                engine.abort_request([name])
                aborted.add(name)
            loading = any(each.status.name == "WAITING_FOR_REMOTE_KVS" for each in self.scheduler.requests.values())
            if not is_reset and ended >= requests // 2 and not loading:  # vLLM refuses resets while a request loads
                before_reset, is_reset = preempted, True
                if damages:
                    with self.manager._runtime.locked() as cache:
                        policy = cache._state.policies[0]
                        policy.remove_all(np.flatnonzero(policy.resident(cache._state.index.size)).tolist())
                elif not engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
                    raise RuntimeError("the prefix cache was not reset")
        return {"ended": ended, "aborted": len(aborted), "preempted": before_reset, "was_reset": is_reset}

    def fill(self, tokens: list[int], piece: int) -> None:
        """Have all of a prompt stored, so many tokens more at a time."""
        for end in [*range(piece, len(tokens), piece), len(tokens)]:
            self.ask(tokens[:end])
            self.settle()

    def cut_off(self, tokens: list[int], steps: int) -> dict[str, Any]:
        """Ask a prompt, and forget all that the tiers have after so many steps."""
        engine = self.llm.llm_engine
        engine.add_request("cut off", {"prompt_token_ids": tokens}, self.sampling)
        for _ in range(steps):
            engine.step()
        self.scheduler.reset_connector_cache()
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    return self._said(output)
        raise RuntimeError("the request has not ended")

    def witness(self) -> dict[str, int]:
        """What the witness has seen, when all is over."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        open_ones = len(self.manager._requests) + len(self.manager._store_jobs) + len(self.manager._unreported)
        with self.manager._runtime.locked() as cache:
            open_ones += cache.jobs_in_flight
        return {"loads": WITNESS.loads, "chunks": WITNESS.chunks, "wrong": WITNESS.wrong, "open": open_ones}

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler


if __name__ == "__main__":
    serving.main(Crowd)
