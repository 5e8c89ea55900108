"""Every error that Longshore raises, in one tree.

    LongshoreError
    ├── ConfigError          a setting is unknown or impossible (also a ValueError)
    ├── LayoutError          tensors or sizes that cannot be placed
    │   └── FreedLayoutError a plan against device memory that was freed
    ├── PlanError            ids out of range, or not consumed exactly
    ├── DeviceError          a device's own call failed, or there is no such device
    ├── QueueFullError       a bounded queue has no room; nothing was begun
    ├── TokenError           tokens that no key can be made of
    ├── CacheError           a caller broke the control plane's contract
    │   ├── CapacityError    more was asked for than can be had; nothing has changed
    │   ├── LeaseError        an unknown or already released hold
    │   ├── IntegrityError   the cache's own books disagree: a fault of Longshore
    │   │   └── StateError   an edge that the state table does not have
    │   └── JobError         a result for an unknown job, or a second one from the same rank
    ├── TierError            a tier cannot be opened or used
    │   ├── TierClosedError  used after close
    │   ├── TierInUseError   the directory belongs to a live process
    │   ├── RegistrationError memory that a device does not take, or not let go of
    │   └── FormatError      bytes that are not ours, or of another version
    ├── TraceError           a trace that cannot be read; names the line
    ├── ReportError          a report that cannot be made
    ├── BenchError           a benchmark that cannot be run, or whose figures would mislead
    ├── SelfTestError        bytes did not survive the round trip at start
    ├── HintError            a request says of itself what cannot be (also a ValueError)
    └── EngineError          an engine, or a model in it, that Longshore cannot serve
        └── ContractError    the engine's internals moved

What happens to the *bytes* of one chunk in flight (a short read, a corrupt record, a deadline) is no
exception: it is a `longshore.boundary.Status` in a result, and ends as a counted miss.

Messages say what was expected and what came.
"""


class LongshoreError(Exception):
    """Base of every error that Longshore raises."""


class ConfigError(LongshoreError, ValueError):
    """A setting is unknown or impossible; names the key, the value and what is allowed."""


class HintError(LongshoreError, ValueError):
    """What a request says of itself is unknown or impossible; names the field, the value and what is allowed."""


class LayoutError(LongshoreError, ValueError):
    """Tensors or sizes that no layout can be made of."""


class FreedLayoutError(LayoutError):
    """Device memory that this layout described has been freed."""


class PlanError(LongshoreError, ValueError):
    """Block or slot ids out of range, or ids that a transfer would not consume exactly."""


class DeviceError(LongshoreError):
    """A device refused a call, or there is none; names the call and the device's own error."""


class QueueFullError(LongshoreError):
    """A bounded queue has no room for one more job. Nothing was begun; the same may be given again later."""


class TokenError(LongshoreError, ValueError):
    """Token ids that no key can be made of."""


class CacheError(LongshoreError):
    """A caller broke the contract of the control plane. Nothing has changed."""


class CapacityError(CacheError):
    """More slots were asked for than can be had. Nothing has changed."""


class LeaseError(CacheError):
    """A hold that is unknown, was released before, or cannot serve this call."""


class IntegrityError(CacheError):
    """The cache's own books disagree: a fault of Longshore, not of the caller. The cache must not be used further."""


class JobError(CacheError):
    """A result for a job that is not in flight, or a second one from the same rank."""


class StateError(IntegrityError):
    """A change of state that the table of legal edges does not have."""


class TierError(LongshoreError):
    """A tier cannot be opened or used."""


class TierClosedError(TierError):
    """The tier was used after `close`."""


class TierInUseError(TierError):
    """Another live process owns the tier's directory."""


class RegistrationError(TierError):
    """Host memory that a device does not take, or does not let go of; says which call failed, and how."""


class FormatError(TierError):
    """Bytes on disk that are not Longshore's, or are of another version."""


class TraceError(LongshoreError, ValueError):
    """A trace that cannot be read; names the file, the line, what was expected and what came."""


class ReportError(LongshoreError):
    """A report that cannot be made; says what is missing or does not fit."""


class BenchError(LongshoreError):
    """A benchmark that cannot be run, or whose figures would not mean what they say."""


class SelfTestError(LongshoreError):
    """A block did not come back from the tiers as it went in."""


class EngineError(LongshoreError):
    """An engine or a model that Longshore cannot serve; says why."""


class ContractError(EngineError):
    """The engine's internals that an adapter relies on have moved; says which."""
