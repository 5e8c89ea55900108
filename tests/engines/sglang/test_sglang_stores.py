"""Real servers that share a Valkey server: what one has computed, the other reads; and a store that is gone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sglang_kit import PAGE, Answer, Server, check, check_threads, prompt, write_model

from longshore.testing.local_server import LocalServer

TOKENS, SERVED = 400, 384
SEEDS = range(3)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("stores")
    write_model(made / "model")
    return made


@pytest.fixture(scope="module")
def valkey(place: Path) -> Iterator[LocalServer]:
    with LocalServer("valkey", place / "valkey") as running:
        yield running


@pytest.fixture(scope="module")
def servers(place: Path, valkey: LocalServer) -> Iterator[list[Server]]:
    patient = "probe_timeout=10s&fetch_timeout=60s&write_timeout=60s"
    remote = f"valkey://127.0.0.1:{valkey.port}/0?{patient}"
    tier = {"remote": remote, "host_size": "16MiB", "load_timeout": 60}
    with (
        Server(place / "model", place / "one", tier=tier) as one,
        Server(place / "model", place / "other", tier=tier) as other,
    ):
        yield [one, other]


@pytest.fixture(scope="module")
def oracle(servers: list[Server], valkey: LocalServer) -> dict[int, Answer]:
    found = {seed: servers[0].ask(prompt(seed, TOKENS)) for seed in SEEDS}
    assert all(answer.cached == 0 for answer in found.values())
    wait_for_pages(valkey, len(SEEDS) * SERVED // PAGE)
    servers[0].flush()
    return found


def wait_for_pages(valkey: LocalServer, count: int) -> None:
    """Until so many pages are in the store: they are written behind SGLang's back."""
    deadline = time.monotonic() + 120
    while int(valkey.command(b"DBSIZE").strip(b":\r\n")) < count:
        assert time.monotonic() < deadline, valkey.command(b"DBSIZE")
        time.sleep(0.05)


def test_what_one_server_has_computed_the_other_reads(oracle: dict[int, Answer], servers: list[Server]) -> None:
    for seed in SEEDS:
        answer = servers[1].ask(prompt(seed, TOKENS))
        check(answer, oracle[seed])
        assert (answer.storage, answer.cached) == (SERVED, SERVED)
    assert servers[1].metric("longshore_probed_chunks_total", answer="present") >= len(SEEDS) * SERVED / 16


def test_a_conversation_goes_on_at_another_server(
    oracle: dict[int, Answer], servers: list[Server], valkey: LocalServer
) -> None:
    """Its beginning is in memory there: stores are asked for what follows."""
    one, other = servers
    longer = [*prompt(0, TOKENS), *oracle[0].tokens, *prompt(50, 200)]
    answer = one.ask(longer)
    wait_for_pages(valkey, len(SEEDS) * SERVED // PAGE + 192 // PAGE)
    one.flush()
    check(other.ask(prompt(0, TOKENS)), oracle[0])
    again = other.ask(longer)
    check(again, answer)
    assert again.device + again.host >= SERVED
    assert again.storage >= 192


def test_a_stopped_store_costs_nothing_but_its_pages(
    oracle: dict[int, Answer], servers: list[Server], valkey: LocalServer
) -> None:
    one, other = servers
    fresh = one.ask(prompt(20, TOKENS))
    one.flush()
    valkey.kill()
    answer = other.ask(prompt(20, TOKENS))
    check(answer, fresh)
    assert answer.cached == 0
    assert other.metric("longshore_store_failures_total") >= 1
    other.flush()
    for seed in SEEDS:
        check(other.ask(prompt(seed, TOKENS)), oracle[seed])
    for server in servers:
        check_threads(server.text())
