"""`Arena`: host memory for chunk images. The transfer engine and the tiers read and write it by byte offset.

    map ─► bind to a node ─► ask for huge pages ─► touch every page ─► verify placement ─► register, piece by piece
                                                                                                       │
    unmap ◄─────────────────────────────────── unregister ◄─────────────────────── close, never a finaliser

Only a failed allocation is an error. Everything else that is not available is counted and logged, and the arena works
without it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from longshore.boundary import align
from longshore.errors import RegistrationError, TierClosedError, TierError
from longshore.tiers.arena.memory import (
    DONTNEED,
    REMOVE,
    Memory,
    System,
    advise_huge_pages,
    bind_to_node,
    bytes_coverable_by_huge_pages,
    count_huge_bytes,
    count_strays,
    create_shared,
    huge_page_bytes,
    node_of_device,
    open_shared,
    populate,
    touch_pages,
)
from longshore.tiers.arena.pinning import LARGEST_PIECE, Registrar, Registration, cut


class Fallback(Enum):
    """Reasons for which an arena has less than requested. It works all the same; copies may be slower."""

    NUMA_UNKNOWN = "numa_unknown"
    """The NUMA node of the device is unknown; memory is allocated on any node."""

    NUMA_REFUSED = "numa_refused"
    """The system refused to bind the memory to the node."""

    NUMA_STRAYS = "numa_strays"
    """The node had too little memory; some pages are on another node."""

    NUMA_UNVERIFIED = "numa_unverified"
    """The memory is bound, but the system does not report where its pages are."""

    HUGE_PAGES = "huge_pages"
    """Only part of the memory is on huge pages."""

    POPULATE = "populate"
    """The kernel cannot allocate pages ahead: they were touched one by one, or are allocated at their first use."""

    REGISTRATION = "registration"
    """The device refused a piece (counted once per piece); its copies use a staging buffer."""


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """State of an arena; after `close`, the last state.

    Attributes:
        nbytes: Its size in bytes.
        shared: Whether other processes can attach to it.
        numa_node: The node configured, or found for the device; `None` for none.
        numa_bound: Whether the memory is bound to that node.
        huge_bytes: Bytes on huge pages at creation.
        registered_pieces: Pieces registered with the device.
        registered_bytes: Bytes in these pieces.
        fallbacks: Count of each fallback; every member of `Fallback` is present.
    """

    nbytes: int
    shared: bool
    numa_node: int | None
    numa_bound: bool
    huge_bytes: int
    registered_pieces: int
    registered_bytes: int
    fallbacks: Mapping[Fallback, int]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArenaSettings:
    """Settings of an arena. Raises `TierError` for an invalid node.

    Attributes:
        numa_node: NUMA node of the memory: a number, `"auto"` for the device's node, or `None` for any.
        pci_address: PCI address of the device for `"auto"`, such as `0000:3b:00.0`; `None` without a device.
        huge_pages: Whether to use huge pages where available.
        shared: Whether other processes can attach; private memory gets huge pages more easily.
    """

    numa_node: int | Literal["auto"] | None = "auto"
    pci_address: str | None = None
    huge_pages: bool = True
    shared: bool = False

    def __post_init__(self) -> None:
        node = self.numa_node
        if node is not None and node != "auto" and (not isinstance(node, int) or node < 0):
            raise TierError(f"expected numa_node to be a node number, 'auto' or None, got {node!r}")


class Arena:
    """`nbytes` of host memory, rounded up to a page, zeroed, page-aligned, with all pages allocated.

    Attributes:
        nbytes: Size in bytes.
        address: Address of the first byte, for copy plans.
        is_given_back: Whether the memory is not to be used, as it was given back.
        lifeline: Descriptor that each process which this one lets attach to the arena inherits and keeps open; `None`
            for none. Once all copies of it are closed, none of them writes to the arena any more.
    """

    lifeline: int | None = None

    def __init__(
        self,
        nbytes: int,
        settings: ArenaSettings | None = None,
        *,
        system: System | None = None,
        shared_fd: int | None = None,
    ) -> None:
        """`shared_fd` is existing shared memory, which the arena then owns; see `attach`.

        Raises `TierError` if the memory cannot be allocated; nothing is left behind.
        """
        if nbytes <= 0:
            raise TierError(f"expected a positive arena size in bytes, got {nbytes}")
        settings = settings or ArenaSettings()
        self.nbytes = align(nbytes)
        self._system = system or System()
        self._fallbacks: Counter[Fallback] = Counter()
        self._registration: Registration | None = None
        self._pieces: list[tuple[int, int]] = []
        self._fresh = shared_fd is None
        self.is_given_back = False
        self._numa_bound = False
        self._huge_bytes = 0
        page = huge_page_bytes(self._system)
        alignment = page if self.nbytes >= page else mmap.PAGESIZE
        self._memory = _map(self.nbytes, alignment, shared_fd, shared=settings.shared)
        self.address = self._memory.address
        self._shared = self._memory.fd is not None
        with contextlib.ExitStack() as undo:
            undo.callback(self._memory.close)
            self._numa_node = self._find_node(settings)
            self._bind()
            advise_huge_pages(self._system, self.address, self.nbytes, wanted=settings.huge_pages)
            self._populate()
            self._count_stray_pages()
            if settings.huge_pages:
                self._count_huge_pages(bytes_coverable_by_huge_pages(self.address, self.nbytes, page))
            undo.pop_all()

    @classmethod
    def attach(cls, source: int | str | Path, nbytes: int, *, system: System | None = None) -> Self:
        """Map a shared arena of `nbytes` in another process, which registers and closes it separately.

        `source` is the other arena's `path`, or a file descriptor received over a socket or by inheritance, which the
        caller closes. The creator decided the placement of the memory. Raises `TierError` if the source does not exist,
        is not an arena, or has another size.
        """
        fd = open_shared(source, nbytes)
        return cls(nbytes, ArenaSettings(numa_node=None, shared=True), system=system, shared_fd=fd)

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The whole arena, shape `(nbytes,)`, uint8, writable."""
        array = self._memory.array
        if array is None:
            raise TierClosedError("the arena was closed")
        return array

    @property
    def fd(self) -> int:
        """File descriptor of the memory, to pass to another process; `TierError` when the arena is private."""
        if not self._shared:
            raise TierError("the arena is private: expected one made with shared=True")
        if self._memory.fd is None:
            raise TierClosedError("the arena was closed")
        return self._memory.fd

    @property
    def path(self) -> Path:
        """Path under which other processes of this user can open the memory while this process has it."""
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    @property
    def report(self) -> ArenaReport:
        """The result of the allocation. After `close`, nothing is registered; the rest stays as it was."""
        return ArenaReport(
            nbytes=self.nbytes,
            shared=self._shared,
            numa_node=self._numa_node,
            numa_bound=self._numa_bound,
            huge_bytes=self._huge_bytes,
            registered_pieces=0 if self._registration is None else self._registration.pieces,
            registered_bytes=0 if self._registration is None else self._registration.nbytes,
            fallbacks={reason: self._fallbacks[reason] for reason in Fallback},
        )

    def view(self, offset: int, length: int) -> memoryview[Any]:
        """Writable bytes `[offset, offset + length)`; raises `TierError` if they are outside the arena."""
        if offset < 0 or length < 0 or offset + length > self.nbytes:
            raise TierError(f"bytes [{offset}, {offset + length}) are outside an arena of {self.nbytes} bytes")
        return self.array.data[offset : offset + length]

    def zero(self, offset: int, length: int) -> None:
        """Zero bytes `[offset, offset + length)`; raises `TierError` if they are outside the arena."""
        self.view(offset, length)[:] = bytes(length)

    def register(self, registrar: Registrar, slot_bytes: int, largest: int = LARGEST_PIECE) -> None:
        """Register the arena with a device, in pieces of at most `largest` bytes that no slot straddles.

        Slots of `slot_bytes`, a multiple of `DISK_PAGE`, are adjacent from the start. A piece that the device refuses
        is counted and is not an error. Raises `TierError` for impossible sizes and for a second registration.
        """
        pieces = cut(self.array.nbytes, slot_bytes, largest)
        if self._registration is not None:
            raise TierError("the arena is registered already")
        self._registration, self._pieces = Registration(registrar, self.address), pieces
        self._add_pieces(self._registration)

    def give_back(self) -> None:
        """Unregister and free the memory, for all processes that share it; its addresses stay, its bytes are lost.

        No device, thread or process may use it until `take_back`. Raises `RegistrationError`, or `TierError`, if it
        cannot be freed; `take_back` registers it again then, too.
        """
        nbytes, advice = self.array.nbytes, REMOVE if self._shared else DONTNEED
        self.is_given_back = True
        if self._registration is not None:
            self._registration.close()
        try:
            self._system.madvise(self.address, nbytes, advice)
        except OSError as error:
            raise TierError(f"cannot free {self.nbytes} bytes of host memory: {error}") from error

    def take_back(self) -> None:
        """Allocate the memory again, as zeros, and register it as before. Raises `TierError` if there is not enough."""
        if self._memory.array is None:
            raise TierClosedError("the arena was closed")
        self._populate()
        if self._registration is not None:
            self._add_pieces(self._registration)
        self.is_given_back = False

    def _add_pieces(self, registration: Registration) -> None:
        for offset, length in self._pieces:
            try:
                registration.add(offset, length)
            except RegistrationError as error:
                self._count_fallback(
                    Fallback.REGISTRATION, f"bytes [{offset}, {offset + length}) cannot be pinned: {error}"
                )

    def in_one_piece(self, offsets: npt.ArrayLike, lengths: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Whether each `[offset, offset + length)` is within one registered piece, for direct copies.

        Arguments are integers of any shape, broadcast together; the result is bool, of the broadcast shape.
        """
        if self._registration is None:
            return np.zeros(np.broadcast(offsets, lengths).shape, dtype=np.bool_)
        return self._registration.covers(offsets, lengths)

    def close(self) -> None:
        """Unregister and free the memory. Idempotent. No device may be copying.

        Existing views keep the mapping alive. Raises `RegistrationError` if a piece cannot be unregistered; the memory
        is freed all the same.
        """
        try:
            if self._registration is not None:
                self._registration.close()
        finally:
            self._memory.close()

    def _find_node(self, settings: ArenaSettings) -> int | None:
        if settings.numa_node != "auto":
            return settings.numa_node
        if settings.pci_address is None:
            return None
        node = node_of_device(settings.pci_address, self._system.sysfs)
        if node is None:
            self._count_fallback(
                Fallback.NUMA_UNKNOWN, f"the NUMA node of the device at {settings.pci_address} is unknown"
            )
        return node

    def _bind(self) -> None:
        if self._numa_node is None:
            return
        try:
            bind_to_node(self._system, self.address, self.nbytes, self._numa_node)
            self._numa_bound = True
        except OSError as error:
            self._count_fallback(
                Fallback.NUMA_REFUSED, f"memory cannot be bound to NUMA node {self._numa_node}: {error}"
            )

    def _populate(self) -> None:
        try:
            if populate(self._system, self.address, self.nbytes):
                return
        except OSError as error:
            raise TierError(f"cannot allocate {self.nbytes} bytes of host memory: {error}") from error
        self._count_fallback(
            Fallback.POPULATE, "this kernel has no MADV_POPULATE_WRITE, so pages are touched one by one"
        )
        if self._fresh:  # a zero written into memory that others use would be a wrong byte
            touch_pages(self.array)

    def _count_stray_pages(self) -> None:
        if self._numa_node is None or not self._numa_bound:
            return
        try:
            strays = count_strays(self._system, self.address, self.nbytes, self._numa_node)
        except OSError as error:
            self._count_fallback(
                Fallback.NUMA_UNVERIFIED, f"cannot check which pages are on NUMA node {self._numa_node}: {error}"
            )
            return
        if strays:
            self._count_fallback(
                Fallback.NUMA_STRAYS, f"{strays} of the pages sampled are not on NUMA node {self._numa_node}"
            )

    def _count_huge_pages(self, possible: int) -> None:
        if possible:  # the system takes its time to say
            self._huge_bytes = count_huge_bytes(self._system, self.address, self.nbytes)
        if self._huge_bytes < possible:
            self._count_fallback(Fallback.HUGE_PAGES, f"only {self._huge_bytes} of {possible} bytes are on huge pages")

    def _count_fallback(self, reason: Fallback, about: str) -> None:
        self._fallbacks[reason] += 1
        advice = "see Limits of the machine in docs/operations.md"
        _log.warning("host arena: %s (%s); copies may be slower; %s", about, reason.value, advice)


def _map(nbytes: int, alignment: int, fd: int | None, *, shared: bool) -> Memory:
    try:
        if fd is None and shared:
            fd = create_shared(nbytes)
        return Memory(nbytes, alignment, fd)
    except (OSError, OverflowError) as error:
        if fd is not None:
            os.close(fd)
        raise TierError(f"cannot allocate {nbytes} bytes of host memory: {error}") from error
