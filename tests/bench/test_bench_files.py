"""The sides of `bench file` move every byte, each to where it comes back from."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from longshore.bench import files
from longshore.bench.files import (
    ALONE,
    SCATTERED,
    FileSide,
    FileTierSide,
    Fio,
    Images,
    PerFile,
    PlainLoop,
    VllmFiles,
    keep_in_flight,
)
from longshore.errors import BenchError

SIZE, COUNT = 16 << 10, 32


@pytest.fixture
def images() -> Iterator[Images]:
    images = Images(SIZE, COUNT * SIZE)
    yield images
    images.arena.close()


@pytest.fixture
def direct(tmp_path: Path, images: Images) -> bool:
    tier = FileTierSide(tmp_path / "probe", images)
    tier.close()
    return tier.direct


MAKERS: dict[str, Callable[[Path, Images, bool], FileSide]] = {
    "tier": lambda path, images, direct: FileTierSide(path, images),
    "plain": lambda path, images, direct: PlainLoop(path, images, direct=direct),
    "per file": lambda path, images, direct: PerFile(path, images, direct=direct),
}


@pytest.fixture(params=MAKERS)
def side(request: pytest.FixtureRequest, tmp_path: Path, images: Images, direct: bool) -> Iterator[FileSide]:
    side = MAKERS[request.param](tmp_path / "side", images, direct)
    yield side
    side.close()


def test_what_is_written_is_read(side: FileSide, images: Images) -> None:
    expected = np.random.default_rng(0).integers(0, 256, images.nbytes, dtype=np.uint8)
    for kind, again in (("write", "read"), ("overwrite", SCATTERED), ("overwrite", ALONE)):
        images.arena.array[:] = expected
        assert side.move(kind) > 0
        images.arena.array[:] = 0
        assert side.move(again) > 0
        np.testing.assert_array_equal(images.arena.array, expected)


@pytest.mark.parametrize("name", ["tier", "plain"])
def test_mixed_reads_one_half_and_writes_the_other(name: str, tmp_path: Path, images: Images, direct: bool) -> None:
    side = MAKERS[name](tmp_path / "side", images, direct)
    whole = images.arena.array
    whole[:] = 1
    side.move("overwrite")
    whole[:] = 2
    side.move("mixed")
    read = {image for image in range(COUNT) if images.view(image)[0] == 1}
    assert read == set(range(COUNT // 2))
    side.move("read")
    assert all(set(images.view(image)) == {1 if image in read else 2} for image in range(COUNT))
    side.close()


def test_prompt_is_one_read_and_one_piece_in_the_tier(images: Images) -> None:
    prompts = images.batches("read")
    assert [len(prompt) for prompt in prompts] == [16, 16]
    assert all(image == prompt[0] + at for prompt in prompts for at, image in enumerate(prompt))
    assert [len(batch) for batch in images.batches(SCATTERED)] == [16, 16]
    assert all(batch != sorted(batch) for batch in images.batches(SCATTERED))
    assert sorted(images.order("read")) == sorted(images.order(SCATTERED)) == list(range(COUNT))
    neighbours = sum(images.offset(image + 1) == images.offset(image) + SIZE for image in range(COUNT - 1))
    assert neighbours < 5, "in memory they lie anywhere"


@pytest.mark.skipif(not Fio.is_installed(), reason="fio is not installed")
@pytest.mark.parametrize("kind", ["write", "overwrite", "read", "mixed", SCATTERED])
def test_fio_runs_over_the_file(kind: str, tmp_path: Path, images: Images, direct: bool) -> None:
    fio = Fio(tmp_path / "fio", images, direct=direct)
    assert fio.move(kind) > 0
    assert (tmp_path / "fio").stat().st_size == images.nbytes


def test_a_fio_that_fails_is_not_measured(tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "fio"
    program.write_text("#!/bin/sh\necho no such engine >&2\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BenchError, match="no such engine"):
        Fio(tmp_path / "data", images, direct=False).move("read")


def test_without_fio_the_plain_loop_is_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fio, "is_installed", lambda: False)
    (case,) = files.run(tmp_path, total_bytes=1 << 20, repeats=1, only=["read/256KiB"], allow_page_cache=True)
    assert case.reference == PlainLoop.name


def test_another_user_of_the_tiers_file_does_not_disturb_reads(tmp_path: Path) -> None:
    """A read of the tier that finds anything else than its own record ends the benchmark."""
    per_file = ("vs-per-file-read", "vs-per-file-alone")
    names = [f"{kind}/256KiB" for kind in ("overwrite", "read", "mixed", SCATTERED, *per_file, "cpu")]
    cases = list(files.run(tmp_path, total_bytes=2 << 20, repeats=2, only=names, allow_page_cache=True))
    assert {case.name for case in cases} == set(names)
    assert all(case.value > 0 for case in cases)
    assert not list(tmp_path.iterdir())


def test_a_vllm_that_is_not_known_here_is_not_measured(
    tmp_path: Path, images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__path__=[]))  # type: ignore[arg-type]
    with pytest.raises(BenchError, match="has another interface"):
        VllmFiles(tmp_path / "side", images)


def test_a_reference_that_fails_is_not_measured(tmp_path: Path, images: Images) -> None:
    side = PerFile(tmp_path / "side", images, direct=False)
    with pytest.raises(BenchError, match="a reference failed"):
        side.move("read")


def test_no_more_are_under_way_than_are_to_be() -> None:
    under_way: list[int] = []
    most: list[int] = []

    def submit(batch: int) -> None:
        under_way.append(batch)
        most.append(len(under_way))

    def ended() -> int:
        return under_way.pop() and 1

    for at_once, expected in ((1, 1), (3, 3), (None, 8)):
        most.clear()
        assert keep_in_flight(range(1, 9), submit, ended, at_once) > 0
        assert (len(most), max(most)) == (8, expected)


def test_a_single_image_is_refused() -> None:
    with pytest.raises(BenchError, match="at least 8192 bytes to move, got 4096"):
        Images(4096, 4096)
