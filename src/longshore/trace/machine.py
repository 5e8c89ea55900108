"""The machine that a replay models: model geometry, speeds, and movers in virtual time.

    KV bytes per token       2 * layers * KV heads * head size * bytes of a number
                             layers * (latent + rope) * bytes of a number       (multi-head latent attention)
    operations per token     2 * active parameters + 4 * layers * heads * head size * tokens it looks back at
    prefill of n tokens behind c others      step + alpha * n + beta * n * (2 * c + n) / 2
    a transfer                               fixed + bytes / bandwidth

Every layer counts as full attention, which is an upper bound for models with sliding windows or recurrent layers. A
profile has the speeds of a machine and their source; each of them can be replaced.

`VirtualMovers` takes the commands of the control plane, and returns results with their times:

    route host->device   ├─ job 3 ─┤├─ job 7 ─────┤              one after the other on each route
    route file->host     ├─ job 6 ───────────┤                    routes side by side
                                 job 7 waits for job 6: `after`

A probe of a remote store takes its delay only. There are no bytes, threads or clocks: the replay asks for the next end,
and continues at that time. `RemoteStore` is a store behind the network: a bounded number of images by key, which the
cache asks by `Probe`, and which may drop images. The movers of all replicas that share a store share its bandwidth, in
each direction: one transfer after the other. Its round trips overlap with the transfers of others.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from longshore.boundary import (
    DEVICE,
    FILE,
    HOST,
    REMOTE,
    Cancel,
    Command,
    Key,
    Probe,
    ProbeResult,
    Route,
    Status,
    Transfer,
    TransferResult,
)
from longshore.errors import TraceError
from longshore.trace.parsing import unknown_name

_MOST = 10**12
"""Largest integer in a model's configuration."""

_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Geometry:
    """One model.

    Attributes:
        name: Display name.
        kv_bytes_per_token: KV cache bytes per token, of all layers and ranks.
        parameters: Active parameters per token.
        attention_width: layers * heads * head size: multiplications of attention per pair of tokens.
        source: Where the figures come from.
    """

    name: str
    kv_bytes_per_token: int
    parameters: float
    attention_width: int
    source: str


def _dense(layers: int, heads: int, kv_heads: int, head: int, billions: float) -> dict[str, Any]:
    return {"layers": layers, "heads": heads, "kv": 2 * layers * kv_heads * head, "head": head, "billions": billions}


_TABLE: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _dense(32, 32, 8, 128, 8.03),
    "llama-3.1-70b": _dense(80, 64, 8, 128, 70.6),
    "mistral-7b": _dense(32, 32, 8, 128, 7.25),
    "qwen2.5-7b": _dense(28, 28, 4, 128, 7.62),
    "qwen3-32b": _dense(64, 64, 8, 128, 32.8),
    "deepseek-v3": {"layers": 61, "heads": 128, "kv": 61 * (512 + 64), "head": 160, "billions": 37.0},
}
MODELS = tuple(_TABLE)


def geometry_of(model: str) -> Geometry:
    """The geometry of a built-in model, of a `config.json`, or of a directory with one.

    Built-in models have 16-bit caches. Raises `TraceError` for an unknown name or an incomplete file.
    """
    if not model:
        raise unknown_name("a model, or the path of a config.json,", model, MODELS)
    if model.lower() in _TABLE:
        row = _TABLE[model.lower()]
        width = row["layers"] * row["heads"] * row["head"]
        return Geometry(model.lower(), 2 * row["kv"], row["billions"] * 1e9, width, "built-in table, 16-bit numbers")
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise unknown_name("a model, or the path of a config.json,", model, MODELS)
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(config, dict):
        raise TraceError(f"{path}: expected a JSON object")
    inner = config.get("text_config")
    return _of_config(path, {**config, **inner} if isinstance(inner, dict) else config)


def _of_config(path: Path, config: Mapping[str, Any]) -> Geometry:
    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or not 0 < value <= _MOST:
            raise TraceError(f"{path}: expected {name!r} to be an integer from 1 to {_MOST}, got {str(value)[:40]!r}")
        return value

    layers, hidden = number("num_hidden_layers"), number("hidden_size")
    heads = number("num_attention_heads")
    head = number("head_dim", max(1, hidden // heads))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TraceError(f"{path}: expected a dtype out of {', '.join(_DTYPES)}, got {dtype!r}")
    if config.get("kv_lora_rank") is not None:
        kv = number("kv_lora_rank") + number("qk_rope_head_dim")
    else:
        kv = 2 * number("num_key_value_heads", heads) * head
    kv_heads = number("num_key_value_heads", heads)
    experts = number("num_experts_per_tok", 1) if "num_experts_per_tok" in config else 1
    wide = number("moe_intermediate_size", number("intermediate_size", 4 * hidden)) if experts > 1 else None
    feed = 3 * hidden * (wide * experts if wide else number("intermediate_size", 4 * hidden))
    each = hidden * head * (2 * heads + 2 * kv_heads) + feed
    parameters = layers * each + number("vocab_size", 32_000) * hidden
    return Geometry(
        path.parent.name or str(path), layers * kv * _DTYPES[dtype], float(parameters), layers * heads * head, str(path)
    )


class RemoteStore:
    """A store of `slots` images that replicas share, empty at the start, which evicts the least recently used image.

    Attributes:
        evictions: Number of evicted images.
        free_at: When each route to or from it has moved all that was begun, whichever replica began it.
        busy: Seconds that each of these routes was busy.
        blocks: Images moved on each of these routes. One that the store has already is not sent again.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise TraceError(f"{REMOTE}: expected room for at least one block, got {slots}")
        self.slots = slots
        self.evictions = 0
        self.free_at: dict[Route, float] = {}
        self.busy: dict[Route, float] = {Route(HOST, REMOTE): 0.0, Route(REMOTE, HOST): 0.0}
        self.blocks: dict[Route, int] = dict.fromkeys(self.busy, 0)
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __len__(self) -> int:
        """How many images it has."""
        return len(self._keys)

    def probe(self, keys: Iterable[Key]) -> tuple[bool, ...]:
        """Which of `keys` the store has; counts as a use, as in Valkey (STRLEN)."""
        return tuple(self._use(key) for key in keys)

    def moved(self, route: Route, keys: Iterable[Key]) -> int:
        """How many images of `keys` a transfer on `route` moves."""
        return sum((key in self._keys) == (route.source == REMOTE) for key in keys)

    def read(self, keys: Iterable[Key]) -> tuple[Status, ...]:
        """Read `keys`; those in the store are used in this order."""
        return tuple(Status.OK if self._use(key) else Status.NOT_FOUND for key in keys)

    def write(self, keys: Iterable[Key]) -> None:
        """Store `keys`, used in this order."""
        for key in keys:
            self._keys[key] = None
            self._use(key)
            if len(self._keys) > self.slots:
                self._keys.popitem(last=False)
                self.evictions += 1

    def _use(self, key: Key) -> bool:
        there = key in self._keys
        if there:
            self._keys.move_to_end(key)
        return there


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine. Bandwidths are in bytes per second, for one direction.

    Attributes:
        flops: Operations per second of prefill.
        step: Fixed seconds per step.
        link: Between device and host memory.
        file_read: From files to host memory.
        file_write: From host memory to files.
        remote_read: From a remote store to host memory.
        remote_write: From host memory to a remote store.
        fixed: Fixed seconds per transfer.
        remote_delay: Latency of the remote store in seconds, for lookups and transfers.
        source: Where the figures come from.
    """

    flops: float
    step: float
    link: float
    file_read: float
    file_write: float
    remote_read: float
    remote_write: float
    fixed: float
    remote_delay: float
    source: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least_is_fine = field.name in ("step", "fixed", "remote_delay") and value == 0
            if field.name != "source" and not least_is_fine and not (math.isfinite(value) and value > 0):
                raise TraceError(f"{field.name}: expected a positive number, got {value}")


_REMOTE = "a store behind 25 Gbit/s Ethernet, 90 % of which are reached, that answers within 0.5 ms (assumed)"

PROFILES = {
    "h100": Profile(
        0.4 * 989e12, 0.005, 50e9, 6.8e9, 4.0e9, 2.8e9, 2.8e9, 1e-4, 5e-4,
        "H100: data sheet, 989 TFLOPS dense in 16 bits of which 40 % are reached (assumed); PCIe 5.0 x16 measured by "
        "others at 50-52 GB/s; one data-centre NVMe on PCIe 4.0 x4 by its data sheet, 6.8 GB/s read and 4.0 write; "
        + _REMOTE,
    ),
    "a100": Profile(
        0.5 * 312e12, 0.005, 25e9, 6.8e9, 4.0e9, 2.8e9, 2.8e9, 1e-4, 5e-4,
        "A100: data sheet, 312 TFLOPS dense in 16 bits of which 50 % are reached (assumed); PCIe 4.0 x16 at 25 GB/s; "
        "one data-centre NVMe on PCIe 4.0 x4 by its data sheet, 6.8 GB/s read and 4.0 write; " + _REMOTE,
    ),
}  # fmt: skip


def profile_named(name: str) -> Profile:
    """A built-in profile; raises `TraceError` for an unknown name."""
    if name not in PROFILES:
        raise unknown_name("a profile", name, PROFILES)
    return PROFILES[name]


def with_changes(profile: Profile, changes: Mapping[str, float | None], source: str) -> Profile:
    """`profile` with the `changes` that are not `None`, from `source`."""
    given = {name: value for name, value in changes.items() if value is not None}
    if not given:
        return profile
    return replace(profile, source=f"{profile.source}; {', '.join(given)} {source}", **given)


_MEASURED = {"read": "file_read", "write": "file_write", "onboard": "link", "prefill": "flops"}
"""Prefix of a case's name, and the field of a profile that it measures."""

_UNITS = {"GB/s": 1e9, "TFLOPS": 1e12}


def with_bench(profile: Profile, path: Path) -> Profile:
    """`profile` with the results of `longshore bench file`, `copy` or `prefill`, whose JSON is in the file at `path`.

    Of several sizes the largest counts: files from the cases `read/SIZE` and `write/SIZE`, the link from `onboard/SIZE`
    or from what `copy --device cuda --calibrate` says of its own choices, operations from `prefill/TOKENS`. Raises
    `TraceError` for a file without any of these.
    """
    expected = f"{path}: expected what `longshore bench file, copy or prefill --json` prints"
    try:
        report = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{expected}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(report, dict) or not {"cases", "chosen"} & report.keys():
        raise TraceError(f"{expected}, a JSON object with a field 'cases' or 'chosen'")
    try:
        found = _measured(report)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        least = "each of 'cases' has a name, a value and a unit; each of 'chosen' a direction and gb_per_s"
        raise TraceError(f"{expected}: {least}") from error
    if not found:
        names = ", ".join(f"{name}/..." for name in _MEASURED)
        raise TraceError(f"{path}: expected cases {names}, or a calibration, found none of them")
    return with_changes(profile, found, f"by {path.name}")


def _measured(report: Any) -> dict[str, float]:
    """What of a profile a benchmark's JSON says; of each what comes last, which is the largest size."""
    if "chosen" in report:
        rates = [float(line["gb_per_s"]) for line in report["chosen"] if line["direction"] == "onboard"]
        return {"link": 1e9 * max(rates)} if rates else {}
    cases = [(*case["name"].split("/"), case) for case in report["cases"]]
    return {
        _MEASURED[kind]: _UNITS[case["unit"]] * float(case["value"])
        for kind, *_, case in cases
        if kind in _MEASURED and case["unit"] in _UNITS
    }


class RouteSpeed(NamedTuple):
    """Speed of a route: fixed seconds per transfer, and bytes per second."""

    fixed: float
    rate: float

    def seconds(self, nbytes: int) -> float:
        """Seconds to transfer a number of bytes, without waiting."""
        return self.fixed + nbytes / self.rate


def prefill_operations(geometry: Geometry, context: int, tokens: int) -> float:
    """Operations to compute `tokens` after `context` other tokens."""
    pairs = tokens * (2 * context + tokens) / 2
    return 2 * geometry.parameters * tokens + 4 * geometry.attention_width * pairs


@dataclass(frozen=True, slots=True)
class Timing:
    """A model on a machine."""

    geometry: Geometry
    profile: Profile

    @property
    def alpha(self) -> float:
        """Seconds per token."""
        return 2 * self.geometry.parameters / self.profile.flops

    @property
    def beta(self) -> float:
        """Seconds per pair of tokens."""
        return 4 * self.geometry.attention_width / self.profile.flops

    def prefill(self, context: int, tokens: int) -> float:
        """Seconds to compute `tokens` after `context` other tokens."""
        return self.profile.step + prefill_operations(self.geometry, context, tokens) / self.profile.flops

    @property
    def paces(self) -> dict[Route, RouteSpeed]:
        """Speed of each route."""
        of, delay = self.profile, self.profile.fixed + self.profile.remote_delay
        return {
            Route(DEVICE, HOST): RouteSpeed(of.fixed, of.link),
            Route(HOST, DEVICE): RouteSpeed(of.fixed, of.link),
            Route(HOST, FILE): RouteSpeed(of.fixed, of.file_write),
            Route(FILE, HOST): RouteSpeed(of.fixed, of.file_read),
            Route(HOST, REMOTE): RouteSpeed(delay, of.remote_write),
            Route(REMOTE, HOST): RouteSpeed(delay, of.remote_read),
        }


_FETCH = Route(REMOTE, HOST)


class VirtualMovers:
    """All routes of one cache with chunk images of `image_bytes`, including `remote`, if there is one.

    Attributes:
        busy: Seconds that each route was busy.
        queued: Seconds that transfers waited for each route.
    """

    def __init__(self, timing: Timing, image_bytes: int, remote: RemoteStore | None = None) -> None:
        self._paces, self._image_bytes, self._remote = timing.paces, image_bytes, remote
        self._free_at: dict[Route, float] = {}
        self._ends: list[tuple[float, int, Transfer | Probe]] = []
        self._results: dict[int, TransferResult] = {}
        self._pending: set[int] = set()
        self._waiting: dict[int, list[Transfer]] = {}
        self._missing: dict[int, int] = {}
        self._cancelled: set[int] = set()
        self.busy: dict[Route, float] = {}
        self.queued: dict[Route, float] = {}

    def submit(self, commands: Iterable[Command], now: float) -> None:
        """Begin commands that can begin; the others begin after the jobs they depend on."""
        for command in commands:
            if isinstance(command, Transfer):
                self._pending.add(command.job)
                before = [job for job in command.after if job in self._pending]
                self._missing[command.job] = len(before)
                for job in before:
                    self._waiting.setdefault(job, []).append(command)
                if not before:
                    self._begin(command, now)
            elif isinstance(command, Cancel):
                self._cancel(command.job)
            elif isinstance(command, Probe):
                end = min(now + self._paces[_FETCH].fixed, command.deadline)
                heapq.heappush(self._ends, (end, command.probe, command))

    @property
    def next_end(self) -> float | None:
        """Time at which the next transfer or probe ends; `None` if none is in flight."""
        return self._ends[0][0] if self._ends else None

    def pop(self) -> tuple[Transfer, TransferResult] | tuple[Probe, ProbeResult]:
        """The next transfer or probe to end."""
        now, _, command = heapq.heappop(self._ends)
        if isinstance(command, Probe):
            if self._remote is None or now >= command.deadline:
                return command, ProbeResult(command.probe, (False,) * len(command.keys), Status.DEADLINE)
            return command, ProbeResult(command.probe, self._remote.probe(command.keys))
        result = self._results.pop(command.job)
        self._pending.discard(command.job)
        self._cancelled.discard(command.job)
        for waiting in self._waiting.pop(command.job, ()):
            self._missing[waiting.job] -= 1
            if not self._missing[waiting.job]:
                self._begin(waiting, now)
        return command, result if self._remote is None else self._exchange(self._remote, command, result)

    def wait(self, source: str, destination: str, now: float) -> float:
        """Seconds that a transfer submitted now would wait."""
        route = Route(source, destination)
        return max(0.0, self._queue(route).get(route, 0.0) - now)

    def _queue(self, route: Route) -> dict[Route, float]:
        """When the transfers begun on each route will have ended: of this machine, or of all that share the store."""
        return self._free_at if self._remote is None or REMOTE not in route else self._remote.free_at

    def _cancel(self, job: int) -> None:
        """What has not begun need not begin: it ends when its turn comes."""
        if self._missing.get(job):
            self._cancelled.add(job)

    def _exchange(self, remote: RemoteStore, transfer: Transfer, result: TransferResult) -> TransferResult:
        """What a transfer that has moved its bytes has found in the remote store, or left there."""
        route, keys = transfer.route, [item.key for item in transfer.items] if REMOTE in transfer.route else []
        if not keys or result.statuses[0] is not Status.OK:
            return result
        if route.destination == REMOTE:
            remote.write(keys)
            return result
        statuses = remote.read(keys)
        return replace(
            result, statuses=statuses, bytes=min(result.bytes, statuses.count(Status.OK) * self._image_bytes)
        )

    def _begin(self, transfer: Transfer, now: float) -> None:
        del self._missing[transfer.job]
        route, seconds, status = transfer.route, 0.0, Status.OK
        free_at = self._queue(route)
        start = max(now, free_at.get(route, 0.0))
        if transfer.job in self._cancelled:
            status, start = Status.CANCELLED, now
        elif start > transfer.deadline:
            status, start = Status.DEADLINE, max(now, transfer.deadline)
        nbytes = len(transfer.items) * self._image_bytes if status is Status.OK else 0
        if nbytes:
            seconds = busy = self._paces[route].seconds(nbytes)
            if self._remote is not None and REMOTE in route:
                moved = self._remote.moved(route, (item.key for item in transfer.items))
                nbytes = moved * self._image_bytes
                busy = nbytes / self._paces[route].rate
                seconds = self._paces[route].fixed + busy
                self._remote.blocks[route] += moved
                self._remote.busy[route] += busy
            free_at[route] = start + busy
            self.busy[route] = self.busy.get(route, 0.0) + busy
            self.queued[route] = self.queued.get(route, 0.0) + start - now
        statuses = (status,) * len(transfer.items)
        self._results[transfer.job] = TransferResult(transfer.job, statuses, nbytes, seconds, start - now)
        heapq.heappush(self._ends, (start + seconds, transfer.job, transfer))
