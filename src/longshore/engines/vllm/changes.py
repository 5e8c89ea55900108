"""Weights that change in a running engine: a worker notices, and tells the scheduler's side by the stamps.

Nobody tells a connector that vLLM has got new weights, and vLLM resets its caches only where it is told to. So the
methods of vLLM's worker that change weights are wrapped, with those of a worker extension and the models' own
`load_weights`. What writes to parameters without any of these is seen on the CPU alone, in samples of each parameter
that are compared before blocks are copied.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from longshore.engines.vllm import contract

METHODS = (
    *("load_model", "reload_weights", "apply_model", "sleep"),
    *("start_weight_update", "start_draft_weight_update", "update_weights", "finish_weight_update"),
)
"""Of vLLM's worker: those after which weights may be others."""

_SAMPLES = 64
"""Elements of each parameter that are compared, at most."""

Told = Callable[[], None]

_listeners: list[Told] = []


class Changes:
    """Calls `told` whenever weights of this process may have changed, until it is closed."""

    def __init__(self, vllm: Any, told: Told) -> None:
        """`vllm` is the `VllmConfig` of a worker whose model was loaded; without one nothing is watched."""
        self._told = told
        self._parameters: list[Any] = []
        if vllm is None or not getattr(vllm.parallel_config, "worker_cls", ""):
            return
        _wrap_worker(vllm.parallel_config)
        layers = set(map(id, vllm.compilation_config.static_forward_context.values()))
        models = [each for each in _models() if any(id(part) in layers for part in each.modules())]
        for kind in {kind for model in models for kind in type(model).__mro__}:
            _wrap(kind, "load_weights")
        unique = {id(each): each for model in models for each in model.parameters()}
        self._parameters = [each for each in unique.values() if each.device.type == "cpu"]
        self._seen = self._sampled()
        _listeners.append(told)

    def look(self) -> None:
        """Compare the samples, if there are any, with those of the last look."""
        if self._parameters:
            before, self._seen = self._seen, self._sampled()
            if before != self._seen:
                self._told()

    def close(self) -> None:
        """Tell no more. Idempotent."""
        self._parameters = []
        if self._told in _listeners:
            _listeners.remove(self._told)

    def _sampled(self) -> list[bytes]:
        """Of each parameter some bytes, its last element's included."""
        import torch  # noqa: PLC0415 - vLLM has it

        samples = []
        for each in self._parameters:
            flat = each.detach().reshape(-1) if each.is_contiguous() else each.detach().flatten()
            picked = torch.cat([flat[:: max(1, len(flat) // _SAMPLES)], flat[-1:]])
            samples.append(picked.view(torch.uint8).numpy().tobytes())
        return samples


def _wrap_worker(parallel: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname  # noqa: PLC0415

    worker, names = resolve_obj_by_qualname(parallel.worker_cls), list(METHODS)
    contract.check_has(worker, *METHODS)
    if parallel.worker_extension_cls:
        extension = resolve_obj_by_qualname(parallel.worker_extension_cls)
        names += [name for name in dir(extension) if not name.startswith("_")]
    for name in names:
        for kind in worker.__mro__:
            _wrap(kind, name)


def _wrap(kind: type, name: str) -> None:
    """Have a method that `kind` itself defines tell all listeners when it has ended, in whatever way; once."""
    method = vars(kind).get(name)
    if not inspect.isfunction(method) or getattr(method, "tells_of_changes", False):
        return

    @functools.wraps(method)
    def told(*arguments: Any, **named: Any) -> Any:
        try:
            return method(*arguments, **named)
        finally:
            if not (name == "sleep" and _level(arguments[1:], named) <= 1):  # then weights are kept
                for each in list(_listeners):
                    each()

    told.tells_of_changes = True  # type: ignore[attr-defined]
    setattr(kind, name, told)


def _level(arguments: Sequence[Any], named: dict[str, Any]) -> int:
    return int(arguments[0] if arguments else named.get("level", 1))


def _models() -> list[Any]:
    """Models that this process has made. vLLM tells a connector of their attention layers alone."""
    from torch.nn import Module  # noqa: PLC0415 - vLLM has it

    return [each for each in gc.get_objects() if issubclass(type(each), Module) and hasattr(each, "load_weights")]
