"""The internals of transformers that the adapter relies on are as it expects, and a change is named."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from test_calls import GENERATION, batching, make_model
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import CachePool, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

from longshore.engines.transformers import contract
from longshore.errors import ContractError


def test_the_installed_version_is_as_expected() -> None:
    print(f"transformers {transformers.__version__}")
    contract.check()


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_free_blocks(self: CachePool, index: int, count: int) -> list[int]:
        return []

    monkeypatch.setattr(CachePool, "get_free_blocks", get_free_blocks)
    with pytest.raises(ContractError, match=r"CachePool\.get_free_blocks takes \('self', 'index', 'count'\)"):
        contract.check()


def test_a_missing_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CachePool, "allocate_sector")
    with pytest.raises(ContractError, match=r"CachePool\.allocate_sector is gone"):
        contract.check()


def test_another_registry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTN_TYPE_TO_ALLOCATOR, "full_attention", object())
    with pytest.raises(ContractError, match="full_attention"):
        contract.check()


def test_what_tells_who_waits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Scheduler.reset

    def reset(self: Any) -> None:
        stock(self)
        del self.active_requests

    monkeypatch.setattr(Scheduler, "reset", reset)
    monkeypatch.delattr(Scheduler, "_get_waiting_candidates")
    monkeypatch.delattr(Scheduler, "_cleanup_waiting_queue")
    monkeypatch.delitem(RequestState.__dataclass_fields__, "is_cpu_offloaded")
    with pytest.raises(ContractError) as error:
        contract.check()
    for moved in (
        "Scheduler._get_waiting_candidates is gone",
        "Scheduler._cleanup_waiting_queue is gone",
        "RequestState has no is_cpu_offloaded",
        "Scheduler has no active_requests",
    ):
        assert moved in str(error.value)


# ---------------------------------------------------------------------- why loads are waited for before a forward pass


def served_with(monkeypatch: pytest.MonkeyPatch, attention: str, harm: Any) -> dict[str, Any]:
    """Results of two requests that are decoded in one batch, `harm` being called once in it, with the allocator."""
    stock, done = FullAttentionCacheAllocator.update, []

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not done and len(self.block_table) == 2 and all(len(table) > 6 for table in self.block_table.values()):
            done.append(self)
            harm(self)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(FullAttentionCacheAllocator, "update", update)
    model = make_model()
    model.set_attn_implementation(attention)
    manager = model.init_continuous_batching(GENERATION, batching())
    for number, name in enumerate(("first", "second")):
        manager.add_request([200 + number, *range(2, 100)], request_id=name, max_new_tokens=12)
    manager.start()
    try:
        found = [manager.get_result(timeout=30.0) for _ in range(2)]
    finally:
        manager.stop(block=True)
        manager.destroy()
    assert done
    return {result.request_id: result for result in found}


def test_an_error_within_a_forward_pass_fails_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a layer that does not arrive cannot be an error of its request alone."""

    def harm(allocator: Any) -> None:
        raise RuntimeError("the layer did not arrive")

    found = served_with(monkeypatch, "eager", harm)
    assert {result.error for result in found.values()} == {"the layer did not arrive"}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bytes_of_one_request_reach_the_others_of_its_batch(monkeypatch: pytest.MonkeyPatch, attention: str) -> None:
    """So a request must not be computed on blocks that have not arrived, even if its result is thrown away."""

    def harm(allocator: Any) -> None:
        (block, *_) = allocator.block_table["first"]
        allocator._copy_view[block].view(torch.float32).fill_(math.nan)

    found = served_with(monkeypatch, attention, harm)
    assert any(map(math.isnan, found["second"].logprobs))
