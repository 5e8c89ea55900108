"""`Weighing`: load or recompute, for the loop around one cache.

    job ends ──► what it took ──┐
    step ends ─► what it took ──┴─► cache.gate ──► how many leading chunks of a hold are worth loading

Chunks in host memory are always loaded. For chunks that must be read first, the gate decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import DEVICE, HOST, Route, TransferResult
from longshore.cache import Gate, Run


class Weighing:
    """A gate with its measurements, and the count of refused chunks.

    Attributes:
        refused: Chunks found, but recomputed because that is faster.
    """

    def __init__(self, gate: Gate, prefill_speed: float = 0.0) -> None:
        """`prefill_speed`: prompt tokens that the engine computes per second; 0: measured."""
        self.refused = 0
        self._gate = gate
        self._is_told = prefill_speed > 0
        if self._is_told:
            for tokens in (1, 2):  # a line through the origin
                gate.observe_prefill(0, tokens, tokens / prefill_speed)

    def saw_load(self, route: Route, result: TransferResult, now: float) -> None:
        """Record the end of a job; only loads are evaluated."""
        if result.bytes and route.source in self._gate.tiers and route.destination in (HOST, DEVICE):
            self._gate.observe_load(route.source, result.bytes, result.seconds, result.queued_seconds, now)

    def saw_prefill(self, context: int, tokens: int, seconds: float) -> None:
        """Record a step that computed `tokens` of a prompt, after `context` other tokens."""
        if not self._is_told:
            self._gate.observe_prefill(context, tokens, seconds)

    def worth_loading(
        self, context: int, runs: Sequence[Run], now: float, *, least: int = 0, ahead: bool = False
    ) -> int:
        """Number of leading chunks of `runs` to load for a request with `context` tokens before them.

        `least`: how many are loaded in any case. `ahead`: for a prefetch, whose request is asked for again: refused
        chunks are not counted, and no load is tried.
        """
        total = sum(run.chunks for run in runs)
        at_hand = max(least, runs[0].chunks if runs and runs[0].tier == HOST else 0)
        if at_hand >= total:
            return total
        count = max(at_hand, self._gate.chunks_to_load(context, runs, now, tries=not ahead))
        self.refused += 0 if ahead else total - count
        return count
