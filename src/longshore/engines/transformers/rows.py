"""A tensor of device blocks as the self-test sees it: rows of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


class RowBlocks:
    """One row of bytes for each block."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Bytes of `blocks`, shape `(len(blocks), block_bytes)`."""
        data: npt.NDArray[np.uint8] = self._rows[list(blocks)].cpu().numpy()
        return data

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Set them."""
        self._rows[list(blocks)] = torch.from_numpy(data).to(self._rows.device)
