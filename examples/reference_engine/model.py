"""A tiny decoder with random weights: RMSNorm, rotary positions, grouped queries over paged K and V, a gated MLP.

    layer  0        1        2      3        4        5
           sliding  sliding  full   sliding  sliding  full        two KV cache groups, one block table each

It computes one request at a time, so the bits of a result depend on that request's own tokens and pages alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Group(NamedTuple):
    """The layers that share a block table. With a `window`, a token sees that many tokens, itself included."""

    name: str
    block_size: int
    layers: tuple[int, ...]
    window: int | None = None

    def first_needed(self, position: int) -> int:
        """The first block that a query at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size


class Pages(NamedTuple):
    """One layer's K and V on the device, each of shape `(blocks, block_size, kv_heads, head_dim)`."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of the decoder. Blocks of both groups have the same number of bytes, so that they can share a pool."""

    vocab: int = 256
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    groups: tuple[Group, ...] = (Group("sliding", 4, (0, 1, 3, 4), window=12), Group("full", 8, (2, 5)))

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return sum(len(group.layers) for group in self.groups)

    def group_of(self, layer: int) -> int:
        """Index of the group that `layer` belongs to."""
        return next(index for index, group in enumerate(self.groups) if layer in group.layers)


class Decoder:
    """Weights drawn from `seed`, float32."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.shape = shape
        self.device = device
        self.seed = seed
        random = torch.Generator().manual_seed(seed)

        def matrix(rows: int, columns: int) -> Tensor:
            drawn: Tensor = torch.randn(rows, columns, generator=random) / columns**0.5
            return drawn.to(device)

        queries, pairs = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
        self.embedding = matrix(shape.vocab, shape.width)
        self.head = matrix(shape.vocab, shape.width)
        self.layers = [
            {
                "qkv": matrix(queries + pairs, shape.width),
                "out": matrix(shape.width, queries),
                "up": matrix(2 * shape.mlp, shape.width),
                "down": matrix(shape.width, shape.mlp),
            }
            for _ in range(shape.layers)
        ]

    def forward(
        self,
        tokens: Sequence[int],
        first: int,
        tables: Sequence[Sequence[int]],
        pages: Sequence[Pages],
        before_layer: Callable[[int], None],
    ) -> Tensor:
        """Compute `tokens`, the first of them at position `first`, and store their K and V.

        Args:
            tokens: What is to be computed, at least one.
            first: How many tokens before them have their K and V in the pages.
            tables: For each group, the blocks of the request in logical order.
            pages: For each layer, where its K and V are.
            before_layer: Called with each layer before its pages are read or written.

        Returns:
            The logits after the last token, shape `(vocab,)`.
        """
        hidden = self.embedding[torch.tensor(tokens, device=self.device)]
        for layer, weights in enumerate(self.layers):
            group = self.shape.group_of(layer)
            before_layer(layer)
            hidden = hidden + self._attention(_norm(hidden), weights, first, tables[group], pages[layer], group)
            gate, up = (_norm(hidden) @ weights["up"].T).chunk(2, dim=-1)
            hidden = hidden + (functional.silu(gate) * up) @ weights["down"].T
        logits: Tensor = _norm(hidden[-1:])[0] @ self.head.T
        return logits

    def _attention(
        self, hidden: Tensor, weights: dict[str, Tensor], first: int, table: Sequence[int], pages: Pages, group: int
    ) -> Tensor:
        """Store the K and V of `hidden`, shape `(tokens, width)`, and attend to all that the tokens may see."""
        shape, kind, count = self.shape, self.shape.groups[group], len(hidden)
        heads = (hidden @ weights["qkv"].T).view(count, -1, shape.head_dim)
        queries, pairs = heads[:, : shape.heads], heads[:, shape.heads :]
        keys, values = pairs.chunk(2, dim=1)
        positions = torch.arange(first, first + count, device=self.device)
        blocks, size = torch.tensor(table, device=self.device), kind.block_size
        at = (blocks[positions // size], positions % size)
        pages.keys[at] = _rotate(keys, positions)
        pages.values[at] = values

        start, end = kind.first_needed(first), first + count
        seen = blocks[start : -(-end // size)]
        share = shape.heads // shape.kv_heads
        all_keys, all_values = (
            part[seen].flatten(0, 1)[: end - start * size].repeat_interleave(share, dim=1).transpose(0, 1)
            for part in pages
        )
        scores = _rotate(queries, positions).transpose(0, 1) @ all_keys.transpose(1, 2) / shape.head_dim**0.5
        distance = positions[:, None] - torch.arange(start * size, end, device=self.device)
        hidden_from = (distance < 0) | (distance >= (kind.window or end))
        weighted = scores.masked_fill(hidden_from, float("-inf")).softmax(-1) @ all_values
        mixed: Tensor = weighted.transpose(0, 1).reshape(count, -1) @ weights["out"].T
        return mixed


def _norm(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


def _rotate(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions on `heads`, shape `(tokens, heads, head_dim)`."""
    half = heads.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=heads.device) / half)
    angles = (positions[:, None] * speeds)[:, None]
    left, right = heads[..., :half], heads[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1)
