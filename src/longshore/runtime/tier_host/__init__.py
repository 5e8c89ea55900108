"""Tiers in processes of their own, so that their I/O takes no interpreter time of the engine; one process for each.

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
