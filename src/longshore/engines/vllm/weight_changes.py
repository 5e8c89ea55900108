"""Changes of weights, device memory and LoRA adapters in a running engine; and which blocks may then be stored.

    worker      `WeightWatch`: wrapped methods, samples of parameters ─► `RankReports`; device memory freed, restored
                `AdapterWatch`: an adapter was loaded ─► digest of its files ─► `RankReports`
    scheduler   `AdapterDigests`: a request's adapter ─► digest of its files, if workers reported it ─► part of its keys
                `BlockValidity`: whether blocks on the device were computed with the weights in force

vLLM does not inform a connector of new weights, and resets its caches only on request. So the methods of vLLM's
worker that change weights are wrapped, with those of a worker extension and the models' own `load_weights`; so is
`EngineCore.collective_rpc`, for functions that workers are given to call. Writes to parameters by other means are
detected on the CPU only, by samples that are compared before blocks are copied.

vLLM keeps blocks on the device when weights change: from then on nothing is stored until the device was emptied.
vLLM's keys have an adapter's name and path. Blocks of an adapter are stored and loaded only while all workers have
loaded what its files hold now. After these bytes have changed, none of its blocks on the device are stored until the
device was emptied, because vLLM keeps them under the same hashes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from vllm.v1.kv_offload.base import OffloadKey

from longshore.engines.tensors import content
from longshore.engines.vllm import contract
from longshore.engines.vllm.requests import RequestState, RequestStore, Ticket
from longshore.engines.weight_files import FileDigests
from longshore.errors import EngineError
from longshore.runtime.rank_reports import RankReports

_log = logging.getLogger(__name__)

METHODS = (
    *("load_model", "reload_weights", "reset_weights", "apply_model", "sleep"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)
"""Methods of vLLM's worker that may change weights."""

MEMORY_METHODS = ("sleep", "discard", "wake_up")
"""Methods of vLLM's worker that free device memory or restore it."""

_TAGS = ("weights", "kv_cache")

_SAMPLES = 64
"""Elements of each parameter that are compared, at most."""

_watching: list[WeightWatch] = []


class DeviceMemoryUser(Protocol):
    """Copies from and to device memory."""

    def before_device_release(self) -> None:
        """Device memory is about to be freed: end all copies before this returns."""

    def after_device_restore(self) -> None:
        """Device memory was restored at its former addresses."""


class WeightWatch:
    """Calls `on_change` when weights may have changed, and `device_user` around releases of device memory."""

    def __init__(self, vllm: Any, on_change: Callable[[], None], device_user: DeviceMemoryUser) -> None:
        """`vllm` is the `VllmConfig` of a worker whose model was loaded; without one nothing is watched."""
        self.on_change = on_change
        self._device_user = device_user
        self._models: list[Any] = []
        self._is_sampled = False
        self._digests_before_sleep: list[bytes] | None = None
        """Checksums of the weights before device memory was freed, until they were compared before the next copy."""
        self._freed_tags: set[str] = set()
        """vLLM's tags of the device memory that is freed; no parameter is read until all of it is restored."""
        if vllm is None or not getattr(vllm.parallel_config, "worker_cls", ""):
            return
        _wrap_worker(vllm.parallel_config)
        layers = set(map(id, vllm.compilation_config.static_forward_context.values()))
        models = [each for each in _models() if any(id(part) in layers for part in each.modules())]
        for kind in {kind for model in models for kind in type(model).__mro__}:
            _wrap(kind, "load_weights")
        inner = {id(part) for model in models for part in model.modules() if part is not model}
        self._models = [each for each in models if id(each) not in inner]
        self._is_sampled = any(each.device.type == "cpu" for each in self._parameters())
        self._last_samples = self._sampled()
        _watching.append(self)

    def before_release(self, tags: Collection[str]) -> None:
        """Device memory of these `tags` is about to be freed."""
        if "kv_cache" in tags:
            self._device_user.before_device_release()
        if not self._freed_tags and self._digests_before_sleep is None:
            self._digests_before_sleep = self._digests()
        self._freed_tags.update(tags)

    def changed(self) -> None:
        """Weights may have changed: samples that differ because of this are no other change."""
        self.on_change()
        self.sample()

    def sample(self) -> None:
        """What the weights are now is what they are compared with next."""
        if self._freed_tags:
            return
        try:
            self._last_samples = self._sampled()
        except (RuntimeError, ValueError):  # torch's, of weights that a failed load has left without memory, say
            _log.exception("the weights could not be read after a change; it is counted again before the next copy")
        if self._digests_before_sleep is not None:
            self._digests_before_sleep = self._digests()

    def after_restore(self, tags: Collection[str]) -> None:
        """Device memory of these `tags` was restored. Weights may have been written meanwhile without a call."""
        self._freed_tags.difference_update(tags)
        if not self._freed_tags:
            if self._digests_before_sleep is not None and self._digests_before_sleep != self._digests():
                self._digests_before_sleep = None
                self.changed()
            self._device_user.after_device_restore()

    def check(self) -> None:
        """Compare the samples with those of the last call; after a sleep, once, the checksums of all weights."""
        if self._freed_tags:
            return
        if self._digests_before_sleep is not None:
            before, self._digests_before_sleep = self._digests_before_sleep, None
            if before != self._digests():
                self.changed()
        if self._is_sampled:
            before, self._last_samples = self._last_samples, self._sampled()
            if before != self._last_samples:
                self.on_change()

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._models, self._is_sampled = [], False
        if self in _watching:
            _watching.remove(self)

    def _parameters(self) -> list[Any]:
        """The parameters that the models have now: some may have been replaced."""
        return list({id(each): each for model in self._models for each in model.parameters()}.values())

    def _digests(self) -> list[bytes] | None:
        """A checksum of each parameter; `None` if one cannot be read, which counts as a change."""
        try:
            return [content(each) for each in self._parameters()]
        except RuntimeError:  # no memory for it on the device, say
            _log.exception("the weights could not be checksummed; they count as changed, and all tiers are cleared")
            self.on_change()
            return None

    def _sampled(self) -> list[bytes]:
        """Some bytes of each parameter, its last element included."""
        import torch  # noqa: PLC0415 - vLLM has it

        samples = []
        for each in self._parameters() if self._is_sampled else ():
            if each.device.type != "cpu":
                continue
            flat = each.detach().reshape(-1) if each.is_contiguous() else each.detach().flatten()
            picked = torch.cat([flat[:: max(1, len(flat) // _SAMPLES)], flat[-1:]])
            samples.append(picked.view(torch.uint8).numpy().tobytes())
        return samples


def _wrap_worker(parallel: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415

    worker, names = resolve_obj_by_qualname(parallel.worker_cls), [*METHODS, *MEMORY_METHODS]
    contract.check_has(worker, *names)
    if parallel.worker_extension_cls:
        extension = resolve_obj_by_qualname(parallel.worker_extension_cls)
        names += [name for name in dir(extension) if not name.startswith("_")]
    for name in names:
        for kind in worker.__mro__:
            _wrap(kind, name)


def _wrap(kind: type, name: str) -> None:
    """Wrap a method that `kind` itself defines, so that it notifies every `WeightWatch` when it ends; once."""
    method = vars(kind).get(name)
    if not inspect.isfunction(method) or getattr(method, "reports_changes", False):
        return

    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        freed, changes, restored = _effects(name, arguments[1:], named)
        for each in list(_watching) if freed else ():
            each.before_release(freed)
        try:
            done = method(*arguments, **named)
        finally:
            for each in list(_watching) if changes else ():
                each.changed()
        for each in list(_watching) if restored else ():
            each.after_restore(restored)
        return done

    wrapped.reports_changes = True  # type: ignore[attr-defined]
    setattr(kind, name, wrapped)


def _effects(
    name: str, arguments: Sequence[Any], named: dict[str, Any]
) -> tuple[Collection[str], bool, Collection[str]]:
    """Tags of the memory that a call of this method frees, whether weights may change, and tags that it restores."""
    given = arguments[0] if arguments else named.get("level" if name == "sleep" else "tags")
    if name == "sleep":
        return _TAGS, given is not None and int(given) > 1, ()  # at level 1, weights are kept
    if name in MEMORY_METHODS:
        tags = _TAGS if given is None else given
        return (tags, False, ()) if name == "discard" else ((), False, tags)
    return (), True, ()


_engines = WeakSet[RankReports]()


def watch_calls(reports: RankReports) -> None:
    """Count functions that the workers were given to call as changes of weights, in the `reports` of this engine.

    `EngineCore.collective_rpc` takes the name of a method, or a function. Raises `ContractError` if it is missing.
    """
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it is there where there are managers

    contract.check_has(EngineCore, "collective_rpc")
    _engines.add(reports)
    call = EngineCore.collective_rpc
    if getattr(call, "reports_changes", False):
        return

    @functools.wraps(call)
    def wrapped(engine: Any, method: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(method, str):
            return call(engine, method, *arguments, **named)
        try:
            answers = call(engine, method, *arguments, **named)
            call(engine, _sample)
            return answers
        finally:
            for each in list(_engines):
                each.workers_called()

    wrapped.reports_changes = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = wrapped


def _sample(worker: Any) -> None:
    """In a worker: a function that may have changed weights has ended, and was counted by the engine."""
    for each in list(_watching):
        each.sample()


def _models() -> list[Any]:
    """All models of this process. vLLM gives a connector only their attention layers."""
    from torch.nn import Module  # noqa: PLC0415 - vLLM has it

    return [each for each in gc.get_objects() if issubclass(type(each), Module) and hasattr(each, "load_weights")]


Loaded = Callable[[Any, int], None]

_listeners: list[Loaded] = []
_digests = FileDigests()
"""Shared by all workers in this process."""


class AdapterDigests:
    """The scheduler's side of LoRA adapters. `lora` is always vLLM's `LoRARequest`."""

    def __init__(self, reports: RankReports) -> None:
        self._reports = reports
        self._digests = FileDigests()
        self._changes = reports.adapter_changes()
        self._warned: set[int] = set()

    def identity(self, lora: Any) -> bytes | None:
        """Digest of the adapter that the workers have loaded; `None` if it is unknown, or the files have changed since.

        Called several times for each request: the files are read once, and not at all if they cannot be cached.
        """
        tag = _tag(lora)
        loaded = self._reports.adapter(tag)
        if loaded is None:
            return None
        try:
            digest = _digest(self._digests, lora, only_once=True)
        except EngineError as error:
            if tag not in self._warned:
                self._warned.add(tag)
                _log.warning("blocks of LoRA adapter %s are neither loaded nor stored: %s", lora.lora_name, error)
            return None
        return digest if digest is not None and loaded == (lora.lora_int_id, _number(digest)) else None

    def is_trusted(self, lora: Any) -> bool:
        """Whether all of this adapter's blocks on the device were computed with what is loaded now."""
        row = self._reports.adapter_row(_tag(lora))
        return bool((self._reports.adapter_changes()[row] == self._changes[row]).all())

    def device_was_reset(self) -> None:
        """The device cache was emptied."""
        self._changes = self._reports.adapter_changes()


class AdapterWatch:
    """The worker's side: calls `loaded` for each adapter that vLLM loads, with the number of its digest, or 0."""

    def __init__(self, vllm: Any, loaded: Loaded) -> None:
        """`vllm` is the `VllmConfig`, or `None`."""
        self._loaded = loaded
        has_adapters = getattr(vllm, "lora_config", None) is not None
        if has_adapters and bool(getattr(vllm.parallel_config, "worker_cls", "")):
            from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415

            _wrap_manager(WorkerLoRAManager)
            _listeners.append(loaded)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._loaded in _listeners:
            _listeners.remove(self._loaded)


def report_adapter(lora: Any, reports: RankReports, rank: int, number: int) -> bool:
    """A worker has loaded an adapter; says whether other bytes were loaded under its name and path before."""
    return reports.adapter_loaded(rank, _tag(lora), lora.lora_int_id, number)


def _wrap_manager(manager: Any) -> None:
    contract.check_has(manager, "_load_adapter")
    load = manager._load_adapter
    if getattr(load, "reports_adapters", False):
        return

    @functools.wraps(load)
    def wrapped(self: Any, lora: Any, *arguments: Any, **named: Any) -> Any:
        before = _known_digest(lora)
        try:
            done = load(self, lora, *arguments, **named)
        except BaseException:
            before = None
            raise
        finally:
            number = _number(before) if before is not None and before == _known_digest(lora) else 0
            for each in list(_listeners):
                each(lora, number)
        return done

    wrapped.reports_adapters = True  # type: ignore[attr-defined]
    manager._load_adapter = wrapped


def _known_digest(lora: Any) -> bytes | None:
    with contextlib.suppress(EngineError):
        return _digest(_digests, lora)
    return None


def _digest(digests: FileDigests, lora: Any, *, only_once: bool = False) -> bytes | None:
    """Of the files of an adapter, if they are on this machine, and of how they are read.

    Raises `EngineError` as `FileDigests.of` does.
    """
    path = Path(lora.lora_path).expanduser()
    try:
        if not path.exists():  # a name on a hub, which the workers have downloaded
            from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM has it

            path = Path(snapshot_download(lora.lora_path, local_files_only=True))
        files = digests.of([path], only_once=only_once) if path.is_dir() else None
    except (OSError, ValueError):
        return None
    layout = getattr(lora, "is_3d_lora_weight", False)  # of the weights of experts; a vLLM may not have it
    return None if files is None else hashlib.sha256(f"{files}\0{layout}".encode()).digest()


def _tag(lora: Any) -> int:
    """A number for an adapter's name and path: all that vLLM's hashes have of it."""
    return _number(hashlib.sha256(f"{lora.lora_name}\0{lora.lora_path}".encode()).digest())


def _number(digest: bytes) -> int:
    """The start of a digest, never 0."""
    return int.from_bytes(digest[:8], "big") or 1


class BlockValidity:
    """Whether blocks on the device may be stored, for one manager.

    Attributes:
        weight_changes: How often the workers' weights had changed at the last check, over all ranks.
    """

    def __init__(self, reports: RankReports, *, base_is_mixed: bool) -> None:
        """`base_is_mixed` says that blocks of the base model may have been computed with an adapter."""
        self.weight_changes = reports.weight_changes
        self._reports = reports
        self._adapters = AdapterDigests(reports)
        self._base_is_mixed = base_is_mixed
        self._device_used = False
        """Whether there were lookups, or stores, since the device was last known to be empty."""
        self._may_have_old_blocks = False
        """Whether the device may have blocks of other weights than those in force."""

    @property
    def epoch(self) -> tuple[int, int]:
        """How often weights had changed at the last check, and device memory has been freed or restored."""
        return self.weight_changes, self._reports.sleep_changes

    def weights_have_changed(self) -> bool:
        """Whether weights have changed since the last call; if so, no stored block is valid any more."""
        changes = self._reports.weight_changes
        if changes == self.weight_changes:
            return False
        self.weight_changes = changes
        self._may_have_old_blocks |= self._device_used
        _log.warning(
            "weights changed in the running engine: all tiers were cleared%s",
            "; nothing is stored until the prefix cache is reset (reset_connector=True) while no request is running, "
            "because the device may still have blocks of the old weights"
            if self._may_have_old_blocks
            else "",
        )
        return True

    def device_used(self) -> None:
        """The device may have blocks from now on."""
        self._device_used = True

    def device_was_reset(self) -> None:
        """The device cache was emptied."""
        self._device_used = self._may_have_old_blocks = False
        self._adapters.device_was_reset()

    def adapter_is_known(self, request: RequestState) -> bool:
        """Whether the adapter of `request` is known, and has not changed since it was first known."""
        if request.lora is None:
            return True
        found = self._adapters.identity(request.lora)
        request.adapter = request.adapter or found or b""
        return found is not None and found == request.adapter

    def may_store(self, request: RequestState, keys: Collection[OffloadKey], stores: Iterable[RequestStore]) -> bool:
        """Whether blocks of `request` may be stored under `keys`, beside `stores` that are in flight."""
        if request.lora is None:
            return not self._may_have_old_blocks and not self._base_is_mixed
        if (
            self._may_have_old_blocks
            or not self.adapter_is_known(request)
            or not self._adapters.is_trusted(request.lora)
        ):
            return False
        # vLLM ends stores by its own keys, which are the same for all bytes of an adapter: one at a time.
        others = (store for store in stores if store.adapter and store.adapter != request.adapter)
        return not any(key in keys for store in others for key in store.keys)

    def is_valid(self, store: Ticket) -> bool:
        """Whether the chunks of `store` are still valid under their keys."""
        if store.lora is None:
            return True
        return self._adapters.is_trusted(store.lora) and self._adapters.identity(store.lora) == store.adapter
