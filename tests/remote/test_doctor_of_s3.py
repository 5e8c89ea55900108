"""`longshore doctor` with a real server of S3: access, lifecycle rules, what it leaves behind."""

import json
from pathlib import Path

import pytest
from remotes import PATIENT
from typer.testing import CliRunner

from longshore.cli.app import app
from longshore.testing import FaultyHttpProxy, HttpFault
from longshore.testing.local_server import LocalS3, free_port
from longshore.tiers.remote import parse_url
from longshore.tiers.remote.bucket import expiry_days, send_signed
from longshore.tiers.remote.format import Identity, pack_header

RULE = """<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Rule><ID>kv</ID>
<Filter><Prefix>{}</Prefix></Filter><Status>{}</Status><Expiration><Days>{}</Days></Expiration></Rule>
</LifecycleConfiguration>"""


def doctor(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    """The exit status, and what was found about stores."""
    small = ("--image", "64KiB", "--images", "4", "--prefill-rate", "0.5", "--json")
    result = CliRunner().invoke(app, ["doctor", *arguments, *small], catch_exceptions=False)
    return result.exit_code, [each for each in json.loads(result.output)["findings"] if "://" in each["about"]]


def said(found: list[dict[str, str]], level: str) -> list[str]:
    return [f"{each['what']} | {each['advice']}" for each in found if each["level"] == level]


def set_rule(server: LocalS3, prefix: str, *, days: int = 7, status: str = "Enabled") -> None:
    body = RULE.format(prefix, status, days).replace("\n", "").encode()
    assert send_signed(parse_url(server.url()), "PUT", "lifecycle=", body).status == 200


@pytest.mark.parametrize("kind", ["seaweedfs", "moto"])
def test_a_bucket_is_measured_and_left_as_it_was(kind: str, tmp_path: Path) -> None:
    with LocalS3(kind, tmp_path / "server") as server:
        status, found = doctor(server.url(PATIENT))
        assert (status, said(found, "broken")) == (0, [])
        (warning,) = said(found, "warning")
        assert "no lifecycle rule removes our values" in warning
        text = " ".join(said(found, "ok"))
        for part in ("the access key may read", "a probe of 512 keys", "GB/s", "no values of ours"):
            assert part in text
        set_rule(server, "kv/")
        status, found = doctor(server.url(PATIENT))
        assert status == 0
        assert "a lifecycle rule removes our values after 7 days" in " ".join(said(found, "ok"))
        assert said(found, "warning") == []
        listed = send_signed(parse_url(server.url()), "GET", "list-type=2&prefix=kv%2F").body
        assert b"<Contents>" not in listed
        assert b"ls1" not in listed


def test_lifecycle_rules_count_where_they_hold_for_our_values(tmp_path: Path) -> None:
    with LocalS3("moto", tmp_path / "server") as server:
        settings = parse_url(server.url())
        assert expiry_days(settings) is None
        for prefix, status, expected in (
            ("", "Enabled", 3),
            ("kv/ls1/", "Enabled", 3),
            ("kv", "Disabled", None),
            ("other/", "Enabled", None),
        ):
            set_rule(server, prefix, days=3, status=status)
            assert expiry_days(settings) == expected
        markers = "<ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker>"
        moves = "<Transition><Days>30</Days><StorageClass>GLACIER</StorageClass></Transition>"
        rule = RULE.format("", "Enabled", 0).replace("<Days>0</Days></Expiration>", f"{markers}</Expiration>{moves}")
        assert send_signed(settings, "PUT", "lifecycle=", rule.replace("\n", "").encode()).status == 200
        assert expiry_days(settings) is None, "days of a transition remove nothing"


def test_values_of_other_versions(weed: LocalS3) -> None:
    ours = pack_header(Identity(bytes(32), bytes(32), 4), memoryview(b"1234"))
    for path, value in (("ls1/a/b", ours[:8] + b"\x02" + ours[9:] + b"1234"), ("ls1/a/c", b"else"), ("ls2/a/b", b"x")):
        assert send_signed(parse_url(weed.url()), "PUT", body=value, path=f"/versions/{path}").status == 200
    status, found = doctor(weed.url(PATIENT, bucket="images/versions"), "--no-write")
    text = " ".join(said(found, "warning"))
    assert status == 0
    for part in ("1 with version 2", "1 with addresses ls2/", "1 of 2 sampled values are not ours"):
        assert part in text


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("reader", "writing 4 images of 64.0 KiB: 4 io_error"),
        ("bucket", "NoSuchBucket | create the bucket absent"),
        ("nobody", "could not connect | check endpoint"),
        ("clock", "RequestTimeTooSkewed | this machine's clock"),
        ("key", "SignatureDoesNotMatch | set the right access key"),
    ],
)
def test_one_thing_that_is_wrong(what: str, expected: str, weed: LocalS3, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("wrong-secret")
    proxy = FaultyHttpProxy(("127.0.0.1", weed.port), lambda name, number: HttpFault.SKEWED)
    urls = {
        "reader": weed.url(PATIENT, user="reader"),
        "bucket": weed.url(PATIENT, bucket="absent"),
        "nobody": weed.url("connect_timeout=200ms", port=free_port()),
        "clock": weed.url(PATIENT, port=proxy.port),
        "key": f"s3://images?endpoint=http://127.0.0.1:{weed.port}&user=AKadmin&password_file={secret}",
    }
    status, found = doctor(urls[what])
    proxy.close()
    assert status == 1
    (broken,) = said(found, "broken")
    assert expected in broken
    assert "secret-of" not in str(found) and "wrong-secret" not in str(found)
