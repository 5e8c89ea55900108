"""The file tier by GPUDirect Storage: the same contract, whatever cuFile does, and the same bytes on disk."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cufile_stand_in import HostAsDevice, StandInCuFile, cuFileError, library_of

from longshore.boundary import Status
from longshore.checksums import MIX64, XXH3_64
from longshore.errors import DeviceError, TierError
from longshore.testing import TierHarness, TierTests, flip_image_bit
from longshore.tiers.arena import DISK_PAGE, Arena
from longshore.tiers.base import Op
from longshore.tiers.file import FileTier, GdsFileTier, capacity_for
from longshore.tiers.file import gds as gds_module
from longshore.tiers.file.format import parse_header
from longshore.tiers.file.gds import DESCRIPTOR, OPAQUE_FD, CuFile
from longshore.tiers.file.tier import MAX_FAILURES, TierState

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots
SCOPE = bytes(range(32))


def gds(arena: Arena, directory: Path, library: object, **changes: Any) -> GdsFileTier:
    settings = {"capacity": capacity_for(SLOTS, IMAGE), "image_bytes": IMAGE, "scope": SCOPE, **changes}
    return GdsFileTier(directory, memory=HostAsDevice(arena), library=library, **settings)


class TestGdsTier(TierTests):
    """All of the contract, by cuFile."""

    persistent = True

    @pytest.fixture(autouse=True)
    def library(self) -> Iterator[StandInCuFile]:
        self.cufile = StandInCuFile()
        yield self.cufile
        assert self.cufile.is_clean, self.cufile.breaches

    def open_tier(self, arena: Arena, directory: Path) -> GdsFileTier:
        return gds(arena, directory, self.cufile)


class TestGdsTierThatFails(TierTests):
    """All of the contract, where cuFile refuses every other image."""

    persistent = True

    @pytest.fixture(autouse=True)
    def library(self) -> Iterator[StandInCuFile]:
        self.cufile = StandInCuFile()
        yield self.cufile
        self.cufile.fault = lambda name: None
        assert self.cufile.is_clean, self.cufile.breaches

    def open_tier(self, arena: Arena, directory: Path) -> GdsFileTier:
        tier = gds(arena, directory, self.cufile)
        self.cufile.fault = self._every_other
        return tier

    def _every_other(self, name: str) -> int | None:
        if name in ("read", "write") and self.cufile.calls[name] % 2:
            raise cuFileError("every other one")
        return None


@pytest.fixture
def library() -> StandInCuFile:
    return StandInCuFile()


@pytest.fixture
def open_gds(arena: Arena, directory: Path, library: StandInCuFile) -> Iterator[Callable[..., TierHarness]]:
    made: list[TierHarness] = []

    def make(library: object = library, **changes: Any) -> TierHarness:
        made.append(TierHarness(lambda: gds(arena, directory, library, **changes), arena))
        return made[-1]

    yield make
    for harness in made:
        harness.tier.close()


def fallbacks(harness: TierHarness) -> dict[str, int]:
    assert isinstance(harness.tier, GdsFileTier)
    return {reason: count for reason, count in harness.tier.fallbacks.items() if count}


def header_of(directory: Path, slot: int) -> Any:
    page = (directory / "segment").read_bytes()[slot * (DISK_PAGE + IMAGE) :][:DISK_PAGE]
    return parse_header(page)


def test_images_go_by_cufile_and_by_nothing_else(open_gds: Callable[..., TierHarness], library: StandInCuFile) -> None:
    harness = open_gds()
    for slot in range(SLOTS):
        harness.store(slot, slot)
    for slot in range(SLOTS):
        harness.assert_serves(slot, slot)
    assert (library.calls["write"], library.calls["read"]) == (SLOTS, SLOTS + 1)  # one for the probe
    assert fallbacks(harness) == {}


def test_cufile_is_called_only_on_the_threads_device(
    open_gds: Callable[..., TierHarness], library: StandInCuFile
) -> None:
    library.wants_context = True
    harness = open_gds()
    for slot in range(SLOTS):
        harness.store(slot, slot)
        harness.assert_serves(slot, slot)
    assert not library.breaches
    assert fallbacks(harness) == {}


@pytest.mark.parametrize("name", ["read", "write"])
def test_strict_mode_moves_nothing_by_way_of_the_host(
    open_gds: Callable[..., TierHarness], library: StandInCuFile, name: str
) -> None:
    harness = open_gds(strict=True)
    harness.store(0, 0)
    harness.assert_serves(0, 0)
    assert fallbacks(harness) == {}
    fired: list[str] = []

    def fault(called: str) -> int | None:
        if called == name:
            fired.append(called)
            raise cuFileError("the nvme went away")
        return None

    library.fault = fault
    status = harness.run(harness.op(Op.WRITE, 1, 1)) if name == "write" else harness.load(0, 0)[0]
    assert status in (Status.DEVICE_ERROR, (Status.DEVICE_ERROR,))
    assert fired == [name]
    assert fallbacks(harness) == {f"gds_{name}": 1}


def test_strict_mode_refuses_a_tier_without_cufile(open_gds: Callable[..., TierHarness]) -> None:
    library = library_of(read=None)
    with pytest.raises(TierError, match=r"strict mode.*no_gds.*cuFile has no function read"):
        open_gds(library, strict=True)
    assert library.is_clean


@pytest.mark.parametrize("name", ["read", "write"])
@pytest.mark.parametrize("how", ["raises", "short"])
def test_transfers_that_cufile_refuses_use_the_host_counted(
    open_gds: Callable[..., TierHarness], library: StandInCuFile, name: str, how: str
) -> None:
    harness = open_gds()
    if name == "read":
        harness.store(0, 0)
    fired: list[str] = []

    def fault(called: str) -> int | None:
        if called != name:
            return None
        fired.append(called)
        if how == "raises":
            raise cuFileError("the nvme went away")
        return DISK_PAGE

    library.fault = fault
    if name == "write":
        harness.store(0, 0)
        library.fault = lambda called: None
    harness.assert_serves(0, 0)
    assert fired == [name]
    assert fallbacks(harness) == {f"gds_{name}": 1}
    harness.store(1, 1)  # the next image is tried again
    library.fault = lambda called: None
    harness.assert_serves(1, 1)


def test_device_failure_is_no_io_error_and_quarantines_no_record(
    open_gds: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness = open_gds(library=None)
    assert isinstance(harness.tier, GdsFileTier)
    harness.store(0, 0)

    def fail(memory: HostAsDevice, offset: int, host: memoryview) -> None:
        raise DeviceError("the device is gone")

    caplog.clear()
    with monkeypatch.context() as patched:
        patched.setattr(HostAsDevice, "load", fail)
        patched.setattr(HostAsDevice, "store", fail)
        assert {harness.run(harness.op(Op.WRITE, 1, 1)) for _ in range(MAX_FAILURES)} == {(Status.DEVICE_ERROR,)}
        assert harness.tier._health.state is TierState.READ_ONLY
        assert {harness.load(0, 0)[0] for _ in range(MAX_FAILURES)} == {Status.DEVICE_ERROR}
        assert harness.tier._health.state is TierState.OFF
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2, "said once for each kind"
    assert caplog.text.count("check the device") == 2
    failures = harness.tier.failures
    assert (failures["write_device_error"], failures["read_device_error"]) == (MAX_FAILURES, MAX_FAILURES)
    assert (failures["write_io_error"], failures["read_io_error"]) == (0, 0)
    harness.reopen()
    harness.assert_serves(0, 0)
    assert [chunk.slot for chunk in harness.tier.recover()] == [0]


def test_internal_errors_beside_the_device_disable_nothing(
    open_gds: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    harness, fired = open_gds(library=None), []
    assert isinstance(harness.tier, GdsFileTier)
    harness.store(0, 0)

    def fail(memory: HostAsDevice, offset: int, host: memoryview) -> None:
        fired.append(offset)
        raise TypeError("an error of ours")

    with monkeypatch.context() as patched:
        patched.setattr(HostAsDevice, "load", fail)
        patched.setattr(HostAsDevice, "store", fail)
        assert {harness.run(harness.op(Op.WRITE, 1, 1)) for _ in range(2 * MAX_FAILURES)} == {(Status.INTERNAL_ERROR,)}
        assert {harness.load(0, 0)[0] for _ in range(2 * MAX_FAILURES)} == {Status.INTERNAL_ERROR}
    assert len(fired) == 4 * MAX_FAILURES
    assert harness.tier._health.state is TierState.ON
    assert "TypeError: an error of ours" in caplog.text
    harness.assert_serves(0, 0)


def test_images_are_with_the_device_several_at_once(
    open_gds: Callable[..., TierHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is busy keeps each of them waiting, and none should wait for another."""
    harness = open_gds(threads=4)
    together = threading.Barrier(4)
    mix64 = HostAsDevice.mix64

    def busy(memory: HostAsDevice, offset: int, length: int) -> int:
        together.wait(60)
        return mix64(memory, offset, length)

    monkeypatch.setattr(HostAsDevice, "mix64", busy)
    for op in (Op.WRITE, Op.READ):
        batch = [harness.op(op, slot, slot, place=slot) for slot in range(4)]
        assert harness.run(*batch) == (Status.OK,) * 4
    assert fallbacks(harness) == {}


@pytest.mark.parametrize("missing", ["driver_open", "handle_register", "buf_register", "read"])
@pytest.mark.parametrize("how", ["missing", "raises"])
def test_without_working_cufile_everything_uses_the_host(
    open_gds: Callable[..., TierHarness],
    missing: str,
    how: str,
    directory: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: object) -> None:
        raise cuFileError("not supported here")

    library = library_of(**{missing: None if how == "missing" else refuse})
    harness = open_gds(library)
    assert "GPUDirect Storage is not available" in caplog.text
    harness.store(0, 0)
    harness.assert_serves(0, 0)
    assert fallbacks(harness) == {"no_gds": 1}
    assert library.is_clean
    assert header_of(directory, 0).algorithm == XXH3_64


def test_the_bindings_have_what_is_used_here() -> None:
    """Functions by their names, and the structure that describes a file; the library itself need not be there."""
    real: Any = gds_module.load_cufile()
    for name in (
        "driver_open",
        "driver_close",
        "handle_register",
        "handle_deregister",
        "buf_register",
        "buf_deregister",
    ):
        assert callable(getattr(real, name))
        assert callable(getattr(StandInCuFile, name))
    for name in ("read", "write"):
        assert f"{name}(intptr_t fh, intptr_t buf_ptr_base, size_t size, off_t file_offset, off_t buf_ptr_offset)" in (
            getattr(real, name).__doc__
        )
    described = real.Descr()
    described.type = real.FileHandleType.OPAQUE_FD
    described.handle.fd = 77
    assert ctypes.string_at(described.ptr, DESCRIPTOR.size) == DESCRIPTOR.pack(OPAQUE_FD, 77, 0)
    assert real.descr_dtype.itemsize == DESCRIPTOR.size


def test_real_bindings_work_with_and_without_the_library(
    open_gds: Callable[..., TierHarness],
) -> None:
    harness = open_gds(None)
    harness.store(0, 0)
    harness.assert_serves(0, 0)


def test_without_the_package_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(gds_module.importlib, "import_module", missing)
    with pytest.raises(DeviceError, match="expected the package cuda-bindings"):
        gds_module.load_cufile()


def test_registrations_are_undone_when_the_next_step_fails() -> None:
    library = library_of(buf_register=None)
    with pytest.raises(DeviceError, match="buf_register"):
        CuFile(library, 0, 1 << 20, DISK_PAGE)
    assert library.is_clean
    assert library.calls["handle_deregister"] == library.calls["driver_close"] == 1


def test_record_is_the_same_on_disk_whichever_way(
    open_gds: Callable[..., TierHarness], library: StandInCuFile, directory: Path
) -> None:
    harness = open_gds()
    harness.store(0, 0)
    straight = header_of(directory, 0)

    def refuse(name: str) -> int | None:
        raise cuFileError(name)

    library.fault = refuse
    harness.store(0, 0)
    library.fault = lambda name: None
    by_way_of_the_host = header_of(directory, 0)
    assert straight.algorithm == by_way_of_the_host.algorithm == MIX64
    assert straight.payload_checksum == by_way_of_the_host.payload_checksum
    assert fallbacks(harness) == {"gds_write": 1}


def test_records_of_either_mode_are_served_in_the_other(
    open_gds: Callable[..., TierHarness], opener: Callable[..., FileTier], arena: Arena, directory: Path
) -> None:
    harness = open_gds()
    harness.store(0, 0)
    harness.tier.close()
    posix = TierHarness(opener, arena)
    posix.assert_serves(0, 0)
    posix.store(1, 1)
    posix.tier.close()
    assert [header_of(directory, slot).algorithm for slot in (0, 1)] == [MIX64, XXH3_64]
    harness.tier = gds(arena, directory, StandInCuFile())
    harness.assert_serves(0, 0)
    harness.assert_serves(1, 1)
    assert fallbacks(harness) == {"host_checksum": 1}


@pytest.mark.parametrize("written_by", ["gds", "posix"])
def test_rot_is_found_on_the_device(
    open_gds: Callable[..., TierHarness],
    opener: Callable[..., FileTier],
    arena: Arena,
    directory: Path,
    written_by: str,
) -> None:
    if written_by == "posix":
        posix = TierHarness(opener, arena)
        posix.store(2, 0)
        posix.tier.close()
    harness = open_gds()
    if written_by == "gds":
        harness.store(2, 0)
    harness.assert_serves(2, 0)
    flip_image_bit(directory, 2, 8 * IMAGE - 3)
    assert harness.load(2, 0)[0] is Status.CORRUPT


def test_an_image_within_pages_goes_by_way_of_the_host(open_gds: Callable[..., TierHarness]) -> None:
    harness = open_gds()
    harness.store(0, 0, length=IMAGE - 8)
    harness.assert_serves(0, 0, length=IMAGE - 8)
    harness.store(1, 1, offset=harness.offset(1) + 512)
    assert fallbacks(harness) == {"unaligned": 3}


def test_image_that_changes_while_written_is_not_served(
    open_gds: Callable[..., TierHarness], library: StandInCuFile, arena: Arena
) -> None:
    """Whoever lets others touch the memory before the result has come is found out."""
    harness = open_gds()
    write = harness.op(Op.WRITE, 0, 0)
    changed: list[str] = []

    def change(name: str) -> int | None:
        if name == "write":
            arena.array[write.offset] ^= 1
            changed.append(name)
        return None

    library.fault = change
    assert harness.run(write) == (Status.OK,)
    assert changed == ["write"]
    assert harness.load(0, 0)[0] is Status.CORRUPT


def test_a_segment_that_ends_early_is_short(open_gds: Callable[..., TierHarness], directory: Path) -> None:
    harness = open_gds()
    harness.store(SLOTS - 1, 0)
    with (directory / "segment").open("r+b") as file:
        file.truncate((SLOTS - 1) * (DISK_PAGE + IMAGE) + 2 * DISK_PAGE)
    assert harness.load(SLOTS - 1, 0)[0] is Status.SHORT


def test_an_arena_that_was_closed_is_noticed(arena: Arena, directory: Path, library: StandInCuFile) -> None:
    tier = gds(arena, directory, library)
    harness = TierHarness(lambda: tier, arena)
    op = harness.op(Op.WRITE, 0, 0)
    arena.close()
    with pytest.raises(Exception, match="closed"):
        tier.submit([op], math.inf)
    tier.close()
