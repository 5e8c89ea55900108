"""The calls that need an NVIDIA GPU: the CUDA driver's, with ctypes, and torch's and Triton's (`CudaAccelerator`).

    Driver.copy(stream, destination, source, size)       arrays of addresses, as numpy has them
        └─ at most 4,096 at a time ─► cuMemcpyBatchAsync as of CUDA 12.8, or 13.0, else cuMemcpyAsync one by one

The driver's functions come from a library object, so that tests can use a stand-in without a driver. Layouts
and rules are those of `cuda.h` (CUDA 12.8 and 13.0): the stream must not be the legacy null stream, a source order of 0
is invalid, the indices of attributes are as many as the attributes, and no two copies of a call may depend on another.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import numpy as np
import torch

from longshore.errors import DeviceError
from longshore.layout.model import U64
from longshore.transfer.device.cuda.arguments import KernelShape
from longshore.transfer.device.torch_streams import Accelerator

_log = logging.getLogger(__name__)

MOST = 4096
"""Copies in one call: a driver crashed at more than about 50,000."""

SOURCE_IN_STREAM_ORDER = 1
PREFER_OVERLAP = 1  # slow by a factor of 18 between two addresses on the device: for the link only

_NULL_STREAMS = (0, 1)  # the legacy default stream, by both of its names
_NO_INDEX = ctypes.c_size_t(-1).value

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the legacy default stream
RELAXED = 2
"""`CU_STREAM_CAPTURE_MODE_RELAXED`: the thread's calls do not invalidate another thread's graph capture."""

_HOST_POINTERS_SERVE = 91  # CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM


class MemLocation(ctypes.Structure):
    """`CUmemLocation`; 0 means none, which is right for memory that does not migrate."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", MemLocation),
        ("destination_hint", MemLocation),
        ("flags", ctypes.c_uint),
    )


_Result = ctypes.c_int
_Address = ctypes.c_void_p

GET_PROC_ADDRESS = ctypes.CFUNCTYPE(
    _Result, ctypes.c_char_p, ctypes.POINTER(_Address), ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)
)
_BATCH = (_Address, _Address, _Address, ctypes.c_size_t, ctypes.POINTER(MemcpyAttributes), _Address, ctypes.c_size_t)
BATCH_12_8 = ctypes.CFUNCTYPE(_Result, *_BATCH, ctypes.POINTER(ctypes.c_size_t), _Address)
BATCH_13_0 = ctypes.CFUNCTYPE(_Result, *_BATCH, _Address)
COPY_ONE = ctypes.CFUNCTYPE(_Result, _Address, _Address, ctypes.c_size_t, _Address)
ERROR_NAME = ctypes.CFUNCTYPE(_Result, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
INIT = ctypes.CFUNCTYPE(_Result, ctypes.c_uint)
VERSION = ctypes.CFUNCTYPE(_Result, ctypes.POINTER(ctypes.c_int))
GET_ATTRIBUTE = ctypes.CFUNCTYPE(_Result, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)
GET_CONTEXT = ctypes.CFUNCTYPE(_Result, ctypes.POINTER(_Address))
RETAIN_CONTEXT = ctypes.CFUNCTYPE(_Result, ctypes.POINTER(_Address), ctypes.c_int)
SET_CONTEXT = ctypes.CFUNCTYPE(_Result, _Address)
CREATE_STREAM = ctypes.CFUNCTYPE(_Result, ctypes.POINTER(_Address), ctypes.c_uint, ctypes.c_int)
DESTROY_STREAM = ctypes.CFUNCTYPE(_Result, _Address)
CAPTURE_MODE = ctypes.CFUNCTYPE(_Result, ctypes.POINTER(ctypes.c_int))
PCI_ADDRESS = ctypes.CFUNCTYPE(_Result, _Address, ctypes.c_int, ctypes.c_int)


def load() -> Any:
    """The driver's library, `libcuda.so.1`; `DeviceError` if it cannot be loaded."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(f"cannot load the CUDA driver: {error}") from error


class Driver:
    """The driver's calls. Any thread with a context may use it.

    Attributes:
        batch_version: Version of the batched call, in CUDA's numbering (12080); `None` if copies are made one by one.
        version: Newest CUDA version that the driver serves (13000).

    Raises:
        DeviceError: From every method, if a call failed; names the call and the error.
    """

    def __init__(self, library: Any) -> None:
        """`library` has the driver's functions as attributes, as `ctypes.CDLL` does."""
        self._library = library
        self._error_name = self._function("cuGetErrorName", ERROR_NAME)
        self._copy_one = self._function("cuMemcpyAsync", COPY_ONE)
        self._check(self._function("cuInit", INIT)(0), "cuInit")
        version = ctypes.c_int()
        self._check(self._function("cuDriverGetVersion", VERSION)(ctypes.byref(version)), "cuDriverGetVersion")
        self.version = version.value
        self._contexts: dict[int, int] = {}
        self._batch_12_8: Any = None
        self._batch_13_0: Any = None
        self.batch_version = self._find_batch()
        self._indices = np.zeros(1, dtype=np.uint64)  # one attribute, which holds from copy 0 on
        self._attributes = MemcpyAttributes(SOURCE_IN_STREAM_ORDER, MemLocation(), MemLocation(), PREFER_OVERLAP)

    def make_current(self, ordinal: int) -> int | None:
        """Set the primary context of device `ordinal` in the calling thread. Returns the previous context."""
        before, context = ctypes.c_void_p(), ctypes.c_void_p()
        self._check(self._function("cuCtxGetCurrent", GET_CONTEXT)(ctypes.byref(before)), "cuCtxGetCurrent")
        if ordinal not in self._contexts:  # retained once, for as long as the process lives: torch has it as well
            retain = self._function("cuDevicePrimaryCtxRetain", RETAIN_CONTEXT)
            self._check(retain(ctypes.byref(context), ordinal), "cuDevicePrimaryCtxRetain")
            self._contexts[ordinal] = cast(int, context.value)
        if before.value != self._contexts[ordinal]:
            self.set_context(self._contexts[ordinal])
        return before.value

    def set_context(self, context: int | None) -> None:
        """Set `context`, from `make_current`, in the calling thread."""
        self._check(self._function("cuCtxSetCurrent", SET_CONTEXT)(context), "cuCtxSetCurrent")

    def new_stream(self, ordinal: int) -> int:
        """Handle of a new stream on device `ordinal`; free it with `destroy_stream`.

        torch has 32 streams per device, used in turn, and an engine's streams are among them.
        """
        before = self.make_current(ordinal)
        try:
            handle = ctypes.c_void_p()
            create = self._function("cuStreamCreateWithPriority", CREATE_STREAM)
            self._check(create(ctypes.byref(handle), _NON_BLOCKING, 0), "cuStreamCreateWithPriority")
        finally:
            self.set_context(before)
        return cast(int, handle.value)

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream of `new_stream`, after its work has ended."""
        self._check(self._function("cuStreamDestroy_v2", DESTROY_STREAM)(stream), "cuStreamDestroy")

    def exchange_capture_mode(self, mode: int) -> int:
        """Set the capture mode of the calling thread. Returns the previous mode."""
        value = ctypes.c_int(mode)
        exchange = self._function("cuThreadExchangeStreamCaptureMode", CAPTURE_MODE)
        self._check(exchange(ctypes.byref(value)), "cuThreadExchangeStreamCaptureMode")
        return value.value

    def pci_address(self, ordinal: int) -> str:
        """PCI address of device `ordinal`, such as `0000:3b:00.0`."""
        text = ctypes.create_string_buffer(32)
        get = self._function("cuDeviceGetPCIBusId", PCI_ADDRESS)
        self._check(get(ctypes.addressof(text), len(text), ordinal), "cuDeviceGetPCIBusId")
        return text.value.decode().lower()

    def reaches_host_pointers(self, ordinal: int) -> bool:
        """Whether kernels on device `ordinal` can use host addresses of registered memory."""
        value = ctypes.c_int()
        get = self._function("cuDeviceGetAttribute", GET_ATTRIBUTE)
        self._check(get(ctypes.byref(value), _HOST_POINTERS_SERVE, ordinal), "cuDeviceGetAttribute")
        return bool(value.value)

    def copy(self, stream: int, destination: U64, source: U64, size: U64) -> None:
        """Submit copies between host and device to `stream`, not the null stream. They end in any order.

        The arrays, uint64 of one shape `(copies,)` and contiguous, must stay as they are until the copies have ended.
        No copy may span two registrations. Copies inside the device would be slow.
        """
        if self.batch_version is None:
            self.copy_each(stream, destination, source, size)
            return
        _check_stream(stream)
        starts = [_address(column) for column in (destination, source, size)]
        for first in range(0, len(size), MOST):
            skipped = first * size.itemsize
            arrays = [start + skipped for start in starts]
            self._copy_batch(arrays, min(MOST, len(size) - first), stream)

    def copy_one(self, stream: int, destination: int, source: int, size: int) -> None:
        """Submit one copy to `stream`, not the null stream."""
        _check_stream(stream)
        self._check(self._copy_one(destination, source, size, stream), "cuMemcpyAsync")

    def copy_each(self, stream: int, destination: U64, source: U64, size: U64) -> None:
        """As `copy`, with one call per copy; the arrays are not needed afterwards."""
        _check_stream(stream)
        for to, at, nbytes in zip(destination.tolist(), source.tolist(), size.tolist(), strict=True):
            self._check(self._copy_one(to, at, nbytes, stream), "cuMemcpyAsync")

    def _copy_batch(self, arrays: list[int], count: int, stream: int) -> None:
        shared = (*arrays, count, ctypes.byref(self._attributes), _address(self._indices), 1)
        if self._batch_12_8 is None:
            self._check(self._batch_13_0(*shared, stream), "cuMemcpyBatchAsync")
            return
        failed = ctypes.c_size_t(_NO_INDEX)
        result = self._batch_12_8(*shared, ctypes.byref(failed), stream)
        which = "" if failed.value == _NO_INDEX else f" at copy {failed.value} of {count}"
        self._check(result, f"cuMemcpyBatchAsync{which}")

    def _find_batch(self) -> int | None:
        """Ask for the call by version: each has arguments of its own."""
        address = self._entry(b"cuMemcpyBatchAsync", 12080)
        if address is not None:
            self._batch_12_8 = BATCH_12_8(address)
            return 12080
        address = self._entry(b"cuMemcpyBatchAsync", 13000)
        if address is not None:
            self._batch_13_0 = BATCH_13_0(address)
            return 13000
        return None

    def _entry(self, name: bytes, version: int) -> int | None:
        """Address of the function as of `version`; `None` where this driver has none, or cannot be asked."""
        try:
            ask = self._function("cuGetProcAddress_v2", GET_PROC_ADDRESS)
        except DeviceError:
            return None
        address, status = ctypes.c_void_p(), ctypes.c_int()
        result = ask(name, ctypes.byref(address), version, 0, ctypes.byref(status))
        return address.value if result == 0 and status.value == 0 else None

    def _function(self, name: str, prototype: Any) -> Any:
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"the CUDA driver has no function {name}; update the driver")
        return prototype(ctypes.cast(function, ctypes.c_void_p).value)

    def _check(self, result: int, call: str) -> None:
        if result:
            name = ctypes.c_char_p()
            known = self._error_name(result, ctypes.byref(name)) == 0 and name.value is not None
            raise DeviceError(f"{call} failed: {(name.value or b'').decode() if known else f'error {result}'}")


def _check_stream(stream: int) -> None:
    if stream in _NULL_STREAMS:
        raise DeviceError("expected a stream created by Longshore, got the legacy null stream")


def _address(array: U64) -> int:
    address: int = array.__array_interface__["data"][0]  # a quarter of what `array.ctypes.data` takes
    return address


class CudaAccelerator(Accelerator):
    """One GPU, by calls of torch and Triton. Triton is imported with the first kernel."""

    @property
    def name(self) -> str:
        """For instance `NVIDIA H200`."""
        return str(torch.cuda.get_device_name(self.device))

    @property
    def ordinal(self) -> int:
        """Its number in this process."""
        return self.device.index

    def current_stream(self) -> torch.Stream:
        """The calling thread's stream."""
        return torch.cuda.current_stream(self.device)

    def create_stream(self, driver: Driver) -> torch.Stream:
        """A stream of its own, never the null stream; `destroy_stream` destroys it."""
        handle = driver.new_stream(self.ordinal)
        stream: torch.Stream = torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]
        return stream

    def destroy_stream(self, driver: Driver, stream: torch.Stream) -> None:
        """Destroy a stream of `create_stream`, once no memory allocated on it is in use."""
        driver.destroy_stream(self.handle(stream))

    def destroy_streams(self, driver: Driver, streams: Iterable[torch.Stream]) -> None:
        """Destroy them all; one that cannot be destroyed is logged."""
        for stream in streams:
            try:
                self.destroy_stream(driver, stream)
            except DeviceError as error:
                _log.warning(
                    "a CUDA stream of %s could not be destroyed, and stays until the process ends: %s",
                    self.device,
                    error,
                )

    def empty_cache(self) -> None:
        """Free unused memory in torch's caches, on the device and pinned."""
        torch.cuda.empty_cache()
        empty_pinned = getattr(torch._C, "_host_emptyCache", None)  # as of torch 2.7
        if empty_pinned is not None:
            empty_pinned()

    def of_cuda(self, stream: torch.Stream) -> torch.Stream:
        """The same stream by torch's own class for CUDA, which is all that its CUDA events may be given.

        `torch.accelerator.current_stream()` is of another, of which torch 2.6 to 2.11 read what it does not have.
        """
        if isinstance(stream, torch.cuda.Stream):
            return stream
        return torch.cuda.Stream(  # type: ignore[no-untyped-call]
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )

    def handle(self, stream: torch.Stream) -> int:
        """The driver's name for `stream`."""
        return int(cast(torch.cuda.Stream, stream).cuda_stream)

    def as_current(self) -> AbstractContextManager[object]:
        """Within it the GPU is the calling thread's: Triton launches kernels there, whatever tensors they are given."""
        current: AbstractContextManager[object] = torch.cuda.device(self.device)
        return current

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        """Within it `stream`, and its device, are the calling thread's own."""
        return torch.cuda.stream(cast(torch.cuda.Stream, stream))

    def use(self, stream: torch.Stream) -> None:
        """Make `stream`, and its device, the calling thread's own: a new thread starts on device 0."""
        torch.cuda.set_device(self.device)
        torch.cuda.set_stream(cast(torch.cuda.Stream, stream))

    def new_event(self) -> torch.Event:
        """An event that keeps time, and that a thread sleeps for: the engine needs the cores more than the copies do.

        It is there when this returns: torch makes one only when it is first recorded.
        """
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def prepare(self, shape: KernelShape) -> None:
        """Compile the kernels for `shape`, unless they are compiled."""
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415 - Triton is optional

        none = torch.zeros(2, dtype=torch.int64, device=self.device)
        with self.as_current():
            for move in (kernels.gather, kernels.scatter, kernels.copy_blocks):
                move(none, none, none, shape._replace(chunks=0))

    def launch(
        self, kernel: str, blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape
    ) -> None:
        """Launch `gather`, `scatter` or `copy_blocks` of `kernels`."""
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415

        getattr(kernels, kernel)(blocks, rows, table, shape)

    def wait(self) -> None:
        """Block until what was given to the calling thread's current stream has ended."""
        torch.cuda.current_stream(self.device).synchronize()

    def mix64(self, memory: torch.Tensor) -> int:
        """`longshore.checksums.mix64` of device memory, int64 of any length; in any thread."""
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415

        with self.as_current():
            return kernels.mix64(memory)
