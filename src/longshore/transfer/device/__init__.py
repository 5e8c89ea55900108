"""How bytes are copied on one kind of device, behind one small seam.

base.py           Device, Stream, Event: the seam
cpu.py            the engine's tensors are in host memory
torch_streams.py  any accelerator that torch knows, through streams and events
"""

from longshore.layout.model import KVLayout
from longshore.transfer.device.base import Device, Event, Stream
from longshore.transfer.device.cpu import CpuDevice

__all__ = ["CpuDevice", "Device", "Event", "Stream", "device_for"]


def device_for(layout: KVLayout) -> Device:
    """The device that the tensors of `layout` are on. Imports torch when it is not the CPU."""
    if layout.device == "cpu":
        return CpuDevice()
    from longshore.transfer.device.torch_streams import TorchDevice  # noqa: PLC0415 - torch is optional

    return TorchDevice(layout.device)
