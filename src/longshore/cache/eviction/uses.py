"""How a node was used, in 20 bits; and what follows from them.

bit    19      18 ... 14              13 ... 10           9 ... 3                               2 ... 0
       held    bit length of the      its hint            0 out │ 1 ends a prompt, not used     class of the gap before
               request that used it   (`returns`)         since │ 2 once │ ... │ 65 often       its last use
               last
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from longshore.cache.eviction.returns import HINTS

OUT, LEAF, ONCE = (use << 3 for use in range(3))
MOST_USES = 64
GAP, USES, HOW, STATE, HELD = 0x7, 0x3F8, 0x3FFF, 0x7FFFF, 0x80000
"""Bits of the gap, of uses, of these and the hint, of all but whether it is held; and that one."""

HINT, REQUEST = 10, 14
"""The lowest bits of the hint, and of the request's length."""

GAPS = 6
"""Classes of gaps in requests: none, 1, 2 to 7, 8 to 31, 32 to 127, 128 and more."""

PLAIN = 1 + 8 * GAPS
"""Kinds without a hint. 0: ends a prompt, not used since; then by uses (1, 2, 3, 4 to 7, 8 to 15, 16 to 31, 32 to 63,
more) and gap."""

HINTED_GAPS = 3
HINTED = 1 + 3 * HINTED_GAPS
"""Kinds of each hint: the same by uses (1, 2 to 7, more) and gap (at most 1, at most 31, more)."""

KINDS = PLAIN + (HINTS - 1) * HINTED

AGES = 27
"""0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ... requests, two classes for each doubling; the last one is without end."""

AGE_BEGINS = (0, 1, *((2 + half) << level for level in range(12) for half in (0, 1)), 2 << 12)
OLDEST = AGE_BEGINS[-1]

WEIGHTS: Sequence[float] = [(64 / (0.75 * 2.0**bits)) ** 0.5 for bits in range(32)]
"""What a chunk counts for, by the bit length of its request: chunks of long requests come back together."""


def _kind_of(how: int) -> int:
    uses, gap, hint = ((how & USES) >> 3) - 1, min(how & GAP, GAPS - 1), min(how >> HINT, HINTS - 1)
    if not hint:
        return 0 if uses < 1 else 1 + GAPS * (uses - 1 if uses < 4 else min(uses.bit_length(), 7)) + gap
    first = PLAIN + (hint - 1) * HINTED
    return first if uses < 1 else first + 1 + HINTED_GAPS * ((uses > 1) + (uses > 7)) + gap // 2


KIND_OF = bytes(map(_kind_of, range(HOW + 1)))
"""The kind by the bits of `HOW`."""

KINDS_OF = np.frombuffer(KIND_OF, np.uint8)

AGAIN = array("H", [0] * 8 + [ONCE + 8 * min(max(how >> 3, 2) - 1, MOST_USES - 1) for how in range(8, USES + 8)])
"""The uses after another one, by the bits of uses and gap."""

AGE_OF = np.repeat(np.arange(AGES, dtype=np.uint8), np.diff([*AGE_BEGINS, OLDEST + 1])).tobytes()
"""The class of an age in requests, which is at most `OLDEST`."""

AGES_OF = np.frombuffer(AGE_OF, np.uint8)

GAP_OF = bytes(0 if not begin else 1 + sum(begin >= each for each in (2, 8, 32, 128)) for begin in AGE_BEGINS)
"""The class of a gap by its age class."""
