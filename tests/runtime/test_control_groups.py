"""Commands to an engine with several KV cache groups, in one cache or each in its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from control_kit import prompt

from longshore.boundary import HOST, Key
from longshore.cache import CacheGroup, CacheSettings, TieredCache, TierSpec
from longshore.keys import chain
from longshore.runtime import Runtime
from longshore.runtime.commands import Commands, ControlledEngine, ControlledGroup

FULL, WINDOW = range(2)
"""Groups of an engine with chunks of 16 and of 32 tokens, the second of which needs the last 48 tokens of a prefix."""


class Several:
    """An engine with two KV cache groups, in one cache or each in its own, and 96 chunks' room in host memory."""

    def __init__(self, *, apart: bool) -> None:
        kinds = CacheGroup(block_size=16), CacheGroup(block_size=32, window=48)
        groups = [kinds[:1], kinds[1:]] if apart else [kinds]
        self.runtimes = [
            Runtime(TieredCache([TierSpec(HOST, 96 // len(groups), 4096)], CacheSettings(groups=each)), [])
            for each in groups
        ]
        self.groups = [
            ControlledGroup(self.runtimes[at * apart], size, window, at * (not apart))
            for at, (size, window) in enumerate(((16, None), (32, 48)))
        ]
        self.commands = Commands(ControlledEngine(lambda: self.groups, self.keys, list))

    def keys(self, tokens: Sequence[int]) -> list[list[Key]]:
        return [chain(bytes([at]) * 32, tokens, group.chunk_tokens) for at, group in enumerate(self.groups)]

    def store(self, at: int, tokens: Sequence[int], chunks: slice = slice(None)) -> None:
        """Make chunks of a prompt in a group ready."""
        group, keys = self.groups[at], self.keys(tokens)[at]
        with group.runtime.batch() as cache:
            slot, taken = cache.stats()[0].used, list(enumerate(keys))[chunks]
            parents = [keys[number - 1] if number and at == FULL else None for number, _ in taken]
            cache.adopt(HOST, [(slot + n, key, parents[n], 0) for n, (_, key) in enumerate(taken)])

    def ask(self, command: str, **more: object) -> dict[str, Any]:
        answer = self.commands.answer(bytearray(json.dumps({"command": command, **more}).encode()))
        return dict(answer.get("ok", answer))


@pytest.fixture(params=[False, True], ids=["one cache", "a cache each"])
def several(request: pytest.FixtureRequest) -> Iterator[Several]:
    engine = Several(apart=request.param)
    yield engine
    for runtime in engine.runtimes:
        with runtime.locked() as cache:
            cache.check_integrity()
        runtime.close()


def test_a_lookup_of_several_groups_says_what_all_serve(several: Several) -> None:
    tokens = prompt(1, chunks=9)
    several.store(FULL, tokens, slice(0, 7))
    several.store(WINDOW, tokens, slice(1, 3))
    found = several.ask("lookup", tokens=tokens)
    assert (found["tokens"], found["leading_tokens"]) == (128, 96)
    assert found["groups"][FULL] == {"chunks": 9, "leading": 7, "runs": [{"tier": HOST, "chunks": 7}]}
    windows = [{"tier": tier, "chunks": count} for tier, count in (("none", 1), (HOST, 2), ("none", 1))]
    assert found["groups"][WINDOW] == {"chunks": 4, "leading": 0, "runs": windows}
    assert several.ask("lookup", tokens=tokens[:64])["leading_tokens"] == 0  # its window has lost a chunk
    assert "use tokens" in several.ask("lookup", keys=["00" * 32])["message"]


def test_a_pin_of_several_groups_leases_what_the_prefix_needs(several: Several) -> None:
    tokens = prompt(1, chunks=9)
    several.store(FULL, tokens)
    several.store(WINDOW, tokens)
    assert several.ask("pin", tokens=tokens) == {"chunks": 10, "pinned": 10}  # 8 and 2
    assert several.ask("stats")["pinned_chunks"] == 10
    for group in several.groups:
        with group.runtime.batch() as cache:
            cache.evict(HOST, 1000)
    left = several.ask("lookup", tokens=tokens)
    assert left["leading_tokens"] == 128
    assert [run["chunks"] for run in left["groups"][WINDOW]["runs"]] == [2, 2]
    assert several.ask("unpin", tokens=tokens) == {"unpinned": 10}
    assert several.ask("clear") == {"dropped": {HOST: 10}, "left": {HOST: 0}}
    assert several.ask("pin", tokens=tokens) == {"chunks": 10, "pinned": 0}


def test_the_limit_of_pins_counts_all_groups_and_changes_nothing(several: Several) -> None:
    for number in range(1, 4):
        several.store(FULL, prompt(number, chunks=8))
        several.store(WINDOW, prompt(number, chunks=8))
    fit = 24 // 10 if len(several.runtimes) == 1 else 12 // 8  # of one cache, or of the first one
    for number in range(fit):
        assert several.ask("pin", tokens=prompt(1 + number, chunks=8))["pinned"] == 10
    before = [runtime_held(runtime) for runtime in several.runtimes]
    assert several.ask("pin", tokens=prompt(1 + fit, chunks=8))["error"] == "PinLimitError"
    assert [runtime_held(runtime) for runtime in several.runtimes] == before
    assert several.ask("stats")["pinned_chunks"] == 10 * fit


def runtime_held(runtime: Runtime) -> int:
    with runtime.locked() as cache:
        return cache.leases
