"""What the adapter relies on inside vLLM is there, and it is noticed where it is not."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.kv_offload import base, config

from longshore.engines.vllm import contract
from longshore.errors import ContractError

NAMES: dict[str, Any] = {**vars(config), **vars(base)}


def test_this_vllm_is_supported() -> None:
    contract.check()


def test_another_version_is_refused_with_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.31.2")
    with pytest.raises(ContractError, match=r"vllm >= 0\.32, < 0\.34, got 0\.31\.2"):
        contract.check()


@pytest.mark.parametrize(
    "owner", sorted({path.partition(".")[0] for path in contract._PARAMETERS} | set(contract._FIELDS))
)
def test_what_is_missing_is_named(owner: str) -> None:
    assert contract.violations(NAMES) == []
    (first, *_) = contract.violations({**NAMES, owner: object})
    assert owner in first


def test_a_changed_signature_is_named() -> None:
    class Other(base.OffloadingManager):
        def lookup(self, keys: Any) -> Any: ...

    assert contract.violations({**NAMES, "OffloadingManager": Other}) == [
        "expected OffloadingManager.lookup('self', 'key', 'req_context'), got ('self', 'keys')"
    ]


def test_positions_of_keys_are_where_the_manager_looks_for_them() -> None:
    context = base.ReqContext(req_id="one")
    context.set_offload_key_position(b"key", 16)
    assert list(context._offload_key_positions) == [b"key"]
