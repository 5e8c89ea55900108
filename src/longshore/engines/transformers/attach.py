"""`tiered`: put the tiers under every continuous-batching cache that is made within a `with` block."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from inspect import signature
from typing import Any

import torch
from transformers import PreTrainedModel

from longshore.boundary import DEVICE, FILE, HOST, Key
from longshore.cache import CacheGroup
from longshore.config import Config
from longshore.engines.tensors import RowBlocks
from longshore.engines.transformers import contract
from longshore.engines.transformers.allocator import TieredAllocator
from longshore.engines.transformers.contract import informed_allocators, replaced_allocator, served_model
from longshore.engines.transformers.oracle import block_digests
from longshore.engines.transformers.requests import PromptRecord
from longshore.engines.transformers.scope import ModelScope
from longshore.errors import CacheError, EngineError, HintError, LongshoreError, SelfTestError, TierError
from longshore.hints import RequestHints
from longshore.keys import chain
from longshore.layout import from_rows
from longshore.metrics import FollowingCollector
from longshore.runtime.commands import ControlledEngine, ControlledGroup
from longshore.runtime.control import ControlServer
from longshore.runtime.selftest import self_test
from longshore.runtime.stack import Stack, open_stack
from longshore.tiers.base import Tier
from longshore.tiers.file import FileTier
from longshore.transfer.device import device_for

_log = logging.getLogger(__name__)

_MOST_HINTS = 1 << 16


def why_not_served(model: Any) -> str | None:
    """Why `model` cannot be served with tiers below its device cache; `None` if it can."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return "expected a causal language model of transformers"
    if isinstance(model, PreTrainedModel) and "past_key_values" not in signature(model.forward).parameters:
        return "it has no KV cache: its forward() takes no past_key_values"
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
    names = ("multi_query", "new_decoder_architecture", "num_key_value_heads")
    shared, grouped, heads = (getattr(config, name, None) for name in names)
    if shared and not grouped and heads is None:
        return "its layers share one KV head (multi_query), but its config has no num_key_value_heads that says so"
    if getattr(model, "_tp_size", None) not in (None, 1):
        return f"it is split over {model._tp_size} devices, and this adapter serves one"
    return None


def _rope_of_the_whole_prompt(config: Any) -> str | None:
    """The kind of rotary embedding, if it changes with the length of the prompt."""
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    kinds = [each.get("rope_type", each.get("type")) for each in (settings, *nested)]
    return next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)


def kept_tiers(config: Config, keep: Sequence[str]) -> tuple[str, ...]:
    """The tiers of those to `keep` that there are. Raises `CacheError` if these are not the coldest."""
    tiers = (FILE,) if config.file_mode == "gds" else (HOST, FILE)[: 1 + (config.file_path is not None)]
    if isinstance(keep, str) or not isinstance(keep, Sequence):
        raise CacheError(f"keep: expected the names of tiers, such as {tiers[-1:]}, or () for none, got {keep!r}")
    kept = tuple(tier for tier in tiers if tier in keep)
    if not {HOST, FILE}.issuperset(keep) or kept != tiers[len(tiers) - len(kept) :]:
        allowed = ", ".join(str(tiers[first:]) for first in range(len(tiers), -1, -1))
        raise CacheError(f"only the coldest tiers can be kept: expected {allowed}, got {tuple(keep)}")
    return kept


class Tiers:
    """The tiers under one model's continuous batching, for one device cache after another. Made by `tiered`.

    A device cache that takes the place of another finds what that one left in host memory and in files. If weights,
    code or layout are others by then, the tiers are opened anew; nothing of before is found.

    Attributes:
        lookups: Prompts that were looked up since the start.
        collector: Metrics for Prometheus, to be registered once: they follow the tiers, and counters never go back.
        failure: Why there are no tiers, if they could not be opened or failed their self-test.
    """

    def __init__(self, model: Any, config: Config, open_file_tier: Callable[..., Tier] = FileTier) -> None:
        self.model = model
        self._open_file_tier = open_file_tier
        self.config = config
        self.stack: Stack | None = None
        self.collector = FollowingCollector()
        self.failure: Exception | None = None
        self._scopes = ModelScope(model, config.salt, fixed=config.fixed_weights)
        self._allocator: TieredAllocator | None = None
        self._opened = self._closed = self._asleep = False
        self._caches = self.lookups = 0
        self._records: deque[PromptRecord] = deque(maxlen=4096)
        self._hints: dict[str, RequestHints] = {}
        """Hints of requests that have not begun."""

    def register_cache(self, config: Any) -> int:
        """The number of a cache of this model, from 1; 0 for another's.

        A former one that is not in use gives up the tiers.
        """
        if served_model.get() is not self.model or config is not self.model.config.get_text_config():
            _log.warning("no tiers for this device cache: its model is not the one given to tiered(); give it this one")
            return 0
        if self._allocator is None or not self._allocator.in_use:
            self._unbind()
        self._caches += 1
        return self._caches

    def record(self, prompt: PromptRecord) -> None:
        """Record a prompt that was looked up in a device cache of this model."""
        self.lookups += 1
        self._records.append(prompt)

    def hint(self, request: str, hints: RequestHints | Mapping[str, Any]) -> None:
        """Say what is known of a request that is about to be added: `longshore.hints` has the fields and their meaning.

        `request` is the engine's name of it: that of `add_request`, or `req_0`, `req_1`, ... for the prompts of a
        `generate_batch`, in their order. Hints are used once; requests without any have those of the setting
        `request_hints`. Hints of the last 65,536 requests that have not begun are kept. Raises `HintError` for hints
        that cannot be read, or a name that is no text.
        """
        if not isinstance(request, str):
            raise HintError(f"hints are for the name of a request, got {request!r}")
        self._hints[request] = hints if isinstance(hints, RequestHints) else RequestHints.parse(hints)
        if len(self._hints) > _MOST_HINTS:
            del self._hints[next(iter(self._hints))]

    def hints_for(self, request: str) -> RequestHints:
        """The hints of a request that begins."""
        return self._hints.pop(request, self.config.request_hints)

    @property
    def records(self) -> tuple[PromptRecord, ...]:
        """Where the blocks of prompts came from, oldest first: the last 4,096 over all device caches."""
        return tuple(self._records)

    def block_digests(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """Digests of the blocks that the device has of `tokens`, for the oracle. No request may be active."""
        return block_digests(self._allocator, tokens) if self._allocator is not None else ()

    def controlled_groups(self) -> list[ControlledGroup]:
        """What `longshore ctl` looks into; nothing without tiers."""
        stack = self.stack
        return [] if stack is None else [ControlledGroup(stack.runtime)]

    def keys(self, tokens: Sequence[int]) -> list[list[Key]]:
        """The keys of the whole chunks of a prompt, of the one KV cache group. Raises `EngineError` without tiers."""
        if (stack := self.stack) is None:
            raise EngineError(
                "no tiers are open: the first engine of the model opens them; `failure` says why it could not"
            )
        with stack.runtime.locked() as cache:
            return [chain(stack.scope.digest, tokens, cache.settings.first_tokens)]

    def occupancy(self) -> dict[str, int]:
        """Bytes in use by tier, the device cache (blocks kept for reuse included) first."""
        if self.stack is None or self._allocator is None:
            return {}
        self.stack.runtime.pump()
        with self.stack.runtime.locked() as cache:
            tiers = cache.stats()
        return {DEVICE: self._allocator.used_bytes, **{tier.name: tier.used_bytes for tier in tiers}}

    def reset(self, *, keep: Sequence[str] = ()) -> None:
        """Forget all blocks, on the device, in memory and on disk, because weights or adapters have changed.

        Only needed while an engine runs: the model is looked at whenever one is started. If it has changed, the tiers
        open again under its new scope, and nothing of before is found. If it has not, the coldest tiers, `("file",)` or
        `("host", "file")`, `keep` what is ready there. Raises `EngineError` while requests are active, and `CacheError`
        for what cannot be kept.
        """
        if self.stack is None or self._allocator is None:
            return
        keep = kept_tiers(self.config, keep)
        self._allocator.forget()
        if self.stack.runtime.fault is None:
            with self.stack.runtime.batch() as cache:
                cache.reset(keep=keep)
            if self._allocator.in_use:  # otherwise the model is looked at when the next engine starts
                self._allocator.attach(self.open(self._allocator))
            return
        stack = self.open(self._allocator)
        self._allocator.attach(stack)
        if stack is not None:  # opened anew, maybe over files of before
            with stack.runtime.batch() as cache:
                cache.reset(keep=keep)

    def sleep(self, *, keep: Sequence[str] = (HOST, FILE)) -> None:
        """Let go of the device cache, and forget the blocks of all but the coldest tiers to `keep`.

        What is of use on the device goes into the tiers before, and what only host memory has into files, if these are
        kept alone. Host memory that is not kept is given back. The device's memory is free once its manager is, too.
        Until `wake` engines are served without tiers. Raises `EngineError` while an engine's loop runs, and
        `CacheError` for what cannot be kept; nothing has changed then.
        """
        if self._allocator is not None and self._allocator.in_use:
            raise EngineError("an engine of the model is running: stop its manager first")
        keep, self._asleep = kept_tiers(self.config, keep), True
        self._unbind()
        if self.stack is not None and self.stack.runtime.fault is None:
            self.stack.sleep(keep)

    def wake(self) -> None:
        """Have host memory again, and serve engines that start from now on.

        Where there is not enough, the tiers are closed, which the log and `failure` say; the next engine tries to open
        them again, and does without if it cannot.
        """
        self._asleep = False
        try:
            if self.stack is not None:
                self.stack.wake()
        except TierError as error:
            _log.error(
                "all tiers disabled: host memory could not be allocated after the sleep: %s. Free memory; the next "
                "engine tries to open the tiers again.",
                error,
            )
            self.failure = error
            self._shut()

    def close(self) -> None:
        """Write back what a restart would lose, and close the tiers. Idempotent."""
        self._closed = True
        self._shut()
        if self._allocator is not None:
            self._allocator.attach(None)

    def open(self, allocator: TieredAllocator) -> Stack | None:
        """The tiers for an idle allocator, whose tensor exists; `None`, loudly, if there are none.

        The first time a `LongshoreError` says that they cannot be opened; later they are off then, and it is logged.
        """
        if self._closed or self._asleep:
            return None
        if allocator is not self._allocator:
            if self._allocator is not None and self._allocator.in_use:
                _log.warning(
                    "no tiers for this continuous-batching manager: another manager of the model runs; stop that first"
                )
                return None
            self._unbind()
        try:
            self._open(allocator)
        except SelfTestError as error:
            _log.error("all tiers disabled: the self-test failed: %s. The engine continues without tiers.", error)
            self.failure = error
            self._shut()
        except LongshoreError as error:
            self.failure = error
            self._shut()
            if not self._opened:
                raise
            _log.exception(
                "all tiers disabled: they could not be reopened. The engine continues without tiers. Correct the "
                "error; the next call tries again."
            )
        return self.stack

    def _open(self, allocator: TieredAllocator) -> None:
        """Keep the tiers, bind them to `allocator`'s tensor, or reopen them, as the scope requires."""
        is_bound, self._allocator = allocator is self._allocator, allocator
        if not allocator.use_block_sharing:
            _log.warning(
                "the tiers are not used, because allow_block_sharing is off in the engine's configuration: turn it on"
            )
        rows = allocator._copy_view
        layout = from_rows(
            rows,
            pages_per_block=2 * allocator.pages_per_block,
            block_size=allocator.tokens_per_page,
            blocks_per_chunk=self.config.blocks_per_chunk,
            name="full_attention",
        )
        with torch.autocast(rows.device.type, enabled=False):  # the engine's loop, a thread of its own, has none
            scope = self._scopes.compute_scope(layout)
        if self.stack is not None and self.stack.runtime.fault is not None:
            _log.warning("reopening the tiers after a failure of the control plane; the host tier starts empty")
            self._shut()
        stack = self.stack
        if stack is not None and stack.scope.digest != scope.digest:
            former, now = asdict(stack.scope), asdict(scope)
            others = ", ".join(name for name in former if former[name] != now[name])
            _log.warning("reopening the tiers, because these have changed: %s; blocks stored before are misses", others)
            if is_bound:
                allocator.forget()
            self._shut()
        elif stack is not None and is_bound:
            return
        device = device_for(layout, self.config.calibration)
        is_new = self.stack is None
        if self.stack is None:
            partial = self.config.blocks_per_chunk > 1  # transformers has no use for a part of a block
            self.stack = open_stack(
                self.config,
                layout,
                scope,
                device,
                open_file_tier=self._open_file_tier,
                groups=[CacheGroup(block_size=allocator.tokens_per_page)],
                partial=partial,
            )
        else:
            self.stack = self.stack.bind(layout, device)
        self._opened = True
        self.collector.follow(self.stack)
        self._self_test(self.stack, allocator, rows, files=is_new)

    def _unbind(self) -> None:
        """Detach the device cache from the tiers, which stay open; blocks that only it has are offloaded before."""
        allocator, self._allocator = self._allocator, None
        if allocator is None:
            return
        if self.stack is not None:
            allocator.offload_cached()
            if self.stack.host is None:
                self._shut()  # through the device straight into files: there is nothing to be kept warm
            else:
                self.stack.unbind()
        allocator.attach(None)
        if allocator._copy_view.device.type != "cpu":
            del allocator  # so that the next device cache has its memory
            torch.get_device_module().empty_cache()

    def _shut(self) -> None:
        if self.stack is not None:
            self.stack.close()
            self.stack = None
            self.collector.follow(None)

    def _self_test(self, stack: Stack, allocator: TieredAllocator, rows: Any, *, files: bool) -> None:
        """Run the self-test on the last blocks of the idle tensor, and restore their content."""
        blocks = range(rows.shape[0] - self.config.blocks_per_chunk, rows.shape[0])
        if allocator.num_blocks < self.config.blocks_per_chunk:
            raise SelfTestError(
                f"expected at least the {self.config.blocks_per_chunk} blocks of a chunk in the device cache, got "
                f"{allocator.num_blocks}; lower blocks_per_chunk, or enlarge the device cache"
            )
        self_test(stack, RowBlocks(rows), list(blocks), files=files)


@contextmanager
def tiered(model: Any, config: Config, *, open_file_tier: Callable[..., Tier] = FileTier) -> Iterator[Tiers]:
    """Within this block, continuous batching of `model` keeps evicted blocks in the tiers of `config`.

    A cache that is made later, by another `generate_batch` say, takes the place of the one before it, and finds what
    that one stored; while that one's manager runs, it is served without tiers. The model is looked at whenever a
    manager starts: after a change of weights, adapters or code nothing of before is found. After a change under a
    running manager call `Tiers.reset`.
    `open_file_tier` makes the file tier, with the arguments of `FileTier`.

    Raises:
        ConfigError: The machine cannot give what `config` asks for.
        ContractError: This version of transformers is not as the adapter knows it.
        EngineError: The model cannot be served (`why_not_served` says why), or another `tiered` block is open.
    """
    contract.check()
    config.check_machine()
    if (reason := why_not_served(model)) is not None:
        raise EngineError(f"{type(model).__name__} cannot be served with tiers: {reason}")
    if getattr(model, "_cached_continuous_batching_manager", None) is not None:
        raise EngineError(
            "the model keeps a manager of an earlier session: call its "
            "destroy_cached_continuous_batching_manager() first"
        )
    tiers = Tiers(model, config, open_file_tier)
    ours = TieredAllocator.over(tiers)
    with replaced_allocator(ours), informed_allocators(ours), ExitStack() as undo:
        undo.callback(tiers.close)
        if config.control:
            engine = ControlledEngine(tiers.controlled_groups, tiers.keys, tiers.collector.collect)
            undo.callback(ControlServer(config.control, engine).close)
        yield tiers
