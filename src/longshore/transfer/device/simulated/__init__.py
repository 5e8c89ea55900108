"""A simulated device: a scheduler decides when copies on its streams run.

clocks.py   vector clocks, and detection of accesses without an order
world.py    the scheduler: script, lanes and queues, one step of one of them at a time
streams.py  the device: real bytes of a real layout, copied in two halves
explore.py  all orders of a small test case, or random ones

The engine, its lanes and its hazards are those of production; only the driver differs.
"""

from longshore.transfer.device.simulated.explore import Explored, Story, WrongError, explore, sample
from longshore.transfer.device.simulated.streams import SimulatedDevice
from longshore.transfer.device.simulated.world import Queue, StuckError, World

__all__ = ["Explored", "Queue", "SimulatedDevice", "Story", "StuckError", "World", "WrongError", "explore", "sample"]
