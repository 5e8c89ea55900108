"""What the adapter relies on inside SGLang is there, and it is noticed where it is not."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from storage_kit import Rig  # noqa: F401 - modules of SGLang that need the stand-ins for a GPU can be imported then

from longshore.engines.sglang import contract
from longshore.errors import ContractError

DOCS = Path(__file__).parents[3] / "docs" / "sglang.md"
OWNERS = [(module, path.partition(".")[0]) for module, paths in contract._PARAMETERS.items() for path in paths]
OWNERS += [(contract._STORAGE, owner) for owner in contract._FIELDS]


def test_this_sglang_is_supported() -> None:
    contract.check()


def test_nothing_has_changed_in_this_sglang() -> None:
    """Also in one that is not supported yet: of it, this says what has."""
    assert contract.violations() == []


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0"])
def test_another_version_is_refused_in_the_words_of_the_documents(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    assert (contract._VERSIONS[0], contract._VERSIONS[-1]) == ("0.5.23", "0.5.23")  # oldest and newest
    monkeypatch.setattr(sglang, "__version__", version)
    with pytest.raises(ContractError) as refused:
        contract.check()
    assert str(refused.value) == f"expected {contract.SUPPORTED}, got {version}"
    assert f"expected {contract.SUPPORTED}, got 0.5.24" in DOCS.read_text()


@pytest.mark.parametrize(("module", "owner"), sorted(set(OWNERS)))
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, module: str, owner: str) -> None:
    monkeypatch.setattr(importlib.import_module(module), owner, SimpleNamespace())
    first = contract.violations()[0]
    assert owner in first
    with pytest.raises(ContractError, match=r"SGLang 0\.5\.23 has changed what Longshore uses: expected " + owner):
        contract.check()


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HiCacheStorage, "batch_get_v1", lambda self, keys: None)
    assert contract.violations() == [
        "expected HiCacheStorage.batch_get_v1('self', 'keys', 'host_indices', 'extra_info'), got ('self', 'keys')"
    ]


def test_a_module_that_has_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(contract._PARAMETERS, "sglang.srt.gone", {"Gone.method": ("self",)})
    with pytest.raises(
        ContractError, match=r"expected Gone\.method\('self',\), got No module named 'sglang\.srt\.gone'"
    ):
        contract.check()
