"""Digests of weight files: every byte counts, and what has not changed is not read again."""

from __future__ import annotations

import errno
import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore.engines import weight_files
from longshore.engines.weight_files import FileDigests, changed_since, has_weights, settings_digest
from longshore.errors import EngineError

SIZE = 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of one file, which was changed long ago."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if all files had been changed long ago: none can be made old, as nobody sets a ctime."""
    monkeypatch.setattr(weight_files, "SETTLED", -1e9)


@pytest.mark.usefixtures("settled")
def test_unchanged_files_are_hashed_once(model: Path, tmp_path: Path) -> None:
    first, second = FileDigests(tmp_path / "tier" / "memo"), FileDigests(tmp_path / "tier" / "memo")
    digest = first.of([model])
    again = FileDigests(tmp_path / "tier" / "memo")
    assert again.of([model]) == digest
    assert (first.hashed_bytes, again.hashed_bytes) == (SIZE, 0)
    assert second.of([model]) == digest
    assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in (tmp_path / "tier").iterdir()] == ["memo"]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("name", ["st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev"])
def test_any_changed_number_of_its_identity_hashes_again(model: Path, tmp_path: Path, name: str) -> None:
    memo = tmp_path / "memo"
    FileDigests(memo).of([model])
    told = json.loads(memo.read_text())
    ((identity, _),) = told["files"].values()
    identity[["st_size", "st_mtime_ns", "st_ctime_ns", "st_ino", "st_dev"].index(name)] += 1
    memo.write_text(json.dumps(told))
    again = FileDigests(memo)
    again.of([model])
    assert again.hashed_bytes == SIZE


def test_a_file_changed_a_moment_ago_is_not_memoised(model: Path, tmp_path: Path) -> None:
    memo, path = tmp_path / "memo", model / "model.safetensors"
    os.utime(path, (0, 0))  # the time stamp that anyone can set
    before = FileDigests(memo).of([model])
    assert json.loads(memo.read_text())["files"] == {}
    path.write_bytes(os.urandom(SIZE))
    assert FileDigests(memo).of([model]) != before


@pytest.mark.usefixtures("settled")
def test_writes_through_a_mapping_that_stays_are_seen(model: Path, tmp_path: Path) -> None:
    digests, path = FileDigests(tmp_path / "memo"), model / "model.safetensors"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        seen = set()
        for value in range(3):
            mapping[SIZE // 2] = value
            seen.add(digests.of([model]))
            time.sleep(0.05)  # ticks of the clock of time stamps
    assert len(seen) == 3


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("number", "waits_for_use"), [(errno.EIO, True), (errno.EINVAL, False), (errno.EROFS, False)])
def test_file_that_cannot_be_synchronised_has_no_digest(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, *, waits_for_use: bool
) -> None:
    fired = list[int]()

    def fails(fd: int) -> None:
        fired.append(fd)
        raise OSError(number, os.strerror(number))

    expected, digests = FileDigests().of([model]), FileDigests(tmp_path / "memo")
    monkeypatch.setattr(os, "fsync", fails)
    if waits_for_use:
        with pytest.raises(EngineError, match=r"model\.safetensors: cannot be synchronised: Input/output error"):
            digests.of([model])
        assert not (tmp_path / "memo").exists()
    else:
        assert digests.of([model]) == expected
    assert len(fired) == 1


@pytest.mark.usefixtures("settled")
def test_files_in_memory_are_always_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    device = model.stat().st_dev
    line = f"1 1 {os.major(device)}:{os.minor(device)} / / rw - tmpfs tmpfs rw"
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda self: line if str(self).endswith("mountinfo") else read_text(self))
    digests = FileDigests(tmp_path / "memo")
    digests.of([model])
    digests.of([model])
    assert digests.hashed_bytes == 2 * SIZE


@pytest.mark.parametrize("kind", ["in memory", "changed a moment ago"])
def test_only_once_refuses_files_that_cannot_be_memoised(
    model: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(weight_files, "SETTLED", -1e9 if kind == "in memory" else 1e9)
    monkeypatch.setattr(weight_files, "_is_in_memory", lambda device: kind == "in memory")
    digests = FileDigests()
    with pytest.raises(EngineError, match="lies in memory" if kind == "in memory" else "leave it, or touch it"):
        digests.of([model], only_once=True)
    assert digests.hashed_bytes == 0
    monkeypatch.setattr(weight_files, "SETTLED", -1e9)
    monkeypatch.setattr(weight_files, "_is_in_memory", lambda device: False)
    assert [digests.of([model], only_once=True) for _ in range(2)] == [FileDigests().of([model])] * 2
    assert digests.hashed_bytes == SIZE


@pytest.fixture(params=[b"", b"{", b"[]", b'{"format": 1}', b'{"format": 1, "files": {"a": 3}}', b"\xff" * 64])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A memo that is none."""
    path = tmp_path / "memo"
    path.write_bytes(request.param)
    return path


@pytest.mark.usefixtures("settled")
def test_a_damaged_memo_is_ignored_and_replaced(model: Path, damaged: Path) -> None:
    assert FileDigests(damaged).of([model]) == FileDigests().of([model])
    again = FileDigests(damaged)
    again.of([model])
    assert again.hashed_bytes == 0


def test_a_memo_that_cannot_be_written_costs_time_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert FileDigests(tmp_path / "file" / "memo").of([model]) == FileDigests().of([model])


def test_file_that_changes_while_read_has_no_digest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, hashed = model / "model.safetensors", weight_files._hash
    times = iter(range(1, 100))

    def change(fd: int, size: int) -> str | None:
        digest = hashed(fd, size)
        os.utime(path, (0, next(times)))
        return digest

    monkeypatch.setattr(weight_files, "_hash", change)
    with pytest.raises(EngineError, match="changes while it is read"):
        FileDigests().of([model])
    assert next(times) > 1


def test_file_truncated_while_hashed_has_no_digest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_hash", lambda fd, size, hashed=weight_files._hash: hashed(fd, size + 1))
    with pytest.raises(EngineError, match="changes while it is read"):
        FileDigests().of([model])


def test_links_in_a_circle_end(model: Path) -> None:
    (model / "above").symlink_to(model)
    (model / "elsewhere").symlink_to(model.parent / "linked")
    (model.parent / "linked").mkdir()
    before = FileDigests().of([model])
    (model.parent / "linked" / "more.safetensors").write_bytes(b"linked")
    assert FileDigests().of([model]) != before


def test_names_count_and_the_tokenizer_does_not(model: Path) -> None:
    before = FileDigests().of([model])
    (model / "tokenizer.json").write_text("{}")
    assert FileDigests().of([model]) == before
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    assert FileDigests().of([model]) != before


def test_single_file_model_is_hashed_with_neighbouring_weights(tmp_path: Path) -> None:
    path, beside = tmp_path / "model.gguf", tmp_path / "mmproj.gguf"
    path.write_bytes(b"weights")
    assert has_weights(path)
    before = FileDigests().of([path])
    beside.write_bytes(b"more")
    assert FileDigests().of([path]) != before


def test_files_of_settings_are_hashed_without_their_neighbours(tmp_path: Path) -> None:
    path, beside = tmp_path / "scales.pt", tmp_path / "other.safetensors"
    path.write_bytes(b"scales")
    before = FileDigests().of((), [path])
    assert before == FileDigests().of([path])  # as it has none
    began = time.time_ns() + 3 * 10**9
    assert changed_since(path, began, alone=True) is None
    beside.write_bytes(b"another model")
    os.utime(beside, ns=(began, began))
    assert FileDigests().of((), [path]) == before != FileDigests().of([path])
    path.write_bytes(b"Scales")
    assert FileDigests().of((), [path]) != before
    assert FileDigests().of((), [tmp_path]) == FileDigests().of([tmp_path])


def test_models_in_one_directory_have_digests_of_their_own(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("model-Q4.gguf", "model-Q8.gguf")]
    for path in paths:
        path.write_bytes(path.name.encode())
    assert FileDigests().of(paths[:1]) != FileDigests().of(paths[1:])


def test_parts_of_large_files_are_hashed_in_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model / "model.safetensors"
    monkeypatch.setattr(weight_files, "_PART_BYTES", 4096)
    monkeypatch.setattr(weight_files, "_READ_BYTES", 1000)
    content = bytearray(path.read_bytes())
    seen = {FileDigests().of([model])}
    for at in (0, 4095, 4096, 50_000, SIZE - 1):
        content[at] ^= 1
        path.write_bytes(content)
        seen.add(FileDigests().of([model]))
    content[:4096], content[4096:8192] = content[4096:8192], content[:4096]
    path.write_bytes(content)
    seen.add(FileDigests().of([model]))
    assert len(seen) == 7


class Tree:
    """Models behind links, as they are deployed: current ─► stable ─► v1, with a file that is a link, too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("v1", "v2", "elsewhere"):
            (root / name).mkdir()
            (root / name / "model.safetensors").write_bytes(name.encode())
        (root / "v1" / "linked.safetensors").symlink_to("../elsewhere/model.safetensors")
        (root / "v1" / "deep").symlink_to(root / "elsewhere")
        (root / "stable").symlink_to("v1")
        (root / "current").symlink_to(root / "stable")

    def overwrite(self) -> Path:
        path = self.root / "v1" / "model.safetensors"
        path.write_bytes(b"other")
        os.utime(path, (0, 0))
        return path

    def overwrite_behind_a_link(self) -> Path:
        path = self.root / "elsewhere" / "model.safetensors"
        path.write_bytes(b"other")
        return path

    def replace(self) -> Path:
        path = self.root / "v1" / "model.safetensors"
        (self.root / "v2" / "model.safetensors").rename(path)
        return path

    def turn_a_link(self) -> Path:
        return self._turn(self.root / "current", "v2")

    def turn_a_link_behind_a_link(self) -> Path:
        return self._turn(self.root / "stable", "v2")

    def turn_a_link_to_a_file(self) -> Path:
        return self._turn(self.root / "v1" / "linked.safetensors", "../v2/model.safetensors")

    def turn_a_link_inside(self) -> Path:
        return self._turn(self.root / "v1" / "deep", "../v2")

    def move_a_directory(self) -> Path:
        (self.root / "v1").rename(self.root / "old")
        (self.root / "v2").rename(self.root / "v1")
        return self.root / "v1"

    def _turn(self, link: Path, target: str) -> Path:
        new = link.with_name("new")
        new.symlink_to(target)
        new.replace(link)
        return link


def later() -> int:
    """A time after all that was changed, and before all that will be."""
    time.sleep(0.1)
    return time.time_ns()


@pytest.mark.parametrize("change", [name for name in vars(Tree) if not name.startswith("_")])
def test_what_has_changed_since_is_found_behind_links_too(tmp_path: Path, change: str) -> None:
    tree, began = Tree(tmp_path), later()
    assert changed_since(tmp_path / "current", began) is None
    changed = getattr(tree, change)()
    assert changed_since(tmp_path / "current", began) == changed
    assert changed_since(tmp_path / "current", later()) is None


def test_what_does_not_count_may_change(tmp_path: Path) -> None:
    tree, began = Tree(tmp_path), later()
    (tree.root / "v1" / "tokenizer.json").write_text("{}")
    (tree.root / "v1" / "training.log").write_text("")
    (tree.root / "v2" / "model.safetensors").write_bytes(b"other")
    (tree.root / "v3").mkdir()
    assert changed_since(tmp_path / "current", began) is None


def test_links_in_a_circle_are_an_error_on_the_way(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("other")
    (tmp_path / "other").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        list(weight_files._way(tmp_path / "one"))


def test_whole_second_stamp_may_be_of_a_later_change(tmp_path: Path) -> None:
    fine, coarse = (os.stat_result([0] * 10, {"st_ctime_ns": at}) for at in (5_000_000_001, 5_000_000_000))
    assert weight_files._stamp(fine) < 5_100_000_000
    assert weight_files._stamp(coarse) == 7_000_000_000


def download(cache: Path, commit: str, *, shared: Path | None = None) -> Path:
    """A snapshot, in the order in which `huggingface_hub` makes one."""
    blob, snapshot = cache / "blobs" / ("5" * 64), cache / "snapshots" / commit
    for directory in (blob.parent, snapshot, cache / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    (cache / "refs" / "main").write_text(commit)
    if not blob.exists():
        part = blob.with_suffix(".incomplete")
        part.write_bytes(b"downloaded")
        part.chmod(0o644)
        part.replace(blob if shared is None else shared)
        if shared is not None:
            blob.symlink_to(shared)
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_downloaded_meanwhile_has_not_changed(tmp_path: Path, shared: bool) -> None:
    began = later()
    snapshot = download(tmp_path / "model", "a" * 40, shared=tmp_path / "shared" if shared else None)
    assert changed_since(snapshot, began) is None
    time.sleep(0.1)
    (snapshot / "model.safetensors").write_bytes(b"overwritten")
    assert changed_since(snapshot, began) == (snapshot / "model.safetensors").resolve()


def test_a_revision_that_was_moved_meanwhile_is_told(tmp_path: Path) -> None:
    cache = tmp_path / "model"
    first, began = download(cache, "a" * 40), later()
    assert changed_since(first, began) is None
    second = download(cache, "b" * 40)
    assert changed_since(second, began) == cache / "refs" / "main"
    assert changed_since(second, later()) is None


def test_settings_digest_ignores_the_order_of_sets() -> None:
    one, other = {"a", 8, "b"}, {"b", 8, "a"}
    assert settings_digest({"x": one}) == settings_digest({"x": other})
    assert settings_digest({"x": one}) != settings_digest({"x": {"a", "b"}})
