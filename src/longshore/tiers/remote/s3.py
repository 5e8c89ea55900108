"""A bucket of S3, or of a server that speaks as it does, through obstore: one object for each value.

    s3://BUCKET/PREFIX      <prefix>/ls1/<namespace>/<key>[.r<rank>]      header, image

Each thread has one request under way, on connections of its own; probes are HEAD requests, 32 at a time. obstore keeps
the bytes of a request in memory of its own, which are copied to or from the arena, so a request that hangs keeps no
slot: its image ends at its deadline, the request at the store's timeout. obstore repeats no request: a failure is a
miss, and the circuit breaker decides when the store is tried again. Payloads are not signed: every read is verified.

What a server answers is told apart by status and code (`_typed`): no permission, a clock that is wrong, too many
requests, an error of the server.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np

from longshore.boundary import Status
from longshore.checksums import digest
from longshore.errors import TierError, with_extra
from longshore.tiers.remote.bucket import CODE, key_pair
from longshore.tiers.remote.format import HEADER_BYTES, pack_header, verify
from longshore.tiers.remote.settings import PASSWORD_VARIABLE, USER_VARIABLE, RemoteSettings
from longshore.tiers.remote.work import Image, Phase, Refusal, RemoteError, WorkQueue

try:
    import obstore
    from obstore.exceptions import BaseError
except ImportError as missing:
    raise TierError(f"stores at s3:// need obstore: {with_extra('s3')}") from missing

PROBES = 32
"""HEAD requests that are under way for one probe."""

_OF_DEADLINE = 0.9
"""The share of a probe's time in which requests are sent and answered."""

LEAST_IMAGE = 1 << 20
"""Bytes of an image below which requests cost more than bytes."""

_NOTHING = "ls1/nothing"
"""An object that nobody stores."""

_FROM_ELSEWHERE = (
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_WEB_IDENTITY_TOKEN_FILE"),
)
_ERRORS = (BaseError, OSError, ValueError)
_STATUS = re.compile(r"status code: (\d{3})")
_LATE = re.compile(r"kind: Timeout|TimedOut|timed out")
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "507"})
_CLOCKS = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_WRONG_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "401"})

_log = logging.getLogger(__name__)


class S3Session:
    """One thread's requests. Methods raise `RemoteError` where the server cannot be used."""

    def __init__(self, settings: RemoteSettings, clock: Callable[[], float]) -> None:
        """Nothing is connected, and no access key read, before the first request."""
        self._settings = settings
        self._clock = clock
        self._clients: dict[float, Any] = {}

    def check(self, deadline: float) -> None:
        """Return if the bucket can be read: an object that is not there is asked for."""
        try:
            self._client(self._settings.connect_timeout + self._settings.probe_timeout).get(_NOTHING)
        except _ERRORS as error:
            if not _is_absent(error):
                raise _typed(error, self._settings) from None

    def lengths(self, addresses: Sequence[bytes], deadline: float) -> list[int]:
        """The length of each value in bytes; 0 for one that is not there, or has expired."""
        return asyncio.run(self._lengths([each.decode() for each in addresses], deadline))

    def fetch(self, work: WorkQueue) -> None:
        """Fetch images until none waits."""
        while (image := work.take()) is not None:
            work.release(image)
            try:
                work.end(image, self._read(image, work))
            except RemoteError:
                if image.phase is not Phase.ENDED:  # its deadline has passed, which was counted
                    raise

    def store(self, work: WorkQueue, is_bad: Callable[[bytes], bool], refusal: Refusal) -> None:
        """Store images until none waits; those that are there are not sent again, unless known to be bad."""
        while (image := work.take()) is not None:
            # A new one for each: a request that has been given up may still be read from it.
            value = np.empty(HEADER_BYTES + len(image.memory), np.uint8).data
            value[HEADER_BYTES:] = image.memory
            work.release(image)
            try:
                work.end(image, self._write(image, value, is_bad, refusal))
            except RemoteError as error:
                if error.status is Status.NO_SPACE:
                    work.end(image, Status.NO_SPACE)
                elif image.phase is not Phase.ENDED:
                    raise

    def headers(self, count: int) -> tuple[list[bytes], list[str]]:
        """The first bytes of at most `count` values; and the versions of addresses, such as `ls1`, that are there."""
        client = self._client(self._settings.fetch_timeout)
        try:
            versions = [each.rpartition("/")[2] for each in client.list_with_delimiter()["common_prefixes"]]
            page: list[Any] = next(iter(client.list("ls1", chunk_size=count)), [])
            found = [bytes(client.get_range(each["path"], start=0, end=HEADER_BYTES)) for each in page if each["size"]]
        except _ERRORS as error:
            raise _typed(error, self._settings) from None
        return found, versions

    def remove(self, namespace: bytes) -> None:
        """Remove all values of `namespace`."""
        client = self._client(self._settings.write_timeout)
        try:
            for page in client.list(f"ls1/{namespace.hex()}"):
                client.delete([each["path"] for each in page])
        except _ERRORS as error:
            raise _typed(error, self._settings) from None

    def is_stale(self) -> bool:
        """No: a connection that the server has closed is not used again."""
        return False

    def shut_down(self) -> None:
        """Requests end at their timeouts; they use no byte of the arena."""

    def close(self) -> None:
        """Close the connections, as soon as nothing is under way on them."""
        self._clients.clear()

    def _client(self, seconds: float) -> Any:
        """What sends requests that end after `seconds`."""
        if seconds not in self._clients:
            self._clients[seconds] = make_client(self._settings, seconds)
        return self._clients[seconds]

    async def _lengths(self, paths: Sequence[str], deadline: float) -> list[int]:
        client, found, left = self._client(self._settings.probe_timeout), [0] * len(paths), iter(enumerate(paths))
        answered = 0

        async def some() -> None:
            nonlocal answered
            for index, path in left:
                try:
                    found[index] = self._length_of(await client.head_async(path))
                except _ERRORS as error:
                    if not _is_absent(error):
                        raise
                answered += 1

        seconds = (deadline - self._clock()) * _OF_DEADLINE
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                await asyncio.gather(*(some() for _ in range(min(PROBES, len(paths)))))
        except TimeoutError:
            if answered:  # in the order of the prompt: what was not asked in time counts as absent
                return found
            raise RemoteError("timeout", "no answer in time", Status.DEADLINE) from None
        except _ERRORS as error:
            self.check(deadline)  # errors of HEAD have no text, those of GET do
            raise _typed(error, self._settings) from None
        return found

    def _length_of(self, meta: Mapping[str, Any]) -> int:
        """How long a value is; 0 if it has expired."""
        ttl = self._settings.ttl
        return 0 if ttl and time.time() - meta["last_modified"].timestamp() > ttl else int(meta["size"])

    def _read(self, image: Image, work: WorkQueue) -> Status:
        """Read a value; how that ended."""
        expected = HEADER_BYTES + len(image.memory)
        try:
            found = self._client(self._settings.fetch_timeout).get(image.address.decode())
            length = self._length_of(found.meta)
            if length != expected:
                return Status.NOT_FOUND if not length and found.meta["size"] else _wrong(length, expected)
            value = memoryview(found.bytes())
        except _ERRORS as error:
            if _is_absent(error):
                return Status.NOT_FOUND
            raise _typed(error, self._settings) from None
        if len(value) != expected:
            return _wrong(len(value), expected)
        body = value[HEADER_BYTES:]
        status = verify(value[:HEADER_BYTES], digest(body), image.identity)
        if status is Status.OK:
            if not work.hold(image):
                return Status.DEADLINE
            image.memory[:] = body
        return status

    def _write(self, image: Image, value: memoryview, is_bad: Callable[[bytes], bool], refusal: Refusal) -> Status:
        """Write a value, unless it is there; how that ended."""
        path = image.address.decode()
        try:
            length = self._length_of(self._client(self._settings.probe_timeout).head(path))
        except _ERRORS as error:
            if not _is_absent(error):
                self.check(image.deadline)
                raise _typed(error, self._settings) from None
            length = 0
        if length == len(value) and not is_bad(image.address):
            return Status.OK
        if image.phase is Phase.ENDED or self._clock() >= image.deadline:
            return Status.DEADLINE
        if (refused := refusal(len(value))) is not None:
            return refused
        value[:HEADER_BYTES] = pack_header(image.identity, value[HEADER_BYTES:])
        try:
            self._client(self._settings.write_timeout).put(path, value, use_multipart=False)
        except _ERRORS as error:
            raise _typed(error, self._settings) from None
        return Status.OK


class S3Client:
    """A bucket."""

    def __init__(self, settings: RemoteSettings, clock: Callable[[], float], smallest: int) -> None:
        """Images have at least `smallest` bytes."""
        self.threads = settings.requests
        self._settings = settings
        self._clock = clock
        if smallest < LEAST_IMAGE:
            _log.warning(
                "%s: chunk images have %d KiB: below %d KiB, requests to S3 cost more CPU time and money than bytes: "
                "raise blocks_per_chunk",
                *(settings, smallest >> 10, LEAST_IMAGE >> 10),
            )

    def connect(self) -> S3Session:
        """A session of one thread; it connects with its first request. Raises `RemoteError`."""
        return S3Session(self._settings, self._clock)


def make_client(settings: RemoteSettings, seconds: float) -> Any:
    """A client of obstore, whose requests end after `seconds`. Raises `RemoteError` if it cannot be made."""
    try:
        key = key_pair(settings)
        authorities = Path(settings.ca_file).read_bytes() if settings.ca_file else None
    except (TierError, OSError) as error:
        raise RemoteError("denied", str(error)) from None
    config: dict[str, Any] = {"unsigned_payload": True}
    if settings.region:
        config["region"] = settings.region
    if settings.endpoint:  # both: AWS's variables may have set the second one, which counts more
        config |= {"endpoint": settings.endpoint, "aws_endpoint_url_s3": settings.endpoint}
    more: dict[str, Any] = {}
    if key is not None:
        more["credential_provider"] = lambda: _credential(settings)
    elif settings.endpoint and not any(each in os.environ for each in _FROM_ELSEWHERE):
        config["skip_signature"] = True
    options: dict[str, Any] = {
        "allow_http": not settings.tls,
        "timeout": timedelta(seconds=seconds),
        "connect_timeout": timedelta(seconds=settings.connect_timeout),
    }
    if authorities is not None:
        options["root_certificate"] = authorities
    retries = {"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)}
    prefix, kind = settings.path or None, cast(Any, obstore.store.S3Store)
    try:
        return kind(settings.host, prefix=prefix, config=config, client_options=options, retry_config=retries, **more)
    except (*_ERRORS, TypeError) as error:
        raise _typed(error, settings) from None


def _credential(settings: RemoteSettings) -> dict[str, Any]:
    """The access key as of now. obstore asks again for one that expires soon, so that it can be changed meanwhile."""
    if (key := key_pair(settings)) is None:
        raise TierError(f"{settings}: the access key is not set any more")
    soon = datetime.now(UTC) + timedelta(minutes=1)
    return {"access_key_id": key.name, "secret_access_key": key.secret, "token": key.token, "expires_at": soon}


def _wrong(length: int, expected: int) -> Status:
    return Status.SHORT if length < expected else Status.MISMATCH


def _is_absent(error: Exception) -> bool:
    """Whether an object is not there, in a bucket that is."""
    return isinstance(error, FileNotFoundError) and "<Code>NoSuchBucket<" not in str(error)


def _typed(error: Exception, settings: RemoteSettings) -> RemoteError:
    """What an error of obstore means. Its text is not repeated, because servers quote access keys in theirs."""
    text = str(error)
    status, code = _STATUS.search(text), CODE.search(text)
    number = int(status[1]) if status else 0
    name = code[1] if code else str(number)
    said = f"the server answered {number}" + (f" {code[1]}" if code else "")
    if name in _FULL or number == 507:
        return RemoteError("full", said, Status.NO_SPACE)
    if name in _CLOCKS:
        advice = (
            "this machine's clock and the server's differ by minutes: synchronise it (timedatectl, chronyc tracking)"
        )
        return RemoteError("clock", f"{said}: {advice}", Status.IO_ERROR)
    if name in _WRONG_KEYS:
        advice = (
            f"set the right access key: {USER_VARIABLE} and {PASSWORD_VARIABLE}, ?user= and ?password_file=, or AWS's"
        )
        return RemoteError("denied", f"{said}: {advice}", Status.IO_ERROR)
    if number == 403:
        advice = "allow s3:GetObject, s3:PutObject and s3:ListBucket (else what is absent is answered with 403)"
        return RemoteError("denied", f"{said}: {advice}", Status.IO_ERROR)
    if name == "NoSuchBucket":
        return RemoteError("refused", f"{said}: create the bucket {settings.host}", Status.IO_ERROR)
    if number in {429, 503}:
        return RemoteError("throttled", f"{said}: it asks for fewer requests: lower ?requests=", Status.IO_ERROR)
    if number >= 500:
        return RemoteError("server", f"{said}: read the server's log", Status.IO_ERROR)
    if number or "redirect" in text:
        advice = "the bucket is in another region: set ?region=" if number in {0, 301, 307} else "read the server's log"
        return RemoteError("refused", f"{said if number else 'a redirect'}: {advice}", Status.IO_ERROR)
    if _LATE.search(text):
        return RemoteError("timeout", "no answer in time", Status.DEADLINE)
    if "kind: Connect" in text:
        return RemoteError("connection", "could not connect")
    if "HttpError" in text or "HTTP error" in text or "error decoding response body" in text:
        return RemoteError("connection", "the connection was lost")
    if "Header" in text or "Metadata" in text or "parse" in text.lower():
        return RemoteError("broken", "invalid reply", Status.IO_ERROR)
    return RemoteError("refused", f"obstore: {type(error).__name__}", Status.IO_ERROR)
