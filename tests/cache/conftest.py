"""What the random paths over the cache share."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from cache_machine import PUBLIC

from longshore.cache import TieredCache, load

SLOW = (
    "test_state_machine",
    "test_state_machine_groups",
    "test_state_machine_device",
    "test_state_machine_cascade",
    "test_gate",
    "test_spans",
    "test_evict_batches",
    "test_determinism",
)
"""Modules that take seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes last, so that with `-x` a run ends soon where something is wrong."""
    items.sort(key=lambda item: SLOW.index(item.path.stem) if item.path.stem in SLOW else -1)


@pytest.fixture
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here have five chunks: let them be loaded in several parts, too."""
    monkeypatch.setattr(load, "LOAD_BATCH", 2)


@pytest.fixture
def methods_called(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The public methods and properties of `TieredCache` that this test has used."""
    called: set[str] = set()

    def spied(name: str, method: Any) -> Any:
        def spy(self: TieredCache, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return method(self, *args, **kwargs)

        return spy

    for name in PUBLIC:
        member = inspect.getattr_static(TieredCache, name)
        spy = property(spied(name, member.fget)) if isinstance(member, property) else spied(name, member)
        monkeypatch.setattr(TieredCache, name, spy)
    return called
