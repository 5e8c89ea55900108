"""The scope of stored pages: which settings, and which files of weights, count in it."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sglang_kit import write_model
from storage_kit import Rig, names

from longshore.errors import EngineError

Rigs = Callable[..., Rig]
KEYS = names(8)


def scopes(rig: Rig) -> bytes:
    return rig.storage._kv.stack.scope.digest


def test_any_changed_byte_of_the_weights_is_another_scope(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", seed=3)
    found = []
    for name, change in (("a", False), ("a", False), ("a", True)):
        if change:
            path = model / "model.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        rig = Rig(model, tmp_path / name)
        found.append((scopes(rig), rig.exists(KEYS)))
        if not change:
            rig.store(KEYS, range(8))
        rig.close()
    assert [count for _, count in found] == [0, 8, 0]
    assert found[0][0] == found[1][0] != found[2][0]


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "other"},
        {"told": {"dtype": "float16"}},
        {"told": {"kv_cache_dtype": "fp8_e5m2"}},
        {"told": {"json_model_override_args": '{"rope_theta": 20000.0}'}},
        {"told": {"lora_backend": "torch_native"}},
        {"told": {"lora_target_modules": {"q_proj"}}},
        {"layout": "page_first"},
        {"rank": 0, "ranks": 2},
        {"rank": 1, "ranks": 2},
    ],
    ids=str,
)
def test_scope_holds_what_decides_a_pages_bytes(rigs: Rigs, other: dict[str, Any]) -> None:
    same = scopes(rigs(under="a"))
    assert scopes(rigs(under="b")) == same
    assert scopes(rigs(under="c", **other)) != same


def test_scope_ignores_adapter_location_and_module_order(rigs: Rigs) -> None:
    modules = [f"{each}_proj" for each in "qkvo"]
    same = scopes(rigs(under="a", told={"lora_target_modules": set(modules), "max_loras_per_batch": 2}))
    assert (
        scopes(rigs(under="b", told={"lora_target_modules": frozenset(reversed(modules)), "lora_paths": ["x=/x"]}))
        == same
    )


def test_servers_of_one_machine_share_pages_whatever_their_ports(rigs: Rigs) -> None:
    """SGLang's own advice is another `engine_info_bootstrap_port` for each."""
    other = {"engine_info_bootstrap_port": 6790, "sampling_backend": "pytorch", "watermark_key": "1234"}
    assert scopes(rigs(under="a", told=other)) == scopes(rigs(under="b"))


def test_a_setting_may_be_longer_than_any_file_name(rigs: Rigs) -> None:
    assert scopes(rigs(under="a", told={"deepep_config": 300 * "x"})) != scopes(rigs(under="b"))


@pytest.mark.parametrize("setting", ["kt_weight_path", "modelopt_checkpoint_restore_path", "dllm_algorithm_config"])
def test_every_byte_of_weights_in_another_place_counts(setting: str, rigs: Rigs, tmp_path: Path) -> None:
    experts = tmp_path / "experts"
    experts.mkdir()
    found = []
    for name, content in (("a", b"some experts"), ("b", b"same experts"), ("c", b"some experts")):
        (experts / "weights.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}" + content)
        os.utime(experts / "weights.safetensors", (0, 0))
        found.append(scopes(rigs(under=name, told={setting: str(experts)})))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(("setting", "counts"), [("quantization_param_path", False), ("kt_weight_path", True)])
def test_weights_beside_a_file_count_where_it_stands_for_them(
    setting: str, counts: bool, rigs: Rigs, tmp_path: Path
) -> None:
    """ktransformers reads the whole directory of a file that it is given."""
    directory = tmp_path / "given"
    directory.mkdir()
    file = directory / "some.pt"
    file.write_bytes(b"scales")
    found = []
    for name, content in (("a", b"other"), ("b", b"another"), ("c", b"other")):
        (directory / "other.safetensors").write_bytes(content)
        os.utime(directory / "other.safetensors", (0, 0))
        found.append(scopes(rigs(under=name, told={setting: str(file)})))
    assert found[0] == found[2]
    assert (found[0] != found[1]) is counts


def test_a_missing_path_of_weights_is_refused_by_name(rigs: Rigs, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    with pytest.raises(EngineError, match=r"^kt_weight_path is .*gone: no such file or directory"):
        rigs(told={"kt_weight_path": gone})
    with pytest.raises(EngineError, match=r"^quantization_param_path is .*gone: no such file or directory"):
        rigs(told={"quantization_param_path": gone, "kv_cache_dtype": "fp8_e4m3"})


@pytest.mark.parametrize("dtype", ["auto", "fp8_e5m2"])
def test_missing_scales_that_sglang_does_not_read_are_served(rigs: Rigs, tmp_path: Path, dtype: str) -> None:
    """`load_kv_cache_scales` of SGLang reads them for `fp8_e4m3` alone."""
    told = {"quantization_param_path": str(tmp_path / "gone"), "kv_cache_dtype": dtype}
    assert rigs(told=told).exists(KEYS) == 0
