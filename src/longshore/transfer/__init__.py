"""The data plane at the device's edge: copies between device pages and block images in the host arena.

rectangles.py  a section's blocks, laid over its chunks
selection.py   which pages of which blocks move: every id checked, before anything does
plan.py        from there to arrays of addresses and sizes
inside.py      the same for copies inside the device
hazards.py     who must wait for whom
engine.py      the mover: submit, wait, results
lane.py        one direction: what is copied next, given to the device, ended in order
job.py         a transfer in flight, and what the lanes know of each other
driver.py      what makes the lanes go on: threads
device/        how bytes are copied on one kind of device
"""

from longshore.transfer.device import CpuDevice, Device, device_for
from longshore.transfer.engine import INSIDE, OFFLOAD, ONBOARD, TransferEngine, TransferStats
from longshore.transfer.host_side import HostMemory, HostSlots

__all__ = [
    "INSIDE",
    "OFFLOAD",
    "ONBOARD",
    "CpuDevice",
    "Device",
    "HostMemory",
    "HostSlots",
    "TransferEngine",
    "TransferStats",
    "device_for",
]
