"""`longshore bench file`: chunk images to a file tier, and back.

    write       into slots that were allocated, and never written          ┐ beside the better of fio and of plain
    overwrite   into slots that hold an image                              │ threads, which move the same bytes without
    read        all images; direct I/O leaves nothing in the page cache    │ records
    mixed       every other prompt read, the others overwritten            │
    scattered   all images read, whose prompts lie in no order             ┘
    vs-per-file-write, -read, -scattered, -alone                             beside a store of one file for each image:
                                                                             vLLM's, where it is installed
    cpu         core-seconds per GB, of an overwrite and a read              beside those of the plain threads

Sides run in turn, in a different order each time. On some disks, the position of a file changes its speed by half. The
references without records therefore use the tier's own file, except for writes to new space, and where the tier would
read what they have written.

    FileTierSide   records in preallocated slots: header and checksum, both verified when read
    PlainLoop      a preallocated file, threads that each take the next image; no header, no checksum
    Fio            the same by fio: libaio, direct, 16 in flight
    PerFile        a file per image: temporary file, rename, threads; `VllmFiles` is vLLM's own

All move the same bytes in the same order, between the same memory (fio: its own, in random order) and the same disk.
The images of a prompt are adjacent, as they were written, and are requested together; prompts come in random order, and
images are at random places in memory. For `SCATTERED`, the images of a prompt are at random places on the disk, too.
All prompts are requested at once, except for `ALONE`, which requests one after the other.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import itertools
import json
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

import numpy as np
import xxhash

from longshore.bench.harness import Case, Seconds, check_direct, chosen, is_installed, medians, rate
from longshore.boundary import Status
from longshore.config import parse_size
from longshore.errors import BenchError
from longshore.tiers.arena import Arena
from longshore.tiers.base import Op, TierOp
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.file.directory import SEGMENT

B = TypeVar("B")

THREADS = 16
"""Threads of the references, and images that fio has in flight."""

PROMPT = 16
"""Images of one prompt that are requested together, as in a batch of the control plane (`cache.loading.LOAD_BATCH`)."""

SCATTERED = "scattered"
"""Read every image; the images of a prompt are not adjacent on the disk."""

ALONE = "alone"
"""Read every image, one prompt at a time."""

_READS = frozenset({"read", SCATTERED, ALONE})
_DEADLINE = 600.0
_NAP, _LONG_NAP = 1e-4, 1e-3
"""Seconds between two polls: while each prompt is waited for, and while all are in flight."""
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
        return self._scattered if kind == SCATTERED else self._prompts

    def order(self, kind: str) -> list[int]:
        return [image for batch in self.batches(kind) for image in batch]

    def reads(self, kind: str) -> bool:
        return kind in _READS

    def at_once(self, kind: str) -> int | None:
        """Number of prompts in flight; `None`: all."""
        return 1 if kind == ALONE else None

    def writes(self, kind: str, image: int) -> bool:
        """Whether `kind` writes this image: `mixed` writes every other prompt, and reads the rest."""
        return image // self.prompt % 2 == 1 if kind == "mixed" else not self.reads(kind)

    def offset(self, image: int) -> int:
        return self._places[image] * self.image_bytes

    def view(self, image: int) -> memoryview:
        return self.arena.view(self.offset(image), self.image_bytes)


class FileSide(Protocol):
    """A way of moving images. `name` is shown in the report."""

    name: str

    def move(self, kind: str) -> float:
        """Move every image once; returns seconds. `write` is to space that was never written."""

    def close(self) -> None: ...


class FileTierSide:
    """`FileTier` with its default settings."""

    name = "the file tier"

    def __init__(self, directory: Path, images: Images) -> None:
        self._directory = directory
        self._images = images
        self._tier = self._open()

    @property
    def direct(self) -> bool:
        return self._tier.direct

    @property
    def segment(self) -> Path:
        """The file with the images. After other writes to it, the tier must overwrite them before it reads them."""
        return self._directory / SEGMENT

    def move(self, kind: str) -> float:
        if kind == "write":
            self._tier.close()
            shutil.rmtree(self._directory)
            self._tier = self._open()
        batches = [[self._op(kind, image) for image in batch] for batch in self._images.batches(kind)]
        ends: set[Status] = set()

        def submit(batch: Sequence[TierOp]) -> None:
            self._tier.submit(batch, time.monotonic() + _DEADLINE)

        def ended() -> int:
            results = self._tier.poll()
            ends.update(status for result in results for status in result.statuses)
            return len(results)

        seconds = keep_in_flight(batches, submit, ended, self._images.at_once(kind))
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
        os.close(self._fd)

    def _open(self) -> int:
        return _preallocated(self._path, self._images.nbytes, direct=self._direct)


class Fio:
    """fio; its own measurement of time counts, without its start."""

    name = f"fio, libaio, {THREADS} at once"

    def __init__(self, path: Path, images: Images, *, direct: bool) -> None:
        self._path = path
        self._images = images
        self._direct = direct
        os.close(_preallocated(path, images.nbytes, direct=direct))

    @staticmethod
    def is_installed() -> bool:
        return shutil.which("fio") is not None

    def move(self, kind: str) -> float:
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

    def close(self) -> None: ...


class PerFile:
    """A file for each image, created atomically; each thread takes the next image of a prompt."""

    name = f"a file for each image, {THREADS} threads"

    def __init__(self, directory: Path, images: Images, *, direct: bool) -> None:
        directory.mkdir()
        self._directory = directory
        self._images = images
        self._flags = os.O_DIRECT if direct else 0
        self._threads = ThreadPoolExecutor(THREADS)

    def move(self, kind: str) -> float:
        """Such stores never overwrite: for `overwrite`, files are removed first, which is not measured."""
        images, storing = self._images, not self._images.reads(kind)
        if storing:
            for path in self._directory.iterdir():
                path.unlink()
        move = self._store if storing else self._load
        batches = images.batches(kind) if images.at_once(kind) else [images.order(kind)]
        begun = time.perf_counter()
        try:
            for batch in batches:
                collections.deque(self._threads.map(move, batch), maxlen=0)
        except OSError as error:
            raise BenchError(f"a reference failed: {error}") from error
        return time.perf_counter() - begun

    def close(self) -> None:
        self._threads.shutdown()

    def _path(self, image: int) -> str:
        return f"{self._directory}/{image:08x}"

    def _store(self, image: int) -> None:
        path = self._path(image)
        temporary = f"{path}.tmp"
        self._move(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, os.writev, image)
        os.replace(temporary, path)  # noqa: PTH105 - the fastest call, because it is measured

    def _load(self, image: int) -> None:
        self._move(self._path(image), os.O_RDONLY, os.readv, image)

    def _move(self, path: str, flags: int, call: Callable[[int, list[memoryview]], int], image: int) -> None:
        fd = os.open(path, flags | self._flags, 0o600)
        try:
            moved = call(fd, [self._images.view(image)])
        finally:
            os.close(fd)
        if moved != self._images.image_bytes:
            raise BenchError(f"only {moved} bytes of {path} were moved")


def keep_in_flight(
    batches: Sequence[B], submit: Callable[[B], object], ended: Callable[[], int], at_once: int | None
) -> float:
    """Submit all `batches`, with at most `at_once` in flight (`None`: all); seconds until all have ended."""
    waiting = iter(batches)
    left = len(batches)
    begun = time.perf_counter()
    for batch in itertools.islice(waiting, at_once):
        submit(batch)
    while left:
        time.sleep(_LONG_NAP if at_once is None else _NAP)
        count = ended()
        left -= count
        for batch in itertools.islice(waiting, count):
            submit(batch)
    return time.perf_counter() - begun


def in_threads(work: Callable[[int], None], items: Sequence[int]) -> float:
    """Do `work` on all `items` with `THREADS` threads, each of which takes the next item; returns seconds."""
    turns = iter(items)

    def take_turns() -> None:
        for item in turns:
            work(item)

    with ThreadPoolExecutor(THREADS) as threads:
        begun = time.perf_counter()
        try:
            for ended in [threads.submit(take_turns) for _ in range(THREADS)]:
                ended.result()
        except OSError as error:
            raise BenchError(f"a reference failed: {error}") from error
        return time.perf_counter() - begun


def _preallocated(path: Path, nbytes: int, *, direct: bool) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd


_TIERING = "vllm.v1.kv_offload.tiering"


class VllmFiles:
    """A file for each image, by vLLM. Raises `BenchError` for a version of vLLM with another interface."""

    name = "vLLM's file tier"

    def __init__(self, directory: Path, images: Images) -> None:
        self._directory = directory
        self._images = images
        try:
            self._base: Any = importlib.import_module("vllm.v1.kv_offload.base")
            self._job: Any = importlib.import_module(f"{_TIERING}.base").TransferJob
            factory: Any = importlib.import_module(f"{_TIERING}.factory").SecondaryTierFactory
            memory = images.arena.view(0, images.nbytes).cast("B", (images.count, images.image_bytes))
            where = {"type": "fs", "root_dir": str(directory)}
            self._tier: Any = factory.create_secondary_tier(where, memory, _offloading_spec())
            self._keys = [self._base.make_offload_key(_hash(image), 0) for image in range(images.count)]
            self._request = self._base.ReqContext(req_id="bench")
        except (ImportError, AttributeError, TypeError) as error:
            raise BenchError(f"the file tier of the installed vLLM has another interface: {error}") from error
        self._numbers = itertools.count()

    def move(self, kind: str) -> float:
        loading = self._images.reads(kind)
        if not loading:
            for path in self._directory.rglob("*.bin"):
                path.unlink()
        submit = self._tier.submit_load if loading else self._tier.submit_store
        jobs = [self._make_job(batch, loading) for batch in self._images.batches(kind)]
        return keep_in_flight(jobs, submit, self._ended, self._images.at_once(kind))

    def close(self) -> None:
        self._tier.shutdown()

    def _make_job(self, batch: Sequence[int], loading: bool) -> Any:
        images = self._images
        places = np.array([images.offset(image) // images.image_bytes for image in batch])
        return self._job(next(self._numbers), [self._keys[at] for at in batch], places, loading, self._request)

    def _ended(self) -> int:
        results = list(self._tier.get_finished_jobs())
        if not all(result.success for result in results):
            raise BenchError("vLLM's file tier failed to move an image")
        return len(results)


def _hash(image: int) -> bytes:
    return xxhash.xxh3_128_digest(image.to_bytes(8, "little")) * 2


def _offloading_spec() -> SimpleNamespace:
    """The parts of an `OffloadingSpec` that vLLM's tier reads, to name its files."""
    parallel = {f"{dimension}_size": 1 for dimension in ("tp", "pp", "pcp", "dcp")}
    config = SimpleNamespace(
        model=SimpleNamespace(name="bench", dtype="bfloat16"),
        groups=(),
        cache=SimpleNamespace(tokens_per_hash=16),
        parallel=SimpleNamespace(rank=0, is_parallelism_agnostic=True, **parallel),
        canonical_layout=False,
        replicated_layout=False,
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1)


SIZES = ("256KiB", "2MiB")

COPIES = 3
"""Copies of the data on the disk at a time: of the tier, of plain threads and of fio."""

_PER_FILE = "vs-per-file-"
_OF_PER_FILE = {f"{_PER_FILE}write": "overwrite", **{f"{_PER_FILE}{kind}": kind for kind in ("read", SCATTERED, ALONE)}}
_IN_PLACE = frozenset({"overwrite", "read", SCATTERED})
_scratch = functools.partial(tempfile.TemporaryDirectory, prefix="longshore-bench-", ignore_cleanup_errors=True)
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

    `marks` receives the marks of the report (`check_direct`).
    """
    names = chosen(NAMES, only)
    least = min(2 * parse_size(name.split("/")[1]) for name in names)
    if total_bytes < least:
        raise BenchError(f"expected at least {least} bytes to move, two images, got {total_bytes}")
    for size in SIZES:
        kinds = [kind for kind in KINDS if f"{kind}/{size}" in names]
        if not kinds or 2 * parse_size(size) > total_bytes:
            continue
        with _scratch(dir=parent) as name, contextlib.ExitStack() as undo:
            directory = Path(name)
            images = Images(parse_size(size), total_bytes)
            undo.callback(images.arena.close)
            ours = FileTierSide(directory / "tier", images)
            undo.callback(ours.close)
            found = check_direct(parent, direct=ours.direct, allow_page_cache=allow_page_cache)
            if marks is not None:
                marks.update(found)
            for kind in kinds:
                with _scratch(dir=directory) as scratch:
                    yield _measure(f"{kind}/{size}", kind, ours, Path(scratch), images, repeats)


def _measure(name: str, kind: str, ours: FileTierSide, scratch: Path, images: Images, repeats: int) -> Case:
    if kind in _OF_PER_FILE:
        folder = scratch / "images"
        files = VllmFiles(folder, images) if is_installed("vllm") else PerFile(folder, images, direct=ours.direct)
        with contextlib.closing(files):
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


def _beside(name: str, kind: str, ours: FileTierSide, references: list[FileSide], images: Images, repeats: int) -> Case:
    """Our tier beside the best of `references`."""
    sides: list[FileSide] = [ours, *references]
    for side in reversed(sides):  # ours last, because the others may use its file
        if images.reads(kind) or kind == "mixed":  # there must be something to read
            side.move("overwrite")
    taken = medians([functools.partial(side.move, kind) for side in sides], repeats=repeats)
    best, seconds = min(zip(references, taken[1:], strict=True), key=lambda reference: reference[1])
    return rate(name, Seconds(taken[0], seconds), best.name, images.nbytes)


def _cpu(name: str, ours: FileTierSide, plain: PlainLoop, images: Images, repeats: int) -> Case:
    """Core-seconds of this process per GB, including the kernel and checksums; lower is better."""

    def used(side: FileSide) -> float:
        begun = time.process_time()
        side.move("overwrite")
        side.move("read")
        return time.process_time() - begun

    taken = medians([functools.partial(used, side) for side in (ours, plain)], repeats=repeats)
    value, reference = (seconds / (2 * images.nbytes / 1e9) for seconds in taken)
    return Case(name, value, "core-s/GB", plain.name, reference, reference / value)
