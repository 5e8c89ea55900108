"""Copies through torch's streams.

The logic runs on the CPU, with streams and events that only take notes; where there is an accelerator, a round trip
runs on it.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest
import torch
from gated import PATIENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import Model, Pools, chunks_of, elsewhere, flat, layouts, sections, transfer

from longshore.boundary import DEVICE, HOST, Section, Status
from longshore.layout import KVGroup, KVLayout, PageRef
from longshore.transfer import OFFLOAD, ONBOARD, TransferEngine
from longshore.transfer.device.torch_streams import Accelerator, TorchDevice
from longshore.transfer.selection import select


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

    def record(self, stream: FakeStream) -> None:
        self.notes.lines.append(("record", self.name, stream.name))

    def wait(self, stream: FakeStream) -> None:
        self.notes.lines.append(("wait", self.name, stream.name))

    def synchronize(self) -> None:
        self.notes.lines.append(("synchronize", self.name))

    def query(self) -> bool:
        return False

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

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_offload_then_onboard_through_the_stages(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    parts = data.draw(sections(layout))
    there = data.draw(st.composite(lambda draw: elsewhere(draw, layout, parts))())
    items = chunks_of(layout, parts)
    pools = Pools(layout, slots=items + 1, seed=data.draw(st.integers(0, 99)))
    slots = data.draw(st.permutations(range(items + 1)))[:items]
    valid = [
        (1 << layout.groups[section.group].blocks_per_chunk) - 1
        for section in parts
        for _ in range(chunks_of(layout, [section]))
    ]
    tokens = data.draw(st.none() | st.integers(1, 15))
    model = Model(pools)
    device = TorchDevice("cpu", staging_bytes=data.draw(st.integers(0, 6000)), accelerator=FakeAccelerator())
    engine = TransferEngine(layout, device, pools.host, max_batch_bytes=data.draw(st.integers(1, 9000)))
    try:
        engine.submit(transfer(1, OFFLOAD, parts, slots, valid=valid, tokens=tokens))
        assert engine.wait([1], PATIENCE)
        model.move(parts, pools.images(slots), into=HOST, tokens=tokens)
        model.check(pools)
        for tensor in pools.tensors:
            tensor.bitwise_not_()
        model.device = pools.device_bytes()
        engine.submit(transfer(2, ONBOARD, there, slots, valid=valid, tokens=tokens))
        assert engine.wait([2], PATIENCE)
        model.move(there, pools.images(slots), into=DEVICE, tokens=tokens)
        model.check(pools)
        assert {status for result in engine.poll() for status in result.statuses} <= {Status.OK}
    finally:
        engine.close()


def pieces_through(into: str, blocks: int) -> tuple[FakeAccelerator, list[tuple[str, ...]]]:
    """The notes of a copy of `blocks` blocks, each of which fills a stage."""
    accelerator = FakeAccelerator()
    pools = Pools(flat(16, 4096, refs=1), slots=16)
    stream = TorchDevice("cpu", staging_bytes=0, accelerator=accelerator).stream(pools.layout, into)
    selection = select(
        pools.layout,
        [Section(0, 0, tuple(range(blocks)))],
        pools.images(range(blocks)),
        into=into,
        host_address=pools.arena.address,
        host_bytes=pools.arena.nbytes,
    )
    stream.bind()
    stream.begin(())
    accelerator.notes.lines.clear()
    stream.copy(selection.whole)
    copied = list(accelerator.notes.lines)
    stream.end()
    assert stream.finish() == 1.5
    stream.close()
    return accelerator, copied


@pytest.mark.parametrize("into", [HOST, DEVICE])
def test_a_stage_is_used_again_only_when_its_last_use_has_ended(into: str) -> None:
    _, lines = pieces_through(into, 5)
    recorded = [line[1] for line in lines if line[0] == "record"]
    assert len(recorded) == 5
    for before, after in zip(recorded, recorded[2:], strict=False):
        assert lines.index(("synchronize", before)) < lines.index(("record", after, "stream 1"))
        assert ("synchronize", after) not in lines[: lines.index(("record", after, "stream 1"))]


def test_an_offload_ends_when_the_last_stages_are_empty() -> None:
    accelerator, copied = pieces_through(HOST, 5)
    recorded = [line[1] for line in copied if line[0] == "record"]
    assert {("synchronize", event) for event in recorded} <= set(accelerator.notes.lines)


def test_the_thread_of_a_direction_works_on_its_own_stream() -> None:
    accelerator, copied = pieces_through(DEVICE, 3)
    assert [stream.name for stream in accelerator.used] == ["stream 1"]
    assert {line[2] for line in copied if line[0] == "record"} == {"stream 1"}


def test_the_stream_waits_for_what_used_the_stages_memory_before() -> None:
    accelerator = FakeAccelerator()
    TorchDevice("cpu", accelerator=accelerator, staging_bytes=0).stream(flat(4), HOST)
    assert accelerator.notes.lines == [("record", "event 1", "compute"), ("wait", "event 1", "stream 1")]


def test_copies_wait_for_compute_and_compute_for_copies_on_the_device() -> None:
    accelerator = FakeAccelerator()
    device = TorchDevice("cpu", accelerator=accelerator, staging_bytes=0)
    pools = Pools(flat(4), slots=4)
    engine = TransferEngine(pools.layout, device, pools.host)
    compute = FakeStream("engine's stream")
    accelerator.notes.lines.clear()
    engine.begin_step(compute)
    engine.submit(transfer(1, ONBOARD, [Section(0, 0, (3,))], [1]))
    engine.end_step(compute)
    assert engine.wait([1], PATIENCE)
    engine.close()
    lines = accelerator.notes.lines
    (mark,) = [line for line in lines if line[0] == "record" and line[2] == "engine's stream"]
    (hold,) = [line for line in lines if line[0] == "wait" and line[2] == "engine's stream"]
    wait = lines.index(("wait", mark[1], "stream 2"))
    first_copy = next(i for i, line in enumerate(lines) if line[0] == "record" and line[2] == "stream 2")
    end = lines.index(("record", hold[1], "stream 2"))
    assert lines.index(mark) < wait < first_copy < end < lines.index(hold)
    assert ("synchronize", mark[1]) not in lines  # the thread did not wait, the stream did


def test_memory_that_cannot_be_pinned_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = torch.empty

    def refuse(*args: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("no")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    with caplog.at_level(logging.WARNING):
        assert Accelerator(torch.device("cpu")).pinned(64).numel() == 64
    assert "no pinned memory" in caplog.text


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_the_round_trip_on_the_accelerator() -> None:
    where = torch.accelerator.current_accelerator()
    assert where is not None
    tensors = [torch.randint(0, 256, (64 * 700,), dtype=torch.uint8, device=where) for _ in range(3)]
    groups = [
        KVGroup("odd", 4, 3, (PageRef(0, 3, 663, 656), PageRef(1, 0, 24, 24, 6))),
        KVGroup("wide", 16, 1, (PageRef(2, 0, 512, 512, 32),)),
    ]
    layout = KVLayout(groups, tensors, 60)
    host = Pools(flat(60, 8192), slots=64).host
    engine = TransferEngine(layout, TorchDevice(where, staging_bytes=8192), host)
    before = [tensor.clone() for tensor in tensors]
    engine.begin_step()
    out = [Section(0, 1, tuple(range(30))), Section(1, 0, tuple(range(30, 45)))]
    slots = list(range(11 + 15))
    valid = [7] * 11 + [1] * 15
    engine.submit(transfer(1, OFFLOAD, out, slots, valid=valid))
    assert engine.wait([1], PATIENCE)
    back = [Section(0, 1, tuple(range(59, 29, -1))), Section(1, 0, tuple(range(15)))]
    engine.begin_step()
    engine.submit(transfer(2, ONBOARD, back, slots, valid=valid))
    engine.end_step()
    expected = [tensor.clone() for tensor in before]
    for source, target in zip(out, back, strict=True):
        for ref in layout.groups[source.group].refs:
            for one, other in zip(source.blocks, target.blocks, strict=True):
                read, write = ref.offset + one * ref.stride, ref.offset + other * ref.stride
                page = before[ref.tensor][read : read + ref.page_bytes]
                expected[ref.tensor][write : write + ref.page_bytes] = page
    for got, wanted in zip(tensors, expected, strict=True):
        assert torch.equal(got, wanted)
    assert engine.wait([2], PATIENCE)
    engine.close()
    assert {status for result in engine.poll() for status in result.statuses} == {Status.OK}
