"""`longshore doctor` without a store: this machine, and settings that it does not have the means for."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.config import Config
from longshore.doctor import Severity, check_machine
from longshore.errors import TierInUseError
from longshore.testing.local_server import free_port
from longshore.tiers.file.directory import LOCK, Directory


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json"], catch_exceptions=False)
    found: dict[str, Any] = json.loads(result.output)
    return result.exit_code, {f"{each['about']}: {each['what']}": each for each in found["findings"]}


@pytest.fixture
def few_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_settings_that_this_machine_can_give(tmp_path: Path) -> None:
    file = tmp_path / "longshore.toml"
    file.write_text(f'[longshore]\nhost_size = "1MiB"\nfile_path = "{tmp_path}"\nfile_size = "1MiB"\n')
    status, found = doctor("--config", str(file))
    assert status == 0
    assert [text for text in found if text.startswith(f"file tier in {tmp_path}: ")]
    assert {each["level"] for each in found.values()} <= {"ok", "warning"}
    assert list(tmp_path.iterdir()) == [file]


def test_the_disk_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    there = check_machine(Config.make(host_size="1MiB", file_path=tmp_path, file_size="1MiB"))
    found = check_machine(Config.make(host_size="1MiB", file_path=tmp_path / "a" / "b", file_size="1MiB"))
    assert [each.level for each in found] == [each.level for each in there]
    assert [each.about for each in found].count(f"file tier in {tmp_path}/a/b") > 0
    assert list(tmp_path.iterdir()) == []


def test_a_live_engine_in_the_directory_is_named(tmp_path: Path) -> None:
    code = "import sys, time; from pathlib import Path; from longshore.tiers.file.directory import LOCK, Directory; "
    code += "open_ = Directory(Path(sys.argv[1])); print('open', flush=True); time.sleep(600)"
    config = Config.make(host_size="1MiB", file_path=tmp_path, file_size="1MiB")

    def told() -> list[str]:
        return [
            each.what for each in check_machine(config) if each.level is Severity.WARNING and "process" in each.what
        ]

    for at in (tmp_path, tmp_path / "rank0"):
        child = subprocess.Popen([sys.executable, "-c", code, at], stdout=subprocess.PIPE)
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"open\n"
            assert told() == [f"a live process (process id {child.pid}) has {at} open"]
        finally:
            child.kill()
            child.communicate()
        assert told() == []
    directory = Directory(tmp_path)
    assert told() == [f"a live process (process id {os.getpid()}, this one) has {tmp_path} open"]
    with pytest.raises(TierInUseError):
        Directory(tmp_path)  # it is still locked
    directory.close()


def test_the_lock_of_another_program_is_no_engine(tmp_path: Path) -> None:
    tmp_path.joinpath("app").mkdir()
    tmp_path.joinpath("app", LOCK).write_text("not ours")
    code = "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.lockf(file, fcntl.LOCK_EX); "
    code += "print('locked', flush=True); input()"
    locks = [sys.executable, "-c", code, tmp_path / "app" / LOCK]
    with subprocess.Popen(locks, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"locked\n"
        found = check_machine(Config.make(host_size="1MiB", file_path=tmp_path, file_size="1MiB"))
        child.communicate(b"\n")
    assert not [each for each in found if "live process" in each.what]


def test_a_directory_that_cannot_be_listed_is_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    found = check_machine(Config.make(host_size="1MiB", file_path=tmp_path, file_size="1MiB"))
    assert any("is not readable and writable" in each.what for each in found)
    assert len(found) > 3


def test_a_probe_file_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    found = check_machine(Config.make(host_size="1MiB", file_path=tmp_path, file_size="1MiB"))
    (failed,) = (each.what for each in found if "No space left on device" in each.what)
    assert failed == "no file could be written to try direct and asynchronous I/O: No space left on device"
    assert not [each for each in found if "no asynchronous" in each.what]


def test_settings_that_it_cannot_give() -> None:
    status, found = doctor("--set", "host_size=100TiB")
    assert status == 1
    (broken,) = (each for each in found.values() if each["level"] == "broken")
    assert "of memory is free" in broken["what"]


def test_an_address_that_peers_are_served_at(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        urls = {
            f"valkey://127.0.0.1:{taken.getsockname()[1]}": Severity.BROKEN,
            f"valkey://127.0.0.1:{free_port()}": Severity.WARNING,
            f"valkey://127.0.0.1:{free_port()}?password_file={tmp_path}/password": Severity.OK,
            f"valkey://0.0.0.0:{free_port()}": Severity.BROKEN,
        }
        for url, level in urls.items():
            found = check_machine(Config.make(host_size="1MiB", serve=url))
            assert [each.level for each in found if each.about == f"serve {url}"] == [level]


def test_limits(few_files: None) -> None:
    status, found = doctor("--set", "host_size=1MiB")
    assert status == 0
    assert "ulimit -n" in found["open files: limited to 256"]["advice"]


def test_text_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["doctor", "file:///no/such/[directory]"], catch_exceptions=False)
    assert result.exit_code == 1
    assert "file:///no/such/[directory]" in result.output
    assert "mount the file system" in result.output
    assert "1 broken" in result.output


def test_an_invalid_url_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, ["doctor", "http://here"])
    assert "remote store: expected a URL" in str(result.exception)
