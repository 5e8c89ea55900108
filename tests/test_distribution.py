"""What is released: an sdist from which everything can be built and read, and a wheel that runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import longshore

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def built(source: Path, hook: str, into: Path) -> Path:
    made = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(into)], cwd=source, capture_output=True, text=True, check=True
    )
    return into / made.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy of the tracked sources, unpacked."""
    folder = tmp_path_factory.mktemp("release")
    skipped = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "demo-report")
    shutil.copytree(ROOT, folder / "copy", ignore=skipped)
    with tarfile.open(built(folder / "copy", "build_sdist", folder)) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)  # none in Python 3.11.2
        archive.extractall(folder)  # noqa: S202 - our own archive
    (unpacked,) = folder.glob("longshore_kv-*/")
    return unpacked


def test_the_sdist_has_docs_examples_and_tests(sdist: Path) -> None:
    for name in ("docs/vllm.md", "examples/reference_engine/engine.py", "tests/test_distribution.py", "SECURITY.md"):
        assert (sdist / name).read_bytes() == (ROOT / name).read_bytes()


def test_the_wheel_of_the_sdist_has_the_command(sdist: Path, tmp_path: Path) -> None:
    wheel = built(sdist, "build_wheel", tmp_path)
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(installed)]
    subprocess.run([*pip, str(wheel)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [str(installed / "bin" / "longshore"), "--version"]
    said = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert wheel.name.split("-")[1] in said
    files = [each for each in (ROOT / "src" / "longshore").rglob("*") if each.is_file()]
    data = [each.relative_to(ROOT / "src") for each in files if each.suffix not in {".py", ".pyc"}]
    assert len(data) > 5
    assert [each for each in data if not (installed / each).exists()] == []


def test_the_changelog_has_the_version() -> None:
    assert re.search(rf"^## {re.escape(longshore.__version__)} ", (ROOT / "CHANGELOG.md").read_text(), re.M)
