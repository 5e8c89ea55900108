"""The memory behind an arena: its mapping, its NUMA node, its huge pages, and the first touch of its pages.

                 multiple of `alignment`
    ┌─────────────┬──────────────────────────┬─────────────┐
    │  forbidden  │  nbytes                  │  forbidden  │      one address range, unmapped as a whole
    └─────────────┴──────────────────────────┴─────────────┘

**Mapping.** It has exactly the requested size, aligned for huge pages, between inaccessible guard pages: an overrun
faults instead of writing to other memory. Shared memory is a memfd with a sealed size, so that no process can shrink it
while another copies into it.

**NUMA.** Copies to the memory of another node use the link between the sockets. The node of a device is preferred, not
required: with `MPOL_BIND`, the out-of-memory killer ends the process when the node is full, even if other nodes have
free memory, and an arena is often larger than one node. `count_strays` counts the pages on other nodes.

**Huge pages** are requested before the first touch and counted in `smaps` after it, because a request does not
guarantee them: they may be disabled, memory may be fragmented, or the mapping misaligned.

**First touch.** All pages are allocated before the first use, in several threads without the interpreter lock. A copy
into a page that is not allocated runs at a fraction of memory speed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.boundary import DISK_PAGE, align
from longshore.errors import TierError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_FIXED = 0x01, 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def syscall(number: int, *arguments: object) -> int:
    """System call `number`; the arguments are ctypes objects or ints of 32 bits. Raises `OSError`."""
    result: int = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise _last_error()
    return result


def madvise(address: int, nbytes: int, advice: int) -> None:
    """Like `mmap.madvise`, but for any range, and without the interpreter lock. Raises `OSError`."""
    if _libc.madvise(address, nbytes, advice):
        raise _last_error()


def forbid(address: int, nbytes: int) -> None:
    """Make this range inaccessible. Raises `OSError`."""
    if _libc.mprotect(address, nbytes, _PROT_NONE):
        raise _last_error()


def map_over(address: int, nbytes: int, fd: int) -> None:
    """Map the first `nbytes` of file `fd`, shared, over the mapping at `address`. Raises `OSError`."""
    flags = _MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, nbytes, _PROT_READ | _PROT_WRITE, flags, fd, 0) == _MAP_FAILED:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@dataclass(frozen=True, slots=True)
class System:
    """The system calls and paths that an arena uses.

    Attributes:
        syscall: `syscall` above, for calls without a function in the C library.
        madvise: `madvise` above.
        sysfs: Where sysfs is mounted.
        process: The directory of this process in procfs.
    """

    syscall: Callable[..., int] = syscall
    madvise: Callable[[int, int, int], None] = madvise
    sysfs: Path = Path("/sys")
    process: Path = Path("/proc/self")


DONTNEED, REMOVE = 4, 9
"""Advice of `madvise` that frees pages: of private memory, and of shared memory for all that have it."""

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def create_shared(nbytes: int) -> int:
    """File descriptor of `nbytes` of memory that other processes can map; its size never changes.

    Raises `OSError`, or `OverflowError` for a size that no file has.
    """
    fd = os.memfd_create("longshore-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except (OSError, OverflowError):
        os.close(fd)
        raise
    return fd


def open_shared(source: int | str | Path, nbytes: int) -> int:
    """A new file descriptor for the shared memory of another arena.

    `source` is a descriptor received over a socket or by inheritance (which the caller keeps), or its path,
    `/proc/PID/fd/N`. Raises `TierError` if it cannot be opened, is not an arena, or has another size than `nbytes`
    rounded up to a page.
    """
    try:
        fd = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise TierError(f"cannot open the arena at {source}: {error.strerror}") from error
    try:
        _check_shared(fd, source, align(nbytes))
    except TierError:
        os.close(fd)
        raise
    return fd


def _check_shared(fd: int, source: int | str | Path, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise TierError(f"{source} is not an arena: expected a memfd ({error.strerror})") from error
    if seals & _SEALS != _SEALS:
        raise TierError(f"{source} is not an arena: its size is not sealed (seals {seals:#x})")
    found = os.fstat(fd).st_size
    if found != nbytes:
        raise TierError(f"the arena at {source} has {found} bytes, expected {nbytes}")


class Memory:
    """`nbytes` at `address`, a multiple of `alignment`; private and zeroed, or the shared memory `fd`.

    `fd` belongs to the memory from then on. Raises `OSError`, or `OverflowError` for a size beyond the address space;
    only `fd` is left then.
    """

    def __init__(self, nbytes: int, alignment: int, fd: int | None = None) -> None:
        span = nbytes + 2 * alignment
        mapping = mmap.mmap(-1, span, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole: npt.NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8)
        first: int = whole.__array_interface__["data"][0]
        self.nbytes = nbytes
        self.address = _round_up(first + 1, alignment)
        self.fd = fd
        offset = self.address - first
        end = offset + _round_up(nbytes, mmap.PAGESIZE)
        try:
            if fd is not None:
                map_over(self.address, nbytes, fd)
            forbid(first, offset)
            forbid(first + end, span - end)
        except OSError:
            del whole
            mapping.close()
            raise
        self._mapping: mmap.mmap | None = mapping
        self.array: npt.NDArray[np.uint8] | None = whole[offset : offset + nbytes]
        """All bytes, shape `(nbytes,)`, writable; `None` once closed."""

    def close(self) -> None:
        """Free the mapping. Idempotent. Existing views keep it alive."""
        self.array = None
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            with contextlib.suppress(BufferError):  # a view is still exported: the mapping goes with the last of them
                mapping.close()
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


_DEFAULT_SIZE = 2 << 20
_HEADER = re.compile(r"([0-9a-f]+)-[0-9a-f]+ ")
_FIELD = re.compile(r"(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped): +(\d+) kB")


def huge_page_bytes(system: System) -> int:
    """Bytes of one huge page."""
    try:
        return int(system.sysfs.joinpath("kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return _DEFAULT_SIZE


def advise_huge_pages(system: System, address: int, nbytes: int, *, wanted: bool) -> None:
    """Request huge pages for this range, or disable them, where the kernel knows any; what came of it is counted."""
    with contextlib.suppress(OSError):
        system.madvise(address, nbytes, mmap.MADV_HUGEPAGE if wanted else mmap.MADV_NOHUGEPAGE)


def bytes_coverable_by_huge_pages(address: int, nbytes: int, page: int) -> int:
    """Bytes of this range that whole huge pages of `page` bytes can cover."""
    return max(0, (address + nbytes) // page - -(-address // page)) * page


def count_huge_bytes(system: System, address: int, nbytes: int) -> int:
    """Bytes of this range, a mapping of its own, that are on huge pages; zero if the system does not report it."""
    try:
        with system.process.joinpath("smaps").open() as lines:
            return _count_in_smaps(lines, address, address + nbytes)
    except OSError:
        return 0


def _count_in_smaps(lines: Iterable[str], start: int, end: int) -> int:
    found = 0
    inside = False
    for line in lines:
        header = _HEADER.match(line)
        if header is not None:
            first = int(header[1], 16)
            if first >= end:
                break
            inside = first >= start
        elif inside and (field := _FIELD.match(line)):
            found += int(field[1]) << 10
    return found


MPOL_PREFERRED = 1
_SAMPLES = 1024
_BITS = 64


class _Numbers(NamedTuple):
    mbind: int
    move_pages: int


# From the kernel's tables: arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h.
_NUMBERS = {"x86_64": _Numbers(237, 279), "aarch64": _Numbers(235, 239)}

_PCI_ADDRESS = re.compile(r"0*([0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")


def node_of_device(pci_address: str, sysfs: Path) -> int | None:
    """The node of the device at `pci_address`, such as `0000:3B:00.0`; `None` if the machine does not report it."""
    match = _PCI_ADDRESS.fullmatch(pci_address.lower())
    if match is None:
        return None
    try:
        node = int(sysfs.joinpath("bus/pci/devices", match[1], "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def bind_to_node(system: System, address: int, nbytes: int, node: int) -> None:
    """Allocate untouched pages of this range on `node` while it has free memory. Raises `OSError`."""
    words = node // _BITS + 1
    mask = (ctypes.c_uint64 * words)()
    mask[-1] = 1 << node % _BITS
    system.syscall(
        _numbers().mbind,
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_int(MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _BITS + 1),  # the kernel takes one off
        ctypes.c_uint(0),
    )


def count_strays(system: System, address: int, nbytes: int, node: int) -> int:
    """Number of pages not on `node`, of about a thousand evenly spread touched pages. Raises `OSError`."""
    pages = -(-nbytes // DISK_PAGE)
    samples = np.unique(np.linspace(0, pages - 1, min(pages, _SAMPLES)).astype(np.uint64))
    addresses = samples * np.uint64(DISK_PAGE) + np.uint64(address)
    found = np.zeros(len(samples), dtype=np.int32)
    system.syscall(
        _numbers().move_pages,  # without nodes to move to it only looks
        ctypes.c_int(0),
        ctypes.c_ulong(len(samples)),
        ctypes.c_void_p(addresses.ctypes.data),
        None,
        ctypes.c_void_p(found.ctypes.data),
        ctypes.c_int(0),
    )
    if found.min() < 0:
        raise OSError(-int(found.min()), os.strerror(-int(found.min())))
    return int((found != node).sum())


def _numbers() -> _Numbers:
    try:
        return _NUMBERS[platform.machine()]
    except KeyError:
        raise OSError(errno.ENOSYS, f"NUMA system calls are not supported on {platform.machine()}") from None


MADV_POPULATE_WRITE = 23
_RANGE = 64 << 20
"""Bytes that one thread touches at a time: a multiple of the usual huge page."""

_MOST_THREADS = 16


def populate(system: System, address: int, nbytes: int) -> bool:
    """Have the kernel allocate all pages; their content stays. Returns whether the kernel can (Linux 5.14 and newer).

    Raises `OSError` if there is not enough memory.
    """

    def work(start: int, stop: int) -> None:
        system.madvise(address + start, stop - start, MADV_POPULATE_WRITE)

    try:
        _in_ranges(work, nbytes)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def touch_pages(array: npt.NDArray[np.uint8]) -> None:
    """Write a zero into every page of `array`, which must not be in use."""

    def work(start: int, stop: int) -> None:
        array[start:stop:DISK_PAGE] = 0

    _in_ranges(work, array.nbytes)


def _in_ranges(work: Callable[[int, int], None], nbytes: int) -> None:
    starts = range(0, nbytes, _RANGE)
    stops = [min(start + _RANGE, nbytes) for start in starts]
    if len(starts) == 1:
        work(starts[0], stops[0])
        return
    # One thread per core that this process may use, up to the number that saturates a memory controller.
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)), len(starts))
    with ThreadPoolExecutor(threads, thread_name_prefix="longshore-arena") as pool:
        list(pool.map(work, starts, stops))
