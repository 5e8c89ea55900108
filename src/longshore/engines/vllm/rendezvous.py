"""How the processes of one engine find their shared memory: rank 0 of its workers allocates it, the others attach.

    rank 0      allocate arena and tables ─► record_memory_info   (a small file that only this user can read)
    ranks > 0                                wait_for_memory_info ─► attach
    scheduler   (starts after all ranks)     wait_for_memory_info ─► attach ─► remove_memory_info

The memory has no name: it is freed with the last process that maps it, also when all of them are killed.

Engines that start at the same time may have been given the same `engine_id`. So the name of a file also has that of the
engine's instance, which vLLM tells the ranks. It does not tell the scheduler: of several files, the scheduler takes the
one that its process or a child of it has written.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from longshore.boundary import Slabs
from longshore.engines.vllm.model import ModelIdentity
from longshore.errors import EngineError
from longshore.runtime.control import user_directory
from longshore.runtime.rank_reports import RankReports
from longshore.tiers.arena import Arena

TIMEOUT = 300.0
"""Seconds to wait for rank 0, which allocates every page of the memory."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory info: what the processes of one engine need to attach to its shared memory.

    Attributes:
        arena: Where the arena is found, as a path.
        reports: Where the reports of the ranks are.
        slab_bytes: As in `Slabs`, as are the next two.
        image_bytes: Sizes of images, by size class.
        slabs: Number of slabs.
        size_classes: The size class of each KV cache group's images.
        ranks: Ranks whose parts make an image.
        world: Ranks that there are.
        fingerprint: Of the layout.
        device: What computes the bytes.
        model: What the workers know of the model.
        instance: The number of the engine's instance.
        writers: The process of rank 0, and its parent.
    """

    arena: str
    reports: str
    slab_bytes: int
    image_bytes: tuple[int, ...]
    slabs: int
    size_classes: tuple[int, ...]
    ranks: int
    world: int
    fingerprint: str
    device: str
    model: ModelIdentity
    instance: str = ""
    writers: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: str) -> EngineMemory:
        """Parse what `record_memory_info` wrote."""
        fields = json.loads(text)
        sequences = {name: tuple(fields[name]) for name in ("image_bytes", "size_classes", "writers")}
        return cls(**{**fields, **sequences, "model": ModelIdentity.from_fields(fields["model"])})

    @property
    def layout(self) -> Slabs:
        """The placement of images in the arena."""
        return Slabs(self.slab_bytes, self.image_bytes, self.slabs)


def memory_info_path(engine_id: str, instance: str = "") -> Path:
    """The file with an engine's memory info. Raises `EngineError` if others can write to its directory."""
    return user_directory() / f"{_digest(engine_id)}-{_digest(instance)}.json"


def record_memory_info(engine_id: str, memory: EngineMemory) -> None:
    """Write the memory info for the other processes of the engine, atomically."""
    path = memory_info_path(engine_id, memory.instance)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(memory), file)
    draft.replace(path)


def wait_for_memory_info(
    engine_id: str,
    instance: str | None = None,
    timeout: float = TIMEOUT,
    *,
    nap: Callable[[float], None] = time.sleep,
) -> EngineMemory:
    """Wait until rank 0 of this `instance` of the engine, or else of the engine of this process, has written its file.

    Raises `EngineError` after `timeout` seconds, or if several engines start and it is not known which one it is.
    """
    deadline = time.monotonic() + timeout
    while True:
        paths = _paths(engine_id) if instance is None else [memory_info_path(engine_id, instance)]
        found = [memory for path in paths if (memory := _read(path)) is not None]
        if len(found) > 1:
            found = [memory for memory in found if os.getpid() in memory.writers] or found
        if len(found) > 1:
            raise EngineError(
                f"{len(found)} engines with the engine_id {engine_id} are starting on this machine: give each one of "
                "its own in --kv-transfer-config, or none"
            )
        if found:
            return found[0]
        if time.monotonic() > deadline:
            raise EngineError(
                f"no worker of engine {engine_id} has allocated the host memory within {timeout:.0f} seconds; "
                "see its log"
            )
        nap(0.02)


def remove_memory_info(engine_id: str, memory: EngineMemory) -> None:
    """Remove the memory info, after all processes have read it; and what engines of that name left that were killed."""
    memory_info_path(engine_id, memory.instance).unlink(missing_ok=True)
    for path in _paths(engine_id):
        if _read(path) is None:
            path.unlink(missing_ok=True)


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _paths(engine_id: str) -> list[Path]:
    return sorted(user_directory().glob(f"{_digest(engine_id)}-*.json"))


def _read(path: Path) -> EngineMemory | None:
    """The memory info in a file; `None` if it is not there, or left over from an engine that was killed."""
    try:
        memory = EngineMemory.read(path.read_text())
    except FileNotFoundError:
        return None
    return memory if Path(memory.arena).exists() else None


def attach(memory: EngineMemory) -> tuple[Arena, RankReports]:
    """Attach to `memory`: the arena, and the table of the reports of the ranks."""
    slots = memory.layout.indices
    arena = Arena.attach(Path(memory.arena), memory.layout.nbytes)
    reports = Arena.attach(Path(memory.reports), RankReports.nbytes(slots, memory.world))
    return arena, RankReports(reports, slots, memory.world, memory.ranks)
