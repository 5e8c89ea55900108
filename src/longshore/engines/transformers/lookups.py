"""Prompts that were looked up. transformers repeats a lookup while its request waits; the request is counted once.

match_prefix_blocks ──► the latest `Lookup` of a request, again and again
the request begins ───► a `PromptRecord`, and the counters
"""

from __future__ import annotations

from dataclasses import dataclass

from longshore.cache import GroupKeys
from longshore.hints import RequestHints


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """Where a prompt's leading blocks came from: `sources[i]` names the tier of block `i` (`"device"` included).

    `request` is what `longshore explain` knows it by: the engine's name of it, `req_0`. The names of transformers begin
    anew with each device cache, so those of the second one are `req_0@2`, `req_1@2`, ...
    """

    prompt_tokens: int
    block_size: int
    sources: tuple[str, ...]
    request: str


@dataclass(slots=True)
class Lookup:
    """The latest lookup for a request: transformers repeats it while the request waits, and it is counted once.

    `hints` are what the request says of its blocks. `context` of the prompt's `tokens` were on the device at time `at`.
    `path` is what the tiers were asked for, `turn` that of the request in the cache, once it was looked up.
    """

    request: str
    hints: RequestHints
    tokens: int = 0
    context: int = 0
    at: float = 0.0
    sources: tuple[str, ...] = ()
    path: GroupKeys | None = None
    turn: int | None = None
    is_counted: bool = False
    is_over: bool = False
