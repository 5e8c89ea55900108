"""`longshore top` over real engines: a `PrefixStore` with its endpoint, one that has gone, one that is stopped."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from longshore.cli.monitoring import _tables
from longshore.config import Config
from longshore.engines.transformers import PrefixStore
from longshore.metrics import serve_metrics
from longshore.monitoring.scrape import address_of, scrape, summary
from longshore.testing.local_server import free_port

LONGSHORE = Path(sys.executable).with_name("longshore")
INTERRUPTIBLE = ("env", "--default-signal=INT", str(LONGSHORE))
"""A shell starts what it runs in the background with SIGINT ignored, and children inherit that."""

BLOCK = 32


def top(*arguments: str, status: int = 0, timeout: str = "60") -> str:
    plain = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    command = [LONGSHORE, "top", "--timeout", timeout, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def told(*arguments: str, status: int = 0) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(top(*arguments, "--once", "--json", status=status))["engines"]
    return found


@pytest.fixture(scope="module")
def store() -> Iterator[PrefixStore]:
    """A store with one prefix of eight blocks, which was restored once; another one was not found."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    tokens = [int(token) for token in torch.randint(0, 256, (8 * BLOCK,))]
    with torch.no_grad():
        cache = model(torch.tensor([tokens]), past_key_values=DynamicCache(), use_cache=True).past_key_values
    with PrefixStore(model, Config.make(host_size="1MiB"), block_size=BLOCK) as opened:
        assert opened.store_prefix(tokens, cache) == 8 * BLOCK
        assert opened.restore_prefix(tokens)[1] == 8 * BLOCK
        assert opened.restore_prefix([0] * (2 * BLOCK))[1] == 0
        yield opened


@pytest.fixture
def address(store: PrefixStore) -> Iterator[str]:
    with serve_metrics(store.collector, "127.0.0.1:0") as server:
        yield server.address


def test_a_running_store_is_shown_with_its_hits_and_misses(address: str) -> None:
    (engine,) = told(address)
    assert (engine["state"], engine["hit_ratio"], engine["seconds"]) == ("up", 0.8, None)
    assert {reason: count for reason, count in engine["misses"].items() if count} == {"absent": 2}
    (host,) = engine["tiers"]
    assert (host["tier"], host["available"], host["hits"], host["hit_ratio"]) == ("host", True, 8, 0.8)
    assert host["load_seconds"] > 0
    assert host["capacity_bytes"] <= 1 << 20
    assert engine["bytes_out"] == engine["bytes_in"] == host["used_bytes"]
    text = top(address, "--once")
    assert "80.0%" in text
    assert "absent" in text


def test_absent_engine_is_shown_with_the_others(address: str) -> None:
    gone = f"127.0.0.1:{free_port()}"
    up, away = told(address, gone, status=1)
    assert (up["state"], away["state"], away["error"]) == ("up", "away", "Connection refused")
    text = top(address, gone, "--once", status=1)
    assert [gone, "away:", "Connection", "refused"] in [line.split() for line in text.splitlines()]
    assert "80.0%" in text


@pytest.mark.parametrize("columns", [60, 80])
def test_narrow_terminals_get_whole_numbers_addresses_and_errors(address: str, columns: int) -> None:
    gone = f"127.0.0.1:{free_port()}"
    found = [summary(scrape(address_of(each), 60.0)) for each in (address, gone)]
    for tier in found[0]["tiers"]:
        tier.update(capacity_bytes=(1 << 30) - 1, evicted=1_234_567, dropped=1_234_567, load_seconds=1.2345)
    out = io.StringIO()
    Console(file=out, width=columns).print(_tables({"engines": found}))
    text = out.getvalue()
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert all(text.count(each) for each in (address, gone, "80.0%", "100.0%", "1,234,567", "refused", "absent"))
    assert ("1234.5 ms" in text) is ("load time" in text)


def test_an_engine_that_is_stopped_is_away() -> None:
    code = "from http.server import *; HTTPServer(('127.0.0.1', %d), BaseHTTPRequestHandler).serve_forever()"
    port = free_port()
    child = subprocess.Popen([sys.executable, "-c", code % port], stderr=subprocess.DEVNULL)
    try:
        while scrape(address_of(f"127.0.0.1:{port}"), 60).error == "Connection refused":
            time.sleep(0.05)
        assert scrape(address_of(f"127.0.0.1:{port}"), 60).error == "HTTP 501"
        child.send_signal(signal.SIGSTOP)
        text = top(f"127.0.0.1:{port}", "--once", status=1, timeout="0.2")
        assert "away: no answer in time" in text
    finally:
        child.kill()
        child.wait()


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """The address of a server that answers with `body`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"longshore_x{", b"\xff\xfe", b"other_metric 1\n", b"longshore_x 1e\n"]
)
def test_an_answer_that_is_no_metrics_is_away(body: bytes) -> None:
    with answering(body) as address:
        found = summary(scrape(address_of(address), 60.0))
    assert found["state"] == "away"
    assert found["error"]


def test_values_that_are_no_numbers_are_left_out() -> None:
    body = b'longshore_hit_chunks_total{tier="host"} 2\nlongshore_capacity_bytes{tier="host"} NaN\n'
    with answering(body + b'longshore_moved_bytes_total{route="host->device"} +Inf\n') as address:
        assert "100.0%" in top(address, "--once")
        (engine,) = told(address)
    assert (engine["tiers"][0]["capacity_bytes"], engine["bytes_in"]) == (None, 0)


def test_addresses_with_brackets_are_shown_whole() -> None:
    address = f"[fd00::1]:{free_port()}"
    assert f"{address}   away:" in top(address, "--once", status=1, timeout="0.2")


def test_what_happened_between_two_readings_is_shown(address: str, store: PrefixStore) -> None:
    url = address_of(address)
    before = scrape(url, 60.0)
    store.restore_prefix([1] * (3 * BLOCK))
    after = scrape(url, 60.0)
    found = summary(after, before)
    asked = ("longshore_requests_total", frozenset[tuple[str, str]]())
    assert after.samples[asked] - before.samples[asked] == 1
    assert found["misses"]["absent"] == 3
    assert found["hit_ratio"] == 0
    assert found["seconds"] == after.at - before.at
    restarted = summary(before, after)  # counters went back
    assert (restarted["seconds"], restarted["misses"]["absent"]) == (None, 2)


def test_a_terminal_is_updated_until_it_is_interrupted(address: str) -> None:
    ours, theirs = pty.openpty()
    command = [*INTERRUPTIBLE, "top", address, "--interval", "0.1", "--timeout", "60"]
    running = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "150"}
    )
    os.close(theirs)
    seen = b""
    while seen.count(b"absent") < 1 or seen.count(address.encode()) < 3:
        seen += os.read(ours, 65536)
    running.send_signal(signal.SIGINT)
    while True:  # so that it is not held up by what nobody reads
        try:
            if not os.read(ours, 65536):
                break
        except OSError:
            break
    assert running.wait() == 130
    os.close(ours)


def test_a_pipe_gets_lines_of_json_only(address: str) -> None:
    assert "use --once" in top(address, status=2)
    running = subprocess.Popen([*INTERRUPTIBLE, "top", address, "--json", "--interval", "0.1"], stdout=subprocess.PIPE)
    assert running.stdout is not None
    first, second = (json.loads(running.stdout.readline())["engines"][0] for _ in range(2))
    running.send_signal(signal.SIGINT)
    running.communicate()
    assert (first["seconds"], first["hit_ratio"] is None) == (None, False)
    assert second["seconds"] >= 0.1
    assert second["hit_ratio"] is None  # nothing was looked up between the two


@pytest.mark.parametrize("bad", ["ftp://x", "http://", "x:y", "http://[", ""])
def test_an_invalid_address_says_what_is_expected(bad: str) -> None:
    assert "such as http://127.0.0.1:9464" in top(bad, "--once", status=2)
