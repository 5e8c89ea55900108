"""Digests of the files of a model's weights, by which an engine tells whether stored blocks are of the same weights.

Every byte of every weight file counts. A file that has not changed since it was hashed is not read again: the memo
identifies it by resolved path, size, mtime, ctime, inode and device. It is not memoised if these could miss a change:

    changed less than `SETTLED` seconds ago     a later change may get the same time stamp
    in tmpfs or ramfs                           writes through a mapping leave the time stamps as they are

Writes through a mapping elsewhere change the time stamps when a clean page is first written: files are synchronised
before they are hashed, so that a write after it is one. Files are hashed after the engine has loaded them;
`changed_since` finds what has changed in between, by ctime, which no program can set.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from longshore.errors import EngineError
from longshore.tiers.file.io import file_system_of

_log = logging.getLogger(__name__)

MEMO = "weights.json"
"""Name of the memo."""

SETTLED = 2.0
"""Seconds after its last change from which on a file is memoised."""

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_BESIDE = frozenset({".py", ".json"})
"""Code of the model, indexes of weights, configurations of adapters and of quantisation."""

_WITHOUT_EFFECT = frozenset(
    {
        *("config.json", "generation_config.json", "chat_template.json"),  # the first is looked at as it is in force
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    }
)
_PART_BYTES, _READ_BYTES = 64 << 20, 1 << 20
_TRIES = 3
_SECOND = 10**9
_TICK = _SECOND // 50
"""Nanoseconds by which a ctime may lie before the change that set it: file systems read a clock that ticks."""
_NO_FSYNC = frozenset({errno.EINVAL, errno.EROFS, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of a file system that cannot synchronise a file."""
_MOST_LINKS = 40
"""Most symbolic links on one path, as in Linux."""
_BLOB = re.compile(r"(.*/)?blobs/([0-9a-f]{40}|[0-9a-f]{64})")
"""Where a link of a Hugging Face snapshot points: a file that is named by a digest of its content."""
_MEMO_FORMAT = 1
_MEMO_ENTRIES = 4096

Identity = list[int]


class FileDigests:
    """Digests of files, remembered in this process; and in the file `memo` for later ones, if that is given."""

    def __init__(self, memo: Path | None = None) -> None:
        self._memo = memo
        self._known: dict[str, tuple[Identity, str]] = {} if memo is None else _read_memo(memo)
        self.hashed_bytes = 0
        """Bytes that were read because no memo had them."""

    def of(self, paths: Iterable[Path], alone: Iterable[Path] = (), *, only_once: bool = False) -> str:
        """One digest of what is in `paths`: files, or directories with all that is below them; names included.

        Weights beside a file in `paths` count as well, those beside one in `alone` do not.
        With `only_once` no file is read that could not be memoised. Raises `EngineError` for such a file, and where a
        file cannot be read or synchronised, or changes while it is.
        """
        begun, before = time.monotonic(), self.hashed_bytes
        try:
            found = [*map(_all_files, paths), *(_all_files(path, alone=True) for path in alone)]
            digests = [[(name, self._digest(file, only_once)) for name, file in files] for files in found]
        except OSError as error:
            raise EngineError(f"{error.filename}: cannot be read: {error.strerror}") from error
        if self.hashed_bytes > before:
            self._save()
            seconds, nbytes = time.monotonic() - begun, self.hashed_bytes - before
            _log.info("hashed %.2f GB of weights in %.2f s, %.1f GB/s", nbytes / 1e9, seconds, nbytes / 1e9 / seconds)
        return hashlib.sha256(json.dumps(digests).encode()).hexdigest()

    def _digest(self, path: Path, only_once: bool) -> str:
        resolved = path.resolve(strict=True)
        name = str(resolved)
        with contextlib.ExitStack() as stack:
            fd = os.open(resolved, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            for _ in range(_TRIES):
                identity = _identity(fd)
                if (known := self._known.get(name)) is not None and known[0] == identity:
                    return known[1]
                try:
                    os.fsync(fd)
                except OSError as error:
                    if error.errno not in _NO_FSYNC:  # what is read now may not be what a later start finds
                        raise EngineError(
                            f"{path}: cannot be synchronised: {error.strerror}; check the disk"
                        ) from error
                started, identity = time.time(), _identity(fd)
                why_again = _why_again(identity, started)
                if only_once and why_again:
                    raise EngineError(f"{path}: {why_again}")
                digest = _hash(fd, identity[0])
                self.hashed_bytes += identity[0]
                if digest is not None and _identity(fd) == identity:
                    if not why_again:
                        self._known[name] = identity, digest
                    return digest
        raise EngineError(f"{path}: changes while it is read; start again when nothing writes to it")

    def _save(self) -> None:
        """Replace the memo as a whole. One that cannot be written costs the next start the time to hash again."""
        if self._memo is None:
            return
        entries = dict(list(self._known.items())[-_MEMO_ENTRIES:])
        draft = self._memo.with_name(f"{self._memo.name}.{os.getpid()}")
        try:
            self._memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft.unlink(missing_ok=True)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({"format": _MEMO_FORMAT, "files": entries}, file)
            draft.replace(self._memo)
        except OSError as error:
            _log.warning(
                "%s: the digests of the weight files could not be saved, so the next start hashes all files again: %s",
                self._memo,
                error,
            )
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def has_weights(path: Path) -> bool:
    """Whether `path` is a file, or a directory with weights somewhere below it."""
    return path.is_file() or any(file.suffix in _WEIGHTS for _, file in _all_files(path))


def changed_since(path: Path, began: int, *, alone: bool = False) -> Path | None:
    """A file that counts in `path`, or a link or directory on the way to one, that may have changed since `began`.

    A file that is read `alone` has none beside it. `began` is in nanoseconds, as those of `time.time_ns`. What a
    download has put into a Hugging Face cache meanwhile has not changed: files there are named by their content, and
    are in place before links to them are made. Raises `OSError` where something is not there any more.
    """
    if path.parent.name == "snapshots" and len(list(path.parent.iterdir())) > 1:  # of which one was chosen by a name
        for name in (path.parent.parent / "refs").rglob("*"):
            if name.is_file() and _stamp(name.lstat()) > began:
                return name
    seen: set[Path] = set()
    for _, file in _all_files(path.absolute(), alone=alone):
        latest = began
        for at in _way(file):
            if at in seen:
                continue
            status = at.lstat()
            if stat.S_ISLNK(status.st_mode) and _BLOB.fullmatch(str(at.readlink())):
                latest = max(latest, status.st_ctime_ns + _TICK)
                continue
            # A directory's mtime tells of what was added to it, or removed; its ctime also that it was moved.
            is_moved = status.st_ctime_ns > status.st_mtime_ns or not stat.S_ISDIR(status.st_mode)
            if is_moved and _stamp(status) > latest:
                return at
            if latest == began:
                seen.add(at)
    return None


def _stamp(status: os.stat_result) -> int:
    """The latest time of a change that could have given a file this ctime, on file systems that keep seconds, too."""
    return status.st_ctime_ns + (_TICK if status.st_ctime_ns % _SECOND else 2 * _SECOND)


def _way(path: Path) -> Iterator[Path]:
    """Every directory and link on the way to the absolute `path`, then the file."""
    at, parts, links = Path(path.anchor), list(path.parts[1:]), 0
    while parts:
        at = Path(os.path.normpath(at / parts.pop(0)))
        yield at
        if at.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            target = at.readlink()
            at = Path(target.anchor) if target.is_absolute() else at.parent
            parts = [*target.parts[target.is_absolute() :], *parts]


def _all_files(path: Path, *, alone: bool = False) -> list[tuple[str, Path]]:
    """By name, the files that count. Of a model in one file: that file, then all weights beside it, which it may load.

    A file that is read `alone` has none beside it.

    Models in one directory, such as several quantisations, have the same files; which comes first tells them apart.
    """
    if path.is_dir():
        return sorted((str(file.relative_to(path)), file) for file in _walk(path, set()))
    if alone:
        return [(path.name, path)]
    beside = (file for file in path.parent.iterdir() if file.suffix in _WEIGHTS and file != path)
    return [(path.name, path), *sorted((file.name, file) for file in beside)]


def _walk(directory: Path, above: set[tuple[int, int]]) -> Iterator[Path]:
    """What counts in and below `directory`, also through links; a link to a directory above is not followed."""
    status = directory.stat()
    here = above | {(status.st_dev, status.st_ino)}
    if len(here) == len(above):
        return
    for path in directory.iterdir():
        if path.is_dir():
            yield from _walk(path, here)
        elif path.suffix in _WEIGHTS | _BESIDE and path.name not in _WITHOUT_EFFECT:
            yield path


def _identity(fd: int) -> Identity:
    status = os.fstat(fd)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _why_again(identity: Identity, now: float) -> str:
    """Why a file must be read again each time, and what to do about it; empty where its identity shows any change."""
    if _is_in_memory(identity[4]):
        return "it lies in memory (tmpfs), where files can change without a trace: keep it on a disk"
    if max(identity[1:3]) / 1e9 >= now - SETTLED:
        return f"it was changed less than {SETTLED:.0f} s ago, or has a time stamp of the future: leave it, or touch it"
    return ""


def _hash(fd: int, size: int) -> str | None:
    """Digest of the first `size` bytes; `None` where there are fewer. Hashing and reading release the GIL."""

    def part(begin: int) -> bytes | None:
        state, buffer, at = xxhash.xxh3_128(), memoryview(bytearray(min(_READ_BYTES, size))), begin
        end = min(begin + _PART_BYTES, size)
        while at < end:
            read = os.preadv(fd, [buffer[: end - at]], at)
            if not read:
                return None
            state.update(buffer[:read])
            at += read
        return state.digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        parts = list(pool.map(part, range(0, size, _PART_BYTES)))
    if None in parts:
        return None
    return xxhash.xxh3_128(b"".join(each for each in parts if each is not None) + str(size).encode()).hexdigest()


def _is_in_memory(device: int) -> bool:
    """Whether the file system of `device` is in memory (tmpfs, ramfs)."""
    with contextlib.suppress(OSError):
        return file_system_of(device) in ("tmpfs", "ramfs")
    return False


def _read_memo(path: Path) -> dict[str, tuple[Identity, str]]:
    """The digests in a memo; empty if there is none, or it is damaged."""
    known: dict[str, tuple[Identity, str]] = {}
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            memo = json.loads(file.read())
        if memo["format"] == _MEMO_FORMAT:
            for name, (identity, digest) in memo["files"].items():
                if len(identity) == 5 and isinstance(digest, str) and len(digest) == 32:
                    known[name] = [int(number) for number in identity], digest
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        _log.warning(
            "%s: the saved digests of the weight files are damaged (%s); all files are hashed again", path, error
        )
        return {}
    return known


UNNAMED = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
"""Fields of a model's configuration that say where it is from, and not what it computes."""


def settings_digest(*parts: Any) -> str:
    """Digest of settings: values of JSON, sets in order, and anything else by its text."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=_as_json).encode()).hexdigest()


def _as_json(value: Any) -> Any:
    return sorted(value, key=str) if isinstance(value, set | frozenset) else str(value)  # their order is of the process


def model_path(name: str, revision: str | None, downloads: str | None) -> Path:
    """Where the files of a model lie: its name, or the snapshot of its revision that was downloaded.

    Raises `EngineError` where they are not on this machine, or have no weights.
    """
    path = Path(name)
    if not path.exists():
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - both engines have it

        try:
            path = Path(snapshot_download(name, revision=revision, cache_dir=downloads, local_files_only=True))
        except (OSError, ValueError) as error:  # not there; or no name of a model at all
            raise EngineError(f"the files of {name} are not on this machine: {error}") from error
    if not has_weights(path):
        raise EngineError(f"{path} has no weights: expected safetensors, bin, pt, pth or gguf files")
    return path


LATE = (
    "{} was changed after this engine had begun to start, so it may compute with other bytes than are there now; "
    "start it again, and change nothing of a model while an engine starts"
)
"""Why a file that `changed_since` has found cannot be hashed."""


def process_began() -> int:
    """When this process began, in nanoseconds, like `time.time_ns`."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(seconds * 1e9)


def weights_digest(paths: Sequence[Path], began: int, memo: Path | None, alone: Sequence[Path] = ()) -> str:
    """Digest of all bytes of the weight files at `paths`; `memo` has those that were hashed before.

    In `alone` are files and directories that settings name: weights beside these files do not count. Raises
    `EngineError` where one cannot be read, or was changed after `began`, when nothing had been loaded yet
    (nanoseconds, like `time.time_ns`).
    """
    digest = FileDigests(memo).of(paths, alone)
    try:
        changed = [changed_since(path, began) for path in paths]
        changed += [changed_since(path, began, alone=True) for path in alone]
    except OSError as error:
        raise EngineError(f"{error.filename}: cannot be read: {error.strerror}") from error
    if (late := next(filter(None, changed), None)) is not None:
        raise EngineError(LATE.format(late))
    return digest
