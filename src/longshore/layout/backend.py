"""Layouts from an attention back end that reports the shape of its cache, but not the meaning of the axes.

A shape alone is ambiguous: a 2 may be two blocks, two heads, or K and V. The back end is therefore called several times
with one argument changed, and an axis is named after the argument that changes it:

    get_kv_cache_shape(1009, 16, 8, 128)  ->  (2, 1009, 16, 8, 128)
    get_kv_cache_shape(2003, 16, 8, 128)  ->  (2, 2003, 16, 8, 128)     axis 1 is `block`
    get_kv_cache_shape(1009, 32, 8, 128)  ->  (2, 1009, 32, 8, 128)     axis 2 is `token`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from longshore.errors import LayoutError
from longshore.layout.builders import BLOCK, INTERLEAVED, KV, LAYER, TOKEN, from_axes
from longshore.layout.model import KVLayout
from longshore.layout.tensors import DeviceTensor, dtype_name

# Two primes, neither of which is any other size.
_SENTINEL_BLOCKS = 1009
_OTHER_SENTINEL = 2003

_HEAD = "head"

# Cache dtypes whose tokens are known to lie one after another; other formats may interleave the scales of several.
_UNQUANTIZED = (None, "auto", "float16", "bfloat16")
_BYTES = ("uint8", "int8")
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")  # scales, if any, are kept outside the cache
_FP8_ALIGNMENT = 16  # bytes; a record of another size has scales in it, such as an indexer's 132
_DS_MLA_BYTES = 656  # of a token that has its own scales; in records of other sizes they stand behind all values

# What back ends raise for sizes they do not serve, or for a question they do not know.
_REFUSALS = (ValueError, TypeError, NotImplementedError, AssertionError, AttributeError)


class AttentionBackend(Protocol):
    """The interface of a back end. `get_kv_cache_stride_order(include_num_layers_dimension)` is optional.

    If the cache's dtype is given, it is passed to `get_kv_cache_shape` as `cache_dtype_str`.
    """

    def get_kv_cache_shape(self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> Sequence[int]:
        """Shape of one layer's cache."""


def from_backend(
    backend: AttentionBackend,
    tensors: Sequence[DeviceTensor],
    *,
    kernel_block_size: int,
    num_kv_heads: int,
    head_size: int,
    block_size: int | None = None,
    blocks_per_chunk: int = 1,
    layers: Sequence[int] | None = None,
    name: str = "kv",
    ranks: int = 1,
    rank: int = 0,
    cache_dtype: str | None = None,
) -> KVLayout:
    """A layout of one group whose tensors all come from `backend`.

    `cache_dtype` is the back end's name of the cache's dtype, such as `fp8_ds_mla`: some have their own shape.

    `kernel_block_size` is the block size given to the back end, for all layers; `block_size` (by default the same) is
    the block size of the block table. For several groups, or back ends, in one layout: `axes_of_backend` and
    `group_from_axes`.

    Raises:
        LayoutError: An ambiguous shape, or one that is not the tensor's.
    """
    axes = [
        axes_of_backend(
            backend,
            tensor,
            kernel_block_size=kernel_block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            cache_dtype=cache_dtype,
        )
        for tensor in tensors
    ]
    return from_axes(
        tensors,
        axes,
        block_size=kernel_block_size if block_size is None else block_size,
        blocks_per_chunk=blocks_per_chunk,
        kernel_block_size=kernel_block_size,
        layers=layers,
        name=name,
        ranks=ranks,
        rank=rank,
    )


def axes_of_backend(
    backend: AttentionBackend,
    tensor: DeviceTensor,
    *,
    kernel_block_size: int,
    num_kv_heads: int,
    head_size: int,
    cache_dtype: str | None = None,
) -> tuple[str, ...]:
    """Name of each axis of `tensor`. One axis more than the back end's shape means a tensor across layers.

    The tensor may have the axes in the back end's order, with any strides, or in the order of memory. If scales of
    several tokens may be interleaved, as in NVFP4 or in bytes of an unknown format, no axis is `token`, and pages move
    whole.
    """
    names, sizes = _probe(backend, (kernel_block_size, num_kv_heads, head_size), cache_dtype)
    if not _has_whole_tokens(cache_dtype, tensor, names, sizes):
        names = [INTERLEAVED if name == TOKEN else name for name in names]
    across_layers = len(tensor.shape) == len(names) + 1
    if across_layers:
        names, sizes = [LAYER, *names], [None, *sizes]
    order = _stride_order(backend, across_layers, len(names))
    logical = _fits(tensor, sizes)
    physical = _fits(tensor, [sizes[axis] for axis in order])
    strides = list(tensor.stride())
    if physical and (not logical or strides == sorted(strides, reverse=True)):
        return tuple(names[axis] for axis in order)
    if logical:
        return tuple(names)
    raise LayoutError(
        f"expected a tensor of axes {names} and sizes {sizes} (None: any), in this order or in the order of "
        f"memory {order}; got shape {tuple(tensor.shape)}"
    )


def _probe(
    backend: AttentionBackend, sizes: tuple[int, int, int], cache_dtype: str | None
) -> tuple[list[str], list[int | None]]:
    """Name and size of each axis of one layer's cache; the number of blocks is not known here: `None`."""
    options: dict[str, Any] = {} if cache_dtype is None else {"cache_dtype_str": cache_dtype}
    shape = tuple(backend.get_kv_cache_shape(_SENTINEL_BLOCKS, *sizes, **options))
    answers: list[list[str]] = [[] for _ in shape]
    for what, arguments in (
        (BLOCK, (_OTHER_SENTINEL, *sizes)),
        (TOKEN, (_SENTINEL_BLOCKS, 2 * sizes[0], sizes[1], sizes[2])),
        (_HEAD, (_SENTINEL_BLOCKS, sizes[0], 2 * sizes[1], sizes[2])),
        ("dim", (_SENTINEL_BLOCKS, sizes[0], sizes[1], 2 * sizes[2])),
    ):
        try:
            changed = tuple(backend.get_kv_cache_shape(*arguments, **options))
        except _REFUSALS:
            continue  # a size that this back end does not serve: the axis keeps no name, which is always safe
        if len(changed) == len(shape):
            for answer, before, after in zip(answers, shape, changed, strict=True):
                if before != after:
                    answer.append(what)
    names = _names(answers, shape)
    return names, [None if name == BLOCK else size for name, size in zip(names, shape, strict=True)]


def _has_whole_tokens(
    cache_dtype: str | None, tensor: DeviceTensor, names: Sequence[str], sizes: Sequence[int | None]
) -> bool:
    """Whether all bytes of a token, its scales among them, are known to lie on its position of the `token` axis."""
    record = tensor.element_size()
    for name, size in zip(names, sizes, strict=True):
        if name not in (BLOCK, TOKEN, KV, _HEAD):
            record *= size or 1
    if cache_dtype in _FP8:
        return record % _FP8_ALIGNMENT == 0
    if cache_dtype == "fp8_ds_mla" or (cache_dtype is None and dtype_name(tensor) in _BYTES):
        return record == _DS_MLA_BYTES
    return cache_dtype in _UNQUANTIZED and dtype_name(tensor) not in _BYTES


def _names(answers: Sequence[Sequence[str]], shape: Sequence[int]) -> list[str]:
    names = []
    for index, answer in enumerate(answers):
        if not answer and shape[index] == 2:
            names.append(KV)
        elif len(answer) == 1:
            names.append(answer[0])
        elif BLOCK in answer:
            raise LayoutError(
                f"axis {index} of shape {tuple(shape)} mixes blocks with {answer}: blocks need an axis of their own"
            )
        else:
            names.append("+".join(answer) if answer else f"axis{index}")
    if names.count(BLOCK) != 1 or len(set(names)) != len(names):
        raise LayoutError(f"cannot identify the axes of shape {tuple(shape)}: ambiguous names {names}")
    return names


def _stride_order(backend: AttentionBackend, across_layers: bool, axes: int) -> list[int]:
    """Which axis comes first in memory, second, ...; the order of the shape where the back end does not say."""
    ask = getattr(backend, "get_kv_cache_stride_order", None)
    if ask is None:
        return list(range(axes))
    try:
        order = list(ask(include_num_layers_dimension=across_layers))
    except _REFUSALS:
        return list(range(axes))
    if sorted(order) != list(range(axes)):
        raise LayoutError(f"expected a stride order of {axes} axes, got {order}")
    return order


def _fits(tensor: DeviceTensor, sizes: Sequence[int | None]) -> bool:
    return len(tensor.shape) == len(sizes) and all(
        size is None or size == got for size, got in zip(sizes, tensor.shape, strict=True)
    )
