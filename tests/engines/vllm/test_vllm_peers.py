"""Prefill on one engine and decode on another: blocks go from tiers to tiers, and what goes wrong costs time only."""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_runs import CONNECTOR, Answers, Serve, Served, Zygote, ask_oracle, asked, prompts, run_engine
from tiny_models import save

PROMPT = prompts()[0]
STEPS = {"max_num_batched_tokens": 128}
"""A prompt is computed in several steps, so that something can happen between them."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Pair:
    """Two engines at a time, which share nothing but a network."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.port = directory, free_port()
        self._zygotes = [Zygote(), Zygote()]
        self._pool = ThreadPoolExecutor(2)
        self._model = save("llama", directory)

    def run(self, at: int, steps: list[list[Any]], **extra: Any) -> Future[Served]:
        """Begin an engine that takes `steps`."""
        directory = self.directory / f"engine {at}"
        directory.mkdir()
        settings = {"host_size": "96MiB", "gate": False, "load_timeout": 60.0, **extra}
        options = {"max_num_batched_tokens": 128}
        return self._pool.submit(
            run_engine,
            self._zygotes[at],
            directory,
            "llama",
            steps,
            settings,
            160,
            connector=CONNECTOR,
            options=options,
        )

    def prefiller(self, steps: list[list[Any]]) -> Future[Served]:
        return self.run(0, steps, serve=f"valkey://127.0.0.1:{self.port}")

    def decoder(self, steps: list[list[Any]]) -> Future[Served]:
        return self.run(
            1, steps, peer_networks="127.0.0.0/8", peer_url="valkey://peer?probe_timeout=5s&fetch_timeout=20s"
        )

    def close(self) -> None:
        for zygote in self._zygotes:
            zygote.close()
        self._pool.shutdown()


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    made = Pair(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle(serve: Serve) -> Answers:
    """Three cold answers, then three warm ones, of one engine."""
    return ask_oracle(serve, "llama", options=STEPS)


def alike(answer: dict[str, Any], other: dict[str, Any]) -> bool:
    return (answer["tokens"], answer["logprobs"]) == (other["tokens"], other["logprobs"])


def test_a_decoder_answers_as_its_prefiller_would(pair: Pair, oracle: Answers, tmp_path: Path) -> None:
    """First from what the prefiller has; then from what it computes meanwhile, which is waited for."""
    ready, done, begun, over = (str(tmp_path / name) for name in ("ready", "done", "begun", "over"))
    second = prompts()[1]
    prefills = [["ask", PROMPT], ["settle"], ["touch", ready], ["wait_for", done]]
    slowly = [["slow_down", 0.5, begun], ["ask", second], ["settle"], ["wait_for", over]]
    prefiller = pair.prefiller([*prefills, *slowly])
    decoder = pair.decoder(
        [
            *(["wait_for", ready], ["ask_peer", PROMPT, pair.port], ["touch", done]),
            *(["wait_for", begun], ["ask_peer", second, pair.port], ["touch", over]),
        ]
    )
    first, later = decoder.result().answers
    served = prefiller.result()
    assert alike(first, oracle[3])  # as an engine that had all of it on the device
    assert (first["cached"], later["cached"]) == (len(PROMPT) // 32 * 32, len(second) // 32 * 32)
    assert alike(later, oracle[4])
    counted = decoder.result().counters
    assert counted["hits"]["peers"] == len(PROMPT) // 32 + len(second) // 32
    assert counted["held"] == served.counters["held"] == 0


def test_a_prefiller_that_is_killed_midway_costs_time_only(pair: Pair, oracle: Answers, tmp_path: Path) -> None:
    begun = str(tmp_path / "begun")
    prefiller = pair.prefiller([["slow_down", 1.0, begun, 3], ["ask", PROMPT]])
    decoder = pair.decoder([["wait_for", begun], ["ask_peer", PROMPT, pair.port], *asked([PROMPT])])
    answer, again = decoder.result().answers
    with pytest.raises(AssertionError, match="exit status -9"):  # the fault has fired
        prefiller.result()
    assert alike(answer, oracle[0])
    assert answer["seconds"] < 45.0
    assert answer["cached"] < len(PROMPT) // 32 * 32
    assert alike(again, oracle[3])
