"""The host arena: one mapping for chunk images, placed, touched and registered before its first use.

arena.py         Arena: the whole life cycle; its report, with every fallback
memory.py        the mapping, its NUMA node, huge pages, first touch; the system calls for them
pinning.py       registration (pinning) with a device, in pieces that no slot straddles; with CUDA
"""

from longshore.boundary import DISK_PAGE, align
from longshore.tiers.arena.arena import Arena, ArenaReport, ArenaSettings, Fallback
from longshore.tiers.arena.pinning import Registrar

__all__ = ["DISK_PAGE", "Arena", "ArenaReport", "ArenaSettings", "Fallback", "Registrar", "align"]
