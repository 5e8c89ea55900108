"""KV cache size and prefill cost of a model, from `config.json` or a built-in table.

    KV bytes per token       2 * layers * KV heads * head size * bytes of a number
                             layers * (latent + rope) * bytes of a number       (multi-head latent attention)
    operations per token     2 * active parameters + 4 * layers * heads * head size * tokens it looks back at

Every layer counts as full attention, which is an upper bound for models with sliding windows or recurrent layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longshore.errors import TraceError
from longshore.trace.names import unknown

_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "fp8": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class Geometry:
    """One model.

    Attributes:
        name: Display name.
        kv_bytes_per_token: KV cache bytes per token, of all layers and ranks.
        parameters: Active parameters per token.
        attention_width: layers * heads * head size: multiplications of attention per pair of tokens.
        source: Where the figures come from.
    """

    name: str
    kv_bytes_per_token: int
    parameters: float
    attention_width: int
    source: str


def _dense(layers: int, heads: int, kv_heads: int, head: int, billions: float) -> dict[str, Any]:
    return {"layers": layers, "heads": heads, "kv": 2 * layers * kv_heads * head, "head": head, "billions": billions}


_TABLE: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _dense(32, 32, 8, 128, 8.03),
    "llama-3.1-70b": _dense(80, 64, 8, 128, 70.6),
    "mistral-7b": _dense(32, 32, 8, 128, 7.25),
    "qwen2.5-7b": _dense(28, 28, 4, 128, 7.62),
    "qwen3-32b": _dense(64, 64, 8, 128, 32.8),
    "deepseek-v3": {"layers": 61, "heads": 128, "kv": 61 * (512 + 64), "head": 160, "billions": 37.0},
}
MODELS = tuple(_TABLE)


def geometry_of(model: str) -> Geometry:
    """The geometry of a built-in model, of a `config.json`, or of a directory with one.

    Built-in models have 16-bit caches. Raises `TraceError` for an unknown name or an incomplete file.
    """
    if not model:
        raise unknown("a model, or the path of a config.json,", model, MODELS)
    if model.lower() in _TABLE:
        row = _TABLE[model.lower()]
        width = row["layers"] * row["heads"] * row["head"]
        return Geometry(model.lower(), 2 * row["kv"], row["billions"] * 1e9, width, "built-in table, 16-bit numbers")
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise unknown("a model, or the path of a config.json,", model, MODELS)
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: expected a JSON object: {error}") from error
    if not isinstance(config, dict):
        raise TraceError(f"{path}: expected a JSON object")
    inner = config.get("text_config")
    return _of_config(path, {**config, **inner} if isinstance(inner, dict) else config)


def _of_config(path: Path, config: Mapping[str, Any]) -> Geometry:
    def number(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise TraceError(f"{path}: expected {name!r} to be a positive integer, got {value!r}")
        return value

    layers, hidden = number("num_hidden_layers"), number("hidden_size")
    heads = number("num_attention_heads")
    head = number("head_dim", max(1, hidden // heads))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise TraceError(f"{path}: expected a dtype out of {', '.join(_DTYPES)}, got {dtype!r}")
    if config.get("kv_lora_rank") is not None:
        kv = number("kv_lora_rank") + number("qk_rope_head_dim")
    else:
        kv = 2 * number("num_key_value_heads", heads) * head
    kv_heads = number("num_key_value_heads", heads)
    experts = number("num_experts_per_tok", 1) if "num_experts_per_tok" in config else 1
    wide = number("moe_intermediate_size", number("intermediate_size", 4 * hidden)) if experts > 1 else None
    feed = 3 * hidden * (wide * experts if wide else number("intermediate_size", 4 * hidden))
    each = hidden * head * (2 * heads + 2 * kv_heads) + feed
    parameters = layers * each + number("vocab_size", 32_000) * hidden
    return Geometry(
        path.parent.name or str(path), layers * kv * _DTYPES[dtype], float(parameters), layers * heads * head, str(path)
    )
