"""What tests of traces share: small random traces, and where the whole conversation trace may be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
CONVERSATION = "shared/traces/mooncake_conversation.jsonl"


def whole_trace() -> Path:
    """The conversation trace beside the repository; a test that needs it is skipped, and says so, without it."""
    places = [parent / CONVERSATION for parent in ROOT.parents]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        pytest.skip(f"the whole conversation trace is not at {places[0]}")
    return found


def prompts(*, blocks: int = 12, requests: int = 20) -> st.SearchStrategy[list[list[int]]]:
    """Requests whose blocks form trees: the parent of a block, if it has one, is always the same."""

    def path(leaf: int, fan: int) -> list[int]:
        up = [leaf]
        while up[-1] >= fan:
            up.append(up[-1] // fan - 1)
        return up[::-1]

    leaves = st.lists(st.integers(0, blocks - 1), max_size=requests)
    return st.builds(lambda leaves, fan: [path(leaf, fan) for leaf in leaves], leaves, st.integers(1, 4))
