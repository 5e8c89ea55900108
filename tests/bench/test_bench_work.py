"""What the benchmarks measure is the real work: both sides do the same."""

from __future__ import annotations

import numpy as np
import pytest

from longshore.bench import copies, plans
from longshore.bench.copies import REFERENCES, Pages
from longshore.errors import BenchError
from longshore.transfer import OFFLOAD, ONBOARD
from longshore.transfer.plan import Planner


@pytest.mark.parametrize("name", ["plan/1000/1", "plan/1000/4", "plan/10240/4", "plan/8-refs"])
def test_both_planners_describe_the_same_copies(name: str) -> None:
    work = plans.Work.of(plans.SHAPES[name])
    made = plans.ours(work, Planner())
    expected = plans.baseline(work)()

    def ordered(*columns: object) -> list[tuple[int, ...]]:
        return sorted(zip(*(np.asarray(column).tolist() for column in columns), strict=True))

    assert ordered(made.source, made.destination, made.size) == ordered(*expected)


def test_sizes_of_plans_are_what_their_names_say() -> None:
    for name, shape in plans.SHAPES.items():
        if name != "plan/8-refs":
            _, descriptors, per_chunk = name.split("/")
            assert shape.references == 80
            assert shape.references * shape.blocks == pytest.approx(int(descriptors), rel=0.05)
            assert shape.blocks_per_chunk == int(per_chunk)


def test_every_page_arrives_in_its_image_and_comes_back() -> None:
    pages = Pages(16 << 10, 2 << 20)
    tensors = [np.asarray(tensor.arena.array) for tensor in pages.tensors]
    random = np.random.default_rng(0)
    for tensor in tensors:
        tensor[:] = random.integers(0, 256, tensor.size, dtype=np.uint8)
    before = [tensor.copy() for tensor in tensors]
    assert pages.move(OFFLOAD) > 0
    for block, slot in zip(pages.blocks, pages.slots, strict=True):
        image = pages.arena.array.reshape(len(pages.slots), REFERENCES, -1)[slot]
        for ref, tensor in enumerate(tensors):
            assert (image[ref] == tensor.reshape(len(pages.blocks), -1)[block]).all()
    for tensor in tensors:
        tensor[:] = 0
    assert pages.move(ONBOARD) > 0
    for tensor, expected in zip(tensors, before, strict=True):
        assert (tensor == expected).all()
    del tensors, tensor
    pages.close()


def test_too_few_bytes_are_refused() -> None:
    with pytest.raises(BenchError, match="at least"):
        list(copies.run(total_bytes=1 << 20, only=["offload/2MiB"]))
