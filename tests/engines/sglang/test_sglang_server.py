"""A real server, one after the other over the same files: what returns comes from files, with the same tokens."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sglang_kit import PAGE, Answer, Server, check, check_threads, damage, prompt, serialized, write_model

TOKENS, SERVED = 400, 384
"""Of a prompt, and of these as many as whole pages before the last token have."""

PROMPTS = 8
"""More than device and host memory have room for together: 1024 tokens and twice as many."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def models(place: Path) -> tuple[Path, Path]:
    """Two models of one shape, with other weights."""
    return write_model(place / "model", seed=0), write_model(place / "other", seed=1)


@pytest.fixture(scope="module")
def server(place: Path, models: tuple[Path, Path]) -> Iterator[Server]:
    tier = {"file_path": str(place / "tier"), "file_size": "64MiB", "load_timeout": 20}
    with Server(models[0], place / "log", tier=tier) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(server: Server) -> dict[int, Answer]:
    """What the server says when it computes a prompt as a whole, by seed."""
    return {seed: server.ask(prompt(seed, TOKENS)) for seed in range(PROMPTS)}


def test_answers_depend_on_the_whole_prompt(oracle: dict[int, Answer], server: Server) -> None:
    assert all(answer.cached == 0 for answer in oracle.values())
    assert len({tuple(answer.tokens) for answer in oracle.values()}) == PROMPTS
    changed = prompt(0, TOKENS)
    changed[5] += 1
    assert server.ask(changed).tokens != oracle[0].tokens


def test_the_engines_own_variation(oracle: dict[int, Answer], server: Server) -> None:
    """A prompt whose head the device still has gives the same tokens."""
    last = PROMPTS - 1
    server.ask(prompt(last, TOKENS))
    again = server.ask(prompt(last, TOKENS))
    assert (again.device, again.cached) == (SERVED, SERVED)
    check(again, oracle[last])


def test_prompts_evicted_from_device_and_host_come_from_files(oracle: dict[int, Answer], server: Server) -> None:
    came = []
    for seed in range(PROMPTS):
        answer = server.ask(prompt(seed, TOKENS))
        check(answer, oracle[seed])
        assert answer.cached == SERVED
        came.append(answer.storage)
    assert max(came) == SERVED


def test_a_flushed_cache_is_read_from_files(oracle: dict[int, Answer], server: Server) -> None:
    server.flush()
    answer = server.ask(prompt(0, TOKENS))
    check(answer, oracle[0])
    assert (answer.storage, answer.cached) == (SERVED, SERVED)


def test_the_next_turn_of_a_conversation_continues_from_files(oracle: dict[int, Answer], server: Server) -> None:
    longer = [*prompt(1, TOKENS), *oracle[1].tokens, *prompt(50, 200)]
    server.flush()
    answer = server.ask(longer)
    assert answer.storage >= SERVED
    whole = (len(longer) - 1) // PAGE * PAGE
    assert server.ask_storage(longer, answer, whole).storage == whole
    # Half of it on the device, the rest in files only.
    server.flush()
    check(server.ask(prompt(1, TOKENS)), oracle[1])
    rest = server.ask(longer)
    assert rest.device + rest.host >= SERVED
    assert rest.storage > 0
    check(rest, answer)


def test_a_killed_tier_host_costs_time_only(oracle: dict[int, Answer], server: Server) -> None:
    (pid,) = server.processes("longshore.runtime.tier_host.child")
    os.kill(pid, signal.SIGKILL)
    for seed in range(3):
        server.flush()
        check(server.ask(prompt(seed, TOKENS)), oracle[seed])
    assert "tier host" in server.text()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        server.flush()
        answer = server.ask(prompt(2, TOKENS))
        check(answer, oracle[2])
        if answer.storage == SERVED:
            break
    assert answer.storage == SERVED
    assert server.processes("longshore.runtime.tier_host.child") != [pid]


def test_a_stopped_tier_host_holds_nothing_up(oracle: dict[int, Answer], server: Server) -> None:
    (pid,) = server.processes("longshore.runtime.tier_host.child")
    os.kill(pid, signal.SIGSTOP)
    try:
        server.flush()
        answer = server.ask(prompt(3, TOKENS))
        check(answer, oracle[3])
        assert answer.storage == 0
        fresh = server.ask(prompt(60, TOKENS))  # is stored as far as there is room
        assert fresh.cached == 0
    finally:
        os.kill(pid, signal.SIGCONT)
    server.flush()
    check(server.ask(prompt(3, TOKENS)), oracle[3])


def test_metrics_of_ours_are_on_the_servers_page(oracle: dict[int, Answer], server: Server) -> None:
    server.flush()
    server.ask(prompt(0, TOKENS))
    found = re.findall(r"^longshore_(hit|miss)_chunks_total{(.*)} ([0-9.]+)$", server.metrics(), re.MULTILINE)
    hits = sum(float(count) for kind, labels, count in found if kind == "hit" and 'tier="file"' in labels)
    assert hits >= SERVED / PAGE
    assert server.metric("longshore_hit_tokens_total", tier="file", pool="kv") == hits * PAGE
    assert all('tp_rank="0"' in labels for _, labels, _ in found)
    assert server.metric("longshore_file_failures_total", reason="tier_host") >= 1


def test_aborted_requests_leave_a_server_that_serves(oracle: dict[int, Answer], server: Server) -> None:
    with ThreadPoolExecutor() as threads:
        asked = [threads.submit(server.ask, prompt(70 + each, TOKENS), 400) for each in range(3)]
        while not server.metric("sglang:num_running_reqs"):
            assert not any(each.done() for each in asked)
            time.sleep(0.05)
        server.post("/abort_request", {"abort_all": True}, parse=False)
        ended = [each.result() for each in asked]
    assert any(len(answer.tokens) < 400 for answer in ended)
    server.flush()
    check(server.ask(prompt(0, TOKENS)), oracle[0])


def test_corrupt_records_are_computed(oracle: dict[int, Answer], server: Server, place: Path) -> None:
    server.flush()
    damage(place / "tier" / "rank-0-of-1" / "segment")
    before = server.metric("longshore_file_failures_total", reason="read_corrupt")
    for seed in range(PROMPTS):
        check(server.ask(prompt(seed, TOKENS)), oracle[seed])
    assert server.metric("longshore_file_failures_total", reason="read_corrupt") > before
    assert server.ask_storage(prompt(0, TOKENS), oracle[0], SERVED).storage == SERVED  # as computed again


def test_full_disk_costs_the_file_tier_alone(oracle: dict[int, Answer], server: Server) -> None:
    (pid,) = server.processes("longshore.runtime.tier_host.child")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))  # each write ends with EFBIG, as if the disk were full
    seed = 80
    while not server.metric("longshore_file_failures_total", reason="read_only"):
        answer = server.ask(prompt(seed, TOKENS))
        assert answer.cached == 0
        seed += 1
        assert seed < 200
    assert server.metric("longshore_file_failures_total", reason="write_no_space") >= 8
    server.flush()
    check(server.ask(prompt(0, TOKENS)), oracle[0])
    assert server.ask(prompt(seed, TOKENS)).cached == 0


def test_no_thread_of_sglang_saw_an_exception(server: Server) -> None:
    check_threads(server.text())


def test_files_serve_after_a_restart_but_not_other_weights(
    oracle: dict[int, Answer], server: Server, place: Path, models: tuple[Path, Path]
) -> None:
    server.flush()
    with ThreadPoolExecutor() as threads:  # it ends with work in flight
        asked = threads.submit(server.ask, prompt(90, TOKENS), 500)
        while not server.metric("sglang:num_running_reqs"):
            assert not asked.done()
            time.sleep(0.05)
        server.close()
        with contextlib.suppress(Exception):
            asked.result()
    assert not server.processes()
    tier = {"file_path": str(place / "tier"), "file_size": "64MiB"}
    with Server(models[0], place / "log-2", tier=tier) as next_one:
        for seed in range(PROMPTS):
            answer = next_one.ask(prompt(seed, TOKENS))
            check(answer, oracle[seed])
            assert (answer.storage, answer.cached) == (SERVED, SERVED)
        next_one.post("/update_weights_from_disk", {"model_path": str(models[1])})
        of_others = next_one.ask(prompt(0, TOKENS))
        assert (of_others.storage, of_others.cached) == (0, 0)
        assert of_others.tokens != oracle[0].tokens
        assert next_one.ask_storage(prompt(0, TOKENS), of_others, SERVED).storage == SERVED  # of the new weights
        # The first weights again, from tensors: there is no telling that they are the same.
        tensors = list(load_file(models[0] / "model.safetensors").items())
        for path, body in (
            ("/begin_weight_update", {}),
            ("/update_weights_from_tensor", {"serialized_named_tensors": [serialized(tensors)]}),
            ("/end_weight_update", {}),
        ):
            assert next_one.post(path, body)["success"]
        answer = next_one.ask(prompt(0, TOKENS))
        check(answer, oracle[0])
        assert (answer.storage, answer.cached) == (0, 0)
        assert next_one.ask_storage(prompt(0, TOKENS), oracle[0], SERVED).storage == SERVED
        check_threads(next_one.text())
    shutil.rmtree(place / "tier")
