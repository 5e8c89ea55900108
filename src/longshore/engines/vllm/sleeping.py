"""Sleep: which resets of vLLM are those of a sleep, what they keep, and host memory that is given back meanwhile.

EngineCore.sleep ─► pauses, perhaps for long ─► resets caches, the connector's too ─► the workers' device memory goes

vLLM does not tell a connector why it is reset. So `EngineCore` is watched: at level 1, weights are kept, and so are
tiers; at level 2 they are not, and nothing is.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from longshore.boundary import FILE, HOST
from longshore.config import Config, Kept
from longshore.engines.vllm import contract
from longshore.errors import CapacityError
from longshore.runtime.loop import Runtime
from longshore.runtime.stamps import Stamps

_log = logging.getLogger(__name__)

_level: ContextVar[int] = ContextVar("level", default=0)
"""Level of the sleep whose reset is under way; 0 in any other reset."""

Watched = Callable[..., Any]


def watch_engine() -> None:
    """Have vLLM's engines tell of their sleeps, from now on. Raises `ContractError` if they are not as expected."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it is there where there are managers

    contract.check_has(EngineCore, "sleep", "release_kv_cache_memory", "_reset_caches")
    if not hasattr(EngineCore, "longshore_sleeps"):
        EngineCore.longshore_sleeps = ()
        EngineCore.sleep = _begins_sleep(EngineCore.sleep)
        EngineCore.release_kv_cache_memory = _begins_sleep(EngineCore.release_kv_cache_memory)
        EngineCore._reset_caches = _resets(EngineCore._reset_caches)


def _begins_sleep(method: Watched) -> Watched:
    """From this call on until its future is done, resets of the engine's own are of a sleep."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def sleep(engine: Any, *arguments: Any, **named: Any) -> Any:
        bound = signature.bind(engine, *arguments, **named)
        bound.apply_defaults()
        level = int(bound.arguments.get("level", 1))  # to release the memory of blocks alone keeps weights
        engine.longshore_sleeps += (level,)

        def over(_: Any = None) -> None:
            left = list(engine.longshore_sleeps)
            left.remove(level)
            engine.longshore_sleeps = tuple(left)

        try:
            future = method(engine, *arguments, **named)
        except BaseException:
            over()
            raise
        if future is None:
            over()
        else:
            future.add_done_callback(over)
        return future

    return sleep


def _resets(method: Watched) -> Watched:
    @functools.wraps(method)
    def reset(engine: Any, *arguments: Any, **named: Any) -> Any:
        before = _level.set(max(engine.longshore_sleeps, default=0))
        try:
            return method(engine, *arguments, **named)
        finally:
            _level.reset(before)

    return reset


class Sleeps:
    """What the resets of one manager keep, and its host memory while the engine sleeps."""

    def __init__(self, runtime: Runtime, stamps: Stamps, slabs: int, config: Config) -> None:
        """The host tier has so many `slabs`."""
        self._runtime = runtime
        self._stamps = stamps
        self._slabs = slabs
        self._config = config
        self.has_memory = True
        """Whether the host tier has its slots."""

    def kept(self, workers: int) -> tuple[str, ...]:
        """The tiers that the reset under way keeps, the file tier with all that it is to have.

        So many jobs in flight are the `workers`': they do not end meanwhile.
        """
        level = _level.get()
        kept = self._config.reset_keep if not level else self._config.sleep_keep if level == 1 else Kept.NONE
        with self._runtime.observe() as cache:
            keep = tuple(tier.name for tier in cache.stats() if tier.name in kept.tiers)
        if keep == (FILE,) and not self._runtime.flush(self._config.write_timeout, besides=workers):
            _log.warning("some blocks were not written to files in time, and are lost with host memory")
        return keep

    def give_back(self, *, idle: bool) -> None:
        """All but what is kept was forgotten: if the engine goes to sleep, host memory may go, unless it is kept.

        Until it is back the host tier has no slots: nothing is found, and nothing stored. It stays if it is not `idle`,
        as workers, or the tier host, use some of it.
        """
        if not _level.get() or self._config.sleep_keep is Kept.ALL:
            return
        if idle:
            self._runtime.wait_idle(self._config.load_timeout)
        try:
            with self._runtime.control() as cache:
                cache.resize(HOST, 0, discard=True)
        except CapacityError as error:
            _log.warning("host memory is kept while the engine sleeps, as copies are in flight: %s", error)
            return
        self.has_memory, self._stamps.gives_back = False, True

    def look(self) -> None:
        """A step is planned, so that the engine is awake: have the slots again if the workers have the memory."""
        if not self.has_memory and not self._stamps.is_asleep() and not self._stamps.is_lacking():
            self.has_memory, self._stamps.gives_back = True, False
            with self._runtime.control() as cache:
                cache.resize(HOST, self._slabs)
