"""LoRA adapters: blocks are served to requests of an adapter with the same bytes, whatever its name and path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from engine_runs import Serve, Steps, prompts, tiers
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm_kit import Rig, keys_of

from longshore.engines import weight_files
from longshore.engines.vllm import model, weight_changes
from longshore.runtime.rank_reports import RankReports

HIT, MISS = LookupResult.HIT, LookupResult.MISS
KEYS = keys_of(2)
SIZE = 200_000
Rigs = Callable[..., Rig]
CONNECTOR = {
    "kv_connector": "LongshoreConnector",
    "kv_connector_module_path": "longshore.engines.vllm.connector",
    "kv_load_failure_policy": "recompute",
}


class Adapter:
    """One on disk, and what vLLM says of it."""

    def __init__(self, path: Path, name: str = "adapter") -> None:
        path.mkdir()
        (path / "adapter_config.json").write_text("{}")
        self.file = path / "adapter_model.safetensors"
        self.write(1)
        self.lora = LoRARequest(name, 7, str(path))

    def write(self, value: int) -> None:
        """As another file: a change shows at once, however coarse time stamps are."""
        draft = self.file.with_suffix(".new")
        draft.write_bytes(bytes([value]) * SIZE)
        draft.replace(self.file)

    def load(self, rig: Rig, ranks: range | None = None) -> None:
        """What vLLM's workers do."""
        for rank in range(len(rig.workers)) if ranks is None else ranks:
            digest = weight_changes._digest(weight_files.FileDigests(), self.lora)
            rig.workers[rank]._adapter_loaded(self.lora, 0 if digest is None else weight_changes._number(digest))


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files lay on a disk, and had been changed long ago."""
    monkeypatch.setattr(weight_files, "SETTLED", -1e9)
    monkeypatch.setattr(weight_files, "_is_in_memory", lambda device: False)


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    return Adapter(tmp_path / "adapter")


def begin(rig: Rig, name: str, adapter: Adapter | None) -> ReqContext:
    if adapter is not None:
        rig.manager.set_adapter(name, adapter.lora)
    return rig.request(name, KEYS)


def store(rig: Rig, name: str, adapter: Adapter | None) -> list[Any]:
    context = begin(rig, name, adapter)
    taken = rig.store(KEYS, [1, 2], context)
    rig.manager.on_request_finished(context)
    return taken


def found(rig: Rig, name: str, adapter: Adapter | None) -> list[LookupResult]:
    context = begin(rig, name, adapter)
    said = rig.lookup(KEYS, context)
    rig.manager.on_request_finished(context)
    return said


def served(rigs: Rigs, **settings: Any) -> Rig:
    """A rig under our connector."""
    rig = rigs(**settings)
    for worker in rig.workers:
        worker.reports_failures = True
    return rig


def test_blocks_are_served_to_the_same_bytes_alone(rigs: Rigs, adapter: Adapter, tmp_path: Path) -> None:
    rig, other = served(rigs), Adapter(tmp_path / "other")
    other.write(2)
    adapter.load(rig)
    other.load(rig)
    assert store(rig, "writer", adapter) == KEYS
    assert found(rig, "reader", adapter) == [HIT] * 2
    assert found(rig, "of another adapter", other) == [MISS] * 2
    assert found(rig, "of the base model", None) == [MISS] * 2


def test_adapter_that_some_workers_have_not_loaded_is_unserved(rigs: Rigs, adapter: Adapter) -> None:
    rig = served(rigs, world=2)
    assert store(rig, "before it is loaded", adapter) == []
    adapter.load(rig, range(1))
    assert store(rig, "loaded by one rank", adapter) == []
    adapter.load(rig)
    assert store(rig, "loaded", adapter) == KEYS
    assert found(rig, "reader", adapter) == [HIT] * 2


def test_changed_bytes_under_the_same_path_find_nothing(rigs: Rigs, adapter: Adapter) -> None:
    rig = served(rigs)
    adapter.load(rig)
    store(rig, "writer", adapter)
    adapter.write(2)
    assert found(rig, "changed and not loaded", adapter) == [MISS] * 2
    assert store(rig, "changed and not loaded", adapter) == []
    adapter.load(rig)
    assert found(rig, "changed and loaded", adapter) == [MISS] * 2
    assert store(rig, "blocks of the device are of the old bytes", adapter) == []
    rig.manager.device_was_reset()
    assert store(rig, "computed anew", adapter) == KEYS
    assert found(rig, "reader", adapter) == [HIT] * 2


def test_the_same_bytes_read_in_another_layout_find_nothing(rigs: Rigs, adapter: Adapter) -> None:
    rig = served(rigs)
    adapter.load(rig)
    assert store(rig, "writer", adapter) == KEYS
    adapter.lora = LoRARequest("adapter", 7, adapter.lora.lora_path, is_3d_lora_weight=True)
    assert found(rig, "not loaded in this layout", adapter) == [MISS] * 2
    adapter.load(rig)
    assert found(rig, "loaded in this layout", adapter) == [MISS] * 2
    assert store(rig, "blocks of the device are of the old layout", adapter) == []
    rig.manager.device_was_reset()
    assert store(rig, "computed anew", adapter) == KEYS
    assert found(rig, "reader", adapter) == [HIT] * 2


def test_the_old_bytes_loaded_again_find_their_blocks(rigs: Rigs, adapter: Adapter) -> None:
    rig = served(rigs)
    for value, expected in ((1, MISS), (2, MISS), (1, HIT)):
        adapter.write(value)
        adapter.load(rig)
        rig.manager.device_was_reset()
        assert found(rig, f"reader of {value}, {expected}", adapter) == [expected] * 2
        store(rig, f"writer of {value}, {expected}", adapter)


def test_a_store_under_way_when_the_adapter_changes_is_dropped(rigs: Rigs, adapter: Adapter) -> None:
    rig = served(rigs)
    adapter.load(rig)
    context = begin(rig, "writer", adapter)
    output = rig.manager.prepare_store(KEYS, context)
    rig.copy_in(output.store_spec, [1, 2])
    content = adapter.file.read_bytes()
    adapter.write(2)
    adapter.load(rig)
    rig.manager.complete_store(set(KEYS), context)
    adapter.file.write_bytes(content)
    adapter.load(rig)
    rig.manager.device_was_reset()
    assert found(rig, "reader", adapter) == [MISS] * 2
    assert rig.cache.leases == rig.cache.protected == 0


def in_memory(patch: pytest.MonkeyPatch, *, hidden: bool) -> None:
    patch.setattr(weight_files, "_is_in_memory", lambda device: hidden)


def just_changed(patch: pytest.MonkeyPatch, *, hidden: bool) -> None:
    patch.setattr(weight_files, "SETTLED", 1e9 if hidden else -1e9)


@pytest.mark.parametrize("where", [in_memory, just_changed])
def test_adapter_with_undetectable_changes_is_not_served(
    rigs: Rigs, adapter: Adapter, where: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = served(rigs)
    digests = rig.manager._validity._adapters._digests
    where(monkeypatch, hidden=True)
    adapter.load(rig)
    for name in ("one", "two", "three"):
        assert store(rig, f"writer {name}", adapter) == []
        assert found(rig, f"reader {name}", adapter) == [MISS] * 2
    assert digests.hashed_bytes == 0
    (told,) = [record.getMessage() for record in caplog.records if "LoRA adapter" in record.getMessage()]
    assert "LoRA adapter adapter are neither loaded nor stored" in told
    where(monkeypatch, hidden=False)
    assert store(rig, "writer", adapter) == KEYS
    assert [found(rig, f"reader {number}", adapter) for number in range(3)] == [[HIT] * 2] * 3
    assert digests.hashed_bytes == SIZE + len("{}")


def test_without_our_connector_changed_bytes_empty_all_tiers(rigs: Rigs, adapter: Adapter) -> None:
    rig = rigs()
    adapter.load(rig)
    assert store(rig, "writer", None) == KEYS
    adapter.load(rig)
    assert found(rig, "loaded again", None) == [HIT] * 2
    adapter.write(2)
    adapter.load(rig)
    assert found(rig, "changed", None) == [MISS] * 2
    assert store(rig, "of the device", None) == []


def test_base_model_blocks_are_not_stored_when_adapters_mix_in(
    rigs: Rigs, adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "applies_to_base_model", lambda: True)
    rig = served(rigs, vllm={"lora_config": SimpleNamespace()})
    adapter.load(rig)
    assert store(rig, "of the base model", None) == []
    assert store(rig, "of the adapter", adapter) == KEYS


def test_cpu_kernels_that_mix_adapters_into_base_are_known() -> None:
    assert model.applies_to_base_model() == vllm.__version__.startswith("0.32")


def test_workers_tell_what_they_have_loaded(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    change = [False, True]

    def load(self: Any, lora: Any) -> str:
        if change.pop(0):
            adapter.write(3)
        return lora.lora_name

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", load)
    config = SimpleNamespace(lora_config=SimpleNamespace(), parallel_config=SimpleNamespace(worker_cls="one"))
    watch = weight_changes.AdapterWatch(config, lambda lora, number: calls.append((lora.lora_int_id, number)))
    manager = object.__new__(WorkerLoRAManager)
    digest = weight_changes._number(weight_changes._digest(weight_files.FileDigests(), adapter.lora) or b"")
    assert manager._load_adapter(adapter.lora) == "adapter"
    manager._load_adapter(adapter.lora)
    assert calls == [(7, digest), (7, 0)], "bytes that change while they are loaded are unknown"
    with pytest.raises(IndexError):
        manager._load_adapter(adapter.lora)
    assert calls[-1] == (7, 0)
    watch.close()


def test_adapters_that_share_a_row_are_changes_of_each_other() -> None:
    reports = RankReports.make(4, 1, 1)
    one, other = 5, 5 + RankReports.ADAPTERS
    assert not reports.adapter_loaded(0, one, 1, 11)
    assert reports.adapter(one) == (1, 11)
    assert reports.adapter_loaded(0, other, 2, 11)
    assert reports.adapter(one) is None
    assert reports.adapter(other) == (2, 11)
    assert reports.adapter_changes()[5].tolist() == [1]
    reports.close()


def test_reloaded_adapter_gets_no_old_blocks_in_a_running_engine(serve: Serve, tmp_path: Path) -> None:
    """By real engines; one of its prompts is asked of the base model, too."""
    path = str(tmp_path / "adapter")
    ask: Steps = [["ask", tokens, path] for tokens in prompts()]
    load: Steps = [["load_adapter", path], ["reset"]]
    lora = {"options": {"enable_lora": True, "max_lora_rank": 8}}
    under = {**lora, "connector": CONNECTOR}
    first: Steps = [["save_adapter", path, 1], *load, *ask]
    second: Steps = [["save_adapter", path, 2], *load, *ask]
    fresh = serve("llama", [*first, *second], None, 600, **lora).answers
    assert [each["tokens"] for each in fresh[:3]] != [each["tokens"] for each in fresh[3:]]
    steps = [*first, ["reset"], *ask, *second, ["reset"], *ask, ["settle"]]
    served = serve("llama", steps, tiers(tmp_path / "tier"), 160, **under)
    assert [each["cached"] > 0 for each in served.answers[3:6]] == [True] * 3
    assert [each["logprobs"] for each in served.answers[6:9]] == [each["logprobs"] for each in fresh[3:]]
    assert [each["cached"] > 0 for each in served.answers[9:]] == [True] * 3
    assert [each["tokens"] for each in served.answers] == [each["tokens"] for each in fresh[:3] * 2 + fresh[3:] * 2]
    again = serve("llama", [*load, *ask], tiers(tmp_path / "tier"), 160, **under)
    assert again.counters["arrived"]["file->host"] > 0
    assert [each["tokens"] for each in again.answers] == [each["tokens"] for each in fresh[3:]]
    changed = serve("llama", first, tiers(tmp_path / "tier"), 160, **under)
    assert [each["tokens"] for each in changed.answers] == [each["tokens"] for each in fresh[:3]]
