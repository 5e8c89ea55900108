"""The tier of docs/extending.md, as it is printed there: the conformance suite, and a stack with it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longshore.boundary import FILE, HOST
from longshore.cache import GroupKeys
from longshore.config import Config
from longshore.keys import Scope
from longshore.layout import from_rows
from longshore.runtime.stack import open_stack
from longshore.tiers.base import Tier
from longshore.transfer.device import device_for

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"

PRINTED: dict[str, Any] = {"__name__": __name__}
for _body in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
    exec(_body, PRINTED)  # noqa: S102 - our own page

BufferTier: Any = PRINTED["BufferTier"]
TestPrintedTier: Any = PRINTED["TestBufferTier"]

KEYS = [hashlib.sha256(bytes([i])).digest() for i in range(3)]


def test_a_stack_opens_it_in_place_of_the_file_tier(tmp_path: Path) -> None:
    def make(directory: Path, *, capacity: int, image_bytes: tuple[int, ...], arena: Any, **others: Any) -> Any:
        assert others.keys() == {"scope", "threads"}
        (size,) = image_bytes
        return BufferTier(np.zeros(capacity // size * size, np.uint8), image_bytes=size, arena=arena)

    rows = torch.randint(0, 256, (8, 6000), dtype=torch.uint8, generator=torch.manual_seed(1))
    layout = from_rows(rows, pages_per_block=6, block_size=10)
    scope = Scope(model="m", weights="w", dtype="d", layout=layout.fingerprint, block_size=10)
    config = Config.make(host_size="256KiB", file_path=tmp_path / "kv", file_size="1MiB", background=False)
    expected = rows[:3].clone()
    with open_stack(config, layout, scope, device_for(layout), open_file_tier=make) as stack:
        with stack.runtime.batch() as cache:
            job = cache.store({0: GroupKeys(KEYS)}, {0: [0, 1, 2]})[0].job
        assert job is not None and stack.runtime.wait_jobs([job], 10) and stack.runtime.flush(10)
        with stack.runtime.batch() as cache:
            assert cache.discard(KEYS, HOST) == len(KEYS)
            lease = cache.lookup({0: GroupKeys(KEYS)}, stack.runtime.clock()).lease
            assert lease is not None
            cache.load(lease, {0: [5, 6, 7]})
        assert stack.runtime.wait_load(lease, 10).outcome.sources == (FILE,) * 3
        with stack.runtime.batch() as cache:
            cache.release(lease)
    assert torch.equal(rows[5:], expected)


FORMER_METHODS = [
    ("forget", "reset"), ("is_away", "is_unavailable"), ("others", "other_scope_slots"), ("trouble", "degraded_reason")
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), FORMER_METHODS)
def test_a_tier_with_a_former_method_name_is_refused(old: str, new: str) -> None:
    with pytest.raises(TypeError, match=rf"Old.{old} is not called any more: rename it to {new}"):
        type("Old", (Tier,), {old: lambda self: None})
    with pytest.raises(TypeError, match=f"rename it to {new}"):
        type("Old", (type("Mixin", (), {old: lambda self: None}), Tier), {})


def test_former_names_of_a_tier_return_the_new_ones(harness: Any) -> None:
    with pytest.warns(DeprecationWarning, match="others was renamed: use other_scope_slots"):
        assert harness.tier.others() == harness.tier.other_scope_slots()
    with pytest.warns(DeprecationWarning, match="trouble was renamed: use degraded_reason"):
        assert harness.tier.trouble == harness.tier.degraded_reason
