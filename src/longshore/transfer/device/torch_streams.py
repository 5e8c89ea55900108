"""Any accelerator of torch, with torch's functions: streams, events, `index_select`, `index_copy_`, `copy_`.

Each direction has a stream and a ring of two stages. A stage is a piece of device memory and a piece of pinned host
memory of the same size. Pages are gathered on the device, so that the link has one long copy instead of many short
ones. While the device fills one stage, this thread empties the other:

    offload    pages ──gather──► stage.device ──link──► stage.host ──memmove──► images
               └──────── on the stream ─────────────────────────┘  └ this thread ┘
    load       images ──memmove──► stage.host ──link──► stage.device ──scatter──► pages

    in a stage:  │ ref 0: block, block, ... │ ref 1: block, block, ... │   each reference 16-byte aligned
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, cast

import numpy as np
import torch

from longshore.boundary import HOST, I64
from longshore.layout.model import KVLayout, PageRef
from longshore.transfer.device.base import Copy, Device, DeviceEvent, Stream, copy_pieces
from longshore.transfer.pieces import CopyBatch, CopyPart, Pieces, host_addresses, merge

EVENTS = 128
"""Events that a device allocates at start."""

_log = logging.getLogger(__name__)


class Accelerator:
    """The calls that need an accelerator, in one place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> torch.Stream:
        """The calling thread's stream."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        """A new stream."""
        return torch.Stream(device=self.device)

    def use(self, stream: torch.Stream) -> None:
        """Make `stream`, and its device, the calling thread's own: a new thread starts on device 0."""
        torch.get_device_module(self.device).set_device(self.device.index)
        torch.accelerator.set_stream(stream)

    def new_event(self) -> torch.Event:
        """An event with timing."""
        return torch.Event(device=self.device, enable_timing=True)

    def device_bytes(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8, shape `(nbytes,)`."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory, uint8, shape `(nbytes,)`; `RuntimeError` if it cannot be allocated."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Fallbacks:
    """Counts of slower fallbacks, by reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def count(self, reason: str) -> None:
        """Count one fallback."""
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> Mapping[str, int]:
        """All counts."""
        with self._lock:
            return dict(self._counts)


class StreamEvent(DeviceEvent):
    """A point on a stream, after all work submitted to it so far. Made by `Events.record`."""

    def __init__(self, pool: Events, event: torch.Event) -> None:
        self._pool = pool
        self._event: torch.Event | None = event
        self._waiting = 0

    def query(self) -> bool:
        """Whether all work before it has ended."""
        with self._pool.lock:
            return self._has_passed()

    def wait(self) -> None:
        """Block the calling thread until the point has passed."""
        with self._pool.lock:
            event = self._event
            if event is None:
                return
            self._waiting += 1
        try:
            event.synchronize()
        finally:
            with self._pool.lock:
                self._waiting -= 1

    def make_wait(self, stream: torch.Stream) -> None:
        """Make `stream` wait for the point; the calling thread does not wait."""
        with self._pool.lock:
            if self._event is not None:
                self._event.wait(stream)

    def seconds_until(self, later: StreamEvent) -> float:
        """Seconds between two points by the device's clock. Both have passed and are not released."""
        with self._pool.lock:
            if self._event is None or later._event is None:
                raise RuntimeError("event already released")
            return float(self._event.elapsed_time(later._event)) / 1000

    def _has_passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def _recycle(self) -> torch.Event | None:
        """The event, which is no longer this point's, if nothing needs it."""
        if self._waiting or not self._has_passed():
            return None
        event, self._event = self._event, None
        return event


class Events:
    """A bounded pool of events, allocated at start and reused. Thread-safe.

    Holders of a point need not return it: an event is recorded again only after it has passed, and the old point then
    reports that it has passed.

        record ──► StreamEvent ──► torch.Event ··· passed ──► recorded again, for another StreamEvent
                        └──────────────────────────────────── from here on: passed, without a query
    """

    def __init__(self, accelerator: Accelerator, fallbacks: Fallbacks, count: int = EVENTS) -> None:
        self.lock = threading.Lock()
        self._accelerator = accelerator
        self._fallbacks = fallbacks
        self._count = count
        self._idle = [accelerator.new_event() for _ in range(count)]
        self._loose: deque[StreamEvent] = deque()  # recorded, not kept: used again as soon as they have passed

    def record(self, stream: torch.Stream, *, keep: bool = False) -> StreamEvent:
        """The point after all work on `stream` so far; with `keep`, its event is not reused until `release`."""
        with self.lock:
            event = self._take()
            try:
                event.record(stream)
            except BaseException:
                self._idle.append(event)
                raise
            point = StreamEvent(self, event)
            if not keep:
                self._loose.append(point)
            return point

    def release(self, *points: StreamEvent) -> None:
        """Return kept `points` to the pool, once each; they are reused after they have passed."""
        with self.lock:
            self._loose.extend(points)

    def close(self) -> None:
        """Release all events that are not in use."""
        with self.lock:
            self._idle.clear()

    def _take(self) -> torch.Event:
        if not self._idle:
            self._sweep()
        if self._idle:
            return self._idle.pop()
        self._fallbacks.count("new_event")
        return self._accelerator.new_event()

    def _sweep(self) -> None:
        """Take back the events of points that have passed; those beyond the stock are dropped."""
        busy: deque[StreamEvent] = deque()
        for point in self._loose:
            event = point._recycle()
            if event is None:
                busy.append(point)
            elif len(self._idle) < self._count:
                self._idle.append(event)
        self._loose = busy


class StreamCopy(Copy):
    """A batch copied on streams, from `begun` to `ended`; its last access to the pages is before `done_event`."""

    def __init__(
        self,
        events: Events,
        begun: StreamEvent,
        done_event: StreamEvent,
        ended: StreamEvent,
        unload: Callable[[StreamCopy], None] = lambda copy: None,
    ) -> None:
        """`unload` moves what is left in stages to the images."""
        self._events = events
        self.begun = begun
        self._done_event = done_event
        self.ended = ended
        self._unload = unload

    @property
    def done_event(self) -> DeviceEvent:
        """The event that was given."""
        return self._done_event

    def query(self) -> bool:
        """Whether the streams have ended it."""
        return self.ended.query()

    def finish(self) -> float:
        """Unload it, and wait for the streams."""
        try:
            self._unload(self)
        finally:
            try:
                self.ended.wait()
                seconds = self.begun.seconds_until(self.ended)
            finally:
                self._events.release(self.begun, self.ended)
        return seconds


class StreamDevice(Device):
    """A device with streams. `compute` is a `torch.Stream`, or `None` for the calling thread's current one."""

    def __init__(self, accelerator: Accelerator) -> None:
        """Allocates the events."""
        self._fallbacks = Fallbacks()
        self._events = Events(accelerator, self._fallbacks)
        self._current_stream = accelerator.current_stream

    def resolve(self, compute: object) -> torch.Stream:
        """The stream itself."""
        return self._current_stream() if compute is None else cast(torch.Stream, compute)

    def record_event(self, compute: object) -> DeviceEvent:
        """An event on the compute stream."""
        return self._events.record(self.resolve(compute))

    def wait_event(self, compute: object, event: DeviceEvent) -> None:
        """The compute stream waits for `event`; the calling thread does not."""
        cast(StreamEvent, event).make_wait(self.resolve(compute))

    def fallbacks(self) -> Mapping[str, int]:
        """`new_event`: more events were in use than allocated at start; `unpinned_stage`: no pinned memory."""
        return self._fallbacks.counts()

    def close(self) -> None:
        """Release the events."""
        self._events.close()


def pinned_or_pageable(accelerator: Accelerator, fallbacks: Fallbacks, nbytes: int) -> torch.Tensor:
    """Pinned host memory if available, else pageable memory, which is logged and counted."""
    try:
        return accelerator.pinned_bytes(nbytes)
    except RuntimeError as error:
        _log.warning(
            "cannot allocate %d bytes of pinned memory; copies to %s use pageable memory, which is slower; free host "
            "memory, or raise ulimit -l: %s",
            nbytes,
            accelerator.device,
            error,
        )
        fallbacks.count("unpinned_stage")
        return torch.empty(nbytes, dtype=torch.uint8)


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_ALIGNMENT = 16


class TorchDevice(StreamDevice):
    """An accelerator."""

    def __init__(
        self, device: torch.device | str, *, staging_bytes: int = 64 << 20, accelerator: Accelerator | None = None
    ) -> None:
        """Allocates `staging_bytes` of pinned and of device memory per direction.

        Takes one of torch's streams per direction, once for all layouts. torch has a bounded number of streams and uses
        them in turn; an engine may get the same stream, and copies then wait for its work.
        """
        self._streams: dict[str, torch.Stream] = {}
        self._accelerator = accelerator or Accelerator(with_index(torch.device(device)))
        self._staging_bytes = staging_bytes
        super().__init__(self._accelerator)

    def stream(self, layout: KVLayout, destination: str) -> Stream:
        """A stream with its stages."""
        if destination not in self._streams:
            self._streams[destination] = self._accelerator.new_stream()
        return stream_into(
            destination,
            self._accelerator,
            self._events,
            self._fallbacks,
            self._streams[destination],
            layout,
            self._staging_bytes,
        )


def with_index(device: torch.device) -> torch.device:
    """`device` with an index, by default that of the current device."""
    if device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def stream_into(
    destination: str,
    accelerator: Accelerator,
    events: Events,
    fallbacks: Fallbacks,
    stream: torch.Stream,
    layout: KVLayout,
    staging_bytes: int,
) -> StagedStream:
    """Copies of `layout` into the tier `destination`, on `stream`; allocates the stages."""
    kind = _OffloadStream if destination == HOST else _LoadStream
    return kind(accelerator, events, fallbacks, stream, layout, staging_bytes)


class _Stage:
    """One of the two stages: its memory, the event after its last use, and what is still to be copied from it."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor, ids: int) -> None:
        """Both sides have room for twice `ids` numbers of blocks after the bytes."""
        self.host, self._host_ids = _apart(host, ids)
        self.device, self._device_ids = _apart(device, ids)
        self.last_use: StreamEvent | None = None
        self.pending: tuple[CopyBatch, CopyPart] | None = None
        self.copy: StreamCopy | None = None

    def wait(self) -> None:
        """Block the calling thread until the last use of the stage has ended."""
        if self.last_use is not None:
            self.last_use.wait()

    def on_device(self, *blocks: I64) -> list[torch.Tensor]:
        """Ids of blocks, each int64 of shape `(blocks,)`, on the device.

        From pinned memory, so that no call waits for the stream; the thread waits for the last use of that memory.
        """
        self.wait()
        found = []
        for row, ids in enumerate(blocks):
            host, device = (side[row, : ids.size] for side in (self._host_ids, self._device_ids))
            host.numpy()[:] = ids.reshape(-1)
            device.copy_(host, non_blocking=True)
            found.append(device)
        return found


def _apart(memory: torch.Tensor, ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a stage, and after them two rows of `ids` int64."""
    end = memory.numel() - 16 * ids
    return memory[:end], memory[end:].view(torch.int64).view(2, ids)


class StagedStream(Stream):
    """Base of both directions. Every method runs in the thread that called `bind`."""

    depth = 2

    def __init__(
        self,
        accelerator: Accelerator,
        events: Events,
        fallbacks: Fallbacks,
        stream: torch.Stream,
        layout: KVLayout,
        staging_bytes: int,
    ) -> None:
        self._accelerator = accelerator
        self._events = events
        # A part of a stage holds at least one reference's pages of one chunk, and each reference may lose 16 bytes.
        largest = max(ref.page_bytes * group.blocks_per_chunk for group in layout.groups for ref in group.refs)
        slack = _ALIGNMENT * max(len(group.refs) for group in layout.groups)
        self._piece_bytes = max(staging_bytes // 2 - slack, largest)
        # Each stage has room for the ids of its blocks, too, which go to the device as the bytes do.
        self._most_blocks = max(layout.num_blocks, *(group.blocks_per_chunk for group in layout.groups))
        nbytes = -(-(self._piece_bytes + slack) // _ALIGNMENT) * _ALIGNMENT + 16 * self._most_blocks
        self._stages = [
            _Stage(
                pinned_or_pageable(accelerator, fallbacks, nbytes), accelerator.device_bytes(nbytes), self._most_blocks
            )
            for _ in range(2)
        ]
        self._stream = stream
        # The stages' memory may have had another owner, whose work on the current stream is not done.
        events.record(accelerator.current_stream()).make_wait(self._stream)
        self._turn = 0

    def bind(self) -> None:
        """Make this stream current in the calling thread."""
        self._accelerator.use(self._stream)

    def copy(self, batch: CopyBatch, wait_events: tuple[DeviceEvent, ...]) -> Copy:
        """Copy `batch` through the stages; the stream waits for `wait_events`, the calling thread does not."""
        batch.check_live()
        for event in wait_events:
            cast(StreamEvent, event).make_wait(self._stream)
        begun = self._record()
        try:
            sent = [self._send_part(batch, piece) for part in batch.parts for piece in self._pieces(part)]
            ended = self._record()
        except BaseException:
            self._events.release(begun)
            raise
        copy = StreamCopy(self._events, begun, ended, ended, self._unload)
        for stage in sent[-len(self._stages) :]:
            stage.copy = copy
        return copy

    def drain(self) -> None:
        """Empty the stages and wait for the stream."""
        try:
            for stage in self._by_age():
                self._empty(stage)
        finally:
            self._events.record(self._stream).wait()

    def close(self) -> None:
        """Free the stages."""
        self._stages = []

    def _unload(self, copy: StreamCopy) -> None:
        """Copy what stages have of `copy` to the images."""
        for stage in self._by_age():
            if stage.copy is copy:
                self._empty(stage)

    def _record(self) -> StreamEvent:
        return self._events.record(self._stream, keep=True)

    def _pieces(self, part: CopyPart) -> Iterator[CopyPart]:
        """`part` in parts that a stage has room for."""
        most = max(1, self._most_blocks // part.blocks.shape[1]) * part.chunk_bytes
        return part.cut(min(self._piece_bytes, most))

    def _send_part(self, batch: CopyBatch, part: CopyPart) -> _Stage:
        self._turn = 1 - self._turn
        stage = self._stages[self._turn]
        if part.sources is None:
            self._send(batch, part, stage)
        else:
            self._send_inside(batch, part, part.sources, stage)
        return stage

    @abstractmethod
    def _send(self, batch: CopyBatch, part: CopyPart, stage: _Stage) -> None:
        """Give the copy of `part` through `stage` to the stream."""

    def _send_inside(self, batch: CopyBatch, part: CopyPart, sources: I64, stage: _Stage) -> None:
        """From block to block through the device's side of `stage`, which earlier work on the stream has left."""
        read, written = stage.on_device(sources, part.blocks)
        _gather(batch.layout, part, read, stage)
        _scatter(batch.layout, part, written, stage)
        self._use(stage)

    def _use(self, stage: _Stage) -> None:
        """Record that all uses of `stage` so far are on the stream."""
        stage.last_use = self._events.record(self._stream)

    def _by_age(self) -> tuple[_Stage, _Stage]:
        """The stages, that which was used last at the end."""
        return self._stages[1 - self._turn], self._stages[self._turn]

    def _empty(self, stage: _Stage) -> None:
        """Copy the content of `stage` to its images."""


class _OffloadStream(StagedStream):
    def _send(self, batch: CopyBatch, part: CopyPart, stage: _Stage) -> None:
        self._empty(stage)
        (blocks,) = stage.on_device(part.blocks)
        _gather(batch.layout, part, blocks, stage)
        end = _regions(part).end
        stage.host[:end].copy_(stage.device[:end], non_blocking=True)
        self._use(stage)
        stage.pending = (batch, part)

    def _empty(self, stage: _Stage) -> None:
        """If this fails, the stage keeps its content, and the next call retries."""
        if stage.pending is not None:
            stage.wait()
            pieces = _through(stage, *stage.pending)
            copy_pieces(pieces.device, pieces.host, pieces.size)
        stage.pending, stage.copy = None, None


class _LoadStream(StagedStream):
    def _send(self, batch: CopyBatch, part: CopyPart, stage: _Stage) -> None:
        stage.wait()  # the link may still be reading the host side
        pieces = _through(stage, batch, part)
        copy_pieces(pieces.host, pieces.device, pieces.size)
        end = _regions(part).end
        stage.device[:end].copy_(stage.host[:end], non_blocking=True)
        (blocks,) = stage.on_device(part.blocks)
        _scatter(batch.layout, part, blocks, stage)
        self._use(stage)


def _gather(layout: KVLayout, part: CopyPart, blocks: torch.Tensor, stage: _Stage) -> None:
    """The pages of `blocks` into the device's side of `stage`."""
    for pages, region in zip(_pages(layout, part), _regions(part).offsets, strict=True):
        torch.index_select(pages, 0, blocks, out=_rows(stage.device, region, len(blocks), pages))


def _scatter(layout: KVLayout, part: CopyPart, blocks: torch.Tensor, stage: _Stage) -> None:
    """The device's side of `stage` into the pages of `blocks`."""
    for pages, region in zip(_pages(layout, part), _regions(part).offsets, strict=True):
        pages.index_copy_(0, blocks, _rows(stage.device, region, len(blocks), pages))


class _Regions(NamedTuple):
    """Where each reference's rows start in a stage, and where the last one ends, in bytes."""

    offsets: list[int]
    end: int


def _regions(part: CopyPart) -> _Regions:
    sizes = part.widths.astype(np.int64) * part.blocks.size
    aligned = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    ends = np.cumsum(aligned)
    return _Regions((ends - aligned).tolist(), int(ends[-1]))


def _through(stage: _Stage, batch: CopyBatch, part: CopyPart) -> Pieces:
    """The copies between the host side of `stage` (as `device`) and the images."""
    chunks, subs = part.blocks.shape
    rows = np.arange(chunks * subs, dtype=np.uint64).reshape(chunks, 1, subs)
    starts = np.array(_regions(part).offsets, dtype=np.uint64) + np.uint64(stage.host.data_ptr())
    staged = np.add(starts[:, None], rows * part.widths[:, None], dtype=np.uint64)
    images = np.empty_like(staged)
    host_addresses(part, batch.layout.table(part.group, split=part.split), batch.host_address, images)
    sizes = np.broadcast_to(part.widths[:, None], staged.shape)
    return merge(Pieces(staged.reshape(-1), images.reshape(-1), sizes.reshape(-1)))


def _pages(layout: KVLayout, part: CopyPart) -> list[torch.Tensor]:
    """For each reference that moves, its pages as `(num_blocks, words)` in the widest words that fit."""
    refs = layout.refs(part.group, split=part.split)[part.refs]
    widths = part.widths.tolist()
    return [_page_view(layout, ref, width) for ref, width in zip(refs, widths, strict=True)]


def _page_view(layout: KVLayout, ref: PageRef, width: int) -> torch.Tensor:
    tensor = cast(torch.Tensor, layout.tensors[ref.tensor])
    storage = tensor.untyped_storage()
    start = tensor.data_ptr() + ref.offset - storage.data_ptr()
    word = next(word for word in _WORDS if not (start % word or ref.stride % word or width % word))
    view = torch.empty(0, dtype=_WORDS[word], device=tensor.device)
    return view.set_(storage, start // word, (layout.num_blocks, width // word), (ref.stride // word, 1))


def _rows(stage: torch.Tensor, start: int, count: int, pages: torch.Tensor) -> torch.Tensor:
    """`count` rows from byte `start` of a stage on, of the width and words of `pages`."""
    row_bytes = pages.shape[1] * pages.element_size()
    return stage[start : start + count * row_bytes].view(pages.dtype).view(count, pages.shape[1])
