"""The calls of torch and of Triton that need an NVIDIA GPU, in one place. Triton is imported with the first kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

import torch

from longshore.transfer.device.accelerator import Accelerator
from longshore.transfer.device.cuda.driver import Driver
from longshore.transfer.device.cuda.runs import KernelShape


class CudaAccelerator(Accelerator):
    """One GPU."""

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

    def own_stream(self, driver: Driver) -> torch.Stream:
        """A stream of its own, never the null stream; `give_back_stream` destroys it."""
        handle = driver.new_stream(self.ordinal)
        stream: torch.Stream = torch.cuda.ExternalStream(handle, device=self.device)  # type: ignore[no-untyped-call]
        return stream

    def give_back_stream(self, driver: Driver, stream: torch.Stream) -> None:
        """Destroy a stream of `own_stream`, once no memory allocated on it is in use."""
        driver.destroy_stream(self.handle(stream))

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
            for move in (kernels.gather, kernels.scatter, kernels.shift):
                move(none, none, none, shape._replace(chunks=0))

    def gather(self, blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
        """`kernels.gather`."""
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415

        kernels.gather(blocks, rows, table, shape)

    def scatter(self, blocks: torch.Tensor, rows: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
        """`kernels.scatter`."""
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415

        kernels.scatter(blocks, rows, table, shape)

    def shift(self, blocks: torch.Tensor, sources: torch.Tensor, table: torch.Tensor, shape: KernelShape) -> None:
        """`kernels.shift`."""
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415

        kernels.shift(blocks, sources, table, shape)

    def wait(self) -> None:
        """Block until what was given to the calling thread's current stream has ended."""
        torch.cuda.current_stream(self.device).synchronize()

    def mix64(self, memory: torch.Tensor) -> int:
        """`longshore.checksums.mix64` of device memory, int64 of any length; in any thread."""
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415

        with self.as_current():
            return kernels.mix64(memory)
