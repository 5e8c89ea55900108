"""The host tier: slots for chunk images inside the arena itself.

    arena   │ slot 0 │ slot 1 │ ... │ slot n-1 │ ...     with one image size; `longshore.boundary` for several
            0        image_bytes

The transfer engine, too, accesses a slot by its arena offset (`Slabs.offsets`). `longshore.tiers.mover` moves images
between the host tier and colder ones.
"""

from __future__ import annotations

from longshore.boundary import DISK_PAGE, Slabs
from longshore.errors import TierError
from longshore.tiers.arena import Arena


class HostSlabs:
    """`slabs` of images in `arena`, one after the other from its start.

    Attributes:
        slabs: Numbering and sizes of its slots, and their offsets in the arena.
        arena: Where they are; its owner closes it.
    """

    def __init__(self, arena: Arena, slabs: Slabs) -> None:
        """Raises `TierError` for slabs that are not whole pages, or that the arena has no room for."""
        if slabs.slabs <= 0:
            raise TierError(f"a host tier needs at least one slab, got {slabs.slabs}")
        if any(size % DISK_PAGE for size in (slabs.slab_bytes, *slabs.image_bytes)):
            raise TierError(f"slabs and images must be multiples of {DISK_PAGE} bytes, got {slabs}")
        if slabs.nbytes > arena.nbytes:
            raise TierError(f"{slabs} need {slabs.nbytes} bytes, but the arena has {arena.nbytes}")
        self.slabs = slabs
        self.arena = arena
