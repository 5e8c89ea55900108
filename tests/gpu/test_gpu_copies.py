"""Every byte through a real GPU: all ways, late compute, several engines, thousands of jobs."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator

import numpy as np
import pytest
import torch
from gated import PATIENCE
from transfer_kit import Bytes, copied, transfer

from longshore.boundary import DEVICE, HOST, Item, Section, Slot, Status, Transfer
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import INSIDE, OFFLOAD, ONBOARD, TransferEngine
from longshore.transfer.device.cuda.calibrate import Always, everything
from longshore.transfer.device.cuda.chooser import Load, Way
from longshore.transfer.device.cuda.device import CudaDevice

PAGES = (1, 7, 8, 24, 656, 4096, 65_536, 2 << 20)
CYCLES = 50_000_000  # of a kernel that sleeps: about 30 ms


class AnyWay:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def choose(self, load: Load, ways: Collection[Way]) -> Way:
        return self.random.choice(sorted(ways))


class Bench:
    """Two groups of pages on the GPU, slots in pinned memory, and what all bytes should be."""

    def __init__(self, page: int, *, blocks: int = 24, slots: int = 16, seed: int = 0) -> None:
        sizes = (page, max(1, page // 3), page + 5)
        generator = torch.Generator().manual_seed(seed)
        self.tensors = [
            torch.randint(0, 256, (16 + blocks * (size + 3),), generator=generator, dtype=torch.uint8).cuda()
            for size in sizes
        ]
        refs = tuple(PageRef(index, index, size + 3, size) for index, size in enumerate(sizes))
        groups = (KVGroup("pair", 4, 2, refs[:2]), KVGroup("odd", 4, 3, refs[2:]))
        self.layout = KVLayout(groups, self.tensors, blocks)
        self.image_bytes = self.layout.image_bytes
        self.slots = slots
        self.memory = torch.randint(0, 256, (slots * self.image_bytes,), generator=generator, dtype=torch.uint8)
        self.memory = self.memory.pin_memory()
        self.expected_device = [tensor.cpu().numpy() for tensor in self.tensors]
        self.expected_host = self.memory.numpy().copy()

    @property
    def arena(self) -> Bench:
        return self

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def offset(self, slot: int, /) -> int:
        return slot * self.image_bytes
