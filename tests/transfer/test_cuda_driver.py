"""The driver's calls against a library that checks each rule, and moves the bytes by what it was handed."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from cuda_stand_in import LazyStream, StandInLibrary, World

from longshore.errors import DeviceError
from longshore.transfer.device.cuda import driver as module
from longshore.transfer.device.cuda.driver import Driver, MemcpyAttributes, MemLocation


class Bench:
    """A driver, a stream, and memory to copy in."""

    def __init__(self, **options: int) -> None:
        self.world = World()
        self.library = StandInLibrary(self.world, **options)
        self.driver = Driver(self.library)
        self.stream = LazyStream("own", self.world)

    def copy(self, count: int) -> None:
        """Copy `count` pieces of unlike sizes to scrambled places, and check every byte."""
        random = np.random.default_rng(count)
        sizes = random.integers(1, 30, count).astype(np.uint64)
        source = random.integers(1, 256, count * 32, dtype=np.uint8)
        target = np.zeros(count * 32, dtype=np.uint8)
        expected = target.copy()
        places = random.permutation(count).astype(np.uint64) * np.uint64(32)
        starts = np.arange(count, dtype=np.uint64) * np.uint64(32)
        for place, start, size in zip(places.tolist(), starts.tolist(), sizes.tolist(), strict=True):
            expected[place : place + size] = source[start : start + size]
        to, at = places + np.uint64(target.ctypes.data), starts + np.uint64(source.ctypes.data)
        self.driver.copy(self.stream.cuda_stream, to, at, sizes)
        assert not target.any()
        self.stream.run_to(self.stream.given)
        np.testing.assert_array_equal(target, expected)
        assert not self.library.breaches


def test_the_structures_are_laid_out_as_in_the_header() -> None:
    assert ctypes.sizeof(MemLocation) == 8
    assert ctypes.sizeof(MemcpyAttributes) == 24
    fields = ("source_order", "source_hint", "destination_hint", "flags")
    assert [getattr(MemcpyAttributes, field).offset for field in fields] == [0, 4, 12, 20]


@pytest.mark.parametrize(
    ("newest", "oldest", "entry"),
    [(12080, 12080, "12.8"), (13000, 12080, "12.8"), (13000, 13000, "13.0"), (12060, 12080, "one")],
)
def test_each_entry_moves_the_bytes(newest: int, oldest: int, entry: str) -> None:
    bench = Bench(newest=newest, oldest_batch=oldest)
    bench.copy(100)
    assert {call for call, _ in bench.library.calls} == {entry}
    versions = {"12.8": 12080, "13.0": 13000, "one": None}
    assert bench.driver.batch_version == versions[entry]
    assert bench.driver.version == newest


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 9000])
def test_at_most_4096_copies_in_one_call(count: int) -> None:
    bench = Bench()
    bench.copy(count)
    assert [copies for _, copies in bench.library.calls] == [4096] * (count // 4096) + [count % 4096] * (
        count % 4096 > 0
    )


def test_overlap_with_compute_is_asked_for() -> None:
    bench = Bench()
    bench.copy(3)
    assert bench.library.flags == [module.PREFER_OVERLAP]


@pytest.mark.parametrize("handle", [0, 1])
def test_the_null_stream_is_refused(handle: int) -> None:
    bench = Bench()
    one = np.ones(1, dtype=np.uint64)
    with pytest.raises(DeviceError, match="null stream"):
        bench.driver.copy(handle, one, one, one)
    assert not bench.library.calls


def test_what_the_driver_refuses_is_named() -> None:
    bench = Bench()
    one = np.ones(1, dtype=np.uint64)
    with pytest.raises(DeviceError, match="cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_VALUE"):
        bench.driver.copy(0x77, one, one, one)  # a stream that nobody made
    bench.library.fail_with = 999
    with pytest.raises(DeviceError, match="error 999"):
        bench.driver.copy(bench.stream.cuda_stream, one, one, one)


def test_thread_gets_the_context_of_the_device() -> None:
    bench = Bench()
    bench.library.contexts.now = 7
    assert bench.driver.make_current(3) == 7
    assert bench.library.contexts.now == 0xC3


def test_streams_are_made_on_their_device_and_given_back() -> None:
    bench = Bench()
    bench.library.contexts.now = 7
    handles = [bench.driver.new_stream(3) for _ in range(2)]
    assert len(set(handles)) == 2
    assert bench.library.contexts.now == 7
    for handle in handles:
        bench.driver.destroy_stream(handle)
    assert (bench.library.made, bench.library.destroyed) == (handles, handles)
    assert not bench.library.breaches
    with pytest.raises(DeviceError, match="cuStreamDestroy failed: CUDA_ERROR_INVALID_VALUE"):
        bench.driver.destroy_stream(handles[0])


def test_a_capture_mode_is_exchanged_for_the_calling_thread() -> None:
    bench = Bench()
    assert bench.driver.exchange_capture_mode(module.RELAXED) == 0
    assert bench.driver.exchange_capture_mode(0) == module.RELAXED


def test_a_thread_without_a_context_gets_that_of_the_device() -> None:
    bench = Bench()
    found: list[int] = []

    def other() -> None:
        bench.driver.make_current(3)
        found.append(bench.library.contexts.now)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [0xC3]


def test_whether_kernels_reach_host_memory_by_its_address() -> None:
    bench = Bench()
    assert bench.driver.reaches_host_pointers(0)
    bench.library.host_pointers_serve = 0
    assert not bench.driver.reaches_host_pointers(0)


def test_a_library_without_a_function_is_refused() -> None:
    with pytest.raises(DeviceError, match="has no function cuGetErrorName"):
        Driver(object())


def test_no_driver_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open")

    monkeypatch.setattr(module.ctypes, "CDLL", absent)
    with pytest.raises(DeviceError, match="cannot load the CUDA driver"):
        module.load()
