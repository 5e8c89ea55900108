"""Bytes from somebody else: readers of headers and indexes under any input, directories made to do harm, trap 40."""

from __future__ import annotations

import ast
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import longshore
from longshore.boundary import Status
from longshore.checksums import digest
from longshore.errors import FormatError
from longshore.testing import TierHarness, TierTests
from longshore.tiers.arena import DISK_PAGE
from longshore.tiers.file import format as fmt
from longshore.tiers.file.directory import COPIES
from longshore.tiers.file.format import VERSION, RecordHeader, finish_page, parse_header, parse_superblock
from longshore.tiers.file.index import checkpoint_name
from longshore.tiers.file.recovery import replay_journal

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots
SCOPE = bytes(range(32))

words = st.integers(0, 2**64 - 1)
shorts = st.integers(0, 2**32 - 1)
halves = st.integers(0, 2**16 - 1)
digests = st.binary(min_size=32, max_size=32)
entries = st.lists(
    st.builds(fmt._ENTRY.pack, digests, digests, digests, shorts, halves, halves, words, words, words, shorts, shorts),
    max_size=6,
).map(b"".join)


READERS = (parse_header, parse_superblock, fmt.parse_checkpoint_header, fmt.parse_journal_header)


class TestReaders:
    @given(
        st.binary(max_size=DISK_PAGE),
        st.sampled_from([fmt.CHECKPOINT_MAGIC, fmt.JOURNAL_MAGIC, b"LNGSHREC", b"LNGSHSUP", b""]),
    )
    def test_noise_behind_a_right_prologue_only_ever_raises_format_errors(self, noise: bytes, magic: bytes) -> None:
        page = finish_page((magic + struct.pack("<I", VERSION) + noise)[: DISK_PAGE - 8])
        for parse in READERS:
            try:
                parse(page)
            except FormatError:
                continue
            assert page[:8] == magic  # only by getting every field right

    @given(st.binary(max_size=2 * DISK_PAGE))
    def test_pages_of_any_length(self, page: bytes) -> None:
        for parse in READERS:
            with pytest.raises(FormatError):
                parse(page)

    @given(entries, words, words, st.none() | words)
    def test_bodies_of_checkpoints_that_somebody_sealed(
        self, body: bytes, epoch: int, known: int, records: int | None
    ) -> None:
        count = len(body) // fmt.ENTRY.itemsize if records is None else records
        header = fmt.CheckpointHeader(epoch, count, known, digest(body))
        try:
            found = fmt.parse_checkpoint_body(header, body)
        except FormatError:
            return
        assert found.tobytes() == body
        assert fmt.valid_entries(found).all()
        assert len(np.unique(found["slot"])) == len(found)

    @given(
        st.lists(st.tuples(words, words, st.integers(0, 3), entries), max_size=4),
        st.binary(max_size=200),
        words,
        st.integers(1, 5),
    )
    def test_notes_that_somebody_sealed(
        self, notes: list[tuple[int, int, int, bytes]], noise: bytes, epoch: int, stride: int
    ) -> None:
        size = fmt.ENTRY.itemsize
        data = b"".join(
            fmt.pack_journal_record(at, serial, kind, entry[:size].ljust(size, b"\0"))
            for at, serial, kind, entry in notes
        )
        found = fmt.parse_journal_records(epoch, data + noise)
        assert len(found) <= len(notes)
        assert set(found["epoch"].tolist()) <= {epoch}
        replayed = replay_journal(np.zeros(0, fmt.ENTRY), found, stride)
        assert (replayed["length"] > 0).all()

    @given(st.binary(max_size=3 * fmt.JOURNAL_RECORD.itemsize), words)
    def test_journals_of_noise_hold_nothing(self, noise: bytes, epoch: int) -> None:
        assert len(fmt.parse_journal_records(epoch, noise)) == 0


def plant(directory: Path, packed: list[bytes]) -> None:
    """Put a checkpoint of these entries in place, newer than what is there."""
    body = b"".join(packed)
    for epoch in (1000, 1001):
        header, data = fmt.pack_checkpoint(epoch, np.frombuffer(body, fmt.ENTRY), 0)
        (directory / checkpoint_name(epoch)).write_bytes(header + data)
        (directory / f"journal.{epoch % 2}").write_bytes(b"")


def entry(slot: int, number: int, **changes: int) -> bytes:
    fields = {"slot": slot, "length": IMAGE, "generation": 0, "sequence": 5, **changes}
    return fmt.pack_entry(RecordHeader(bytes([number]) * 32, None, SCOPE, payload_checksum=0, **fields), 7)


class TestDirectories:
    def test_an_index_that_lies_serves_nothing(self, harness: TierHarness, directory: Path) -> None:
        """Slots that do not exist, giant lengths, generations to come, records that are not there."""
        harness.store(0, 0)
        harness.tier.close()
        lies = [
            entry(1, 1),
            entry(SLOTS, 2),
            entry(2**32 - 1, 3),
            entry(2, 4, length=2**63),
            entry(3, 5, generation=2**63),
            entry(4, 6, size_class=1),
        ]
        plant(directory, lies)
        harness.reopen()
        found = harness.tier.recover()
        assert {chunk.slot for chunk in found} == {1}, "only a read can tell that it is not there"
        assert all(harness.load(chunk.slot, 0)[0] is not Status.OK for chunk in found)

    @pytest.mark.parametrize("name", ["index.0", "index.1", "journal.0", "journal.1"])
    def test_a_giant_file_takes_no_memory(self, harness: TierHarness, directory: Path, name: str) -> None:
        harness.store(0, 0)
        harness.tier.close()
        os.truncate(directory / name, 1 << 40)
        harness.reopen()
        assert (directory / name).stat().st_size < 1 << 24
        harness.assert_serves(0, 0)

    def test_a_giant_lock_and_superblock(self, harness: TierHarness, directory: Path) -> None:
        harness.tier.close()
        os.truncate(directory / "lock", 1 << 40)
        harness.reopen()
        harness.tier.close()
        for name in COPIES:
            os.truncate(directory / name, 1 << 40)
        harness.reopen()
        assert {(directory / name).stat().st_size for name in COPIES} == {DISK_PAGE}


def test_trap_40_nothing_that_came_from_a_disk_is_executed() -> None:
    """No eval, and no pickle is loaded, nor by any kin of theirs: not where bytes are read, nor anywhere else."""
    written = {"PicklingError", "dump"}
    banned = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"}
    called = {"eval", "exec", "compile", "__import__"}
    found, modules = [], 0
    for path in sorted(Path(longshore.__file__).parent.rglob("*.py")):
        modules += 1
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "pickle":
                names = [] if {alias.name for alias in node.names} <= written else ["pickle"]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module.split(".")[0]]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in called:
                found.append(f"{path.name}:{node.lineno} {node.func.id}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{path.name}:{node.value.lineno} allow_pickle")
            found += [f"{path.name}:{node.lineno} {name}" for name in names if name in banned]  # type: ignore[attr-defined]
    assert modules > 100
    assert found == []
