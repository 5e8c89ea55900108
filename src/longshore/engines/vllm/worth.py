"""Load or recompute, for vLLM: up to which token of a prompt chunks are worth reading from a colder tier.

vLLM asks chunk by chunk, and loads the longest prefix that it was promised. So what is computed sooner than it is read
is not promised: all chunks that end behind the token where reading stops to pay. The chunks of the group that vLLM asks
for first stand for those of all groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile

from vllm.v1.kv_offload.base import OffloadKey

from longshore.boundary import FILE, HOST
from longshore.cache import Gate, Presence, Run
from longshore.engines.vllm.keys import GROUP_BYTES

_TIER = {Presence.READY: HOST, Presence.IN_FLIGHT: HOST, Presence.COLDER: FILE}


def worth_until(
    gate: Gate | None,
    ends: Mapping[OffloadKey, int],
    found: Sequence[Presence],
    first: OffloadKey,
    now: float,
) -> float:
    """The token up to which to load, of a prompt that is computed up to the chunk `first`; infinity if nobody knows.

    Args:
        ends: For each chunk, in order, the token that it ends with.
        found: Where each of them is.
    """
    if gate is None or first not in ends:
        return math.inf
    group = first[-GROUP_BYTES:]
    mine = sorted(
        (end, _TIER.get(presence, ""))
        for (key, end), presence in zip(ends.items(), found, strict=True)
        if key[-GROUP_BYTES:] == group
    )
    computed = ends[first] - mine[0][0]
    chain = list(takewhile(lambda chunk: chunk[1], (chunk for chunk in mine if chunk[0] > computed)))
    runs = [Run(tier, len(list(same))) for tier, same in groupby(tier for _, tier in chain)]
    count = gate.worth_loading(computed, runs, now)
    return chain[count - 1][0] if count else computed
