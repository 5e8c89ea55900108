"""How bytes are copied on one kind of device, behind one small seam.

base.py           Device, Stream, Copy, Event: the seam
cpu.py            the engine's tensors are in host memory
torch_streams.py  any accelerator that torch knows, through streams and events
cuda/             NVIDIA GPUs: batched DMA, kernels, and a choice between them by measurement
accelerator.py    what the last two share: pooled events, counted fallbacks
"""

from __future__ import annotations

import logging
from pathlib import Path

from longshore.errors import DeviceError
from longshore.layout.model import KVLayout
from longshore.transfer.device.base import Device, Event, Stream
from longshore.transfer.device.cpu import CpuDevice

__all__ = ["CpuDevice", "Device", "Event", "Stream", "device_for"]

_log = logging.getLogger(__name__)


def device_for(layout: KVLayout, calibration: Path | None = None) -> Device:
    """The device that the tensors of `layout` are on. Imports torch when it is not the CPU.

    `calibration` is the file that says which way of copying is the fastest on a CUDA device.
    """
    if layout.device == "cpu":
        return CpuDevice()
    if layout.device.startswith("cuda"):
        from longshore.transfer.device.cuda.device import CudaDevice  # noqa: PLC0415 - torch is optional

        try:
            return CudaDevice(layout.device, calibration=calibration)
        except DeviceError as error:  # a build of torch for another maker's GPUs calls them cuda, too
            _log.warning(
                "CUDA driver cannot be used for %s, copying through torch instead, which is slower: %s",
                layout.device,
                error,
            )
    from longshore.transfer.device.torch_streams import TorchDevice  # noqa: PLC0415

    return TorchDevice(layout.device)
