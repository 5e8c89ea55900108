"""What the adapter relies on inside vLLM is there, and it is noticed where it is not."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.renderers.base import BaseRenderer
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.kv_offload import base, config

from longshore.boundary import DEVICE, HOST, Route
from longshore.engines.vllm import LongshoreManager, LongshoreSpec, LongshoreWorker, connector, contract, weight_changes
from longshore.engines.vllm.connector import LongshoreConnector
from longshore.engines.vllm.spec import layout_of
from longshore.errors import ContractError

NAMES: dict[str, Any] = {**vars(config), **vars(base)}


def test_this_vllm_is_supported() -> None:
    contract.check()


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.32.0"])
def test_another_version_is_refused_in_the_words_of_the_documents(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    with pytest.raises(ContractError) as refused:
        contract.check()
    assert str(refused.value) == f"expected vllm >= 0.32, < 0.34, got {version}"
    documents = Path(__file__).parents[3] / "docs" / "vllm.md"
    assert "`expected vllm >= 0.32, < 0.34, got 0.34.0`" in documents.read_text()


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


def test_vllm_orders_copies_of_whole_blocks_alone() -> None:
    """If orders name tokens some day, layouts should say how many bytes a token has."""
    for order, given in (("submit_store", "src_spec"), ("submit_load", "dst_spec")):
        parameters = inspect.signature(getattr(base.OffloadingWorker, order)).parameters
        assert set(parameters) - {"expedited"} == {"self", "job_id", "src_spec", "dst_spec"}  # that of 0.33: how urgent
        assert parameters[given].annotation in (base.GPULoadStoreSpec, "GPULoadStoreSpec")
    assert set(vars(base.GPULoadStoreSpec([3, 4], [2], [0]))) == {"block_ids", "group_sizes", "block_indices"}
    pages = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(torch.zeros(4, 64, dtype=torch.int8), 64)], [[base.CanonicalKVCacheRef(0, 64)]]
    )
    group = SimpleNamespace(group_id=0, tokens_per_block=16)
    settings = SimpleNamespace(
        groups=[group], replicated_layout=True, parallel=None, cache=SimpleNamespace(blocks_per_chunk=1)
    )
    layout = layout_of(pages, settings)
    assert [ref.token_bytes for ref in layout.groups[0].refs] == [None]


def test_the_gpu_benchmark_finds_the_function_that_swaps_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    swap = importlib.import_module("gpu").vllm_swap()
    for route in (Route(DEVICE, HOST), Route(HOST, DEVICE)):
        parameters = inspect.signature(swap(4096, route))
        parameters.bind(None, None, None, is_src_access_order_any=True)
        assert [name[:3] for name in parameters.parameters][:3] == ["src", "dst", "siz"]


def test_a_worker_connector_without_its_loads_is_refused_at_start() -> None:
    connector = object.__new__(LongshoreConnector)
    connector.connector_worker = SimpleNamespace(spec=None, worker=None)
    with pytest.raises(ContractError, match="to have _load_jobs"):
        connector.register_kv_caches({})


LEAVE_WEIGHTS = {
    *("compute_weight_checksums", "supports_draft_weight_updates"),
    *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
}


def test_vllm_has_the_methods_that_change_weights() -> None:
    for path in ("cpu_worker.CPUWorker", "gpu_worker.Worker"):
        worker = resolve_obj_by_qualname(f"vllm.v1.worker.{path}")
        contract.check_has(worker, *weight_changes.METHODS)
        about_weights = {name for name in dir(worker) if "weight" in name and not name.startswith("_")}
        assert about_weights <= {*weight_changes.METHODS, *LEAVE_WEIGHTS}
    with pytest.raises(ContractError, match="SimpleNamespace to have reload_weights"):
        contract.check_has(SimpleNamespace(load_model=None), "load_model", "reload_weights")


@pytest.mark.parametrize(("gib", "cached"), [(0, False), (0, True), (4, False)])
def test_vllm_numbers_images_where_no_cache_needs_hashes(gib: float, cached: bool) -> None:
    """From one on in each process: in another one, the same name in block hashes is another image's."""
    renderer = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=gib)),
        config=SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=cached)),
        _validate_mm_uuids=lambda *of_prompt: None,
    )
    one = SimpleNamespace(get_all_counts=lambda: {"image": 1})
    named = BaseRenderer._process_mm_uuids(renderer, {}, one, {}, "renderer0-mm-1")
    assert named == ({} if gib or cached else {"image": ["renderer0-mm-1-image-0"]})


def test_positions_of_keys_are_where_the_manager_looks_for_them() -> None:
    context = base.ReqContext(req_id="one")
    context.set_offload_key_position(b"key", 16)
    assert list(context._offload_key_positions) == [b"key"]


def test_table_of_the_connector_names_methods_that_exist() -> None:
    rows = re.findall(r"^    ([a-z_]+)  +(.+)$", str(connector.__doc__), re.MULTILINE)
    assert len(rows) == 20
    for theirs, answers in rows:
        assert hasattr(connector.OffloadingConnector, theirs), theirs
        for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b(?!\.)|\b(?:lookup|wait|shutdown)\b", answers):
            assert any(hasattr(kind, name) for kind in (LongshoreManager, LongshoreSpec, LongshoreWorker)), name
