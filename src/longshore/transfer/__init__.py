"""The data plane at the device: copies between device pages and block images in the host arena.

plan.py        the plan of a transfer: validation of all ids, unaligned and partial chunks, which pages move
pieces.py      batches of pages, how they are cut, and their arrays of addresses and sizes
engine.py      the mover: submit, wait, results
lanes.py       one direction: choice of the next copy, submission to the device, completion in order; dependencies
               between jobs; threads that run the lanes
device/        copies on each kind of device
"""

from longshore.transfer.device import CpuDevice, Device, device_for
from longshore.transfer.engine import INSIDE, OFFLOAD, ONBOARD, TransferEngine, TransferStats
from longshore.transfer.plan import HostMemory, HostSlots

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
