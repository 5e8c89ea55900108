"""One typed object for all settings, from Python, a TOML file or command-line flags.

Sizes are totals over all ranks, as numbers of bytes or as text: `"64GiB"`, `"1.5TB"`. Errors name the key, the value
and what is allowed. `Config.check_machine` compares the sizes with what the machine has, before anything is allocated.
"""

from __future__ import annotations

import difflib
import enum
import ipaddress
import json
import os
import re
import shutil
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from longshore.boundary import FILE, HOST
from longshore.cache.settings import HIGHEST_PRIORITY, PrefetchPolicy, WritePolicy
from longshore.errors import ConfigError
from longshore.hints import RequestHints
from longshore.tiers.remote.settings import parse_url

_CGROUP = Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")
_SIZE = "a size is a whole number of bytes, or text such as '64GiB' or '1.5TB'"
_MOST_BYTES = 1 << 60
_ENDPOINT = re.compile(r"tcp://(\*|[\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}|ipc:///.+")
_BYTE_SIZE = TypeAdapter(ByteSize)


class Kept(enum.Enum):
    """Which tiers a reset keeps: those named, and all below them."""

    ALL = "all"
    FILE = "file"
    NONE = "none"

    @property
    def tiers(self) -> tuple[str, ...]:
        """Names of the tiers, warmest first."""
        return {Kept.ALL: (HOST, FILE), Kept.FILE: (FILE,)}.get(self, ())


class Config(BaseModel):
    """Settings of one engine's tiers."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host_size: ByteSize = Field(ByteSize(4 << 30), gt=0, description="bytes of host memory for chunk images")
    host_numa: int | Literal["auto", "off"] = Field(
        "auto", description="NUMA node of host memory: a number, auto (the device's node) or off"
    )
    host_huge_pages: bool = Field(True, description="use huge pages for host memory where available")
    host_shared: bool = Field(False, description="let other processes attach to the host memory")
    file_path: Path | None = Field(None, description="directory of the file tier; unset: no file tier")
    file_size: ByteSize = Field(ByteSize(0), ge=0, description="bytes on disk for the file tier")
    file_mode: Literal["posix", "gds"] = Field(
        "posix", description="I/O path of the file tier: posix, through host memory; gds, directly from the device"
    )
    file_daily_writes: ByteSize = Field(
        ByteSize(0), ge=0, description="bytes that may be written to the file tier per day; 0: no limit"
    )
    remote: tuple[str, ...] = Field(
        (),
        description="URLs of stores that replicas share, in the order in which they are read: one, a list, or text "
        "with spaces between them; see `docs/remote.md`",
    )
    serve: str = Field(
        "",
        description="where other replicas may read what the tiers have, under vLLM: valkey://ADDRESS:PORT, or "
        "valkeys:// with TLS; unset: nowhere; see `docs/remote.md`",
    )
    peer_networks: tuple[str, ...] = Field(
        (),
        description="networks, such as 10.0.0.0/8, in which requests may name a replica to read from, under vLLM; "
        "unset: none",
    )
    peer_url: str = Field(
        "valkey://peer?probe_timeout=1s&in_flight=8MiB",
        description="URL template for connections to these replicas: host and port are replaced by those of the "
        "replica, its options (TLS, credentials, timeouts) hold for all",
    )
    eviction: Literal["gittins", "arc", "lru"] = Field(
        "gittins", description="eviction policy of every tier; gittins learns hit rates"
    )
    offload: WritePolicy = Field(
        WritePolicy.THROUGH,
        description="when blocks are copied from the device to the host tier: write_through, at once; "
        "write_through_selective, at their use number `threshold`; write_back, when they are about to be evicted",
    )
    backup: WritePolicy = Field(
        WritePolicy.BACK,
        description="when blocks are copied from the host tier to the file tier; as `offload`",
    )
    admission: bool = Field(
        True,
        description="full tiers and stores get no blocks with fewer expected hits than those they would replace",
    )
    threshold: int = Field(
        2, ge=2, le=255, description="number of uses at which a selective write policy copies a block"
    )
    prompt_only: bool = Field(False, description="offload blocks of prompts only, not of generated tokens")
    priority_floor: int = Field(
        0, ge=0, le=HIGHEST_PRIORITY, description="lowest priority at which blocks are offloaded"
    )
    request_hints: RequestHints = Field(
        RequestHints(),
        description="hints for requests without their own: store, load, retention, ends, returns_in, class "
        "(see `longshore.hints`)",
    )
    prefetch: PrefetchPolicy = Field(
        PrefetchPolicy.BEST_EFFORT,
        description="how a request waits for its prefetch, in engines that prefetch: best_effort, not at all; "
        "wait_complete, until all has arrived; timeout, for at most `prefetch_timeout`",
    )
    prefetch_timeout: float = Field(
        1.0, gt=0, le=86_400, description="seconds to wait for a prefetch under the policy timeout"
    )
    blocks_per_chunk: int = Field(1, ge=1, le=4096, description="device blocks in one chunk image")
    load_timeout: float = Field(
        10.0, gt=0, le=86_400, description="seconds after which a load is abandoned and its blocks are recomputed"
    )
    write_timeout: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="seconds after which a write that has not started is dropped; also the longest wait of "
        "`PrefixStore` for copies, and for writes to files of a sleep or reset that drops host memory",
    )
    gate: bool = Field(
        True,
        description="recompute blocks when that is faster than reading them from a file or a store; off: always load, "
        "as `PrefixStore` does from files in any case",
    )
    prefill_speed: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="prompt tokens computed per second, for the gate; 0: measured"
    )
    max_writes: int = Field(
        1024,
        ge=1,
        description="chunks in flight per write route; beyond it, offloads are dropped (counted as backpressure), and "
        "copies to colder tiers wait",
    )
    file_threads: int = Field(
        16, ge=1, le=256, description="threads of the file tier, with gds or without asynchronous I/O"
    )
    background: bool = Field(True, description="move blocks in a thread, also between the engine's steps")
    fixed_weights: bool = Field(
        False,
        description="promise that the weights never change while an engine runs, so a reset never means other weights: "
        "blocks stored after a reset are served after a restart, too, and under transformers weights and code are "
        "hashed only once; weights that change unnoticed then get blocks of the former ones",
    )
    reset_keep: Kept = Field(
        Kept.NONE, description="tiers that a reset of the connector keeps, with fixed_weights: all, file or none"
    )
    sleep_keep: Kept = Field(
        Kept.ALL,
        description="tiers that the engine's sleep keeps, if it keeps weights: all, file or none; host memory that is "
        "not kept is given back",
    )
    salt: str = Field("", description="part of every key; tenants with different salts never share blocks")
    events_path: Path | None = Field(None, description="event file for `longshore explain`; unset: no events")
    events_size: ByteSize = Field(
        ByteSize(64 << 20), ge=1 << 16, description="bytes of events to keep, total of the current and the rotated file"
    )
    kv_events: str = Field(
        "",
        description="address of ZeroMQ at which events for routers are published, tcp://ADDRESS:PORT or ipc://PATH; it "
        "is always bound; unset: none",
    )
    kv_events_replay: str = Field(
        "", description="the same, for subscribers that ask for batches that they have missed"
    )
    kv_events_topic: str = Field("", description="topic of the events for routers")
    kv_events_remote: bool = Field(False, description="events for routers tell of copies in `remote` stores, too")
    control: str = Field(
        "", description="name or path of a socket for `longshore ctl`, of this user alone; unset: no commands"
    )
    calibration: Path | None = Field(
        None, description="calibration file of a CUDA device; unset: one in the user's cache directory"
    )

    @field_validator("host_size", "file_size", "file_daily_writes", "events_size", mode="before")
    @classmethod
    def _is_size(cls, value: object) -> object:
        parse_size(value)
        return value

    @field_validator("file_path", "events_path", "calibration", mode="before")
    @classmethod
    def _is_path(cls, value: object) -> object:
        if value == "":
            raise ValueError("expected a path, got an empty one")
        return value

    @field_validator("remote", mode="before")
    @classmethod
    def _are_urls(cls, value: Any) -> tuple[str, ...]:
        urls = value.split() if isinstance(value, str) else value
        if not isinstance(urls, list | tuple) or not all(isinstance(url, str) for url in urls):
            raise ValueError("expected a URL such as valkey://host:6379/0, or a list of such URLs")
        try:
            stores = [str(parse_url(url)) for url in urls]
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if len(set(stores)) < len(stores):
            raise ValueError("expected a different URL for each remote store")
        return tuple(urls)

    @field_validator("peer_networks", mode="before")
    @classmethod
    def _are_networks(cls, value: Any) -> tuple[str, ...]:
        named = value.split() if isinstance(value, str) else value
        if not isinstance(named, list | tuple) or not all(isinstance(each, str) for each in named):
            raise ValueError("expected a network such as 10.0.0.0/8, or a list of such networks")
        return tuple(str(ipaddress.ip_network(each)) for each in named)

    @field_validator("serve", "peer_url")
    @classmethod
    def _is_of_a_peer(cls, value: str) -> str:
        if value and not value.startswith(("valkey://", "valkeys://")):
            raise ValueError("expected valkey://ADDRESS:PORT, or valkeys:// with TLS")
        try:
            return str(value) if not value or parse_url(value) else value
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _is_endpoint(cls, value: str) -> str:
        if value and not _ENDPOINT.fullmatch(value):
            raise ValueError("expected an address such as tcp://10.0.0.7:5557, tcp://[::1]:5557 or ipc:///run/events")
        return value

    @field_validator("request_hints", mode="before")
    @classmethod
    def _are_hints(cls, value: Any) -> RequestHints:
        return value if isinstance(value, RequestHints) else RequestHints.parse(value)

    @field_validator("host_numa", mode="plain")
    @classmethod
    def _numa_node(cls, value: object) -> int | str:
        text = str(value)
        if text in ("auto", "off"):
            return text
        if text.isascii() and text.isdecimal():
            return int(text)
        raise ValueError("expected 'auto', 'off', or the number of a NUMA node")

    @field_validator("file_path", "events_path", "calibration")
    @classmethod
    def _at_home(cls, value: Path | None) -> Path | None:
        try:
            return None if value is None else value.expanduser()
        except RuntimeError as error:
            raise ValueError("expected a path in a known home directory") from error

    @model_validator(mode="after")
    def _has_whole_file_tier(self) -> Self:
        if (self.file_path is None) != (self.file_size == 0):
            given, missing = f"file_path is {self.file_path}", "file_size"
            if self.file_path is None:
                given, missing = f"file_size is {format_bytes(self.file_size)}", "file_path"
            raise ValueError(f"{given}, but {missing} is not set: a file tier needs both, set {missing} as well")
        if self.file_mode == "gds" and "host_size" in self.model_fields_set:
            raise ValueError(
                "file_mode gds has no host tier: remove host_size, or use file_mode posix to have a host tier"
            )
        if self.file_mode == "gds" and self.remote:
            raise ValueError(
                "file_mode gds has no host tier, but remote needs one: use file_mode posix, or remove remote"
            )
        return self

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        """Refuse settings that would silently have no effect, or an unsafe one."""
        if self.file_path is None:
            without = "but there is no file tier: set file_path and file_size, or"
            if self.file_mode == "gds":
                raise ValueError(f"file_mode is gds, {without} use file_mode posix")
            if self.file_daily_writes:
                raise ValueError(
                    f"file_daily_writes is {format_bytes(self.file_daily_writes)}, {without} remove file_daily_writes"
                )
            for name, kept in (("reset_keep", self.reset_keep), ("sleep_keep", self.sleep_keep)):
                if kept is Kept.FILE:
                    raise ValueError(f"{name} is file, {without} use all or none")
        if self.kv_events_remote and not self.remote:
            raise ValueError("kv_events_remote is set, but there is no store: set remote, or remove kv_events_remote")
        if self.kv_events_replay and not self.kv_events:
            raise ValueError(f"kv_events_replay is {self.kv_events_replay}, but kv_events is not set: set it as well")
        if self.reset_keep is not Kept.NONE and not self.fixed_weights:
            raise ValueError(
                f"reset_keep is {self.reset_keep.value}, but fixed_weights is not set: a reset may mean changed "
                "weights, and the kept blocks would be served to them; set fixed_weights, or use none"
            )
        return self

    @classmethod
    def reference(cls) -> tuple[SettingReference, ...]:
        """Every setting, as `longshore config` and docs/settings.md list it: in the order of `SECTIONS`."""
        return tuple(
            SettingReference(name, section, _allowed(name), _written(name), str(cls.model_fields[name].description))
            for section, names in SECTIONS.items()
            for name in names.split()
        )

    @classmethod
    def make(cls, **settings: Any) -> Config:
        """A configuration from keyword arguments; raises `ConfigError`."""
        try:
            return cls(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(detail) for detail in error.errors())) from None

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: Any) -> Config:
        """A configuration from the table `[longshore]` of a TOML file, or from its top level; `overrides` win."""
        return cls.make(**{**read_toml(path), **overrides})

    @property
    def shares(self) -> bool:
        """Whether blocks go to or come from other engines, so that the weights must be known by their content."""
        return bool(self.remote or self.serve or self.peer_networks)

    def check_machine(self) -> None:
        """Raise `ConfigError`, with the available amount, if the machine does not have the resources configured.

        Does not check host memory if `file_mode` is gds, which needs none; see `check_host`.
        """
        if self.file_mode != "gds":
            self.check_host()
        self.check_files()

    def check_files(self) -> None:
        """As `check_machine`, for files only."""
        if self.file_path is not None:
            self._check_directory(self.file_path)
        if self.events_path is not None:
            _check_writable("events_path", self.events_path, self.events_path.absolute().parent)
            try:
                is_file = stat.S_ISREG(self.events_path.lstat().st_mode)
            except FileNotFoundError:
                is_file = True
            except OSError as error:
                raise ConfigError(
                    f"events_path is {self.events_path}, which cannot be accessed: {error.strerror}"
                ) from error
            if not is_file:  # a link is not followed
                raise ConfigError(f"events_path is {self.events_path}, which is not a regular file")

    def check_host(self) -> None:
        """As `check_machine`, for the host tier only."""
        available = available_memory()
        if self.host_size > available:
            raise ConfigError(
                f"host_size is {format_bytes(self.host_size)}, but only {format_bytes(available)} of memory is free: "
                "lower it, or free memory"
            )
        if isinstance(self.host_numa, int) and not _NODES.joinpath(f"node{self.host_numa}").exists():
            nodes = sorted(int(path.name.removeprefix("node")) for path in _NODES.glob("node[0-9]*"))
            raise ConfigError(f"host_numa is {self.host_numa}, but the NUMA nodes of this machine are {nodes}")

    def _check_directory(self, path: Path) -> None:
        try:
            existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        except OSError as error:  # a name that is too long, for instance
            raise ConfigError(f"file_path is {path}, which cannot be accessed: {error.strerror}") from error
        usage = shutil.disk_usage(existing)
        if not usage.total:  # /proc, for instance
            raise ConfigError(
                f"file_path is {path}, but the file system there holds no files: name a directory on a disk"
            )
        _check_writable("file_path", path, existing)
        ours = sum(f.stat().st_blocks * 512 for f in path.iterdir() if f.is_file()) if path.is_dir() else 0
        free = usage.free + ours
        if self.file_size > free:
            raise ConfigError(
                f"file_size is {format_bytes(self.file_size)}, but only {format_bytes(free)} is free at {path}: lower "
                "it, or free space"
            )


SECTIONS = {
    "Tiers": "host_size host_numa host_huge_pages host_shared file_path file_size file_mode file_threads remote serve "
    "peer_networks peer_url",
    "Writes": "eviction offload backup admission file_daily_writes threshold prompt_only priority_floor max_writes "
    "write_timeout",
    "Reads": "load_timeout gate prefill_speed request_hints prefetch prefetch_timeout",
    "Monitoring": "events_path events_size kv_events kv_events_replay kv_events_topic kv_events_remote control",
    "Others": "blocks_per_chunk background fixed_weights reset_keep sleep_keep salt calibration",
}
"""Names of all settings, by their section in the reference."""


class SettingReference(NamedTuple):
    """One setting, in words: its name, its section, the values allowed, its default, and its meaning with its unit."""

    name: str
    section: str
    values: str
    default: str
    meaning: str


def _check_writable(setting: str, path: Path, directory: Path) -> None:
    if not directory.is_dir():
        raise ConfigError(f"{setting} is {path}, but {directory} is not a directory")
    if not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{setting} is {path}, but {directory} is not readable and writable for this user")


def read_toml(path: str | Path) -> dict[str, Any]:
    """The unchecked settings in a TOML file; raises `ConfigError` if it is not valid TOML."""
    try:
        table = tomllib.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    settings = table.get("longshore", table)
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: expected longshore to be a table of settings, got {settings!r}")
    return settings


def parse_size(value: object) -> int:
    """Bytes of a size, at most 1 EiB: a whole number, or text such as `64GiB`. Raises `ValueError`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(_SIZE)
    try:
        count = int(_BYTE_SIZE.validate_python(value))
    except OverflowError:
        count = _MOST_BYTES + 1
    except ValidationError:
        raise ValueError(_SIZE) from None
    if count < 0:
        raise ValueError(f"{_SIZE}, and not negative")
    if count > _MOST_BYTES:
        raise ValueError("a size is at most 1 EiB")
    return count


def available_memory() -> int:
    """Bytes of memory that a new mapping can get without swapping: `MemAvailable`, or the cgroup's limit if lower.

    Memory used by a cgroup includes its page cache; the inactive part of that can be reclaimed and is not counted.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = _CGROUP.joinpath("memory.max").read_text().strip()
        used = int(_CGROUP.joinpath("memory.current").read_text())
        pages = dict(line.split() for line in _CGROUP.joinpath("memory.stat").read_text().splitlines())
        return available if limit == "max" else min(available, int(limit) - used + int(pages["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return available


def format_bytes(count: float) -> str:
    """`count` bytes in the largest binary unit that keeps it at or above one."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} EiB"


def _explain(detail: Any) -> str:
    if not detail["loc"]:
        return str(detail["msg"].removeprefix("Value error, "))
    key = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, Config.model_fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(Config.model_fields)}"
        return f"{key!r} is not a setting; {hint}"
    given = "" if key == "remote" else f" = {detail['input']!r}"  # there may be a password in a wrong URL
    return f"{key}{given}: {_accepted(key, detail)} ({Config.model_fields[key].description})"


def _accepted(key: str, detail: Any) -> str:
    """The values of a setting that was given another one."""
    if detail["type"] == "value_error":  # one of ours
        return str(detail["msg"].removeprefix("Value error, "))
    if detail["type"] in ("enum", "literal_error"):
        return f"expected {detail['ctx']['expected']}"
    return f"expected {_allowed(key)}"


def _allowed(key: str) -> str:
    """The values that a setting may have."""
    field = Config.model_fields[key]
    kind: Any = field.annotation
    choices: Sequence[Any] = [each.value for each in kind] if isinstance(kind, type(enum.Enum)) else get_args(kind)
    if choices and all(isinstance(each, str) for each in choices):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    kinds: dict[object, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a finite number",
        ByteSize: "a size",
        str: "text",
        tuple[str, ...]: "a list of texts",
        RequestHints: "a JSON object",
        int | Literal["auto", "off"]: "a whole number, auto or off",
    }
    bounds = {
        words: getattr(each, name)
        for name, words in (("gt", "above"), ("ge", "of at least"), ("le", "at most"))
        for each in field.metadata
        if hasattr(each, name)
    }
    limits = " and ".join(f"{words} {limit:,}" for words, limit in bounds.items())
    return f"{kinds.get(kind, 'a path')} {limits}".rstrip()


def _written(key: str) -> str:
    """The default of a setting, as a TOML file has it; empty if the setting is unset."""
    default = Config.model_fields[key].default
    if isinstance(default, RequestHints):
        return json.dumps(default.model_dump(exclude_defaults=True))
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, ByteSize) and default:
        return format_bytes(default).replace(".0 ", "")
    return "" if default in {None, "", ()} else str(getattr(default, "value", default))
