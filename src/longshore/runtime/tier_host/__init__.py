"""The file tier in a separate process, so that its I/O takes no interpreter time of the engine.

    engine's process                                 tier host (`child.py`)
    Runtime ── TierMover ── HostedFileTier ══pipe══► FileTier ── threads ── files
                                  │      ◄══pipe══       │
    host arena ═══════════════════╧══════ shared memory ═╧═ (the bytes never pass through the pipes)

The control plane stays in the engine's process; the pipes carry operations and statuses (`wire.py`).
"""

from longshore.runtime.tier_host.tier import TROUBLES, HostedFileTier

__all__ = ["TROUBLES", "HostedFileTier"]
