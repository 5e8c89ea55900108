"""`longshore vllm-config`, and `longshore config`, the reference of all settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.config import Config
from longshore.engines.kv_transfer_config import INSTEAD
from longshore.errors import ConfigError


def printed(*options: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["vllm-config", *options], catch_exceptions=False)
    assert result.exit_code == 0
    found: dict[str, object] = json.loads(result.output)
    return found


def test_it_prints_what_vllm_takes(tmp_path: Path) -> None:
    config = printed("--host-size", "1MiB", "--file-path", str(tmp_path), "--file-size", "1MiB")
    assert config == {
        "kv_connector": "LongshoreConnector",
        "kv_connector_module_path": "longshore.engines.vllm.connector",
        "kv_load_failure_policy": "recompute",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "LongshoreSpec",
            "spec_module_path": "longshore.engines.vllm",
            "host_size": "1MiB",
            "file_path": str(tmp_path),
            "file_size": "1MiB",
        },
    }


def test_the_plain_connector_and_larger_chunks() -> None:
    config = printed("--host-size", "1MiB", "--blocks-per-chunk", "4", "--no-report-failures")
    assert config["kv_connector"] == "OffloadingConnector"
    assert config["kv_connector_extra_config"] == {
        "spec_name": "LongshoreSpec",
        "spec_module_path": "longshore.engines.vllm",
        "host_size": "1MiB",
        "blocks_per_chunk": 4,
    }


@pytest.mark.parametrize("options", [["--host-size", "large"], ["--host-size", "900TiB"]])
def test_what_cannot_be_is_refused(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="host_size"):
        CliRunner().invoke(app, ["vllm-config", *options], catch_exceptions=False)
    assert printed("--host-size", "900TiB", "--no-check")


def test_paths_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = printed("--host-size", "1MiB", "--file-path", "kv", "--file-size", "1MiB", "--set", "calibration=gpu.json")
    extra = config["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert (extra["file_path"], extra["calibration"]) == (str(tmp_path / "kv"), str(tmp_path / "gpu.json"))


@pytest.mark.parametrize("setting", sorted(set(Config.model_fields) - {"host_size", "file_path", "file_size"}))
def test_every_setting_can_be_set_or_is_refused_with_reason(setting: str, tmp_path: Path) -> None:
    default = Config.make().model_dump(mode="json")[setting]
    text = str(tmp_path / "x") if default is None else str(default)
    if isinstance(default, list):
        text = {"remote": f"file://{tmp_path}", "peer_networks": "10.0.0.0/8"}[setting]
    if isinstance(default, dict):
        text = json.dumps(default)
    options = ["--host-size", "1MiB", "--no-check", "--set", f"{setting}={text}"]
    if setting in INSTEAD:
        with pytest.raises(ConfigError, match=f"'{setting}' has no effect in vLLM: "):
            CliRunner().invoke(app, ["vllm-config", *options], catch_exceptions=False)
    else:
        extra = printed(*options)["kv_connector_extra_config"]
        assert isinstance(extra, dict)
        assert str(extra[setting]) == text
        ours = {key: value for key, value in extra.items() if not key.startswith("spec_")}
        assert Config.make(**ours) == Config.make(host_size="1MiB", **{setting: text})
    with pytest.raises(ConfigError, match=f"'{setting}s' is not a setting"):
        printed("--host-size", "1MiB", "--set", f"{setting}s={text}")


def listed(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["config", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_config_lists_every_setting_with_values_default_and_meaning() -> None:
    lines = [line.strip() for line in listed().splitlines()]
    for name, section, values, default, meaning in Config.reference():
        at = lines.index(f"{name}: {values}; default: {default or 'unset'}")
        assert lines[at + 1] == meaning
        assert section in lines[:at]


def test_config_lists_only_the_settings_named() -> None:
    lines = listed("salt", "load_timeout").splitlines()
    assert [line.split(":")[0].strip() for line in lines if "; default: " in line] == ["load_timeout", "salt"]
    (salt,) = json.loads(listed("salt", "--json"))["settings"]
    assert (salt["name"], salt["values"], salt["default"]) == ("salt", "text", "")


def test_config_of_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'gatee' is not a setting; did you mean 'gate'"):
        listed("gatee")
