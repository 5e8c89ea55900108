"""The identity of a model: its configuration, the bytes of its weights, its scope; and why it may have none.

vLLM tells an offloading spec the name of the model and, of each group, its layers and the tokens of a block. What else
decides a block's bytes, and how far back a group looks, is in `VllmConfig`, which workers have. Rank 0 publishes a
`ModelIdentity` made of it (rendezvous.py), from which the scheduler makes the scope. If a later process could not tell
stored blocks apart, `transient` says why and what to do about it.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from longshore.config import Config
from longshore.errors import EngineError
from longshore.keys import Scope

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

    def of(self, paths: Iterable[Path], *, only_once: bool = False) -> str:
        """One digest of what is in `paths`: files, or directories with all that is below them; names included.

        With `only_once` no file is read that could not be memoised. Raises `EngineError` for such a file, and where a
        file cannot be read, or changes while it is.
        """
        begun, before = time.monotonic(), self.hashed_bytes
        try:
            digests = [[(name, self._digest(file, only_once)) for name, file in _all_files(path)] for path in paths]
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
                with contextlib.suppress(OSError):  # a file system without it
                    os.fsync(fd)
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


def changed_since(path: Path, began: int) -> Path | None:
    """A file that counts in `path`, or a link or directory on the way to one, that may have changed since `began`.

    `began` is in nanoseconds, as those of `time.time_ns`. What a download has put into a Hugging Face cache meanwhile
    has not changed: files there are named by their content, and are in place before links to them are made. Raises
    `OSError` where something is not there any more.
    """
    if path.parent.name == "snapshots" and len(list(path.parent.iterdir())) > 1:  # of which one was chosen by a name
        for name in (path.parent.parent / "refs").rglob("*"):
            if name.is_file() and _stamp(name.lstat()) > began:
                return name
    seen: set[Path] = set()
    for _, file in _all_files(path.absolute()):
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


def _all_files(path: Path) -> list[tuple[str, Path]]:
    """By name, the files that count. Of a model in one file: all weights beside it, of which it may load some."""
    if path.is_dir():
        return sorted((str(file.relative_to(path)), file) for file in _walk(path, set()))
    return sorted((file.name, file) for file in path.parent.iterdir() if file.suffix in _WEIGHTS or file == path)


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
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            about, _, kind = line.partition(" - ")
            if about.split()[2] == number:
                return kind.split()[0] in ("tmpfs", "ramfs")
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning(
            "%s: the saved digests of the weight files are damaged (%s); all files are hashed again", path, error
        )
        return {}
    return known


_FROM_FILES = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "sharded_state"),
        *("bitsandbytes", "gguf", "runai_streamer", "runai_streamer_sharded"),
    }
)
"""Values of `load_format` with which weights come from the files in the model's directory, and from nowhere else."""

_VOLATILE = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
_OF_MODEL = ("dtype", "quantization", "max_model_len", "disable_sliding_window", "model_impl", "code_revision")
_OF_CACHE = (
    *("cache_dtype", "kv_cache_dtype_skip_layers"),
    *("mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "mamba_block_size"),
)
_LATE = (
    "{} was changed after this engine had begun to start, so it may compute with other bytes than are there now; "
    "start it again, and change nothing of a model while an engine starts"
)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model of one engine.

    Attributes:
        config: Digest of the configuration as it is in force: overrides, dtypes and quantisation included.
        weights: Digest of all bytes of the files of its weights, a draft model's included; empty where `transient`.
        groups: What vLLM says of each KV cache group.
        windows: How many tokens each group looks back: `None` for all, 1 for a state.
        hashing: How tokens become hashes.
        transient: Why blocks cannot outlive the process; empty where they can.
        base_is_mixed: Whether vLLM may compute tokens of the base model with an adapter.
    """

    config: str = ""
    weights: str = ""
    groups: tuple[str, ...] = ()
    windows: tuple[int | None, ...] = ()
    hashing: str = ""
    transient: str = ""
    base_is_mixed: bool = False

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> ModelIdentity:
        """The model that `dataclasses.asdict` made `fields` of, by way of JSON."""
        return cls(**{**fields, "groups": tuple(fields["groups"]), "windows": tuple(fields["windows"])})


def vllm_config() -> Any:
    """vLLM's whole configuration, where workers are made; `None` elsewhere."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415

    return get_current_vllm_config_or_none()


def nodes() -> int:
    """How many machines the workers of one replica are on, as far as this process knows."""
    vllm = vllm_config()
    return 1 if vllm is None else int(vllm.parallel_config.nnodes_within_dp)


def are_together() -> bool:
    """Whether the ranks of this replica share memory; Ray may have put them on several machines. All ask at once."""
    from vllm.distributed.parallel_state import (  # noqa: PLC0415 - only workers have groups
        get_tp_group,
        in_the_same_node_as,
        model_parallel_is_initialized,
    )

    return not model_parallel_is_initialized() or all(in_the_same_node_as(get_tp_group().cpu_group))


def is_killed_at_once() -> bool:
    """Whether vLLM kills its engine a few seconds after it was told to stop, as far as this process knows."""
    vllm = vllm_config()
    return vllm is not None and vllm.shutdown_timeout == 0


def memo_directory(config: Config) -> Path | None:
    """Where the memo of digests is: with the files, or in the user's cache; `None` where no tier needs digests."""
    if config.file_path is not None or not config.remote:
        return config.file_path
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longshore"


def describe(groups: Sequence[Any], memo: Path | None) -> ModelIdentity:
    """The model whose worker is being made in this process; `groups` are those of an `OffloadingConfig`.

    Its weights are hashed if there is a directory for the `memo` of digests; else there is nothing to be identified.
    """
    vllm = vllm_config()
    if vllm is None:
        return ModelIdentity(windows=(None,) * len(groups), transient="vLLM has not told its configuration")
    layers = [_layers(vllm, group.layer_names) for group in groups]
    drafts = getattr(vllm.speculative_config, "draft_model_config", None)
    models = [vllm.model_config, *([] if drafts is None else [drafts])]
    paths = [_path(model, vllm.load_config.download_dir) for model in models]
    transient, weights = _transient(vllm, models, paths), ""
    if memo is not None and not transient:
        found = [path for path in paths if path is not None]
        try:
            weights = FileDigests(memo / MEMO).of(found)
            late = next(filter(None, (changed_since(path, _loading_began(vllm)) for path in found)), None)
        except (EngineError, OSError) as error:
            transient = f"weights cannot be told apart: {error}"
        else:
            if late is not None:
                transient, weights = _LATE.format(late), ""
    return ModelIdentity(
        config=_digest([_effective(model) for model in models], _fields(vllm.cache_config, _OF_CACHE)),
        weights=weights,
        groups=tuple(_group(group, each, vllm) for group, each in zip(groups, layers, strict=True)),
        windows=tuple(_window([layer.get_kv_cache_spec(vllm) for layer in each]) for each in layers),
        hashing=vllm.cache_config.prefix_caching_hash_algo,
        transient=transient,
        base_is_mixed=vllm.lora_config is not None and applies_to_base_model(),
    )


def applies_to_base_model() -> bool:
    """Whether this vLLM's CPU kernels compute base-model tokens with the last adapter, in steps with an adapter's."""
    import torch  # noqa: PLC0415 - vLLM has it
    from vllm.lora.ops.torch_ops import bgmv_expand  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if not current_platform.is_cpu():
        return False
    output = torch.zeros(1, 1)
    bgmv_expand(torch.ones(1, 1), torch.ones(1, 1, 1), output, torch.tensor([-1]), add_inputs=True)
    return bool(output.any())


def _transient(vllm: Any, models: Sequence[Any], paths: Sequence[Path | None]) -> str:
    """Why a later engine cannot use the blocks of this one; empty if it can."""
    load_format = vllm.load_config.load_format
    if load_format not in _FROM_FILES:
        return f"weights of load_format {load_format} come from no file of the model's directory; choose another"
    for model, path in zip(models, paths, strict=True):
        if getattr(model, "model_weights", ""):
            return f"the weights of {model.model} are streamed from {model.model_weights}; download them first"
        if path is None or not has_weights(path):
            return f"the weights of {model.model} lie in no directory of this machine; download them first"
    if getattr(vllm.cache_config, "calculate_kv_scales", False):
        return "scales of the KV cache are computed at run time; turn calculate_kv_scales off"
    if vllm.lora_config is not None and not _tells_of_adapters(vllm):
        return "vLLM's plain OffloadingConnector does not tell which adapter a request has; use LongshoreConnector"
    return ""


def _loading_began(vllm: Any) -> int:
    """When no weights of this engine had been loaded yet, as late as is known; in nanoseconds, like `time.time_ns`.

    That is when its configuration was made, which vLLM writes into it, or when this process began, as all ranks meet
    before they load.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    made = re.match(r"\d{19}(?!\d)", getattr(vllm, "instance_id", ""))
    return max(time.time_ns() - int(seconds * 1e9), int(made[0]) if made is not None else 0)


def _tells_of_adapters(vllm: Any) -> bool:
    transfer = getattr(vllm, "kv_transfer_config", None)
    return getattr(transfer, "kv_connector_module_path", None) == "longshore.engines.vllm.connector"


def _layers(vllm: Any, names: Sequence[str]) -> list[Any]:
    known = vllm.compilation_config.static_forward_context
    return [known[name] for name in names if name in known]


def _group(group: Any, layers: Sequence[Any], vllm: Any) -> str:
    """Tokens of a block; of each layer the name, what vLLM says of its cache, and the code that fills it."""
    each = [f"{layer.get_kv_cache_spec(vllm)} by {layer.get_attn_backend().__name__}" for layer in layers]
    return f"{group.tokens_per_block} tokens, {list(group.layer_names)}, {each}"


def _window(specs: Sequence[Any]) -> int | None:
    """The window of these layers in tokens, if all have the same one."""
    found = {_looks_back(spec) for spec in specs}
    return found.pop() if len(found) == 1 else None


def _looks_back(spec: Any) -> int | None:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec  # noqa: PLC0415

    if isinstance(spec, SlidingWindowSpec):
        return int(max(spec.sliding_window, spec.sliding_window - 1 + spec.extra_retained_tokens))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(spec.attention_chunk_size)
    return 1 if isinstance(spec, MambaSpec) else None


def _effective(model: Any) -> dict[str, Any]:
    config = {key: value for key, value in model.hf_config.to_dict().items() if key not in _VOLATILE}
    images = _fields(getattr(model, "multimodal_config", None), ("mm_processor_kwargs",))
    return {"config": config, **images, **_fields(model, _OF_MODEL)}


def _fields(of: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(of, name, None) for name in names}


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _path(model: Any, downloads: str | None) -> Path | None:
    """Where the files of a model lie: its name, or the snapshot of its revision that was downloaded."""
    if Path(model.model).exists():
        return Path(model.model)
    from vllm import envs  # noqa: PLC0415

    if envs.VLLM_USE_MODELSCOPE:  # it has directories of its own
        return None
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM has it

    try:
        return Path(snapshot_download(model.model, revision=model.revision, cache_dir=downloads, local_files_only=True))
    except (OSError, ValueError):  # not there; or no name of a model at all
        return None


_ALIKE_EVERYWHERE = ("sha256", "sha256_cbor")
"""Hashes that begin alike in each process; others do only where PYTHONHASHSEED is set."""


def why_transient(model: ModelIdentity) -> str:
    """Why no later process may be served what this one stores, and what to do about it; empty where it may."""
    hashing = model.hashing
    if not model.transient and hashing not in _ALIKE_EVERYWHERE and _seed() is None:
        return f"{hashing} begins differently in each process; set PYTHONHASHSEED, or choose sha256"
    return model.transient


def scope_of(config: Any, model: ModelIdentity, layout: str, device: str, salt: str) -> Scope:
    """What must be equal for two engines' blocks under equal keys to be equal; `config` is an `OffloadingConfig`."""
    import torch  # noqa: PLC0415 - vLLM has it
    import vllm  # noqa: PLC0415

    return Scope(
        model=model.config,
        weights=model.weights,
        dtype=config.model.dtype,
        layout=layout,
        block_size=config.groups[0].tokens_per_block,
        blocks_per_chunk=config.cache.blocks_per_chunk,
        group=json.dumps(model.groups),
        ranks=config.parallel.world_size,
        attention=f"vLLM {vllm.__version__}, torch {torch.__version__}, {device}, {config.kv_cache_layout}",
        salt=salt,
        hash_algorithm=f"{model.hashing} of {config.cache.tokens_per_hash} tokens, seed {_seed()}, paths",
    )


def _seed() -> str | None:
    """What vLLM's hashes begin with, in the process that makes them: the scheduler's."""
    return os.environ.get("PYTHONHASHSEED")
