"""URLs of stores; and that a password stands nowhere."""

import logging
import math
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from longshore.boundary import Status
from longshore.errors import ConfigError, TierError
from longshore.tiers.arena import Arena
from longshore.tiers.base import BY_KEY, Op, TierOp
from longshore.tiers.remote import RemoteSettings, RemoteTier, parse_url

SECRET = "hunter2-do-not-show"  # noqa: S105


OF_S3: dict[str, Any] = {"connect_timeout": 1.0, "probe_timeout": 1.0, "fetch_timeout": 5.0, "write_timeout": 10.0}

OF_MOONCAKE: dict[str, Any] = {"connect_timeout": 3.0, "probe_timeout": 0.5, "in_flight": 32 << 20}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("valkey://host", RemoteSettings("valkey", "host", 6379)),
        ("redis://host:7000/3?ttl=1h", RemoteSettings("valkey", "host", 7000, db=3, ttl=3600.0)),
        ("rediss://kv@host:1", RemoteSettings("valkeys", "host", 1, user="kv")),
        ("valkeys://[::1]:1?ca_file=/a/b", RemoteSettings("valkeys", "::1", 1, ca_file="/a/b")),
        ("valkey-cluster://a", RemoteSettings("valkey-cluster", "a", 6379)),
        ("redis-cluster://kv@a:1,b,[::1]:3/0?ttl=1s", RemoteSettings(
            "valkey-cluster", "a", 1, user="kv", ttl=1.0, more=(("b", 6379), ("::1", 3)))),
        ("rediss-cluster://a:1?ca_file=/b", RemoteSettings("valkeys-cluster", "a", 1, ca_file="/b")),
        ("unix:///run/a%20b.sock?db=2", RemoteSettings("unix", path="/run/a b.sock", db=2)),
        ("file:///m?daily_writes=5KiB", RemoteSettings("file", path="/m", daily_writes=5120, probe_timeout=0.5)),
        ("valkey://h?probe_timeout=20ms", RemoteSettings("valkey", "h", probe_timeout=0.02)),
        ("valkey://h?in_flight=2KiB", RemoteSettings("valkey", "h", in_flight=2048)),
        ("valkey://h?write=second_use", RemoteSettings("valkey", "h", write="second_use")),
        ("valkey://h?write=write_through", RemoteSettings("valkey", "h", write="all")),
        ("valkey://h?write=write_through_selective", RemoteSettings("valkey", "h", write="second_use")),
        ("valkey://h?write=write_back", RemoteSettings("valkey", "h", write="evict")),
        ("s3://images", RemoteSettings("s3", "images", **OF_S3)),
        ("s3://images/kv/a?region=eu-west-1", RemoteSettings("s3", "images", path="kv/a", region="eu-west-1", **OF_S3)),
        (
            "s3://AKID@images?endpoint=http://127.0.0.1:9000&requests=4",
            RemoteSettings("s3", "images", endpoint="http://127.0.0.1:9000", requests=4, user="AKID", **OF_S3),
        ),
        ("mooncake://h", RemoteSettings("mooncake", "h", 50051, **OF_MOONCAKE)),
        (
            "mooncake://h:1/?metadata=http://m/data&in_flight=1MiB&write=evict",
            RemoteSettings(
                "mooncake", "h", 1, metadata="http://m/data", write="evict", **{**OF_MOONCAKE, "in_flight": 1 << 20}
            ),
        ),
        ("file:///m?write=evict", RemoteSettings("file", path="/m", write="evict", probe_timeout=0.5)),
    ],
)  # fmt: skip
def test_urls(url: str, expected: RemoteSettings) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "valkey://host?write=never",
        "", "host:6379", "http://host", "valkey://", "valkey://host:port", "valkey://host:99999", "valkey://host/a",
        "valkey-cluster://", "valkey-cluster://a,", "valkey-cluster://,a", "valkey-cluster://a:x", "valkey-cluster://a,b:x",
        "valkey-cluster://a/1", "valkey-cluster://a?db=1", "valkey://a,b", "valkey-cluster://a?ca_file=/b",
        "file-cluster:///a", "valkey-cluster://a,kv@b",
        "valkey://host/-1", "valkey://host?ttl=soon", "valkey://host?ttl=-1s", "valkey://host?ttl=1e9999h",
        "valkey://host?ttl=0.1ms", "valkey://host?nothing=1", "valkey://host?ttl=1h&ttl=2h", "valkey://host?in_flight=0",
        "valkey://host?in_flight=lots", "valkey://host?fetch_timeout=0", "valkey://host#1", "valkey://host?ca_file=/a",
        "valkeys://host?cert_file=/a", "valkey://host?password_file=secret", "valkeys://host?ca_file=ca.pem",
        "valkeys://host?cert_file=a&key_file=/b", "valkey://host?password_file=",
        "unix://host/path", "unix:", "file://host/path", "file:///a?db=1",
        "s3://", "s3:///a", "s3://ab", "s3://images:9000/a", "s3://images//a", "s3://images/a?db=1",
        "s3://images?endpoint=h:9000", "s3://images?endpoint=http://h/a", "s3://images?requests=0",
        "s3://images?requests=65", "s3://images?region=a%20b", "s3://images?in_flight=1MiB", "valkey://h?requests=2",
        "file:///a?endpoint=http://h", "s3://images?endpoint=http://h&ca_file=/a", "s3://images?cert_file=/a&key_file=/b",
        "mooncake://", "mooncake://a,b", "mooncake://a/1", "mooncake://a?ttl=1h", "mooncake://u@a", "mooncake://a?requests=2",
        "mooncake://a?metadata=ftp://b", "mooncake://a?metadata=", "mooncake://a?ca_file=/b", "valkey://a?metadata=P2PHANDSHAKE",
        "file:///a?password_file=/b", "valkey://[::1", "valkey://host?db=99999999999",
    ],
)  # fmt: skip
def test_impossible_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("10.0.0.5:6379", "valkey://HOST:PORT/DB"),
        ("/mnt/shared", "file:///PATH"),
        ("mooncake://a,b", "expected one host$"),
        (f"unix:///run/{'%20' * 103}", "a unix socket's path has at most 107 bytes, got 108"),
        ("mooncake://a?ttl=1h", "ttl: not for mooncake://: Mooncake evicts"),
        ("valkeys://host?ca_file=ca.pem", "ca_file: expected an absolute path, got 'ca.pem'"),
        ("valkey://host?password_file=hunter2%40host", "password_file: expected an absolute path$"),
    ],
)
def test_an_error_says_how_to_write_it(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_url(url)


@pytest.mark.parametrize(
    "url",
    [
        f"valkey://user:{SECRET}@host:6379/0",
        f"rediss://:{SECRET}@host",
        f"valkey://user:{SECRET}@host:port",
        f"valkey://user:{SECRET}@[::1",
        f"valkey-cluster://user:{SECRET}@a,b",
        f"valkey-cluster://a,user:{SECRET}@b",
        f"valkey-cluster://user:1,{SECRET}@b",
        f"valkey-cluster://user:1,{SECRET}/@b",
        f"valkey-cluster://user:{SECRET},x@b",
        f"http://user:{SECRET}@host",
        f"file://user:{SECRET}@/mnt",
        f"valkey://host?password={SECRET}",
        f"valkey://host?Password={SECRET}",
        f"valkey://host?token={SECRET}",
        f"valkey://host#{SECRET}",
        f"valkey://user:/{SECRET}@host:6379/0",
        f"valkey://user:12/{SECRET}@host:6379/0",
        f"valkey://user:1?{SECRET}@host:6379/0",
        f"valkey://user:1?{SECRET}%40host:6379/0",
        f"valkey://user:1?ttl={SECRET}@host:6379/0",
        f"valkey://user:1?in_flight={SECRET}@host:6379/0",
        f"valkey://user:1/{SECRET}%40host:6379/0",
        f"file:///mnt/user:{SECRET}@host",
        f"s3://AKID:{SECRET}@images",
        f"s3://images?endpoint=http://AKID:{SECRET}@host:9000",
        f"s3://images?endpoint=http://AKID:{SECRET}%40host:9000",
        f"s3://images?secret={SECRET}",
        f"mooncake://user:{SECRET}@host",
        f"mooncake://host?metadata=etcd://user:{SECRET}@host",
        f"mooncake://host?metadata=etcd://user:{SECRET}%40host",
        f"s3://images?secret_access_key={SECRET}",
        f"s3://images?AWS_SECRET_ACCESS_KEY={SECRET}",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError) as refused:
        parse_url(url)
    chain: list[BaseException] = [refused.value]
    while (
        above := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)
    ) is not None:
        chain.append(above)
    assert not any(SECRET in f"{each!s} {each!r} {each.args}" for each in chain)
    assert SECRET not in caplog.text


def test_credentials_come_from_the_environment_or_a_file(tmp_path: Path) -> None:
    given = {"LONGSHORE_REMOTE_PASSWORD": SECRET, "LONGSHORE_REMOTE_USER": "kv"}
    assert parse_url("valkey://host").credentials({}) == ("", "")
    assert parse_url("valkey://host").credentials(given) == ("kv", SECRET)
    assert parse_url("valkey://me@host").credentials(given) == ("me", SECRET)
    file = tmp_path / "password"
    file.write_text(f"{SECRET}-2\nignored\n")
    settings = parse_url(f"valkey://host?password_file={file}&user=me")
    assert settings.credentials(given) == ("me", f"{SECRET}-2")
    file.write_text("changed")
    assert settings.credentials(given) == ("me", "changed")
    file.unlink()
    with pytest.raises(TierError, match="password file"):
        settings.credentials(given)


def test_a_password_stands_in_no_text_of_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("LONGSHORE_REMOTE_PASSWORD", SECRET)
    settings = parse_url("valkey://kv@127.0.0.1:1")
    settings.credentials()
    arena = Arena(4096)
    tier = RemoteTier(settings, arena=arena, image_bytes=4096, namespace=bytes(32))
    texts = (
        f"{settings!r} {settings} {tier!r} {tier.counts} {tier.failures} {tier.fallbacks} {pickle.dumps(settings)!r}"
    )
    assert SECRET not in texts + caplog.text + repr(vars(tier))
    tier.close()


def test_certificates_on_a_hung_file_system_mean_store_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longshore.tiers.remote.settings.CERTIFICATE_SECONDS", 0.1)
    hung = tmp_path / "ca.pem"
    os.mkfifo(hung)  # opening it for reading blocks, as a file on a mount does whose server is gone
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"valkeys://127.0.0.1:{listener.getsockname()[1]}?ca_file={hung}&connect_timeout=100ms"
        tier = RemoteTier(url, arena=Arena(4096), image_bytes=4096, namespace=bytes(32))
        tier.submit([TierOp(Op.READ, BY_KEY, bytes(32), None, 0, 4096, 0)], math.inf)
        give_up = time.monotonic() + 60
        while not (results := tier.poll()):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert results[0].statuses[0] in {Status.DEADLINE, Status.UNAVAILABLE}
        assert tier.failures["timeout"] >= 1
        tier.close()
    os.close(os.open(hung, os.O_WRONLY))  # the thread that reads it ends


def test_missing_certificates_are_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(TierError, match="certificates"):
        RemoteTier(
            f"valkeys://host?ca_file={tmp_path / 'none'}", arena=Arena(4096), image_bytes=4096, namespace=bytes(32)
        )
