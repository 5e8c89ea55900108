"""How a node was used, in 16 bits; and what follows from them.

bit    15      14 ... 10                            9 ... 3                               2 ... 0
       held    bit length of the request            0 out │ 1 ends a prompt, not used     class of the gap before
               that used it last                    since │ 2 once │ ... │ 65 often       its last use
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

OUT, LEAF, ONCE = (use << 3 for use in range(3))
MOST_USES = 64
GAP, USES, HOW, STATE, HELD = 0x7, 0x3F8, 0x3FF, 0x7FFF, 0x8000
"""Bits of the gap, of uses, of both, of all but whether it is held; and that one."""

REQUEST = 10
"""The lowest bit of the request's length."""

GAPS = 6
"""Classes of gaps in requests: none, 1, 2 to 7, 8 to 31, 32 to 127, 128 and more."""

KINDS = 1 + 8 * GAPS
"""0: ends a prompt, not used since; then by uses (1, 2, 3, 4 to 7, 8 to 15, 16 to 31, 32 to 63, more) and gap."""

AGES = 27
"""0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ... requests, two classes for each doubling; the last one is without end."""

AGE_BEGINS = (0, 1, *((2 + half) << level for level in range(12) for half in (0, 1)), 2 << 12)
OLDEST = AGE_BEGINS[-1]

WEIGHTS: Sequence[float] = [(64 / (0.75 * 2.0**bits)) ** 0.5 for bits in range(32)]
"""What a chunk counts for, by the bit length of its request: chunks of long requests come back together."""


def _kind_of(how: int) -> int:
    uses = (how >> 3) - 1
    return (
        0 if uses < 1 else 1 + GAPS * (uses - 1 if uses < 4 else min(uses.bit_length(), 7)) + min(how & GAP, GAPS - 1)
    )


KIND_OF = bytes(map(_kind_of, range(HOW + 1)))
"""The kind by the bits of `HOW`."""

KINDS_OF = np.frombuffer(KIND_OF, np.uint8)

AGAIN = array("H", [0] * 8 + [ONCE + 8 * min(max(how >> 3, 2) - 1, MOST_USES - 1) for how in range(8, HOW + 1)])
"""The uses after another one, by the bits of `HOW`."""

AGE_OF = np.repeat(np.arange(AGES, dtype=np.uint8), np.diff([*AGE_BEGINS, OLDEST + 1])).tobytes()
"""The class of an age in requests, which is at most `OLDEST`."""

AGES_OF = np.frombuffer(AGE_OF, np.uint8)

GAP_OF = bytes(0 if not begin else 1 + sum(begin >= each for each in (2, 8, 32, 128)) for begin in AGE_BEGINS)
"""The class of a gap by its age class."""
