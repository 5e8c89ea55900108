"""Copies inside one tier: what is in the way of a smaller size moves below it.

    slots   0 ──────────── new size ──────── old size
            free ◄──────────────── in the way             slab by slab, each image at its place in the slab

A chunk stays where it is, and can be read, until its copy is in place; only then its slot changes. So a move that fails
has changed nothing, but for a source that turned out to be unusable, which is lost like any other.
"""

from __future__ import annotations

from itertools import repeat

from longshore.cache.flow import Flow
from longshore.cache.jobs import Side
from longshore.cache.states import FREE, READY
from longshore.errors import CapacityError


def make_way(flow: Flow, tier: int, slabs: int) -> int | None:
    """Order all that lies in slabs from `slabs` on to free ones below, by one job; `None` if nothing does.

    Raises `CapacityError`, and changes nothing, while jobs work on something there, or if there is no room below.
    """
    store, pool = flow.store, flow.store.pools[tier]
    stride, state = pool.slabs.stride, pool.state
    sources = [slot for slot in range(slabs * stride, pool.capacity) if state[slot] != FREE]
    if not sources:
        return None
    if any(state[slot] != READY or pool.readers[slot] for slot in sources):
        raise CapacityError(f"jobs work on some of the {len(sources)} slots from {slabs * stride} on")
    above = sorted({slot // stride for slot in sources})
    free = [slab for slab in range(slabs) if not any(state[slab * stride : (slab + 1) * stride])]
    if len(free) < len(above):
        raise CapacityError(f"{len(above)} slabs from {slabs} on are taken, {len(free)} below it are free")
    to = dict(zip(above, free, strict=False))
    targets = [to[slot // stride] * stride + slot % stride for slot in sources]
    pool.reserve(targets, [pool.pool_of(slot) for slot in sources])
    job, nodes = flow.new_id(), [pool.node[slot] for slot in sources]
    pool.writer.update(zip(targets, repeat(job), strict=False))
    for slot in sources:
        pool.readers[slot] += 1
    index = store.index
    keys, parents = [index.key[node] for node in nodes], index.before(nodes)
    deadline = flow.now + flow.settings.write_timeout
    flow.order(job, keys, parents, Side(tier, sources), Side(tier, targets), deadline=deadline)
    return job
