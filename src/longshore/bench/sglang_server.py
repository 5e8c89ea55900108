"""A server of SGLang in processes of its own, asked over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from longshore.errors import BenchError
from longshore.testing.local_server import free_port

START_SECONDS = 600.0
_FLUSH_SECONDS = 120.0
_END_SECONDS = 60.0
_LAST_CHARACTERS = 6000


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """What a server said to one prompt.

    Attributes:
        tokens: Of the answer.
        logprobs: Their log-probabilities.
        ttft: Seconds to the first token.
        cached: Tokens of the prompt that were not computed: from the `device`, from SGLang's `host` memory, and from
            its `storage` back end.
    """

    tokens: list[int]
    logprobs: list[float]
    ttft: float
    cached: int
    device: int
    host: int
    storage: int


class SglangServer:
    """A running server. `close` ends it, and all of its processes; a context manager."""

    def __init__(
        self, model: Path, log: Path, flags: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it, and wait until it answers; its output goes to `log`. Raises `BenchError` if it does not."""
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = log
        command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"),
            *("--port", self.url.rpartition(":")[2], "--skip-tokenizer-init", "--enable-cache-report", *flags),
        ]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
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
                words = self.text()[-_LAST_CHARACTERS:]
                raise BenchError(f"the server ended with {self._process.returncode}; the end of its output:\n{words}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):  # noqa: S310
                return
            time.sleep(0.2)
        words = self.text()[-_LAST_CHARACTERS:]
        raise BenchError(f"the server did not answer in {START_SECONDS:.0f} s; the end of its output:\n{words}")

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def ask(self, tokens: Sequence[int], new: int = 8, **more: object) -> ServerAnswer:
        """Complete a prompt greedily with `new` tokens. `more` goes into the request."""
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        body = {"input_ids": list(tokens), "sampling_params": sampling, "return_logprob": True, "stream": True}
        body |= more
        begun, ttft, last = time.perf_counter(), 0.0, dict[str, Any]()
        answer = list[int]()
        with self._request("/generate", body) as response:
            for line in response:
                text = line.decode().removeprefix("data: ").strip()
                if text and text != "[DONE]":
                    last = json.loads(text)
                    ttft = ttft or time.perf_counter() - begun
                    answer = last.get("output_ids", answer)
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {}
        return ServerAnswer(
            answer,
            [round(each[0], 6) for each in meta.get("output_token_logprobs") or ()],
            ttft,
            meta.get("cached_tokens", 0),  # nothing is said of a request that was aborted while it waited
            details.get("device", 0),
            details.get("host", 0),
            details.get("storage", 0),
        )

    def timed(self, tokens: Sequence[int], new: int) -> tuple[float, ServerAnswer]:
        begun = time.perf_counter()
        answer = self.ask(tokens, new)
        return time.perf_counter() - begun, answer

    def flush(self) -> None:
        """Forget what device and host memory have. The server says no while it is busy, also with backups."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(urllib.error.HTTPError):
                self.post("/flush_cache", {}, parse=False)
                return
            time.sleep(0.3)
        raise BenchError(f"the caches of the server could not be flushed within {_FLUSH_SECONDS:.0f} s")

    def post(self, path: str, body: object, *, parse: bool = True) -> Any:
        with self._request(path, body) as response:
            said = response.read()
        return json.loads(said) if parse else said.decode()

    def _request(self, path: str, body: object) -> Any:
        request = urllib.request.Request(  # noqa: S310
            f"{self.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=240)  # noqa: S310

    def processes(self, words: str = "") -> list[int]:
        """Its processes whose command line has these words."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if command and words in command and os.getsid(int(path.name)) == self._process.pid:
                    found.append(int(path.name))
        return found

    def close(self) -> None:
        """Ask it to end, and kill whatever of its session is left. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        deadline = time.monotonic() + _END_SECONDS
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
