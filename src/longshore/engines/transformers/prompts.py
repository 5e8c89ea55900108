"""What was looked up, and what became of it: transformers does not say for which request it looks up a prompt.

match_prefix_blocks ──► looked_up(prompt, tokens that were there, now)
mark_complete_blocks ─► began(tokens of the request): the prompt that they begin with, told once
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_KEPT = 1024


class LookedUp(NamedTuple):
    """A prompt of so many tokens, the first `context` of which were on the device at time `at`."""

    tokens: int
    context: int
    at: float


class Prompts:
    """The last prompts that were looked up, and of which no block was completed since."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[list[int], LookedUp]] = deque(maxlen=_KEPT)

    def looked_up(self, prompt: list[int], context: int, now: float) -> None:
        """`prompt` is about to be computed, but for its first `context` tokens."""
        self._waiting.append((prompt, LookedUp(len(prompt), context, now)))

    def began(self, tokens: Sequence[int]) -> LookedUp | None:
        """The prompt of a request that has `tokens` now."""
        for at, (prompt, told) in enumerate(self._waiting):
            if tokens[: len(prompt)] == prompt:
                del self._waiting[at]
                return told
        return None
