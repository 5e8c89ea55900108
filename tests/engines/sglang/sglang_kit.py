"""A real SGLang server on the CPU, over HTTP; in an environment of its own (tests/environments.py sglang)."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longshore.bench.sglang_server import ServerAnswer as Answer
from longshore.bench.sglang_server import SglangServer
from longshore.engines.sglang.flags import server_flags

HERE = Path(__file__).parent
PAGE = 16
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
    _save(LlamaForCausalLM(config), path)
    return path


def write_adapter(path: Path, seed: int) -> Path:
    """A LoRA adapter of `write_model`'s attention with random weights."""
    import json

    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    path.mkdir(exist_ok=True)
    sizes = {"q_proj": (128, 128), "v_proj": (128, 64)}
    tensors = {}
    for layer in range(3):
        for name, (into, out) in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(8, into, dtype=torch.bfloat16)
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, 8, dtype=torch.bfloat16)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": [*sizes], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def write_window_model(path: Path) -> Path:
    """A Gemma 3 of two layers with random weights, of which the first has a sliding window."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    _save(Gemma3ForCausalLM(config), path)
    return path


def write_hybrid_model(path: Path) -> Path:
    """A Mellum of four layers with random weights, for whose windows of 64 tokens SGLang has pools of their own."""
    import torch
    from transformers import MellumConfig, MellumForCausalLM

    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["dense"] * 4,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    _save(MellumForCausalLM(config), path)
    return path


def _save(model: Any, path: Path) -> None:
    """In bfloat16, with weights so large that what is computed depends on all of the prompt."""
    import torch

    model = model.to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data *= 3.0 if parameter.dim() > 1 else 1.0
    model.save_pretrained(path)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids that depend on `seed` from the first one on."""
    import random

    return random.Random(seed).choices(range(3, VOCABULARY), k=tokens)


OF_THREADS = (
    *("HiCache backup failed", "HiCache prefetch transfer failed", "HiCache storage query failed"),
    "Failed to close storage backend cleanly",
)
"""What SGLang logs of an exception in a thread of its hierarchical cache."""


def check_threads(text: str) -> None:
    """No thread of SGLang has seen an exception, and our tiers have no fault, in what a server has logged."""
    assert not [each for each in (*OF_THREADS, "all tiers disabled") if each in text]


def damage(images: Path) -> None:
    """Change a byte of all that is not empty in the file of a tier's images."""
    data = images.read_bytes()
    with images.open("r+b") as file:
        for at in range(0, len(data), 4096):
            if any(data[at : at + 4096]):
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))


def serialized(tensors: object) -> str:
    """Named tensors as SGLang takes them over HTTP."""
    import torch
    from sglang.srt.utils import MultiprocessingSerializer

    torch.multiprocessing.set_sharing_strategy("file_system")  # which needs no key that both processes know
    text: str = MultiprocessingSerializer.serialize(tensors, output_str=True)
    return text


CLOSE = 0.02
"""How far log-probabilities may be apart; `test_the_engines_own_variation` looks at what the engine needs of that."""


def check(answer: Answer, expected: Answer) -> None:
    """The same tokens, and the same log-probabilities as far as the engine itself has them."""
    assert answer.tokens == expected.tokens
    assert max(abs(a - b) for a, b in zip(answer.logprobs, expected.logprobs, strict=True)) <= CLOSE
    assert answer.device + answer.host + answer.storage == answer.cached


ON_CPU = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_CBWR": "COMPATIBLE",
}
"""Variables of the environment of a server without a GPU."""


def flags_on_cpu(tp: int = 1, tokens: int = 1024) -> list[str]:
    """Flags of a server without a GPU, whose device has room for so many tokens."""
    return [
        *("--device", "cpu", "--skip-server-warmup", "--attention-backend", "torch_native"),
        *("--sampling-backend", "pytorch", "--disable-overlap-schedule", "--disable-cuda-graph"),
        *("--max-total-tokens", str(tokens), "--page-size", str(PAGE), "--context-length", "1024"),
        *("--max-running-requests", "4", "--mem-fraction-static", "0.1", "--tp-size", str(tp)),
        *("--log-level", "info", "--enable-metrics"),
    ]


HICACHE_ON_CPU = ["--hicache-ratio", "2", "--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct"]


class Server(SglangServer):
    """A server on the CPU, over our tiers."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        tp: int = 1,
        tier: Mapping[str, object] | None = None,
        tokens: int = 1024,
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start, and wait until it answers. `tier` are settings of ours; without any there is no hierarchical cache.

        The gate is off, which would compute what takes so tiny a model no time.
        """
        threshold = {"prefetch_threshold": PAGE}
        flags = [] if tier is None else [*server_flags({"gate": False, **tier}, threshold), *HICACHE_ON_CPU]
        cores = "|".join(str(each % (os.cpu_count() or 1)) for each in range(tp))
        where = os.pathsep.join([str(HERE / "on_cpu"), os.environ.get("PYTHONPATH", "")])
        variables = {**ON_CPU, "PYTHONPATH": where, "SGLANG_CPU_OMP_THREADS_BIND": cores, **(environment or {})}
        super().__init__(model, log, [*flags_on_cpu(tp, tokens), *flags, *extra], variables)

    def ask_storage(self, tokens: Sequence[int], expected: Answer, served: int, **more: object) -> Answer:
        """Flush and ask until so many tokens come from storage, for a minute: files are written behind SGLang's back.

        Every answer is as `expected`.
        """
        deadline = time.monotonic() + 60
        while True:
            self.flush()
            answer = self.ask(tokens, **more)
            check(answer, expected)
            if answer.storage == served or time.monotonic() > deadline:
                return answer

    def metric(self, name: str, **labels: str) -> float:
        """The sum of its metrics of this name that have these labels."""
        found = re.findall(rf"^{name}{{(.*)}} (\S+)$", self.metrics(), re.MULTILINE)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for text, value in found if all(each in text for each in wanted))

    def metrics(self) -> str:
        """Its metrics, as Prometheus reads them."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:  # noqa: S310
            return response.read().decode()
