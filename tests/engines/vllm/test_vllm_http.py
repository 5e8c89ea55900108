"""vLLM's server with the configuration of docs/vllm.md: OpenAI's API, a restart, and `/metrics`.

The server is started as a module: the command `vllm` of the build for the CPU does not find its own version.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tiny_models import VOCABULARY, save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TIMEOUT = 420.0
BLOCK = 32


class Server:
    """One `vllm serve`, and its port."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self._port = port
        self._log = log

    def wait(self) -> None:
        """Until it answers."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            try:
                self.get("/health")
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-6000:]
                time.sleep(0.2)
            else:
                return

    def get(self, path: str) -> str:
        return self._ask("GET", path)

    def post(self, path: str) -> str:
        return self._ask("POST", path)

    def complete(self, tokens: list[int]) -> list[int]:
        """The tokens that the model says after these."""
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        said: Any = json.loads(self._ask("POST", "/v1/completions", json.dumps({**body, "return_token_ids": True})))
        return list(said["choices"][0]["token_ids"])

    def _ask(self, method: str, path: str, body: str | None = None) -> str:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT)
        connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        assert answer.status == 200, text
        return text

    def metrics(self) -> dict[tuple[str, str], float]:
        """Longshore's samples, by name and the label that is ours."""
        found = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name.startswith("longshore_") and not sample.name.endswith("_created"):
                    ours = {name: value for name, value in sample.labels.items() if name in ("tier", "route", "reason")}
                    found[sample.name, ",".join(ours.values())] = sample.value
        return found


@contextmanager
def serving(model: Path, tier: Path, log: Path) -> Iterator[Server]:
    """A server over the tiers in `tier`, with a device that has room for one conversation; ends as by Ctrl-C."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    longshore = [sys.executable, "-c", "from longshore.cli.app import main; main()"]
    sizes = ["--host-size", "64MiB", "--file-path", str(tier), "--file-size", "128MiB"]
    printed = subprocess.run([*longshore, "vllm-config", *sizes], check=True, capture_output=True, text=True).stdout
    config = json.loads(printed)
    config["kv_connector_extra_config"]["gate"] = False  # which would compute what takes so tiny a model no time
    api = "vllm.entrypoints.openai.api_server"
    command = [sys.executable, "-m", api, "--model", str(model), "--served-model-name", "tiny"]
    device = ["--dtype", "float32", "--enforce-eager", "--num-gpu-blocks-override", "40", "--max-num-seqs", "2"]
    shape = ["--block-size", str(BLOCK), "--max-model-len", "1024", "--port", str(port), "--host", "127.0.0.1"]
    shape += ["--shutdown-timeout", "120"]  # else the engine may be killed before it has written back
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # for /sleep
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *device, *shape, "--kv-transfer-config", json.dumps(config)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = Server(process, port, log)
    try:
        server.wait()
        yield server
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(180)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def speaking_model(directory: Path) -> Path:
    """A tiny model with a tokenizer, which the API wants to have."""
    path = save("llama", directory)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))  # noqa: S106
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0").save_pretrained(path)  # noqa: S106
    return path


def asleep_and_back(server: Server, prompt: list[int], answer: list[int]) -> None:
    """The server sleeps as a scheduler of many servers has it, and finds its blocks; after a reset, none."""
    for mode in ("abort", "wait", "keep"):
        before = server.metrics()["longshore_hit_chunks_total", "host"]
        server.post(f"/sleep?level=1&mode={mode}")
        server.post("/wake_up")
        assert server.complete(prompt) == answer
        assert server.metrics()["longshore_hit_chunks_total", "host"] > before, mode
    before = server.metrics()["longshore_hit_chunks_total", "host"]
    assert json.loads(server.post("/reset_prefix_cache?reset_external=true"))["success"]
    assert server.complete(prompt) == answer
    assert server.metrics()["longshore_hit_chunks_total", "host"] == before


def test_conversation_continues_from_the_file_tier_after_restart(tmp_path: Path) -> None:
    model, chooser = speaking_model(tmp_path), random.Random(1)
    first = [chooser.randrange(3, VOCABULARY) for _ in range(301)]
    with serving(model, tmp_path / "tier", tmp_path / "first.log") as server:
        before = server.metrics()
        assert before["longshore_hit_chunks_total", "file"] == 0
        assert before["longshore_capacity_bytes", "file"] == 0  # nothing has been asked, so nothing has been told
        answer = server.complete(first)
        assert len(answer) == 40
        second = [*first, *answer, *(chooser.randrange(3, VOCABULARY) for _ in range(25))]
        other = server.complete([7, *first])  # a device of 40 blocks keeps both
        assert server.complete([7, *first]) == other
        told = server.metrics()
        assert told["longshore_hit_chunks_total", "file"] == 0
        assert told["longshore_moved_bytes_total", "device->host"] > 0
        assert told["longshore_capacity_bytes", "file"] > 0
    with serving(model, tmp_path / "tier", tmp_path / "second.log") as server:
        answer = server.complete(second)
        told = server.metrics()
        asleep_and_back(server, second, answer)
    # All whole blocks of the first turn and its answer, whose last token has no entry in any cache.
    whole = (len(first) + len(answer) - 1) // BLOCK
    assert told["longshore_hit_chunks_total", "file"] == whole, told
    assert told["longshore_hit_tokens_total", "file"] == whole * BLOCK
    assert told["longshore_moved_bytes_total", "file->host"] > 0
    assert told["longshore_moved_bytes_total", "host->device"] > 0
