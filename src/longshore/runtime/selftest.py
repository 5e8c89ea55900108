"""Self-test: writes a block to every tier and reads it back, with the real layout, before the first request.

    self_test      through all tiers of a stack
    copy_test      into host memory and back, in a worker of an engine whose tiers are in another process

Detects errors of drivers, file systems and layouts that unit tests cannot find.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from longshore.boundary import DEVICE, FILE, HOST, Item, Key, Route, Section, Slot, Status, Transfer
from longshore.cache import GroupKeys
from longshore.errors import SelfTestError
from longshore.runtime.stack import Stack
from longshore.tiers.base import Tier
from longshore.transfer.engine import TransferEngine

_log = logging.getLogger(__name__)


class BlockAccess(Protocol):
    """The engine's device blocks as bytes."""

    def read(self, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
        """Bytes of `blocks`, shape `(len(blocks), block_bytes)`."""

    def write(self, blocks: Sequence[int], data: npt.NDArray[np.uint8]) -> None:
        """Write `data`, of the same shape, to `blocks`."""


def self_test(stack: Stack, device: BlockAccess, blocks: Sequence[int], *, files: bool = True) -> None:
    """Copy one chunk, the unused device `blocks`, through all tiers and back. Raises `SelfTestError`.

    The blocks' former bytes are restored, and the tiers are unchanged; metrics and events exclude the test. If every
    slab of the file tier has records, only copies to host memory are tested, so that no record is lost. With `files`
    false, for a new device under tiers in use, a chunk is copied to a slot of the host tier and back.
    """
    if files and stack.file is not None and not _has_empty_slab(stack, stack.file):
        _log.info("self-test skips the file tier, because every slab of it holds records; host tier tested")
        if stack.host is not None:
            slot, timeout = Slot(HOST, 0, 0), stack.config.load_timeout
            with stack.runtime.locked():  # nobody else takes the engine's results meanwhile
                copy_test(stack.transfer_engine, device, Section(0, 0, tuple(blocks)), slot, timeout)
        return
    key = stack.scope.self_test_key
    former = device.read(blocks)
    pattern = np.random.default_rng(7).integers(0, 256, former.shape, dtype=np.uint8)
    _clear(stack, key)  # the file tier may have found it again, from an earlier start
    try:
        device.write(blocks, pattern)
        _offload(stack, key, blocks)
        if stack.host is not None:
            _check(stack, device, key, blocks, pattern, HOST)
        if stack.file is not None and files:
            if not stack.runtime.flush(stack.config.write_timeout):
                raise SelfTestError(
                    f"the test block was not written to the file tier within {stack.config.write_timeout:.0f} seconds"
                )
            if stack.host is not None:
                _discard(stack, key, HOST)
            _check(stack, device, key, blocks, pattern, FILE)
    finally:
        device.write(blocks, former)
        _clear(stack, key)


def copy_test(engine: TransferEngine, device: BlockAccess, section: Section, slot: Slot, timeout: float = 60.0) -> None:
    """Copy one chunk of unused blocks to a free host slot and back. Raises `SelfTestError`.

    The blocks' former bytes are restored; the content of the slot is undefined.
    """
    blocks = section.blocks
    former = device.read(blocks)
    pattern = np.random.default_rng(7).integers(0, 256, former.shape, dtype=np.uint8)
    try:
        device.write(blocks, pattern)
        _copy(engine, Transfer(-1, Route(DEVICE, HOST), (Item(b"", None, None, slot),), (section,)), timeout)
        device.write(blocks, ~pattern)
        _copy(engine, Transfer(-2, Route(HOST, DEVICE), (Item(b"", None, slot, None),), (section,)), timeout)
        wrong = int((device.read(blocks) != pattern).sum())
        if wrong:
            raise SelfTestError(
                f"{wrong} of {pattern.size} bytes of the test block were wrong when read back from host memory"
            )
    finally:
        device.write(blocks, former)


def _has_empty_slab(stack: Stack, file: Tier) -> bool:
    """Whether a slab of the file tier holds no records, neither ours nor of other scopes."""
    with stack.runtime.locked() as cache:
        ours = sum(size.slabs for stats in cache.stats() if stats.name == FILE for size in stats.sizes)
    return ours + len({file.slabs.slab_of(slot) for slot in file.other_scope_slots()}) < file.slabs.slabs


def _copy(engine: TransferEngine, transfer: Transfer, timeout: float) -> None:
    engine.submit(transfer)
    if not engine.wait([transfer.job], timeout):
        raise SelfTestError(f"copying the test block {transfer.route} did not complete within {timeout:.0f} seconds")
    (result,) = engine.poll()
    if result.statuses != (Status.OK,):
        statuses = ", ".join(status.value for status in result.statuses)
        raise SelfTestError(f"copying the test block {transfer.route} failed: {statuses}")


def _clear(stack: Stack, key: Key) -> None:
    """Remove the test block from all tiers, after copies under way: a backup that reads it would keep it."""
    stack.runtime.wait_idle(stack.config.write_timeout)
    tiers = {HOST: stack.host, FILE: stack.file}
    for tier in [name for name, tier in tiers.items() if tier is not None]:
        with stack.runtime.batch() as cache:
            cache.discard([key], tier)


def _offload(stack: Stack, key: Key, blocks: Sequence[int]) -> None:
    stack.transfer_engine.begin_step(None)
    with stack.runtime.batch() as cache:
        job = cache.store({0: GroupKeys([key])}, {0: blocks}, before_eviction=True)[0].job
    if job is None:
        raise SelfTestError("the first tier did not accept the test block")
    if not stack.runtime.wait_jobs([job], stack.config.write_timeout):
        raise SelfTestError(
            f"the test block was not stored in the first tier within write_timeout ({stack.config.write_timeout:g} s)"
        )


def _discard(stack: Stack, key: Key, tier: str) -> None:
    with stack.runtime.batch() as cache:
        if cache.discard([key], tier) != 1:
            raise SelfTestError(f"the test block was stored, but is not in the {tier} tier")


def _check(
    stack: Stack,
    device: BlockAccess,
    key: Key,
    blocks: Sequence[int],
    pattern: npt.NDArray[np.uint8],
    tier: str,
) -> None:
    device.write(blocks, ~pattern)
    stack.transfer_engine.begin_step(None)
    with stack.runtime.batch() as cache:
        lease = cache.lookup({0: GroupKeys([key])}, stack.runtime.clock()).lease
        if lease is None:
            raise SelfTestError(f"the test block was stored, but is not in the {tier} tier")
        cache.load(lease, {0: blocks})
    try:
        outcome = stack.runtime.wait_load(lease).outcome
    finally:
        with stack.runtime.batch() as cache:
            cache.release(lease)
    if outcome is None or outcome.sources != (tier,):
        sources = "no tier" if outcome is None or not outcome.sources else outcome.sources
        raise SelfTestError(f"the test block was read back from {sources}, expected the {tier} tier")
    wrong = int((device.read(blocks) != pattern).sum())
    if wrong:
        raise SelfTestError(
            f"{wrong} of {pattern.size} bytes of the test block were wrong when read back from the {tier} tier"
        )
