"""Tiny models run faster on one thread, far faster when something else runs beside them, and always alike."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """For a `conftest.py` to import: torch does not divide its sums among threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
