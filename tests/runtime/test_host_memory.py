"""The arena of a stack is what the configuration asks for, and is registered with the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from longshore.config import Config
from longshore.runtime.stack import open_arena, registrar_for
from longshore.tiers.arena import DISK_PAGE, Fallback
from longshore.tiers.arena.pinning import CudaRegistrar
from mappings import is_mapped, open_files
from pinning import CudaStandIn

IMAGE = 2 * DISK_PAGE


def test_a_cpu_needs_no_registration() -> None:
    assert registrar_for("cpu") is None
    arena = open_arena(Config.make(), 5, IMAGE, None)
    assert arena.nbytes == 5 * IMAGE
    report = arena.report
    assert (report.shared, report.numa_node, report.registered_pieces) == (False, None, 0)
    arena.close()


def test_a_cuda_device_gets_the_whole_arena() -> None:
    runtime = CudaStandIn()
    arena = open_arena(Config.make(host_numa="off"), 5, IMAGE, CudaRegistrar(runtime))
    assert runtime.device.ranges == {arena.address: 5 * IMAGE}
    assert arena.in_one_piece([slot * IMAGE for slot in range(5)], IMAGE).all()
    arena.close()
    assert runtime.device.ranges == {}


@pytest.mark.parametrize(("numa", "unknown"), [("auto", 1), ("off", 0)])
def test_unknown_numa_node_is_counted_unless_binding_is_off(numa: str, unknown: int) -> None:
    registrar = CudaRegistrar(CudaStandIn(pci=None))
    arena = open_arena(Config.make(host_numa=numa), 1, IMAGE, registrar)
    assert arena.report.fallbacks[Fallback.NUMA_UNKNOWN] == unknown
    arena.close()


def test_a_node_and_sharing_are_as_configured() -> None:
    arena = open_arena(Config.make(host_numa=0, host_shared=True, host_huge_pages=False), 1, IMAGE, None)
    report = arena.report
    assert (report.shared, report.numa_node) == (True, 0)
    assert arena.path.exists()
    arena.close()


@pytest.mark.parametrize("wanted", [True, False])
def test_huge_pages_are_as_configured(wanted: bool) -> None:
    arena = open_arena(Config.make(host_huge_pages=wanted), 4 << 20, 1, None)
    lines = Path("/proc/self/smaps").read_text().split(f"{arena.address:x}-")[1].splitlines()
    flags = next(line for line in lines if line.startswith("VmFlags")).split()
    assert ("hg" in flags, "nh" in flags) == (wanted, not wanted)
    arena.close()


def test_a_fault_while_it_is_registered_leaves_nothing() -> None:
    class Faulty(CudaStandIn):
        address = 0

        def host_register(self, address: int, nbytes: int, flags: int) -> int:
            self.address = address
            raise ZeroDivisionError

    runtime = Faulty()
    before = open_files()
    with pytest.raises(ZeroDivisionError):
        open_arena(Config.make(host_shared=True), 3, IMAGE, CudaRegistrar(runtime))
    assert runtime.address
    assert not is_mapped(runtime.address)
    assert open_files() == before
