"""A simulated device: a scheduler decides when copies on its streams run.

simulation.py  the scheduler: script, lanes and queues, one step of one of them at a time; vector clocks
device.py      the device: real bytes of a real layout, copied in two halves
explore.py     all orders of a small test case, or random ones

The engine, its lanes and its hazards are those of production; only the driver differs.
"""

from longshore.testing.simulated_device.device import SimulatedDevice
from longshore.testing.simulated_device.explore import Explored, Story, WrongError, explore, sample
from longshore.testing.simulated_device.simulation import SimulatedQueue, Simulation, StuckError

__all__ = [
    "Explored",
    "SimulatedDevice",
    "SimulatedQueue",
    "Simulation",
    "Story",
    "StuckError",
    "WrongError",
    "explore",
    "sample",
]
