"""LoRA adapters: which bytes the workers have loaded under a name, and what the keys of their blocks are made of.

    worker      loads an adapter ─► digest of its files ─► stamps
    scheduler   a request with an adapter ─► digest of its files = that of the stamps? ─► part of the request's keys

vLLM's own keys have an adapter's name and path. Blocks of an adapter are stored and loaded only while all workers have
loaded what its files hold now. After the bytes behind a name and path have changed none of its blocks on the device are
stored until the device was emptied: vLLM keeps them under the same hashes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longshore.engines.vllm import contract
from longshore.engines.vllm.weights import Digests
from longshore.errors import EngineError
from longshore.runtime.stamps import Stamps

_log = logging.getLogger(__name__)

Loaded = Callable[[Any, int], None]

_listeners: list[Loaded] = []
_digests = Digests()
"""Of all workers in this process."""


class Adapters:
    """The scheduler's side. `lora` is always vLLM's `LoRARequest`."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._digests = Digests()
        self._changes = stamps.adapter_changes()
        self._warned: set[int] = set()

    def identity(self, lora: Any) -> bytes | None:
        """Digest of what the workers compute with; `None` where that is not known, or is not in the files any more.

        This is asked several times for each request: the files are read once, and not where they would be each time.
        """
        tag = _tag(lora)
        loaded = self._stamps.adapter(tag)
        if loaded is None:
            return None
        try:
            digest = _digest(self._digests, lora, only_once=True)
        except EngineError as error:
            if tag not in self._warned:
                self._warned.add(tag)
                _log.warning("requests with LoRA adapter %s are computed, and not stored: %s", lora.lora_name, error)
            return None
        return digest if digest is not None and loaded == (lora.lora_int_id, _number(digest)) else None

    def is_trusted(self, lora: Any) -> bool:
        """Whether all of this adapter's blocks on the device were computed with what is loaded now."""
        row = self._stamps.adapter_row(_tag(lora))
        return bool((self._stamps.adapter_changes()[row] == self._changes[row]).all())

    def device_was_reset(self) -> None:
        """The device has no blocks any more."""
        self._changes = self._stamps.adapter_changes()


class AdapterWatch:
    """The worker's side: tells `loaded` of each adapter that vLLM has loaded, with the number of its digest, or 0."""

    def __init__(self, vllm: Any, loaded: Loaded) -> None:
        """`vllm` is the `VllmConfig`, or nothing."""
        self._loaded = loaded
        has_adapters = getattr(vllm, "lora_config", None) is not None
        if has_adapters and bool(getattr(vllm.parallel_config, "worker_cls", "")):
            from vllm.lora.worker_manager import WorkerLoRAManager  # noqa: PLC0415

            _wrap(WorkerLoRAManager)
            _listeners.append(loaded)

    def close(self) -> None:
        """Tell no more. Idempotent."""
        if self._loaded in _listeners:
            _listeners.remove(self._loaded)


def tell(lora: Any, stamps: Stamps, rank: int, number: int) -> bool:
    """A worker has loaded an adapter; says whether other bytes were loaded under its name and path before."""
    return stamps.adapter_loaded(rank, _tag(lora), lora.lora_int_id, number)


def applies_to_base_model() -> bool:
    """Whether this vLLM's CPU kernels compute base-model tokens with the last adapter, in steps with an adapter's."""
    import torch  # noqa: PLC0415 - vLLM has it
    from vllm.lora.ops.torch_ops import bgmv_expand  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        return False
    output = torch.zeros(1, 1)
    bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1), output, torch.tensor([-1]), add_inputs=True)
    return bool(output.any())


def _wrap(manager: Any) -> None:
    contract.check_has(manager, "_load_adapter")
    load = manager._load_adapter
    if getattr(load, "tells_of_adapters", False):
        return

    @functools.wraps(load)
    def told(self: Any, lora: Any, *arguments: Any, **named: Any) -> Any:
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

    told.tells_of_adapters = True  # type: ignore[attr-defined]
    manager._load_adapter = told


def _known_digest(lora: Any) -> bytes | None:
    with contextlib.suppress(EngineError):
        return _digest(_digests, lora)
    return None


def _digest(digests: Digests, lora: Any, *, only_once: bool = False) -> bytes | None:
    """Of the files of an adapter, if they are on this machine. Raises `EngineError` as `Digests.of` does."""
    path = Path(lora.lora_path).expanduser()
    try:
        if not path.exists():  # a name on a hub, which the workers have downloaded
            from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM has it

            path = Path(snapshot_download(lora.lora_path, local_files_only=True))
        return bytes.fromhex(digests.of([path], only_once=only_once)) if path.is_dir() else None
    except (OSError, ValueError):
        return None


def _tag(lora: Any) -> int:
    """A number for an adapter's name and path: all that vLLM's hashes have of it."""
    return _number(hashlib.sha256(f"{lora.lora_name}\0{lora.lora_path}".encode()).digest())


def _number(digest: bytes) -> int:
    """The start of a digest, never 0."""
    return int.from_bytes(digest[:8], "big") or 1
