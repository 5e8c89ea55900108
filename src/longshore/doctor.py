"""What would keep tiers from working, or from being worth it: checks of stores and of this machine, before an engine.

    check_store(url, ...)    can it be reached and used, does it evict, is it fast enough, who else has written there
    check_machine(config)    memory, limits, shared memory, the file tier's disk

A `Diagnosis` says what was found, and what to do about it. Only invalid settings raise.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import os
import resource
import shutil
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from longshore.boundary import Status
from longshore.config import Config, available_memory, format_bytes
from longshore.errors import ConfigError, TierError
from longshore.runtime.peer_server import listen
from longshore.tiers.arena import Arena, ArenaSettings
from longshore.tiers.base import BY_KEY, KEY_BYTES, Op, TierOp
from longshore.tiers.file.directory import holder_of
from longshore.tiers.file.io import file_system_of, try_directory
from longshore.tiers.remote import ClusterTier, RemoteSettings, RemoteTier, open_store, parse_url
from longshore.tiers.remote.bucket import expiry_days
from longshore.tiers.remote.cluster import SLOTS, SlotMap, read_slots
from longshore.tiers.remote.format import HEADER_BYTES, VERSION, version_of
from longshore.tiers.remote.resp import RespClient, RespSession
from longshore.tiers.remote.settings import PASSWORD_VARIABLE, USER_VARIABLE
from longshore.tiers.remote.work import RemoteError

PROBED = 512
"""Keys that one probe asks for."""

_PROBES, _READS, _CALL_SECONDS, _TIMEOUT = 9, 3, 1.0, 60.0
_EXPIRY = 60.0
"""Seconds after which what was written to try a server expires."""

_SCANS, _SCANNED, _SAMPLED = 20, 500, 64
"""Calls of SCAN, keys that each looks at, and values whose headers are read."""

_SAMPLES = 20
"""Values that a server should look at for each that it evicts (docs/remote.md)."""

_UNEXPECTED_REPLY = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a check raises where a reply has another shape, or a field is not a number."""

_LEAST_OPEN_FILES = 1024
_SHARED_MEMORY, _LEAST_SHARED_MEMORY = "/dev/shm", 1 << 30  # noqa: S108 - only looked at
_NETWORKED = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "fuse", "9p", "virtiofs", "glusterfs"})
_RAM_DISKS = frozenset({"tmpfs", "ramfs"})
_CHECK_SECONDS = 10.0
"""After so long a check hangs, beyond the timeouts that a store's settings give it."""


class Severity(enum.Enum):
    """How bad a finding is: `BROKEN` means that something does not work, or will stop to."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


OK, WARNING, BROKEN = Severity
Finding = tuple[Severity, str, str]
"""How bad it is, what was found, and what to do."""


class Diagnosis(NamedTuple):
    """A finding about something."""

    about: str
    level: Severity
    what: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Recompute:
    """What fetching competes with: tokens per second that the engine computes, and cache bytes of one token."""

    model: str
    tokens_per_second: float
    bytes_per_token: int


# ---------------------------------------------------------------------- stores


def check_store(
    url: str, recompute: Recompute, *, image_bytes: int, images: int, write: bool = True
) -> list[Diagnosis]:
    """Findings about the store at `url`. Raises `ConfigError` for an invalid URL.

    With `write`, `images` images are written under a namespace of their own, read, and removed; a server drops them
    after a minute. Otherwise nothing is written, and speed is not measured.
    """
    settings = parse_url(url)
    about = str(settings)
    looks = {"s3": _objects, "mooncake": _objects, "file": _directory}
    look = _cluster if settings.is_cluster else looks.get(settings.scheme, _server)
    connecting = 8 * max(settings.connect_timeout, _CALL_SECONDS) * (1 + len(settings.more))
    found = _by_deadline(about, lambda: look(settings), _CHECK_SECONDS + connecting)
    if all(each.level is not BROKEN for each in found) and write:
        trial = _Trial(settings, image_bytes, images)
        found += _by_deadline(about, lambda: trial.findings(recompute), _CHECK_SECONDS + trial.timeout)
    return found


def _by_deadline(about: str, check: Callable[[], Iterable[Finding]], seconds: float | None = None) -> list[Diagnosis]:
    """What `check` finds. One that hangs in a file system is left to itself, which is a finding as well."""
    found, failed = list[Diagnosis](), list[Exception]()

    def run() -> None:
        try:
            found.extend(Diagnosis(about, *each) for each in check())
        except Exception as error:  # noqa: BLE001 - it is raised by the thread that waits
            failed.append(error)

    limit = _CHECK_SECONDS if seconds is None else seconds
    thread = threading.Thread(target=run, name="longshore-doctor", daemon=True)
    thread.start()
    thread.join(limit)
    if failed:
        raise failed[0]
    if thread.is_alive():
        advice = "a file system does not answer: look at its server, at `mount` and at the kernel's log (dmesg)"
        return [*found, Diagnosis(about, BROKEN, f"a check has not ended after {limit:g} s", advice)]
    return found


def _server(settings: RemoteSettings, slots: SlotMap | None = None) -> Iterator[Finding]:
    """`slots` is the map of the cluster that the server is a node of."""
    for check in (_answers, _memory, _samples, _versions, _single if slots is None else partial(_of_cluster, slots)):
        said = list[Finding]()
        try:
            with _session(settings) as session:
                said.extend(check(session, time.monotonic() + max(settings.connect_timeout, _CALL_SECONDS), settings))
        except (RemoteError, TierError, *_UNEXPECTED_REPLY) as error:
            if check is _answers:
                yield BROKEN, str(error), _advice(error, settings)
                return
            advice = "allow the user the commands INFO, CONFIG GET, SCAN and GETRANGE, or look yourself"
            what = f"a reply is not as expected ({error})" if isinstance(error, _UNEXPECTED_REPLY) else str(error)
            said.append((WARNING, f"not everything could be checked: {what}", advice))
        yield from said


def _session(settings: RemoteSettings) -> contextlib.closing[RespSession]:
    """A connection to this server; a node of a cluster answers, though keys are elsewhere."""
    store = RespClient(settings, time.monotonic, 1 << 20)
    return contextlib.closing(store.at(settings, lambda *_: None).connect())


def _answers(session: RespSession, until: float, settings: RemoteSettings) -> Iterator[Finding]:
    session.check(until)
    yield OK, "it answers", ""


def _advice(error: Exception, settings: RemoteSettings) -> str:
    """What to do about a server that cannot be used."""
    text = str(error)
    if any(code in text for code in ("NOAUTH", "WRONGPASS", "NOPERM", "password")):
        return (
            f"put the password into {PASSWORD_VARIABLE} or a file named by ?password_file=PATH, the user into "
            f"{USER_VARIABLE} or the URL; of a file only the first line counts. ACL LIST shows what a user may do"
        )
    if "ERR to AUTH" in text:
        return f"the server knows no password: unset {PASSWORD_VARIABLE} and password_file, or set its `requirepass`"
    if "SELECT" in text:
        return f"it has no database {settings.db}: use a smaller number, or raise its `databases` (16 by default)"
    if "TLS" in text or "certificates" in text:
        return "check ca_file (the authority that signed the server's certificate), server_name and the port"
    if isinstance(error, RemoteError) and error.reason == "timeout":
        return (
            "look whether the server hangs (a stopped process still accepts connections), or whether the way is long: "
            f"then raise ?connect_timeout= ({settings.connect_timeout:g} s)"
        )
    if isinstance(error, RemoteError) and error.reason == "connection":
        return (
            "start it; check host and port, its `bind` and `protected-mode`, and firewalls. A port that speaks TLS "
            "needs valkeys://"
        )
    return "read the server's log"


def _memory(session: RespSession, until: float, settings: RemoteSettings) -> Iterator[Finding]:
    """Whether the server evicts what we write."""
    info = {name: value for what in (b"memory", b"server") for name, value in _info(session, what, until)}
    kind = "Valkey" if "valkey_version" in info else "Redis"
    yield OK, f"{kind} {info.get('valkey_version', info.get('redis_version', '?'))}", ""
    limit, policy, used = int(info.get("maxmemory", 0)), info.get("maxmemory_policy", "?"), info.get("used_memory", "0")
    used = format_bytes(int(used)) if used.isdecimal() else used
    has = f"maxmemory {format_bytes(limit)} (used {used}), policy {policy}"
    set_both = "CONFIG SET maxmemory 64gb; CONFIG SET maxmemory-policy allkeys-lru; CONFIG REWRITE keeps both"
    if not limit:
        yield BROKEN, "maxmemory is 0: it grows until the system kills it", set_both
    elif policy == "noeviction":
        yield BROKEN, f"{has}: writes fail once it is full", set_both
    elif policy.startswith("volatile-") and not settings.ttl:
        advice = "CONFIG SET maxmemory-policy allkeys-lru, or add ?ttl=24h to the URL"
        yield BROKEN, f"{has}: values without an expiry are never evicted, and ours have none", advice
    elif policy == "allkeys-random":
        yield WARNING, f"{has}: also evicts what is in use", "CONFIG SET maxmemory-policy allkeys-lru"
    else:
        yield OK, has, ""


def _info(session: RespSession, what: bytes, until: float) -> Iterator[tuple[str, str]]:
    """The fields of a reply to INFO."""
    reply = session.call(b"INFO", what, deadline=until)
    for line in reply.decode(errors="replace").splitlines() if isinstance(reply, bytes) else ():
        name, _, value = line.partition(":")
        if value:
            yield name, value


def _samples(session: RespSession, until: float, settings: RemoteSettings) -> Iterator[Finding]:
    """Whether the server looks at enough values before it evicts one."""
    reply: Any = session.call(b"CONFIG", b"GET", b"maxmemory-samples", deadline=until)
    samples = int(reply[1]) if reply else _SAMPLES
    if samples < _SAMPLES:
        what = f"maxmemory-samples is {samples}: with 5, ten replicas had 6 % fewer hits than with one exact cache"
        yield WARNING, what, f"CONFIG SET maxmemory-samples {_SAMPLES}; it costs some CPU time"


def _single(session: RespSession, until: float, settings: RemoteSettings) -> Iterator[Finding]:
    """Whether the server has all keys."""
    if dict(_info(session, b"cluster", until)).get("cluster_enabled") == "1":
        yield BROKEN, "it is a node of a cluster", "write valkey-cluster://HOST:PORT"


def _of_cluster(slots: SlotMap, session: RespSession, until: float, settings: RemoteSettings) -> Iterator[Finding]:
    """Whether a node agrees on the slots of all nodes, and serves its own keys while another one is down."""
    if differ := sum(map(ne, slots, read_slots(session, settings.host, until))):
        advice = f"wait if slots are moving; else run valkey-cli --cluster check {settings.host}:{settings.port}"
        yield WARNING, f"its map of slots is not that of the first node: {differ} of {SLOTS} slots differ", advice
    reply: Any = session.call(b"CONFIG", b"GET", b"cluster-require-full-coverage", deadline=until)
    if reply and reply[1] == b"yes":
        what = "cluster-require-full-coverage is yes: if one node fails without a replica, all of them refuse"
        yield WARNING, what, "CONFIG SET cluster-require-full-coverage no; CONFIG REWRITE keeps it"


def _cluster(settings: RemoteSettings) -> Iterator[Finding]:
    """Whether the nodes of a cluster can be reached, and have all slots."""
    failures: list[Finding] = []
    for host, port in ((settings.host, settings.port), *settings.more):
        try:
            with _session(settings.node(host, port)) as session:
                slots = read_slots(session, host, time.monotonic() + _CALL_SECONDS)
            break
        except (RemoteError, TierError) as error:
            failures.append((WARNING, f"{host}:{port}: {error}", _advice(error, settings)))
    else:
        yield from ((BROKEN, what, advice) for _, what, advice in failures)
        return
    yield from failures
    if missing := slots.count(None):
        yield BROKEN, f"{missing} of {SLOTS} slots have no node", f"run valkey-cli --cluster fix {host}:{port}"
    nodes = sorted({each for each in slots if each is not None})
    yield OK, f"a cluster with {len(nodes)} nodes that have slots", ""
    for each in nodes:
        found = _server(settings.node(each.host, each.port), slots)
        yield from ((level, f"{each.host}:{each.port}: {what}", advice) for level, what, advice in found)


def _versions(session: RespSession, until: float, settings: RemoteSettings) -> Iterator[Finding]:
    """In which versions of the format the values are that a scan comes across."""
    keys: list[bytes] = []
    others: Counter[str] = Counter()
    cursor = b"0"
    for _ in range(_SCANS):
        reply: Any = session.call(b"SCAN", cursor, b"MATCH", b"ls*/*", b"COUNT", b"%d" % _SCANNED, deadline=until)
        cursor, page = reply
        for key in page:
            if key.startswith(b"ls1/"):
                keys.append(key)
            else:
                others[key.split(b"/")[0].decode(errors="replace")] += 1
        if cursor == b"0" or len(keys) >= _SAMPLED:
            break
    headers = []
    for key in keys[:_SAMPLED]:
        header = session.call(b"GETRANGE", key, b"0", b"%d" % (HEADER_BYTES - 1), deadline=until)
        headers.append(header if isinstance(header, bytes) else b"")
    yield from _of_versions(headers, others)


def _of_versions(headers: list[bytes], others: Counter[str]) -> Iterator[Finding]:
    versions = Counter(version_of(header) for header in headers)
    strange = {f"version {each}": count for each, count in versions.items() if each not in {VERSION, None}}
    strange |= {f"addresses {each}/": count for each, count in others.items()}
    if strange:
        named = ", ".join(f"{count} with {name}" for name, count in strange.items())
        advice = "run one release of Longshore on all replicas; what nobody reads is evicted, or remove it"
        yield WARNING, f"values of another format: {named}; this release reads version {VERSION}", advice
    if versions[None]:
        advice = "find out who else writes there: they are misses, and are replaced when they are stored again"
        yield WARNING, f"{versions[None]} of {len(headers)} sampled values are not ours", advice
    if not strange and not versions[None]:
        what = f"{len(headers)} sampled values have format version {VERSION}" if headers else "it has no values of ours"
        yield OK, what, ""


def _directory(settings: RemoteSettings) -> Iterator[Finding]:
    root = Path(settings.path)
    if not root.is_dir():
        advice = "mount the file system; the directory itself must exist, and is never created"
        yield BROKEN, f"{root} is not a directory", advice
        return
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        advice = "give the engine's user access, for example with a common group and chmod g+rwxs"
        yield BROKEN, f"{root} is not readable and writable for this user", advice
        return
    free, kind = shutil.disk_usage(root).free, file_system_of(root.stat().st_dev)
    yield OK, f"{kind}, {format_bytes(free)} free", ""
    if kind not in _NETWORKED and not kind.startswith("fuse"):
        advice = "replicas on other machines do not see it: mount a shared file system there"
        yield WARNING, f"{kind} is a local file system", advice
    if not settings.ttl:
        advice = "add ?ttl=24h to the URL, and remove old files: find DIR/ls1 -type f -mtime +N -delete"
        yield WARNING, "nothing evicts from a directory", advice
    others, headers = Counter(each.name for each in root.glob("ls*") if each.name != "ls1"), []
    for path in itertools.islice((root / "ls1").glob("*/*/[!.]*"), _SAMPLED):
        with contextlib.suppress(OSError), path.open("rb") as file:
            headers.append(file.read(HEADER_BYTES))
    yield from _of_versions(headers, others)


def _objects(settings: RemoteSettings) -> Iterator[Finding]:
    """Whether a bucket or Mooncake can be read; what removes our values from a bucket, and which versions they have."""
    try:
        with _open_session(settings) as session:
            session.check(time.monotonic() + settings.connect_timeout)
            headers, versions = session.headers(_SAMPLED)
    except (RemoteError, TierError) as error:
        bucket = "check endpoint, region and the bucket's name; a proxy named by HTTP_PROXY holds here as well"
        master = "start mooncake_master, and machines that give it memory (mooncake_client); check host and port"
        what, _, said = str(error).partition(": ")
        yield BROKEN, what, said or (master if settings.is_mooncake else bucket)
        return
    yield OK, "it answers" + ("" if settings.is_mooncake else ", and the access key may read"), ""
    if settings.is_s3:
        yield _lifecycle(settings)
        yield from _of_versions(headers, Counter(set(versions) - {"ls1"}))


def _open_session(settings: RemoteSettings) -> contextlib.AbstractContextManager[Any]:
    if settings.is_mooncake:
        from longshore.tiers.remote.mooncake import open_session  # noqa: PLC0415 - its package is an extra

        return open_session(settings)
    from longshore.tiers.remote.s3 import S3Session  # noqa: PLC0415 - its package is an extra

    return contextlib.closing(S3Session(settings, time.monotonic))


def _lifecycle(settings: RemoteSettings) -> Finding:
    """Whether the bucket removes what we write."""
    where = f"{settings.path}/ls1/".lstrip("/")
    try:
        days = expiry_days(settings)
    except (RemoteError, TierError) as error:
        advice = f"allow s3:GetLifecycleConfiguration, or look yourself whether a rule expires objects under {where}"
        return WARNING, f"its lifecycle rules could not be read: {error}", advice
    if days is not None:
        return OK, f"a lifecycle rule removes our values after {days} days", ""
    advice = f"add a rule that expires objects under {where}: aws s3api put-bucket-lifecycle-configuration"
    return WARNING, "no lifecycle rule removes our values: the bucket grows for ever", advice


class _Trial:
    """Images that are written, probed and read, as an engine would."""

    def __init__(self, settings: RemoteSettings, image_bytes: int, images: int) -> None:
        expires = not (settings.is_directory or settings.is_s3 or settings.is_mooncake)
        self._settings = replace(settings, ttl=_EXPIRY) if expires else settings
        self._images, self._size = images, image_bytes
        self._keys = [os.urandom(KEY_BYTES) for _ in range(max(PROBED, images))]
        self._done = threading.Event()
        waits = _PROBES * settings.probe_timeout + _READS * settings.fetch_timeout + 2 * settings.write_timeout
        self.timeout = waits + settings.connect_timeout + _CALL_SECONDS
        """Seconds that the settings give it."""

    def findings(self, recompute: Recompute) -> Iterator[Finding]:
        """Write, probe and read; what came of it."""
        arena = Arena(2 * self._images * self._size, ArenaSettings(shared=self._settings.is_mooncake))
        namespace = os.urandom(32)
        half = arena.array.nbytes // 2
        arena.array[:half] = np.random.default_rng().integers(0, 256, half, np.uint8)
        tier = open_store(self._settings, arena=arena, image_bytes=self._size, namespace=namespace)
        tier.set_completion_callback(self._done.set)
        try:
            yield from self._tried(tier, recompute)
        finally:
            tier.close()
            arena.close()
            if self._settings.is_directory:
                shutil.rmtree(Path(self._settings.path, "ls1", namespace.hex()), ignore_errors=True)
        if self._settings.is_s3 or self._settings.is_mooncake:
            try:
                with _open_session(self._settings) as session:
                    session.remove(namespace)
            except RemoteError as error:
                what = f"the images of this check remain under ls1/{namespace.hex()}: {error}"
                yield WARNING, what, "allow s3:DeleteObject, or remove them yourself"

    def _tried(self, tier: RemoteTier | ClusterTier, recompute: Recompute) -> Iterator[Finding]:
        writes, write_seconds = self._move(tier, Op.WRITE)
        if writes.keys() != {Status.OK}:
            yield self._failed("writing", writes, self._settings.write_timeout, "write_timeout")
            return
        yield self._latency([each for _ in range(_PROBES) if (each := self._probe(tier)) is not None], recompute)
        taken = []
        for _ in range(_READS):
            reads, seconds = self._move(tier, Op.READ)
            if reads.keys() != {Status.OK}:
                yield self._failed("reading", reads, self._settings.fetch_timeout, "fetch_timeout")
                return
            taken.append(seconds)
        yield self._throughput(statistics.median(taken), write_seconds, recompute)

    def _move(self, tier: RemoteTier | ClusterTier, op: Op) -> tuple[Counter[Status], float]:
        base = 0 if op is Op.WRITE else self._images * self._size
        batch = [
            TierOp(op, BY_KEY, key, None, base + index * self._size, self._size, 0)
            for index, key in enumerate(self._keys[: self._images])
        ]
        begun = time.perf_counter()
        tier.submit(batch, math.inf)
        (result,) = self._collected(tier.poll)
        return Counter(result.statuses), time.perf_counter() - begun

    def _probe(self, tier: RemoteTier | ClusterTier) -> float | None:
        begun = time.perf_counter()
        tier.ask(self._keys[:PROBED], 0, math.inf)
        ((_, present),) = self._collected(tier.answers)
        return None if present is None else time.perf_counter() - begun

    def _collected(self, collect: Callable[[], Any]) -> Any:
        give_up = time.monotonic() + _TIMEOUT
        while not (found := collect()):
            self._done.wait(0.005)
            self._done.clear()
            if time.monotonic() > give_up:
                raise TierError(f"{self._settings}: a request has not ended")
        return found

    def _failed(self, doing: str, statuses: Counter[Status], limit: float, option: str) -> Finding:
        named = ", ".join(f"{count} {status.value}" for status, count in statuses.items() if status is not Status.OK)
        what = f"{doing} {self._images} images of {format_bytes(self._size)}: {named}"
        advice = "read the server's log; ACL LIST shows whether the user may GET, SET and STRLEN ls1/*"
        if self._settings.is_s3:
            advice = "read the log above; the access key needs s3:GetObject, s3:PutObject and s3:ListBucket"
        if Status.NO_SPACE in statuses:
            advice = "the store is full: give it more room, and a policy that evicts"
        elif Status.QUEUE_FULL in statuses:
            advice = "daily_writes is too low for this check: raise it, or pass fewer --images"
        elif Status.DEADLINE in statuses:
            advice = f"they took longer than {option} ({limit:g} s): the way is too slow, or raise ?{option}="
        return BROKEN, what, advice

    def _latency(self, seconds: list[float], recompute: Recompute) -> Finding:
        limit = self._settings.probe_timeout
        if late := _PROBES - len(seconds):
            what = f"{late} of {_PROBES} probes of {PROBED} keys had no answer within {limit * 1e3:g} ms"
            advice = "requests find nothing there: use a nearer or less busy server, or raise ?probe_timeout="
            return BROKEN, what, advice
        median = statistics.median(seconds)
        tokens = median * recompute.tokens_per_second
        what = f"a probe of {PROBED} keys takes {median * 1e3:.1f} ms, as long as computing {tokens:,.0f} tokens"
        if max(seconds) > limit / 2:
            advice = f"some take {max(seconds) * 1e3:.0f} ms, near ?probe_timeout= ({limit * 1e3:g} ms): raise it"
            return WARNING, what, advice
        return OK, what, ""

    def _throughput(self, read: float, write: float, recompute: Recompute) -> Finding:
        nbytes = self._images * self._size
        tokens = nbytes / read / recompute.bytes_per_token
        what = (
            f"reads {nbytes / read / 1e9:.2f} GB/s, writes {nbytes / write / 1e9:.2f} GB/s: fetches {tokens:,.0f} "
            f"tokens per second, {recompute.model} computes {recompute.tokens_per_second:,.0f}"
        )
        if tokens > recompute.tokens_per_second:
            return OK, what, ""
        advice = (
            "computing is faster: the gate will seldom fetch. Use a faster link or a nearer store; a smaller cache "
            "(FP8) helps as well. --model, --profile and --prefill-rate say what computing costs"
        )
        return WARNING, what, advice


# ---------------------------------------------------------------------- this machine


def check_machine(config: Config) -> list[Diagnosis]:
    """Findings about this machine, for the tiers of `config`."""
    found = _by_deadline("settings", lambda: _memory_of(config))
    found = [each if each.level is BROKEN else each._replace(about="memory") for each in found]
    found += _by_deadline("locked memory", lambda: _locked_memory(config)) + _by_deadline("open files", _open_files)
    found += _by_deadline(_SHARED_MEMORY, _shared_memory)
    if (path := config.file_path) is not None:
        found += _by_deadline(f"file tier in {path}", lambda: _disk(path))
    return found + (_by_deadline(f"serve {config.serve}", lambda: _serving(config.serve)) if config.serve else [])


def _serving(url: str) -> Iterator[Finding]:
    try:
        listener, has_password = listen(parse_url(url))
        listener.close()
        advice = "without a password all who connect read cached blocks: add ?password_file=PATH"
        yield (OK, "it can be bound", "") if has_password else (WARNING, "it can be bound", advice)
    except ConfigError as error:
        yield BROKEN, str(error), "name an address of this machine, a port that is free, and files that can be read"


def _memory_of(config: Config) -> Iterator[Finding]:
    try:
        config.check_machine()
        has = f"{format_bytes(available_memory())} of memory are free, host_size is {format_bytes(config.host_size)}"
        yield OK, has, ""
    except ConfigError as error:
        yield BROKEN, str(error), "choose what this machine has, or free it"


def _shared_memory() -> Iterator[Finding]:
    shared = shutil.disk_usage(_SHARED_MEMORY) if Path(_SHARED_MEMORY).is_dir() else None
    if shared is None or shared.total < _LEAST_SHARED_MEMORY:
        has = "it is not there" if shared is None else f"it has {format_bytes(shared.total)}"
        yield WARNING, has, "engines with several ranks pass tensors there: docker run --shm-size=16g or --ipc=host"
    else:
        yield OK, f"{format_bytes(shared.free)} free", ""


def _locked_memory(config: Config) -> Iterator[Finding]:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked == resource.RLIM_INFINITY or locked >= config.host_size:
        yield OK, "unlimited" if locked < 0 else f"up to {format_bytes(locked)}", ""
    else:
        what = f"limited to {format_bytes(locked)}, host_size is {format_bytes(config.host_size)}"
        unlimited = "ulimit -l unlimited, docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity for systemd"
        yield WARNING, what, f"a GPU's driver does not count here; RDMA does: {unlimited}"


def _open_files() -> Iterator[Finding]:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _LEAST_OPEN_FILES:
        yield WARNING, f"limited to {files:,}", "raise it: ulimit -n 65536, or LimitNOFILE=65536 for systemd"
    else:
        yield OK, "unlimited" if files < 0 else f"up to {files:,}", ""


def _disk(path: Path) -> Iterator[Finding]:
    place = next(each for each in (path, *path.absolute().parents) if each.exists())  # the engine makes the rest
    if not (place.is_dir() and os.access(place, os.R_OK | os.W_OK | os.X_OK)):
        return  # found with the settings
    kind = file_system_of(place.stat().st_dev)
    has = f"{kind}, {format_bytes(shutil.disk_usage(place).free)} free"
    if kind in _RAM_DISKS:
        yield WARNING, f"{has}: a RAM disk", "it takes memory that host_size could have: raise that, or name a disk"
    elif kind in _NETWORKED or kind.startswith("fuse"):
        yield WARNING, f"{has}: not a local disk", "use a local NVMe drive, or remote=file:///PATH (docs/remote.md)"
    else:
        yield OK, has, ""
    for each in (path, *path.iterdir()) if path.is_dir() else ():  # replicas and ranks may have sub-directories
        if holder := holder_of(each):
            advice = "another engine there is refused: stop that one, or give each a directory of its own"
            yield WARNING, f"a live process (process id {holder}) has {each} open", advice
    try:
        direct, failure = try_directory(place)
    except OSError as error:
        what = f"no file could be written to try direct and asynchronous I/O: {error.strerror}"
        yield WARNING, what, "free space, or look at quotas and at the options of the mount"
        return
    cached = "reads and writes go through the page cache, which costs memory and CPU time: use ext4 or XFS"
    yield (OK, "direct I/O works", "") if direct else (WARNING, f"no direct I/O (O_DIRECT) on {kind}", cached)
    advice = (
        "threads are used instead, with more CPU time. Containers: allow io_setup and io_submit (seccomp); hosts: "
        "raise the sysctl fs.aio-max-nr; file systems: ext4 or XFS"
    )
    if failure is not None:
        yield WARNING, f"no asynchronous I/O: {failure.strerror}", advice
    elif direct:
        yield OK, "asynchronous I/O works", ""
