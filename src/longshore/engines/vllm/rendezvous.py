"""Where the processes of one engine find their shared memory: a rank of its workers makes it, the others attach.

    rank 0      make arena and tables ─► publish a note        (a small file that only this user can read)
    ranks > 0                             read the note ─► attach
    scheduler   (starts when all ranks are there)  ─► read the note ─► attach ─► remove the note

The memory has no name: it is freed with the last process that maps it, also when all of them are killed.
"""

from __future__ import annotations

import contextlib
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
"""Seconds to wait for the rank that makes the memory: it touches every page of it."""


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The shared memory of one engine, as rank 0 publishes it.

    Attributes:
        arena: Where the arena is found, as a path.
        reports: Where the reports of the ranks are.
        slab_bytes: As in `Slabs`, as are the next two.
        image_bytes: Sizes of images, by pool.
        slabs: Number of slabs.
        pools: The pool of each KV cache group's images.
        ranks: Ranks whose parts make an image.
        world: Ranks that there are.
        fingerprint: Of the layout.
        device: What computes the bytes.
        model: What the workers know of the model.
    """

    arena: str
    reports: str
    slab_bytes: int
    image_bytes: tuple[int, ...]
    slabs: int
    pools: tuple[int, ...]
    ranks: int
    world: int
    fingerprint: str
    device: str
    model: ModelIdentity

    @classmethod
    def read(cls, text: str) -> EngineMemory:
        """Parse what `publish` wrote."""
        fields = json.loads(text)
        sequences = {name: tuple(fields[name]) for name in ("image_bytes", "pools")}
        return cls(**{**fields, **sequences, "model": ModelIdentity.from_fields(fields["model"])})

    @property
    def layout(self) -> Slabs:
        """The placement of images in the arena."""
        return Slabs(self.slab_bytes, self.image_bytes, self.slabs)


def rendezvous_path(engine: str) -> Path:
    """Where the note of an engine lies. The directory belongs to this user alone, or `EngineError`."""
    return user_directory() / f"{hashlib.sha256(engine.encode()).hexdigest()[:24]}.json"


def publish(engine: str, note: EngineMemory) -> None:
    """Publish the memory to the other processes of `engine`, atomically."""
    path = rendezvous_path(engine)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(note), file)
    draft.replace(path)


def find(engine: str, timeout: float = TIMEOUT, *, nap: Callable[[float], None] = time.sleep) -> EngineMemory:
    """The note of `engine`, when it is there and what it names is. Raises `EngineError` after `timeout` seconds."""
    path, deadline = rendezvous_path(engine), time.monotonic() + timeout
    while True:
        with contextlib.suppress(FileNotFoundError):
            note = EngineMemory.read(path.read_text())
            if Path(note.arena).exists():  # else it is left over from an engine that was killed
                return note
        if time.monotonic() > deadline:
            raise EngineError(
                f"no worker of engine {engine} has allocated the host memory within {timeout:.0f} seconds; see its log"
            )
        nap(0.02)


def withdraw(engine: str) -> None:
    """Remove the note, after all processes have read it."""
    rendezvous_path(engine).unlink(missing_ok=True)


def attach(note: EngineMemory) -> tuple[Arena, RankReports]:
    """Attach to the memory that a note names."""
    slots = note.layout.indices
    arena = Arena.attach(Path(note.arena), note.layout.nbytes)
    reports = Arena.attach(Path(note.reports), RankReports.nbytes(slots, note.world))
    return arena, RankReports(reports, slots, note.world, note.ranks)
