"""Copies on each kind of device, behind one small interface.

base.py           Device, Stream, Copy, DeviceEvent: the interface; CpuDevice: tensors in host memory
torch_streams.py  any accelerator of torch, with streams and pooled events
cuda/             NVIDIA GPUs: batched DMA, kernels, and a choice between them by measurement
"""

from __future__ import annotations

import logging
from pathlib import Path

from longshore.errors import DeviceError
from longshore.layout.model import KVLayout
from longshore.transfer.device.base import CpuDevice, Device, DeviceEvent, Stream

__all__ = ["CpuDevice", "Device", "DeviceEvent", "Stream", "device_for"]

_log = logging.getLogger(__name__)


def device_for(layout: KVLayout, calibration: Path | None = None) -> Device:
    """The device of the tensors of `layout`. Imports torch if it is not the CPU.

    `calibration` is the calibration file of a CUDA device.
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
