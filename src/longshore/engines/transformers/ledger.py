"""The ledger of device blocks that tells the tiers what leaves it."""

from __future__ import annotations

from collections.abc import Callable

from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger


class TieredLedger(BlockLedger):
    """transformers' ledger, whose blocks pass `leaving` on their way back to the pool."""

    def __init__(
        self,
        leaving: Callable[[list[int]], list[int]],
        evicting: Callable[[list[int]], None],
        forgotten: Callable[[], None],
    ) -> None:
        super().__init__()
        self._leaving = leaving
        self._evicting = evicting
        self._forgotten = forgotten

    def reset(self) -> None:
        """Forget everything; the pool is about to take all blocks back."""
        super().reset()
        self._forgotten()

    def release(self, block_id: int, no_cache: bool = False) -> bool:
        """Drop a reference; whether the block may go to the pool now."""
        return bool(super().release(block_id, no_cache)) and bool(self._leaving([block_id]))

    def evict_cached_blocks(self) -> list[int]:
        """Evict all cached blocks; those that may go to the pool now."""
        self._evicting(list(self.cached_blocks))
        return self._leaving(super().evict_cached_blocks())

    def drop_cached_blocks(self) -> list[int]:
        """Evict all cached blocks as worthless; those that may go to the pool now."""
        return self._leaving(super().evict_cached_blocks())

    def evict_oldest(self, count: int, keep: set[int]) -> list[int]:
        """Evict up to `count` cached blocks that are not in `keep`, least recently released first."""
        victims = [block for block in self.cached_blocks if block not in keep][:count]
        self._evicting(victims)
        for block in victims:
            del self.cached_blocks[block]
            del self.hash_to_block[self.block_to_hash.pop(block)]
        return self._leaving(victims)
