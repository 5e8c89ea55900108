"""Every error that Longshore raises; `LongshoreError` is their base.

A failure of one chunk in flight (a short read, a corrupt record, a deadline) is not an exception. It is a
`longshore.boundary.Status` in a result, and is counted as a miss.

Messages say what was expected and what was given.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any


class LongshoreError(Exception):
    """Base of every error that Longshore raises."""


class ConfigError(LongshoreError, ValueError):
    """A setting is unknown or impossible; names the key, the value and what is allowed."""


class HintError(LongshoreError, ValueError):
    """A hint of a request is unknown or invalid; names the field, the value and what is allowed."""


class LayoutError(LongshoreError, ValueError):
    """Tensors or sizes without a valid layout."""


class FreedLayoutError(LayoutError):
    """The device memory of this layout has been freed."""


class PlanError(LongshoreError, ValueError):
    """Block or slot ids that are out of range, or do not match the items of a transfer."""


class DeviceError(LongshoreError):
    """A call of a device failed, or the device does not exist; names the call and the device's error."""


class QueueFullError(LongshoreError):
    """A bounded queue has no room for another job. Nothing was started; the caller may retry later."""


class TokenError(LongshoreError, ValueError):
    """Invalid token ids."""


class CacheError(LongshoreError):
    """A caller violated the contract of the control plane. Nothing has changed."""


class CapacityError(CacheError):
    """More slots were requested than are available. Nothing has changed."""


class LeaseError(CacheError):
    """A lease that is unknown, was released before, or cannot serve this call."""


class IntegrityError(CacheError):
    """The cache's data structures disagree: a bug in Longshore. The cache must not be used further."""


class PinLimitError(CacheError):
    """More chunks than may be pinned; says how many that is."""


class CopyTimeoutError(LongshoreError, TimeoutError):
    """Copies from or to the device did not end in time, and may still run.

    A store may have stored earlier parts of a long prefix; a restore returns nothing.
    """


class JobError(CacheError):
    """A result for a job that is not in flight, or a second one from the same rank."""


class StateError(IntegrityError):
    """A state transition that the table of legal transitions does not have."""


class TierError(LongshoreError):
    """A tier cannot be opened or used."""


class TierClosedError(TierError):
    """The tier was used after `close`."""


class TierInUseError(TierError):
    """Another live process owns the tier's directory."""


class RegistrationError(TierError):
    """Host memory could not be registered with a device, or unregistered; names the call and its error."""


class FormatError(TierError):
    """Bytes on disk that are not in Longshore's format, or are of another version."""


class TraceError(LongshoreError, ValueError):
    """A trace that cannot be read; names the file, the line, what was expected and what was found."""


class ReportError(LongshoreError):
    """A report that cannot be written; says what is missing or invalid."""


class BenchError(LongshoreError):
    """A benchmark that cannot be run, or would give misleading figures."""


class SelfTestError(LongshoreError):
    """The self-test's block was not stored, or differed when it was read back."""


class EngineError(LongshoreError):
    """An engine or a model that Longshore does not support; says why."""


class ContractError(EngineError):
    """Engine internals that an adapter relies on have changed; names them."""


class CommandError(LongshoreError):
    """A command to a running engine that it cannot read or carry out, or an engine that does not answer."""


def former_name(old: str, new: str) -> property:
    """An attribute or method `old` of a class, which is `new` now: returns that, with a `DeprecationWarning`."""

    def get(self: object) -> Any:
        warnings.warn(f"{type(self).__name__}.{old} was renamed: use {new}", DeprecationWarning, stacklevel=2)
        return getattr(self, new)

    return property(get)


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """`__getattr__` for `module`: what has another name now, by its former one, with a `DeprecationWarning`."""

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} was renamed: use {names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return get


_LOG_SECONDS = 60.0
_MOST_LOGGED = 256
_logged: dict[tuple[object, ...], tuple[float, int]] = {}
"""By message, arguments and type of exception: when it was logged last, and how often it was raised since."""
_logging = threading.Lock()


def log_seldom(log: logging.Logger, message: str, *arguments: object) -> None:
    """Log the exception that is being handled as an error, with its traceback, unless it repeats within a minute.

    The next line says how many were not logged. What counts as a repetition: the same `message`, the same `arguments`
    except numbers, and the same type of exception. The last 256 of them are known.
    """
    causes = (str(each) for each in arguments if not isinstance(each, (int, float)))
    kind, now = (message, *causes, sys.exc_info()[0]), time.monotonic()
    with _logging:
        last, left_out = _logged.pop(kind, (-math.inf, 0))
        is_repeated = now < last + _LOG_SECONDS
        _logged[kind] = (last, left_out + 1) if is_repeated else (now, 0)
        if len(_logged) > _MOST_LOGGED:
            del _logged[next(iter(_logged))]
    if not is_repeated:
        more = f" ({left_out} more since the last line like this)" if left_out else ""
        log.exception(message + more, *arguments)


def with_extra(extra: str) -> str:
    """The command that installs Longshore with an extra from a clone: no package index has it yet."""
    return f"in a clone of Longshore, pip install '.[{extra}]'"
