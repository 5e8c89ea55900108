"""File tiers in a directory of the test's own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.testing import TierHarness, TierTests
from longshore.testing.tier_harness import span
from longshore.tiers.arena import Arena
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.file import io as file_io

IMAGE = TierTests.image_bytes
SCOPE = bytes(range(32))


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(32 * span(IMAGE))
    yield arena
    arena.close()


@pytest.fixture
def on_ext4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the temporary directory is on: its files have direct I/O, and that is all that a queue needs."""
    monkeypatch.setattr(file_io, "file_system_of", lambda device: "ext4")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def opener(arena: Arena, directory: Path) -> Iterator[Callable[..., FileTier]]:
    """Opens tiers in `directory`, and closes them all in the end."""
    opened = []

    def open_one(
        slots: int = TierTests.slots,
        image_bytes: int | tuple[int, ...] = IMAGE,
        kind: type[FileTier] = FileTier,
        **changes: Any,
    ) -> FileTier:
        """With several sizes, `capacity` must be said."""
        if isinstance(image_bytes, int):
            changes = {"capacity": capacity_for(slots, image_bytes), **changes}
        opened.append(kind(directory, arena=arena, **{"image_bytes": image_bytes, "scope": SCOPE, **changes}))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


@pytest.fixture
def harness_of(arena: Arena, opener: Callable[..., FileTier]) -> Callable[..., TierHarness]:
    """A harness around a tier that is opened with settings of the test's choice."""
    return lambda **settings: TierHarness(lambda: opener(**settings), arena)


@pytest.fixture
def harness(harness_of: Callable[..., TierHarness]) -> TierHarness:
    return harness_of()
