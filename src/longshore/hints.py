"""What a request says of its own blocks: whether they are stored, how long they are worth keeping, what may be read.

    {"store": false}                                              nothing of it is stored
    {"load": ["host"]}                                            files are not read for it; [] reads nothing
    {"retention": [{"end": 4096, "priority": 90, "seconds": 600}, {"start": 4096, "priority": 10}]}

Priorities lie in [0, 100], 35 where nothing is said. The lowest is evicted first, whatever its age. When its `seconds`
are over, a block has 35 again. After the retention settings of TensorRT-LLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from longshore.boundary import FILE, HOST
from longshore.cache.retention import DEFAULT_PRIORITY, HIGHEST_PRIORITY, Retention
from longshore.errors import HintError

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenRange(BaseModel):
    """Tokens `[start, end)` of a request, the answer included, and what they are worth; `end` `None` is all behind."""

    model_config = _STRICT

    start: int = Field(default=0, ge=0)
    end: int | None = Field(default=None, ge=1)
    priority: int = Field(default=DEFAULT_PRIORITY, ge=0, le=HIGHEST_PRIORITY)
    seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        if self.end is not None and self.end <= self.start:
            raise ValueError(f"expected start before end, got {self.start} and {self.end}")
        return self


class RequestHints(BaseModel):
    """Hints of one request.

    Attributes:
        store: Whether its blocks are stored.
        load: Tiers that may be read for it; blocks come by way of host memory, so `file` is named beside `host` alone.
        retention: Of ranges that overlap the one with the highest priority counts.
    """

    model_config = _STRICT

    store: bool = True
    load: tuple[Literal["host", "file"], ...] = Field(default=("host", "file"), strict=False)
    retention: tuple[TokenRange, ...] = Field(default=(), strict=False, max_length=64)

    @model_validator(mode="after")
    def _loads_by_host_memory(self) -> Self:
        if FILE in self.load and HOST not in self.load:
            raise ValueError("load must name host if it names file: blocks of files are loaded through host memory")
        return self

    @classmethod
    def parse(cls, said: Mapping[str, Any] | str) -> RequestHints:
        """Hints as a JSON object, or its text. Raises `HintError`, which names the field, its value and what may be."""
        try:
            found = json.loads(said) if isinstance(said, str) else said
        except ValueError:
            found = said
        if not isinstance(found, Mapping):
            raise HintError(f"request hints: expected an object, got {str(said)[:60]!r}")
        try:
            return cls.model_validate(dict(found))
        except ValidationError as error:
            raise HintError(f"request hints: {_problems(error)}") from None

    def chunks(self, chunk_tokens: int, first: int = 0) -> tuple[Retention, ...]:
        """The retention of chunks of so many tokens, counted from the chunk `first` of the request on."""
        ranges = (
            Retention.of_tokens(each.start, each.end, each.priority, each.seconds, chunk_tokens=chunk_tokens)
            for each in self.retention
        )
        moved = (
            each._replace(first=max(0, each.first - first), end=None if each.end is None else each.end - first)
            for each in ranges
        )
        return tuple(each for each in moved if each.end is None or each.end > each.first)


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'the object'}: {each['msg']}, got {str(each.get('input'))[:60]!r}"
        for each in error.errors()
    )
