"""The copies of one transfer, as the engine's devices make them: validated ids, then addresses and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from longshore.boundary import HOST, Section
from longshore.layout.model import U64, KVLayout
from longshore.transfer.copy_plan import plan_copy
from longshore.transfer.pieces import PieceBuilder


class Copies(NamedTuple):
    source: U64
    destination: U64
    size: U64


def plan(
    layout: KVLayout,
    sections: Sequence[Section],
    images: Any,
    *,
    destination: str,
    planner: PieceBuilder | None = None,
    any_order: bool = True,
    **options: Any,
) -> Copies:
    whole = plan_copy(layout, sections, images, destination=destination, **options).batch
    device, host, size = (planner or PieceBuilder()).build(whole, any_order=any_order)
    return Copies(device, host, size) if destination == HOST else Copies(host, device, size)
