"""`PrefixStore`: for users of plain `generate()`, keep and restore the KV cache of a prefix.

The prefix's blocks pass through a few staging blocks on the device, in two halves. While one half is copied from or to
a tier, the other one is filled from the cache, or emptied into it. A prefix may have more blocks than these:

    DynamicCache ── staging blocks ── host tier ── file tier, remote stores
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from transformers import DynamicCache

from longshore.boundary import FILE, HOST, REMOTE
from longshore.cache import GroupKeys, Lease, LookupResult, Retention
from longshore.config import Config
from longshore.engines.tensors import RowBlocks
from longshore.engines.transformers.attach import kept_tiers, why_not_served
from longshore.engines.transformers.scope import ModelScope
from longshore.errors import CacheError, CopyTimeoutError, EngineError, TierClosedError
from longshore.hints import RequestHints
from longshore.keys import chain
from longshore.layout import from_rows
from longshore.metrics import FollowingCollector
from longshore.runtime.commands import ControlledEngine, ControlledGroup
from longshore.runtime.control import ControlServer
from longshore.runtime.remote_fetch import fetch_and_wait
from longshore.runtime.selftest import self_test
from longshore.runtime.stack import JobCallback, open_stack
from longshore.tiers.base import Tier
from longshore.tiers.file import FileTier
from longshore.transfer.device import device_for
from longshore.transfer.device.base import Device

_log = logging.getLogger(__name__)

Hints = RequestHints | Mapping[str, Any] | None
"""Hints of one call, or their fields: `longshore.hints` has these and their meaning."""


_LAYERS_AT_ONCE = 8
"""Layers that one copy on the device moves from the staging blocks: fewer launches, and memory for few more layers."""


class _PartLoad(NamedTuple):
    """A load into staging `blocks` that has begun; `wait` returns the tiers that its chunks came from."""

    blocks: range
    wait: Callable[[], list[str]]
    lease: Lease | None


class PrefixStore:
    """Chunk images of prefixes, in the tiers of a `Config`. A context manager. Threads may share it, and take turns.

    Each call hashes all weights and the model's code; weights are hashed on their own device. What was stored before a
    change is not restored after it. Hashing takes about 150 ms for each GiB of weights on 2 cores of a shared machine,
    and 20 to 50 ms for the code. With `fixed_weights` the model is hashed once, when the store is opened.

    Args:
        model: A causal language model with full attention in all layers, batch size one. It takes text alone: prefixes
            are found by their tokens, and placeholders of two pictures are the same tokens.
        config: Where the bytes go; `config.blocks_per_chunk` blocks make a chunk image.
        block_size: Tokens per block; whole chunks of a prefix are kept.
        staging_blocks: Number of device blocks that copies pass through; rounded down to two halves of whole chunks, of
            at least one chunk each. 128 blocks of 32 tokens take 512 MiB of a model with 128 KiB of KV per token.
        open_file_tier: Makes the file tier, with the arguments of `FileTier`.

    Attributes:
        collector: Metrics for Prometheus, to be registered once, or given to `longshore.metrics.serve_metrics`.

    Raises:
        EngineError: The model cannot be served, or a number is below 1.
        ConfigError, TierError: The tiers cannot be opened.
        SelfTestError: A block did not come back as it went in.
    """

    def __init__(
        self,
        model: Any,
        config: Config,
        *,
        block_size: int = 32,
        staging_blocks: int = 128,
        open_file_tier: Callable[..., Tier] = FileTier,
    ) -> None:
        if (reason := why_not_served(model) or _why_tokens_are_not_enough(model)) is not None:
            raise EngineError(f"{type(model).__name__} cannot be served with tiers: {reason}")
        for name, given in (("block_size", block_size), ("staging_blocks", staging_blocks)):
            if not isinstance(given, int) or given < 1:
                raise EngineError(f"{name}: expected a whole number of at least 1, got {given!r}")
        self._model = model
        self._config = config
        self._blocks_per_chunk = config.blocks_per_chunk
        self._chunk_tokens = config.blocks_per_chunk * block_size
        self._half_chunks = max(staging_blocks // self._blocks_per_chunk // 2, 1)
        """Chunks of one half of the staging blocks."""
        self._staging_blocks = 2 * self._half_chunks * self._blocks_per_chunk
        self._block_size = block_size
        self._open_file_tier = open_file_tier
        self._scopes = ModelScope(model, config.salt, fixed=config.fixed_weights)
        self._lock = threading.RLock()
        """Guards the staging blocks: one call uses them at a time."""
        self._is_asleep = False
        self._restores = 0
        self.collector = FollowingCollector()
        self._interrupted = False
        """Whether an exception interrupted a call; copies to the staging blocks may still run."""
        self._open()
        self._ctl_server: ControlServer | None = None
        if config.control:
            engine = ControlledEngine(
                lambda: [ControlledGroup(self._stack.runtime)],
                lambda tokens: [self._keys(tokens)],
                self.collector.collect,
            )
            try:
                self._ctl_server = ControlServer(config.control, engine)
            except BaseException:
                self._stack.close()
                raise

    def _open(self) -> None:
        """Allocate the staging blocks, and open the tiers under the scope of the model as it is."""
        device, config = self._allocate_staging(), self._config
        if not config.remote:  # the gate is asked about stores alone
            config = config.model_copy(update={"gate": False})
        scope = self._scopes.compute_scope(self._layout)
        self._stack = open_stack(config, self._layout, scope, device, open_file_tier=self._open_file_tier)
        self.collector.follow(self._stack)
        self._test()

    def _allocate_staging(self) -> Device:
        """Allocate the staging blocks. Returns their device."""
        model, block_size = self._model, self._block_size
        text = model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._shape = (text.num_hidden_layers, 2, block_size, heads, head_dim)
        with torch.inference_mode(mode=False):  # whose tensors could not be written outside of it
            self._pages = torch.zeros((self._staging_blocks, *self._shape), dtype=model.dtype, device=model.device)
        rows = self._pages.view(self._staging_blocks, -1).view(torch.uint8)
        self._layout = from_rows(
            rows,
            pages_per_block=2 * text.num_hidden_layers,
            block_size=block_size,
            blocks_per_chunk=self._blocks_per_chunk,
            name="dynamic_cache",
        )
        self._jobs: tuple[list[int], list[int]] = [], []
        """Jobs that may use each half of the staging blocks."""
        return device_for(self._layout, self._config.calibration)

    def _test(self, *, files: bool = True) -> None:
        """Run the self-test; close the tiers if it fails."""
        rows = self._pages.view(self._staging_blocks, -1).view(torch.uint8)
        try:
            self_test(self._stack, RowBlocks(rows), range(self._blocks_per_chunk), files=files)
        except BaseException:
            self._stack.close()
            raise

    @contextmanager
    def _exclusive(self) -> Iterator[bool]:
        """Hold the lock. Reopens the tiers if the model changed. Yields `False` while the store sleeps."""
        with self._lock:
            try:
                if not self._is_asleep:
                    self._reopen_if_model_changed()
                yield not self._is_asleep
            except Exception:
                fault = self._stack.runtime.fault
                if fault is not None and not isinstance(fault, Exception):  # of which this is a consequence
                    self._interrupted = True
                    raise fault from None
                raise
            except BaseException:
                self._interrupted = True
                raise

    def _reopen_if_model_changed(self) -> None:
        """Reopen the tiers if the model has changed since they were opened: their blocks are not valid for it.

        Also reopens them after an interrupted call.
        """
        changed = self._scopes.compute_scope(self._layout).digest != self._stack.scope.digest
        if changed:
            _log.warning(
                "the model's weights, code or settings have changed: prefixes stored before are not restored; store "
                "them again, or set fixed_weights if the model does not change"
            )
        if changed or self._interrupted:
            self._stack.close()
            self._open()
            self._interrupted = False

    def store_prefix(self, tokens: Sequence[int], cache: DynamicCache, hints: Hints = None) -> int:
        """Keep the KV of the whole chunks of `tokens`, which `cache` holds; returns how many tokens are kept.

        They are counted when their copies are ordered: tokens whose copy fails later count, too, and are not restored.

        Uses `hints.retention` and `hints.store`; without `hints`, those of `Config.request_hints`.
        Raises `CacheError` if `cache` has another batch size, or fewer tokens than `tokens`; `HintError` for hints that
        cannot be read; `CopyTimeoutError` if copies do not end within `write_timeout`.
        """
        wanted = self._hints(hints)
        with self._exclusive() as awake:
            if not awake or not wanted.store:
                return 0
            return self._store(tokens, self._keys(tokens), cache, wanted.chunks(self._chunk_tokens))

    def _store(
        self, tokens: Sequence[int], keys: Sequence[bytes], cache: DynamicCache, retention: Sequence[Retention]
    ) -> int:
        if not len(tokens):
            return 0
        self._check_states(cache, len(tokens))
        kept = half = 0
        while kept < len(keys):
            first, part = kept, keys[: kept + self._half_chunks]
            self._wait_for_half(half)
            blocks = self._blocks_of(half, len(part) - first)
            self._fill(cache, first * self._chunk_tokens, blocks)
            self._wait_for_half(1 - half)  # chunks that are being stored are not evicted to make room for others
            self._stack.transfer_engine.begin_step(None)
            self._stack.record_tokens(part, first, tokens[first * self._chunk_tokens : len(part) * self._chunk_tokens])
            timeout = self._config.write_timeout
            kept = self._stack.store_path(
                GroupKeys(part, first, retention=retention),
                blocks,
                self._job_of(half),
                before_eviction=True,
                timeout=timeout,
            )
            if kept < len(part):
                break
            half = 1 - half
        self._wait_idle()
        return kept * self._chunk_tokens

    def restore_prefix(
        self, tokens: Sequence[int], hints: Hints = None, *, request: str | None = None
    ) -> tuple[DynamicCache, int]:
        """Returns a cache with the longest known prefix of `tokens`, exact to the bit, and its length in tokens.

        Uses `hints.load`, `ends`, `returns_in` and `kind`; without `hints`, those of `Config.request_hints`.
        `request` is the name of this call in events, for `longshore explain`; `restore_1`, `restore_2`, ... by default.
        `generate()` must compute at least one token: pass all tokens but the last to restore as much as it can use.
        What a file has is read even where computing it would be faster: the setting `gate` is not asked. Raises
        `CopyTimeoutError` if copies do not end within `write_timeout`.
        """
        cache, done, request_number, wanted = DynamicCache(), 0, None, self._hints(hints)
        with self._exclusive() as awake:
            if not awake or not wanted.load:
                return cache, 0
            self._restores += 1
            name = f"restore_{self._restores}" if request is None else request
            keys, probe_remote = self._keys(tokens), REMOTE in wanted.load and bool(self._stack.remote)
            self._stack.record_tokens(keys, 0, tokens)
            while done < len(keys):
                arrived, request_number = self._restore_path(
                    cache, GroupKeys(keys, done), request_number, wanted, name, probe_remote=probe_remote
                )
                done += arrived
                if not (arrived and probe_remote):
                    break
        return cache, done * self._chunk_tokens

    def sleep(self, *, keep: Sequence[str] = (HOST, FILE)) -> None:
        """Free the staging blocks, and forget the blocks of all but the coldest tiers to `keep`.

        If only files are kept, chunks that only host memory has are written to files first. Host memory that is not
        kept is freed. Until `wake` nothing is stored, and nothing is restored. Raises, with nothing changed,
        `CacheError` for what cannot be kept, `TierClosedError` after `close`, and `CopyTimeoutError` if a copy does not
        end within `write_timeout`.
        """
        keep = kept_tiers(self._config, keep)
        with self._lock:
            if self._is_asleep:
                return
            if self._stack.runtime.closed:
                raise TierClosedError("the store was closed")
            self._wait_idle()
            self._is_asleep = True
            if self._stack.host is None:  # through the device straight into files: there is no host memory to be kept
                with self._stack.runtime.batch() as cache:
                    cache.reset(keep=keep)
                self._stack.close()
            else:
                self._stack.unbind()
                self._stack.sleep(keep)
            is_accelerator = self._pages.device.type != "cpu"
            del self._pages
            if is_accelerator:
                torch.get_device_module().empty_cache()

    def wake(self) -> None:
        """Take the memory again. Raises `TierError` if there is not enough for the host tier;
        the store stays asleep.
        """
        with self._lock:
            if not self._is_asleep:
                return
            if self._stack.host is None:
                self._open()
            else:
                self._stack.wake()
                device = self._allocate_staging()
                self._stack = self._stack.bind(self._layout, device)
                self.collector.follow(self._stack)
                self._test(files=False)
            self._is_asleep = False

    def close(self) -> bool:
        """Write back what a restart would lose, and close the tiers; returns whether all was written. Idempotent."""
        if self._ctl_server is not None:
            self._ctl_server.close()
        with self._lock:
            return self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        return chain(self._stack.scope.digest, tokens, self._chunk_tokens)

    def _hints(self, given: Hints) -> RequestHints:
        if given is None:
            return self._config.request_hints
        return given if isinstance(given, RequestHints) else RequestHints.parse(given)

    def _restore_path(
        self,
        cache: DynamicCache,
        path: GroupKeys,
        request_number: int | None,
        hints: RequestHints,
        request: str,
        *,
        probe_remote: bool,
    ) -> tuple[int, int | None]:
        """Append what the tiers have of `path` to `cache`; how many chunks, and the number of the request."""
        runtime, chunk_tokens, done = self._stack.runtime, self._chunk_tokens, path.start
        if probe_remote:
            fetch_and_wait(runtime, path, path.start * chunk_tokens, chunk_tokens, self._config.load_timeout)
        runtime.lookup_counters.requests += request_number is None
        runtime.lookup_counters.attempts += 1
        with runtime.batch() as tiered_cache:
            with runtime.lookup_counters.seconds.timed():
                found = tiered_cache.lookup(
                    {0: path},
                    runtime.clock(),
                    request=request,
                    request_number=request_number,
                    reuse_hint=hints.reuse_hint,
                    remote_tiers=(),
                )
            if found.lease is None:
                return 0, found.request_number
            most = found.num_chunks if FILE in hints.load else tiered_cache.progress(found.lease).leading(HOST)
        chunks = min(most, found.num_chunks)
        path = path._replace(chunks=path.keys[: path.start + chunks])
        states = self._empty_states(chunks * self._blocks_per_chunk)
        try:
            with closing(self._load_parts(found, path, request)) as parts:
                for blocks in parts:
                    self._unpack(states, (done - path.start) * self._blocks_per_chunk, blocks)
                    done += len(blocks) // self._blocks_per_chunk
        finally:
            self._release(found.lease)
        for layer, both in enumerate(_by_layer(states)):
            known = both.flatten(2, 3)[:, :, : (done - path.start) * chunk_tokens]
            if done > path.start:
                cache.update(known[:1], known[1:], layer)  # which copies them
        return done - path.start, found.request_number

    def _load_parts(self, found: LookupResult, path: GroupKeys, request: str) -> Generator[range]:
        """Load what was `found` of `path`, in parts; yields the staging blocks of each part that has arrived.

        The next part is being copied to the other half then. Ends after the first part that has not arrived whole.
        """
        parts = enumerate(range(path.start, len(path.keys), self._half_chunks))
        loads = deque[_PartLoad]()
        try:
            while True:
                for number, first in islice(parts, 2 - len(loads)):
                    part = GroupKeys(path.keys[: first + self._half_chunks], first)
                    loads.append(self._start_part(found, part, number % 2, request))
                if not loads:
                    return
                blocks = loads[0].blocks
                arrived = blocks[: len(loads[0].wait()) * self._blocks_per_chunk]
                self._release(loads.popleft().lease)
                yield arrived
                if len(arrived) < len(blocks):
                    return
        finally:
            for load in loads:
                self._release(load.lease)

    def _start_part(self, found: LookupResult, part: GroupKeys, half: int, request: str) -> _PartLoad:
        """Begin to load a `part` of what was found into a half of the staging blocks."""
        self._wait_for_half(half)
        self._stack.transfer_engine.begin_step(None)
        runtime, chunks, lease = self._stack.runtime, len(part.keys) - part.start, None
        blocks = self._blocks_of(half, chunks)
        with runtime.batch() as cache:
            if chunks < found.num_chunks:
                lease = cache.lookup(
                    {0: part},
                    runtime.clock(),
                    request=request,
                    request_number=found.request_number,
                    count=False,
                    remote_tiers=(),
                ).lease
                found = found._replace(lease=lease, num_chunks=chunks)
            try:
                wait = self._stack.start_load(found, part, blocks, self._job_of(half), request=request)
            except BaseException:
                self._release(lease)
                raise
        return _PartLoad(blocks, wait, lease)

    def _release(self, lease: Lease | None) -> None:
        if lease is None:
            return
        with self._stack.runtime.batch() as cache:
            cache.release(lease)

    def _wait_idle(self) -> None:
        """Wait until no job uses the staging blocks."""
        for half in range(2):
            self._wait_for_half(half)

    def _wait_for_half(self, half: int) -> None:
        """Wait until no job uses a half of the staging blocks. Raises `CopyTimeoutError` if one does not end."""
        jobs, timeout = self._jobs[half], self._stack.config.write_timeout
        if not self._stack.runtime.wait_jobs(jobs, timeout):
            raise CopyTimeoutError(
                f"copies of jobs {jobs} from or to the device have not ended within write_timeout ({timeout:g} s): "
                "raise write_timeout, or close the store if it happens again"
            )
        jobs.clear()

    def _job_of(self, half: int) -> JobCallback:
        """Adds jobs to those that use a half of the staging blocks."""
        return lambda job, blocks: self._jobs[half].append(job)

    def _blocks_of(self, half: int, chunks: int) -> range:
        """The first blocks of a half of the staging blocks, for so many chunks."""
        first = half * self._staging_blocks // 2
        return range(first, first + chunks * self._blocks_per_chunk)

    def _check_states(self, cache: DynamicCache, tokens: int) -> None:
        """Raise `CacheError` unless `cache` has the model's layers, heads, head size, dtype, and one sequence."""
        layers, _, _, heads, dim = self._shape
        expected = (layers, (heads, dim), self._pages.dtype)
        states = _states(cache)
        length = cache.get_seq_length()  # a cache may have room for more
        for layer, tensor in ((layer, tensor) for layer, pair in enumerate(states) for tensor in pair):
            shape = tuple(tensor.shape)
            found = (len(states), shape[1::2], tensor.dtype)
            if found != expected or len(shape) != 4:
                what = "a cache of (layers, (heads, head size), dtype)"
                raise CacheError(f"layer {layer}: expected {what} {expected}, got {found} in shape {shape}")
            if shape[0] != 1 or min(shape[2], length) < tokens:
                raise CacheError(
                    f"layer {layer}: expected a cache of one sequence of at least {tokens} tokens, got {shape[0]} "
                    f"sequences of {min(shape[2], length)} tokens"
                )

    @torch.no_grad()
    def _fill(self, cache: DynamicCache, first_token: int, blocks: range) -> None:
        """Copy tokens of `cache`, shape `(1, heads, tokens, head_dim)` per layer, into staging `blocks`."""
        size = self._block_size
        pages = self._pages[blocks.start : blocks.stop].permute(1, 2, 4, 0, 3, 5)
        for layer, keys_values in enumerate(_states(cache)):
            for kv, states in enumerate(keys_values):
                tokens = states[0, :, first_token : first_token + len(blocks) * size]
                pages[layer, kv].copy_(tokens.view(len(tokens), len(blocks), size, -1))

    def _empty_states(self, blocks: int) -> list[torch.Tensor]:
        """Room for keys and values, shape `(layers, 2, heads, blocks, block_size, head_dim)`, for some layers each."""
        layers, _, size, heads, dim = self._shape
        counts = [min(_LAYERS_AT_ONCE, layers - first) for first in range(0, layers, _LAYERS_AT_ONCE)]
        return [self._pages.new_empty((count, 2, heads, blocks, size, dim)) for count in counts]

    def _unpack(self, states: list[torch.Tensor], first: int, blocks: range) -> None:
        """Copy staging `blocks` into `states`, from block `first` on."""
        pages = self._pages[blocks.start : blocks.stop].permute(1, 2, 4, 0, 3, 5)
        for room, some in zip(states, torch.split(pages, _LAYERS_AT_ONCE), strict=True):
            room.narrow(3, first, len(blocks)).copy_(some)


def _why_tokens_are_not_enough(model: Any) -> str | None:
    """Why equal tokens may have other keys and values, so that prefixes cannot be found by them; `None` if not."""
    if model.config.is_encoder_decoder:
        return "its decoder attends to what its encoder has read, which the tokens of a prefix do not name"
    taken = model.input_modalities
    if others := sorted({taken} - {"text"} if isinstance(taken, str) else {*taken} - {"text"}):
        return f"it takes {' and '.join(others)}, of which the tokens of a prefix have only placeholders"
    return None


def _by_layer(states: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Each layer of `states`, which are freed on the way."""
    while states:
        yield from states.pop(0)


def _states(cache: DynamicCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values per layer, each of shape `(sequences, heads, tokens, head_dim)`."""
    layers = getattr(cache, "layers", ())
    states = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in layers]
    full = [(keys, values) for keys, values in states if keys is not None and values is not None]
    if not full or len(full) != len(states):
        raise CacheError(f"expected keys and values in all layers, found them in {len(full)} of {len(states)}")
    return full
