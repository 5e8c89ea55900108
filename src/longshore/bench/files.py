"""`longshore bench file`: block images to a file tier, and back.

Ours is `FileTier` as it is used: a header and a checksum for each image, both verified when it is read, threads of its
own. The reference writes and reads the same bytes with plain direct I/O: a preallocated file, threads that each take
the next image, no header, no checksum; with 4 threads and with 16, and the better of the two counts.

    write       into slots that were allocated, and never written
    overwrite   into slots that hold an image
    read        of all images in random order; direct I/O leaves nothing in the page cache, so each read is cold
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from longshore.bench.harness import Case, Seconds, chosen, compare, rate, size_of
from longshore.bench.machine import check_direct
from longshore.boundary import Status
from longshore.errors import BenchError
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_for

SIZES = ("256KiB", "2MiB")
KINDS = ("write", "overwrite", "read")
NAMES = tuple(f"{kind}/{size}" for size in SIZES for kind in KINDS)
THREADS = (4, 16)

_DEADLINE = 600.0


def run(
    parent: Path,
    *,
    total_bytes: int = 512 << 20,
    repeats: int = 5,
    only: Sequence[str] = (),
    allow_page_cache: bool = False,
    marks: dict[str, object] | None = None,
) -> Iterator[Case]:
    """The cases of `NAMES` whose images fit `total_bytes`, in a directory of its own in `parent`, removed at the end.

    `marks` receives what must stand beside the figures when they are not what they should be (`check_direct`).
    """
    names = chosen(NAMES, only)
    for size in SIZES:
        kinds = [kind for kind in KINDS if f"{kind}/{size}" in names]
        if not kinds or size_of(size) > total_bytes:
            continue
        with _scratch(parent) as directory, contextlib.closing(Images(directory, size_of(size), total_bytes)) as images:
            found = check_direct(parent, direct=images.direct, allow_page_cache=allow_page_cache)
            if marks is not None:
                marks.update(found)
            for kind in kinds:
                taken, threads = _measure(images, kind, repeats)
                yield rate(f"{kind}/{size}", taken, f"plain direct I/O, {threads} threads", images.nbytes)


def _measure(images: Images, kind: str, repeats: int) -> tuple[Seconds, int]:
    """Medians of ours and of the better reference, and its threads."""
    steps: dict[str, tuple[Callable[[], float], Callable[[int], float]]] = {
        "write": (lambda: images.store(fresh=True), lambda threads: images.plain_write(threads, fresh=True)),
        "overwrite": (images.store, images.plain_write),
        "read": (images.load, images.plain_read),
    }
    ours, plain = steps[kind]
    if kind == "read":  # whatever was measured before: there is something to read
        images.store()
        images.plain_write(max(THREADS))
    taken = {threads: compare(ours, functools.partial(plain, threads), repeats=repeats) for threads in THREADS}
    best = min(THREADS, key=lambda threads: taken[threads].reference)
    return taken[best], best


class Images:
    """An arena full of images, a file tier for them, and a plain file of the same size."""

    def __init__(self, directory: Path, image_bytes: int, total_bytes: int) -> None:
        self._count = total_bytes // image_bytes
        if self._count < 1:
            raise BenchError(f"expected at least {image_bytes} bytes to move, got {total_bytes}")
        self.nbytes = self._count * image_bytes
        self._image_bytes = image_bytes
        self._directory = directory
        self._order = random.Random(0).sample(range(self._count), self._count)  # noqa: S311 - no secret
        self._arena = Arena(self.nbytes)
        self._arena.array[:] = 0x5A
        self._tier = self._open_tier()
        self._plain = self._open_plain()

    @property
    def direct(self) -> bool:
        """Whether the tier has direct I/O."""
        return self._tier.direct

    def store(self, *, fresh: bool = False) -> float:
        """Write every image to the tier; seconds. `fresh`: to a tier that was never written."""
        if fresh:
            self._tier.close()
            shutil.rmtree(self._directory / "tier")
            self._tier = self._open_tier()
        return self._submit(Op.WRITE)

    def load(self) -> float:
        """Read every image from the tier; seconds."""
        return self._submit(Op.READ)

    def plain_write(self, threads: int, *, fresh: bool = False) -> float:
        """Write every image to the plain file; seconds. `fresh`: to one that was never written."""
        if fresh:
            os.close(self._plain)
            (self._directory / "plain").unlink()
            self._plain = self._open_plain()
        return self._plainly(os.pwritev, threads)

    def plain_read(self, threads: int) -> float:
        """Read every image from the plain file; seconds."""
        return self._plainly(os.preadv, threads)

    def close(self) -> None:
        """Give back memory and files."""
        self._tier.close()
        os.close(self._plain)
        self._arena.close()

    def _open_tier(self) -> FileTier:
        return FileTier(
            self._directory / "tier",
            capacity=capacity_for(self._count, self._image_bytes),
            image_bytes=self._image_bytes,
            arena=self._arena,
            scope=bytes(32),
        )

    def _open_plain(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if self._tier.direct else 0)
        fd = os.open(self._directory / "plain", flags, 0o600)
        os.posix_fallocate(fd, 0, self.nbytes)
        os.fsync(fd)
        return fd

    def _submit(self, op: Op) -> float:
        batch = [
            TierOp(op, slot, slot.to_bytes(32, "little"), None, slot * self._image_bytes, self._image_bytes, 0)
            for slot in self._order
        ]
        begun = time.perf_counter()
        self._tier.submit(batch, time.monotonic() + _DEADLINE)
        while not (results := self._tier.poll()):
            time.sleep(0.0005)
        seconds = time.perf_counter() - begun
        if set(results[0].statuses) != {Status.OK}:
            ends = sorted({status.value for status in results[0].statuses})
            raise BenchError(f"{op.value} of {self._count} images ended as {', '.join(ends)}")
        return seconds

    def _plainly(self, call: Callable[[int, list[memoryview[Any]], int], int], threads: int) -> float:
        """Move every image between arena and plain file with `call`, in `threads` threads that take turns."""
        turns = itertools.count()
        short: list[int] = []

        def work() -> None:
            while (turn := next(turns)) < self._count:
                at = self._order[turn] * self._image_bytes
                if call(self._plain, [self._arena.view(at, self._image_bytes)], at) != self._image_bytes:
                    short.append(at)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        begun = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - begun
        if short:
            raise BenchError(f"plain I/O moved only a part of the image at {short[0]}")
        return seconds


@contextlib.contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="longshore-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
