"""Who is served what an earlier process stored: the same model, computed and cut up alike, and nobody else."""

from __future__ import annotations

import json
import logging
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from vllm.config import DeviceConfig, LoRAConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.kv_offload.base import LookupResult
from vllm_kit import Group, Rig, file_settings, keys_of, vllm_config

from longshore.engines import weight_files
from longshore.engines.vllm import model
from longshore.engines.weight_files import FileDigests
from longshore.errors import EngineError

MISS, PENDING = LookupResult.MISS, LookupResult.HIT_PENDING


def first_lookup(path: Path, **settings: Any) -> LookupResult:
    """What an engine on `path` says of a chunk, which it then stores."""
    rig, keys = Rig(**{**file_settings(path), **settings}), keys_of(1)
    try:
        context = rig.request("one", keys)
        (said,) = rig.lookup(keys, context)
        rig.store(keys, range(1, 1 + rig.per_chunk), context)
    finally:
        rig.close()
    return said


IMAGES = SimpleNamespace(mm_processor_kwargs={"do_normalize": False}, mm_processor_cache_gb=4)
VIDEOS = SimpleNamespace(video_pruning_rate=0.5, mm_processor_cache_gb=4)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"per_chunk": 2}, id="blocks per chunk"),
        pytest.param({"groups": [Group(tokens=32)]}, id="tokens per block"),
        pytest.param({"groups": [Group(layers=1)]}, id="layers"),
        pytest.param({"groups": [Group(window=64)]}, id="spec of a group"),
        pytest.param({"dtype": "bfloat16"}, id="dtype of the cache"),
        pytest.param({"world": 2}, id="ranks"),
        pytest.param({"salt": "another tenant"}, id="salt"),
        pytest.param({"page": 256}, id="layout"),
        pytest.param({"vllm": {"model_config.dtype": torch.float16}}, id="dtype of the model"),
        pytest.param({"vllm": {"model_config.quantization": "fp8"}}, id="quantisation"),
        pytest.param({"vllm": {"model_config.quantization_config": {"ignore": ["k_proj"]}}}, id="what is quantised"),
        pytest.param({"vllm": {"model_config.model_class_overrides": {"A": "b:C"}}}, id="code of the model"),
        pytest.param({"vllm": {"attention_config": SimpleNamespace(use_non_causal=True)}}, id="attention"),
        pytest.param({"vllm": {"model_config.max_model_len": 1 << 17}}, id="longer rope"),
        pytest.param({"vllm": {"cache_config.cache_dtype": "fp8"}}, id="quantised cache"),
        pytest.param({"vllm": {"model_config.code_revision": "another"}}, id="revision of the model's code"),
        pytest.param({"vllm": {"load_config.load_format": "pt"}}, id="which weight files are loaded"),
        pytest.param({"vllm": {"load_config.ignore_patterns": ["a*"]}}, id="weight files that are not loaded"),
        pytest.param({"vllm": {"load_config.model_loader_extra_config": {"pattern": "b*"}}}, id="how they are loaded"),
        pytest.param({"vllm": {"model_config.multimodal_config": IMAGES}}, id="how images are processed"),
        pytest.param({"vllm": {"model_config.multimodal_config": VIDEOS}}, id="how videos are processed"),
        pytest.param({"vllm": {"cache_config.prefix_caching_hash_algo": "sha256_cbor"}}, id="hash algorithm"),
        pytest.param(
            {"vllm": {"model_config.hf_config": SimpleNamespace(to_dict=lambda: {"rope_theta": 2.0})}}, id="overrides"
        ),
    ],
)
def test_another_engine_finds_nothing(tmp_path: Path, change: dict[str, Any]) -> None:
    assert first_lookup(tmp_path) is MISS
    assert first_lookup(tmp_path) is PENDING, "the same engine finds it"
    assert first_lookup(tmp_path, **change) is MISS


@pytest.mark.parametrize("change", [{"target_modules": ["o_proj"]}, {"enable_mixed_moe_lora_format": True}])
def test_how_adapters_are_applied_is_identity(change: dict[str, Any]) -> None:
    def config_of(**more: Any) -> str:
        lora = LoRAConfig(lora_dtype="float16", **more)
        with set_current_vllm_config(vllm_config([], {"vllm": {"lora_config": lora}})):
            return model.model_identity((), None).config

    assert config_of() == config_of() != config_of(**change)


def test_length_set_by_memory_is_no_part_of_the_scope(tmp_path: Path) -> None:
    """With --max-model-len auto, rope is made for the longest context; then the length is cut to what memory allows."""

    def with_length(given: int, fitted: int) -> LookupResult:
        lengths = {"model_config.original_max_model_len": given, "model_config.max_model_len": fitted}
        return first_lookup(tmp_path, vllm=lengths)

    assert with_length(-1, 4096) is MISS
    assert with_length(-1, 4000) is PENDING
    assert with_length(4000, 4000) is MISS


def test_another_reader_of_videos_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_videos = {"model_config.multimodal_config": VIDEOS}
    assert first_lookup(tmp_path, vllm=reads_videos) is MISS
    assert first_lookup(tmp_path) is MISS  # text alone
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic")
    assert first_lookup(tmp_path, vllm=reads_videos) is MISS
    assert first_lookup(tmp_path, vllm=reads_videos) is PENDING
    assert first_lookup(tmp_path) is PENDING


def test_other_scales_in_the_same_file_find_nothing(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    given = SimpleNamespace(mm_encoder_fp8_scale_path=str(file), mm_processor_cache_gb=4)

    def with_scale(scale: float) -> LookupResult:
        file.write_text(json.dumps({"layer": {"q": scale}}))
        return first_lookup(tmp_path, vllm={"model_config.multimodal_config": given})

    assert with_scale(0.5) is MISS
    assert with_scale(0.25) is MISS
    (tmp_path / "other.safetensors").write_bytes(b"of another model")
    assert with_scale(0.5) is PENDING


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    assert first_lookup(tmp_path) is MISS
    revision = tmp_path / "another"
    revision.mkdir()
    (revision / "config.json").write_text("{}")
    header = b'{"a":{}}'
    (revision / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(58))
    assert first_lookup(tmp_path, model=str(revision)) is MISS
    assert first_lookup(tmp_path, model=str(revision)) is PENDING


def change_a_byte(path: Path, at: int) -> None:
    """In place, with the time stamp of before, as far as anyone can set it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "name",
    [
        *("another.safetensors", "more.bin", "more.pt", "more.gguf", "deep/er/more.safetensors", "linked.safetensors"),
        *("modeling.py", "model.safetensors.index.json"),
    ],
)
def test_any_changed_byte_of_any_weight_file_finds_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = file_settings(tmp_path)
    path, blob = Path(settings["model"]) / name, tmp_path / "blob"
    path.parent.mkdir(parents=True, exist_ok=True)
    if name.startswith("linked"):
        path.symlink_to(blob)
    path.write_bytes(bytes(300_000))
    monkeypatch.setattr(weight_files, "SETTLED", -1e9)  # the memo has all
    assert [first_lookup(tmp_path, **settings) for _ in range(2)] == [MISS, PENDING]
    change_a_byte(blob if path.is_symlink() else path, 150_000)
    assert [first_lookup(tmp_path, **settings) for _ in range(2)] == [MISS, PENDING]


def test_weights_changed_while_an_engine_starts_leave_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, began = file_settings(tmp_path), time.time_ns()
    path = Path(settings["model"]) / "model.safetensors"
    change_a_byte(path, 30)
    late = {**settings, "vllm": {"instance_id": f"{began}_dp0"}}
    assert [first_lookup(tmp_path, **late) for _ in range(2)] == [MISS, MISS]
    told = [record.getMessage() for record in caplog.records if "file tier disabled" in record.getMessage()]
    assert len(told) == 2
    assert all(f"{path} was changed" in each and "start it again" in each for each in told)
    assert [first_lookup(tmp_path, **settings) for _ in range(2)] == [MISS, PENDING]


def test_vllm_writes_into_its_configuration_when_that_was_made() -> None:
    before = time.time_ns()
    assert before <= model._loading_began(VllmConfig(device_config=DeviceConfig("cpu"))) <= time.time_ns()


def test_loading_start_defaults_to_process_start() -> None:
    began = model._loading_began(SimpleNamespace(instance_id="12ab"))
    assert abs(began / 1e9 - psutil.Process().create_time()) < 2.0  # which is exact to a second
    assert began < time.time_ns()


def test_a_changed_draft_model_finds_nothing(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(bytes(300_000))
    of_draft = SimpleNamespace(
        model=str(draft), revision=None, dtype=torch.float32, hf_config=SimpleNamespace(to_dict=dict)
    )
    settings = {"vllm": {"speculative_config": SimpleNamespace(draft_model_config=of_draft)}}
    assert [first_lookup(tmp_path, **settings) for _ in range(2)] == [MISS, PENDING]
    change_a_byte(draft / "model.safetensors", 150_000)
    assert first_lookup(tmp_path, **settings) is MISS


def test_one_rank_hashes_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    digest = FileDigests.of
    monkeypatch.setattr(FileDigests, "of", lambda self, *paths: calls.append(paths) or digest(self, *paths))
    first_lookup(tmp_path, world=2)
    assert len(calls) == 1


def test_nothing_is_hashed_without_a_file_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileDigests, "of", None)
    Rig(model=file_settings(tmp_path)["model"]).close()


def test_another_seed_of_hashes_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_lookup(tmp_path) is MISS
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert first_lookup(tmp_path) is MISS
    assert first_lookup(tmp_path) is PENDING


def images(gib: float, *, cached: bool) -> dict[str, Any]:
    """A model that takes images, and vLLM's caches that need their hashes."""
    config = SimpleNamespace(mm_processor_cache_gb=gib)
    return {"vllm": {"model_config.multimodal_config": config, "cache_config.enable_prefix_caching": cached}}


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"vllm": {"cache_config.prefix_caching_hash_algo": "xxhash"}}, "set PYTHONHASHSEED"),
        ({"vllm": {"cache_config.calculate_kv_scales": True}}, "turn calculate_kv_scales off"),
        ({"vllm": {"load_config.load_format": "dummy"}}, "come from no file"),
        ({"vllm": {"lora_config": SimpleNamespace()}, "salt": "adapters of today"}, "use LongshoreConnector"),
        ({"model": "nobody/nothing"}, "download them first"),
        (images(0, cached=False), "enable_prefix_caching and mm_processor_cache_gb; turn one of them on"),
    ],
)
def test_what_means_nothing_later_is_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any], remedy: str
) -> None:
    with caplog.at_level(logging.ERROR, "longshore"):
        assert first_lookup(tmp_path, **change) is MISS
    (said,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("file tier disabled")]
    assert remedy in said
    assert first_lookup(tmp_path, **change) is MISS
    assert not (tmp_path / "tier" / "superblock").exists()


def test_remedies_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = SimpleNamespace(kv_connector_module_path="longshore.engines.vllm.connector")
    adapters = {"lora_config": SimpleNamespace(), "kv_transfer_config": transfer}
    monkeypatch.setattr(model, "applies_to_base_model", lambda: False)
    assert [first_lookup(tmp_path, vllm=adapters) for _ in range(2)] == [MISS, PENDING]
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    hashing = {"vllm": {"cache_config.prefix_caching_hash_algo": "xxhash"}}
    assert [first_lookup(tmp_path, **hashing) for _ in range(2)] == [MISS, PENDING]
    hashed = (images(0, cached=True), images(4, cached=False))
    assert [first_lookup(tmp_path, **each) for each in hashed] == [MISS, PENDING]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"parallel": {"pp_size": 2, "world_size": 2}}, "pipeline parallel"),
        ({"parallel": {"pcp_size": 2}}, "prefill context parallel"),
        ({"parallel": {"dcp_size": 2}}, "decode context parallel"),
        ({"vllm": {"parallel_config.nnodes_within_dp": 2}}, "several nodes"),
    ],
)
def test_what_is_not_served_is_refused_at_start(change: dict[str, Any], what: str) -> None:
    with pytest.raises(EngineError, match=what):
        Rig(**change)


def test_ranks_that_share_no_memory_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(cpu_group="both ranks"))
    monkeypatch.setattr(parallel_state, "in_the_same_node_as", lambda group: [group == "both ranks", False])
    for step in ("layout_of", "record_memory_info"):  # nothing has happened by then that only one rank might get to
        monkeypatch.setattr(f"longshore.engines.vllm.spec.{step}", None)
    with pytest.raises(EngineError, match="several nodes"):
        Rig(world=2)


def test_replicas_have_directories_of_their_own(tmp_path: Path) -> None:
    for replica in (0, 1):
        parallel = {"data_parallel_index": replica, "data_parallel_size": 2}
        assert [first_lookup(tmp_path, parallel=parallel) for _ in range(2)] == [MISS, PENDING]
    assert sorted(path.name for path in (tmp_path / "tier").iterdir()) == ["replica-0", "replica-1"]
