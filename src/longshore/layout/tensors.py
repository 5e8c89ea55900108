"""The interface of an engine's tensor for a layout, as protocols: this package does not import torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from longshore.errors import LayoutError

# Dtypes whose elements are smaller than a byte, or no bytes at all: element_size() and stride() do not tell
# where such an element lies.
_UNPLACEABLE = re.compile(r"u?int[1-7]|quint4x2|quint2x4|object")

# Dtypes that pack several tokens' worth into one byte, or scale a block of elements at once.
_UNSPLITTABLE = re.compile(r"float4_.*|float8_e8m0fnu|bits.*")


class Storage(Protocol):
    """The allocation behind a tensor."""

    def data_ptr(self) -> int:
        """Address of its first byte."""

    def nbytes(self) -> int:
        """Its size in bytes."""


class DeviceTensor(Protocol):
    """The part of `torch.Tensor` that a layout needs."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements per axis."""

    @property
    def dtype(self) -> object:
        """Type of an element; its name is part of the layout's fingerprint."""

    @property
    def device(self) -> object:
        """Device of the memory."""

    def data_ptr(self) -> int:
        """Address of element 0."""

    def element_size(self) -> int:
        """Bytes per element."""

    def stride(self) -> Sequence[int]:
        """Elements between neighbours, per axis."""

    def untyped_storage(self) -> Storage:
        """The allocation that the tensor is a view of."""


def dtype_name(tensor: DeviceTensor) -> str:
    """Name of the tensor's element type, for instance `bfloat16`; `LayoutError` if it is not byte-addressable."""
    name = str(tensor.dtype).removeprefix("torch.")
    if _UNPLACEABLE.fullmatch(name) or tensor.element_size() <= 0:
        raise LayoutError(f"elements of dtype {name} are not byte-addressable; pass a view as torch.uint8")
    return name


def splits_by_token(tensor: DeviceTensor) -> bool:
    """Whether the first tokens of a page of this dtype can be copied alone."""
    return not _UNSPLITTABLE.fullmatch(dtype_name(tensor))


def byte_strides(tensor: DeviceTensor) -> tuple[int, ...]:
    """Bytes between neighbours, per axis."""
    size = tensor.element_size()
    return tuple(stride * size for stride in tensor.stride())
