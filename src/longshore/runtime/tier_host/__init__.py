"""The file tier in a process of its own, so that its reads and writes cost whoever computes no interpreter time.

    engine's process                                 tier host (`child.py`)
    Runtime ── TierMover ── HostedFileTier ══pipe══► FileTier ── threads ── files
                                  │      ◄══pipe══       │
    host arena ═══════════════════╧══════ shared memory ═╧═ (the bytes never pass through the pipes)

The control plane stays where it is; what crosses are operations and statuses (`wire.py`).
"""

from longshore.runtime.tier_host.tier import TROUBLES, HostedFileTier

__all__ = ["TROUBLES", "HostedFileTier"]
