"""How deep tests look: `make test` as far as minutes allow, HYPOTHESIS_PROFILE=nightly as far as an hour does."""

import os
from typing import Any, TypeVar

from hypothesis import settings

T = TypeVar("T")

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


def deep(few: T, many: T) -> T:
    """`many` where there is an hour, else `few`."""
    return many if NIGHTLY else few


def examples(count: int, **more: Any) -> settings:
    """So many examples where the profile has a hundred, else more or fewer by the same share."""
    profile = settings()
    return settings(profile, max_examples=max(1, round(count * profile.max_examples / 100)), **more)
