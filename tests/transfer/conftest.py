"""An engine over gated copies for each test that asks for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    for gate in made.device.gates.values():
        gate.open()
    made.engine.close()
