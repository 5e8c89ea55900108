"""Copies through torch's streams.

The logic runs on the CPU, with streams and events that only take notes; where there is an accelerator, a round trip
runs on it.
"""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from device_kit import Lane, between, copied_inside, inside
from gated_device import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st
from transfer_kit import Model, Pools, chunks_of, elsewhere, flat, layouts, sections, transfer

from depth import examples
from longshore.boundary import DEVICE, HOST, Section
from longshore.errors import FreedLayoutError
from longshore.transfer import D2H, TransferEngine
from longshore.transfer.device import torch_streams
from longshore.transfer.device.base import copy_pieces
from longshore.transfer.device.torch_streams import Accelerator, TorchDevice


class Notes:
    """What was asked of streams and events, in order."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, ...]] = []
        self.events = 0


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name


class FakeEvent:
    def __init__(self, notes: Notes) -> None:
        notes.events += 1
        self.name = f"event {notes.events}"
        self.notes = notes
        self.happened = False

    def record(self, stream: FakeStream) -> None:
        self.happened = False
        self.notes.lines.append(("record", self.name, stream.name))

    def wait(self, stream: FakeStream) -> None:
        self.notes.lines.append(("wait", self.name, stream.name))

    def synchronize(self) -> None:
        self.happened = True
        self.notes.lines.append(("synchronize", self.name))

    def query(self) -> bool:
        return self.happened

    def elapsed_time(self, other: FakeEvent) -> float:
        return 1500.0


class FakeAccelerator(Accelerator):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.notes = Notes()
        self.streams = 0
        self.used: list[FakeStream] = []

    def current_stream(self) -> torch.Stream:
        return cast(torch.Stream, FakeStream("compute"))

    def new_stream(self) -> torch.Stream:
        self.streams += 1
        return cast(torch.Stream, FakeStream(f"stream {self.streams}"))

    def use(self, stream: torch.Stream) -> None:
        self.used.append(cast(FakeStream, stream))

    def new_event(self) -> torch.Event:
        return cast(torch.Event, FakeEvent(self.notes))

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


@examples(40)
@given(st.data())
def test_offload_then_onboard_through_the_stages(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    there = data.draw(st.composite(lambda draw: elsewhere(draw, layout, parts))())
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=items + 1, seed=data.draw(st.integers(0, 99)))
    slots = data.draw(st.permutations(range(items + 1)))[:items]
    tokens = data.draw(st.none() | st.integers(1, 15))
    max_bytes = data.draw(st.integers(1, 9000))
    model = Model(pools)
    device = TorchDevice("cpu", staging_bytes=data.draw(st.integers(0, 6000)), accelerator=FakeAccelerator())
    out, back = Lane(device.stream(layout, HOST)), Lane(device.stream(layout, DEVICE))
    out.send(between(pools, parts, slots, HOST, tokens).batch.cut(max_bytes))
    out.close()
    model.move(parts, pools.images(slots), destination=HOST, tokens=tokens)
    model.check(pools)
    for tensor in pools.tensors:
        tensor.bitwise_not_()
    model.device = pools.device_bytes()
    back.send(between(pools, there, slots, DEVICE, tokens).batch.cut(max_bytes))
    back.close()
    model.move(there, pools.images(slots), destination=DEVICE, tokens=tokens)
    model.check(pools)
    device.close()


@examples(20)
@given(st.data())
def test_copies_inside_the_device(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    blocks = data.draw(st.permutations(range(layout.num_blocks)))
    count = data.draw(st.integers(1, layout.num_blocks // 2))
    written, read = blocks[:count], blocks[count : 2 * count]
    pools = Pools(layout, slots=1)
    expected = pools.device_bytes()
    copied_inside(expected, layout, group, written, read)
    device = TorchDevice("cpu", staging_bytes=data.draw(st.integers(0, 6000)), accelerator=FakeAccelerator())
    lane = Lane(device.stream(layout, DEVICE))
    lane.send(inside(layout, group, written, read).batch.cut(data.draw(st.integers(1, 9000))))
    lane.close()
    for got, wanted in zip(pools.device_bytes(), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def pieces_through(destination: str, blocks: int) -> tuple[FakeAccelerator, list[tuple[str, ...]]]:
    """The notes of a copy of `blocks` blocks, each of which fills a stage."""
    accelerator = FakeAccelerator()
    pools = Pools(flat(16, 4096, refs=1), slots=16)
    device = TorchDevice("cpu", staging_bytes=0, accelerator=accelerator)
    stream = device.stream(pools.layout, destination)
    selection = between(pools, [Section(0, 0, tuple(range(blocks)))], range(blocks), destination)
    stream.bind()
    accelerator.notes.lines.clear()
    copy = stream.copy(selection.batch, ())
    copied = list(accelerator.notes.lines)
    assert copy.finish() == 1.5
    stream.close()
    assert not device.fallbacks()
    return accelerator, copied


@pytest.mark.parametrize("destination", [HOST, DEVICE])
def test_stage_is_reused_only_after_its_last_use(destination: str) -> None:
    _, lines = pieces_through(destination, 5)
    recorded = [line[1] for line in lines if line[0] == "record"][1:-1]  # the first and the last one keep time
    assert len(recorded) == 5
    for before, after in zip(recorded, recorded[2:], strict=False):
        assert lines.index(("synchronize", before)) < lines.index(("record", after, "stream 1"))
        assert ("synchronize", after) not in lines[: lines.index(("record", after, "stream 1"))]


def test_stage_is_filled_only_after_the_link_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = FakeAccelerator()

    def noted(*pieces: Any) -> None:
        accelerator.notes.lines.append(("fill",))
        copy_pieces(*pieces)

    monkeypatch.setattr(torch_streams, "copy_pieces", noted)
    pools = Pools(flat(16, 4096, refs=1), slots=16)
    stream = TorchDevice("cpu", staging_bytes=0, accelerator=accelerator).stream(pools.layout, DEVICE)
    stream.bind()
    stream.copy(between(pools, [Section(0, 0, (0, 1, 2, 3, 4))], range(5), DEVICE).batch, ())
    lines = accelerator.notes.lines
    used = [line[1] for line in lines if line[0] == "record" and line[2] == "stream 1"][1:-1]
    fills = [at for at, line in enumerate(lines) if line == ("fill",)]
    assert (len(used), len(fills)) == (5, 5)
    for event, fill in zip(used, fills[2:], strict=False):
        assert ("synchronize", event) in lines[:fill]


def test_an_offload_ends_when_the_last_stages_are_empty() -> None:
    accelerator, copied = pieces_through(HOST, 5)
    recorded = [line[1] for line in copied if line[0] == "record"][1:]
    assert {("synchronize", event) for event in recorded} <= set(accelerator.notes.lines)


def test_the_thread_of_a_direction_works_on_its_own_stream() -> None:
    accelerator, copied = pieces_through(DEVICE, 3)
    assert [stream.name for stream in accelerator.used] == ["stream 1"]
    assert {line[2] for line in copied if line[0] == "record"} == {"stream 1"}


def test_the_stream_waits_for_what_used_the_stages_memory_before() -> None:
    accelerator = FakeAccelerator()
    TorchDevice("cpu", accelerator=accelerator, staging_bytes=0).stream(flat(4), HOST)
    (record, wait) = accelerator.notes.lines
    assert record == ("record", wait[1], "compute")
    assert wait == ("wait", record[1], "stream 1")


def test_copies_and_compute_wait_for_each_other_on_device() -> None:
    accelerator = FakeAccelerator()
    device = TorchDevice("cpu", accelerator=accelerator, staging_bytes=0)
    pools = Pools(flat(4), slots=4)
    compute = FakeStream("engine's stream")
    stream = device.stream(pools.layout, DEVICE)
    stream.bind()
    accelerator.notes.lines.clear()
    copy = stream.copy(between(pools, [Section(0, 0, (3,))], [1], DEVICE).batch, (device.record_event(compute),))
    device.wait_event(compute, copy.done_event)
    lines = list(accelerator.notes.lines)
    (mark,) = [line for line in lines if line[0] == "record" and line[2] == "engine's stream"]
    (hold,) = [line for line in lines if line[0] == "wait" and line[2] == "engine's stream"]
    wait = lines.index(("wait", mark[1], "stream 1"))
    first_copy = next(i for i, line in enumerate(lines) if line[0] == "record" and line[2] == "stream 1")
    end = lines.index(("record", hold[1], "stream 1"))
    assert lines.index(mark) < wait < first_copy < end < lines.index(hold)
    assert ("synchronize", mark[1]) not in lines  # the thread did not wait, the stream did
    copy.finish()


def test_finishing_one_copy_does_not_wait_for_the_next() -> None:
    accelerator = FakeAccelerator()
    pools = Pools(flat(16, 4096, refs=1), slots=16)
    stream = TorchDevice("cpu", staging_bytes=0, accelerator=accelerator).stream(pools.layout, HOST)
    stream.bind()
    first, second = (
        stream.copy(between(pools, [Section(0, 0, (at,))], [at], HOST).batch, ()) for at in range(stream.depth)
    )
    image = pools.arena.array[4096:8192]
    before = image.copy()
    first.finish()
    assert first.query()
    assert not second.query()
    np.testing.assert_array_equal(image, before)
    second.finish()
    np.testing.assert_array_equal(pools.arena.array[:8192], pools.tensors[0].numpy()[:8192])


def test_a_batch_of_freed_memory_is_refused_before_it_moves() -> None:
    accelerator = FakeAccelerator()
    pools = Pools(flat(16), slots=16)
    stream = TorchDevice("cpu", accelerator=accelerator).stream(pools.layout, DEVICE)
    selection = between(pools, [Section(0, 0, (3,))], [1], DEVICE)
    pools.layout.free()
    accelerator.notes.lines.clear()
    with pytest.raises(FreedLayoutError):
        stream.copy(selection.batch, ())
    assert not accelerator.notes.lines


def test_memory_that_cannot_be_pinned_is_said_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Unpinned(FakeAccelerator):
        def pinned_bytes(self, nbytes: int) -> torch.Tensor:
            raise RuntimeError("no")

    device = TorchDevice("cpu", staging_bytes=0, accelerator=Unpinned())
    with caplog.at_level(logging.WARNING):
        device.stream(flat(4), HOST)
    assert "bytes of pinned memory; copies to cpu use pageable memory" in caplog.text
    assert device.fallbacks() == {"unpinned_stage": 2}


def test_what_could_not_be_carried_is_carried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third copy needs the stage of the first, and fails to empty it: the first must not say that it arrived."""
    pools = Pools(flat(8, 4096, refs=1), slots=8)
    model = Model(pools)
    stream = TorchDevice("cpu", staging_bytes=1 << 13, accelerator=FakeAccelerator()).stream(pools.layout, HOST)
    stream.bind()
    failures = iter([True])

    def fail_once(*pieces: Any) -> None:
        if next(failures, False):
            raise MemoryError("no room for indices")
        copy_pieces(*pieces)

    monkeypatch.setattr(torch_streams, "copy_pieces", fail_once)
    parts = [[Section(0, 0, (block,))] for block in range(3)]
    first, second = (stream.copy(between(pools, parts[at], [at], HOST).batch, ()) for at in range(2))
    with pytest.raises(MemoryError):
        stream.copy(between(pools, parts[2], [2], HOST).batch, ())
    stream.drain()
    for at, copy in enumerate((first, second)):
        copy.finish()
        model.host[pools.host.slabs.offset(0, at) :][:4096] = model.device[0][4096 * at :][:4096]
    model.check(pools)


def test_current_stream_is_that_of_the_stepping_thread() -> None:
    """Whoever submits, and from whichever thread."""

    class OnePerThread(FakeAccelerator):
        def current_stream(self) -> torch.Stream:
            return cast(torch.Stream, FakeStream(f"compute of {threading.current_thread().name}"))

    pools, accelerator = Pools(flat(4), slots=4), OnePerThread()
    engine = TransferEngine(pools.layout, TorchDevice("cpu", accelerator=accelerator), pools.host)
    engine.begin_step()
    engine.end_step()
    before = len(accelerator.notes.lines)
    submit = threading.Thread(
        target=lambda: engine.submit(transfer(1, D2H, [Section(0, 0, (0,))], [0])), name="another"
    )
    submit.start()
    submit.join()
    assert engine.wait([1], TIMEOUT)
    engine.close()
    recorded = [line[2] for line in accelerator.notes.lines[before:] if line[0] == "record"]
    assert recorded[0] == f"compute of {threading.current_thread().name}"


def test_drain_waits_for_the_stream() -> None:
    """A copy failed half way: what the stream was given of it may still be under way."""
    accelerator = FakeAccelerator()
    stream = TorchDevice("cpu", accelerator=accelerator).stream(flat(4), HOST)
    stream.bind()
    before = len(accelerator.notes.lines)
    stream.drain()
    (what, event, where), waited = accelerator.notes.lines[before:]
    assert (what, where) == ("record", "stream 1")
    assert waited == ("synchronize", event)


def test_what_was_taken_is_used_again_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "query", lambda self: True)
    pools, accelerator = Pools(flat(4), slots=4), FakeAccelerator()
    device = TorchDevice("cpu", accelerator=accelerator)
    stream = cast(torch_streams.StagedStream, device.stream(pools.layout, HOST))
    stream.bind()
    for _ in range(300):
        stream.copy(between(pools, [Section(0, 0, (1,))], [1], HOST).batch, ()).finish()
    assert device.fallbacks() == {}, "events were not released"
    stream.close()
    device.close()
    assert not stream._stages
    assert not device._events._idle


def test_a_device_with_an_index_is_itself() -> None:
    assert torch_streams.with_index(torch.device("cuda:1")) == torch.device("cuda:1")


def test_a_device_finds_its_own_accelerator() -> None:
    device = TorchDevice("cpu:0")
    assert device.fallbacks() == {}
    device.close()


def test_failed_copy_leaves_no_bytes_in_another_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pools = Pools(flat(8, 4096, refs=1), slots=8)
    device = TorchDevice("cpu", staging_bytes=1 << 13, accelerator=FakeAccelerator())
    monkeypatch.setattr(FakeEvent, "query", lambda self: True)
    stream = device.stream(pools.layout, HOST)
    stream.bind()
    gather, calls = torch_streams._gather, iter([False, True])

    def fail_at_the_second_part(*given: Any) -> None:
        if next(calls, False):
            raise RuntimeError("the device fell off the bus")
        gather(*given)

    monkeypatch.setattr(torch_streams, "_gather", fail_at_the_second_part)
    with pytest.raises(RuntimeError):
        stream.copy(between(pools, [Section(0, 0, (0, 5))], [0, 1], HOST).batch, ())
    stream.drain()
    pools.arena.array[pools.host.slabs.offset(0, 0) :][:4096] = 77  # its next owner's
    for block in (2, 3, 4):
        stream.copy(between(pools, [Section(0, 0, (block,))], [block], HOST).batch, ()).finish()
    assert (pools.arena.array[pools.host.slabs.offset(0, 0) :][:4096] == 77).all()
    monkeypatch.setattr(torch_streams, "_gather", lambda *given: 1 / 0)
    for _ in range(200):
        with pytest.raises(ZeroDivisionError):
            stream.copy(between(pools, [Section(0, 0, (0,))], [0], HOST).batch, ())
    assert device.fallbacks() == {}, "events of copies that failed were not released"


@pytest.mark.parametrize("destination", [HOST, DEVICE])
def test_no_call_waits_for_the_stream_to_bring_ids(destination: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Tensor.to` from memory that is not pinned does."""
    pools = Pools(flat(16), slots=16)
    model = Model(pools)
    lane = Lane(TorchDevice("cpu", accelerator=FakeAccelerator()).stream(pools.layout, destination))
    monkeypatch.setattr(torch.Tensor, "to", _refused)
    lane.send([between(pools, [Section(0, 0, (3, 9))], [1, 5], destination).batch])
    model.move([Section(0, 0, (3, 9))], pools.images([1, 5]), destination=destination)
    if destination == DEVICE:
        lane.send([inside(pools.layout, 0, [4, 2], [3, 9]).batch])
        copied_inside(model.device, pools.layout, 0, [4, 2], [3, 9])
    lane.close()
    model.check(pools)


def test_staged_ids_are_overwritten_only_after_use() -> None:
    accelerator = FakeAccelerator()
    pools = Pools(flat(16, 4096, refs=1), slots=1)
    stream = TorchDevice("cpu", staging_bytes=0, accelerator=accelerator).stream(pools.layout, DEVICE)
    stream.bind()
    accelerator.notes.lines.clear()
    stream.copy(inside(pools.layout, 0, [0, 1, 2], [3, 4, 5]).batch, ())
    lines = accelerator.notes.lines
    first, _, third = [line[1] for line in lines if line[0] == "record"][1:4]
    assert lines.index(("synchronize", first)) < lines.index(("record", third, "stream 1"))


def test_a_thread_takes_both_the_stream_and_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    stream = cast(torch.Stream, FakeStream("stream 1"))
    module = SimpleNamespace(set_device=taken.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "set_stream", taken.append)
    Accelerator(torch.device("cuda:1")).use(stream)
    assert taken == [1, stream]


def test_streams_are_drawn_once_for_each_direction() -> None:
    accelerator = FakeAccelerator()
    device = TorchDevice("cpu", staging_bytes=0, accelerator=accelerator)
    for _ in range(3):
        for destination in (HOST, DEVICE):
            device.stream(flat(4), destination)
    assert accelerator.streams == 2


def _refused(*arguments: object, **options: object) -> None:
    raise AssertionError("this call would wait for the stream")
