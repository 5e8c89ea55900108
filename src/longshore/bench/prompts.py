"""Prompts of 8 to 8,192 blocks that share prefixes: what the cache managers that are compared are filled with."""

from __future__ import annotations

import random

from longshore.boundary import Key

LONGEST = 8192


class Load:
    """Prompts that share prefixes, `blocks` different keys in all: what both sides are filled with and asked for."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        self._dice = random.Random(seed)  # noqa: S311 - keys to measure with, not to keep
        self.blocks = blocks
        self.prompts: list[list[Key]] = []
        """Every prompt that is resident after the fill; each begins with a part of an earlier one, or afresh."""
        self.shared: list[int] = []
        """How many of its leading blocks a prompt shares with an earlier one."""
        left = blocks
        while left:
            prompt, shared = self._prompt()
            del prompt[shared + left :]
            self.prompts.append(prompt)
            self.shared.append(shared)
            left -= len(prompt) - shared
        self.longest = max(self.prompts, key=len)

    def _prompt(self) -> tuple[list[Key], int]:
        """A new prompt of 8 to 8,192 blocks (but at most a quarter of all), all sizes alike; how much it shares."""
        longest = max(8, min(LONGEST, self.blocks // 4))
        if not self.prompts:
            return self.fresh(longest), 0
        length, shared = int(8 * (longest / 8) ** self._dice.random()), 0
        elder = self._dice.choice(self.prompts)
        if self._dice.random() < 0.5:
            shared = self._dice.randrange(min(len(elder), length))
        return [*elder[:shared], *self.fresh(length - shared)], shared

    def fresh(self, count: int) -> list[Key]:
        """Keys that nobody has seen."""
        return [self._dice.randbytes(32) for _ in range(count)]

    def sample(self, blocks: int) -> list[list[Key]]:
        """Resident prompts of about so many blocks in all."""
        picked: list[list[Key]] = []
        while sum(map(len, picked)) < blocks:
            picked.append(self._dice.choice(self.prompts))
        return picked


def lengths(total: int) -> list[int]:
    """Prompt lengths from 8 on, doubling, over and over until there are `total` blocks."""
    lengths: list[int] = []
    length = 8
    while total:
        lengths.append(min(length, total))
        total -= lengths[-1]
        length = 8 if length >= LONGEST else 2 * length
    return lengths
