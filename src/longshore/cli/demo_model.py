"""The demo's model, built or loaded, and the options that shape a demo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longshore.errors import ConfigError, EngineError


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Options of `longshore demo`; see its `--help`."""

    model: Path | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention: str = "eager"
    workload: Path | None = None
    requests: int | None = None
    block_tokens: int = 32
    max_new_tokens: int = 8
    device_share: float = 0.25
    host_share: float = 0.25
    config: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    layers: int = 6
    width: int = 512


def prepare_environment(attention: str) -> None:
    """Settings that the numeric libraries read when they are loaded: call it before torch is imported."""
    # Threads that spin while they wait starve those of a busy machine, and the figures with them.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # oneMKL picks kernels by the alignment of its inputs, unless told to keep to one: bits would differ now and then.
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
    if attention == "sdpa":  # on the CPU, its float32 results were seen to depend on how threads shared the work
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def load_model(options: DemoOptions) -> Any:
    """The model in evaluation mode, on its device. Raises `ConfigError` or `EngineError`, with what is missing."""
    import torch  # noqa: PLC0415 - an extra, and slow
    import transformers  # noqa: PLC0415

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    device = _device(options.device, torch)
    dtype = _dtype(options.dtype, device, torch)
    if options.model is None:
        model = _build(options, dtype, torch, transformers)
    else:
        model = _load(options.model, options.attention, dtype, transformers)
    return model.to(device).eval()


def _device(choice: str, torch: Any) -> str:
    if choice == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device")
    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return choice


def _dtype(choice: str, device: str, torch: Any) -> Any:
    if choice == "auto":
        return torch.float32 if device == "cpu" else torch.bfloat16
    return getattr(torch, choice)


def _build(options: DemoOptions, dtype: Any, torch: Any, transformers: Any) -> Any:
    """A Llama with random weights: what it says makes no sense, what it costs does."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=max(options.width // 64, 1),
        num_key_value_heads=max(options.width // 128, 1),
        max_position_embeddings=32768,
        attn_implementation=options.attention,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _load(path: Path, attention: str, dtype: Any, transformers: Any) -> Any:
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model {path}: expected a directory with a config.json")
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=dtype, attn_implementation=attention
        )
    except (OSError, ValueError, ImportError) as error:
        raise EngineError(f"--model {path} cannot be loaded: {error}") from error
