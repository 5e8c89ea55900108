"""vLLM's own file tier, driven as its tiering manager drives it: a job for each prompt, results asked for.

What is called is `vllm.v1.kv_offload.tiering`: the tier that its factory makes of `{"type": "fs"}`, with its own names
of files, pool of threads and direct I/O.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from longshore.bench.file_sides import Images, keep_under_way
from longshore.errors import BenchError

_TIERING = "vllm.v1.kv_offload.tiering"


class VllmFiles:
    """A file for each image, in `directory`. Raises `BenchError` if this vLLM is not one that is known here."""

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
            self._tier: Any = factory.create_secondary_tier(where, memory, _what_it_is_told())
            self._keys = [self._base.make_offload_key(_hash(image), 0) for image in range(images.count)]
            self._request = self._base.ReqContext(req_id="bench")
        except (ImportError, AttributeError, TypeError) as error:
            raise BenchError(f"vLLM is installed, but not a version whose file tier is known here: {error}") from error
        self._numbers = itertools.count()

    def move(self, kind: str) -> float:
        """`overwrite` removes what is there first, which takes no time here: such stores never overwrite."""
        loading = self._images.reads(kind)
        if not loading:
            for path in self._directory.rglob("*.bin"):
                path.unlink()
        submit = self._tier.submit_load if loading else self._tier.submit_store
        jobs = [self._make_job(batch, loading) for batch in self._images.batches(kind)]
        return keep_under_way(jobs, submit, self._ended, self._images.at_once(kind))

    def close(self) -> None:
        """End its threads."""
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


def _what_it_is_told() -> SimpleNamespace:
    """What of an `OffloadingSpec` the tier looks at, for the names of its files."""
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
