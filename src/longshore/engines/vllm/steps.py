"""How long vLLM takes to compute prompts, as its scheduler's side of a connector sees it.

    planned(step) ──► ... the workers compute ... ──► ended()

Plans and ends come in the same order, but with asynchronous scheduling a step is planned before the one before it has
ended. A step that ends without a word to connectors is taken to last until the next word: it looks slower than it was,
so in doubt blocks are loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_AHEAD = 2
"""Steps that are planned and have not ended, at most."""


class _Step(NamedTuple):
    tokens: int
    most: int
    pairs: float
    planned_at: float


class Steps:
    """Tells `saw(context, tokens, seconds)` of each step that computed at least `least` tokens of some prompt.

    `context` is that of one request that would have taken as much attention as all requests of the step together.
    """

    def __init__(self, saw: Callable[[int, int, float], None], least: int) -> None:
        self._saw = saw
        self._least = least
        self._open: deque[_Step] = deque(maxlen=_AHEAD)
        self._last_end = 0.0

    def planned(self, scheduled: Iterable[tuple[int, int]], now: float) -> None:
        """A step is on its way, of requests with so many tokens to compute behind so many others, each."""
        tokens, most, pairs = 0, 0, 0.0
        for new, behind in scheduled:
            tokens, most = tokens + new, max(most, new)
            pairs += new * (behind + new / 2)
        self._open.append(_Step(tokens, most, pairs, now))

    def ended(self, now: float) -> None:
        """The oldest step that has not ended has."""
        if not self._open:
            return
        step = self._open.popleft()
        begun, self._last_end = max(step.planned_at, self._last_end), now
        if step.most >= self._least:
            self._saw(max(0, round(step.pairs / step.tokens - step.tokens / 2)), step.tokens, now - begun)


def tokens_of(output: Any) -> list[tuple[int, int]]:
    """Of vLLM's `SchedulerOutput`: for each request the tokens to compute, and those before them."""
    cached = output.scheduled_cached_reqs
    behind = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    behind.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return [(tokens, behind[request]) for request, tokens in output.num_scheduled_tokens.items()]
