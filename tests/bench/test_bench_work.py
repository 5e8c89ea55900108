"""What the benchmarks measure is the real work: both sides do the same."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from longshore.bench import copies, plans
from longshore.bench.copies import REFERENCES, PageSet
from longshore.errors import BenchError
from longshore.transfer import D2H, H2D
from longshore.transfer.pieces import PieceBuilder

NAMES = ["plan/1000/1", "plan/1000/4", "plan/10240/4", "plan/8-refs"]


def every_page(source: object, destination: object, size: object) -> list[tuple[int, int]]:
    rows = zip(*(np.asarray(column).tolist() for column in (source, destination, size)), strict=True)
    return sorted((start + at, to + at) for start, to, nbytes in rows for at in range(0, nbytes, 1024))


@pytest.mark.parametrize("name", NAMES)
def test_both_planners_describe_the_same_copies(name: str) -> None:
    work = plans.Work.of(plans.SHAPES[name])
    made = plans.ours(work, PieceBuilder())
    assert every_page(*plans.baseline(work)()) == every_page(*made)
    installed = plans.vllm(work)
    if installed is not None:
        assert every_page(*installed[0]()) == every_page(*made)


class Handler:
    """Takes what vLLM 0.32's handler takes, and fills page by page."""

    @staticmethod
    def _fill_direct_ops(
        handler: Any,
        g_idx: int,
        group_src: Any,
        group_dst: Any,
        group_size: int,
        src_skip_count: int,
        dst_skip_count: int,
        all_src: Any,
        all_dst: Any,
        all_sizes: Any,
        op_idx: int,
    ) -> None:
        for ref in handler.layer_refs_per_group[g_idx]:
            for index in range(group_size):
                for ids, skip, per_row, tensors, out in (
                    (group_src, src_skip_count, handler.src_blocks_per_chunk, handler.src_tensors, all_src),
                    (group_dst, dst_skip_count, handler.dst_blocks_per_chunk, handler.dst_tensors, all_dst),
                ):
                    tensor = tensors[ref.tensor_idx]
                    row, place = divmod(index + skip, per_row)
                    page = tensor.shape[1] // per_row
                    out[op_idx] = tensor.data_ptr() + int(ids[row]) * tensor.stride(0) + place * page
                all_sizes[op_idx] = ref.page_size_bytes
                op_idx += 1


@pytest.mark.parametrize("name", NAMES[:2])
def test_the_planning_of_vllm_gets_the_same_transfer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = SimpleNamespace(
        CanonicalKVCacheRef=lambda at, size: SimpleNamespace(tensor_idx=at, page_size_bytes=size)
    )
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.base", reference)
    module = SimpleNamespace(SingleDirectionOffloadingHandler=Handler)
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.cpu.gpu_worker", module)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    work = plans.Work.of(plans.SHAPES[name])
    planned = plans.vllm(work)
    assert planned[1] == "vLLM 0.32.0"
    assert every_page(*planned[0]()) == every_page(*plans.ours(work, PieceBuilder()))
    monkeypatch.setattr(module, "SingleDirectionOffloadingHandler", object)
    assert plans.vllm(work) is None


def test_sizes_of_plans_are_what_their_names_say() -> None:
    for name, shape in plans.SHAPES.items():
        if name != "plan/8-refs":
            _, descriptors, per_chunk = name.split("/")
            assert shape.references == 80
            assert shape.references * shape.blocks == pytest.approx(int(descriptors), rel=0.05)
            assert shape.blocks_per_chunk == int(per_chunk)


def test_every_page_arrives_in_its_image_and_comes_back() -> None:
    pages = PageSet(16 << 10, 2 << 20)
    tensors = [np.asarray(arena.array) for arena in pages.pages]
    random = np.random.default_rng(0)
    for tensor in tensors:
        tensor[:] = random.integers(0, 256, tensor.size, dtype=np.uint8)
    before = [tensor.copy() for tensor in tensors]
    assert pages.move(D2H) > 0
    for block, slot in zip(pages.blocks, pages.slots, strict=True):
        image = pages.arena.array.reshape(len(pages.slots), REFERENCES, -1)[slot]
        for ref, tensor in enumerate(tensors):
            assert (image[ref] == tensor.reshape(len(pages.blocks), -1)[block]).all()
    for tensor in tensors:
        tensor[:] = 0
    assert pages.move(H2D) > 0
    for tensor, expected in zip(tensors, before, strict=True):
        assert (tensor == expected).all()
    del tensors, tensor
    pages.close()


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(BenchError, match="at least"):
        list(copies.run(total_bytes=1 << 20, only=["offload/2MiB"]))
