"""Each kernel under Triton's interpreter against its reference, and what it is compiled to for a GPU."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton

from longshore.transfer.device.cuda import kernels as compiled
from longshore.transfer.device.cuda.shape import Shape

PAGES = (1, 7, 8, 24, 656, 4096)


@pytest.fixture(scope="module")
def interpreted() -> ModuleType:
    """The kernels' module once more, with each kernel run by the interpreter, on addresses in host memory."""
    name = "interpreted_kernels"
    spec = importlib.util.spec_from_file_location(name, compiled.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    return module


class Case:
    """Pages of two references at any address, rows at any address, and all bytes around them."""

    def __init__(
        self, page: int, *, skew: int, chunks: int = 3, subs: int = 2, widths: tuple[int, int] | None = None
    ) -> None:
        random = np.random.default_rng(page * 31 + skew)
        blocks = chunks * subs * 2 + 1
        strides = (page, page + 16 * (page % 3))
        self.widths = widths or (page, page)
        self.pools = [random.integers(0, 256, 64 + blocks * stride, dtype=np.uint8) for stride in strides]
        row = 2 * subs * page + 16
        self.rows = random.integers(0, 256, 64 + chunks * row, dtype=np.uint8)
        bases = [aligned(pool) + skew for pool in self.pools]
        ids = random.permutation(blocks)
        self.blocks = torch.from_numpy(ids[: chunks * subs].copy())
        self.sources = torch.from_numpy(ids[chunks * subs : 2 * chunks * subs].copy())
        lines = [(bases[index], strides[index], self.widths[index], index * subs * page, page) for index in range(2)]
        self.table = torch.tensor(lines, dtype=torch.int64).reshape(-1)
        self.starts = aligned(self.rows) + skew + np.arange(chunks) * row
        bits = int(np.bitwise_or.reduce([*bases, *strides, subs * page, page, *self.starts]))
        self.shape = Shape.of(
            chunks,
            2,
            subs,
            widest=max(self.widths),
            alignment=bits & -bits,
            tail=any(width % min(bits & -bits, 16) for width in self.widths),
        )

    def run(self, module: ModuleType, name: str) -> list[np.ndarray[Any, Any]]:
        """All bytes after `module`'s function has run; afterwards they are as they were."""
        memory = [*self.pools, self.rows]
        before = [array.copy() for array in memory]
        second = self.sources if name.startswith("shift") else torch.from_numpy(self.starts)
        getattr(module, name)(self.blocks, second, self.table, self.shape)
        after = [array.copy() for array in memory]
        for array, old in zip(memory, before, strict=True):
            array[:] = old
        return after


def aligned(array: np.ndarray[Any, Any]) -> int:
    return -(-int(array.ctypes.data) // 16) * 16


@pytest.mark.parametrize("name", ["gather", "scatter", "shift"])
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("skew", [0, 1, 2, 4, 8])
def test_a_kernel_does_what_its_reference_does(interpreted: ModuleType, name: str, page: int, skew: int) -> None:
    case = Case(page, skew=skew)
    untouched = [*case.pools, case.rows]
    expected = case.run(compiled, f"{name}_reference")
    assert any((now != then).any() for now, then in zip(expected, untouched, strict=True))
    for got, wanted in zip(case.run(interpreted, name), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["gather", "scatter", "shift"])
@pytest.mark.parametrize("widths", [(48, 41), (15, 64), (1, 17)])
def test_pages_that_move_in_part(interpreted: ModuleType, name: str, widths: tuple[int, int]) -> None:
    case = Case(64, skew=0, widths=widths)
    assert (case.shape.word, case.shape.tail) == (16, True)
    expected = case.run(compiled, f"{name}_reference")
    for got, wanted in zip(case.run(interpreted, name), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_page_of_several_segments(interpreted: ModuleType) -> None:
    case = Case(3 * 8192 + 48, skew=0, chunks=2, subs=1)
    assert case.shape.segments > 1
    expected = case.run(compiled, "gather_reference")
    for got, wanted in zip(case.run(interpreted, "gather"), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_words_are_as_wide_as_addresses_allow() -> None:
    assert [Case(page, skew=0).shape.word for page in (4096, 24)] == [16, 8]
    assert [Case(4096, skew=skew).shape.word for skew in (8, 4, 2, 1)] == [8, 4, 2, 1]


def ptx_of(kernel: Any, shape: Shape) -> str:
    """The kernel compiled for an H100 or H200, down to machine code, as PTX."""
    names = {"blocks": "*i64", "rows": "*i64", "sources": "*i64", "table": "*i64"}
    constants = compiled.constants(shape)
    signature = {name: names.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    arguments = inspect.signature(triton.compiler.ASTSource.__init__).parameters
    how = "constexprs" if "constexprs" in arguments else "constants"
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, **{how: constants})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = triton.compile(
            source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options={"num_warps": 8}
        )
    assert built.asm["cubin"]
    text: str = built.asm["ptx"]
    return text


@pytest.mark.parametrize("kernel", ["gather_kernel", "scatter_kernel", "shift_kernel"])
@pytest.mark.parametrize("page", [512, 4096, 2 << 20])
def test_accesses_of_16_bytes_on_sm_90(kernel: str, page: int) -> None:
    shape = Shape.of(4, 2, 1, widest=page, alignment=4096, tail=False)
    ptx = ptx_of(getattr(compiled, kernel), shape)
    wide = {what: len(re.findall(rf"{what}\.global\S*\.v4\.b32", ptx)) for what in ("ld", "st")}
    # 256 threads move 1,024 words at a time: four accesses for each, and no other stores.
    assert wide == {"ld": 4, "st": 4}
    assert len(re.findall(r"st\.global", ptx)) == 4
    assert "evict_first" in ptx


@pytest.mark.parametrize("word", [8, 4, 2, 1])
def test_narrower_words_compile_too(word: int) -> None:
    shape = Shape.of(4, 2, 1, widest=4000, alignment=word, tail=True)
    ptx = ptx_of(compiled.gather_kernel, shape)
    access = {8: "v2.b32", 4: "b32", 2: "b16", 1: "b8"}[word]
    assert re.search(rf"st\.global\S*\.{re.escape(access)}", ptx)
