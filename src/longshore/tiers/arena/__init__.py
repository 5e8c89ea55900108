"""The host arena: one mapping that holds block images, placed, touched and registered before its first use.

arena.py         Arena: its start, its end, and what is in between
memory.py        the mapping: exact, aligned, guarded; private, or shared with other processes
numa.py          which node a device hangs on; a mapping on one node
huge_pages.py    huge pages: asked for, and counted
populate.py      all pages touched, by several threads
registration.py  pieces that no slot straddles, made known to a device
cuda.py          the CUDA runtime's side of that
report.py        what was had, and every fallback
system.py        the calls of the operating system, in one place
"""

from longshore.tiers.arena.arena import Arena, ArenaSettings
from longshore.tiers.arena.memory import PAGE, align
from longshore.tiers.arena.registration import Registrar
from longshore.tiers.arena.report import ArenaReport, Fallback

__all__ = ["PAGE", "Arena", "ArenaReport", "ArenaSettings", "Fallback", "Registrar", "align"]
