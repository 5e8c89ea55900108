"""Each kernel under Triton's interpreter against its reference, and what it is compiled to for a GPU."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import kernel_references
import numpy as np
import pytest
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from depth import deep
from longshore.checksums import FACTOR, STEP
from longshore.transfer.device.cuda import kernels as compiled
from longshore.transfer.device.cuda.arguments import KernelShape

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
        self.shape = KernelShape.of(
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
        second = self.sources if name.startswith("copy_blocks") else torch.from_numpy(self.starts)
        getattr(module, name)(self.blocks, second, self.table, self.shape)
        after = [array.copy() for array in memory]
        for array, old in zip(memory, before, strict=True):
            array[:] = old
        return after


def aligned(array: np.ndarray[Any, Any]) -> int:
    return -(-int(array.ctypes.data) // 16) * 16


PLACES = list(itertools.product(PAGES, (0, 1, 2, 4, 8)))


@pytest.mark.parametrize("name", ["gather", "scatter", "copy_blocks"])
@pytest.mark.parametrize(
    ("page", "skew"), deep([(page, skew) for page, skew in PLACES if not skew or page == 656], PLACES)
)
def test_a_kernel_does_what_its_reference_does(interpreted: ModuleType, name: str, page: int, skew: int) -> None:
    case = Case(page, skew=skew)
    untouched = [*case.pools, case.rows]
    expected = case.run(kernel_references, f"{name}_reference")
    assert any((now != then).any() for now, then in zip(expected, untouched, strict=True))
    for got, wanted in zip(case.run(interpreted, name), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", ["gather", "scatter", "copy_blocks"])
@pytest.mark.parametrize("widths", [(48, 41), (15, 64), (1, 17)])
def test_pages_that_move_in_part(interpreted: ModuleType, name: str, widths: tuple[int, int]) -> None:
    case = Case(64, skew=0, widths=widths)
    assert (case.shape.word, case.shape.tail) == (16, True)
    expected = case.run(kernel_references, f"{name}_reference")
    for got, wanted in zip(case.run(interpreted, name), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_page_of_several_segments(interpreted: ModuleType) -> None:
    case = Case(3 * 8192 + 48, skew=0, chunks=2, subs=1)
    assert case.shape.segments > 1
    expected = case.run(kernel_references, "gather_reference")
    for got, wanted in zip(case.run(interpreted, "gather"), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_words_are_as_wide_as_addresses_allow() -> None:
    assert [Case(page, skew=0).shape.word for page in (4096, 24)] == [16, 8]
    assert [Case(4096, skew=skew).shape.word for skew in (8, 4, 2, 1)] == [8, 4, 2, 1]


# What they are compiled to, for GPUs that are not here. `make abi` does this with the oldest Triton that is admitted.

ARCHITECTURES = (80, 90, 100, 120)
MOVES = ("gather_kernel", "scatter_kernel", "copy_blocks_kernel")
_WARPS = 8
MOST_REGISTERS = 128
"""Of a thread: two programs of 256 threads fit beside each other on a multiprocessor, or one beside the engine's."""


class Built(NamedTuple):
    """A kernel for one architecture: its PTX, and what the assembler says of its machine code."""

    ptx: str
    registers: int
    spilled: int


@functools.cache
def built(name: str, architecture: int, shape: KernelShape | None = None) -> Built:
    """A kernel of pages for `shape`, or of checksums without one, with arguments aligned as they are when it runs."""
    if shape is None:
        kernel, constants = compiled.sum_kernel, {"SPAN": compiled.SPAN, "STEP": STEP, "FACTOR": FACTOR}
        pointers, numbers = ("address", "total"), "i64"
    else:
        kernel, constants = getattr(compiled, name), compiled.constants(shape)
        pointers, numbers = ("blocks", "rows", "sources", "table"), "i32"
    signature = {
        each: "*i64" if each in pointers else "constexpr" if each in constants else numbers for each in kernel.arg_names
    }
    attributes = {
        (position,): [["tt.divisibility", 16]] for position, each in enumerate(kernel.arg_names) if each in pointers
    }
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
        result = triton.compile(source, target=target, options={"num_warps": _WARPS})
    assert result.asm["cubin"]
    return Built(result.asm["ptx"], *assembled(result.asm["ptx"]))


def assembled(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes that it spills, by the assembler that Triton ships for the architecture."""
    found = re.search(r"\.target (sm_(\d+)\w*)", ptx)
    assert found
    tool = get_ptxas(int(found[2]))
    tool = getattr(tool, "path", None) or tool[0]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "kernel.ptx"
        path.write_text(ptx)
        command = [tool, "-v", f"--gpu-name={found[1]}", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = sum(int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return int(registers), spilled


REALISTIC = {
    "512 bytes": KernelShape.of(4, 2, 1, widest=512, alignment=4096, tail=False),
    "656 bytes": KernelShape.of(4, 2, 1, widest=656, alignment=16, tail=False),
    "4 KiB": KernelShape.of(4, 2, 1, widest=4096, alignment=4096, tail=False),
    "4 KiB in part": KernelShape.of(4, 2, 1, widest=4000, alignment=16, tail=True),
    "2 MiB": KernelShape.of(4, 2, 1, widest=2 << 20, alignment=4096, tail=False),
    "7 bytes": KernelShape.of(4, 2, 1, widest=7, alignment=16, tail=True),
    "2 bytes in part": KernelShape.of(4, 2, 1, widest=2, alignment=2, tail=True),
    "1 byte": KernelShape.of(4, 2, 1, widest=1, alignment=1, tail=False),
    "40 bytes in part": KernelShape.of(4, 2, 1, widest=40, alignment=16, tail=True),
}


def for_gpus(*pages: str) -> list[tuple[str, str, int]]:
    """Kernels for these pages, each for another architecture; at night each for all."""
    kernels = list(itertools.product(MOVES, pages))
    some = [(*each, architecture) for each, architecture in zip(kernels, itertools.cycle(ARCHITECTURES))]
    return deep(some, [(*each, architecture) for each in kernels for architecture in ARCHITECTURES])


@pytest.mark.parametrize(("kernel", "pages", "architecture"), for_gpus(*REALISTIC))
def test_no_kernel_spills_and_registers_leave_room(kernel: str, pages: str, architecture: int) -> None:
    found = built(kernel, architecture, REALISTIC[pages])
    assert found.spilled == 0
    assert found.registers <= MOST_REGISTERS


@pytest.mark.parametrize(("kernel", "pages", "architecture"), for_gpus("512 bytes", "4 KiB", "2 MiB"))
def test_accesses_of_16_bytes(kernel: str, pages: str, architecture: int) -> None:
    ptx = built(kernel, architecture, REALISTIC[pages]).ptx
    wide = {what: len(re.findall(rf"{what}\.global\S*\.v4\.b32", ptx)) for what in ("ld", "st")}
    # 256 threads move 1,024 words at a time: four accesses for each, and no other stores.
    assert wide == {"ld": 4, "st": 4}
    assert len(re.findall(r"st\.global", ptx)) == 4
    assert "evict_first" in ptx


@pytest.mark.parametrize("word", [8, 4, 2, 1])
def test_narrower_words_compile_too(word: int) -> None:
    ptx = built("gather_kernel", 90, KernelShape.of(4, 2, 1, widest=4000, alignment=word, tail=True)).ptx
    access = {8: "v2.b32", 4: "b32", 2: "b16", 1: "b8"}[word]
    assert re.search(rf"st\.global\S*\.{re.escape(access)}", ptx)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_checksums_have_wide_accesses_and_one_atomic_addition(architecture: int) -> None:
    found = built("sum_kernel", architecture)
    assert re.search(r"ld\.global\S*\.b64", found.ptx)
    assert len(re.findall(r"atom\.", found.ptx)) == 1
    assert found.spilled == 0
    assert found.registers <= MOST_REGISTERS
