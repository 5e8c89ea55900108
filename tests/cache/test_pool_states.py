"""The table of states is the law: what it does not have cannot happen."""

from itertools import product

import pytest

from longshore.cache import EDGES, SlotState
from longshore.cache.pool import STATES, SlotPool, transition
from longshore.errors import StateError

LEGAL = {
    ("free", "filling"),
    ("free", "ready"),
    ("filling", "ready"),
    ("filling", "free"),
    ("filling", "draining"),
    ("ready", "free"),
    ("ready", "draining"),
    ("draining", "free"),
}


def test_the_table_has_these_edges_and_says_what_each_means() -> None:
    assert {(before.value, after.value) for before, after in EDGES} == LEGAL
    assert all(EDGES.values())


@pytest.mark.parametrize(("before", "after"), list(product(SlotState, SlotState)))
def test_a_slot_moves_along_legal_edges_only(before: SlotState, after: SlotState) -> None:
    pool = SlotPool(1)
    old, new = STATES.index(before), STATES.index(after)
    pool.state[0] = old
    if (before.value, after.value) in LEGAL:
        assert transition(old, new) == new
        pool.move(0, new)
        assert pool.state[0] == new
    else:
        with pytest.raises(StateError, match=f"cannot go from {before.value} to {after.value}"):
            pool.move(0, new)
        assert pool.state[0] == old
