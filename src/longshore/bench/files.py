"""`longshore bench file`: block images to a file tier, and back.

    write       into slots that were allocated, and never written          ┐ beside the better of fio and of plain
    overwrite   into slots that hold an image                              │ threads, which move the same bytes without
    read        all images; direct I/O leaves nothing in the page cache    │ records
    mixed       every other prompt read, the others overwritten            │
    scattered   all images read, whose prompts lie in no order             ┘
    vs-per-file-write, -read, -scattered, -alone                             beside a store of one file for each image:
                                                                             vLLM's, where it is installed
    cpu         core-seconds per GB, of an overwrite and a read              beside those of the plain threads

Sides take turns, in another order each time. How fast a file is depends on where it lies: on some disks by half. So
those who move the same bytes without records do it within the tier's own file, but for writes to what was never
written, and where reads of the tier would find what they have left.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from longshore.bench.file_sides import (
    ALONE,
    SCATTERED,
    FileSide,
    FileTierSide,
    Fio,
    Images,
    PerFile,
    PlainLoop,
    VllmFiles,
)
from longshore.bench.harness import Case, Seconds, check_direct, chosen, has_vllm, medians, rate
from longshore.config import parse_size
from longshore.errors import BenchError

SIZES = ("256KiB", "2MiB")

COPIES = 3
"""Of the bytes that are moved, on the disk at a time: the tier's, those of plain threads, and those of fio."""

_PER_FILE = "vs-per-file-"
_OF_PER_FILE = {f"{_PER_FILE}write": "overwrite", **{f"{_PER_FILE}{kind}": kind for kind in ("read", SCATTERED, ALONE)}}
_IN_PLACE = frozenset({"overwrite", "read", SCATTERED})
KINDS = ("write", "overwrite", "read", "mixed", SCATTERED, *_OF_PER_FILE, "cpu")
NAMES = tuple(f"{kind}/{size}" for size in SIZES for kind in KINDS)


def run(
    parent: Path,
    *,
    total_bytes: int = 512 << 20,
    repeats: int = 5,
    only: Sequence[str] = (),
    allow_page_cache: bool = False,
    marks: dict[str, object] | None = None,
) -> Iterator[Case]:
    """The cases of `NAMES` of which two images fit `total_bytes`, in a directory in `parent`, removed at the end.

    `marks` receives what must stand beside the figures when they are not what they should be (`check_direct`).
    """
    names = chosen(NAMES, only)
    least = min(2 * parse_size(name.split("/")[1]) for name in names)
    if total_bytes < least:
        raise BenchError(f"expected at least {least} bytes to move, two images, got {total_bytes}")
    for size in SIZES:
        kinds = [kind for kind in KINDS if f"{kind}/{size}" in names]
        if not kinds or 2 * parse_size(size) > total_bytes:
            continue
        with _scratch(parent) as directory, contextlib.ExitStack() as undo:
            images = Images(parse_size(size), total_bytes)
            undo.callback(images.arena.close)
            ours = FileTierSide(directory / "tier", images)
            undo.callback(ours.close)
            found = check_direct(parent, direct=ours.direct, allow_page_cache=allow_page_cache)
            if marks is not None:
                marks.update(found)
            for kind in kinds:
                with _scratch(directory) as scratch:
                    yield _measure(f"{kind}/{size}", kind, ours, scratch, images, repeats)


def _measure(name: str, kind: str, ours: FileTierSide, scratch: Path, images: Images, repeats: int) -> Case:
    if kind in _OF_PER_FILE:
        with contextlib.closing(_per_file(scratch / "images", images, direct=ours.direct)) as files:
            return _beside(name, _OF_PER_FILE[kind], ours, [files], images, repeats)
    plain = PlainLoop(ours.segment if kind in _IN_PLACE else scratch / "plain", images, direct=ours.direct)
    with contextlib.closing(plain):
        if kind == "cpu":
            return _cpu(name, ours, plain, images, repeats)
        references: list[FileSide] = [plain]
        if Fio.is_installed():
            path = ours.segment if kind in _IN_PLACE else scratch / "fio"
            references.append(Fio(path, images, direct=ours.direct))
        return _beside(name, kind, ours, references, images, repeats)


def _per_file(directory: Path, images: Images, *, direct: bool) -> FileSide:
    return VllmFiles(directory, images) if has_vllm() else PerFile(directory, images, direct=direct)


def _beside(name: str, kind: str, ours: FileTierSide, references: list[FileSide], images: Images, repeats: int) -> Case:
    """Ours, and the best of `references`."""
    sides: list[FileSide] = [ours, *references]
    for side in reversed(sides):  # ours last: the others may have its file
        if images.reads(kind) or kind == "mixed":  # whatever was measured before: there is something to read
            side.move("overwrite")
    taken = medians([functools.partial(side.move, kind) for side in sides], repeats=repeats)
    best, seconds = min(zip(references, taken[1:], strict=True), key=lambda reference: reference[1])
    return rate(name, Seconds(taken[0], seconds), best.name, images.nbytes)


def _cpu(name: str, ours: FileTierSide, plain: PlainLoop, images: Images, repeats: int) -> Case:
    """Core-seconds of this process per GB, kernel and checksums included; fewer are better."""

    def used(side: FileSide) -> float:
        begun = time.process_time()
        side.move("overwrite")
        side.move("read")
        return time.process_time() - begun

    taken = medians([functools.partial(used, side) for side in (ours, plain)], repeats=repeats)
    value, reference = (seconds / (2 * images.nbytes / 1e9) for seconds in taken)
    return Case(name, value, "core-s/GB", plain.name, reference, reference / value)


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="longshore-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
