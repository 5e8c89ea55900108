"""`tiered`: put the tiers under every continuous-batching cache that is made within a `with` block."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from longshore.boundary import DEVICE
from longshore.config import Config
from longshore.engines.transformers import contract
from longshore.engines.transformers.allocator import PromptRecord, TieredAllocator
from longshore.engines.transformers.registry import replaced_allocator
from longshore.engines.transformers.rows import RowBlocks
from longshore.engines.transformers.scope import model_scope
from longshore.errors import EngineError, LongshoreError, SelfTestError
from longshore.layout import from_rows
from longshore.runtime.selftest import self_test
from longshore.runtime.stack import Stack, open_stack
from longshore.tiers.base import Tier
from longshore.tiers.file import FileTier
from longshore.transfer.device import device_for

_log = logging.getLogger(__name__)


def refuse(model: Any) -> str | None:
    """Why `model` cannot be served with tiers below its device cache; `None` if it can."""
    config = model.config.get_text_config()
    try:
        groups = contract.load()["group_layers_by_attn_type"](config)
    except ValueError as error:
        return f"transformers cannot page it: {error}"
    others = sorted(set(groups) - {"full_attention"})
    if others:
        return f"it has {', '.join(others)} layers, and transformers shares prefixes only between full-attention ones"
    if (kind := _rope_of_the_whole_prompt(config)) is not None:
        return f"its rotary embedding is {kind!r}: the keys of a block depend on the length of the prompt around it"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "it keeps latents, not keys and values (MLA), which transformers does not page in one row per block"
    if getattr(model, "_tp_size", None) not in (None, 1):
        return f"it is split over {model._tp_size} devices, and this adapter serves one"
    return None


def _rope_of_the_whole_prompt(config: Any) -> str | None:
    """The kind of rotary embedding, if it changes with the length of the prompt."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    kinds = [each.get("rope_type", each.get("type")) for each in (settings, *nested)]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


class Tiers:
    """The tiers under one model's continuous batching. Made by `tiered`."""

    def __init__(self, model: Any, config: Config, open_file: Callable[..., Tier] = FileTier) -> None:
        self.model = model
        self._open_file = open_file
        self.config = config
        self.stack: Stack | None = None
        self._allocator: TieredAllocator | None = None
        self.failure: Exception | None = None
        """Why there are no tiers, if they could not be opened or failed their self-test."""

    def admit(self, config: Any) -> bool:
        """Whether a cache is this model's. If so it takes the place of the one before, whose tiers are closed."""
        if config is not self.model.config.get_text_config():
            _log.warning("another model than the one given to tiered() is served: without tiers")
            return False
        self.close()
        self._allocator = None
        return True

    @property
    def lookups(self) -> int:
        """Prompts looked up since the device cache was made."""
        return self._allocator.lookups if self._allocator is not None else 0

    @property
    def records(self) -> tuple[PromptRecord, ...]:
        """Where the prompts' blocks came from, oldest first, at most the last 4,096."""
        return tuple(self._allocator.records) if self._allocator is not None else ()

    def occupancy(self) -> dict[str, int]:
        """Bytes in use by tier, the device cache (blocks kept for reuse included) first."""
        if self.stack is None or self._allocator is None:
            return {}
        with self.stack.runtime.control() as cache:
            tiers = cache.stats()
        return {DEVICE: self._allocator.used_bytes, **{tier.name: tier.used_bytes for tier in tiers}}

    def reset(self) -> None:
        """Forget all blocks, on the device, in memory and on disk, because weights or adapters have changed.

        The tiers open again under the scope of the model as it is now. Raises `EngineError` while requests are active.
        """
        if self.stack is None or self._allocator is None:
            return
        self._allocator.forget()
        with self.stack.runtime.control() as cache:
            cache.reset()
        self._allocator.attach(self.open(self._allocator))

    def close(self) -> None:
        """Write back what a restart would lose, and close the tiers. Idempotent."""
        if self.stack is not None:
            self.stack.close()
            self.stack = None
        if self._allocator is not None:
            self._allocator.attach(None)

    def open(self, allocator: TieredAllocator) -> Stack | None:
        """Build the tiers for an allocator's tensor, and test them. Returns `None`, loudly, when that fails."""
        self.close()
        self._allocator = allocator
        if not allocator.use_block_sharing:
            _log.warning("block sharing is off in the engine's configuration: the tiers will never be asked")
        rows = allocator._copy_view
        layout = from_rows(
            rows,
            pages_per_block=2 * allocator.pages_per_block,
            block_size=allocator.tokens_per_page,
            blocks_per_chunk=self.config.blocks_per_chunk,
            name="full_attention",
        )
        scope = model_scope(self.model, layout, salt=self.config.salt)
        try:
            device = device_for(layout, self.config.calibration)
            self.stack = open_stack(self.config, layout, scope, device, open_file=self._open_file)
        except LongshoreError as error:
            self.failure = error
            raise
        try:
            self._self_test(self.stack, allocator, rows)
        except SelfTestError as error:
            _log.error("TIERS ARE OFF: %s. The engine goes on without them.", error)
            self.failure = error
            self.close()
        return self.stack

    def _self_test(self, stack: Stack, allocator: TieredAllocator, rows: Any) -> None:
        """Uses the last blocks of the tensor: nothing is allocated yet, and the pool keeps its order."""
        blocks = range(rows.shape[0] - self.config.blocks_per_chunk, rows.shape[0])
        if allocator.num_blocks < self.config.blocks_per_chunk:
            raise SelfTestError(
                f"the device cache has {allocator.num_blocks} blocks, and a chunk {self.config.blocks_per_chunk}"
            )
        self_test(stack, RowBlocks(rows), list(blocks))


@contextmanager
def tiered(model: Any, config: Config, *, open_file: Callable[..., Tier] = FileTier) -> Iterator[Tiers]:
    """Within this block, continuous batching of `model` keeps evicted blocks in the tiers of `config`.

    A cache that is made later replaces the one before it: what is in the file tier stays, what is in the host tier
    is written back first. After a change of weights or adapters call `Tiers.reset`.
    `open_file` makes the file tier, with the arguments of `FileTier`.

    Raises:
        ConfigError: The machine cannot give what `config` asks for.
        ContractError: This version of transformers is not as the adapter knows it.
        EngineError: The model cannot be served (`refuse` says why), or another `tiered` block is open.
    """
    contract.check()
    config.check_machine()
    if (reason := refuse(model)) is not None:
        raise EngineError(f"{type(model).__name__} cannot be served with tiers: {reason}")
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise EngineError(
            "the model keeps a manager of an earlier session: destroy_cached_continuous_batching_manager()"
        )
    tiers = Tiers(model, config, open_file)
    with replaced_allocator(TieredAllocator.over(tiers)):
        try:
            yield tiers
        finally:
            tiers.close()
