"""vLLM's canonical KV caches as a `KVLayout`: a row of bytes for each block of each tensor.

Groups share one pool of physical blocks, and often tensors too. A reference is one layer's page, without its padding.

vLLM orders whole blocks (`GPULoadStoreSpec` has no tokens), and does not say what order its pages have inside. So
no reference has `token_bytes`: no copy would use them, and they are part of the fingerprint of files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from longshore.layout import KVGroup, KVLayout, PageRef


def layout_of(caches: Any, config: Any) -> KVLayout:
    """The layout of this rank; `caches` are `CanonicalKVCaches`, `config` is an `OffloadingConfig`.

    Raises `LayoutError` where pages overlap, or lie outside their tensors.
    """
    tensors = [each.tensor for each in caches.tensors]
    # Where all ranks hold the same bytes one image part serves them all.
    ranks = 1 if config.replicated_layout else config.parallel.world_size
    rank = 0 if config.replicated_layout else config.parallel.rank
    groups = tuple(
        KVGroup(
            f"group {group.group_id}",
            group.tokens_per_block,
            config.cache.blocks_per_chunk,
            tuple(
                PageRef(ref.tensor_idx, 0, tensors[ref.tensor_idx].stride(0), ref.page_size_bytes, None, layer)
                for layer, ref in enumerate(refs)
            ),
        )
        for group, refs in zip(config.groups, caches.group_data_refs, strict=True)
    )
    return KVLayout(groups, tensors, len(tensors[0]), ranks, rank)


class Blocks:
    """Whole blocks of one group as bytes, for the self-test; `longshore.runtime.selftest.DeviceBlocks`."""

    def __init__(self, caches: Any, group: int) -> None:
        """`caches` are `CanonicalKVCaches`."""
        refs = caches.group_data_refs[group]
        self._pages = [(caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Bytes of `blocks`, shape `(len(blocks), block_bytes)`."""
        rows = [tensor[list(blocks), :size].cpu().numpy().view(np.uint8) for tensor, size in self._pages]
        return np.concatenate(rows, axis=1)

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Set them."""
        import torch  # noqa: PLC0415 - vLLM has it

        begin = 0
        for tensor, size in self._pages:
            rows = np.ascontiguousarray(data[:, begin : begin + size]).view(np.int8)
            tensor[list(blocks), :size] = torch.from_numpy(rows).to(tensor.device)
            begin += size
