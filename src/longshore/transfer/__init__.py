"""The data plane at the device: copies between device pages and chunk images in the host arena.

copy_plan.py   the plan of a transfer: validation of all ids, unaligned and partial chunks, which pages move
pieces.py      batches of pages, how they are cut, and their arrays of addresses and sizes
engine.py      the mover: submit, wait, results
ordering.py    lanes, one per direction: choice of the next copy, submission to the device, completion in order;
               dependencies between jobs and on the engine's compute; threads that run the lanes
device/        copies on each kind of device

Terms, from the largest to the smallest:

    section     the device blocks of one KV cache group in a transfer (`boundary.Section`)
    rectangle   consecutive chunks of a section, with the same consecutive blocks of each chunk (`copy_plan.Rectangle`)
    part        a rectangle, and the pages of its blocks that are copied (`pieces.CopyPart`)
    batch       parts that are submitted to the device together; a job is cut into batches (`pieces.CopyBatch`)
    run         blocks that are adjacent in device memory and in the image, copied as one piece (`pieces.BlockRuns`)
    piece       consecutive bytes that are copied at once: an address on each side and a size (`pieces.Pieces`)
"""

from longshore.transfer.copy_plan import HostMemory, HostSlots
from longshore.transfer.device import CpuDevice, Device, device_for
from longshore.transfer.engine import D2D, D2H, H2D, TransferEngine, TransferStats

__all__ = [
    "D2D",
    "D2H",
    "H2D",
    "CpuDevice",
    "Device",
    "HostMemory",
    "HostSlots",
    "TransferEngine",
    "TransferStats",
    "device_for",
]
