"""Fixtures of the tests of the loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from loop_kit import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def threads() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before, "a thread is left"
