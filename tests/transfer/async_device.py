"""An asynchronous device on the CPU (async_device.cpp): torch knows it as `queued`, and there are two of them.

Built once for a torch and a source, and kept with the other environments of tests. `Queued` is what a test is given:
pauses, counts, compute; `QueuedGpu` is what `CudaDevice` needs of CUDA and Triton on such a device: streams and memory
are the device's, kernels are their references, and a stand-in for the driver's library gives its copies to the streams.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import kernel_references
import torch
from cuda_stand_in import CONTEXT, StandInLibrary, World
from jobs_kit import Hardware, images_of_two_ranks, one_rank
from torch.utils import cpp_extension

import environments
from longshore.checksums import mix64
from longshore.tiers.arena import Arena
from longshore.transfer.device.cuda.arguments import KernelShape
from longshore.transfer.device.cuda.calibration import Always, all_registered
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.driver import CudaAccelerator, Driver
from longshore.transfer.device.cuda.streams import Way
from longshore.transfer.device.torch_streams import Accelerator

NAME = "queued"
SOURCE = Path(__file__).with_name("async_device.cpp")

_TAKES_A_NUMBER = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def build(where: Path) -> None:
    """Compile the device; a compiler that is missing or fails is an error."""
    where.mkdir(parents=True)
    libraries = cpp_extension.library_paths()
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-shared",
        "-fPIC",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    ]
    command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    command += [str(SOURCE), "-o", str(where / "device.so"), "-ltorch_cpu", "-lc10"]
    command += [option for path in libraries for option in (f"-L{path}", f"-Wl,-rpath,{path}")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{SOURCE.name} does not compile with torch {torch.__version__}:\n{done.stderr[-4000:]}")


@functools.cache
def library() -> Any:
    """The device, known to torch from here on."""
    where = environments.kept("async-device", [torch.__version__, torch.__file__, SOURCE.read_text()], build)
    loaded = ctypes.CDLL(str(where / "device.so"))
    for name in ("new_stream", "reserved"):
        getattr(loaded, f"async_{name}").restype = ctypes.c_int64
    loaded.async_given.restype = loaded.async_take_faults.restype = ctypes.c_uint64
    loaded.async_pauses.argtypes = [ctypes.c_uint64, ctypes.c_int]
    loaded.async_launch.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
    loaded.async_is_stream.argtypes = loaded.async_device_of.argtypes = [ctypes.c_int64]
    loaded.async_whose.argtypes = loaded.async_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    loaded.async_unpin.argtypes = [ctypes.c_void_p]
    loaded.async_start()
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(NAME)
    module.device_count = torch.accelerator.device_count  # type: ignore[attr-defined]
    module.is_available = torch.accelerator.is_available  # type: ignore[attr-defined]
    module.current_device = loaded.async_device  # type: ignore[attr-defined]
    module.set_device = loaded.async_use_device  # type: ignore[attr-defined]
    torch._register_device_module(NAME, module)
    return loaded


def launch(stream: torch.Stream, work: Callable[[], object]) -> None:
    """Give `work` to a stream; whatever it raises is in `RAISED`."""
    _launch(stream.device_index, stream.stream_id, work)


def _launch(device: int, stream: int, work: Callable[[], object]) -> None:
    token = next(_TOKENS)
    _GIVEN[token] = work
    library().async_launch(device, stream, _RUN, token)


def _run(token: int) -> None:
    try:
        _GIVEN.pop(token)()
    except BaseException as error:  # noqa: BLE001 - a thread of no test: the fixture raises it
        RAISED.append(error)


def check_memory(device: int, address: int, nbytes: int) -> None:
    """Raise unless a copy or a kernel of `device` may touch this: no other device's memory, no pageable memory."""
    whose = library().async_whose(address, nbytes)
    if device < 0 or whose not in (device, PINNED):
        raise FaultError(f"device {device} was to touch {nbytes} bytes at {address:#x}, which are {whose}'s")


def take_faults() -> list[BaseException | str]:
    """Work of either device that has failed, and rules of the driver that were broken, since this was last asked."""
    for index in range(2):
        library().async_wait(index)
    found = [*RAISED, *(breach for each in QueuedLibrary.everyone for breach in each.breaches)]
    RAISED.clear()
    QueuedLibrary.everyone.clear()
    return [*found, *["an operator failed"] * int(library().async_take_faults())]


class FaultError(Exception):
    """A device was to touch memory that it does not reach."""


PINNED = -2
RAISED: list[BaseException] = []
_GIVEN: dict[int, Callable[[], object]] = {}
_TOKENS = itertools.count(1)
_RUN = _TAKES_A_NUMBER(_run)


class Queued(Hardware):
    """One of the devices, for jobs, and what it was given."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.name = f"{NAME}:{index}"
        self._library = library()

    def new_stream(self) -> torch.Stream:
        return torch.Stream(device=self.name)

    def on(self, stream: torch.Stream) -> AbstractContextManager[object]:
        return stream

    def late(self, share: float = 1.0) -> None:
        stream = torch.accelerator.current_stream(torch.device(self.name))
        sleep = ctypes.cast(self._library.async_sleep, ctypes.c_void_p)
        self._library.async_launch(self.index, stream.stream_id, sleep, int(share * 10_000))

    def synchronize(self) -> None:
        self._library.async_wait(self.index)

    def register(self, address: int, nbytes: int) -> None:
        self._library.async_pin(address, nbytes)

    def unregister(self, address: int) -> None:
        self._library.async_unpin(address)

    def pauses(self, seed: int, longest: int) -> None:
        """From now on every other piece of work is up to `longest` microseconds late, on some streams eight times."""
        self._library.async_pauses(seed, longest)

    @property
    def work(self) -> int:
        """Pieces of work that its streams were given so far."""
        return int(self._library.async_given(self.index, 0))

    @property
    def work_by_default(self) -> int:
        """Those of its default stream."""
        return int(self._library.async_given(self.index, 1))

    @property
    def drawn(self) -> int:
        """Streams that were taken from its 32."""
        return int(self._library.async_drawn(self.index))

    @property
    def reserved(self) -> int:
        """Bytes that it was asked for and that are not back, in use or not."""
        return int(self._library.async_reserved(self.index))

    def empty_cache(self) -> None:
        """Give back those that are not in use."""
        self._library.async_empty_cache(self.index)


@contextmanager
def devices() -> Iterator[tuple[Queued, Queued]]:
    """Both devices, which torch sees meanwhile."""
    found = Queued(0), Queued(1)
    library().async_show(2)
    take_faults()
    gc.collect()
    for each in found:
        each.empty_cache()
    try:
        yield found
        faults = take_faults()
        assert not faults, faults
    finally:
        for each in found:
            each.pauses(0, 0)
            each.synchronize()
            each.empty_cache()
        library().async_use_device(0)
        library().async_show(0)


class QueuedGpu(CudaAccelerator):
    """What CUDA and Triton do for `CudaDevice`, on such a device."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device(NAME, index))
        self.prepared: list[KernelShape] = []
        self.launched: list[tuple[str, int, int]] = []

    @property
    def name(self) -> str:
        return f"Queued GPU {self.ordinal}"

    def of_cuda(self, stream: torch.Stream) -> torch.Stream:
        return stream

    def handle(self, stream: torch.Stream) -> int:
        return stream.stream_id

    def create_stream(self, driver: Driver) -> torch.Stream:
        kind = self.current_stream().device_type
        return torch.Stream(stream_id=driver.new_stream(self.ordinal), device_index=self.ordinal, device_type=kind)

    def empty_cache(self) -> None:
        library().async_empty_cache(self.ordinal)

    current_stream = Accelerator.current_stream
    use = Accelerator.use
    new_event = Accelerator.new_event

    @contextmanager
    def as_current(self) -> Iterator[None]:
        before = library().async_device()
        library().async_use_device(self.ordinal)
        yield
        library().async_use_device(before)

    def prepare(self, shape: KernelShape) -> None:
        self.prepared.append(shape)

    def launch(self, kernel: str, *arguments: Any) -> None:
        self._launch(getattr(kernel_references, f"{kernel}_reference"), *arguments)

    def wait(self) -> None:
        self.current_stream().synchronize()

    def mix64(self, memory: torch.Tensor) -> int:
        return mix64(memory.cpu().view(torch.uint8).numpy().tobytes())

    def _launch(self, kernel: Callable[..., None], *arguments: Any) -> None:
        """On the device that is the calling thread's, as Triton does, whatever the tensors are on."""
        *tensors, shape = arguments
        device = library().async_device()
        stream = torch.accelerator.current_stream(torch.device(NAME, device))
        places = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
        self.launched.append((kernel.__name__.removesuffix("_reference"), device, stream.stream_id))

        def run() -> None:
            found = [_on_cpu(*place) for place in places]
            rows = torch.zeros(shape.chunks, dtype=torch.int64)
            if kernel is kernel_references.copy_blocks_reference:
                pages = [page for ids in found[:2] for page in kernel_references.pages_of(ids, rows, found[2], shape)]
                touched = [(page, width) for page, _, width in pages]
            else:
                pages = kernel_references.pages_of(*found, shape)
                touched = [(place, width) for page, row, width in pages for place in (page, row)]
            for address, width in touched:
                check_memory(device, address, width)
            kernel(*found, shape)

        launch(stream, run)


def _on_cpu(address: int, count: int) -> torch.Tensor:
    """int64 of the device's memory, as the device sees it when this is called."""
    return torch.frombuffer((ctypes.c_int64 * count).from_address(address), dtype=torch.int64)


class QueuedLibrary(StandInLibrary):
    """The driver's library of both devices: copies go to the streams whose handles they are given."""

    everyone: ClassVar[list[QueuedLibrary]] = []

    def __init__(self, **options: int) -> None:
        super().__init__(World(), **options)
        self.everyone.append(self)

    def _new_stream(self, ordinal: int) -> int:
        return int(library().async_new_stream(ordinal))

    def _stream(self, handle: int | None) -> Any:
        """Not without a context, nor on a stream of another device than the context's."""
        if not handle or handle in self.destroyed or not library().async_is_stream(handle):
            return None
        context = getattr(self.contexts, "now", None)
        if context != CONTEXT + library().async_device_of(handle):
            self.breaches.append(f"a copy on a stream of another context than {context}")
            return None
        return _Stream(library().async_device_of(handle), handle)

    def _move(self, destination: int, source: int, nbytes: int) -> None:
        device = max(library().async_whose(address, nbytes) for address in (destination, source))
        for address in (destination, source):
            check_memory(device, address, nbytes)
        super()._move(destination, source, nbytes)


class _Stream(NamedTuple):
    device: int
    handle: int

    def give(self, run: Callable[[], object]) -> None:
        _launch(self.device, self.handle, run)


def gpu(index: int = 0, **options: Any) -> CudaDevice:
    """`CudaDevice` on one of the devices; all host memory is registered unless `options` say otherwise."""
    made = {"accelerator": QueuedGpu(index), "library": QueuedLibrary()}
    options = {"in_one_piece": all_registered, "staging_bytes": 1 << 14, **made, **options}
    return CudaDevice(f"{NAME}:{index}", **options)


def rank_in_this_process(path: str, rank: int) -> None:
    """`one_rank`, which says when it has stored its part, and goes on when it is told."""

    def stored() -> None:
        print("stored", flush=True)
        assert sys.stdin.readline() == "load\n"

    arena = Arena.attach(Path(path), images_of_two_ranks().nbytes)
    with devices() as both:
        both[rank].pauses(rank, 100)
        both[rank].register(arena.address, arena.nbytes)
        one_rank(both[rank], gpu(rank, chooser=Always(Way.STAGED)), arena, rank, stored)
        other = both[1 - rank]
        assert (other.work, other.reserved, other.drawn) == (0, 0, 0)


if __name__ == "__main__":
    from async_device import rank_in_this_process as run  # the module by its name: there is one of each device

    run(sys.argv[1], int(sys.argv[2]))
