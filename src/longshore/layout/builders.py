"""Layouts from an engine's tensors: one row per block, named axes, or an attention back end that reports a shape.

`from_axes` uses the strides, not the order of the axes. Blocks first, K and V in front, permuted heads and tokens, and
one tensor across all layers are therefore one case:

    axes after `block`, by stride, largest first
    layer  kv  head  token  dim
    └ one reference each ┘ └ dense from here on: the page ┘

`layer` and `kv` are never part of a page. In most layouts, tokens are then the outermost axis of a page, and engines
with different orders of K and V produce the same image.

`axes_of_backend` names the axes of a back end that reports the shape of its cache, but not the meaning of the axes. A
shape alone is ambiguous: a 2 may be two blocks, two heads, or K and V. The back end is therefore called several times
with one argument changed, and an axis is named after the argument that changes it:

    get_kv_cache_shape(1009, 16, 8, 128)  ->  (2, 1009, 16, 8, 128)
    get_kv_cache_shape(2003, 16, 8, 128)  ->  (2, 2003, 16, 8, 128)     axis 1 is `block`
    get_kv_cache_shape(1009, 32, 8, 128)  ->  (2, 1009, 32, 8, 128)     axis 2 is `token`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from longshore.errors import LayoutError
from longshore.layout.model import DeviceTensor, KVGroup, KVLayout, PageRef, byte_strides, dtype_name, splits_by_token

BLOCK = "block"
LAYER = "layer"
KV = "kv"
TOKEN = "token"  # noqa: S105 - the name of an axis
INTERLEAVED = "interleaved"


def from_rows(
    tensor: DeviceTensor,
    *,
    pages_per_block: int,
    block_size: int,
    blocks_per_chunk: int = 1,
    pages_per_layer: int = 2,
    tokens_outermost: bool = True,
    name: str = "rows",
    ranks: int = 1,
    rank: int = 0,
) -> KVLayout:
    """A layout of one row per block: `tensor` has shape `(num_blocks, bytes)`, each row `pages_per_block` equal pages.

    A row has `pages_per_layer` pages per layer (K, then V). Rows may be padded (a larger stride). With
    `tokens_outermost`, a page is `block_size` consecutive tokens.

    Raises:
        LayoutError: Not two axes, rows that are not contiguous, or sizes that do not divide.
    """
    if len(tensor.shape) != 2 or (tensor.shape[1] > 1 and tensor.stride()[1] != 1):
        raise LayoutError(f"expected contiguous rows, got shape {tuple(tensor.shape)} strides {tuple(tensor.stride())}")
    row = tensor.shape[1] * tensor.element_size()
    page = _quotient(row, pages_per_block, "bytes of a row", "pages_per_block")
    _quotient(pages_per_block, pages_per_layer, "pages_per_block", "pages_per_layer")
    splits = tokens_outermost and splits_by_token(tensor)
    token = _quotient(page, block_size, "bytes of a page", "block_size") if splits else None
    stride = byte_strides(tensor)[0]
    refs = tuple(
        PageRef(0, i * page, stride, page, token, i // pages_per_layer, f"{KV}{i % pages_per_layer}")
        for i in range(pages_per_block)
    )
    group = KVGroup(name, block_size, blocks_per_chunk, refs)
    return KVLayout((group,), (tensor,), tensor.shape[0], ranks, rank)


def from_axes(
    tensors: Sequence[DeviceTensor],
    axes: Sequence[str] | Sequence[Sequence[str]],
    *,
    block_size: int,
    blocks_per_chunk: int = 1,
    kernel_block_size: int | None = None,
    layers: Sequence[int] | None = None,
    name: str = "kv",
    ranks: int = 1,
    rank: int = 0,
) -> KVLayout:
    """A layout of one group whose tensors have named axes; arguments and errors as for `group_from_axes`."""
    group, num_blocks = group_from_axes(
        tensors,
        axes,
        block_size=block_size,
        blocks_per_chunk=blocks_per_chunk,
        kernel_block_size=kernel_block_size,
        layers=layers,
        name=name,
    )
    return KVLayout((group,), tensors, num_blocks, ranks, rank)


def group_from_axes(
    tensors: Sequence[DeviceTensor],
    axes: Sequence[str] | Sequence[Sequence[str]],
    *,
    block_size: int,
    blocks_per_chunk: int = 1,
    kernel_block_size: int | None = None,
    layers: Sequence[int] | None = None,
    name: str = "kv",
    first_tensor: int = 0,
) -> tuple[KVGroup, int]:
    """One group, and its number of blocks, for a `KVLayout` of several groups.

    Args:
        tensors: The group's tensors, of any strides.
        axes: Name of each axis, one list for all tensors or one per tensor. `block` is required; `layer`, `kv` and
            `token` have a meaning; other names only mark the content of a page. If scales of several tokens are
            interleaved with values, name that axis `interleaved` and none `token`: such pages move whole, as do groups
            with values packed in four bits.
        block_size: Tokens per block, as the block table counts them.
        blocks_per_chunk: Blocks per chunk.
        kernel_block_size: Tokens per position of the `block` axis, by default the length of the `token` axis. If it is
            less than `block_size`, consecutive kernel blocks form a block.
        layers: Model layer of each tensor (of its first layer if it has a `layer` axis); consecutive by default.
        name: The group's name.
        first_tensor: Index of `tensors[0]` among the layout's tensors.

    Raises:
        LayoutError: Axes that do not fit the shape, both a `token` and an `interleaved` axis, sizes that do not divide,
            tensors with different numbers of blocks.
    """
    named = _axes_per_tensor(tensors, axes)
    if layers is None:
        sizes = [_layers_in(tensor, names) for tensor, names in zip(tensors, named, strict=True)]
        layers = [0, *itertools.accumulate(sizes)][:-1]
    if len(layers) != len(tensors):
        raise LayoutError(f"expected one layer number for each of {len(tensors)} tensors, got {len(layers)}")
    # The scales of packed values are interleaved in a tensor of their own, of a dtype that does not tell.
    splits = all(map(splits_by_token, tensors))
    refs: list[PageRef] = []
    counts: list[int] = []
    for index, (tensor, names, layer) in enumerate(zip(tensors, named, layers, strict=True)):
        view = _View.of(tensor, names, block_size, kernel_block_size, splits=splits)
        counts.append(view.num_blocks)
        refs += view.refs(first_tensor + index, layer)
    if len(set(counts)) != 1:
        raise LayoutError(f"tensors of group {name!r} have different numbers of blocks: {sorted(set(counts))}")
    # Stable: the parts of one layer stay in the order of the tensors, K before V.
    refs.sort(key=lambda ref: ref.layer or 0)
    return KVGroup(name, block_size, blocks_per_chunk, tuple(refs)), counts[0]


class _Axis(NamedTuple):
    name: str
    size: int
    stride: int  # bytes


class _View(NamedTuple):
    """One tensor, taken apart: `outer` axes give a reference for each of their positions, `inner` ones are the page."""

    num_blocks: int
    block_stride: int
    kernel_blocks: int  # per block
    outer: tuple[_Axis, ...]
    inner: tuple[_Axis, ...]  # largest stride first, dense
    element: int
    splits: bool

    @classmethod
    def of(
        cls,
        tensor: DeviceTensor,
        names: Sequence[str],
        block_size: int,
        kernel_block_size: int | None,
        *,
        splits: bool,
    ) -> _View:
        axes = [
            _Axis(name, size, stride)
            for name, size, stride in zip(names, tensor.shape, byte_strides(tensor), strict=True)
        ]
        block = next(axis for axis in axes if axis.name == BLOCK)
        tokens = next((axis.size for axis in axes if axis.name == TOKEN), kernel_block_size or block_size)
        if kernel_block_size not in (None, tokens):
            raise LayoutError(f"expected {kernel_block_size} tokens in a kernel block, but the token axis has {tokens}")
        kernel_blocks = _quotient(block_size, tokens, "block_size", "tokens of a kernel block")
        rest = [axis for axis in axes if axis.name != BLOCK and axis.size > 1]
        if any(axis.stride <= 0 for axis in rest):
            raise LayoutError(
                f"axes {[axis.name for axis in rest if axis.stride <= 0]} need a positive stride: elements share bytes"
            )
        outer, inner = _split(rest, tensor.element_size())
        return cls(
            num_blocks=_quotient(block.size, kernel_blocks, "blocks of the tensor", "kernel blocks per block"),
            block_stride=block.stride,
            kernel_blocks=kernel_blocks,
            outer=outer,
            inner=inner,
            element=tensor.element_size(),
            splits=splits,
        )

    def refs(self, tensor: int, layer: int) -> list[PageRef]:
        """The references of this tensor, in image order: by layer, then K and V, then the rest."""
        kernel_page = self.element
        for axis in self.inner:
            kernel_page *= axis.size
        # Kernel blocks without padding between them are one longer page; else each is a reference of its own.
        joined = self.kernel_blocks == 1 or self.block_stride == kernel_page
        page = kernel_page * self.kernel_blocks if joined else kernel_page
        pieces = 1 if joined else self.kernel_blocks
        token, parts = self._tokens(kernel_page) if joined else (None, 1)
        refs = []
        for place in itertools.product(*(range(axis.size) for axis in self.outer), range(pieces)):
            *positions, piece = place
            offset = piece * self.block_stride
            offset += sum(at * axis.stride for at, axis in zip(positions, self.outer, strict=True))
            at_layer = layer + sum(at for at, axis in zip(positions, self.outer, strict=True) if axis.name == LAYER)
            stride = self.block_stride * self.kernel_blocks
            inner = self._inner(positions, piece, joined)
            refs.append(PageRef(tensor, offset, stride, page, token, at_layer, inner, parts))
        return refs

    def _tokens(self, kernel_page: int) -> tuple[int | None, int]:
        """Bytes of a token in each piece of a page, and how many pieces there are; `None` where pages are not split."""
        names = [axis.name for axis in self.inner]
        if not self.splits or TOKEN not in names:
            return None, 1
        at = names.index(TOKEN)
        pieces = math.prod(axis.size for axis in self.inner[:at])
        if pieces > 1 and self.kernel_blocks > 1:  # the tokens of a piece go on in the next kernel block
            return None, 1
        return kernel_page // pieces // self.inner[at].size, pieces

    def _inner(self, positions: Sequence[int], piece: int, joined: bool) -> str:
        """What the page holds, in memory order, with the same text for the same order of bytes."""
        sizes = [(axis.name, axis.size) for axis in self.inner]
        if joined and self.kernel_blocks > 1:
            if sizes and sizes[0][0] == TOKEN:  # tokens of consecutive kernel blocks simply follow
                sizes[0] = (TOKEN, sizes[0][1] * self.kernel_blocks)
            else:
                sizes.insert(0, ("kernel", self.kernel_blocks))
        where = [f"{axis.name}{at}" for at, axis in zip(positions, self.outer, strict=True) if axis.name != LAYER]
        if not joined:
            where.append(f"kernel{piece}")
        return " ".join([*where, ",".join(f"{name}:{size}" for name, size in sizes)])


def _split(axes: Sequence[_Axis], element: int) -> tuple[tuple[_Axis, ...], tuple[_Axis, ...]]:
    """The axes (without `block`) outside a page, in image order, and those inside, largest stride first."""
    by_stride = sorted(axes, key=lambda axis: axis.stride)
    dense = 0
    extent = element
    for axis in by_stride:
        if axis.stride != extent:
            break
        extent *= axis.size
        dense += 1
    while dense and by_stride[dense - 1].name in (LAYER, KV):
        dense -= 1
    outer = sorted(by_stride[dense:], key=lambda axis: (axis.name != LAYER, axis.name != KV, axis.name))
    inner = by_stride[:dense][::-1]
    if any(axis.name == LAYER for axis in inner):
        raise LayoutError("the layer axis must be outside the token and head axes: a page has one layer")
    return tuple(outer), tuple(inner)


def _axes_per_tensor(tensors: Sequence[DeviceTensor], axes: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    if not tensors:
        raise LayoutError("a group needs at least one tensor")
    if all(isinstance(name, str) for name in axes):
        named = [[str(name) for name in axes]] * len(tensors)
    else:
        named = [[str(name) for name in names] for names in axes]
    if len(named) != len(tensors):
        raise LayoutError(f"expected axis names for each of {len(tensors)} tensors, got {len(named)}")
    for tensor, names in zip(tensors, named, strict=True):
        shape = tuple(tensor.shape)
        if len(names) != len(shape) or len(set(names)) != len(names) or BLOCK not in names:
            raise LayoutError(
                f"axes {names} do not fit shape {shape}: expected one distinct name per axis, {BLOCK!r} among them"
            )
        if {TOKEN, INTERLEAVED} <= set(names):
            raise LayoutError(
                f"axes {names} have both {TOKEN!r} and {INTERLEAVED!r}: pages with interleaved scales move whole, so "
                f"name no axis {TOKEN!r}"
            )
        if 0 in shape:
            raise LayoutError(f"sizes must be positive, got shape {shape} for axes {names}")
        dtype_name(tensor)
    return named


def _layers_in(tensor: DeviceTensor, names: Sequence[str]) -> int:
    return tensor.shape[list(names).index(LAYER)] if LAYER in names else 1


def _quotient(whole: int, part: int, of: str, by: str) -> int:
    if part <= 0 or whole <= 0 or whole % part:
        raise LayoutError(f"{of} ({whole}) must be a positive multiple of {by} ({part})")
    return whole // part


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
