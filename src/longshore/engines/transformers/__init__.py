"""Hugging Face transformers: tiers under continuous batching, and a prefix store for plain `generate()`.

with tiered(model, Config.make(host_size="64GiB", file_path="/nvme/kv", file_size="1TB")):
    outputs = model.generate_batch(prompts, ...)

with PrefixStore(model, Config.make(host_size="8GiB")) as store:
    store.store_prefix(tokens, cache)
    cache, n = store.restore_prefix(tokens)
"""

# ruff: noqa: E402 - what is missing is named before it is imported
from longshore.engines.transformers import contract

contract.load()

from longshore.engines.transformers.attach import Tiers, tiered, why_not_served
from longshore.engines.transformers.oracle import RequestBlocks, recording, replaying
from longshore.engines.transformers.prefix_store import PrefixStore
from longshore.engines.transformers.requests import PromptRecord

__all__ = [
    "PrefixStore",
    "PromptRecord",
    "RequestBlocks",
    "Tiers",
    "recording",
    "replaying",
    "tiered",
    "why_not_served",
]
