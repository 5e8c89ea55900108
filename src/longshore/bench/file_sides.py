"""Who moves block images to a disk and back: the file tier, and those it is measured against.

    FileTierSide   records in preallocated slots: header, checksum, both verified when read
    PlainLoop      a preallocated file, threads that each take the next image; no header, no checksum
    Fio            the same by fio: libaio, direct, 16 at once
    PerFile        a file for each image: temporary file, rename; vLLM's own code for that where it is installed

All move the same bytes in the same order, between the same memory (fio: its own, at random) and the same disk. Images
belong to prompts: those of one lie one behind the other, as they were written, and are asked for together; prompts come
at random, and images lie anywhere in memory. The images of a prompt that is `SCATTERED` lie anywhere on the disk, too.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from longshore.boundary import Status
from longshore.errors import BenchError
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.file.directory import SEGMENT

THREADS = 16
"""Of everything here that is not the file tier, and images that fio has under way."""

PROMPT = 16
"""Images of one prompt that are asked for together: a batch of the control plane's (`cache.loading.LOAD_BATCH`)."""

SCATTERED = "scattered"
"""Read every image, where no prompt's images are neighbours."""

_READS = frozenset({"read", SCATTERED})
_DEADLINE = 600.0
_FIO_KINDS = {
    "write": "randwrite",
    "overwrite": "randwrite",
    "read": "randread",
    "mixed": "randrw",
    SCATTERED: "randread",
}


class Images:
    """`count` images of `image_bytes` in an arena, and the order in which they are moved."""

    def __init__(self, image_bytes: int, total_bytes: int) -> None:
        self.count = total_bytes // image_bytes
        if self.count < 2:
            raise BenchError(f"expected at least {2 * image_bytes} bytes to move, got {total_bytes}")
        self.image_bytes = image_bytes
        self.nbytes = self.count * image_bytes
        self.prompt = min(PROMPT, self.count // 2)
        chance = random.Random(0)  # noqa: S311 - no secret
        self._places = chance.sample(range(self.count), self.count)
        firsts = range(0, self.count, self.prompt)
        anywhere = chance.sample(range(self.count), self.count)
        self._scattered = [anywhere[first : first + self.prompt] for first in firsts]
        self._prompts = [
            list(range(first, min(first + self.prompt, self.count))) for first in chance.sample(firsts, len(firsts))
        ]
        self.arena = Arena(self.nbytes)
        self.arena.array[:] = 0x5A

    def batches(self, kind: str) -> list[list[int]]:
        """All images, prompt by prompt, as they are asked for."""
        return self._scattered if kind == SCATTERED else self._prompts

    def order(self, kind: str) -> list[int]:
        """The same, one after the other."""
        return [image for batch in self.batches(kind) for image in batch]

    def writes(self, kind: str, image: int) -> bool:
        """Whether `kind` writes this image: `mixed` writes every other prompt, and reads the rest."""
        return image // self.prompt % 2 == 1 if kind == "mixed" else kind not in _READS

    def offset(self, image: int) -> int:
        """Where it lies in the arena."""
        return self._places[image] * self.image_bytes

    def view(self, image: int) -> memoryview:
        """Its bytes."""
        return self.arena.view(self.offset(image), self.image_bytes)


class Side(Protocol):
    """Somebody who moves images. `name` goes into the report."""

    name: str

    def move(self, kind: str) -> float:
        """Move every image once; seconds. `write`: to places that were never written."""

    def close(self) -> None:
        """Give back files and threads."""


class FileTierSide:
    """`FileTier` as it is used, with its default of threads."""

    name = "the file tier"

    def __init__(self, directory: Path, images: Images) -> None:
        self._directory = directory
        self._images = images
        self._tier = self._open()

    @property
    def direct(self) -> bool:
        """Whether it has direct I/O."""
        return self._tier.direct

    @property
    def segment(self) -> Path:
        """The file that the images are in. Who writes to it makes an overwrite necessary before the next read."""
        return self._directory / SEGMENT

    def move(self, kind: str) -> float:
        """A batch for each prompt, from the first `submit` to the last result."""
        if kind == "write":
            self._tier.close()
            shutil.rmtree(self._directory)
            self._tier = self._open()
        batches = [[self._op(kind, image) for image in batch] for batch in self._images.batches(kind)]
        begun = time.perf_counter()
        for batch in batches:
            self._tier.submit(batch, time.monotonic() + _DEADLINE)
        ends: set[Status] = set()
        open_batches = len(batches)
        while open_batches:
            results = self._tier.poll()
            open_batches -= len(results)
            ends.update(status for result in results for status in result.statuses)
            if not results:
                time.sleep(0.0005)
        seconds = time.perf_counter() - begun
        if ends != {Status.OK}:
            raise BenchError(
                f"{kind} of {self._images.count} images ended as {', '.join(sorted(e.value for e in ends))}"
            )
        return seconds

    def _op(self, kind: str, image: int) -> TierOp:
        images = self._images
        op = Op.WRITE if images.writes(kind, image) else Op.READ
        return TierOp(op, image, image.to_bytes(32, "little"), None, images.offset(image), images.image_bytes, 0)

    def close(self) -> None:
        """Close the tier."""
        self._tier.close()

    def _open(self) -> FileTier:
        images = self._images
        return FileTier(
            self._directory,
            capacity=capacity_for(images.count, images.image_bytes),
            image_bytes=images.image_bytes,
            arena=images.arena,
            scope=bytes(32),
        )


class PlainLoop:
    """Threads that each take the next image and move it with one system call."""

    name = f"a plain loop, {THREADS} threads"

    def __init__(self, path: Path, images: Images, *, direct: bool) -> None:
        self._path = path
        self._images = images
        self._direct = direct
        self._fd = self._open()

    def move(self, kind: str) -> float:
        """Into place, image by image."""
        images = self._images
        if kind == "write":
            self.close()
            self._path.unlink()
            self._fd = self._open()

        def one(image: int) -> None:
            call = os.pwritev if images.writes(kind, image) else os.preadv
            moved = call(self._fd, [images.view(image)], image * images.image_bytes)
            if moved != images.image_bytes:
                raise BenchError(f"plain I/O moved only {moved} bytes of image {image}")

        return in_threads(one, images.order(kind))

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _open(self) -> int:
        return _preallocated(self._path, self._images.nbytes, direct=self._direct)


class Fio:
    """The tool that disks are measured with; its own clock counts, without its start."""

    name = f"fio, libaio, {THREADS} at once"

    def __init__(self, path: Path, images: Images, *, direct: bool) -> None:
        self._path = path
        self._images = images
        self._direct = direct
        os.close(_preallocated(path, images.nbytes, direct=direct))

    @staticmethod
    def is_installed() -> bool:
        """Whether there is such a program."""
        return shutil.which("fio") is not None

    def move(self, kind: str) -> float:
        """A run over the whole file."""
        if kind == "write":
            self._path.unlink()
            os.close(_preallocated(self._path, self._images.nbytes, direct=self._direct))
        command = (
            f"fio --name=longshore --filename={self._path} --ioengine=libaio --iodepth={THREADS} "
            f"--direct={int(self._direct)} --rw={_FIO_KINDS[kind]} --bs={self._images.image_bytes} "
            f"--size={self._images.nbytes} --overwrite=1 --invalidate=0 --output-format=json"
        )
        done = subprocess.run(command.split(" "), capture_output=True, text=True, check=False)
        if done.returncode:
            raise BenchError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
        (job,) = json.loads(done.stdout)["jobs"]
        return max(float(job[side]["runtime"]) for side in ("read", "write")) / 1000

    def close(self) -> None:
        """Nothing is open between two runs."""


class PerFile:
    """A file for each image, which comes into being whole or not at all. Each thread has its share from the start."""

    def __init__(self, directory: Path, images: Images, *, direct: bool) -> None:
        directory.mkdir()
        self._directory = directory
        self._images = images
        self._direct = direct
        ways: _Files = _vllm_files() or (_store_files, _load_files, f"a file for each image, {THREADS} threads")
        self._store, self._load, self.name = ways

    def move(self, kind: str) -> float:
        """`overwrite` removes what is there first, which takes no time here: such stores never overwrite."""
        images, storing = self._images, kind not in _READS
        if storing:
            for path in self._directory.iterdir():
                path.unlink()
        move = self._store if storing else self._load
        whole, order = images.arena.view(0, images.nbytes), images.order(kind)

        def some(share: int) -> None:
            mine = order[share::THREADS]
            paths = [str(self._directory / f"{image:08x}") for image in mine]
            offsets = [images.offset(image) for image in mine]
            if mine:
                move(paths, whole, offsets, images.image_bytes, use_o_direct=self._direct)

        return in_threads(some, list(range(THREADS)))

    def close(self) -> None:
        """Nothing is open between two calls."""


def in_threads(work: Callable[[int], None], items: Sequence[int]) -> float:
    """Seconds until `THREADS` threads, each of which takes the next of `items`, have done `work` on all."""
    turns = itertools.count()
    failures: list[Exception] = []

    def take_turns() -> None:
        try:
            while (turn := next(turns)) < len(items):
                work(items[turn])
        except (OSError, BenchError) as error:
            failures.append(error)

    workers = [threading.Thread(target=take_turns) for _ in range(THREADS)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begun
    if failures:
        raise BenchError(f"a reference failed: {failures[0]}")
    return seconds


def _preallocated(path: Path, nbytes: int, *, direct: bool) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    with _closed_on_error(fd):
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
    return fd


@contextlib.contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


_Files = tuple[Callable[..., None], Callable[..., None], str]
"""How files are stored and loaded, and what that is called."""


def _store_files(paths: list[str], memory: memoryview, offsets: list[int], nbytes: int, *, use_o_direct: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if use_o_direct else 0)
    for path, offset in zip(paths, offsets, strict=True):
        temporary = f"{path}.tmp"
        _move_file(temporary, flags, os.writev, memory[offset : offset + nbytes])
        os.replace(temporary, path)  # noqa: PTH105 - as short as it can be: this is what is measured


def _load_files(paths: list[str], memory: memoryview, offsets: list[int], nbytes: int, *, use_o_direct: bool) -> None:
    flags = os.O_RDONLY | (os.O_DIRECT if use_o_direct else 0)
    for path, offset in zip(paths, offsets, strict=True):
        _move_file(path, flags, os.readv, memory[offset : offset + nbytes])


def _move_file(path: str, flags: int, call: Callable[[int, list[memoryview]], int], image: memoryview) -> None:
    fd = os.open(path, flags, 0o600)
    try:
        moved = call(fd, [image])
    finally:
        os.close(fd)
    if moved != len(image):
        raise BenchError(f"only {moved} bytes of {path} were moved")


def _vllm_files() -> _Files | None:
    """vLLM's own functions for that, where they are installed in the form that is known here (0.32, 0.33)."""
    try:
        found: Any = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io") if find_spec("vllm") else None
        return found and (found.batch_store_block, found.batch_load_block, f"vLLM's file tier, {THREADS} threads")
    except (ImportError, AttributeError):
        return None
