"""GPUDirect Storage: images between the segment and device memory, without a copy in host memory.

    write    device: checksum ──► cuFile: image ──► header           reads verify both
    read     header, cuFile: image ──► device: checksum

Every call of cuFile and of the device is made by a thread of the queue, so that many run at once.

cuFile is tried when the tier opens, and again with every image. Images that cuFile refuses are copied through host
memory and counted; records on disk are the same either way.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from longshore.boundary import DISK_PAGE, Status, align
from longshore.checksums import MIX64, XXH3_64, checksum
from longshore.errors import DeviceError, TierError
from longshore.tiers.base import TierOp
from longshore.tiers.file.io import IoCoroutine, Move, Piece, RawIo
from longshore.tiers.file.record_verifier import RecordVerifier
from longshore.tiers.file.segment import MakeHeader, Segment, Staging, is_aligned
from longshore.tiers.file.tier import FileTier

if TYPE_CHECKING:  # a tier host needs no transfer engine
    from longshore.transfer.device.base import ImageMemory

DESCRIPTOR = struct.Struct("<i4xqq")
"""`CUfileDescr_t`: the type of handle, the file descriptor, and functions of other file systems."""

OPAQUE_FD = 1
"""The type of handle that is a file descriptor of Linux."""


def load_cufile() -> object:
    """The library's functions; `DeviceError` when the package is not installed."""
    try:
        return importlib.import_module("cuda.bindings.cufile")
    except ImportError as error:
        raise DeviceError(f"no cuFile: {error}; expected the package cuda-bindings") from error


class CuFile:
    """One file, and one piece of device memory of `nbytes` at `address`, registered with cuFile until `close`.

    Reads and writes block, and are not ordered with any stream: the caller must have waited for all other accesses to
    the bytes, and must not start new ones until the call returns.
    """

    def __init__(self, library: object, fd: int, address: int, nbytes: int) -> None:
        """Raises `DeviceError`, with nothing registered."""
        self._library = library
        self._address = address
        self._undo: list[tuple[str, tuple[Any, ...]]] = []
        descriptor = ctypes.create_string_buffer(DESCRIPTOR.pack(OPAQUE_FD, fd, 0))
        try:
            self._call("driver_open")
            self._undo.append(("driver_close", ()))
            self._handle = int(self._call("handle_register", ctypes.addressof(descriptor)))
            self._undo.append(("handle_deregister", (self._handle,)))
            self._call("buf_register", address, nbytes, 0)
            self._undo.append(("buf_deregister", (address,)))
        except DeviceError:
            self.close()
            raise

    def read(self, offset: int, nbytes: int, file_offset: int) -> None:
        """`nbytes` of the file from `file_offset` on, to `offset` of the memory."""
        self._move("read", offset, nbytes, file_offset)

    def write(self, offset: int, nbytes: int, file_offset: int) -> None:
        """`nbytes` of the memory from `offset` on, to `file_offset` of the file."""
        self._move("write", offset, nbytes, file_offset)

    def close(self) -> None:
        """Deregister memory and file, and close the library; errors are ignored. Idempotent."""
        while self._undo:
            name, arguments = self._undo.pop()
            try:
                self._call(name, *arguments)
            except DeviceError:
                continue

    def _move(self, name: str, offset: int, nbytes: int, file_offset: int) -> None:
        moved = self._call(name, self._handle, self._address, nbytes, file_offset, offset)
        if moved != nbytes:
            raise DeviceError(f"cuFile {name}: expected {nbytes} bytes, got {moved}")

    def _call(self, name: str, *arguments: Any) -> Any:
        function: Callable[..., Any] | None = getattr(self._library, name, None)
        if function is None:
            raise DeviceError(f"cuFile has no function {name}: unsupported version of cuda-bindings")
        try:
            return function(*arguments)
        except Exception as error:
            raise DeviceError(f"cuFile {name}: {error}") from error


T = TypeVar("T")

REASONS = ("no_gds", "gds_write", "gds_read", "unaligned", "host_checksum")
"""Reasons for which an image goes through host memory, in `GdsFileTier.fallbacks`."""

_log = logging.getLogger(__name__)


class GdsFileTier(FileTier):
    """A `FileTier` whose images are in `memory`, on a device."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int,
        image_bytes: int | Sequence[int],
        memory: ImageMemory,
        scope: bytes,
        threads: int = 16,
        io: RawIo | None = None,
        library: object | None = None,
        strict: bool = False,
    ) -> None:
        """As for `FileTier`. `library` stands for the functions of cuFile, for tests.

        With `strict` no image goes through host memory: raises `TierError` if cuFile cannot be used, and images that it
        refuses later end as `Status.DEVICE_ERROR`.
        """
        self._gds: GdsImageIO

        def open_images(segment: Segment) -> GdsImageIO:
            self._gds = GdsImageIO(memory, segment, load_cufile if library is None else lambda: library, strict=strict)
            return self._gds

        super().__init__(
            directory,
            capacity=capacity,
            image_bytes=image_bytes,
            arena=open_images,
            scope=scope,
            threads=threads,
            io=io,
        )

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """As for `FileTier`, and how many images went through host memory.

        `no_gds`: cuFile cannot be used here, so everything does. `gds_write`, `gds_read`: it refused an image.
        `unaligned`: an image that begins or ends within a page. `host_checksum`: a record whose checksum is not for
        devices, as one from host memory.
        """
        return {**super().fallbacks, **self._gds.fallbacks}


class GdsImageIO:
    """Moves images by cuFile where that can be had, else through host memory."""

    blocks = True

    def __init__(
        self, memory: ImageMemory, segment: Segment, load: Callable[[], object], *, strict: bool = False
    ) -> None:
        self._memory = memory
        self._strict = strict
        self._bound = threading.local()
        self._segment = segment
        self._fallbacks = dict.fromkeys(REASONS, 0)
        try:
            self._file = self._open(load)
        except DeviceError as error:
            raise TierError(str(error)) from error

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of images that went through host memory, by reason."""
        return dict(self._fallbacks)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory."""
        return self._memory.nbytes

    def can_coalesce(self, op: TierOp) -> bool:
        """Never: cuFile moves images one by one."""
        return False

    def write(
        self, ops: Sequence[TierOp], staging: Staging, file_offsets: Sequence[int], make_header: MakeHeader
    ) -> IoCoroutine[list[Status]]:
        """Write the image, then the header, so that no header precedes incomplete bytes for long."""
        (op,), (file_offset,), header = ops, file_offsets, staging.header
        if (file := self._file_for(op)) is not None:

            def store() -> int:
                found = self._memory.mix64(op.offset, op.length)
                file.write(op.offset, op.length, file_offset + DISK_PAGE)
                return found

            try:
                found = yield from self._wait(store)
            except DeviceError as error:
                self._count_fallback("gds_write", error)
            else:
                header[:] = make_header(0, MIX64, found)
                return (yield Move([Piece([header], file_offset)], writing=True))
        body = staging.padded(op.length)
        yield from self._wait(lambda: self._memory.load(op.offset, body[: op.length]))
        algorithm = XXH3_64 if self._file is None else MIX64  # the one that who reads it here computes fast
        header[:] = make_header(0, algorithm, checksum(algorithm, body[: op.length]))
        return (yield Move([Piece([header, body], file_offset)], writing=True))

    def read(
        self, ops: Sequence[TierOp], staging: Staging, file_offsets: Sequence[int], verifier: RecordVerifier
    ) -> IoCoroutine[list[Status]]:
        """Header and image, in two calls, side by side; then the checksum, by the device if it is for devices."""
        (op,), (file_offset,), image = ops, file_offsets, staging.bounce[: ops[0].length]
        is_staged = True
        if (file := self._file_for(op)) is not None:
            call = _Call(self.bind, lambda: file.read(op.offset, op.length, file_offset + DISK_PAGE))
            status, _ = yield Move([Piece([staging.header], file_offset), Piece([], file_offset, call)], writing=False)
            try:
                call.result()
                is_staged = False
            except DeviceError as error:
                self._count_fallback("gds_read", error)
        if is_staged:
            body = staging.bounce[: align(op.length)]
            (status,) = yield Move([Piece([staging.header, body], file_offset)], writing=False)
        if status is not Status.OK:
            return [status]
        header = verifier.check_header(0, staging.header)
        if header.status is not Status.OK:
            return [header.status]
        if header.algorithm == MIX64 and not is_staged:
            found = yield from self._wait(lambda: self._memory.mix64(op.offset, op.length))
        else:
            if not is_staged:
                self._count_fallback("host_checksum")
                yield from self._wait(lambda: self._memory.load(op.offset, image))
            found = checksum(header.algorithm, image)
        status = verifier.check_image(header, found)
        if is_staged and status is Status.OK:
            yield from self._wait(lambda: self._memory.store(op.offset, image))
        return [status]

    def close(self) -> None:
        """Close cuFile. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def bind(self) -> None:
        """Make the device the calling thread's own, before its first call."""
        if not getattr(self._bound, "done", False):
            self._memory.bind()
            self._bound.done = True

    def _open(self, load: Callable[[], object]) -> CuFile | None:
        """cuFile, after a test read of one page; `None` if that fails."""
        file: CuFile | None = None
        undo = self._memory.bind()
        try:
            if not self._segment.direct:
                raise DeviceError("the file system has no direct I/O")
            file = CuFile(load(), self._segment.fd, self._memory.address, self._memory.nbytes)
            file.read(0, DISK_PAGE, 0)
        except DeviceError as error:
            if file is not None:
                file.close()
            if not self._strict:
                _log.warning(
                    "GPUDirect Storage is not available (%s); file I/O goes through host memory, which is slower; "
                    "install cuFile (libcufile), or set another file_mode",
                    error,
                )
            self._count_fallback("no_gds", error)
            return None
        finally:
            undo()
        return file

    def _file_for(self, op: TierOp) -> CuFile | None:
        if self._file is not None and not is_aligned(op):
            self._count_fallback("unaligned")
            return None
        return self._file

    def _wait(self, work: Callable[[], T]) -> IoCoroutine[T]:
        """Run `work` in a thread of the queue; returns its result, or raises its exception."""
        call = _Call(self.bind, work)
        yield Move([Piece([], 0, call)], writing=False)
        return call.result()

    def _count_fallback(self, reason: str, error: DeviceError | None = None) -> None:
        """Count an image that goes through host memory; `DeviceError` in strict mode."""
        self._fallbacks[reason] += 1
        if self._strict:
            raise DeviceError(f"strict mode: the image would need host memory ({reason}): {error or 'not for cuFile'}")
        if error is not None:
            _log.debug("an image goes through host memory (%s): %s", reason, error)


class _Call(Generic[T]):
    """A call for a thread of the queue, with the device current in that thread."""

    def __init__(self, bind: Callable[[], None], work: Callable[[], T]) -> None:
        self._bind = bind
        self._work = work
        self._result: T | Exception = DeviceError("the call was never made")

    def __call__(self) -> int:
        """Make the call; returns 0, the result of the piece."""
        try:
            self._bind()
            self._result = self._work()
        except Exception as error:  # noqa: BLE001 - the executor tells a failure of the device from an error of ours
            self._result = error
        return 0

    def result(self) -> T:
        """The result of the call; raises its exception."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result
