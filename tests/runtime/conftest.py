"""Fixtures of the tests of the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from loop_kit import Rig

from depth import NIGHTLY


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Conformance with a process for each test: of each table its first and last row; all of them at night."""
    rows: dict[str, list[pytest.Item]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.cls is not None and item.cls.__name__.startswith("TestHosted"):
            rows.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out = [item for row in rows.values() for item in row[1:-1] if not NIGHTLY]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before, "a thread is left"
