"""A small inference engine in plain torch, with Longshore under its paged KV cache.

model.py      a tiny decoder: full and sliding-window attention over pages; calls a hook before each layer
pool.py       the device's blocks: which are free, which hold a known prefix
connector.py  the connection to the tiers: Longshore, or none; copies in flight
engine.py     requests: admit, compute, publish; sleep and wake up
__main__.py   a demonstration

Begin with `engine.py`, then `connector.py`: together they are all that an engine has to do.
"""

from examples.reference_engine.connector import NoTiers, PendingCopy, Tiers, cache_groups
from examples.reference_engine.engine import Engine, Request, Schedule
from examples.reference_engine.model import Decoder, Group, Shape
from examples.reference_engine.pool import DevicePool

__all__ = [
    "Decoder",
    "DevicePool",
    "Engine",
    "Group",
    "NoTiers",
    "PendingCopy",
    "Request",
    "Schedule",
    "Shape",
    "Tiers",
    "cache_groups",
]
