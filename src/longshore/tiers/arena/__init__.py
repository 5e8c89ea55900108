"""The host arena: one mapping for block images, placed, touched and registered before its first use.

arena.py         Arena: the whole life cycle; its report, with every fallback
memory.py        operating system calls; the mapping: exact, aligned, guarded; private, or shared with other processes
numa.py          the NUMA node of a device; binding of a mapping
huge_pages.py    huge pages: request and verification
populate.py      touching all pages with several threads
registration.py  registration with a device, in pieces that no slot straddles
cuda.py          registration with CUDA
"""

from longshore.boundary import PAGE, align
from longshore.tiers.arena.arena import Arena, ArenaReport, ArenaSettings, Fallback
from longshore.tiers.arena.registration import Registrar

__all__ = ["PAGE", "Arena", "ArenaReport", "ArenaSettings", "Fallback", "Registrar", "align"]
