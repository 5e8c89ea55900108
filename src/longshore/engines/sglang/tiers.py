"""The tiers behind one of SGLang's host pools.

    SGLang's host memory ◄──copies──► staging area in shared memory ◄──tier host──► files
                                      with stores: a host tier of `host_size` ◄──tier hosts──► files, stores

A model with sliding windows has a host pool for them beside that of the keys and values. Each pool has pages of its
own size and number, so each has a control plane, a staging area and a tier host of its own.

The pages are a layout (`HostPages`), by what `get_page_buffer_meta` says of each, verified. The memory stays SGLang's:

    piece 0 (K)   ├ page 0 ┼ page 1 ┼ page 2 ┼ ...      a reference of the layout, one stride apart
    piece 1 (V)   ├ page 0 ┼ page 1 ┼ page 2 ┼ ...
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from longshore.boundary import Key
from longshore.cache import CacheGroup, GroupKeys, Lease, Presence, Protection, WritePolicy
from longshore.config import Config
from longshore.engines.tensors import RowBlocks
from longshore.errors import EngineError, LongshoreError
from longshore.keys import Scope
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.runtime.error_handler import with_fallback
from longshore.runtime.loop import Runtime
from longshore.runtime.selftest import self_test
from longshore.runtime.stack import Stack, open_stack
from longshore.runtime.staging_mover import STAGING_BYTES, StagingSlots
from longshore.runtime.tier_host import HostedFileTier, HostedRemoteTier
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.transfer.device import CpuDevice

_log = logging.getLogger(__name__)

_LEAST_STAGING = 8  # pages


class HostPages:
    """The pages of one of SGLang's host pools.

    Attributes:
        layout: One group, with a block for each page.
        page_size: Tokens of a page.
        rows: Of each piece, a row of bytes for each page.
    """

    def __init__(self, pool: Any) -> None:
        """`pool` is a `HostKVCache`. Raises `EngineError` where its pages are not apart at equal strides."""
        self.page_size = int(pool.page_size)
        count = int(pool.page_num)
        if count < 2:
            raise EngineError(f"expected a host pool of two pages or more, got {count}: set --hicache-size")
        some = sorted({0, 1, count // 2, count - 1})
        pieces = [_pieces(pool, page, self.page_size) for page in some]
        first, second = pieces[0], pieces[1]
        strides = [b[0] - a[0] for a, b in zip(first, second, strict=True)]
        expected = [[(at + page * by, size) for (at, size), by in zip(first, strides, strict=True)] for page in some]
        if pieces != expected or any(by < size for (_, size), by in zip(first, strides, strict=True)):
            raise EngineError(
                f"pages of host memory in layout {pool.layout!r} are not equally far apart: choose another "
                "--hicache-mem-layout, such as page_first_direct"
            )
        self.rows = [_rows(at, count, by, size) for (at, size), by in zip(first, strides, strict=True)]
        inner = f"{pool.layout}, {pool.dtype}, piece {{}} of {len(first)}"
        refs = tuple(
            PageRef(number, 0, by, size, None, 0, inner.format(number))
            for number, ((_, size), by) in enumerate(zip(first, strides, strict=True))
        )
        self.layout = KVLayout([KVGroup("pages", self.page_size, 1, refs)], self.rows, count)

    def pages(self, indices: torch.Tensor, count: int) -> list[int]:
        """The pages that `indices`, the int64 positions of all tokens of `count` pages, name.

        Raises `EngineError` unless they are whole pages of the pool.
        """
        size = self.page_size
        if not isinstance(indices, torch.Tensor):
            raise EngineError(f"expected the positions of {count} pages of {size} tokens, got {indices!r:.200}")
        whole = indices.detach().cpu().numpy().reshape(-1)
        if len(whole) != count * size:
            raise EngineError(f"expected the positions of {count} pages of {size} tokens, got {len(whole)}")
        table = whole.reshape(count, size)
        pages = table[:, 0] // size
        if (table != pages[:, None] * size + np.arange(size)).any() or (pages >= self.layout.num_blocks).any():
            raise EngineError(f"expected positions of whole pages of {size} tokens, got {whole[:8].tolist()} ...")
        found: list[int] = pages.tolist()
        return found


def _pieces(pool: Any, page: int, size: int) -> list[tuple[int, int]]:
    """Address and bytes of each piece of a page."""
    indices = torch.arange(page * size, (page + 1) * size)
    try:
        addresses, sizes = pool.get_page_buffer_meta(indices)
    except (AttributeError, NotImplementedError, ValueError) as error:
        raise EngineError(f"host memory in layout {pool.layout!r} does not say where its pages are: {error}") from error
    return [(int(at), int(size)) for at, size in zip(addresses, sizes, strict=True)]


def _rows(address: int, count: int, stride: int, width: int) -> torch.Tensor:
    """A view of memory: uint8, shape `(count, width)`, rows `stride` bytes apart."""
    memory = (ctypes.c_uint8 * ((count - 1) * stride + width)).from_address(address)
    return torch.as_strided(torch.frombuffer(memory, dtype=torch.uint8), (count, width), (stride, 1))


class PoolTiers:
    """The tiers behind one host pool, and what calls that block need of them.

    Attributes:
        pages: The pages of the pool.
        stack: The tiers.
        staging: What images pass through; `None` with stores.
        settings: Those of the tiers.
        no_wait_until: Time until which no call waits for room in the staging area.
    """

    def __init__(self, pages: HostPages, config: Config, scope: Scope, undo: contextlib.ExitStack) -> None:
        """Open the tiers; `undo` closes them. Stores need slots of a host tier: there is no staging with them.

        Raises `LongshoreError`.
        """
        self.pages, self.settings = pages, config
        self.no_wait_until = 0.0
        self.staging: StagingSlots | None = None
        layout = pages.layout
        if config.remote:
            policies = {"backup": config.offload, "offload": WritePolicy.THROUGH}
            config = config.model_copy(update={"host_shared": True, **policies})
        else:
            images = max(STAGING_BYTES // layout.image_bytes, _LEAST_STAGING)
            memory = Arena(images * layout.image_bytes, ArenaSettings(numa_node=None, shared=True))
            undo.callback(memory.close)
            self.staging = StagingSlots(memory, layout.image_bytes)
        self.stack: Stack = open_stack(
            config,
            layout,
            scope,
            CpuDevice(),
            open_file_tier=functools.partial(HostedFileTier, fixed_weights=True),
            open_gds_tier=_open_behind_ring,
            open_store=_open_store,
            groups=[CacheGroup(block_size=pages.page_size)],
            staging=self.staging,
        )
        undo.callback(self.stack.close)
        self.runtime: Runtime = self.stack.runtime
        self._runtime = self.runtime
        _log.info("KV cache layout: %s, scope %s", layout, scope.digest.hex()[:12])

    def test(self, pool: Any) -> None:
        """Write a page that SGLang does not use into a file, and read it. Raises `SelfTestError`."""
        indices = pool.alloc(self.pages.page_size)
        if indices is None:
            _log.info("self-test skipped, because host memory has no free page")
            return
        try:
            self_test(self.stack, RowBlocks(*self.pages.rows), self.pages.pages(indices, 1))
        finally:
            pool.free(indices)

    def is_stuck(self) -> bool:
        """Whether a call has waited in vain, and staging has no room yet: else each would, while a disk hangs."""
        return self.staging is not None and not self.staging.free and self.runtime.clock() < self.no_wait_until

    def let_go(self, jobs: Sequence[int]) -> None:
        """Wait until no copy touches the pages of `jobs`: jobs have deadlines, and a copy that has begun is short."""
        mover, timeout, begun = self.stack.staging_mover, self.settings.write_timeout, self.runtime.clock()
        touches = self.runtime.in_flight if mover is None else mover.touches_blocks
        while not self.runtime.wait_for_blocks(jobs, touches, timeout):
            _log.error(
                "copies of jobs %s have not ended after %.0f s; the call waits on, because SGLang uses their pages "
                "again when it returns. If this repeats, restart the server",
                list(jobs),
                self.runtime.clock() - begun,
            )

    @contextlib.contextmanager
    def bounded(self, timeout: float) -> Iterator[list[int]]:
        """A call of at most `timeout` seconds: its jobs, to be filled in. Afterwards no copy touches their pages."""
        jobs, deadline = list[int](), self.runtime.clock() + timeout
        try:
            yield jobs
        finally:
            self.let_go(jobs)
            if self.runtime.clock() >= deadline:
                self.no_wait_until = deadline + timeout

    # ------------------------------------------------------------------ independent pages, each a path of its own

    @with_fallback(lambda self, names: [False] * len(names), expected=(LongshoreError,))
    def present(self, names: Sequence[str]) -> list[bool]:
        """Whether each page of these keys of SGLang's is stored, whatever is before it."""
        if self.is_stuck():
            return [False] * len(names)
        with self.runtime.batch() as cache:
            asked = {0: GroupKeys(digests(names))}
            here = cache.lookup(asked, self.runtime.clock(), protect=Protection.NONE, independent=True).residency[0]
        return [each in (Presence.HOST, Presence.COLDER) for each in here.presences]

    @with_fallback(lambda self, names, indices: 0, expected=(LongshoreError,))
    def load(self, names: Sequence[str], indices: torch.Tensor) -> int:
        """Fill the pages at `indices`; how many, from the first one on, have arrived within `load_timeout`."""
        pages, runtime, timeout = self.pages.pages(indices, len(names)), self.runtime, self.settings.load_timeout
        if self.is_stuck():
            return 0
        leases, request_number, done = list[Lease](), None, 0
        with self.bounded(timeout) as jobs:
            try:
                with runtime.batch() as cache:
                    for key, page in zip(digests(names), pages, strict=True):
                        found = cache.lookup(
                            {0: GroupKeys([key])}, runtime.clock(), remote_tiers=(), request_number=request_number
                        )
                        request_number = found.request_number
                        if found.lease is None:
                            break
                        leases.append(found.lease)
                        scheduled = cache.load(found.lease, {0: [page]}, timeout=timeout)
                        jobs += [part.job for part in scheduled.jobs]
                for lease in leases:
                    outcome = runtime.wait_load(lease).outcome
                    if outcome is None or not outcome.num_chunks:
                        break
                    done += 1
            finally:
                with contextlib.suppress(LongshoreError), runtime.batch() as cache:
                    for lease in leases:
                        cache.release(lease)
        return done

    @with_fallback(lambda self, names, indices: [False] * len(names), expected=(LongshoreError,))
    def store(self, names: Sequence[str], indices: torch.Tensor) -> list[bool]:
        """Store the pages at `indices`; whether each was taken, or is stored."""
        pages = self.pages.pages(indices, len(names))
        if self.is_stuck():
            return [False] * len(names)
        with self.bounded(self.settings.write_timeout) as jobs:
            return [
                bool(self.stack.store_path(GroupKeys([key]), [page], lambda job, blocks: jobs.append(job)))
                for key, page in zip(digests(names), pages, strict=True)
            ]


def digests(keys: Sequence[str]) -> list[Key]:
    """SGLang's keys, hexadecimal, as bytes. Raises `EngineError` for others."""
    try:
        return [bytes.fromhex(key) for key in keys]
    except (TypeError, ValueError) as error:
        raise EngineError(f"expected keys of pages in hexadecimal, got {keys!r:.200}: {error}") from error


def _open_behind_ring(directory: Any, *, memory: Arena, **named: Any) -> HostedFileTier:
    return HostedFileTier(directory, arena=memory, fixed_weights=True, **named)


def _open_store(url: str, name: str, *, scope: bytes, **named: Any) -> HostedRemoteTier:
    return HostedRemoteTier(url, name=name, namespace=scope, fixed_weights=True, **named)
