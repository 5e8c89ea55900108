"""What obstore has no call for: the access key as the other stores' passwords are given, and requests about a bucket.

key_pair(settings)                   the access key, as of now
send_signed(settings, method, ...)   one request, with version 4 of AWS's signatures
expiry_days(settings)                when the bucket's lifecycle rules remove our values
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from longshore.errors import TierError
from longshore.tiers.remote.settings import PASSWORD_VARIABLE, USER_VARIABLE, RemoteSettings
from longshore.tiers.remote.work import RemoteError

CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
"""The code in a server's error. The rest is not repeated: servers quote access keys there."""


class KeyPair(NamedTuple):
    """An access key: its ID, its secret, and the token of a session or `None`."""

    name: str
    secret: str
    token: str | None

    def __repr__(self) -> str:
        return "KeyPair(...)"


def key_pair(settings: RemoteSettings, environment: Mapping[str, str] = os.environ) -> KeyPair | None:
    """The access key as of now: ours, else AWS's variables; `None` without one. Raises `TierError` for half of one."""
    user, secret = settings.credentials(environment)
    if bool(user) != bool(secret):
        raise TierError(
            f"{settings}: an access key needs its ID ({USER_VARIABLE} or ?user=) and its secret ({PASSWORD_VARIABLE} "
            "or ?password_file=)"
        )
    if user:
        return KeyPair(user, secret, None)
    user, secret = environment.get("AWS_ACCESS_KEY_ID", ""), environment.get("AWS_SECRET_ACCESS_KEY", "")
    return KeyPair(user, secret, environment.get("AWS_SESSION_TOKEN")) if user and secret else None


class BucketAnswer(NamedTuple):
    """What a server answers to `send_signed`."""

    status: int
    body: bytes


def send_signed(
    settings: RemoteSettings, method: str, query: str = "", body: bytes = b"", *, path: str = ""
) -> BucketAnswer:
    """Send a request about the bucket, or what is at `path` in it. Both are escaped, such as `lifecycle=` and `/a`.

    Raises `RemoteError` without an answer, `TierError` without an access key.
    """
    if (key := key_pair(settings)) is None:
        raise TierError(f"no access key: set {USER_VARIABLE} and {PASSWORD_VARIABLE}; no other keys are read here")
    region = settings.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = settings.endpoint or f"https://s3.{region}.amazonaws.com"
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    payload = hashlib.sha256(body).hexdigest()
    headers = {"host": endpoint.partition("://")[2], "x-amz-content-sha256": payload, "x-amz-date": now}
    if key.token:
        headers["x-amz-security-token"] = key.token
    names = ";".join(sorted(headers))
    lines = (f"{name}:{headers[name]}" for name in sorted(headers))
    request = "\n".join([method, f"/{settings.host}{path}", query, *lines, "", names, payload])
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(request.encode()).hexdigest()])
    secret = f"AWS4{key.secret}".encode()
    for part in scope.split("/"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    signature = hmac.digest(secret, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key.name}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    context = ssl.create_default_context(cafile=settings.ca_file or None) if settings.tls else None
    headers["content-type"] = "application/xml"
    where = f"{endpoint}/{settings.host}{path}" + (f"?{query}" if query else "")
    to_send = urllib.request.Request(where, body or None, headers, method=method)  # noqa: S310 - http or https
    try:
        with urllib.request.urlopen(to_send, timeout=settings.write_timeout, context=context) as found:  # noqa: S310
            return BucketAnswer(found.status, found.read())
    except urllib.error.HTTPError as error:
        with error:
            return BucketAnswer(error.code, error.read())
    except OSError as error:
        raise RemoteError("connection", f"no answer: {getattr(error, 'reason', error)}") from None


def expiry_days(settings: RemoteSettings) -> int | None:
    """After how many days the bucket's lifecycle rules remove our values; `None`: never.

    Raises `TierError` or `RemoteError` if they cannot be read.
    """
    status, body = send_signed(settings, "GET", "lifecycle=")
    text = body.decode(errors="replace")
    code = CODE.search(text)
    if status != 200:
        if code is not None and code[1] == "NoSuchLifecycleConfiguration":
            return None
        raise TierError(f"the server answered {status} {code[1] if code else ''}".rstrip())
    ours = f"{settings.path}/ls1/" if settings.path else "ls1/"
    days = []
    for rule in re.findall(r"<Rule>(.*?)</Rule>", text, re.DOTALL):
        prefix = re.search(r"<Prefix>(.*?)</Prefix>", rule)
        expiration = re.search(r"<Expiration>(.*?)</Expiration>", rule, re.DOTALL)
        expires = re.search(r"<Days>(\d+)<", expiration[1]) if expiration else None
        if (
            "<Status>Enabled<" in rule
            and "<Tag>" not in rule
            and expires
            and ours.startswith(prefix[1] if prefix else "")
        ):
            days.append(int(expires[1]))
    return min(days, default=None)
