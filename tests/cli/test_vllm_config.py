"""`longshore vllm-config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
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
