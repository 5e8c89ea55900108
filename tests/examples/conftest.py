"""The examples are run from the repository's root, and are no part of the package."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits are compared: torch must not divide its sums among threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
