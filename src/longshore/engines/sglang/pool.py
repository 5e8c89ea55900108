"""The pages of SGLang's host memory as a layout: what `get_page_buffer_meta` says of each, verified.

    piece 0 (K)   ├ page 0 ┼ page 1 ┼ page 2 ┼ ...      a reference of the layout, one stride apart
    piece 1 (V)   ├ page 0 ┼ page 1 ┼ page 2 ┼ ...

The memory stays SGLang's: the layout has views of it, and no byte of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from longshore.errors import EngineError
from longshore.layout import KVGroup, KVLayout, PageRef


class HostPages:
    """The pages of one of SGLang's host pools.

    Attributes:
        layout: One group, with a block for each page.
        page_size: Tokens of a page.
    """

    def __init__(self, pool: Any) -> None:
        """`pool` is a `HostKVCache`. Raises `EngineError` where its pages are not apart at equal strides."""
        self.page_size = int(pool.page_size)
        count = int(pool.page_num)
        if count < 2:
            raise EngineError(f"expected a host pool of two pages or more, got {count}: set --hicache-size")
        some = sorted({0, 1, count // 2, count - 1})
        pieces = [_pieces(pool, page, self.page_size) for page in some]
        first, second = pieces[0], pieces[1]
        strides = [b[0] - a[0] for a, b in zip(first, second, strict=True)]
        expected = [[(at + page * by, size) for (at, size), by in zip(first, strides, strict=True)] for page in some]
        if pieces != expected or any(by < size for (_, size), by in zip(first, strides, strict=True)):
            raise EngineError(
                f"pages of host memory in layout {pool.layout!r} are not equally far apart: choose another "
                "--hicache-mem-layout, such as page_first_direct"
            )
        self._rows = [_rows(at, count, by, size) for (at, size), by in zip(first, strides, strict=True)]
        inner = f"{pool.layout}, {pool.dtype}, piece {{}} of {len(first)}"
        refs = tuple(
            PageRef(number, 0, by, size, None, 0, inner.format(number))
            for number, ((_, size), by) in enumerate(zip(first, strides, strict=True))
        )
        self.layout = KVLayout([KVGroup("pages", self.page_size, 1, refs)], self._rows, count)

    def pages(self, indices: torch.Tensor, count: int) -> list[int]:
        """The pages that `indices`, the int64 positions of all tokens of `count` pages, name.

        Raises `EngineError` unless they are whole pages of the pool.
        """
        size = self.page_size
        if not isinstance(indices, torch.Tensor):
            raise EngineError(f"expected the positions of {count} pages of {size} tokens, got {indices!r:.200}")
        whole = indices.detach().cpu().numpy().reshape(-1)
        if len(whole) != count * size:
            raise EngineError(f"expected the positions of {count} pages of {size} tokens, got {len(whole)}")
        table = whole.reshape(count, size)
        pages = table[:, 0] // size
        if (table != pages[:, None] * size + np.arange(size)).any() or (pages >= self.layout.num_blocks).any():
            raise EngineError(f"expected positions of whole pages of {size} tokens, got {whole[:8].tolist()} ...")
        found: list[int] = pages.tolist()
        return found

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Bytes of pages, shape `(len(blocks), page_bytes)`."""
        return np.concatenate([rows[list(blocks)].numpy() for rows in self._rows], axis=1)

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite pages with `data`, of the shape that `read` returns."""
        begin = 0
        for rows in self._rows:
            width = rows.shape[1]
            rows[list(blocks)] = torch.from_numpy(np.ascontiguousarray(data[:, begin : begin + width]))
            begin += width


def _pieces(pool: Any, page: int, size: int) -> list[tuple[int, int]]:
    """Address and bytes of each piece of a page."""
    indices = torch.arange(page * size, (page + 1) * size)
    try:
        addresses, sizes = pool.get_page_buffer_meta(indices)
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise EngineError(f"host memory in layout {pool.layout!r} does not say where its pages are: {error}") from error
    return [(int(at), int(size)) for at, size in zip(addresses, sizes, strict=True)]


def _rows(address: int, count: int, stride: int, width: int) -> torch.Tensor:
    """A view of memory: uint8, shape `(count, width)`, rows `stride` bytes apart."""
    memory = (ctypes.c_uint8 * ((count - 1) * stride + width)).from_address(address)
    return torch.as_strided(torch.frombuffer(memory, dtype=torch.uint8), (count, width), (stride, 1))
