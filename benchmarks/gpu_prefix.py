"""Time to first token of a long prompt under transformers: computed, and restored from host memory by `PrefixStore`.

    python benchmarks/gpu_prefix.py [--device cuda] [--model config.json] [--tokens 2048,8192] [--out DIR]

The model has random weights, which do not change the time; without `--model` it has the shape of Llama 3 8B. Each time
runs from the call to the first token on the host, a median of `--repeats`. Every prompt ends with `--new` tokens that
are always computed. Beside it: the same KV cache brought back from host memory by torch alone, layer by layer, from
memory that is not pinned (as `tensor.cpu()` leaves it) and from pinned memory. It is said
whether the logits after restoring are those after torch's copy, bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig

from longshore.bench.harness import machine_facts
from longshore.config import Config
from longshore.engines.transformers import PrefixStore

LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def build(config: Any, device: str) -> Any:
    """A model of `config` with random weights: bfloat16 on a GPU, float32 on the CPU."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Prompt:
    """One prompt of a model, and the ways to its first token."""

    def __init__(self, model: Any, tokens: int, new: int) -> None:
        self.model, self.known = model, tokens
        vocabulary = model.config.get_text_config().vocab_size
        self.ids = torch.randint(0, vocabulary, (1, tokens + new), device=model.device)

    def first_token(self, cache: DynamicCache | None = None, known: int = 0) -> tuple[torch.Tensor, DynamicCache]:
        """The logits of the first token, and the cache; the first `known` tokens are in `cache`."""
        with torch.inference_mode():
            out = self.model(
                self.ids[:, known:], past_key_values=cache or DynamicCache(), use_cache=True, logits_to_keep=1
            )
            int(out.logits[0, -1].argmax())  # it is on the host now
            return out.logits[0, -1], out.past_key_values

    def timed(
        self, way: Callable[[], tuple[DynamicCache | None, int]], repeats: int
    ) -> tuple[list[float], torch.Tensor]:
        """Seconds to the first token after `way` has brought a cache, without the first run; and the last logits."""
        seconds = []
        for _ in range(repeats + 1):
            self.finish()
            begun = time.perf_counter()
            logits, _ = self.first_token(*way())
            seconds.append(time.perf_counter() - begun)
        return seconds[1:], logits

    def finish(self) -> None:
        """Wait for the device."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


def by_torch(states: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> DynamicCache:
    """A cache on `device` of keys and values per layer in host memory."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(states):
        cache.update(keys.to(device, non_blocking=True), values.to(device, non_blocking=True), layer)
    return cache


def measure(model: Any, tokens: int, new: int, host: str, repeats: int) -> dict[str, Any]:
    """Milliseconds to the first token by each way, medians, for one length of the prompt."""
    prompt = Prompt(model, tokens, new)
    computed, _ = prompt.timed(lambda: (None, 0), repeats)
    _, cache = prompt.first_token()
    known = prompt.ids[0, :tokens].tolist()
    with PrefixStore(model, Config.make(host_size=host, fixed_weights=True)) as store:
        prompt.finish()
        begun = time.perf_counter()
        kept = store.store_prefix(known, cache)
        stored = time.perf_counter() - begun
        restored, found = prompt.timed(lambda: store.restore_prefix(known), repeats)
    states = [(layer.keys[:, :, :kept].cpu(), layer.values[:, :, :kept].cpu()) for layer in cache.layers]
    nbytes = sum(tensor.nbytes for both in states for tensor in both)
    plain, expected = prompt.timed(lambda: (by_torch(states, model.device), kept), repeats)
    pinned = None
    if model.device.type == "cuda":
        states = [(keys.pin_memory(), values.pin_memory()) for keys, values in states]
        pinned, _ = prompt.timed(lambda: (by_torch(states, model.device), kept), repeats)

    def median(seconds: Sequence[float] | None) -> float | None:
        return None if seconds is None else round(1e3 * statistics.median(seconds), 1)

    return {
        "tokens": tokens,
        "restored_tokens": kept,
        "kv_bytes": nbytes,
        "same_logits": torch.equal(found, expected),
        "computed_ms": median(computed),
        "restored_ms": median(restored),
        "torch_pageable_ms": median(plain),
        "torch_pinned_ms": median(pinned),
        "store_ms": round(1e3 * stored, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--model", type=Path, help="config.json of a model; default: the shape of Llama 3 8B")
    parser.add_argument("--tokens", default="2048,8192,32768", help="lengths of the known part of the prompt")
    parser.add_argument("--new", default=16, type=int, help="tokens behind it, which are computed")
    parser.add_argument("--host", default="8GiB", help="host memory of the store")
    parser.add_argument("--repeats", default=3, type=int, help="measurements of each")
    parser.add_argument("--commit", default="", help="what is measured")
    parser.add_argument("--out", type=Path, help="folder for the result as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device, so nothing was measured; --device cpu runs on the CPU", file=sys.stderr)
        return 2
    config = transformers.AutoConfig.from_pretrained(options.model) if options.model else LlamaConfig(**LLAMA_3_8B)
    model = build(config, options.device)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    report: dict[str, Any] = {
        "device": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": options.commit,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "machine": machine_facts(),
        "prompts": [],
    }
    print(f"{name}; time to first token, ms; KV cache in host memory")
    columns = ("tokens", "computed_ms", "restored_ms", "torch_pageable_ms", "torch_pinned_ms", "same_logits")
    print("".join(f"{column:>19}" for column in columns))
    for tokens in map(int, options.tokens.split(",")):
        row = measure(model, tokens, options.new, options.host, options.repeats)
        report["prompts"].append(row)
        print("".join(f"{row[column] if row[column] is not None else '-':>19}" for column in columns), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            path = options.out / f"prefix-{name.lower().replace(' ', '-')}-{report['date']}.json"
            path.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
