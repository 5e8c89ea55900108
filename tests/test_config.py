"""Settings: an error names the key, the value and what is allowed; a machine that cannot give it is noticed first."""

from __future__ import annotations

import os
import re
from collections import namedtuple
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from longshore import config as module
from longshore.cache import WritePolicy
from longshore.config import Config, available_memory, format_bytes
from longshore.errors import ConfigError

GIB = 1 << 30


def test_the_defaults_are_a_host_tier_alone() -> None:
    config = Config.make()
    assert (config.host_size, config.file_path, config.file_size) == (4 * GIB, None, 0)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * GIB), ("1.5TB", 1_500_000_000_000), ("512", 512), (4096, 4096), ("2 MiB", 2 << 20), ("1kb", 1000)],
)
def test_sizes_are_numbers_or_text(text: str | int, size: int) -> None:
    assert Config.make(host_size=text).host_size == size


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [
        ("host_size", 0, "expected a size above 0"),
        ("host_size", -1, "a whole number of bytes, or text such as '64GiB'"),
        ("host_size", "much", "a whole number of bytes, or text such as '64GiB'"),
        ("host_size", "12XiB", "a whole number of bytes, or text such as '64GiB'"),
        ("host_size", 1.5, "a whole number of bytes, or text such as '64GiB'"),
        ("host_numa", "near", "'auto', 'off', or the number of a NUMA node"),
        ("host_numa", -1, "'auto', 'off', or the number of a NUMA node"),
        ("host_numa", 1.0, "'auto', 'off', or the number of a NUMA node"),
        ("host_numa", "\u0661", "'auto', 'off', or the number of a NUMA node"),
        ("host_numa", True, "'auto', 'off', or the number of a NUMA node"),
        ("host_numa", None, "'auto', 'off', or the number of a NUMA node"),
        ("host_huge_pages", "some", "expected true or false"),
        ("host_shared", 2, "expected true or false"),
        ("offload", "write", "'write_through', 'write_through_selective' or 'write_back'"),
        ("backup", None, "'write_through', 'write_through_selective' or 'write_back'"),
        ("blocks_per_chunk", 0, "expected a whole number of at least 1 and at most 4,096"),
        ("blocks_per_chunk", 5000, "expected a whole number of at least 1 and at most 4,096"),
        ("max_writes", 2.5, "expected a whole number of at least 1"),
        ("load_timeout", 0, "expected a finite number above 0 and at most 86,400"),
        ("load_timeout", float("nan"), "expected a finite number above 0 and at most 86,400"),
        ("prefill_speed", float("inf"), "expected a finite number of at least 0"),
        ("events_path", "~nobody-of-this-name/events", "expected a path in a known home directory"),
        ("threshold", 1, "expected a whole number of at least 2 and at most 255"),
        ("threshold", 256, "expected a whole number of at least 2 and at most 255"),
        ("priority_floor", 101, "expected a whole number of at least 0 and at most 100"),
        ("request_hints", 5, "expected an object"),
        ("request_hints", {"stor": False}, "stor: Extra inputs are not permitted"),
        ("eviction", "fifo", "'gittins', 'arc' or 'lru'"),
        ("priority_floor", -1, "expected a whole number of at least 0 and at most 100"),
        ("prompt_only", "perhaps", "expected true or false"),
        ("prefetch", "now", "'best_effort', 'wait_complete' or 'timeout'"),
        ("prefetch_timeout", 0, "above 0 and at most 86,400"),
        ("events_size", "1KiB", "expected a size of at least 65,536"),
        ("events_size", True, "a whole number of bytes, or text such as '64GiB'"),
        ("events_path", 7, "expected a path"),
        ("calibration", 7, "expected a path"),
        ("write_timeout", "soon", "expected a finite number"),
        ("file_threads", 257, "at most 256"),
        ("background", "perhaps", "expected true or false"),
        ("salt", 3, "expected text"),
    ],
)
def test_error_names_key_value_and_what_is_allowed(setting: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as info:
        Config.make(**{setting: value})
    message = str(info.value)
    assert message.startswith(f"{setting} = {value!r}: ")
    assert allowed in message


@pytest.mark.parametrize(("given", "node"), [("auto", "auto"), ("off", "off"), (0, 0), ("1", 1), (12, 12)])
def test_a_numa_node_is_a_word_or_a_number(given: str | int, node: str | int) -> None:
    assert Config.make(host_numa=given).host_numa == node


def test_all_errors_come_at_once() -> None:
    with pytest.raises(ConfigError, match=r"host_size = 0.*; max_writes = 0"):
        Config.make(host_size=0, max_writes=0)


def test_an_unknown_key_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"'host_siz' is not a setting; did you mean 'host_size'\?"):
        Config.make(host_siz=1)


def test_unknown_key_near_to_nothing_gets_all_names() -> None:
    with pytest.raises(ConfigError, match=r"'zzz' is not a setting; known are host_size, host_numa, .*salt"):
        Config.make(zzz=1)


@pytest.mark.parametrize(
    ("half", "words"),
    [
        ({"file_path": "/kv"}, "file_path is /kv, but file_size is not set: a file tier needs both, *"),
        ({"file_size": "1GiB"}, "file_size is 1.0 GiB, but file_path is not set: a file tier needs both, *"),
    ],
)
def test_a_file_tier_has_a_path_and_a_size(half: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words).replace(r"\*", ".*")):
        Config.make(**half)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sleep_keep": "file"}, "sleep_keep is file, but there is no file tier"),
        ({"reset_keep": "file", "fixed_weights": True}, "reset_keep is file, but there is no file tier"),
        ({"file_daily_writes": "1GiB"}, "file_daily_writes is 1.0 GiB, but there is no file tier"),
        ({"file_mode": "gds"}, "file_mode is gds, but there is no file tier"),
        ({"reset_keep": "all"}, "reset_keep is all, but fixed_weights is not set"),
    ],
)
def test_settings_without_effect_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.make(**settings)


def test_settings_of_a_file_tier_are_accepted_with_one() -> None:
    tier = {"file_path": "/kv", "file_size": "1GiB"}
    config = Config.make(**tier, sleep_keep="file", reset_keep="file", fixed_weights=True, file_daily_writes="1GiB")
    assert (config.sleep_keep.value, config.reset_keep.value, config.file_daily_writes) == ("file", "file", GIB)


def test_config_error_is_a_value_error_and_config_frozen() -> None:
    with pytest.raises(ValueError, match="host_size"):
        Config.make(host_size=0)
    with pytest.raises(ValueError, match="frozen"):
        Config.make().salt = "other"  # type: ignore[misc]


def write(directory: Path, text: str | bytes) -> Path:
    path = directory / "longshore.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_toml_has_a_table_of_its_own(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[other]\nx = 1\n[longshore]\nhost_size = "1GiB"\nbackup = "write_through"\nload_timeout = 2\n'
    )
    config = Config.from_toml(path)
    assert Config.from_toml(str(path)) == config
    assert (config.host_size, config.backup, config.load_timeout) == (GIB, WritePolicy.THROUGH, 2.0)


def test_toml_may_be_nothing_but_settings(tmp_path: Path) -> None:
    assert Config.from_toml(write(tmp_path, 'salt = "a"\n')).salt == "a"


def test_flags_override_the_file(tmp_path: Path) -> None:
    config = Config.from_toml(write(tmp_path, 'salt = "a"\nmax_writes = 3\n'), salt="b")
    assert (config.salt, config.max_writes) == ("b", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("salt = ", "longshore.toml: Invalid value"),
        (b"salt = '\xff'", "longshore.toml: .*codec can't decode"),
        ("longshore = 3", "longshore.toml: expected longshore to be a table of settings, got 3"),
        ("[longshore]\nmax_write = 3", "'max_write' is not a setting; did you mean 'max_writes'"),
        ("[tool]\nx = 3", "'tool' is not a setting"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_toml(write(tmp_path, text))


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Config.from_toml(tmp_path / "nothing.toml")


# the machine


def test_trap_29_host_size_beyond_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 3 * GIB)
    Config.make(host_size="3GiB").check_machine()
    with pytest.raises(ConfigError, match=r"host_size is 4\.0 TiB, but only 3\.0 GiB of memory is free"):
        Config.make(host_size="4TiB").check_machine()


def test_numa_node_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("node0", "node1", "online"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(module, "_NODES", tmp_path)
    for node in ("auto", "off", 0, 1):
        Config.make(host_size="1MiB", host_numa=node).check_machine()
    with pytest.raises(ConfigError, match=r"host_numa is 2, but the NUMA nodes of this machine are \[0, 1\]"):
        Config.make(host_size="1MiB", host_numa=2).check_machine()


def test_file_size_beyond_free_space_is_refused_with_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(8 * GIB, 6 * GIB, 2 * GIB))
    Config.make(host_size="1MiB", file_path=tmp_path, file_size="2GiB").check_machine()
    with pytest.raises(ConfigError, match=r"file_size is 3\.0 GiB, but only 2\.0 GiB is free at "):
        Config.make(host_size="1MiB", file_path=tmp_path / "new" / "deep", file_size="3GiB").check_machine()


def test_the_space_that_the_tier_has_already_counts_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(8 * GIB, 8 * GIB, 0))
    (tmp_path / "segment").write_bytes(b"x" * (1 << 20))
    Config.make(host_size="1MiB", file_path=tmp_path, file_size="1MiB").check_machine()
    with pytest.raises(ConfigError, match=r"but only 1\.\d MiB is free"):
        Config.make(host_size="1MiB", file_path=tmp_path, file_size="2MiB").check_machine()


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_path_that_is_no_directory_is_refused(tmp_path: Path, below: str) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(ConfigError, match=f"{path} is not a directory"):
        Config.make(host_size="1MiB", file_path=path / below, file_size="1MiB").check_machine()


def test_a_directory_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} is not readable and writable"):
        Config.make(host_size="1MiB", file_path=tmp_path / "new", file_size="1MiB").check_machine()


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ({"memory.max": "max\n", "memory.current": "1\n", "memory.stat": "inactive_file 0\n"}, None),
        ({"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": "anon 400\ninactive_file 500\n"}, 600),
        ({"memory.max": "1000\n"}, None),
        ({}, None),
    ],
    ids=["no limit", "page cache makes way", "incomplete", "no cgroup"],
)
def test_memory_is_what_the_machine_and_the_cgroup_have_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: dict[str, str], expected: int | None
) -> None:
    for name, text in limit.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    available = available_memory()
    assert available == expected if expected is not None else available > 1 << 20


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 10, "1.5 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 50, "3.0 PiB"),
    ],
)
def test_bytes_are_written_in_the_largest_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize("kind", ["directory", "link", "pipe", "long name"])
def test_event_file_must_be_a_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("events" if kind != "long name" else 300 * "e")
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("elsewhere")
    elif kind == "pipe":
        os.mkfifo(path)
    expected = "File name too long" if kind == "long name" else "which is not a regular file"
    with pytest.raises(ConfigError, match=f"^events_path is {path}, .*{expected}"):
        Config.make(host_size="1MiB", events_path=path).check_machine()


@pytest.mark.parametrize("path", ["/proc/kv", "/proc", "/sys/kv"])
def test_file_systems_without_room_for_files_are_named(path: str) -> None:
    with pytest.raises(ConfigError, match=f"^file_path is {path}, but .* holds no files: name a directory on a disk"):
        Config.make(host_size="1MiB", file_path=path, file_size="1GiB").check_machine()


def test_event_file_needs_a_writable_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"events_path is .*, but .*nowhere is not a directory"):
        Config.make(host_size="1MiB", events_path=tmp_path / "nowhere" / "events").check_machine()
    Config.make(host_size="1MiB", events_path=tmp_path / "events").check_machine()
    monkeypatch.setattr(module.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"but {tmp_path} is not readable and writable"):
        Config.make(host_size="1MiB", events_path=tmp_path / "events").check_machine()


def test_documentation_has_the_reference_of_all_settings() -> None:
    """In one table for each section, with nothing else in it."""
    text = (Path(__file__).parents[1] / "docs" / "settings.md").read_text()
    assert sorted(each.name for each in Config.reference()) == sorted(Config.model_fields)
    for section, settings in groupby(Config.reference(), attrgetter("section")):
        rows = [f"| `{name}` | {values} | {default} | {meaning} |" for name, _, values, default, meaning in settings]
        head = [f"## {section}", "", "| setting | values | default | meaning |", "|---|---|---|---|"]
        table = "\n".join([*head, *rows, "", ""])
        assert table in text, f"expected in docs/settings.md:\n{table}"


def test_meanings_of_numbers_name_the_unit() -> None:
    units = ("bytes", "seconds", "tokens", "blocks", "chunks", "threads", "number of uses", "priority")
    numbers = [each for each in Config.reference() if each.values.startswith(("a size", "a finite", "a whole number "))]
    assert [each.name for each in numbers if not any(unit in each.meaning for unit in units)] == []


@pytest.mark.parametrize("setting", ["host_size", "file_size", "file_daily_writes", "events_size"])
@pytest.mark.parametrize("size", ["99999999PiB", "9" * 400, 1 << 61])
def test_a_size_beyond_all_machines_is_told_what_is_allowed(setting: str, size: object) -> None:
    with pytest.raises(ConfigError, match="a size is at most 1 EiB"):
        Config.make(**{setting: size})


@pytest.mark.parametrize(
    ("given", "urls"),
    [
        ("valkey://host:6379/0?ttl=1h", ("valkey://host:6379/0?ttl=1h",)),
        ("valkeys://a rediss://b:1", ("valkeys://a", "rediss://b:1")),
        (["unix:///run/v.sock", "file:///mnt/shared"], ("unix:///run/v.sock", "file:///mnt/shared")),
        ((), ()),
        ("", ()),
    ],
)
def test_stores_are_one_url_or_several_in_order(given: Any, urls: tuple[str, ...]) -> None:
    assert Config.make(remote=given).remote == urls


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        (7, "expected a URL such as valkey://host:6379/0, or a list of such URLs"),
        ([7], "expected a URL such as valkey://host:6379/0, or a list of such URLs"),
        ("http://host", "expected a URL of one of redis, rediss, valkey, valkeys, redis-cluster, rediss-cluster"),
        ("valkey://a file://relative", "expected file:///PATH with an absolute path"),
        ("valkey://host?ttl=soon", "ttl: expected a time such as 500ms, 30s or 1h"),
        ("valkey://host/0 redis://host:6379/0?ttl=1h", "expected a different URL for each remote store"),
    ],
)
def test_invalid_store_is_refused_with_what_is_allowed(given: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(allowed)):
        Config.make(remote=given)


@pytest.mark.parametrize(
    "url",
    ["valkey://user:s3cret@host", "valkey://host?password=s3cret", "valkey://us@er:s3cret@host", "valkey://h/s3cret@x"],
)
def test_no_part_of_a_password_is_repeated(url: str) -> None:
    for given in (url, [url], ["valkey://other", url], {"url": url}):
        with pytest.raises(ConfigError) as info:
            Config.make(remote=given)
        assert "s3cret" not in str(info.value) and "remote" in str(info.value)


def test_a_store_needs_a_host_tier(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use file_mode posix, or remove remote"):
        Config.make(remote="file:///mnt", file_mode="gds", file_path=tmp_path, file_size="1GiB")
