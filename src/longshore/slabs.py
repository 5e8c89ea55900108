"""Placement of block images of several sizes in one tier: in slabs, each of one size while it is in use.

    bytes     │ slab 0            │ slab 1            │ slab 2            │
    used for  │ A │ A │ A │ A │ ··│ B       │ B       │ nothing           │
    index       0   1   2   3       4         5         8                     stride 4: the most images in a slab

A *pool* is one image size. A slot is (tier, pool, index), with one space of indices for all sizes of the tier:
`index = slab * stride + position`. Attributes of slots therefore need one column for all sizes; only allocation and the
computation of byte offsets depend on sizes.

With one size, a slab is one image, and an index counts images: contiguous, without unused bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import numpy.typing as npt

from longshore.errors import LayoutError, PlanError

I64 = npt.NDArray[np.int64]

PAGE = 4096
"""Alignment of every image in bytes, as required by direct I/O."""

_LOSS = 1 / 16
"""Largest acceptable waste at the end of a slab, as a share."""

_LEAST_SLABS = 16
"""Least number of slabs per image size, if possible."""


def align(size: int) -> int:
    """`size` rounded up to a multiple of `PAGE`."""
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Slabs:
    """`slabs` slabs of `slab_bytes`, for images of the sizes `image_bytes`, which are numbered: the pools.

    Attributes:
        slab_bytes: Bytes of one slab.
        image_bytes: Bytes of an image, by pool, including what the tier stores with it.
        slabs: How many slabs there are; may be zero.
        images: Images that a slab has room for, by pool.
        stride: The maximum of these: the indices of one slab.

    Raises:
        LayoutError: Sizes that are not positive, a slab that is too small for an image, a negative number of slabs.
    """

    slab_bytes: int
    image_bytes: tuple[int, ...]
    slabs: int
    images: tuple[int, ...] = field(init=False, repr=False, compare=False)
    stride: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.image_bytes or min(self.image_bytes) <= 0 or max(self.image_bytes) > self.slab_bytes:
            raise LayoutError(f"expected image sizes from 1 to {self.slab_bytes} bytes, got {self.image_bytes}")
        if self.slabs < 0:
            raise LayoutError(f"expected zero or more slabs, got {self.slabs}")
        images = tuple(self.slab_bytes // each for each in self.image_bytes)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "stride", max(images))

    @classmethod
    def of_one_size(cls, image_bytes: int, slots: int) -> Self:
        """`slots` images of one size: a slab for each."""
        return cls(image_bytes, (image_bytes,), slots)

    @classmethod
    def within(cls, nbytes: int, image_bytes: Sequence[int]) -> Self:
        """As many slabs as fit into `nbytes`, as small as possible without wasting much at their ends.

        Small slabs cost least to reclaim for another size. There may be none, if `nbytes` is too small.
        """
        sizes = tuple(image_bytes)
        largest = max(sizes, default=0)
        cls(largest, sizes, 0)  # which says what is wrong
        best = largest
        for slab_bytes in range(largest, max(largest, nbytes // (_LEAST_SLABS * len(sizes))) + 1, largest):
            if _loss(slab_bytes, sizes) < _loss(best, sizes):
                best = slab_bytes
            if _loss(best, sizes) <= _LOSS:
                break
        return cls(best, sizes, max(0, nbytes // best))

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs."""
        return self.slabs * self.slab_bytes

    @property
    def indices(self) -> int:
        """Upper bound (exclusive) of the slot indices."""
        return self.slabs * self.stride

    def slab_of(self, index: int) -> int:
        """The slab of slot `index`, for any pool."""
        if not 0 <= index < self.indices:
            raise PlanError(f"expected a slot in [0, {self.indices}), got {index}")
        return index // self.stride

    def slots_of(self, slab: int, pool: int) -> range:
        """The slot indices of a slab that is assigned to `pool`."""
        self._check_pool(pool)
        if not 0 <= slab < self.slabs:
            raise PlanError(f"expected a slab in [0, {self.slabs}), got {slab}")
        return range(slab * self.stride, slab * self.stride + self.images[pool])

    def check(self, pool: int, index: int) -> None:
        """Raise `PlanError` unless `pool` can have a slot `index`."""
        self.offset(pool, index)

    def offset(self, pool: int, index: int) -> int:
        """Bytes from the tier's start to the image in slot `index` of `pool`. `PlanError` if there is no such slot."""
        slab, position = divmod(index, self.stride)
        if not (0 <= pool < len(self.images) and 0 <= slab < self.slabs and position < self.images[pool]):
            self._check_pool(pool)
            raise self._no_slot(pool, index)
        return slab * self.slab_bytes + position * self.image_bytes[pool]

    def offsets(self, pool: int, indices: Sequence[int] | I64) -> I64:
        """`offset` for many slots of one pool; int64, shape `(len(indices),)`."""
        self._check_pool(pool)
        at = np.asarray(indices, np.int64)
        slab, position = np.divmod(at, self.stride)
        bad = (at < 0) | (slab >= self.slabs) | (position >= self.images[pool])
        if bad.any():
            raise self._no_slot(pool, int(at[bad.argmax()]))
        offsets: I64 = slab * self.slab_bytes + position * self.image_bytes[pool]
        return offsets

    def touched(self, pool: int, indices: Sequence[int] | I64) -> I64:
        """The bytes that slots of `pool` share with other pools, as indices of the smallest images there.

        Two images overlap only if they have one of these in common; if sizes do not divide, adjacent images may have
        one in common without overlapping. int64, in no particular order; with one size, the indices themselves.
        """
        at, unit = np.asarray(indices, np.int64), min(self.image_bytes)
        if self.image_bytes[pool] == unit:
            return at
        slab, position = np.divmod(at, self.stride)
        first = position * self.image_bytes[pool]
        low, high = first // unit, np.minimum((first + self.image_bytes[pool] - 1) // unit, self.stride - 1)
        span = np.arange(int((high - low).max(initial=0)) + 1)
        return np.unique(slab[:, None] * self.stride + np.minimum(low[:, None] + span, high[:, None]))

    def _check_pool(self, pool: int) -> None:
        if not 0 <= pool < len(self.image_bytes):
            raise PlanError(f"expected a pool in [0, {len(self.image_bytes)}), got {pool}")

    def _no_slot(self, pool: int, index: int) -> PlanError:
        return PlanError(
            f"pool {pool} has slots 0 to {self.images[pool] - 1} of each of {self.slabs} slabs, "
            f"{self.stride} indices apart; got {index}"
        )


def by_size(image_bytes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The distinct image sizes, ascending, and the pool of each KV cache group, from the groups' image sizes."""
    sizes = tuple(sorted(set(image_bytes)))
    return sizes, tuple(sizes.index(each) for each in image_bytes)


def _loss(slab_bytes: int, sizes: Sequence[int]) -> float:
    """The part of a slab that is lost at its end, for the size that loses most."""
    return max(slab_bytes % each for each in sizes) / slab_bytes
