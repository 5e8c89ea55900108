"""Prefill on one engine and decode on another: blocks go from tiers to tiers, and what goes wrong costs time only.

Each engine is in a network namespace of its own, where the machine allows to make them (root); else they have two
addresses of the loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_runs import CONNECTOR, Answers, Serve, Served, Zygote, ask_oracle, asked, prompts, run_engine
from tiny_models import save

PROMPT = prompts()[0]
STEPS = {"max_num_batched_tokens": 128}
"""A prompt is computed in several steps, so that something can happen between them."""
LOAD_TIMEOUT = 500.0
"""Longer than an engine takes on a busy machine, and shorter than a test waits for one."""


class Place(NamedTuple):
    """Where an engine runs: its address, and the command that runs another one there."""

    address: str
    prefix: list[str]


@contextlib.contextmanager
def places() -> Iterator[list[Place]]:
    """Two, which have a wire between them."""
    names = [f"longshore-{os.getpid()}-{number}" for number in range(2)]
    wires = [f"ls{os.getpid() % 10**6}-{number}" for number in range(2)]
    found = [Place(f"10.231.77.{number + 1}", ["ip", "netns", "exec", name]) for number, name in enumerate(names)]
    with contextlib.ExitStack() as undo:
        try:
            for name in names:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
            ip("link", "add", wires[0], "netns", names[0], "type", "veth", "peer", "name", wires[1], "netns", names[1])
            for name, wire, place in zip(names, wires, found, strict=True):
                ip("-n", name, "addr", "add", f"{place.address}/24", "dev", wire)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", wire, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            warnings.warn(f"no network namespaces, so engines have addresses of loopback: {error}", stacklevel=1)
            undo.close()
            found = [Place(f"127.0.0.{number + 2}", []) for number in range(2)]
        yield found


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Pair:
    """Two engines at a time, which share nothing but a network."""

    def __init__(self, directory: Path, places: list[Place], zygotes: list[Zygote]) -> None:
        self.directory, self.places, self.zygotes = directory, places, zygotes
        self.host = places[0].address
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._pool = ThreadPoolExecutor(2)
        self._model = save("llama", directory)

    def run(self, at: int, steps: list[list[Any]], **extra: Any) -> Future[Served]:
        """Begin an engine that takes `steps`."""
        directory = self.directory / f"engine {at}"
        directory.mkdir()
        settings = {"host_size": "96MiB", "gate": False, "load_timeout": LOAD_TIMEOUT, **extra}
        more = {"saved": self._model, "connector": CONNECTOR, "options": STEPS}
        return self._pool.submit(run_engine, self.zygotes[at], directory, "llama", steps, settings, 160, **more)

    def prefiller(self, steps: list[list[Any]]) -> Future[Served]:
        return self.run(0, steps, serve=f"valkey://{self.host}:{self.port}")

    def decoder(self, steps: list[list[Any]]) -> Future[Served]:
        url = "valkey://peer?probe_timeout=5s&fetch_timeout=20s&connect_timeout=5s"
        return self.run(1, steps, peer_networks=f"{self.host}/32", peer_url=url)

    def asked(self, tokens: list[int]) -> list[Any]:
        """The step of a decoder that answers a prompt with the blocks of the prefiller."""
        return ["ask_peer", tokens, self.port, self.host]

    def close(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module")
def two_places() -> Iterator[list[Place]]:
    with places() as found:
        yield found


@pytest.fixture(scope="module")
def zygotes(two_places: list[Place]) -> Iterator[list[Zygote]]:
    made = [Zygote(["env", f"VLLM_HOST_IP={place.address}", *place.prefix]) for place in two_places]
    yield made
    for zygote in made:
        zygote.close()


@pytest.fixture
def pair(tmp_path: Path, two_places: list[Place], zygotes: list[Zygote]) -> Iterator[Pair]:
    made = Pair(tmp_path, two_places, zygotes)
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
            *(["wait_for", ready], pair.asked(PROMPT), ["touch", done]),
            *(["wait_for", begun], pair.asked(second), ["touch", over]),
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
    decoder = pair.decoder([["wait_for", begun], pair.asked(PROMPT), *asked([PROMPT])])
    answer, again = decoder.result().answers
    with pytest.raises(AssertionError, match="exit status -9"):  # the fault has fired
        prefiller.result()
    assert alike(answer, oracle[0])
    assert answer["seconds"] < LOAD_TIMEOUT
    assert answer["cached"] < len(PROMPT) // 32 * 32
    assert alike(again, oracle[3])
