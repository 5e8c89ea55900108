"""`longshore bench plan`: from a transfer's ids to arrays of addresses and sizes.

Both sides get the same ids, as Python integers, and fill the same three arrays. Ours checks every id and merges runs.
The reference is the plain way: for each reference of the layout, whole-array arithmetic over its blocks; it checks
nothing and merges nothing. Blocks and slots are scattered, so nothing merges, which is the most to describe.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from longshore.bench.harness import Case, Seconds, chosen, compare, duration, timed
from longshore.boundary import HOST, Section
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer.plan import Plan, Planner

REFERENCE = "numpy loop over references"

_PAGE_BYTES = 1024
_SPARE = 4  # times as many blocks and slots as one transfer names, to scatter them over


class Shape(NamedTuple):
    """What one case plans."""

    references: int
    blocks: int
    blocks_per_chunk: int


SHAPES = {
    "plan/1000/1": Shape(80, 12, 1),
    "plan/1000/4": Shape(80, 12, 4),
    "plan/10240/1": Shape(80, 128, 1),
    "plan/10240/4": Shape(80, 128, 4),
    "plan/100000/1": Shape(80, 1250, 1),
    "plan/100000/4": Shape(80, 1250, 4),
    "plan/8-refs": Shape(8, 1280, 1),
}
"""By name of the case. 1,000 descriptors over 80 references are 12 blocks, 960 descriptors."""


def run(*, repeats: int = 41, only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of `SHAPES`, one after the other."""
    for name in chosen(list(SHAPES), only):
        work = Work.of(SHAPES[name])
        yield duration(name, _measure(work, repeats), REFERENCE)


@dataclass(frozen=True, slots=True)
class Work:
    """Ids of one transfer, and the layout they are of."""

    layout: KVLayout
    blocks: tuple[int, ...]
    images: list[int]
    host_bytes: int

    @classmethod
    def of(cls, shape: Shape, seed: int = 0) -> Work:
        """Scattered blocks and slots; the last chunk is partial where the blocks do not fill it."""
        chooser = random.Random(seed)  # noqa: S311 - no secret
        num_blocks = shape.blocks * _SPARE
        tensors = [_Untouched(num_blocks * _PAGE_BYTES) for _ in range(shape.references)]
        refs = tuple(PageRef(index, 0, _PAGE_BYTES, _PAGE_BYTES) for index in range(shape.references))
        layout = KVLayout((KVGroup("kv", 16, shape.blocks_per_chunk, refs),), tensors, num_blocks)
        chunks = -(-shape.blocks // shape.blocks_per_chunk)
        slots = chooser.sample(range(chunks * _SPARE), chunks)
        return cls(
            layout,
            tuple(chooser.sample(range(num_blocks), shape.blocks)),
            [slot * layout.image_bytes for slot in slots],
            chunks * _SPARE * layout.image_bytes,
        )


def _measure(work: Work, repeats: int) -> Seconds:
    planner = Planner()
    loops = max(1, 40_000 // (len(work.blocks) * len(work.layout.groups[0].refs)))
    return compare(timed(lambda: ours(work, planner), loops), timed(baseline(work), loops), repeats=repeats, warm_ups=3)


def ours(work: Work, planner: Planner) -> Plan:
    """The transfer as Longshore plans it."""
    return planner.plan(
        work.layout,
        [Section(0, 0, work.blocks)],
        work.images,
        into=HOST,
        host_address=0,
        host_bytes=work.host_bytes,
    )


class Addresses(NamedTuple):
    """What the reference makes: int64 arrays of one shape `(descriptors,)`."""

    source: npt.NDArray[np.int64]
    destination: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]


def baseline(work: Work) -> Callable[[], Addresses]:
    """The transfer planned reference by reference, as a competent engineer would at first."""
    group = work.layout.groups[0]
    table = work.layout.table(0)
    bases = table.base.tolist()
    per_chunk = group.blocks_per_chunk

    def per_reference() -> Addresses:
        blocks = np.array(work.blocks, dtype=np.int64)
        images = np.array(work.images, dtype=np.int64)
        total = len(blocks) * len(group.refs)
        made = Addresses(*(np.empty(total, dtype=np.int64) for _ in range(3)))
        at = offset = 0
        for base, ref in zip(bases, group.refs, strict=True):
            end = at + len(blocks)
            made.source[at:end] = base + blocks * ref.stride
            places = offset + np.arange(per_chunk, dtype=np.int64) * ref.page_bytes
            made.destination[at:end] = (images[:, None] + places).reshape(-1)[: len(blocks)]
            made.size[at:end] = ref.page_bytes
            at, offset = end, offset + ref.page_bytes * per_chunk
        return made

    return per_reference


class _Untouched:
    """Device memory that is only described: a tensor of bytes, as far as a layout asks."""

    dtype = "uint8"
    device = "cpu"
    _next = 1 << 40

    def __init__(self, nbytes: int) -> None:
        self.shape = (nbytes,)
        self._nbytes = nbytes
        # Apart from each other by no multiple of a page, as an allocator would place them.
        self._address = _Untouched._next
        _Untouched._next += nbytes + 4096 + 64

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._nbytes

    def element_size(self) -> int:
        return 1

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def untyped_storage(self) -> _Untouched:
        return self
