"""The storage back end over a real host pool of SGLang's, without a server: called as SGLang's threads call it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang_on_cpu
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, HiCacheStorageExtraInfo, PoolName
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from longshore.engines.sglang import identity, storage
from longshore.engines.sglang.flags import server_flags
from longshore.engines.sglang.storage import LongshoreStorage

PAGE = 16
LAYERS, HEADS, WIDTH = 3, 2, 32
sglang_on_cpu.register()


def make_pool(layout: str = "page_first_direct", pages: int = 64) -> Any:
    """A host pool in this layout; of the latent of MLA, in one piece a page, for a layout that ends in `mla`."""
    sizes = {"host_token_capacity": pages * PAGE, "device_capacity_tokens": 4 * PAGE}
    layers = {"start_layer": 0, "end_layer": LAYERS}
    name, _, latent = layout.partition(" ")
    if latent:
        mla = MLATokenToKVPool(4 * PAGE, PAGE, torch.bfloat16, 64, WIDTH, LAYERS, "cpu", False)
        info = mla.get_device_pool_infos()[0].buffer_info
        return MLATokenToKVPoolHost(info, 2.0, 0, PAGE, name, False, target_layer_num=LAYERS, **sizes, **layers)
    mha = MHATokenToKVPool(4 * PAGE, PAGE, torch.bfloat16, HEADS, WIDTH, LAYERS, "cpu", False)
    info = mha.get_device_pool_infos()[0].buffer_info
    return MHATokenToKVPoolHost(info, 2.0, 0, PAGE, name, pin_memory=False, **sizes, **layers)


def names(count: int, seed: int = 0) -> list[str]:
    """Keys as SGLang makes them: SHA-256 of each page, chained, hexadecimal."""
    keys, before = [], b""
    for page in range(count):
        before = hashlib.sha256(before + bytes([seed, page % 256])).digest()
        keys.append(before.hex())
    return keys


def indices(pages: Sequence[int]) -> torch.Tensor:
    """Positions of all tokens of `pages`."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


@contextmanager
def look_up(last: str | None) -> Iterator[None]:
    """As during SGLang's look-up of pages behind the page with this key, or from the first page on."""
    with storage._look_up(None, SimpleNamespace(last_hash=last)):
        yield


def eventually(call: Callable[[], object], expected: object) -> None:
    """Call until it says what is expected, for a minute at most: a busy machine exceeds any short timeout of a rig."""
    deadline = time.monotonic() + 60
    while (got := call()) != expected:
        assert time.monotonic() < deadline, f"expected {expected}, got {got}"
        time.sleep(0.05)


class Rig:
    """A back end of one rank, and its host pool.

    Attributes:
        pool: SGLang's.
        windows: SGLang's host pool of sliding windows, with as many pages as are asked for.
        storage: Ours.
    """

    def __init__(
        self,
        model: Path,
        directory: Path,
        *,
        layout: str = "page_first_direct",
        rank: int = 0,
        ranks: int = 1,
        size: str | None = "16MiB",
        told: dict[str, Any] | None = None,
        metrics: bool = False,
        windows: int = 0,
        beside: Mapping[PoolName, int] | None = None,
        **settings: object,
    ) -> None:
        ours = {"file_path": str(directory), "file_size": size, **settings}
        ours = {key: value for key, value in ours.items() if value is not None}
        extra = json.loads(server_flags(ours, {})[-1])
        arguments = ServerArgs(
            model_path=str(model),
            device="cpu",
            attention_backend="torch_native",
            hicache_storage_backend="dynamic",
            hicache_storage_backend_extra_config=json.dumps(extra),
            **(told or {}),
        )
        get_context().set_server_args(arguments)
        passed = {key: value for key, value in extra.items() if key != "hicache_storage_pass_prefix_keys"}
        config = HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=ranks,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=layout.endswith("mla"),
            enable_storage_metrics=metrics,
            is_page_first_layout=False,
            model_name=str(model),
            extra_config=passed,
        )
        began = time.time_ns() + 10**9
        identity.process_began = lambda: began  # type: ignore[attr-defined]  # as if it had, after the last change
        self.pool = make_pool(layout)
        self.storage = LongshoreStorage(config, {})
        self.storage.register_mem_pool_host(self.pool)
        self.storage.register_mem_host_pool_v2(self.pool, PoolName.KV)
        beside = {**({PoolName.SWA: windows} if windows else {}), **(beside or {})}
        others = {name: make_pool(pages=pages) for name, pages in beside.items()}
        self.windows = others.get(PoolName.SWA)
        for name, pool in others.items():
            self.storage.register_mem_host_pool_v2(pool, name)
        self.storage.on_host_pools_registered()

    @property
    def host_pid(self) -> int:
        """The process of its tier host."""
        process = self.storage._kv.stack.file._supervisor.process  # type: ignore[union-attr]
        return int(process.pid)

    def fill(self, pages: Sequence[int], seed: int, pool: Any = None) -> torch.Tensor:
        """Write bytes into pages, by default of `self.pool`; returns what they have then."""
        torch.manual_seed(seed)
        pool = pool or self.pool
        for page in pages:
            flat = pool.get_data_page(page * PAGE, flat=True)
            pool.set_from_flat_data_page(page * PAGE, torch.randn(flat.shape).to(flat.dtype))
        return self.read(pages, pool)

    def read(self, pages: Sequence[int], pool: Any = None) -> torch.Tensor:
        """Bytes of pages, as SGLang sees them."""
        return torch.stack([(pool or self.pool).get_data_page(page * PAGE, flat=True).clone() for page in pages])

    def set(self, keys: Sequence[str], pages: Sequence[int], before: Sequence[str] | None = ()) -> list[bool]:
        told = HiCacheStorageExtraInfo(prefix_keys=None if before is None else list(before))
        return self.storage.batch_set_v1(list(keys), indices(pages), told)

    def get(self, keys: Sequence[str], pages: Sequence[int], before: Sequence[str] | None = None) -> list[bool]:
        told = HiCacheStorageExtraInfo(prefix_keys=None if before is None else list(before))
        return self.storage.batch_get_v1(list(keys), indices(pages), told)

    def exists(self, keys: Sequence[str]) -> int:
        return self.storage.batch_exists(list(keys), HiCacheStorageExtraInfo())

    def store(self, keys: Sequence[str], pages: Sequence[int], seed: int = 1) -> torch.Tensor:
        """Store new bytes, and wait until they are in files."""
        held = self.fill(pages, seed)
        assert self.set(keys, pages) == [True] * len(keys)
        assert self.storage.flush(30)
        return held

    def segment(self) -> Path:
        """The file of its images."""
        return Path(self.storage.settings.file_path or "") / "segment"

    def close(self) -> None:
        self.storage.close()
