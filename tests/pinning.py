"""Stand-ins for what pins host memory: a device that knows registered ranges, and a CUDA runtime that leaves errors."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection

from longshore.errors import RegistrationError

ALREADY_REGISTERED = 712
OUT_OF_MEMORY = 2


class PinningDevice:
    """Registers ranges of whole pages that do not overlap, except the n-th ones of `refused`, counted from 0."""

    def __init__(self, refused: Collection[int] = (), kept: Collection[int] = ()) -> None:
        self.ranges: dict[int, int] = {}
        self.asked: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.before_unregister: Callable[[], object] = lambda: None
        self._refused = refused
        self._kept = kept

    def register(self, address: int, nbytes: int) -> None:
        self.asked.append((address, nbytes))
        if address % mmap.PAGESIZE or any(address < a + n and a < address + nbytes for a, n in self.ranges.items()):
            raise AssertionError(f"{nbytes} bytes at {address:#x} are not whole pages of their own")
        if len(self.asked) - 1 in self._refused:
            raise RegistrationError("the device is full")
        self.ranges[address] = nbytes

    def unregister(self, address: int) -> None:
        self.before_unregister()
        self.unregistered.append(address)
        if len(self.unregistered) - 1 in self._kept:
            raise RegistrationError("the device does not answer")
        del self.ranges[address]

    def reaches(self, address: int, nbytes: int) -> bool:
        """Whether one copy of these bytes would work: a range that spans two registrations does not."""
        return any(a <= address and address + nbytes <= a + n for a, n in self.ranges.items())


class CudaStandIn:
    """A CUDA runtime: a call that fails returns its code, and leaves it behind for whoever asks next."""

    def __init__(self, refused: Collection[int] = (), pci: str | None = "0000:3B:00.0") -> None:
        self.device = PinningDevice(refused)
        self.flags: set[int] = set()
        self.left_behind = 0
        self._pci = pci

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        self.flags.add(flags)
        try:
            self.device.register(address, nbytes)
        except RegistrationError:
            self.left_behind = OUT_OF_MEMORY
            return OUT_OF_MEMORY
        return 0

    def host_unregister(self, address: int) -> int:
        if address not in self.device.ranges:
            self.left_behind = ALREADY_REGISTERED + 1
            return ALREADY_REGISTERED + 1
        self.device.unregister(address)
        return 0

    def take_last_error(self) -> int:
        code, self.left_behind = self.left_behind, 0
        return code

    def error_name(self, code: int) -> str:
        return {OUT_OF_MEMORY: "cudaErrorMemoryAllocation"}.get(code, "cudaErrorHostMemoryNotRegistered")

    def pci_address(self) -> str:
        if self._pci is None:
            raise RegistrationError("no such device")
        return self._pci
