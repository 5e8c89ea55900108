"""The demo's three runs over one workload, each with an engine of its own.

Requests go one at a time: then equal hit lengths make equal batches, and runs can be compared bit for bit.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import ContinuousBatchingConfig, GenerationConfig

from longshore.boundary import align
from longshore.cache import Counters
from longshore.cli.demo_report import (
    SEED,
    DemoOptions,
    DemoResult,
    OccupancySample,
    RequestRecord,
    RouteTotal,
    RunRecord,
)
from longshore.cli.options import check_memory
from longshore.config import Config, format_bytes, read_toml
from longshore.engines.transformers import RequestBlocks, Tiers, recording, replaying, tiered, why_not_served
from longshore.errors import ConfigError, EngineError
from longshore.runtime.stack import check_size
from longshore.testing.local_server import LocalServer
from longshore.tiers.file import capacity_for
from longshore.trace import Workload, WorkloadRequest, read_excerpt, read_mooncake


def load_model(options: DemoOptions) -> Any:
    """The model in evaluation mode, on its device. Raises `ConfigError` or `EngineError` if it cannot be loaded."""
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    device: str = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device")
    if options.dtype == "auto":
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    else:
        dtype = getattr(torch, options.dtype)
    model = _build(options, dtype) if options.model is None else _load(options.model, options.attention, dtype)
    return model.to(device).eval()


def _build(options: DemoOptions, dtype: torch.dtype) -> Any:
    """A Llama with random weights, which do not change the time of a step."""
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(  # type: ignore[call-arg]  # takes any attribute
        vocab_size=8192,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=max(options.width // 64, 1),
        num_key_value_heads=max(options.width // 128, 1),
        max_position_embeddings=32768,
        attn_implementation=options.attention,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]


def _load(path: Path, attention: str, dtype: torch.dtype) -> Any:
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model {path}: expected a directory with a config.json")
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=dtype, attn_implementation=attention
        )
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(f"--model {path} cannot be loaded: {error}") from error


_TIMEOUT = 600.0
_BATCHING_OPTIONS = inspect.signature(ContinuousBatchingConfig).parameters  # they grow with transformers' versions
_WARM_UP_TOKEN, _WARM_UP_ANSWER = 3, 2


class Demo:
    """A model, a workload, and the sizes that follow from them."""

    def __init__(self, options: DemoOptions) -> None:
        self.options = options
        self.model = load_model(options)
        if (reason := why_not_served(self.model)) is not None:
            raise EngineError(f"{type(self.model).__name__} cannot be served with tiers: {reason}")
        text = self.model.config.get_text_config()
        if options.workload is not None and not options.workload.is_file():
            raise ConfigError(f"--workload {options.workload}: no such file")
        self.workload = Workload.from_trace(
            read_excerpt() if options.workload is None else read_mooncake(options.workload),
            vocab_size=text.vocab_size,
            block_tokens=options.block_tokens,
            limit=options.requests,
            min_new_tokens=2,
            max_new_tokens=options.max_new_tokens,
        )
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        page = 2 * heads * head_dim * self.model.dtype.itemsize * options.block_tokens
        self.block_bytes = page * text.num_hidden_layers
        self.image_bytes = align(self.block_bytes)
        self.device_blocks = int(options.device_share * self.workload.unique_blocks)
        self.host_blocks = max(1, int(options.host_share * self.workload.unique_blocks))
        self.longest = max(len(r.prompt) + r.output_tokens for r in self.workload)
        needed = -(-self.longest // options.block_tokens)
        if self.device_blocks < needed:
            least = math.ceil(100 * needed / self.workload.unique_blocks) / 100
            raise ConfigError(
                f"the longest request needs {needed} blocks, but {options.device_share:.0%} of the working set of "
                f"{self.workload.unique_blocks} blocks is only {self.device_blocks}: "
                + (f"raise --device-share to {least:.2f}" if least <= 1 else "raise --requests")
            )
        caches = (self.device_blocks + self.resident_blocks) * self.block_bytes
        if self.model.device.type == "cpu":
            check_memory(caches, "--block-tokens", options.block_tokens, options.block_tokens)

    @property
    def resident_blocks(self) -> int:
        """Blocks of a device cache that never evicts: twice those of all requests and answers, for each engine."""
        return (4 if self.options.remote else 2) * (
            self.workload.total_blocks + sum(2 + r.output_tokens // self.options.block_tokens for r in self.workload)
        )

    @property
    def stored_blocks(self) -> int:
        """Blocks of the whole working set and all answers."""
        return self.workload.unique_blocks + sum(2 + r.output_tokens for r in self.workload)

    def config(self, directory: Path, store: str | None = None) -> Config:
        """Tiers: `host_blocks` in memory, room for all blocks on disk; or instead in the store at the URL `store`."""
        sizes: dict[str, Any] = {"host_size": self.host_blocks * self.image_bytes}
        if store is not None:
            sizes["remote"] = store
        else:
            sizes["file_path"] = directory / "kv"
            sizes["file_size"] = capacity_for(self.stored_blocks, self.image_bytes)
        table = read_toml(self.options.config) if self.options.config is not None else {}
        said = {**table, **self.options.settings}
        if said.get("file_mode") == "gds":
            del sizes["host_size"]  # there is no host tier then
        config = Config.make(**{**sizes, **said})
        image = align(self.block_bytes * config.blocks_per_chunk)
        if config.file_mode == "posix":
            check_size("host_size", config.host_size, image)
        if config.file_path is not None:
            check_size("file_size", config.file_size, capacity_for(1, image))
        return config

    def setup(self, direct: bool) -> dict[str, str]:
        """Facts about model, device and workload, for the report."""
        model, workload = self.model, self.workload
        parameters = sum(p.numel() for p in model.parameters()) / 1e6
        layers = model.config.get_text_config().num_hidden_layers
        total, unique = workload.total_blocks, workload.unique_blocks
        return {
            "model": f"{type(model).__name__}, {parameters:.0f} M parameters, {layers} layers",
            "device": f"{model.device}, {model.dtype}, {model.config._attn_implementation} attention",
            "threads": str(torch.get_num_threads()),
            "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
            "workload": f"{len(workload)} requests, {total} prompt blocks of {workload.block_tokens} tokens",
            "working set": f"{unique} blocks, {format_bytes(unique * self.block_bytes)}",
            "file I/O": "direct, past the page cache" if direct else "buffered, pages dropped from the page cache",
        }


def run_demo(options: DemoOptions, directory: Path, console: Console) -> DemoResult:
    """All three runs, with progress on `console`. The file tier is in `directory`."""
    with ExitStack() as servers:
        with console.status("building the model and the workload"):
            demo = Demo(options)
            store = servers.enter_context(_store(demo, directory)) if options.remote else None
            config = demo.config(directory, store)
            config.check_machine()
        return _run_all(demo, config, console)


@contextmanager
def _store(demo: Demo, directory: Path) -> Iterator[str]:
    """A Valkey server on this machine with room for all blocks; yields its URL."""
    nbytes = 2 * demo.stored_blocks * demo.image_bytes
    check_memory(nbytes, "--remote", nbytes, nbytes)
    options = {"maxmemory": str(nbytes), "maxmemory_policy": "allkeys-lru"}
    with LocalServer("valkey", directory / "store", **options) as server:
        yield f"valkey://127.0.0.1:{server.port}/0"


def _run_all(demo: Demo, config: Config, console: Console) -> DemoResult:
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    names = ("first engine",) * demo.options.remote + ("tiered", "resident", "recompute")
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks = {name: progress.add_task(name, total=len(demo.workload)) for name in names}

        def advance(name: str) -> Callable[[], None]:
            return lambda: progress.advance(tasks[name])

        blocks = list[RequestBlocks]()
        if demo.options.remote:
            with tiered(demo.model, config) as tiers:
                blocks += run_tiered(demo, tiers, advance("first engine"))[1]
        with tiered(demo.model, config) as tiers:
            tiered_run, more = run_tiered(demo, tiers, advance("tiered"))
            blocks += more
            second_call = ask_again(demo, tiers)
            direct = tiers.stack is not None and bool(getattr(tiers.stack.file, "direct", False))
        resident = run_resident(demo, blocks, advance("resident"))
        recompute = run_recompute(demo, advance("recompute"))
    capacities = {
        "device": demo.device_blocks * demo.block_bytes,
        "host": demo.host_blocks * demo.image_bytes,
        "file": 0 if config.file_path is None else int(config.file_size),
    }
    setup = {**demo.setup(direct), "second call": second_call}
    if demo.options.remote:
        del setup["file I/O"]
        setup["store"] = "Valkey on this machine; another engine, which has ended, had served the same prompts"
    return DemoResult(setup, tiered_run, resident, recompute, capacities)


def run_tiered(demo: Demo, tiers: Tiers, advance: Callable[[], None]) -> tuple[RunRecord, list[RequestBlocks]]:
    """The run over `tiers`, which stay open; also the blocks of each lookup, for the oracle."""
    samples: list[OccupancySample] = []
    answers: list[Any] = []
    served: list[tuple[str, ...]] = []
    blocks: list[RequestBlocks] = []
    with _engine(demo, demo.device_blocks) as ask:
        digests = tiers.block_digests(_warm_up(demo))
        before, warm_up = _snapshot(tiers), [RequestBlocks(len(record.sources), digests) for record in tiers.records]
        began = time.perf_counter()
        for request in demo.workload:
            answers.append(ask(request))
            served.append(_local(tiers.records[-1].sources))
            samples.append(_sample(tiers, time.perf_counter() - began, request.index))
            digests = tiers.block_digests([*request.prompt, *answers[-1].generated_tokens])
            blocks.append(RequestBlocks(len(served[-1]), digests))
            advance()
        seconds = time.perf_counter() - began
        lookups = tiers.lookups - len(warm_up)
    after = _snapshot(tiers)
    if lookups != len(answers):
        raise EngineError(
            f"{len(answers)} requests made {lookups} lookups, expected one each: the runs cannot be compared"
        )
    requests = tuple(_record(demo, *each) for each in zip(demo.workload, answers, served, strict=True))
    restored = {tier: sum(sources.count(tier) for sources in served) for tier in ("host", "file")}
    routes = {
        name: RouteTotal(total.bytes - before.routes[name].bytes, total.seconds - before.routes[name].seconds)
        for name, total in after.routes.items()
    }
    misses = {reason.value: count - before.misses[reason] for reason, count in after.misses.items()}
    run = RunRecord("tiered", requests, tuple(samples), routes, restored, misses, seconds)
    return run, [*warm_up, *blocks]


def _local(sources: Sequence[str]) -> tuple[str, ...]:
    """`sources` with host memory for what a store has sent, which went through it; `fetched_bytes` says how much."""
    return tuple(tier if tier in ("device", "host", "file") else "host" for tier in sources)


def ask_again(demo: Demo, tiers: Tiers) -> str:
    """The hits of the last request in a new engine, with an empty device cache, over the same tiers."""
    with _engine(demo, demo.device_blocks) as ask:
        ask(demo.workload.requests[-1])
        sources = _local(tiers.records[-1].sources)
    found = ", ".join(f"{sources.count(tier)} from {tier}" for tier in ("host", "file"))
    return f"a new engine found {len(sources)} blocks of the last prompt: {found}"


def run_resident(demo: Demo, blocks: Sequence[RequestBlocks], advance: Callable[[], None]) -> RunRecord:
    """The reference run: a device cache that never evicts, which reuses the same `blocks`.

    Where two engines shared a store, it serves the requests of both, and the second half is the run.
    """
    with replaying(blocks):
        answers, seconds = _plain_run(demo, demo.resident_blocks, advance, before=demo.options.remote)
    return _plain_record(demo, "resident", answers, [request.hits for request in blocks], seconds)


def run_recompute(demo: Demo, advance: Callable[[], None]) -> RunRecord:
    """The small device cache without tiers."""
    with recording() as hits:
        answers, seconds = _plain_run(demo, demo.device_blocks, advance)
    return _plain_record(demo, "recompute", answers, hits, seconds)


def _plain_run(
    demo: Demo, device_blocks: int, advance: Callable[[], None], *, before: bool = False
) -> tuple[list[Any], float]:
    """The answers and the seconds they took; the engine serves the same requests `before`, if it is to."""
    with _engine(demo, device_blocks) as ask:
        if before:
            for request in demo.workload:
                ask(request)
            ask(replace(demo.workload.requests[0], prompt=tuple(_warm_up(demo)), output_tokens=_WARM_UP_ANSWER))
        began = time.perf_counter()
        answers = []
        for request in demo.workload:
            answers.append(ask(request))
            advance()
        return answers, time.perf_counter() - began


def _plain_record(demo: Demo, name: str, answers: Sequence[Any], hits: Sequence[int], seconds: float) -> RunRecord:
    """The record of a run without tiers; the last of `hits` belong to its answers, those before to the warm-up."""
    sources = [("device",) * hit for hit in hits[-len(answers) :]]
    requests = tuple(_record(demo, *each) for each in zip(demo.workload, answers, sources, strict=True))
    return RunRecord(name, requests, (), {}, {}, {}, seconds)


@contextmanager
def _engine(demo: Demo, device_blocks: int) -> Iterator[Callable[[WorkloadRequest], Any]]:
    """transformers' continuous batching with a device cache of `device_blocks`; yields a function that asks it."""
    generation: Any = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {
        "page_size": demo.options.block_tokens,
        "num_blocks": device_blocks,
        "max_batch_tokens": max(demo.longest, 64),
        "max_requests_per_batch": 8,
        "use_async_batching": False,
        "use_cuda_graph": False,
        "return_logprobs": True,
        "auto_switch_to_flash": False,
    }
    batching = ContinuousBatchingConfig(**{key: options[key] for key in options if key in _BATCHING_OPTIONS})
    manager = demo.model.init_continuous_batching(generation, batching)
    manager.start()

    def ask(tokens: Sequence[int], answer: int) -> Any:
        manager.add_request(list(tokens), max_new_tokens=answer, record_timestamps=True)
        result = manager.get_result(timeout=_TIMEOUT)
        while result is None and manager.is_running():
            result = manager.get_result(timeout=1.0)
        if result is None or result.error is not None:
            fatal = manager.background_thread_status.fatal_error
            raise EngineError(f"a request failed: {fatal or (result and result.error)}") from fatal
        return result

    try:
        ask(_warm_up(demo), _WARM_UP_ANSWER)
        yield lambda request: ask(request.prompt, request.output_tokens)
    finally:
        manager.stop(block=True)
        manager.destroy()


def _warm_up(demo: Demo) -> list[int]:
    """The prompt before all others of an engine, so that no figure includes the costs of first use."""
    return [_WARM_UP_TOKEN] * (2 * demo.options.block_tokens)


def _record(demo: Demo, request: WorkloadRequest, answer: Any, sources: Sequence[str]) -> RequestRecord:
    tokens = {tier: sources.count(tier) * demo.options.block_tokens for tier in ("device", "host", "file")}
    return RequestRecord(
        index=request.index,
        prompt_tokens=len(request.prompt),
        device_tokens=tokens["device"],
        host_tokens=tokens["host"],
        file_tokens=tokens["file"],
        computed_tokens=len(request.prompt) - sum(tokens.values()),
        ttft_ms=1e3 * (answer.timestamps[0] - answer.created_time),
        returning=request.returning,
        tokens=tuple(answer.generated_tokens),
        logprobs=tuple(answer.logprobs),
    )


def _snapshot(tiers: Tiers) -> Counters:
    if tiers.stack is None:
        raise EngineError(f"tiers disabled: {tiers.failure}")
    with tiers.stack.runtime.batch() as cache:
        return cache.counters.copy()


def _sample(tiers: Tiers, seconds: float, request: int) -> OccupancySample:
    used = tiers.occupancy()
    return OccupancySample(seconds, request, used["device"], used.get("host", 0), used.get("file", 0))
