"""Registration with the CUDA runtime: a failure leaves no error behind, and is named and counted."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from longshore.errors import RegistrationError
from longshore.tiers.arena import DISK_PAGE, Arena, Fallback
from longshore.tiers.arena.pinning import CudaRegistrar, TorchCudaRuntime
from pinning import CudaStandIn

PORTABLE, MAPPED = 1, 2


def test_memory_is_pinned_for_all_devices_and_mapped() -> None:
    runtime = CudaStandIn()
    arena = Arena(4 * DISK_PAGE)
    arena.register(CudaRegistrar(runtime), DISK_PAGE, largest=2 * DISK_PAGE)
    assert runtime.device.ranges == {arena.address: 2 * DISK_PAGE, arena.address + 2 * DISK_PAGE: 2 * DISK_PAGE}
    assert runtime.flags == {PORTABLE | MAPPED}
    arena.close()
    assert runtime.device.ranges == {}


def test_trap_16_failed_registration_is_counted_logged_and_clears_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runtime = CudaStandIn(refused={0, 2})
    arena = Arena(4 * DISK_PAGE)
    arena.register(CudaRegistrar(runtime), DISK_PAGE, largest=DISK_PAGE)
    assert runtime.left_behind == 0
    assert arena.report.fallbacks[Fallback.REGISTRATION] == 2
    assert arena.in_one_piece(np.arange(4) * DISK_PAGE, DISK_PAGE).tolist() == [False, True, False, True]
    assert "cudaHostRegister of 4096 bytes failed: cudaErrorMemoryAllocation (2)" in caplog.text
    arena.close()
    assert runtime.left_behind == 0


def test_trap_16_failed_unregistration_is_raised_and_leaves_nothing() -> None:
    runtime = CudaStandIn()
    arena = Arena(2 * DISK_PAGE)
    arena.register(CudaRegistrar(runtime), DISK_PAGE, largest=DISK_PAGE)
    runtime.device.unregister(arena.address)
    with pytest.raises(RegistrationError, match=r"1 of 2 .*cudaHostUnregister failed: cudaErrorHostMemoryNotReg"):
        arena.close()
    assert runtime.left_behind == 0


@pytest.mark.parametrize(("pci", "expected"), [("0001:3B:00.0", "0001:3B:00.0"), (None, "unknown")])
def test_a_device_says_where_it_is(pci: str | None, expected: str) -> None:
    assert CudaRegistrar(CudaStandIn(pci=pci)).pci_address() == expected


def test_runtime_whose_errors_would_stick_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this process has a CUDA runtime")
    asked = []

    class Cudart:
        def cudaHostRegister(self, *arguments: Any) -> int:  # noqa: N802 - its name in torch
            asked.append(arguments)
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.version, "cuda", "1.0")  # nothing of this version is ever loaded
    registrar = CudaRegistrar(TorchCudaRuntime("cuda:0"))
    arena = Arena(DISK_PAGE)
    arena.register(registrar, DISK_PAGE)
    assert arena.report.fallbacks[Fallback.REGISTRATION] == 1
    assert asked == []
    assert registrar.pci_address() == "unknown"
    arena.close()


def test_memory_is_pinned_on_a_gpu_and_failure_leaves_nothing() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    registrar = CudaRegistrar(TorchCudaRuntime("cuda:0"))
    assert registrar.pci_address().count(":") == 2
    arena = Arena(64 << 20)
    arena.register(registrar, 1 << 20, largest=16 << 20)
    assert (arena.report.registered_pieces, arena.report.registered_bytes) == (4, 64 << 20)
    host = torch.from_numpy(arena.array)
    assert host.is_pinned()
    host.fill_(7)
    device = host[: 16 << 20].to("cuda:0", non_blocking=True)
    assert (device == 7).all().item()
    with pytest.raises(RegistrationError, match="cudaErrorHostMemoryAlreadyRegistered"):
        registrar.register(arena.address, 1 << 20)
    assert torch.ones(3, device="cuda:0").sum().item() == 3  # a launch finds no error
    del host
    arena.close()
    with pytest.raises(RegistrationError, match="cudaHostUnregister"):
        registrar.unregister(arena.address)
    assert torch.ones(3, device="cuda:0").sum().item() == 3
