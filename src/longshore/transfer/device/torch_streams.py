"""Any accelerator that torch knows, with torch's own means: streams, events, `index_select`, `index_copy_`, `copy_`.

One stream for each direction, and for each a ring of two stages, a stage being a piece of device memory and a piece of
pinned host memory of one size. Pages are gathered on the device, so that the link carries one long copy and not many
short ones. While the device fills one stage, this thread empties the other:

    offload    pages ──gather──► stage.device ──link──► stage.host ──memmove──► images
               └──────── on the stream ─────────────────────────┘  └ this thread ┘
    onboard    images ──memmove──► stage.host ──link──► stage.device ──scatter──► pages

    in a stage:  │ ref 0: block, block, ... │ ref 1: block, block, ... │   each reference 16-byte aligned
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import NamedTuple, cast

import numpy as np
import torch

from longshore.boundary import HOST
from longshore.errors import FreedLayoutError
from longshore.layout.model import KVLayout, PageRef
from longshore.transfer.device.base import Device, Event, Stream
from longshore.transfer.device.cpu import copy_pieces
from longshore.transfer.plan import Pieces, host_addresses, merge
from longshore.transfer.selection import Batch, Part

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_ALIGNMENT = 16

_log = logging.getLogger(__name__)


class Accelerator:
    """The calls that need an accelerator, in one place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current_stream(self) -> torch.Stream:
        """The calling thread's stream."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        """A stream of our own."""
        return torch.Stream(device=self.device)

    def use(self, stream: torch.Stream) -> None:
        """Make `stream`, and its device, the calling thread's own: a new thread starts on device 0."""
        torch.accelerator.set_device_index(self.device.index)
        torch.accelerator.set_stream(stream)

    def new_event(self) -> torch.Event:
        """An event that keeps time."""
        return torch.Event(device=self.device, enable_timing=True)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Host memory that the device reaches directly, where it can be had."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError:
            _log.warning("no pinned memory for a stage of %d bytes: copies to %s will be slow", nbytes, self.device)
            return torch.empty(nbytes, dtype=torch.uint8)


class TorchDevice(Device):
    """An accelerator. `compute` is a `torch.Stream`, or `None` for the calling thread's current one."""

    def __init__(
        self, device: torch.device | str, *, staging_bytes: int = 64 << 20, accelerator: Accelerator | None = None
    ) -> None:
        """`staging_bytes` of pinned and of device memory are taken for each direction."""
        where = torch.device(device)
        if where.index is None and accelerator is None:
            where = torch.device(where.type, torch.accelerator.current_device_index())
        self._accelerator = accelerator or Accelerator(where)
        self._staging_bytes = staging_bytes

    def stream(self, layout: KVLayout, into: str) -> Stream:
        """A stream with its stages."""
        kind = _Offload if into == HOST else _Onboard
        return kind(self._accelerator, layout, self._staging_bytes)

    def mark(self, compute: object) -> Event:
        """An event on the compute stream."""
        return _record(self._accelerator, self._compute(compute))

    def hold(self, compute: object, event: Event) -> None:
        """The compute stream waits for `event`; the calling thread does not."""
        cast(_TorchEvent, event).hold(self._compute(compute))

    def close(self) -> None:
        """Nothing was taken: the stages belong to the streams."""

    def _compute(self, compute: object) -> torch.Stream:
        return self._accelerator.current_stream() if compute is None else cast(torch.Stream, compute)


class _TorchEvent(Event):
    def __init__(self, event: torch.Event) -> None:
        self.event = event

    def passed(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    def hold(self, stream: torch.Stream) -> None:
        self.event.wait(stream)


def _record(accelerator: Accelerator, stream: torch.Stream) -> _TorchEvent:
    event = accelerator.new_event()
    event.record(stream)
    return _TorchEvent(event)


class _Stage:
    """One of the two stages: its memory, the event after its last use, and what is still to be carried from it."""

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host = host
        self.device = device
        self.used: _TorchEvent | None = None
        self.pending: tuple[Batch, Part] | None = None


class _TorchStream(Stream):
    """What both directions share. Every method runs in the thread that called `bind`."""

    def __init__(self, accelerator: Accelerator, layout: KVLayout, staging_bytes: int) -> None:
        self._accelerator = accelerator
        # A part of a stage holds at least one reference's pages of one chunk, and each reference may lose 16 bytes.
        largest = max(ref.page_bytes * group.blocks_per_chunk for group in layout.groups for ref in group.refs)
        slack = _ALIGNMENT * max(len(group.refs) for group in layout.groups)
        self._piece_bytes = max(staging_bytes // 2 - slack, largest)
        self._stages = [
            _Stage(
                accelerator.pinned(self._piece_bytes + slack),
                torch.empty(self._piece_bytes + slack, dtype=torch.uint8, device=accelerator.device),
            )
            for _ in range(2)
        ]
        self._stream = accelerator.new_stream()
        # The stages' memory may have had another owner, whose work on the current stream is not done.
        _record(accelerator, accelerator.current_stream()).hold(self._stream)
        self._turn = 0
        self._begun: _TorchEvent | None = None
        self._ended: _TorchEvent | None = None

    def bind(self) -> None:
        """From now on, what this thread gives to torch goes to our stream."""
        self._accelerator.use(self._stream)

    def begin(self, after: tuple[Event, ...]) -> None:
        """The stream waits for `after`, this thread does not."""
        self._ended = None
        for event in after:
            cast(_TorchEvent, event).hold(self._stream)
        self._begun = self._record()

    def copy(self, batch: Batch) -> None:
        """Send `batch` through the stages."""
        if batch.generation != batch.layout.generation:
            raise FreedLayoutError(f"planned in generation {batch.generation}, now it is {batch.layout.generation}")
        for part in batch.parts:
            for piece in part.cut(self._piece_bytes):
                self._turn = 1 - self._turn
                self._send(batch, piece, self._stages[self._turn])

    def end(self) -> Event:
        """The point after the last gather or scatter."""
        self._ended = self._record()
        return self._ended

    def finish(self) -> float:
        """Carry what the stages still hold to the images, and wait for the stream."""
        try:
            for turn in (1 - self._turn, self._turn):
                self._empty(self._stages[turn])
        finally:
            for stage in self._stages:
                stage.pending = None
            ended = self._ended or self._record()
            ended.wait()
        return 0.0 if self._begun is None else self._begun.event.elapsed_time(ended.event) / 1000

    def close(self) -> None:
        """Give the stages back."""
        self._stages = []

    def _record(self) -> _TorchEvent:
        return _record(self._accelerator, self._stream)

    @abstractmethod
    def _send(self, batch: Batch, part: Part, stage: _Stage) -> None:
        """Give the copy of `part` through `stage` to the stream."""

    def _empty(self, stage: _Stage) -> None:
        """Carry what `stage` still holds to its images."""


class _Offload(_TorchStream):
    def _send(self, batch: Batch, part: Part, stage: _Stage) -> None:
        self._empty(stage)
        regions = _regions(part)
        blocks = _blocks(part, self._accelerator.device)
        for pages, region in zip(_pages(batch.layout, part), regions.offsets, strict=True):
            torch.index_select(pages, 0, blocks, out=_rows(stage.device, region, len(blocks), pages))
        stage.host[: regions.end].copy_(stage.device[: regions.end], non_blocking=True)
        stage.used = self._record()
        stage.pending = (batch, part)

    def _empty(self, stage: _Stage) -> None:
        if stage.pending is not None and stage.used is not None:
            stage.used.wait()
            pieces = _through(stage, *stage.pending)
            copy_pieces(pieces.device, pieces.host, pieces.size)
            stage.pending = None


class _Onboard(_TorchStream):
    def _send(self, batch: Batch, part: Part, stage: _Stage) -> None:
        if stage.used is not None:
            stage.used.wait()  # the link may still be reading the host side
        pieces = _through(stage, batch, part)
        copy_pieces(pieces.host, pieces.device, pieces.size)
        regions = _regions(part)
        stage.device[: regions.end].copy_(stage.host[: regions.end], non_blocking=True)
        blocks = _blocks(part, self._accelerator.device)
        for pages, region in zip(_pages(batch.layout, part), regions.offsets, strict=True):
            pages.index_copy_(0, blocks, _rows(stage.device, region, len(blocks), pages))
        stage.used = self._record()


class _Regions(NamedTuple):
    """Where each reference's rows start in a stage, and where the last one ends, in bytes."""

    offsets: list[int]
    end: int


def _regions(part: Part) -> _Regions:
    sizes = part.widths.astype(np.int64) * part.blocks.size
    aligned = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    ends = np.cumsum(aligned)
    return _Regions((ends - aligned).tolist(), int(ends[-1]))


def _through(stage: _Stage, batch: Batch, part: Part) -> Pieces:
    """The copies between the host side of `stage` (as `device`) and the images."""
    chunks, subs = part.blocks.shape
    rows = np.arange(chunks * subs, dtype=np.uint64).reshape(chunks, 1, subs)
    starts = np.array(_regions(part).offsets, dtype=np.uint64) + np.uint64(stage.host.data_ptr())
    staged = np.add(starts[:, None], rows * part.widths[:, None], dtype=np.uint64)
    images = np.empty_like(staged)
    host_addresses(part, batch.layout.table(part.group), batch.host_address, images)
    sizes = np.broadcast_to(part.widths[:, None], staged.shape)
    return merge(Pieces(staged.reshape(-1), images.reshape(-1), sizes.reshape(-1)))


def _blocks(part: Part, device: torch.device) -> torch.Tensor:
    """Device blocks of `part`, int64, shape `(blocks,)`, on the device."""
    return torch.from_numpy(np.array(part.blocks).reshape(-1)).to(device)


def _pages(layout: KVLayout, part: Part) -> list[torch.Tensor]:
    """For each reference that moves, its pages as `(num_blocks, words)` in the widest words that fit."""
    refs = layout.groups[part.group].refs[part.refs]
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
