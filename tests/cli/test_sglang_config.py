"""`longshore sglang-config`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.config import Config
from longshore.engines.sglang.flags import INSTEAD, read
from longshore.errors import ConfigError


def printed(*options: str) -> dict[str, str]:
    result = CliRunner().invoke(app, ["sglang-config", *options], catch_exceptions=False)
    assert result.exit_code == 0
    words = shlex.split(result.output)
    assert words[0] == "--enable-hierarchical-cache"
    return dict(zip(words[1::2], words[2::2], strict=True))


def test_printed_flags_are_read_back_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    flags = printed(
        *("--file-path", "it's", "--file-size", "64MiB", "--set", "load_timeout=2.5"),
        *("--sglang", "prefetch_threshold=64", "--sglang", "allocator=default"),
    )
    assert flags["--hicache-storage-backend"] == "dynamic"
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    assert extra.pop("hicache_storage_pass_prefix_keys") is True
    assert (extra.pop("prefetch_threshold"), extra.pop("allocator")) == (64, "default")
    config = read(extra, "rank-1-of-2", 2)
    assert (config.file_path, config.file_size) == (tmp_path / "it's" / "rank-1-of-2", 32 << 20)
    assert config.load_timeout == 2.5


FILES = ["--file-path", "here", "--file-size", "1MiB"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "file_path and file_size"),
        (["--file-path", "here"], "file_size is not set"),
        (["--file-path", "here", "--file-size", "900PiB"], "file_size"),
        (["--file-path", "here", "--file-size", "1MiB", "--set", "host_size=1GiB"], "--hicache-size"),
        (["--file-path", "here", "--file-size", "1MiB", "--set", "file_path=there"], "already set"),
        (["--file-path", "here", "--file-size", "1MiB", "--set", "offload=write_back"], "not served under SGLang"),
        (["--file-path", "here", "--file-size", "1MiB", "--set", "file_mode=gds"], "expected 'posix'"),
        (["--set", "remote=valkey://host:6379/0", "--set", "host_size=900PiB"], "host_size"),
        (["--set", "remote=valky://host:6379/0"], "remote"),
        (["--file-path", "here", "--file-size", "1MiB", "--set", "gat=off"], "did you mean 'gate'"),
        (["--file-path", "here", "--file-size", "1MiB", "--sglang", "threshold"], "expected KEY=VALUE"),
        (["--file-path", "here", "--file-size", "1MiB", "--sglang", "prefetch_thresold=64"], "'prefetch_threshold'"),
        (["--file-path", "here", "--file-size", "1MiB", "--sglang", "gate=false"], "--set gate=false"),
        (["--file-path", "here", "--file-size", "1MiB", "--sglang", "interface_v1=0"], "interface_v1"),
        (["--file-path", "here", "--file-size", "1MiB", "--sglang", "prefetch_threshold=64tokens"], "whole number"),
        ([*FILES, "--sglang", "prefetch_threshold=-1"], "prefetch_threshold = -1: expected a whole number, 1 or more"),
        ([*FILES, "--sglang", "prefetch_threshold=0"], "1 or more"),
        (
            [*FILES, "--sglang", "prefetch_timeout_base=-0.5"],
            "prefetch_timeout_base = -0.5: expected a finite number, 0 or more",
        ),
        ([*FILES, "--sglang", "prefetch_timeout_per_ki_token=-1"], "0 or more"),
        ([*FILES, "--sglang", "prefetch_timeout_base=NaN"], "expected a finite number"),
        ([*FILES, "--sglang", "allocator=mooncake"], "allocator = 'mooncake': expected 'default' or 'shm'"),
        ([*FILES, "--sglang", "prefetch_timeout_base=Infinity"], "expected a finite number"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=named):
        CliRunner().invoke(app, ["sglang-config", *options], catch_exceptions=False)


def test_stores_need_no_files(tmp_path: Path) -> None:
    flags = printed("--set", "remote=valkey://one:6379/0 valkey://two:6379/0", "--set", "host_size=1GiB", "--no-check")
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    del extra["hicache_storage_pass_prefix_keys"]  # as SGLang does
    config = read(extra, "rank-1-of-2", 2)
    assert (config.file_path, config.host_size, len(config.remote)) == (None, 1 << 29, 2)


def test_every_setting_without_effect_is_one() -> None:
    assert set(INSTEAD) <= set(Config.model_fields)


def test_each_rank_has_events_of_its_own(tmp_path: Path) -> None:
    extra = {"file_path": str(tmp_path), "file_size": "1MiB", "events_path": str(tmp_path / "events")}
    assert read(extra, "rank-1-of-2", 2).events_path == tmp_path / "events.rank-1-of-2"
    assert read(extra, "rank-0-of-1", 1).events_path == tmp_path / "events"
