"""`longshore bench prefill`: operations per second of a model's prefill on this machine.

    prompt of n tokens ──► forward pass, cache kept ──► first logits        operations as `longshore replay` counts them

The model has the shape of a `config.json`, and random weights, which do not change the time. The reference is one large
matrix product in the same dtype, in turn with the model: the most that the machine can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longshore.bench.harness import Case, compare, timed
from longshore.errors import BenchError
from longshore.trace.machine import geometry_of, prefill_operations

REFERENCE = "one large matrix product"
_WIDTH = {"cpu": 1024, "cuda": 8192}


def run(model: Path, *, tokens: Sequence[int], device: str = "cpu", repeats: int = 5) -> Iterator[Case]:
    """A case `prefill/TOKENS` for each length of prompt, in TFLOPS.

    Args:
        model: A `config.json`, or a directory with one.
        tokens: Lengths of prompts.
        device: `cpu`, in 32-bit numbers, or `cuda`, in those of the configuration.
        repeats: Measurements of each side.

    Raises:
        BenchError: There is no such device, or transformers cannot make a causal model from the configuration.
        TraceError: The configuration is invalid.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: torch finds no CUDA device")
    geometry = geometry_of(str(model))
    with torch.inference_mode():
        try:
            config = AutoConfig.from_pretrained(model, local_files_only=True)
            forward = _model(config, device)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BenchError(
                f"{model}: transformers cannot make a causal model of this configuration: {error}"
            ) from error
        product = _product(device, next(iter(forward.parameters())).dtype)
        for count in tokens:
            prompt = torch.randint(8, config.vocab_size, (1, count), device=device)
            sides = (lambda: forward(prompt, use_cache=True, logits_to_keep=1), product)  # noqa: B023
            taken = compare(*(timed(partial(_to_its_end, side, device)) for side in sides), repeats=repeats)
            ours = prefill_operations(geometry, 0, count) / taken.ours / 1e12
            most = 2 * _WIDTH[device] ** 3 / taken.reference / 1e12
            yield Case(f"prefill/{count}", ours, "TFLOPS", REFERENCE, most, ours / most)


def memory_of(model: Path, tokens: int) -> float:
    """Approximate bytes of a prefill of `tokens` on the CPU: weights, KV cache and activations in 32 bits."""
    geometry = geometry_of(str(model))
    return 4 * geometry.parameters + tokens * (4 * geometry.kv_bytes_per_token + 4 * geometry.attention_width)


def _model(config: Any, device: str) -> torch.nn.Module:
    dtype = torch.float32 if device == "cpu" else config.dtype
    made: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return made.to(device).eval()


def _product(device: str, dtype: torch.dtype) -> Callable[[], object]:
    left, right = (torch.rand(_WIDTH[device], _WIDTH[device], device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def _to_its_end(call: Callable[[], object], device: str) -> None:
    call()
    if device == "cuda":
        torch.cuda.synchronize()
