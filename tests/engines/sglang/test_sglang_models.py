"""Real servers of other models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_kit import Answer, Server, check, check_threads, damage, prompt, write_hybrid_model, write_window_model

from longshore.runtime.control import ask

TOKENS, SERVED = 400, 384
SEEDS = range(3)


def test_sliding_windows_of_which_sglang_keeps_all_tokens(tmp_path: Path) -> None:
    """SGLang has no host pool of its own for the windows of Gemma 3: all layers keep whole prompts."""
    tier = {"file_path": str(tmp_path / "tier"), "file_size": "64MiB"}
    with Server(write_window_model(tmp_path / "model"), tmp_path / "log", tier=tier) as running:
        oracle = [running.ask(prompt(seed, TOKENS)) for seed in range(3)]
        assert len({tuple(answer.logprobs) for answer in oracle}) == 3
        for seed, expected in enumerate(oracle):
            answer = running.ask_storage(prompt(seed, TOKENS), expected, SERVED)
            assert (expected.cached, answer.storage, answer.cached) == (0, SERVED, SERVED)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("hybrid")
    made.chmod(0o700)
    write_hybrid_model(made / "model")
    return made


def tier(place: Path) -> dict[str, object]:
    return {
        "file_path": str(place / "tier"),
        "file_size": "64MiB",
        "load_timeout": 20,
        "control": str(place / "one.ctl"),
    }


@pytest.fixture(scope="module")
def hybrid(place: Path) -> Iterator[Server]:
    with Server(place / "model", place / "log", tp=2, tier=tier(place)) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(hybrid: Server) -> dict[int, Answer]:
    """What the server says when it computes a prompt as a whole, and again when the device has it."""
    found = {seed: hybrid.ask(prompt(seed, TOKENS)) for seed in SEEDS}
    assert all(answer.cached == 0 for answer in found.values())
    again = hybrid.ask(prompt(SEEDS[-1], TOKENS))
    assert again.device
    check(again, found[SEEDS[-1]])
    return found


def test_a_pool_of_windows_is_read_from_files(oracle: dict[int, Answer], hybrid: Server) -> None:
    assert "hybrid_swa=True" in hybrid.text()
    for seed in SEEDS:
        answer = hybrid.ask_storage(prompt(seed, TOKENS), oracle[seed], SERVED)
        assert (answer.storage, answer.cached) == (SERVED, SERVED)
    for rank in ("0", "1"):
        assert hybrid.metric("longshore_hit_chunks_total", tier="file", pool="swa", tp_rank=rank) >= len(SEEDS) * 4
    assert len(hybrid.processes("longshore.runtime.tier_host.child")) == 4


def test_commands_concern_each_rank_and_both_pools(oracle: dict[int, Answer], hybrid: Server, place: Path) -> None:
    """Of the engine's keys and windows: the prompts of the test before are in files."""

    def command(rank: int, what: str, **more: object) -> dict[str, Any]:
        return ask(place / f"one-rank-{rank}-of-2.ctl", {"command": what, **more}, 60.0)

    for rank in range(2):
        found = command(rank, "lookup", tokens=prompt(0, SERVED))
        assert (found["tokens"], found["leading_tokens"]) == (SERVED, SERVED)
        assert found["groups"][0]["runs"] == [{"tier": "file", "chunks": SERVED // 16}]
        assert found["groups"][1]["runs"][-1] == {"tier": "file", "chunks": 4}
        assert command(rank, "pin", tokens=prompt(0, SERVED))["pinned"] == SERVED // 16 + 4
        dropped = command(rank, "clear")["dropped"]
        assert dropped["file"] >= SERVED // 16 + 4
        assert command(rank, "lookup", tokens=prompt(0, SERVED))["leading_tokens"] == 0
    hybrid.flush()
    computed = hybrid.ask(prompt(0, TOKENS))
    check(computed, oracle[0])
    assert computed.cached == 0
    for seed in SEEDS:
        hybrid.ask_storage(prompt(seed, TOKENS), oracle[seed], SERVED)


def test_the_next_turn_continues_from_the_last_window(oracle: dict[int, Answer], hybrid: Server) -> None:
    longer = [*prompt(0, TOKENS), *oracle[0].tokens, *prompt(50, 200)]
    hybrid.flush()
    answer = hybrid.ask(longer)
    assert answer.storage >= SERVED  # and the page that the answer completed
    whole = (len(longer) - 1) // 16 * 16
    assert hybrid.ask_storage(longer, answer, whole).storage == whole


def test_windows_that_one_rank_has_lost_are_computed(oracle: dict[int, Answer], hybrid: Server, place: Path) -> None:
    hybrid.flush()
    damage(place / "tier" / "rank-1-of-2-swa" / "segment")
    for seed in SEEDS:
        check(hybrid.ask(prompt(seed, TOKENS)), oracle[seed])
    assert hybrid.metric("longshore_file_failures_total", reason="read_corrupt", pool="swa", tp_rank="1") >= 1
    for seed in SEEDS:  # what was computed is stored again
        assert hybrid.ask_storage(prompt(seed, TOKENS), oracle[seed], SERVED).storage == SERVED


def test_killed_tier_hosts_of_windows_cost_time_only(oracle: dict[int, Answer], hybrid: Server) -> None:
    for pid in hybrid.processes("longshore.runtime.tier_host.child"):
        os.kill(pid, signal.SIGKILL)
    hybrid.flush()
    check(hybrid.ask(prompt(0, TOKENS)), oracle[0])
    assert hybrid.ask_storage(prompt(1, TOKENS), oracle[1], SERVED).storage == SERVED
    assert hybrid.metric("longshore_file_failures_total", reason="tier_host", pool="swa") >= 2
    check_threads(hybrid.text())


def test_windows_are_read_after_a_restart(oracle: dict[int, Answer], hybrid: Server, place: Path) -> None:
    for seed in SEEDS:
        hybrid.ask_storage(prompt(seed, TOKENS), oracle[seed], SERVED)
    hybrid.close()
    with Server(place / "model", place / "log-2", tp=2, tier=tier(place)) as running:
        for seed in SEEDS:
            answer = running.ask(prompt(seed, TOKENS))
            check(answer, oracle[seed])
            assert (answer.storage, answer.cached) == (SERVED, SERVED)
        check_threads(running.text())
