"""Bytes of tensors: checksums, by which an adapter tells whether weights are the same, and rows of device blocks."""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from longshore import checksums

_PIECE = 16 << 20


def pack(*parts: bytes | str) -> bytes:
    """One digest of `parts`, each with its length before it."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.digest()


def content(tensor: torch.Tensor) -> bytes:
    """The checksum of a tensor's bytes, computed where they are: on the CPU by xxh3, on an accelerator by mix64."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if not len(flat):
        return b""
    if flat.device.type != "cpu":
        return mix64(flat).to_bytes(8, "little")
    data = flat.numpy().data
    if len(data) <= _PIECE:
        return _hashed(data)
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # of its own: we may be forked
        return pack(*threads.map(_hashed, pieces))


def _hashed(piece: memoryview) -> bytes:
    state = xxhash.xxh3_128()
    state.update(piece)  # unlike the one-shot function, this lets other threads run in all releases
    return state.digest()


def mix64(data: torch.Tensor) -> int:
    """`longshore.checksums.mix64` of a vector of bytes and zeros up to a whole word, computed on its device."""
    if data.numel() % 8 or data.data_ptr() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).clone()
    words = data.view(torch.int64)
    if data.is_cuda and importlib.util.find_spec("triton") is not None:
        from longshore.transfer.device.cuda import kernels  # noqa: PLC0415 - needs Triton

        with torch.cuda.device(data.device):
            return kernels.mix64(words)
    step, factor, low = _signed(checksums.STEP), _signed(checksums.FACTOR), 2**32 - 1
    total = 0
    for first in range(0, len(words), _PIECE):
        some = words[first : first + _PIECE]
        mixed = torch.arange(first + 1, first + 1 + len(some), device=data.device).mul_(step).bitwise_xor_(some)
        for _ in range(2):
            mixed.bitwise_xor_((mixed >> 32).bitwise_and_(low)).mul_(factor)
        total += int(mixed.bitwise_xor_((mixed >> 32).bitwise_and_(low)).sum())
    return checksums.finish(total % 2**64, data.numel())


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


class RowBlocks:
    """Device blocks as the self-test sees them: of each block, a row of bytes in each of several tensors."""

    def __init__(self, *rows: torch.Tensor) -> None:
        """`rows` have shape `(blocks, bytes)`, and elements of one byte."""
        self._rows = rows

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Bytes of `blocks`, shape `(len(blocks), block_bytes)`."""
        return np.concatenate([rows[list(blocks)].cpu().numpy().view(np.uint8) for rows in self._rows], axis=1)

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Overwrite `blocks` with `data`, of the shape that `read` returns."""
        begin = 0
        for rows in self._rows:
            end = begin + rows.shape[1]
            own = torch.from_numpy(np.ascontiguousarray(data[:, begin:end]))
            rows[list(blocks)] = own.view(rows.dtype).to(rows.device)
            begin = end
