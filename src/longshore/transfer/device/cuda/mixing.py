# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator"
"""mix64 of device memory, computed on the GPU: the sum of its 8-byte words, each mixed with its position.

Each program adds `SPAN` mixed words to one sum; the order of additions does not matter. The CPU version and the last
step are in `longshore.checksums`; docs/file-format.md is the specification.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from longshore import checksums

SPAN = 4096
"""Words of one program."""

WORD = 8
"""Bytes of a word."""

_WARPS = 8


@triton.jit
def _mix(word, FACTOR: tl.constexpr):  # noqa: N803
    word ^= word >> 32
    word *= FACTOR
    word ^= word >> 32
    word *= FACTOR
    return word ^ (word >> 32)


@triton.jit(do_not_specialize=["words"])
def sum_kernel(address, words, total, SPAN: tl.constexpr, STEP: tl.constexpr, FACTOR: tl.constexpr):  # noqa: N803
    """Add the mixed words from `address` on to `total`, one int64, modulo 2**64."""
    index = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    inside = index < words
    word = tl.load(address + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
    place = (index + 1).to(tl.uint64) * STEP
    mixed = tl.where(inside, _mix(word ^ place, FACTOR).to(tl.int64, bitcast=True), 0)
    tl.atomic_add(total, tl.sum(mixed, axis=0))


def mix64(memory: torch.Tensor) -> int:
    """`longshore.checksums.mix64` of `memory`, int64 on the device, on the current stream; waits for it."""
    total = torch.zeros(1, dtype=torch.int64, device=memory.device)
    words = memory.numel()
    sum_kernel[(triton.cdiv(words, SPAN),)](
        memory, words, total, SPAN=SPAN, STEP=checksums.STEP, FACTOR=checksums.FACTOR, num_warps=_WARPS
    )
    return checksums.finish(int(total.item()) % 2**64, words * WORD)
