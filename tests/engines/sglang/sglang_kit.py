"""A real SGLang server on the CPU, over HTTP; in an environment of its own (tests/environments.py sglang)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore.engines.sglang.flags import server_flags

HERE = Path(__file__).parent
PAGE = 16
START_SECONDS = 480

VOCABULARY = 512


def write_model(path: Path, seed: int = 0) -> Path:
    """A Llama of three layers with random weights, in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():  # so that what is computed depends on all of the prompt
        parameter.data *= 3.0 if parameter.dim() > 1 else 1.0
    model.save_pretrained(path)
    return path


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that depend on `seed` from the first one on."""
    import random

    return random.Random(seed).choices(range(3, VOCABULARY), k=tokens)


@dataclass(frozen=True)
class Answer:
    """What a server said: tokens, their log-probabilities, and from where the cached tokens of the prompt came."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    device: int
    host: int
    storage: int


class Server:
    """A running server. `close` ends it, and all of its processes."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        tp: int = 1,
        tier: Mapping[str, object] | None = None,
        tokens: int = 1024,
        extra: Sequence[str] = (),
    ) -> None:
        """Start, and wait until it answers. `tier` are settings of ours; without any there is no hierarchical cache."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = log
        flags = [] if tier is None else server_flags(tier, {"prefetch_threshold": PAGE})
        if tier is not None:
            flags += ["--hicache-ratio", "2", "--hicache-io-backend", "direct"]
            flags += ["--hicache-mem-layout", "page_first_direct"]
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"),
            *("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2], "--skip-tokenizer-init"),
            *("--skip-server-warmup", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--disable-overlap-schedule", "--disable-cuda-graph", "--max-total-tokens", str(tokens)),
            *("--page-size", str(PAGE), "--context-length", "1024", "--max-running-requests", "4"),
            *("--mem-fraction-static", "0.1", "--tp-size", str(tp), "--log-level", "info"),
            *("--enable-metrics", "--enable-cache-report"),
            *flags,
            *extra,
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE / "on_cpu"), os.environ.get("PYTHONPATH", "")]),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(each % (os.cpu_count() or 1)) for each in range(tp)),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_CBWR": "COMPATIBLE",
        }
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self.text()[-6000:]}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):  # noqa: S310
                return
            time.sleep(0.5)
        raise RuntimeError(f"the server did not answer in {START_SECONDS} s:\n{self.text()[-6000:]}")

    def text(self) -> str:
        """What it has logged so far."""
        return self.log.read_text(errors="replace")

    def ask(self, tokens: Sequence[int], new: int = 8) -> Answer:
        """Complete a prompt greedily."""
        told = self.post(
            "/generate",
            {
                "input_ids": list(tokens),
                "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
                "return_logprob": True,
            },
        )
        meta = told["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return Answer(
            told["output_ids"],
            [round(each[0], 6) for each in meta["output_token_logprobs"]],
            meta["cached_tokens"],
            details.get("device", 0),
            details.get("host", 0),
            details.get("storage", 0),
        )

    def flush(self) -> None:
        """Forget what device and host memory have. The server says no while it is busy, also with backups."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.HTTPError):
                self.post("/flush_cache", {}, parse=False)
                return
            time.sleep(0.3)
        raise RuntimeError("the server's caches could not be flushed")

    def post(self, path: str, body: object, *, parse: bool = True) -> Any:
        """Its answer to a request."""
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as response:  # noqa: S310
            said = response.read()
        return json.loads(said) if parse else said.decode()

    def metrics(self) -> str:
        """Its metrics, as Prometheus reads them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:  # noqa: S310
            return response.read().decode()

    def processes(self, words: str) -> list[int]:
        """Its processes whose command line has these words."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if words in command and os.getsid(int(path.name)) == self._process.pid:
                    found.append(int(path.name))
        return found

    def close(self) -> None:
        """Ask it to end, and kill whatever of its session is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in self.processes(""):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def serving(*arguments: Any, **named: Any) -> Iterator[Server]:
    """A server that is closed in the end."""
    server = Server(*arguments, **named)
    try:
        yield server
    finally:
        server.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
