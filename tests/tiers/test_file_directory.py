"""The file tier's directory: ours alone, and only one process's at a time."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from longshore.errors import FormatError, TierError, TierInUseError
from longshore.testing import TierTests
from longshore.tiers.file import FileTier, capacity_for
from longshore.tiers.file.format import Superblock, pack_superblock

IMAGE, SLOTS = TierTests.image_bytes, TierTests.slots

FILES = ("lock", "superblock", "superblock.copy", "reset", "segment", "index.0", "index.1", "journal.0", "journal.1")

Opener = Callable[..., FileTier]


class TestOwnership:
    def test_only_we_can_read(self, opener: Opener, directory: Path) -> None:
        opener()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()} == dict.fromkeys(FILES, 0o600)

    def test_a_directory_that_others_can_write_is_refused(self, opener: Opener, directory: Path) -> None:
        directory.mkdir()
        directory.chmod(0o770)
        with pytest.raises(TierError, match=f"0770.*chmod 700 {directory}"):
            opener()

    @pytest.mark.parametrize("mode", [0o755, 0o750, 0o711])
    def test_directory_open_to_others_is_made_private(
        self, opener: Opener, directory: Path, mode: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        directory.mkdir()
        directory.chmod(mode)
        opener()
        assert directory.stat().st_mode & 0o777 == 0o700
        assert f"could be read by others (mode {mode:04o}); changed to 0700" in caplog.text

    def test_a_directory_of_another_user_is_refused(
        self, opener: Opener, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        directory.mkdir(mode=0o700)
        me = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(TierError, match=f"^{directory} belongs to user {me}; expected user {me + 1}"):
            opener()

    def test_a_symbolic_link_to_a_directory_is_refused(self, opener: Opener, directory: Path, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(TierError, match="symbolic link"):
            opener()
        assert list((tmp_path / "elsewhere").iterdir()) == []

    @pytest.mark.parametrize("name", FILES)
    @pytest.mark.parametrize("kind", ["symlink_to", "hardlink_to"])
    def test_a_link_in_place_of_a_file_is_refused(
        self, opener: Opener, directory: Path, tmp_path: Path, name: str, kind: str
    ) -> None:
        precious = tmp_path / "precious"
        precious.write_bytes(pack_superblock(Superblock(SLOTS, 4096 + IMAGE, (IMAGE,), 0, 0)))
        before = precious.read_bytes()
        directory.mkdir(mode=0o700)
        getattr(directory / name, kind)(precious)
        with pytest.raises(TierError, match=r"symbolic link|2 hard links"):
            opener()
        assert precious.read_bytes() == before

    def test_a_pipe_in_place_of_a_file_is_refused(self, opener: Opener, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        os.mkfifo(directory / "segment")
        with pytest.raises(TierError, match="regular file"):
            opener()

    def test_a_file_in_place_of_the_directory_is_refused(self, opener: Opener, directory: Path) -> None:
        directory.write_text("not a directory")
        with pytest.raises(TierError, match=str(directory)):
            opener()


class TestLock:
    def test_a_second_opener_is_told_what_to_do(self, opener: Opener, directory: Path) -> None:
        opener()
        with pytest.raises(
            TierInUseError, match=rf"{directory} .*process id {os.getpid()}, this one\): stop it, .*{directory}/rank0"
        ):
            opener()

    def test_a_failed_open_gives_the_directory_back(self, opener: Opener, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        (directory / "superblock").write_bytes(b"not ours")
        with pytest.raises(FormatError):
            opener()
        (directory / "superblock").unlink()
        opener()

    def test_a_forked_child_does_not_keep_it(self, opener: Opener, directory: Path) -> None:
        program = "child = os.fork(); print(child, flush=True) if child else None; time.sleep(600)"
        with running(directory, program) as holder:
            child = int(holder.readline())
            with pytest.raises(TierInUseError, match=f"process id {holder.pid}"):
                opener()
        try:
            opener().close()
            os.kill(child, 0)  # it lives, with its copies of all descriptors
        finally:
            os.kill(child, signal.SIGKILL)

    def test_a_forked_child_cannot_use_the_tier_nor_release_it(self, opener: Opener, directory: Path) -> None:
        program = """
def refused(call):
    try: call()
    except TierClosedError as error: return 'process that forked' in str(error)

if not os.fork():
    calls = lambda: tier.submit([], 1e9), lambda: tier.reset(1), tier.recover, tier.poll, lambda: tier.cancel(0)
    print(all([refused(call) for call in calls]), flush=True)
    tier.close()
    os._exit(0)
os.wait(); print('child ended', flush=True); time.sleep(600)"""
        with running(directory, program) as holder:
            assert [holder.readline(), holder.readline()] == [b"True\n", b"child ended\n"]
            with pytest.raises(TierInUseError, match=f"process id {holder.pid}"):
                opener()
        opener()

    def test_forked_child_keeps_its_lock_after_closing_inherited_files(self, opener: Opener, directory: Path) -> None:
        program = """
ours, theirs = os.pipe()
if os.fork():
    tier.close(); os.write(theirs, b'.'); os.wait()
os.read(ours, 1)
own = FileTier(path, **settings)
tier.close(); print(os.getpid(), flush=True); time.sleep(600)"""
        with running(directory, program) as holder:
            child = int(holder.readline())
            try:
                with pytest.raises(TierInUseError, match=f"process id {child}"):
                    opener()
            finally:
                os.kill(child, signal.SIGKILL)


class Holder(NamedTuple):
    """A process that has a tier open."""

    pid: int
    readline: Callable[[], bytes]


@contextlib.contextmanager
def running(directory: Path, then: str) -> Iterator[Holder]:
    """A process that opens the tier in `directory`, runs `then`, and is killed at the end."""
    program = (
        "import os, sys, time; from pathlib import Path; from longshore.tiers.arena import Arena\n"
        "from longshore.tiers.file import FileTier; from longshore.errors import TierClosedError\n"
        f"settings = dict(capacity={capacity_for(SLOTS, IMAGE)}, image_bytes={IMAGE}, "
        f"arena=Arena(4096), scope=bytes(32))\n"
        f"path = Path({str(directory)!r}); tier = FileTier(path, **settings)\n{then}"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield Holder(process.pid, process.stdout.readline)
        finally:
            process.send_signal(signal.SIGKILL)
