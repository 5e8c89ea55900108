"""How often a node was used, whether it ends a prompt, and whether it is held, in one byte; and what follows from it.

0 out │ 1 ends a prompt │ 2 once │ 3 twice │ ... │ 33 often          + 64 while it is held
"""

from __future__ import annotations

from longshore.cache.eviction.promise import MOST_USES, kind_of

OUT, LEAF, ONCE = range(3)
_MOST = ONCE + MOST_USES - 1
HELD = 64

KIND_OF = bytes([0, kind_of(0), *map(kind_of, range(1, MOST_USES + 1))])
"""The kind of what is not held."""

USED_AGAIN = bytes([OUT, ONCE + 1, *(min(use + 1, _MOST) for use in range(ONCE, _MOST + 1))])
"""What it is after another use."""


def _of_bytes(table: bytes) -> bytes:
    """`table` for what may be held, to translate bytes by."""
    return (table.ljust(HELD, b"\0") * 4)[:256]


KINDS_OF, USES_AGAIN = _of_bytes(KIND_OF), _of_bytes(USED_AGAIN)
KINDS_AGAIN = _of_bytes(USED_AGAIN.translate(KINDS_OF))
"""The same for many: their kinds, their uses after another one, and their kinds after that."""
