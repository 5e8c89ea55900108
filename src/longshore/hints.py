"""Hints of a request: whether its blocks are stored, their priority, tiers to load from, and when they are used again.

    {"store": false}                                              its blocks are not stored
    {"load": ["host"]}                                            loads from host memory only; [] loads nothing
    {"retention": [{"end": 4096, "priority": 90, "seconds": 600}, {"start": 4096, "priority": 10}]}
    {"ends": true}                                                nobody will come back to it
    {"returns_in": 12.5}                                          the next request follows in 12.5 s: a tool is running
    {"class": "batch"}                                            when its blocks are used again is learned apart

Priorities are in [0, 100]; the default is 35. Blocks with the lowest priority are evicted first, whatever their age.
After `seconds`, the priority of a block is 35 again. Modelled on the retention settings of TensorRT-LLM.

The default eviction policy learns from `ends`, `returns_in` and `class` how far they hold; wrong ones lose their effect
(`docs/eviction.md`). Of the classes, the first three named have hit rates of their own, and the others share them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from longshore.boundary import FILE, HOST, REMOTE
from longshore.cache.eviction_policies.hit_rates import ReuseHint
from longshore.cache.settings import DEFAULT_PRIORITY, HIGHEST_PRIORITY, Retention
from longshore.errors import HintError

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenRange(BaseModel):
    """Priority of the tokens `[start, end)` of a request, answer included; `end` `None` is the end of the request."""

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
        load: Tiers to load from. Loads go through host memory, so `file` and `remote`, all stores, require `host`.
        retention: Priorities of token ranges; where ranges overlap, the highest applies.
        ends: Nobody will come back to it: its session is over.
        returns_in: Seconds from its start until the next request that continues it.
        kind: Name of a class of requests that return alike; `class` in JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_by_name=True, validate_by_alias=True)

    store: bool = True
    load: tuple[Literal["host", "file", "remote"], ...] = Field(default=("host", "file", "remote"), strict=False)
    retention: tuple[TokenRange, ...] = Field(default=(), strict=False, max_length=64)
    ends: bool = False
    returns_in: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    kind: str = Field(default="", alias="class", max_length=64)

    @model_validator(mode="after")
    def _loads_by_host_memory(self) -> Self:
        for tier in (FILE, REMOTE):
            if tier in self.load and HOST not in self.load:
                raise ValueError(f"load must name host if it names {tier}: its blocks are loaded through host memory")
        return self

    @model_validator(mode="after")
    def _ends_or_returns(self) -> Self:
        if self.ends and self.returns_in is not None:
            raise ValueError("expected ends or returns_in, got both")
        return self

    @property
    def reuse_hint(self) -> ReuseHint | None:
        """What they say about when its blocks are used again, for the first lookup."""
        found = ReuseHint(self.ends, self.returns_in, self.kind)
        return None if found == ReuseHint() else found

    @classmethod
    def parse(cls, said: Mapping[str, Any] | str) -> RequestHints:
        """Hints from a JSON object or its text. Raises `HintError`, which names field, value and what is allowed."""
        try:
            found = json.loads(said) if isinstance(said, str) else said
        except (ValueError, RecursionError):
            found = said
        if not isinstance(found, Mapping):
            raise HintError(f"request hints: expected an object, got {_shown(said)}")
        try:
            return cls.model_validate(dict(found))
        except ValidationError as error:
            raise HintError(f"request hints: {_problems(error)}") from None

    def chunks(self, chunk_tokens: int, first: int = 0) -> tuple[Retention, ...]:
        """The retention in chunks of `chunk_tokens` tokens, counted from chunk `first` of the request."""
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
        f"{'.'.join(map(str, each['loc'])) or 'the object'}: {each['msg'].removeprefix('Value error, ')}, "
        f"got {_shown(each.get('input'))}{_known(each)}"
        for each in error.errors()
    )


def _shown(value: object) -> str:
    try:
        return repr(str(value)[:60])
    except RecursionError:
        return "an object or list that is nested too deep"


def _known(detail: Any) -> str:
    """For an unknown field, those that there are where it was found."""
    if detail["type"] != "extra_forbidden":
        return ""
    model: type[BaseModel] = RequestHints if len(detail["loc"]) == 1 else TokenRange
    return f"; known are {', '.join(field.alias or name for name, field in model.model_fields.items())}"
