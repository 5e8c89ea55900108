"""The device's blocks, shared by all KV cache groups: which are free, and which hold a known prefix.

    rows   block 0  ├ layer 0: K V │ layer 1: K V │ layer 3: K V │ layer 4: K V ┤   4 tokens, as "sliding" cuts it
           block 1  ├ layer 2: K        V         │ layer 5: K        V         ┤   8 tokens, as "full" does
           ...

    free ──take──► used ──give──► free                   a block that nobody will ask for again
                    ▲ └───give──► idle ──evict──► free   one that the index knows: the prefix cache
                    └────share─────┘

Only what no copy touches any more gets into the free list: the guard sees to that.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from examples.reference_engine.model import Group, Pages, Shape
from longshore.errors import CapacityError
from longshore.layout import KVGroup, KVLayout, PageRef


class Guard(Protocol):
    """Keeps blocks from the free list while a copy touches them; `longshore.runtime.block_guard.BlockGuard` is one."""

    def settle(self, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that no copy touches, waited for within reason; the others are parked."""

    def reclaim(self) -> list[int]:
        """Parked blocks that no copy touches any more."""


class Known(NamedTuple):
    """A block of the prefix cache, complete or on its way here. `tokens` are its own, behind those of `parent`."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    block: int


class DevicePool:
    """`size` blocks on `device`.

    Attributes:
        layout: The same, as Longshore sees it.
        pages: K and V of each layer, views of the rows.
        index: The prefix cache, by key.
        behind: The same by what is before: keys and tokens of what the prefix cache has behind a key.
        guard: Set by whoever lets copies at the blocks.
    """

    def __init__(self, shape: Shape, size: int, device: torch.device) -> None:
        self.shape = shape
        self.size = size
        self.guard: Guard | None = None
        self._device = device
        self._token_bytes = shape.kv_heads * shape.head_dim * torch.float32.itemsize
        self._row_bytes = max(2 * len(group.layers) * self._page_bytes(group) for group in shape.groups)
        self.layout = KVLayout([self._describe(group) for group in shape.groups], [self.wake_up()], size)

    def wake_up(self) -> torch.Tensor:
        """Allocate the rows, all of them free; returns them."""
        self._rows = torch.zeros(self.size, self._row_bytes, dtype=torch.uint8, device=self._device)
        self.pages = [self._cut(layer) for layer in range(self.shape.layers)]
        self.index: dict[bytes, Known] = {}
        self.behind: defaultdict[bytes, list[tuple[bytes, tuple[int, ...]]]] = defaultdict(list)
        self._key_of: dict[int, bytes] = {}
        self._users: Counter[int] = Counter()
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._free = list(range(self.size))
        return self._rows

    def sleep(self) -> None:
        """Let go of the rows and all that is known of them. No copy may touch them, and nobody use them."""
        self._rows, self.pages, self._free = torch.empty(0), [], []
        self._idle.clear()
        self._users.clear()
        self.index.clear()
        self.behind.clear()
        self._key_of.clear()

    # ------------------------------------------------------------------ blocks

    @property
    def obtainable(self) -> int:
        """Blocks that `take` could provide, if no copy is late."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """`count` blocks, each with one user; evicts what has been idle longest. `CapacityError` if there are fewer."""
        self._free += self.guard.reclaim() if self.guard else []
        if count > self.obtainable:
            raise CapacityError(f"{count} blocks are needed, {self.obtainable} of {self.size} can be had")
        while len(self._free) < count:
            if not self._idle:
                raise CapacityError(f"{count} blocks are needed, but copies still touch some of them")
            block = self._idle.popitem(last=False)[0]
            self.forget(block)
            self._release([block])
        taken, self._free = self._free[:count], self._free[count:]
        self._users.update(taken)
        return taken

    def share(self, known: Known) -> int:
        """One more user of a known block."""
        self._idle.pop(known.block, None)
        self._users[known.block] += 1
        return known.block

    def give(self, blocks: Sequence[int]) -> None:
        """One user less of each of `blocks`, in the order in which they would be evicted."""
        self._users.subtract(blocks)
        unused = [block for block in blocks if not self._users[block]]
        self._idle.update((block, None) for block in unused if block in self._key_of)
        self._release([block for block in unused if block not in self._key_of])

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._users[block]
        self._free += self.guard.settle(blocks) if self.guard else blocks

    # ------------------------------------------------------------------ the prefix cache

    def publish(self, known: Known) -> None:
        """From now on `known` can be found by its key, in place of what was there."""
        former = self.index.get(known.key)
        if former is not None:
            self.forget(former.block)
        self.index[known.key] = known
        self.behind[known.parent].append((known.key, known.tokens))
        self._key_of[known.block] = known.key

    def forget(self, block: int) -> None:
        """`block` can no longer be found; if it is idle, it is free."""
        key = self._key_of.pop(block, None)
        if key is not None:
            known = self.index.pop(key)
            self.behind[known.parent].remove((key, known.tokens))
        if block in self._idle:
            del self._idle[block]
            self._release([block])

    # ------------------------------------------------------------------ memory

    def _page_bytes(self, group: Group) -> int:
        return group.block_size * self._token_bytes

    def _describe(self, group: Group) -> KVGroup:
        """For Longshore: where the K and V of each layer lie in a row, and that a page is one token after another."""
        page = self._page_bytes(group)
        refs = [
            PageRef(
                0, index * page, self._row_bytes, page, self._token_bytes, group.layers[index // 2], "KV"[index % 2]
            )
            for index in range(2 * len(group.layers))
        ]
        return KVGroup(group.name, group.block_size, 1, tuple(refs))

    def _cut(self, layer: int) -> Pages:
        group = self.shape.groups[self.shape.group_of(layer)]
        page, start = self._page_bytes(group), 2 * group.layers.index(layer) * self._page_bytes(group)
        shape = (self.size, group.block_size, self.shape.kv_heads, self.shape.head_dim)
        keys, values = (self._rows[:, at : at + page].view(torch.float32).view(shape) for at in (start, start + page))
        return Pages(keys, values)
