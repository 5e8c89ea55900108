"""Runs of real engines, each in a process of its own, and what the tests ask of them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from serving import MARK
from tiny_models import MODELS, VOCABULARY, save

Steps = list[list[Any]]
Answers = list[dict[str, Any]]


CONNECTOR = {
    "kv_connector": "LongshoreConnector",
    "kv_connector_module_path": "longshore.engines.vllm.connector",
    "kv_load_failure_policy": "recompute",
}


class Served(NamedTuple):
    """What one engine answered, and what its tiers counted."""

    answers: Answers
    counters: dict[str, Any]


Serve = Callable[..., Served]


class Zygote:
    """Runs scripts in forks of one process that has imported vLLM."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        """`prefix` is a command that runs the rest of its line somewhere else."""
        command = [*prefix, sys.executable, str(Path(__file__).with_name("zygote.py"))]
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path(__file__).parents[2])])
        environment = {**os.environ, "PYTHONPATH": path}  # with the modules of all tests, as pytest has them
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def run(self, script: Path, *arguments: Path, directory: Path, timeout: float = 600.0) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of `script`; it is killed after `timeout` seconds.

        Raises:
            TimeoutError: It did not end in time.
        """
        out, errors = directory / "out", directory / "errors"
        order = {"script": str(script), "arguments": [str(each) for each in arguments]}
        self._process.stdin.write(json.dumps({**order, "out": str(out), "errors": str(errors)}).encode() + b"\n")
        self._process.stdin.flush()
        pid = int(self._line(300.0))
        try:
            status = int(self._line(timeout))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            self._line(60.0)
            raise TimeoutError(f"{script.name} ran for {timeout:.0f} s:\n{errors.read_text()[-4000:]}") from None
        return status, out.read_text(), errors.read_text()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(300.0)

    def _line(self, timeout: float) -> bytes:
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            raise TimeoutError
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks engines ended with status {self._process.wait()}")
        return line


def run_engine(
    zygote: Zygote,
    directory: Path,
    model: str,
    steps: Steps,
    extra: dict[str, Any] | None,
    blocks: int,
    *,
    script: str = "serving.py",
    saved: Path | None = None,
    **more: Any,
) -> Served:
    """Have an engine take `steps`; with tiers as `extra` says, or without any. Models and orders lie in `directory`.

    The model is in `saved`, if that is given.
    """
    orders = directory / "orders.json"
    path = saved or save(model, directory)
    asked_for = {"model": str(path), "dtype": MODELS[model].dtype, "extra": extra, "blocks": blocks, "steps": steps}
    options = {**MODELS[model].options, **more.pop("options", {})}
    orders.write_text(json.dumps({**asked_for, **more, "options": options}))
    status, out, errors = zygote.run(Path(__file__).with_name(script), orders, directory=directory)
    lines = [line for line in out.splitlines() if line.startswith(MARK)]
    if status or not lines:
        raise AssertionError(f"exit status {status}\n{out[-2000:]}\n{errors[-4000:]}")
    said = json.loads(lines[-1].removeprefix(MARK))
    return Served([each for each in said["results"] if each], said["counters"])


def once_without_tiers(serve: Serve, shared: Path) -> Serve:
    """`serve`, but an engine without tiers answers the same steps once for all processes that share a directory."""
    shared.mkdir(exist_ok=True)

    def run(model: str, steps: Steps, extra: dict[str, Any] | None, blocks: int, **more: Any) -> Served:
        if extra is not None or "saved" in more:
            return serve(model, steps, extra, blocks, **more)
        asked_for = json.dumps([model, steps, blocks, more], sort_keys=True)
        kept = shared / f"{hashlib.sha256(asked_for.encode()).hexdigest()}.json"
        with kept.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():
                kept.write_text(json.dumps(serve(model, steps, extra, blocks, **more)))
        return Served(*json.loads(kept.read_text()))

    return run


def ask_oracle(serve: Serve, model: str, plain: dict[str, Any] | None = None, **more: Any) -> Answers:
    """Three cold answers, then three warm ones, of an engine that keeps everything.

    The schedule is that of the tiers: one request at a time, and as many tokens from a cache. The cache is vLLM's own
    on the device; where it has none on the CPU, or only at the ends of some blocks, it is `PlainSpec`, as it is where
    that has settings of its own, `plain`.
    """
    ask = asked(prompts())
    if MODELS[model].is_cached_by_vllm and plain is None:
        return serve(model, ask * 2, None, 600, **more).answers
    return serve(model, [*ask, ["reset"], *ask], None, 600, plain=plain or {}, **more).answers


def prompts(seed: int = 3) -> list[list[int]]:
    """Three, of lengths that are no multiples of a block; the third begins as the first."""
    chooser = random.Random(seed)
    first, second = ([chooser.randrange(3, VOCABULARY) for _ in range(length)] for length in (613, 421))
    return [first, second, first[:333] + [9] * 77]


def long_prompt(chunks: int = 28, seed: int = 28) -> list[int]:
    """Of so many chunks of 32 tokens, and a part of one."""
    chooser = random.Random(seed)
    return [chooser.randrange(3, VOCABULARY) for _ in range(32 * chunks + 11)]


def asked(each: list[list[int]]) -> Steps:
    return [["ask", tokens] for tokens in each]


def tiers(path: Path) -> dict[str, Any]:
    # Models as small as these compute sooner than they load: the gate would not read a thing.
    return {"host_size": "96MiB", "file_path": str(path), "file_size": "256MiB", "gate": False}
