"""The result of an arena's allocation: every fallback has a name and a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


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
