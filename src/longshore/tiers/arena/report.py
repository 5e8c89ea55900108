"""What an arena was to be and what it is: every fallback has a name and a count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Fallback(Enum):
    """Why an arena is less than it was asked to be. The bytes are right all the same; copies may be slower."""

    NUMA_UNKNOWN = "numa_unknown"
    """The machine does not say which node the device hangs on: memory is taken wherever it is."""

    NUMA_REFUSED = "numa_refused"
    """The system did not let the memory be bound to the node."""

    NUMA_STRAYS = "numa_strays"
    """The node had too little memory: some pages are on another one."""

    NUMA_UNVERIFIED = "numa_unverified"
    """Bound, but the system does not say where the pages are."""

    HUGE_PAGES = "huge_pages"
    """Not all that could be on huge pages is."""

    POPULATE = "populate"
    """The kernel cannot make pages ahead: ours were touched one by one, another process's come at their first use."""

    REGISTRATION = "registration"
    """The device did not take a piece; counted once for each: its copies go through a staging buffer."""


@dataclass(frozen=True, slots=True)
class ArenaReport:
    """An arena at one moment; after its end, as it was.

    Attributes:
        nbytes: Its size in bytes.
        shared: Whether other processes can attach to it.
        numa_node: The node that was asked for, or found to be the device's; `None` for none.
        numa_bound: Whether its memory is bound to that node.
        huge_bytes: Bytes on huge pages, when it was made.
        registered_pieces: Pieces that the device reaches directly.
        registered_bytes: Bytes in them.
        fallbacks: How often each fallback was taken; every member of `Fallback` is there.
    """

    nbytes: int
    shared: bool
    numa_node: int | None
    numa_bound: bool
    huge_bytes: int
    registered_pieces: int
    registered_bytes: int
    fallbacks: Mapping[Fallback, int]
