"""Tier hosts: processes that do the I/O of one file tier or store each, which takes no interpreter time of the engine.

Not to be confused with the host tier, which is the chunks in host memory: a tier host has none, and maps that memory.

    engine's process                                 tier host (`child.py`)
    Runtime ── TierMover ─── HostedFileTier ══pipe══► FileTier ── threads ── files
           └── KeyedMover ─ HostedRemoteTier ════pipe══► RemoteTier ─ threads ── a store that replicas share
                                   │     ◄════pipe══     │
    host arena ════════════════════╧══ shared memory ════╧═ (the bytes never pass through the pipes)

The control plane stays in the engine's process; the pipes carry operations and statuses (`wire.py`).
"""

from longshore.runtime.tier_host.remote import HostedRemoteTier
from longshore.runtime.tier_host.tier import FAILURE_REASONS, HostedFileTier

__all__ = ["FAILURE_REASONS", "HostedFileTier", "HostedRemoteTier"]
