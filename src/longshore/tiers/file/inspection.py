"""What a tier directory holds, summed up from its index; from the headers of all records where it has none.

Audit ──► entries ──► Inspection     occupancy, and by scope and by age: records, bytes, reads that were served
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np

from longshore.tiers.file.audit import Audit, Condition, Finding
from longshore.tiers.file.format import Superblock
from longshore.tiers.file.index_format import ENTRY, Entries, pack_entry

_HOUR, _DAY = 3600, 24 * 3600
_AGES = ((_HOUR, "in the last hour"), (_DAY, "in the last day"), (7 * _DAY, "in the last week"))


@dataclass(frozen=True, slots=True)
class Scope:
    """The records of one scope.

    Attributes:
        scope: Its fingerprint, in hexadecimal.
        bytes: Of their images.
        reads: How often they were served; as of the last checkpoint.
        written: Seconds of Unix time when the newest was written; 0 where that is not known.
        current: Whether the record written last is of this scope.
    """

    scope: str
    records: int
    bytes: int
    reads: int
    written: int
    current: bool


@dataclass(frozen=True, slots=True)
class Size:
    """The records of one image size.

    Attributes:
        image_bytes: Of the longest image of such a slot.
        per_slab: How many such slots a slab has.
        slabs: How many have records of this size.
    """

    image_bytes: int
    per_slab: int
    slabs: int
    records: int


@dataclass(frozen=True, slots=True)
class Age:
    """How many records were written when."""

    written: str
    records: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a directory holds.

    Attributes:
        slabs: How many there are, `slab_bytes` large.
        generation: Nothing older is served.
        opens: How many processes have opened it.
        bytes_on_disk: What the segment takes there.
        from_index: Whether this is what the index says; without one, neither reads nor ages are known.
        stale: Records of earlier generations: free space.
        records: Of the others.
        full: What part of the slabs these take; from 0 to 1.
        live: Whether a process has the directory open.
    """

    slabs: int
    slab_bytes: int
    generation: int
    opens: int
    bytes_on_disk: int
    from_index: bool
    records: int
    stale: int
    full: float
    live: bool
    sizes: tuple[Size, ...]
    scopes: tuple[Scope, ...]
    ages: tuple[Age, ...]

    def as_json(self) -> dict[str, object]:
        """What `--json` prints."""
        return asdict(self)


def inspect(audit: Audit, headers: Iterable[Finding], now: float) -> Inspection:
    """Sum up what is in the directory of `audit`, at `now` in Unix time; `headers` are read only without an index."""
    found = audit.entries()
    entries = _from_headers(headers) if found is None else found
    live = entries[entries["generation"] >= audit.superblock.generation]
    geometry = audit.superblock.geometry
    return Inspection(
        slabs=audit.superblock.slabs,
        slab_bytes=audit.superblock.slab_bytes,
        generation=audit.superblock.generation,
        opens=audit.superblock.opens,
        bytes_on_disk=audit.bytes_on_disk,
        from_index=found is not None,
        records=len(live),
        stale=len(entries) - len(live),
        full=float(np.array(geometry.image_bytes)[live["pool"]].sum()) / geometry.nbytes,
        live=audit.live,
        sizes=_sizes(live, audit.superblock),
        scopes=_scopes(live),
        ages=_ages(live, now),
    )


def _from_headers(headers: Iterable[Finding]) -> Entries:
    counted = (Condition.WHOLE, Condition.STALE)
    whole = [each.header for each in headers if each.header is not None and each.condition in counted]
    return np.frombuffer(b"".join(pack_entry(header, 0) for header in whole), ENTRY)


def _sizes(entries: Entries, superblock: Superblock) -> tuple[Size, ...]:
    geometry, sizes = superblock.geometry, []
    for pool, image_bytes in enumerate(superblock.image_bytes):
        slots = entries["slot"][entries["pool"] == pool]
        sizes.append(Size(image_bytes, geometry.images[pool], len(np.unique(slots // geometry.stride)), len(slots)))
    return tuple(sizes)


def _scopes(entries: Entries) -> tuple[Scope, ...]:
    """By scope, the largest first."""
    last = entries["scope"][entries["sequence"].argmax()].item().hex() if len(entries) else ""
    names = np.array([scope.hex() for scope in entries["scope"].tolist()], dtype=str)
    scopes = []
    for name in np.unique(names).tolist():
        own = entries[names == name]
        nbytes, reads = int(own["length"].sum()), int(own["hits"].sum(dtype=np.int64))
        scopes.append(Scope(name, len(own), nbytes, reads, int(own["written"].max()), name == last))
    return tuple(sorted(scopes, key=lambda scope: (-scope.bytes, scope.scope)))


def _ages(entries: Entries, now: float) -> tuple[Age, ...]:
    known = entries["written"] > 0
    age = now - entries["written"].astype(np.int64)
    left, ages = known, []
    for limit, name in _AGES:
        ages.append(Age(name, int((left & (age <= limit)).sum())))
        left = left & (age > limit)
    ages.append(Age("longer ago", int(left.sum())))
    if not known.all():
        ages.append(Age("not known", int((~known).sum())))
    return tuple(ages)
