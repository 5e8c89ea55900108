"""Siblings unlinked together leave the same tree as siblings that leave one by one."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

from longshore.cache.nodes import NodeTree

NODES = 40


def tree() -> NodeTree:
    """First chunks 1 to 20, in two calls; and behind the third of them 21 to 40, one after the other."""
    made = NodeTree(NODES + 1)
    for first in (1, 11):
        made.link_trees(np.zeros(10, np.int32), np.arange(first, first + 10, dtype=np.int32))
    for node in range(21, NODES + 1):
        made.append(3, [node])
    return made


def links(each: NodeTree) -> list[list[int]]:
    """The children of both parents, from either end."""
    found = []
    for parent in (0, 3):
        down = list(islice(each.children(parent), NODES))
        up = [down[-1]] if down else []
        while up and each.younger[up[-1]] and len(up) < NODES:
            up.append(each.younger[up[-1]])
        found += [down, up]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_together_is_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    begins = [dice.choice(range(20)), dice.choice(range(20, NODES))]
    parts = [
        [*range(begin + 1, min(begin + dice.randrange(1, 12), end) + 1)]
        for begin, end in zip(begins, (20, 40), strict=True)
    ]
    leaving = [node for part in parts for node in dice.choice([part, part[::-1], dice.sample(part, len(part))])]
    leaving = [node for node in leaving if node != 3]
    together, singly = tree(), tree()
    at = np.array(leaving, np.int32)
    parents = np.array([together.parent[node] for node in leaving], np.int32)
    runs = list(together.siblings(at, parents))
    for eldest, youngest, parent, _ in runs:
        together.unlink_siblings(eldest, youngest, parent)
    for node in leaving:
        singly.unlink(node, singly.parent[node])
    assert links(together) == links(singly)
    assert sum(count for *_, count in runs) == len(leaving)


def test_a_path_ends_with_its_length_or_with_its_head() -> None:
    assert tree().path(40, 1).tolist() == [40]
    assert tree().path(40, 9).tolist() == [40, 3]
    assert tree().path(0, 9).tolist() == []


def test_chunks_stored_together_are_one_run_from_the_eldest() -> None:
    at = np.arange(20, 10, -1, dtype=np.int32)
    assert list(tree().siblings(at, np.zeros(10, np.int32))) == [(20, 11, 0, 10)]
