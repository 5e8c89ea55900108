"""`longshore bench plan`: from a transfer's ids to arrays of addresses and sizes.

Both sides get the input of a worker of vLLM, the ids of device blocks and of host chunks as int32 arrays, and fill
three arrays with the same addresses and sizes. Ours checks every id and merges runs. The reference processes the
layout's references one by one, with whole-array arithmetic in each; it checks and merges nothing. It is vLLM's own code
if vLLM is installed, else the same steps written here. Blocks and slots are scattered, so that few runs merge: the
worst case.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt

from longshore.bench.harness import SEED, ArrayTensor, Case, Seconds, chosen, compare, duration, loops_within, timed
from longshore.boundary import HOST, I64, Section
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer.copy_plan import plan_copy
from longshore.transfer.pieces import PieceBuilder, Pieces

REFERENCE = "numpy, reference by reference"

I32 = npt.NDArray[np.int32]

_PAGE_BYTES = 1024
_SPARE = 4  # blocks and slots per block and slot of the transfer, so that they are scattered


class TransferShape(NamedTuple):
    """Size of the transfer of one case."""

    references: int
    blocks: int
    blocks_per_chunk: int


SHAPES = {
    "plan/1000/1": TransferShape(80, 12, 1),
    "plan/1000/4": TransferShape(80, 12, 4),
    "plan/10240/1": TransferShape(80, 128, 1),
    "plan/10240/4": TransferShape(80, 128, 4),
    "plan/100000/1": TransferShape(80, 1250, 1),
    "plan/100000/4": TransferShape(80, 1250, 4),
    "plan/8-refs": TransferShape(8, 1280, 1),
}
"""By name of the case. 1,000 descriptors over 80 references are 12 blocks, 960 descriptors."""


def run(*, repeats: int = 41, only: Sequence[str] = ()) -> Iterator[Case]:
    """The cases of `SHAPES`, one after the other."""
    for name in chosen(list(SHAPES), only):
        work = Work.of(SHAPES[name])
        reference, called = vllm(work) or (baseline(work), REFERENCE)
        yield duration(name, _measure(work, reference, repeats), called)


@dataclass(frozen=True, slots=True)
class Work:
    """One transfer from the device to the host, and its layout.

    Attributes:
        layout: One group, each reference in a tensor of its own.
        pages: The memory of these tensors, shape `(blocks, bytes)` each; described only, and takes no room.
        blocks: Device blocks, shape `(blocks,)`.
        slots: Host chunks, shape `(chunks,)`; chunk `i` is at byte `i * layout.image_bytes` of `host`.
        host: The host memory; also described only.
        host_address: Where it starts.
    """

    layout: KVLayout
    pages: tuple[npt.NDArray[np.int8], ...]
    blocks: I32
    slots: I32
    host: npt.NDArray[np.int8]
    host_address: int

    @classmethod
    def of(cls, shape: TransferShape, seed: int = SEED) -> Work:
        """Scattered blocks and slots; the last chunk is partial where the blocks do not fill it."""
        chooser = random.Random(seed)  # noqa: S311 - no secret
        num_blocks = shape.blocks * _SPARE
        pages = tuple(np.empty((num_blocks, _PAGE_BYTES), np.int8) for _ in range(shape.references))
        tensors = [ArrayTensor(rows) for rows in pages]
        refs = tuple(PageRef(index, 0, _PAGE_BYTES, _PAGE_BYTES) for index in range(shape.references))
        layout = KVLayout((KVGroup("kv", 16, shape.blocks_per_chunk, refs),), tensors, num_blocks)
        chunks = -(-shape.blocks // shape.blocks_per_chunk)
        host = np.empty(chunks * _SPARE * layout.image_bytes, dtype=np.int8)
        return cls(
            layout,
            pages,
            np.array(chooser.sample(range(num_blocks), shape.blocks), dtype=np.int32),
            np.array(chooser.sample(range(chunks * _SPARE), chunks), dtype=np.int32),
            host,
            ArrayTensor(host).data_ptr(),
        )


def _measure(work: Work, reference: Callable[[], object], repeats: int) -> Seconds:
    planner = PieceBuilder()
    sides = [timed(call, loops_within(call)) for call in (lambda: ours(work, planner), reference)]
    return compare(*sides, repeats=repeats, warm_ups=3)


def ours(work: Work, planner: PieceBuilder) -> Pieces:
    """The transfer as the transfer engine plans it for a GPU."""
    plan = plan_copy(
        work.layout,
        [Section(0, 0, cast("tuple[int, ...]", work.blocks))],  # an array serves as well
        work.slots.astype(np.int64) * work.layout.image_bytes,
        destination=HOST,
        host_address=work.host_address,
        host_bytes=work.host.nbytes,
    )
    return planner.build(plan.batch, any_order=True)


class PlannedCopies(NamedTuple):
    """Output of the reference: int64 arrays of shape `(descriptors,)`, filled by each call."""

    source: I64
    destination: I64
    size: I64

    @classmethod
    def of(cls, work: Work) -> PlannedCopies:
        """Empty arrays for the descriptors of `work`."""
        total = len(work.blocks) * len(work.layout.groups[0].refs)
        return cls(*(np.empty(total, dtype=np.int64) for _ in range(3)))


def baseline(work: Work) -> Callable[[], PlannedCopies]:
    """The steps of vLLM's planning, for each reference: read both tensors, widen ids, compute addresses and sizes."""
    device, host = _rows(work)
    per_chunk = work.layout.groups[0].blocks_per_chunk
    made = PlannedCopies.of(work)

    def per_reference() -> PlannedCopies:
        at = 0
        for rows, chunks in zip(device, host, strict=True):
            end = at + len(work.blocks)
            _fill(made.source[at:end], rows, work.blocks, 1)
            _fill(made.destination[at:end], chunks, work.slots, per_chunk)
            made.size[at:end] = rows.shape[1]
            at = end
        return made

    return per_reference


def _fill(out: I64, rows: ArrayTensor, ids: I32, per_row: int) -> None:
    """Addresses of the first `len(out)` pages in the rows `ids`, `per_row` in each."""
    first, pitch = rows.data_ptr(), rows.stride(0)
    starts = ids.astype(np.uint64) * pitch + first
    if per_row == 1:
        out[:] = starts[: len(out)]
    else:
        pages = np.arange(per_row, dtype=np.uint64) * (rows.shape[1] // per_row)
        out[:] = (starts[:, None] + pages).ravel()[: len(out)]


def vllm(work: Work) -> tuple[Callable[[], PlannedCopies], str] | None:
    """vLLM's own planning, and its name; `None` if vLLM is not installed, or has other functions than version 0.32.

    This is the part of `transfer_async` before the copies: it fills pooled arrays for each group.
    """
    try:
        from vllm import __version__ as version  # noqa: PLC0415
        from vllm.v1.kv_offload.base import CanonicalKVCacheRef  # noqa: PLC0415
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler  # noqa: PLC0415

        fill = SingleDirectionOffloadingHandler._fill_direct_ops
    except (ImportError, AttributeError):
        return None
    group = work.layout.groups[0]
    device, host = _rows(work)
    handler = SimpleNamespace(
        layer_refs_per_group=[[CanonicalKVCacheRef(index, ref.page_bytes) for index, ref in enumerate(group.refs)]],
        src_tensors=device,
        dst_tensors=host,
        src_blocks_per_chunk=1,
        dst_blocks_per_chunk=group.blocks_per_chunk,
    )
    pooled = PlannedCopies.of(work)
    total = len(pooled.size)

    def planned() -> PlannedCopies:
        made = PlannedCopies(*(column[:total] for column in pooled))
        fill(
            handler,
            0,
            group_src=work.blocks,
            group_dst=work.slots,
            group_size=len(work.blocks),
            src_skip_count=0,
            dst_skip_count=0,
            all_src=made.source,
            all_dst=made.destination,
            all_sizes=made.size,
            op_idx=0,
        )
        return made

    return planned, f"vLLM {version}"


def _rows(work: Work) -> tuple[Sequence[ArrayTensor], Sequence[ArrayTensor]]:
    """Pages of device and host, as a tensor of rows for each reference."""
    group, table = work.layout.groups[0], work.layout.table(0)
    images = work.host.reshape(-1, work.layout.image_bytes)
    host = [
        images[:, place : place + ref.page_bytes * group.blocks_per_chunk]
        for place, ref in zip(table.image.tolist(), group.refs, strict=True)
    ]
    return [_tensor(rows) for rows in work.pages], [_tensor(rows) for rows in host]


def _tensor(rows: npt.NDArray[np.int8]) -> ArrayTensor:
    """`rows` as a tensor of torch, as in vLLM; without torch, an object with the same methods."""
    try:
        return cast("ArrayTensor", importlib.import_module("torch").from_numpy(rows))
    except ImportError:
        return ArrayTensor(rows)
