"""The internals of transformers that the adapter relies on are as it expects, and a change is named."""

from __future__ import annotations

import pytest
import transformers
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import CachePool

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
