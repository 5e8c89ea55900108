"""Real servers with two tensor parallel ranks: each finds its own part of a page, and never that of the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_kit import Answer, Server, check, damage, prompt, write_model
from sglang_on_cpu import WITHOUT_RANK

TOKENS, SERVED = 400, 384
SEEDS, OTHERS = range(3), range(10, 13)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ranks")
    write_model(made / "model")
    return made


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Server]:
    tier = {"file_path": str(place / "tier"), "file_size": "64MiB"}
    with Server(place / "model", place / "log", tp=2, tier=tier) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(server: Server) -> dict[int, Answer]:
    found = {seed: server.ask(prompt(seed, TOKENS)) for seed in SEEDS}
    assert all(answer.cached == 0 for answer in found.values())
    return found


def test_ranks_read_their_pages_from_files(oracle: dict[int, Answer], server: Server) -> None:
    for seed in SEEDS:
        answer = server.ask_storage(prompt(seed, TOKENS), oracle[seed], SERVED)
        assert (answer.storage, answer.cached) == (SERVED, SERVED)
    assert len(server.processes("longshore.runtime.tier_host.child")) == 2


def test_a_page_that_one_rank_has_lost_is_computed(oracle: dict[int, Answer], server: Server, place: Path) -> None:
    """All ranks use as much as the one that has least."""
    server.flush()
    damage(place / "tier" / "rank-1-of-2" / "segment")
    answers = [server.ask(prompt(seed, TOKENS)) for seed in SEEDS]
    for seed, answer in zip(SEEDS, answers, strict=True):
        check(answer, oracle[seed])
    assert min(answer.storage for answer in answers) < SERVED
    assert server.metric("longshore_file_failures_total", reason="read_corrupt", tp_rank="1") >= 1
    again = [server.ask_storage(prompt(seed, TOKENS), oracle[seed], SERVED) for seed in SEEDS]
    assert [answer.storage for answer in again] == [SERVED] * len(SEEDS)  # what was computed is stored again


def test_ranks_find_pages_after_restart_in_files_and_store(
    oracle: dict[int, Answer], server: Server, place: Path
) -> None:
    server.close()
    tier = {"file_path": str(place / "tier"), "file_size": "64MiB", **shared(place / "store")}
    with Server(place / "model", place / "log-2", tp=2, tier=tier) as running:
        for seed in SEEDS:
            answer = running.ask(prompt(seed, TOKENS))
            check(answer, oracle[seed])
            assert (answer.storage, answer.cached) == (SERVED, SERVED)
        others = {seed: running.ask(prompt(seed, TOKENS)) for seed in OTHERS}
        running.flush()
    with Server(place / "model", place / "log-3", tp=2, tier=shared(place / "store")) as running:
        for seed, expected in others.items():
            answer = running.ask(prompt(seed, TOKENS))
            check(answer, expected)
            assert (expected.cached, answer.storage, answer.cached) == (0, SERVED, SERVED)


def test_without_the_rank_in_the_address_tokens_are_wrong(oracle: dict[int, Answer], place: Path) -> None:
    """The control of the test before, which can fail: of two parts under one address, both ranks read one."""
    tier = {**shared(place / "mixed"), "host_size": "1MiB"}  # less than all prompts take
    log = place / "log-4"
    with Server(place / "model", log, tp=2, tier=tier, environment={WITHOUT_RANK: "1"}) as running:
        for seed in range(8):
            answer = running.ask(prompt(seed, TOKENS))
            assert seed not in oracle or answer.tokens == oracle[seed].tokens
        running.flush()
        answers = {seed: running.ask(prompt(seed, TOKENS)) for seed in SEEDS}
    assert any(answer.storage for answer in answers.values())
    assert any(answer.tokens != oracle[seed].tokens for seed, answer in answers.items())


def shared(directory: Path) -> dict[str, object]:
    """Settings of a store in a directory, to which all ranks write."""
    directory.mkdir(exist_ok=True)
    return {"remote": f"{directory.as_uri()}?probe_timeout=10s&fetch_timeout=60s", "host_size": "64MiB"}
