"""One typed object for all settings, from Python, a TOML file or command-line flags.

Sizes are totals over all ranks, as numbers of bytes or as text: `"64GiB"`, `"1.5TB"`. Errors name the key, the value
and what is allowed. `Config.check_machine` compares the sizes with what the machine has, before anything is allocated.
"""

from __future__ import annotations

import difflib
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, model_validator

from longshore.cache.writing import WritePolicy
from longshore.errors import ConfigError


class Config(BaseModel):
    """Settings of one engine's tiers."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    host_size: ByteSize = Field(ByteSize(4 << 30), gt=0, description="bytes of host memory for block images")
    file_path: Path | None = Field(None, description="directory of the file tier; without one there is none")
    file_size: ByteSize = Field(ByteSize(0), ge=0, description="bytes on disk for the file tier")
    offload: WritePolicy = Field(WritePolicy.THROUGH, description="when blocks go from the device to the host tier")
    backup: WritePolicy = Field(WritePolicy.BACK, description="when blocks go from the host tier to the file tier")
    blocks_per_chunk: int = Field(1, ge=1, le=4096, description="device blocks in one block image")
    load_timeout: float = Field(10.0, gt=0, description="seconds after which a load is given up, and recomputed")
    write_timeout: float = Field(60.0, gt=0, description="seconds after which a write that has not begun is dropped")
    max_writes: int = Field(1024, ge=1, description="chunks in flight per write route")
    file_threads: int = Field(4, ge=1, le=256, description="threads of the file tier")
    background: bool = Field(True, description="move blocks between the engine's steps, in a thread")
    salt: str = Field("", description="part of every key: tenants with different salts never share blocks")

    @model_validator(mode="after")
    def _file_tier_is_whole(self) -> Self:
        if (self.file_path is None) != (self.file_size == 0):
            raise ValueError("file_path and file_size go together: give both, or neither")
        return self

    @classmethod
    def make(cls, **settings: Any) -> Config:
        """A configuration from keyword arguments; raises `ConfigError`."""
        try:
            return cls(**settings)
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(detail) for detail in error.errors())) from None

    @classmethod
    def from_toml(cls, path: Path, **overrides: Any) -> Config:
        """A configuration from the table `[longshore]` of a TOML file, or from its top level; flags override it."""
        try:
            table = tomllib.loads(path.read_text())
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return cls.make(**{**table.get("longshore", table), **overrides})

    def check_machine(self) -> None:
        """Raise `ConfigError` if the machine cannot give what is asked for, with the figure that was found."""
        available = available_memory()
        if self.host_size > available:
            raise ConfigError(
                f"host_size is {format_bytes(self.host_size)}, but only {format_bytes(available)} of memory is free"
            )
        if self.file_path is not None:
            self._check_directory(self.file_path)

    def _check_directory(self, path: Path) -> None:
        existing = next(p for p in (path, *path.absolute().parents) if p.exists())
        if not existing.is_dir():
            raise ConfigError(f"file_path is {path}, but {existing} is not a directory")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"file_path is {path}, but {existing} is not writable")
        ours = sum(f.stat().st_blocks * 512 for f in path.iterdir() if f.is_file()) if path.is_dir() else 0
        free = shutil.disk_usage(existing).free + ours
        if self.file_size > free:
            raise ConfigError(
                f"file_size is {format_bytes(self.file_size)}, but only {format_bytes(free)} is free at {path}"
            )


def available_memory() -> int:
    """Bytes of memory that a new mapping can get without swapping: `MemAvailable`, or the cgroup's limit if lower."""
    with Path("/proc/meminfo").open() as file:
        fields = dict(line.split(":", 1) for line in file)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - used))


def format_bytes(count: float) -> str:
    """`count` bytes in the largest binary unit that keeps it at or above one."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _explain(detail: Any) -> str:
    key = ".".join(map(str, detail["loc"])) or "settings"
    if detail["type"] == "extra_forbidden":
        close = difflib.get_close_matches(key, Config.model_fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(Config.model_fields)}"
        return f"{key!r} is not a setting; {hint}"
    about = Config.model_fields[key].description if key in Config.model_fields else None
    given = "" if key == "settings" else f" = {detail['input']!r}"
    return f"{key}{given}: {detail['msg']}" + (f" ({about})" if about else "")
