"""`longshore doctor` with real servers that have something wrong with them."""

import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO

import pytest
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.testing.faulty_proxy import FaultyProxy, WireFault, WireReply, WireRequest
from longshore.testing.local_server import LocalMooncake, LocalServer, free_port
from longshore.tiers.remote.format import Identity, pack_header
from longshore.tiers.remote.settings import PASSWORD_VARIABLE

SMALL = ("--image", "64KiB", "--images", "4")
PATIENT = "connect_timeout=20s&probe_timeout=20s&fetch_timeout=20s&write_timeout=20s"
GOOD = {"maxmemory": "256mb", "maxmemory_policy": "allkeys-lru", "maxmemory_samples": "20"}
Findings = list[dict[str, str]]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., LocalServer]]:
    with ExitStack() as undo:
        yield lambda **options: undo.enter_context(LocalServer("valkey", tmp_path / "server", **options))


def url_of(server: LocalServer, options: str = PATIENT) -> str:
    return f"valkey://127.0.0.1:{server.port}/0?{options}"


def doctor(*arguments: str) -> tuple[int, Findings]:
    """The exit status, and what was found about stores."""
    result = CliRunner().invoke(app, ["doctor", *arguments, *SMALL, "--json"], catch_exceptions=False)
    found = json.loads(result.output)
    stores = [each for each in found["findings"] if "://" in each["about"]]
    broken = [each for each in found["findings"] if each["level"] == "broken"]
    assert found["broken"] == len(broken)
    assert all(each["advice"] for each in found["findings"] if each["level"] != "ok")
    return result.exit_code, stores


def broken(found: Findings) -> list[str]:
    return [f"{each['what']} | {each['advice']}" for each in found if each["level"] == "broken"]


def test_a_good_server_is_measured_and_left_as_it_was(started: Callable[..., LocalServer]) -> None:
    server = started(**GOOD)
    status, found = doctor(url_of(server), "--prefill-rate", "0.5")
    assert (status, broken(found)) == (0, [])
    text = " ".join(each["what"] for each in found)
    for part in ("it answers", "Valkey 9", "policy allkeys-lru", "a probe of 512 keys", "GB/s", "no values of ours"):
        assert part in text
    assert all(each["level"] == "ok" for each in found)
    keys = server.command(b"KEYS", b"*")
    assert keys.startswith(b"*4\r\n")
    for line in keys.split(b"\r\n"):
        if line.startswith(b"ls1/"):
            assert 0 < int(server.command(b"PTTL", line)[1:]) <= 60_000


def test_fetching_that_is_slower_than_computing_is_a_warning(started: Callable[..., LocalServer]) -> None:
    status, found = doctor(url_of(started(**GOOD)), "--prefill-rate", "1e9")
    assert status == 0
    (warning,) = (each for each in found if each["level"] == "warning")
    assert "computing is faster" in warning["advice"]


def test_a_server_that_evicts_at_random(started: Callable[..., LocalServer]) -> None:
    status, found = doctor(url_of(started(**{**GOOD, "maxmemory_samples": "5"})), "--no-write")
    assert status == 0
    (warning,) = (each for each in found if each["level"] == "warning")
    assert "maxmemory-samples is 5" in warning["what"]


def test_without_writing_nothing_is_written(started: Callable[..., LocalServer]) -> None:
    server = started(**GOOD)
    status, found = doctor(url_of(server), "--no-write")
    assert status == 0
    assert server.command(b"DBSIZE") == b":0\r\n"
    assert not [each for each in found if "GB/s" in each["what"]]


@pytest.mark.parametrize(
    ("options", "url", "said"),
    [
        ({}, PATIENT, ["maxmemory is 0", "maxmemory-policy allkeys-lru"]),
        ({**GOOD, "maxmemory_policy": "noeviction"}, PATIENT, ["noeviction: writes fail once it is full"]),
        ({**GOOD, "maxmemory_policy": "volatile-lru"}, PATIENT, ["never evicted", "?ttl="]),
        ({**GOOD, "maxmemory_policy": "volatile-lru"}, f"ttl=1h&{PATIENT}", []),
        ({**GOOD, "requirepass": "right"}, PATIENT, ["NOAUTH", PASSWORD_VARIABLE]),
    ],
)
def test_a_server_with_one_thing_wrong(
    options: dict[str, str], url: str, said: list[str], started: Callable[..., LocalServer]
) -> None:
    status, found = doctor(url_of(started(**options), url))
    assert status == bool(said)
    assert len(broken(found)) == bool(said)
    assert all(part in broken(found)[0] for part in said)


def test_passwords_are_used_and_never_shown(
    started: Callable[..., LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = started(**GOOD, requirepass="the-right-word")
    monkeypatch.setenv(PASSWORD_VARIABLE, "a-wrong-word")
    status, found = doctor(url_of(server))
    assert status == 1
    assert "WRONGPASS" in broken(found)[0]
    assert "word" not in str(found).replace("password", "")
    file = tmp_path / "password"
    file.write_text("the-right-word\n")
    assert doctor(url_of(server, f"password_file={file}&{PATIENT}"))[0] == 0
    status, found = doctor(url_of(server, f"password_file={tmp_path / 'none'}&{PATIENT}"))
    assert status == 1
    assert "password file" in broken(found)[0]


def test_missing_database_and_needless_password_are_reported(
    started: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = started(**GOOD).port
    status, found = doctor(f"valkey://127.0.0.1:{port}/99?{PATIENT}")
    assert status == 1
    (said,) = broken(found)
    assert said.startswith("the server answered ERR to SELECT | ")
    assert "no database 99" in said
    monkeypatch.setenv(PASSWORD_VARIABLE, "needless-word")
    status, found = doctor(f"valkey://127.0.0.1:{port}/0?{PATIENT}")
    assert status == 1
    (said,) = broken(found)
    assert said.startswith("the server answered ERR to AUTH | ")
    assert f"unset {PASSWORD_VARIABLE}" in said
    assert "needless" not in said


def test_a_user_who_may_do_little(started: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch) -> None:
    server = started(**GOOD)
    server.command(b"ACL", b"SETUSER", b"kv", b"on", b">word", b"~ls1/*", b"+get", b"+strlen", b"+ping", b"+auth")
    monkeypatch.setenv(PASSWORD_VARIABLE, "word")
    status, found = doctor(f"valkey://kv@127.0.0.1:{server.port}?{PATIENT}")
    assert status == 1
    assert [each["what"] for each in found if "not everything" in each["what"]]
    assert "writing 4 images" in broken(found)[0]


def test_a_full_server(started: Callable[..., LocalServer]) -> None:
    server = started(maxmemory="3mb", maxmemory_policy="allkeys-lru")
    server.command(b"CONFIG", b"SET", b"maxmemory", b"1")
    status, found = doctor(url_of(server))
    assert status == 1
    assert "the store is full" in broken(found)[0]


def test_a_stopped_server_and_none(started: Callable[..., LocalServer]) -> None:
    server = started(**GOOD)
    server.pause()
    try:
        status, found = doctor(url_of(server, "connect_timeout=200ms"), f"valkey://127.0.0.1:{free_port()}")
    finally:
        server.resume()
    assert status == 1
    stopped, absent = broken(found)
    assert "in time" in stopped
    assert "hangs" in stopped
    assert "refused" in absent
    assert "start it" in absent


def test_the_stores_of_the_settings(tmp_path: Path) -> None:
    port = free_port()
    file = tmp_path / "longshore.toml"
    file.write_text(f'host_size = "1MiB"\nremote = ["valkey://127.0.0.1:{port}/0", "file://{tmp_path}/absent"]\n')
    status, found = doctor("--config", str(file), f"file://{tmp_path}/absent")
    assert (status, len(found)) == (1, 2)
    assert [each["about"] for each in found] == [f"valkey://127.0.0.1:{port}/0", f"file://{tmp_path}/absent"]


def test_something_that_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        status, found = doctor(f"valkey://127.0.0.1:{listener.getsockname()[1]}?connect_timeout=200ms")
    assert (status, len(broken(found))) == (1, 1)


class Altering(FaultyProxy):
    """Passes on replies to INFO with another value of `field`."""

    field, value = b"", b""

    def _read_reply(self, stream: BinaryIO, request: WireRequest) -> WireReply:
        reply = super()._read_reply(stream, request)
        if request.name != b"INFO":
            return reply
        info = re.sub(
            rb"(?m)^%b:[^\r]*" % self.field, self.field + b":" + self.value, reply.raw.split(b"\r\n", 1)[1][:-2]
        )
        return reply._replace(raw=b"$%d\r\n%b\r\n" % (len(info), info))


@pytest.mark.parametrize("value", [b"a-quarter", b"9" * 400])
def test_a_memory_limit_that_is_not_a_number(value: bytes, started: Callable[..., LocalServer]) -> None:
    proxy = Altering(("127.0.0.1", started(**GOOD).port), lambda *_: None)
    proxy.field, proxy.value = b"maxmemory", value
    with closing(proxy):
        status, found = doctor(f"valkey://127.0.0.1:{proxy.port}/0?{PATIENT}")
    what = [each["what"] for each in found]
    assert status == 0
    assert any("not everything could be checked: a reply is not as expected" in each for each in what)
    assert any(each.startswith("Valkey ") for each in what)  # what was found before


def test_used_memory_that_is_not_a_number(started: Callable[..., LocalServer]) -> None:
    proxy = Altering(("127.0.0.1", started(maxmemory="256mb", maxmemory_policy="noeviction").port), lambda *_: None)
    proxy.field, proxy.value = b"used_memory", b"1.5M"
    with closing(proxy):
        status, found = doctor(f"valkey://127.0.0.1:{proxy.port}/0?{PATIENT}")
    assert status == 1
    assert "used 1.5M" in broken(found)[0]


@pytest.mark.parametrize("command", [b"INFO", b"CONFIG", b"SCAN", b"GETRANGE"])
@pytest.mark.parametrize("fault", [WireFault.EXTRA, WireFault.JUNK, WireFault.HALF, WireFault.ERROR])
def test_a_reply_of_another_shape(command: bytes, fault: WireFault, started: Callable[..., LocalServer]) -> None:
    server = started(**GOOD)
    server.command(b"SET", b"ls1/abc/def", b"something else")
    for seed in range(4):
        proxy = FaultyProxy(("127.0.0.1", server.port), lambda name, _: fault if name == command else None, seed)
        with closing(proxy):
            status, found = doctor(f"valkey://127.0.0.1:{proxy.port}/0?{PATIENT}", "--no-write")
        assert proxy.fired[fault] >= 1
        assert status == 0
        seen = any("not everything could be checked" in each["what"] for each in found)
        assert seen or fault is WireFault.EXTRA  # which may be a reply that means no value


def test_values_of_other_versions(started: Callable[..., LocalServer]) -> None:
    server = started(**GOOD)
    identity = Identity(bytes(32), bytes(32), 4)
    ours = pack_header(identity, memoryview(b"1234"))
    server.command(b"SET", identity.address, ours[:8] + b"\x02" + ours[9:] + b"1234")
    server.command(b"SET", b"ls2/abc/def", b"x")
    server.command(b"SET", b"ls1/abc/def", b"something else")
    status, found = doctor(url_of(server), "--no-write")
    assert status == 0
    text = " ".join(each["what"] for each in found if each["level"] == "warning")
    assert "1 with version 2" in text
    assert "1 with addresses ls2/" in text
    assert "1 of 2 sampled values are not ours" in text


def test_a_directory_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.doctor._CHECK_SECONDS", 0.5)
    monkeypatch.setattr("longshore.doctor._CALL_SECONDS", 0.01)
    folder = tmp_path / "ls1" / ("0" * 64) / "ab"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "ab")  # opening it blocks, as a file does whose server is gone
    status, found = doctor(f"file://{tmp_path}", f"valkey://127.0.0.1:{free_port()}")
    assert status == 1
    hung, absent = broken(found)
    assert "has not ended" in hung
    assert "a file system does not answer" in hung
    assert "refused" in absent
    os.close(os.open(folder / "ab", os.O_WRONLY))  # the thread ends


def test_a_password_file_that_hangs(
    started: Callable[..., LocalServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longshore.doctor._CHECK_SECONDS", 0.5)
    hung = tmp_path / "password"
    os.mkfifo(hung)
    url = url_of(started(**GOOD), f"password_file={hung}&connect_timeout=200ms")
    status, found = doctor(url)
    assert status == 1
    assert "has not ended" in broken(found)[0]
    os.close(os.open(hung, os.O_WRONLY))


def test_a_directory(tmp_path: Path) -> None:
    status, found = doctor(f"file://{tmp_path}?{PATIENT.replace('connect_timeout=20s&', '')}")
    assert (status, broken(found)) == (0, [])
    assert "nothing evicts" in str(found)
    assert not list(tmp_path.glob("ls1/*"))
    status, found = doctor(f"file://{tmp_path}/absent")
    assert status == 1
    assert "mount the file system" in broken(found)[0]


def test_doctor_measures_mooncake_and_leaves_nothing(mooncake: LocalMooncake) -> None:
    words = ("--image", "64KiB", "--images", "4", "--prefill-rate", "0.5")
    result = CliRunner().invoke(app, ["doctor", mooncake.url(PATIENT), *words], catch_exceptions=False)
    text = " ".join(result.output.split())
    assert result.exit_code == 0, text
    for part in ("it answers", "a probe of 512 keys", "GB/s"):
        assert part in text
    assert "remain" not in text


@pytest.mark.parametrize("fault", ["absent", "stopped"])
def test_doctor_says_that_mooncakes_master_is_unreachable(fault: str, own_mooncake: LocalMooncake) -> None:
    url = own_mooncake.url("connect_timeout=3s", port=free_port() if fault == "absent" else None)
    if fault == "stopped":
        own_mooncake.pause()
    result = CliRunner().invoke(app, ["doctor", url, "--prefill-rate", "0.5"], catch_exceptions=False)
    own_mooncake.resume()
    text = " ".join(result.output.split())
    assert result.exit_code == 1
    assert "start mooncake_master" in text
    assert ("could not connect" if fault == "absent" else "does not answer") in text
