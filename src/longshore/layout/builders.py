"""Layouts from an engine's tensors: one row per block, or named axes.

`from_axes` uses the strides, not the order of the axes. Blocks first, K and V in front, permuted heads and tokens, and
one tensor across all layers are therefore one case:

    axes after `block`, by stride, largest first
    layer  kv  head  token  dim
    └ one reference each ┘ └ dense from here on: the page ┘

`layer` and `kv` are never part of a page. In most layouts, tokens are then the outermost axis of a page, and engines
with different orders of K and V produce the same image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from longshore.errors import LayoutError
from longshore.layout.model import KVGroup, KVLayout, PageRef
from longshore.layout.tensors import DeviceTensor, byte_strides, dtype_name, splits_by_token

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
