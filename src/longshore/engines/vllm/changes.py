"""Weights that change in a running engine, and device memory that goes: a worker notices.

Nobody tells a connector that vLLM has got new weights, and vLLM resets its caches only where it is told to. So the
methods of vLLM's worker that change weights are wrapped, with those of a worker extension and the models' own
`load_weights`. What writes to parameters without any of these is seen on the CPU alone, in samples of each parameter
that are compared before blocks are copied.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from longshore.engines.tensors import content
from longshore.engines.vllm import contract

_log = logging.getLogger(__name__)

METHODS = (
    *("load_model", "reload_weights", "apply_model", "sleep"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)
"""Of vLLM's worker: those after which weights may be others."""

OF_MEMORY = ("sleep", "discard", "wake_up")
"""Of vLLM's worker: those that free device memory, and bring it back."""

_TAGS = ("weights", "kv_cache")

_SAMPLES = 64
"""Elements of each parameter that are compared, at most."""

_watching: list[Changes] = []


class Sleeper(Protocol):
    """Who copies from and to device memory."""

    def device_goes(self) -> None:
        """Device memory is about to go: end all copies before this returns."""

    def device_is_back(self) -> None:
        """Device memory is there again, at its former addresses."""


class Changes:
    """Calls `told` whenever weights of this process may have changed, and `sleeper`, until it is closed."""

    def __init__(self, vllm: Any, told: Callable[[], None], sleeper: Sleeper) -> None:
        """`vllm` is the `VllmConfig` of a worker whose model was loaded; without one nothing is watched."""
        self.told = told
        self._sleeper = sleeper
        self._parameters: list[Any] = []
        self._sampled_ones: list[Any] = []
        self._before: list[bytes] | None = None
        """What weights were when device memory went, until they were found to be the same at the first use of it."""
        self._gone: set[str] = set()
        """vLLM's tags of the device memory that has gone: nothing is read until all is back."""
        if vllm is None or not getattr(vllm.parallel_config, "worker_cls", ""):
            return
        _wrap_worker(vllm.parallel_config)
        layers = set(map(id, vllm.compilation_config.static_forward_context.values()))
        models = [each for each in _models() if any(id(part) in layers for part in each.modules())]
        for kind in {kind for model in models for kind in type(model).__mro__}:
            _wrap(kind, "load_weights")
        self._parameters = list({id(each): each for model in models for each in model.parameters()}.values())
        self._sampled_ones = [each for each in self._parameters if each.device.type == "cpu"]
        self._seen = self._sampled()
        _watching.append(self)

    def goes(self, tags: Collection[str]) -> None:
        """Device memory is about to go, perhaps weights with it, which come back, or others."""
        if "kv_cache" in tags:
            self._sleeper.device_goes()
        if not self._gone and self._before is None:
            self._before = self._digests()
        self._gone.update(tags)

    def comes(self, tags: Collection[str]) -> None:
        """Device memory is there again; weights may have been written meanwhile in ways that nobody tells of."""
        self._gone.difference_update(tags)
        if not self._gone:
            if self._before is not None and self._before != self._digests():
                self._before = None
                self.told()
            self._sleeper.device_is_back()

    def look(self) -> None:
        """Compare the samples, if there are any, with those of the last look; after a sleep all weights, once."""
        if self._gone:
            return
        if self._before is not None:
            before, self._before = self._before, None
            if before != self._digests():
                self.told()
        if self._sampled_ones:
            before, self._seen = self._seen, self._sampled()
            if before != self._seen:
                self.told()

    def close(self) -> None:
        """Tell no more. Idempotent."""
        self._parameters, self._sampled_ones = [], []
        if self in _watching:
            _watching.remove(self)

    def _digests(self) -> list[bytes] | None:
        """Of each parameter; `None` where one cannot be read, which is as if all had changed."""
        try:
            return [content(each) for each in self._parameters]
        except RuntimeError:  # no memory for it on the device, say
            _log.exception("weights cannot be compared, and are taken for new ones")
            self.told()
            return None

    def _sampled(self) -> list[bytes]:
        """Of each parameter some bytes, its last element's included."""
        import torch  # noqa: PLC0415 - vLLM has it

        samples = []
        for each in self._sampled_ones:
            flat = each.detach().reshape(-1) if each.is_contiguous() else each.detach().flatten()
            picked = torch.cat([flat[:: max(1, len(flat) // _SAMPLES)], flat[-1:]])
            samples.append(picked.view(torch.uint8).numpy().tobytes())
        return samples


def _wrap_worker(parallel: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415

    worker, names = resolve_obj_by_qualname(parallel.worker_cls), [*METHODS, *OF_MEMORY]
    contract.check_has(worker, *names)
    if parallel.worker_extension_cls:
        extension = resolve_obj_by_qualname(parallel.worker_extension_cls)
        names += [name for name in dir(extension) if not name.startswith("_")]
    for name in names:
        for kind in worker.__mro__:
            _wrap(kind, name)


def _wrap(kind: type, name: str) -> None:
    """Have a method that `kind` itself defines tell all who watch, in whatever way it ends; once."""
    method = vars(kind).get(name)
    if not inspect.isfunction(method) or getattr(method, "tells_of_changes", False):
        return

    @functools.wraps(method)
    def told(*arguments: Any, **named: Any) -> Any:
        goes, changes, comes = _effects(name, arguments[1:], named)
        for each in list(_watching) if goes else ():
            each.goes(goes)
        try:
            done = method(*arguments, **named)
        finally:
            for each in list(_watching) if changes else ():
                each.told()
        for each in list(_watching) if comes else ():
            each.comes(comes)
        return done

    told.tells_of_changes = True  # type: ignore[attr-defined]
    setattr(kind, name, told)


def _effects(
    name: str, arguments: Sequence[Any], named: dict[str, Any]
) -> tuple[Collection[str], bool, Collection[str]]:
    """Tags of the memory that a call of this method frees, whether weights may change, and tags that it brings back."""
    given = arguments[0] if arguments else named.get("level" if name == "sleep" else "tags")
    if name == "sleep":
        return _TAGS, given is not None and int(given) > 1, ()  # at level 1, weights are kept
    if name in OF_MEMORY:
        tags = _TAGS if given is None else given
        return (tags, False, ()) if name == "discard" else ((), False, tags)
    return (), True, ()


def _models() -> list[Any]:
    """Models that this process has made. vLLM tells a connector of their attention layers alone."""
    from torch.nn import Module  # noqa: PLC0415 - vLLM has it

    return [each for each in gc.get_objects() if issubclass(type(each), Module) and hasattr(each, "load_weights")]
