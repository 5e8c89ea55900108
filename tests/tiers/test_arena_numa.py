"""Memory comes from the node that the device hangs on; where it does not, that is counted."""

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Callable
from pathlib import Path

import pytest

from longshore.tiers.arena import DISK_PAGE, Arena, ArenaReport, ArenaSettings, Fallback
from longshore.tiers.arena.memory import System, madvise, node_of_device

DEVICE = "0000:3b:00.0"
MIB = 1 << 20
MPOL_PREFERRED = 1


def sysfs(root: Path, device: str = DEVICE, node: str | None = "1\n") -> Path:
    """A sysfs in `root` with one device, on `node`."""
    directory = root / "bus/pci/devices" / device
    directory.mkdir(parents=True)
    if node is not None:
        (directory / "numa_node").write_text(node)
    return root


class Calls:
    """A system with nodes: records what is bound, and says of every page that it is on `where(index)`."""

    def __init__(
        self, where: Callable[[int], int] = lambda index: 1, *, refused: int = 0, silent: bool = False
    ) -> None:
        self.log: list[object] = []
        self._where = where
        self._refused = refused
        self._silent = silent

    def syscall(self, number: int, *arguments: object) -> int:
        values = [getattr(argument, "value", argument) for argument in arguments]
        if number == {"x86_64": 237, "aarch64": 235}[platform.machine()]:
            address, nbytes, mode, mask, bits, flags = values
            self.log.append(("bind", address, nbytes, mode, list(mask), bits, flags))  # type: ignore[call-overload]
            if self._refused:
                raise OSError(self._refused, "refused")
            return 0
        assert number == {"x86_64": 279, "aarch64": 239}[platform.machine()]
        _, count, addresses, nodes, status, _ = values
        if self._silent:
            raise OSError(errno.EPERM, "Operation not permitted")
        assert nodes is None  # it looks, and moves nothing
        assert isinstance(count, int)
        self.log.append(("look", list((ctypes.c_uint64 * count).from_address(addresses))))  # type: ignore[arg-type]
        (ctypes.c_int32 * count).from_address(status)[:] = [self._where(i) for i in range(count)]  # type: ignore[arg-type]
        return 0

    def madvise(self, address: int, nbytes: int, advice: int) -> None:
        self.log.append(("advice", advice))
        madvise(address, nbytes, advice)


def report_of(calls: Calls, settings: ArenaSettings, root: Path, nbytes: int = 3 * MIB) -> ArenaReport:
    arena = Arena(nbytes, settings, system=System(calls.syscall, calls.madvise, sysfs=root))
    arena.array[:] = 1  # whatever happened, it is memory
    arena.close()
    return arena.report


def kinds(calls: Calls) -> list[object]:
    return [entry[0] for entry in calls.log]  # type: ignore[index]


# which node


@pytest.mark.parametrize(
    "address", ["0000:3b:00.0", "0000:3B:00.0", "00000000:3B:00.0"], ids=["sysfs", "CUDA", "nvidia-smi"]
)
def test_a_devices_node_is_found_by_its_address(tmp_path: Path, address: str) -> None:
    assert node_of_device(address, sysfs(tmp_path)) == 1


def test_a_domain_that_needs_more_digits_is_not_cut_short(tmp_path: Path) -> None:
    root = sysfs(tmp_path, "0001:3b:00.0")
    assert node_of_device("00000001:3b:00.0", root) == 1
    assert node_of_device("00010000:3b:00.0", root) is None


@pytest.mark.parametrize("node", ["-1\n", "", "one\n", None], ids=["-1", "empty", "text", "absent"])
def test_a_node_that_the_machine_does_not_say_is_unknown(tmp_path: Path, node: str | None) -> None:
    assert node_of_device(DEVICE, sysfs(tmp_path, node=node)) is None


@pytest.mark.parametrize("address", ["0000:3c:00.0", "unknown", "", "../devices/0000:3b:00.0", "0000:3b:00.0\n"])
def test_what_is_no_device_has_no_node(tmp_path: Path, address: str) -> None:
    assert node_of_device(address, sysfs(tmp_path)) is None


# the bind call


def test_arena_is_bound_to_the_devices_node_before_touch(tmp_path: Path) -> None:
    calls = Calls()
    arena = Arena(
        3 * MIB, ArenaSettings(pci_address=DEVICE), system=System(calls.syscall, calls.madvise, sysfs(tmp_path))
    )
    assert calls.log[0] == ("bind", arena.address, 3 * MIB, MPOL_PREFERRED, [0b10], 65, 0)
    assert kinds(calls) == ["bind", "advice", "advice", "look"]
    report = arena.report
    assert (report.numa_node, report.numa_bound) == (1, True)
    assert report.fallbacks[Fallback.NUMA_STRAYS] == report.fallbacks[Fallback.NUMA_UNKNOWN] == 0
    arena.close()


@pytest.mark.parametrize(
    ("node", "mask", "bits"), [(0, [1], 65), (63, [1 << 63], 65), (64, [0, 1], 129), (130, [0, 0, 4], 193)]
)
def test_mask_has_the_bit_of_the_node_alone(tmp_path: Path, node: int, mask: list[int], bits: int) -> None:
    calls = Calls(lambda index: node)
    report = report_of(calls, ArenaSettings(numa_node=node), tmp_path)
    assert calls.log[0][4:6] == (mask, bits)  # type: ignore[index]
    assert (report.numa_node, report.numa_bound) == (node, True)


def test_a_node_that_was_given_goes_before_the_devices(tmp_path: Path) -> None:
    report = report_of(Calls(lambda index: 3), ArenaSettings(numa_node=3, pci_address=DEVICE), sysfs(tmp_path))
    assert (report.numa_node, report.numa_bound) == (3, True)


@pytest.mark.parametrize(
    "settings",
    [ArenaSettings(), ArenaSettings(numa_node=None, pci_address=DEVICE)],
    ids=["no device", "switched off"],
)
def test_nothing_is_bound_where_nothing_was_asked_for(tmp_path: Path, settings: ArenaSettings) -> None:
    calls = Calls()
    report = report_of(calls, settings, sysfs(tmp_path))
    assert kinds(calls) == ["advice", "advice"]
    assert (report.numa_node, report.numa_bound) == (None, False)
    assert sum(report.fallbacks[reason] for reason in Fallback if reason.value.startswith("numa")) == 0


# fallbacks


def test_a_device_whose_node_is_unknown_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls()
    report = report_of(calls, ArenaSettings(pci_address=DEVICE), sysfs(tmp_path, node="-1\n"))
    assert "bind" not in kinds(calls)
    assert (report.numa_node, report.numa_bound, report.fallbacks[Fallback.NUMA_UNKNOWN]) == (None, False, 1)
    assert f"the NUMA node of the device at {DEVICE} is unknown (numa_unknown)" in caplog.text


def test_a_bind_call_that_fails_is_counted_and_not_fatal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(refused=errno.EPERM)
    report = report_of(calls, ArenaSettings(numa_node=1), tmp_path)
    assert (report.numa_node, report.numa_bound, report.fallbacks[Fallback.NUMA_REFUSED]) == (1, False, 1)
    assert "look" not in kinds(calls)
    assert "cannot be bound to NUMA node 1: [Errno 1] refused (numa_refused)" in caplog.text


def test_a_machine_whose_system_calls_are_unknown_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    report = report_of(Calls(), ArenaSettings(numa_node=0), tmp_path)
    assert (report.numa_bound, report.fallbacks[Fallback.NUMA_REFUSED]) == (False, 1)
    assert "NUMA system calls are not supported on s390x" in caplog.text


def test_pages_on_another_node_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(Calls(lambda index: index % 2), ArenaSettings(numa_node=1), tmp_path)
    assert (report.numa_bound, report.fallbacks[Fallback.NUMA_STRAYS]) == (True, 1)
    assert "384 of the pages sampled are not on NUMA node" in caplog.text  # of 768


@pytest.mark.parametrize(
    "calls", [Calls(silent=True), Calls(lambda index: -errno.ENOENT if index == 5 else 1)], ids=["refused", "one page"]
)
def test_system_that_hides_where_pages_are_is_counted(tmp_path: Path, calls: Calls) -> None:
    report = report_of(calls, ArenaSettings(numa_node=1), tmp_path)
    assert (report.numa_bound, report.fallbacks[Fallback.NUMA_UNVERIFIED]) == (True, 1)
    assert report.fallbacks[Fallback.NUMA_STRAYS] == 0


@pytest.mark.parametrize(("nbytes", "looks"), [(1, 1), (5 * DISK_PAGE, 5), (64 * MIB, 1024)])
def test_pages_are_looked_at_all_over_the_arena(tmp_path: Path, nbytes: int, looks: int) -> None:
    calls = Calls()
    arena = Arena(nbytes, ArenaSettings(numa_node=1), system=System(calls.syscall, sysfs=tmp_path))
    addresses = calls.log[1][1]  # type: ignore[index]
    assert len(set(addresses)) == looks
    assert (addresses[0], addresses[-1]) == (arena.address, arena.address + arena.nbytes - DISK_PAGE)
    assert all(address % DISK_PAGE == 0 for address in addresses)
    arena.close()


# this machine


@pytest.mark.parametrize("shared", [False, True])
def test_this_machine_binds_memory_to_its_first_node(shared: bool) -> None:
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA")
    arena = Arena(3 * MIB, ArenaSettings(numa_node=0, shared=shared))
    report = arena.report
    maps = Path("/proc/self/numa_maps").read_text().splitlines()
    arena.close()
    if not report.numa_bound:
        pytest.skip("this process may not bind memory")
    policy = next(line.split()[1] for line in maps if line.startswith(f"{arena.address:x} "))
    assert policy == "prefer:0"
    assert report.fallbacks[Fallback.NUMA_STRAYS] == 0
