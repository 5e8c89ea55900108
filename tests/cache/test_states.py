"""The table of states is the law: what it does not have cannot happen."""

from itertools import product

import pytest

from longshore.cache import EDGES, State
from longshore.cache.index import Copy, Entry
from longshore.cache.states import step
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


@pytest.mark.parametrize(("before", "after"), list(product(State, State)))
def test_a_copy_moves_along_legal_edges_only(before: State, after: State) -> None:
    copy = Copy(Entry(bytes(32), None, 1), 0, 0)
    copy.state = before
    if (before.value, after.value) in LEGAL:
        assert step(before, after) is after
        copy.move(after)
        assert copy.state is after
    else:
        with pytest.raises(StateError, match=f"cannot go from {before.value} to {after.value}"):
            copy.move(after)
        assert copy.state is before
