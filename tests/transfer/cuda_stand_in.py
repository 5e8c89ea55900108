"""A CUDA driver and streams without a GPU: bytes really move, by the very structures and addresses that were handed
over, and as late as the order that was asked for allows.

A stream is a queue. In the first of three moods it runs only when somebody waits for an event on it, up to that event,
and what that event waited for on other streams; in the second as soon as it may; in the third in random turns. So
whatever is not ordered is overtaken in one of them.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import kernel_references
import torch
from device_kit import Lane

from longshore.checksums import mix64
from longshore.layout import KVLayout
from longshore.transfer.device.cuda import driver as ours
from longshore.transfer.device.cuda.arguments import KernelShape
from longshore.transfer.device.cuda.calibration import all_registered
from longshore.transfer.device.cuda.device import CudaDevice
from longshore.transfer.device.cuda.driver import CudaAccelerator
from longshore.transfer.device.cuda.streams import CopyShape, Way, WayChooser

RETURN_INVALID_VALUE = 1
RETURN_NO_CONTEXT = 201
CONTEXT = 0xC0
"""The context of device 0; that of device 1 is the next number."""


class Work(NamedTuple):
    """Something on a stream; with `needs`, a wait for a point on another one."""

    run: Callable[[], None]
    needs: tuple[LazyStream, int] | None = None


class LazyStream:
    """Work in order, which runs when it must, or when the world's mood says so."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.queue: deque[Work] = deque()
        self.given = 0
        self.run = 0
        self.cuda_stream = world.register(self)

    def give(self, run: Callable[[], None], needs: tuple[LazyStream, int] | None = None) -> None:
        with self.world.lock:
            self.queue.append(Work(run, needs))
            self.given += 1
            if self.world.eager:
                self.world.settle()

    def can_step(self) -> bool:
        needs = self.queue[0].needs if self.queue else None
        return bool(self.queue) and (needs is None or needs[0].run >= needs[1])

    def step(self) -> None:
        work = self.queue.popleft()
        self.run += 1
        work.run()

    def run_to(self, count: int) -> None:
        """Run what must have run, here and on other streams, and nothing else."""
        while self.run < count:
            needs = self.queue[0].needs
            if needs is not None:
                needs[0].run_to(needs[1])
            if self.run < count:
                self.step()


class World:
    """All streams by their handles, and how they get on.

    By itself everything waits until somebody must have it. With `eager`, everything but the engine's own stream runs as
    soon as it may. With `chance`, whoever waits sees streams run in random turns until what it waits for has passed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.streams: dict[int, LazyStream] = {}
        self.clock = 0
        self.eager = False
        self.chance: random.Random | None = None
        self.log: list[tuple[str, str, object]] = []

    def register(self, stream: LazyStream) -> int:
        handle = 0x5000 + 16 * len(self.streams)
        self.streams[handle] = stream
        return handle

    def settle(self) -> None:
        """Let all but the engine's own stream run as far as they may."""
        ours = [stream for stream in self.streams.values() if stream.name != "compute"]
        while ready := [stream for stream in ours if stream.can_step()]:
            ready[0].step()

    def run_to(self, stream: LazyStream, count: int) -> None:
        while self.chance is not None and stream.run < count:
            self.chance.choice([ready for ready in self.streams.values() if ready.can_step()]).step()
        stream.run_to(count)


class LazyEvent:
    """A point on a stream."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.stream: LazyStream | None = None
        self.at = 0
        self.time = 0

    def record(self, stream: LazyStream) -> None:
        self._check(stream)
        with self.world.lock:
            self.stream = stream
            self.at = stream.given + 1
            self.world.log.append(("record", stream.name, (stream.name, self.at)))
            stream.give(self._stamp)

    def _stamp(self) -> None:
        self.world.clock += 1
        self.time = self.world.clock

    def wait(self, stream: LazyStream) -> None:
        self._check(stream)
        with self.world.lock:
            if self.stream is not None:
                self.world.log.append(("wait", stream.name, (self.stream.name, self.at)))
                stream.give(lambda: None, (self.stream, self.at))

    @staticmethod
    def _check(stream: object) -> None:
        """Streams of torch's general class are not taken, as by `torch.cuda.Event`."""
        if not isinstance(stream, LazyStream):
            raise TypeError(f"expected a stream of CUDA's class, got {stream!r}")

    def synchronize(self) -> None:
        with self.world.lock:
            if self.stream is not None:
                self.world.run_to(self.stream, self.at)

    def query(self) -> bool:
        with self.world.lock:
            return self.stream is None or self.stream.run >= self.at

    def elapsed_time(self, other: LazyEvent) -> float:
        return float(other.time - self.time)


class StandInLibrary:
    """The driver's functions as C functions. `breaches` are the rules that were broken."""

    def __init__(self, world: World, *, newest: int = 12080, oldest_batch: int = 12080) -> None:
        self.world = world
        self.newest = newest
        self.calls: list[tuple[str, int]] = []
        self.flags: list[int] = []
        self.breaches: list[str] = []
        self.contexts = threading.local()
        self.fail_with = 0
        self.host_pointers_serve = 1
        self._batches: dict[int, Any] = {
            12080: ours.BATCH_12_8(self._batch_12_8),
            13000: ours.BATCH_13_0(self._batch_13_0),
        }
        self._served = {version for version in self._batches if oldest_batch <= version <= newest}
        self._names = [b"CUDA_ERROR_INVALID_VALUE", b"CUDA_ERROR_INVALID_CONTEXT"]
        self.cuInit = ours.INIT(lambda flags: 0)
        self.cuGetProcAddress_v2 = ours.GET_PROC_ADDRESS(self._get_proc_address)
        self.cuGetErrorName = ours.ERROR_NAME(self._error_name)
        self.cuMemcpyAsync = ours.COPY_ONE(self._copy_one)
        self.cuDriverGetVersion = ours.VERSION(self._version)
        self.cuDeviceGetAttribute = ours.GET_ATTRIBUTE(self._attribute)
        self.cuCtxGetCurrent = ours.GET_CONTEXT(self._get_context)
        self.cuDevicePrimaryCtxRetain = ours.RETAIN_CONTEXT(self._retain)
        self.cuCtxSetCurrent = ours.SET_CONTEXT(self._set_context)
        self.cuStreamCreateWithPriority = ours.CREATE_STREAM(self._create_stream)
        self.cuStreamDestroy_v2 = ours.DESTROY_STREAM(self._destroy_stream)
        self.cuThreadExchangeStreamCaptureMode = ours.CAPTURE_MODE(self._capture_mode)
        self.cuDeviceGetPCIBusId = ours.PCI_ADDRESS(self._pci_address)
        self.made: list[int] = []
        self.destroyed: list[int] = []
        self.capture_modes: dict[int, int] = {}

    def _get_proc_address(self, name: bytes, address: Any, version: int, flags: int, status: Any) -> int:
        known = [served for served in self._served if served <= version] if name == b"cuMemcpyBatchAsync" else []
        if not known:
            address[0], status[0] = None, 1
            return 0
        address[0] = ctypes.cast(self._batches[max(known)], ctypes.c_void_p).value
        status[0] = 0
        return 0

    def _error_name(self, error: int, name: Any) -> int:
        names = {RETURN_INVALID_VALUE: self._names[0], RETURN_NO_CONTEXT: self._names[1]}
        if error not in names:
            return RETURN_INVALID_VALUE
        name[0] = names[error]
        return 0

    def _version(self, version: Any) -> int:
        version[0] = self.newest
        return 0

    def _attribute(self, value: Any, attribute: int, ordinal: int) -> int:
        value[0] = self.host_pointers_serve if attribute == 91 else 0
        return 0

    def _get_context(self, context: Any) -> int:
        context[0] = getattr(self.contexts, "now", None)
        return 0

    def _retain(self, context: Any, ordinal: int) -> int:
        context[0] = CONTEXT + ordinal
        return 0

    def _set_context(self, context: int | None) -> int:
        self.contexts.now = context
        return 0

    def _create_stream(self, handle: Any, flags: int, priority: int) -> int:
        if getattr(self.contexts, "now", None) is None:
            return RETURN_NO_CONTEXT
        if flags != 1:
            self.breaches.append("a stream that waits for the null stream")
        handle[0] = self._new_stream(self.contexts.now - CONTEXT)
        self.made.append(handle[0])
        return 0

    def _new_stream(self, ordinal: int) -> int:
        """Handle of one on that device."""
        return LazyStream(f"stream {len(self.world.streams)}", self.world).cuda_stream

    def _destroy_stream(self, handle: int) -> int:
        if handle not in self.made or handle in self.destroyed:
            self.breaches.append("a stream that is not there was destroyed")
            return RETURN_INVALID_VALUE
        self.destroyed.append(handle)
        return 0

    def _capture_mode(self, mode: Any) -> int:
        thread = threading.get_ident()
        before, self.capture_modes[thread] = self.capture_modes.get(thread, 0), mode[0]
        mode[0] = before
        return 0

    def _pci_address(self, text: int, length: int, ordinal: int) -> int:
        ctypes.memmove(text, b"0000:3B:00.0\0", 13)
        return 0

    def _copy_one(self, destination: int, source: int, nbytes: int, stream: int | None) -> int:
        if self.fail_with:
            return self.fail_with
        found = self._stream(stream)
        if found is None or not nbytes:
            return RETURN_INVALID_VALUE
        self.calls.append(("one", 1))
        found.give(lambda: self._move(destination, source, nbytes))
        return 0

    def _batch_12_8(self, to: int, at: int, sizes: int, count: int, *rest: Any) -> int:
        attributes, indices, attribute_count, failed, stream = rest
        failed[0] = ctypes.c_size_t(-1).value
        return self._batch("12.8", to, at, sizes, count, attributes, indices, attribute_count, stream)

    def _batch_13_0(self, to: int, at: int, sizes: int, count: int, *rest: Any) -> int:
        return self._batch("13.0", to, at, sizes, count, *rest)

    def _batch(
        self,
        version: str,
        to: int,
        at: int,
        sizes: int,
        count: int,
        attributes: Any,
        indices: int,
        attribute_count: int,
        stream: int | None,
    ) -> int:
        if self.fail_with:
            return self.fail_with
        found = self._stream(stream)
        first = (ctypes.c_size_t * attribute_count).from_address(indices)[0] if attribute_count else None
        bad = [
            (found is None, "the null stream, or none of ours"),
            (not 1 <= count <= 4096, f"{count} copies in one call"),
            (not 1 <= attribute_count <= count or first != 0, f"{attribute_count} attributes from copy {first} on"),
            (any(attributes[i].source_order != 1 for i in range(attribute_count)), "not in stream order"),
            (any(attributes[i].flags > 1 for i in range(attribute_count)), "unknown flags"),
            (any(attributes[i].source_hint.type or attributes[i].destination_hint.type for i in range(1)), "hints"),
        ]
        broken = [rule for is_broken, rule in bad if is_broken]
        if broken or found is None:
            self.breaches += broken
            return RETURN_INVALID_VALUE
        self.calls.append((version, count))
        self.flags.append(attributes[0].flags)
        array = ctypes.c_uint64 * count

        def run() -> None:  # reads the arrays only now, as late as a driver may
            columns = [array.from_address(address) for address in (to, at, sizes)]
            for destination, source, nbytes in zip(*columns, strict=True):
                self._move(destination, source, nbytes)

        found.give(run)
        return 0

    def _stream(self, handle: int | None) -> LazyStream | None:
        return None if handle is None else self.world.streams.get(handle)

    def _move(self, destination: int, source: int, nbytes: int) -> None:
        if not nbytes:
            self.breaches.append("an empty copy")
        ctypes.memmove(destination, source, nbytes)


class AnyWay:
    """Another way for every batch."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.chosen: set[Way] = set()

    def choose(self, shape: CopyShape, ways: Collection[Way]) -> Way:
        way = self.random.choice(sorted(ways))
        self.chosen.add(way)
        return way


def kernels_for(shape: KernelShape) -> tuple[int, int, bool]:
    """What of a shape a kernel is compiled for."""
    return shape.word, shape.span, shape.tail


def uint8(nbytes: int, value: int = 0xA5) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


class StandInAccelerator(CudaAccelerator):
    """A GPU whose memory is the host's: streams and events that are lazy, and the kernels' references."""

    def __init__(self, world: World | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self.world = world or World()
        self.compute = LazyStream("compute", self.world)
        self.kernels: list[str] = []
        self.emptied = 0
        self.compiler_error: Exception | None = None
        self.prepared: set[tuple[int, int, bool]] = set()
        self.launched: set[tuple[int, int, bool]] = set()
        self.refuse_above: int | None = None
        self.all_aligned = True
        self._used = threading.local()

    @property
    def name(self) -> str:
        return "Stand-in GPU"

    @property
    def ordinal(self) -> int:
        return 0

    def current_stream(self) -> torch.Stream:
        return getattr(self._used, "stream", cast(torch.Stream, self.compute))

    def create_stream(self, driver: ours.Driver) -> torch.Stream:
        return cast(torch.Stream, self.world.streams[driver.new_stream(self.ordinal)])

    def empty_cache(self) -> None:
        self.emptied += 1

    def of_cuda(self, stream: torch.Stream) -> torch.Stream:
        """Whatever stream of torch's general class there is, it is the engine's."""
        return cast(torch.Stream, self.compute) if isinstance(stream, torch.Stream) else stream

    @contextmanager
    def as_current(self) -> Iterator[None]:
        before = getattr(self._used, "is_current", False)
        self._used.is_current = True
        yield
        self._used.is_current = before

    @property
    def is_current(self) -> bool:
        """Whether the calling thread is on this GPU."""
        return getattr(self._used, "is_current", False)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        before = self.current_stream(), self.is_current
        self.use(stream)
        yield
        self._used.stream, self._used.is_current = before

    def use(self, stream: torch.Stream) -> None:
        self._used.stream = stream
        self._used.is_current = True

    def new_event(self) -> torch.Event:
        return cast(torch.Event, LazyEvent(self.world))

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        if self.refuse_above is not None and nbytes > self.refuse_above:
            raise torch.OutOfMemoryError("no")
        return uint8(nbytes)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        return uint8(nbytes, 0x5A)

    def prepare(self, shape: KernelShape) -> None:
        if self.compiler_error is not None:
            raise self.compiler_error
        self.prepared.add(kernels_for(shape))

    def launch(self, kernel: str, *arguments: Any) -> None:
        self._later(getattr(kernel_references, f"{kernel}_reference"), *arguments)

    def wait(self) -> None:
        stream = cast(LazyStream, self.current_stream())
        stream.run_to(stream.given)

    def mix64(self, memory: torch.Tensor) -> int:
        return mix64(memory.view(torch.uint8).numpy().tobytes())

    def _later(self, kernel: Callable[..., None], *arguments: Any) -> None:
        assert self.is_current, "a kernel on another GPU"
        self.kernels.append(kernel.__name__.removesuffix("_reference"))
        self.launched.add(kernels_for(arguments[-1]))
        aligned = {tensor.data_ptr() % 16 == 0 for tensor in arguments[:-1]}
        self.all_aligned = self.all_aligned and aligned == {True}
        cast(LazyStream, self.current_stream()).give(lambda: kernel(*arguments))


class StandIn:
    """A CUDA device on the stand-ins."""

    def __init__(
        self,
        chooser: WayChooser | None,
        *,
        mood: str | int = "lazy",
        library: Any = None,
        **options: Any,
    ) -> None:
        """`mood`: "lazy", "eager", or the seed of random turns."""
        self.accelerator = StandInAccelerator()
        self.world = self.accelerator.world
        self.world.eager = mood == "eager"
        self.world.chance = random.Random(mood) if isinstance(mood, int) else None
        self.library = library or StandInLibrary(self.world)
        options.setdefault("in_one_piece", all_registered)
        self.device = CudaDevice(
            "cuda:0", chooser=chooser, accelerator=self.accelerator, library=self.library, **options
        )

    def lane(self, layout: KVLayout, destination: str) -> Lane:
        lane = Lane(self.device.stream(layout, destination))
        compute = self.accelerator.compute
        compute.run_to(compute.given)  # what the engine did before is over: nothing of it holds the lane's streams
        return lane

    def on_compute(self, work: Callable[[], object]) -> None:
        """Give the engine's own stream something to do."""
        self.accelerator.compute.give(lambda: (work(), None)[1])
