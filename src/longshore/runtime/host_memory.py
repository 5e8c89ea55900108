"""The host arena for a `Config`, on the NUMA node of the engine's device and registered with it."""

from __future__ import annotations

import contextlib

from longshore.config import Config
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.arena.cuda import CudaRegistrar, TorchCudaRuntime


def registrar_for(device: str) -> CudaRegistrar | None:
    """The registrar of host memory for `device`, such as `cuda:0`; `None` if none is needed. May import torch."""
    return CudaRegistrar(TorchCudaRuntime(device)) if device.startswith("cuda") else None


def open_arena(config: Config, slots: int, image_bytes: int, registrar: CudaRegistrar | None) -> Arena:
    """An arena for exactly `slots` images. Raises `TierError`, with nothing left behind, if there is no memory."""
    settings = ArenaSettings(
        numa_node=None if config.host_numa == "off" else config.host_numa,
        pci_address=None if registrar is None else registrar.pci_address(),
        huge_pages=config.host_huge_pages,
        shared=config.host_shared,
    )
    with contextlib.ExitStack() as undo:
        arena = Arena(slots * image_bytes, settings)
        undo.callback(arena.close)
        if registrar is not None:
            arena.register(registrar, image_bytes)
        undo.pop_all()
    return arena
