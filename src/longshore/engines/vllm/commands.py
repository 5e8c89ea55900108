"""Commands of `longshore ctl` to a vLLM engine: carried out in a thread of the scheduler's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from longshore.boundary import Key
from longshore.engines.vllm import contract
from longshore.engines.vllm.manager import LongshoreManager
from longshore.engines.vllm.requests import ours
from longshore.engines.vllm.tiers import SchedulerTiers
from longshore.metrics import LongshoreCollector
from longshore.runtime.control import ControlledEngine, ControlServer


def serve_commands(manager: LongshoreManager, tiers: SchedulerTiers, config: Any, name: str, hashing: str) -> None:
    """Open the socket `name` for commands to `manager`, which closes it.

    `config` is vLLM's `OffloadingConfig`, `hashing` the name of its hash of blocks. Raises `EngineError`.
    """

    metrics = LongshoreCollector(tiers.runtime, file=tiers.file, stores=tiers.stores)
    engine = ControlledEngine(lambda: tiers.runtime, keys_of(config, hashing), metrics.collect, len(config.groups))
    manager.control = ControlServer(name, engine)


def keys_of(config: Any, hashing: str) -> Callable[[Sequence[int]], list[Key]]:
    """Our keys of prompts, without adapter, `cache_salt` or images, as vLLM makes them in this process.

    Raises `ContractError` if vLLM has no such function.
    """
    from vllm.utils import hashing as hashes  # noqa: PLC0415 - only an engine that serves commands needs them
    from vllm.v1.core import kv_cache_utils  # noqa: PLC0415
    from vllm.v1.kv_offload.base import make_offload_key  # noqa: PLC0415

    contract.check_has(kv_cache_utils, "hash_block_tokens")
    contract.check_has(hashes, "get_hash_fn_by_name")
    function, per_hash = hashes.get_hash_fn_by_name(hashing), config.cache.tokens_per_hash
    group = config.groups[0]
    chunk = group.tokens_per_block * config.cache.blocks_per_chunk

    def keys(tokens: Sequence[int]) -> list[Key]:
        theirs, parent = [], None
        for end in range(per_hash, len(tokens) // chunk * chunk + 1, per_hash):
            parent = kv_cache_utils.hash_block_tokens(function, parent, tokens[end - per_hash : end], None)
            if end % chunk == 0:
                theirs.append(make_offload_key(parent, group.group_id))
        return ours(theirs)

    return keys
