"""Copies inside the device: validation of all ids, and the pages that move.

For partial reuse: a request that shares the first tokens of another request's block gets its own block, with the pages
of those tokens copied. The source block may be in flight; the copy then waits for it, like any other job.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from longshore.boundary import DEVICE, Item, Section, Slot
from longshore.errors import PlanError
from longshore.layout.model import KVLayout
from longshore.transfer.batch import I64, Batch, Part
from longshore.transfer.selection import Selection, block_ids, check_layers, check_sections, page_widths, repeated


def select_inside(
    layout: KVLayout,
    sections: Sequence[Section],
    items: Sequence[Item],
    *,
    layers: tuple[int, int] | None = None,
    tokens: int | None = None,
) -> Selection:
    """Check every id and say what moves.

    Args:
        layout: Where pages lie.
        sections: Blocks that are written, per group.
        items: One per block, in order; its source is the device slot to copy from: the group's pool, and a block.
        layers: As for `select`.
        tokens: As for `select`.

    Raises:
        PlanError: Ids out of range or not consumed exactly, a block written twice, or both written and read.
        FreedLayoutError: The device memory is gone.
    """
    layout.check_live()
    check_sections(layout, sections)
    given = sum(len(section.blocks) for section in sections)
    if given != len(items):
        raise PlanError(f"expected one item per block: the sections have {given} blocks, got {len(items)} items")
    check_layers(layout, layers)
    last = max((index for index, section in enumerate(sections) if section.blocks), default=-1)
    parts: list[Part] = []
    item = 0
    for index, section in enumerate(sections):
        if not section.blocks:
            continue
        own = items[item : item + len(section.blocks)]
        parts += _parts(layout, section, own, item, layers, tokens if index == last else None)
        item += len(section.blocks)
    whole = Batch(layout, layout.generation, DEVICE, 0, tuple(parts))
    counts = tuple((section.group, len(section.blocks)) for section in sections)
    selection = Selection(whole, np.zeros(item, dtype=np.int64), counts)
    _check_apart(selection)
    return selection


def _parts(
    layout: KVLayout,
    section: Section,
    items: Sequence[Item],
    first: int,
    layers: tuple[int, int] | None,
    tokens: int | None,
) -> list[Part]:
    blocks = block_ids(section, layout.num_blocks)
    sources = np.array([_source(layout, section.group, item, first + at) for at, item in enumerate(items)])
    pages, leading = page_widths(layout, section.group, layers, tokens)
    if not len(pages.widths):
        return []
    whole = len(blocks) if leading is None else len(blocks) - 1
    cuts = [(0, whole, pages), (whole, len(blocks), leading or pages)]
    return [
        Part(
            group=section.group,
            first_ref=moved.first_ref,
            widths=moved.widths,
            blocks=blocks[start:stop, None],
            images=np.zeros(stop - start, dtype=np.int64),
            sub=0,
            item=first + start,
            sources=sources[start:stop, None],
            split=moved.split,
        )
        for start, stop, moved in cuts
        if start < stop
    ]


def _source(layout: KVLayout, group: int, item: Item, index: int) -> int:
    slot, pool = item.source, layout.pools[group]
    if not isinstance(slot, Slot) or (slot.tier, slot.pool) != (DEVICE, pool) or item.destination is not None:
        raise PlanError(
            f"item {index}: expected a slot of device pool {pool} to copy from, got {slot} into {item.destination}"
        )
    if not isinstance(slot.index, int) or not 0 <= slot.index < layout.num_blocks:
        raise PlanError(f"item {index}: block {slot.index} does not lie in [0, {layout.num_blocks})")
    if item.valid != 1:
        raise PlanError(f"item {index}: expected valid=0x1 for a copy of one block, got {item.valid:#x}")
    return slot.index


def _check_apart(selection: Selection) -> None:
    sources: dict[int, I64] = selection.sources()
    for pool, blocks in selection.blocks().items():
        twice = repeated(blocks)
        if twice is not None:
            raise PlanError(f"block {twice} of device pool {pool} would be written twice")
        both = np.intersect1d(blocks, sources[pool])
        if len(both):
            raise PlanError(f"block {both[0]} of device pool {pool} would be both written and read")
