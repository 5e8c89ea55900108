"""A device without hardware: streams and events on which copies run when a scheduler says so.

clocks.py   what is ordered: vector clocks, and accesses that nothing orders
world.py    the scheduler: script, lanes and queues, one step of one of them at a time
streams.py  the device: real bytes of a real layout, copied in two halves
explore.py  every order of a small story, or many by chance

The engine, its lanes and its hazards are those of production; only what drives them differs.
"""

from longshore.transfer.device.simulated.explore import Explored, Story, WrongError, explore, sample
from longshore.transfer.device.simulated.streams import SimulatedDevice
from longshore.transfer.device.simulated.world import Queue, StuckError, World

__all__ = ["Explored", "Queue", "SimulatedDevice", "Story", "StuckError", "World", "WrongError", "explore", "sample"]
