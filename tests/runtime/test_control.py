"""Commands to a running engine over its socket: what they do, and what happens to an engine that clients mistreat."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from control_kit import TIMEOUT, Engine, prompt

from longshore.boundary import FILE, HOST
from longshore.cache import GroupKeys
from longshore.errors import CommandError, ConfigError, EngineError
from longshore.runtime import control
from longshore.runtime.commands import Commands, ControlledEngine
from longshore.runtime.control import MOST_BYTES, ask, socket_path

Opened = Callable[..., Engine]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    return directory / "one.ctl"


@pytest.fixture
def opened(path: Path) -> Iterator[Opened]:
    made: list[Engine] = []

    def open_one(slots: int = 16, files: Path | None = None) -> Engine:
        made.append(Engine(str(path), slots, files))
        return made[-1]

    yield open_one
    for engine in made:
        with engine.stack.runtime.locked() as cache:
            if engine.stack.runtime.fault is None:
                cache.check_integrity()
        engine.close()


@pytest.fixture
def process(path: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine of its own, which has stored prompt 1."""
    command = [sys.executable, str(Path(__file__).with_name("control_kit.py")), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "ready\n"
        yield engine
        engine.kill()


# ------------------------------------------------------------------ what commands do


def test_lookup_says_which_tier_has_how_many_leading_chunks(opened: Opened, tmp_path: Path) -> None:
    engine = opened(files=tmp_path / "kv")
    engine.store(prompt(1))
    tokens = [*prompt(1), *prompt(2)]
    assert engine.ask("lookup", tokens=tokens) == {
        "chunks": 8, "leading": 4, "runs": [{"tier": HOST, "chunks": 4}],
    }  # fmt: skip
    with engine.stack.runtime.batch() as cache:
        assert cache.discard(engine.keys(prompt(1))[2:], HOST) == 2
    runs = [{"tier": HOST, "chunks": 2}, {"tier": FILE, "chunks": 2}]
    assert engine.ask("lookup", tokens=tokens)["runs"] == runs
    keys = [key.hex() for key in engine.keys(tokens)]
    assert engine.ask("lookup", keys=keys)["runs"] == runs
    assert engine.leading(prompt(3)) == 0


def test_a_lookup_is_no_use_and_keeps_nothing(opened: Opened) -> None:
    engine = opened()
    engine.store(prompt(1))
    with engine.stack.runtime.locked() as cache:
        before = cache.counters.copy(), cache.leases, cache.protected
    engine.leading([*prompt(1), *prompt(2)])
    with engine.stack.runtime.locked() as cache:
        assert (cache.counters, cache.leases, cache.protected) == before


def test_pinned_chunks_stay_until_they_are_unpinned(opened: Opened) -> None:
    engine = opened(slots=16)
    engine.store(prompt(1))
    engine.store(prompt(2))
    assert engine.ask("pin", tokens=[*prompt(1), *prompt(9)]) == {"chunks": 8, "pinned": 4}
    for other in range(3, 13):
        engine.store(prompt(other))
    assert (engine.leading(prompt(1)), engine.leading(prompt(2))) == (4, 0)
    assert engine.ask("stats")["pinned_chunks"] == 4
    assert engine.ask("unpin", tokens=prompt(1)) == {"unpinned": 4}
    for other in range(13, 23):
        engine.store(prompt(other))
    assert engine.leading(prompt(1)) == 0
    assert engine.ask("unpin") == {"unpinned": 0}


def test_more_than_a_quarter_of_a_tier_cannot_be_pinned(opened: Opened) -> None:
    engine = opened(slots=16)
    engine.store(prompt(1))
    engine.store(prompt(2))
    assert engine.ask("pin", tokens=prompt(1))["pinned"] == 4
    with pytest.raises(
        CommandError, match=r"PinLimitError: expected at most 4 pinned chunks, 25% of the tier host, got 8"
    ):
        engine.ask("pin", tokens=prompt(2))
    with engine.stack.runtime.locked() as cache:
        assert cache.leases == 1
    assert engine.ask("pin", tokens=prompt(1))["pinned"] == 4  # again: it counts once
    with engine.stack.runtime.locked() as cache:
        assert cache.leases == 1
    assert engine.ask("pin", tokens=prompt(7)) == {"chunks": 4, "pinned": 0}


def test_clear_drops_what_the_tiers_hold_also_for_later(opened: Opened, tmp_path: Path) -> None:
    engine = opened(files=tmp_path / "kv")
    engine.store(prompt(1))
    engine.ask("pin", tokens=prompt(1))
    assert engine.ask("clear") == {"dropped": {HOST: 4, FILE: 4}, "left": {HOST: 0, FILE: 0}}
    assert engine.leading(prompt(1)) == 0
    with engine.stack.runtime.locked() as cache:
        assert (cache.leases, cache.protected) == (0, 0)
        generation = cache.generation
    engine.store(prompt(2))
    engine.close()
    again = opened(files=tmp_path / "kv")
    with again.stack.runtime.locked() as cache:
        assert cache.generation == generation  # what is stored afterwards is of the same weights
    assert (again.leading(prompt(1)), again.leading(prompt(2))) == (0, 4)


def test_clear_leaves_what_a_request_holds_or_loads(opened: Opened, tmp_path: Path) -> None:
    engine = opened(files=tmp_path / "kv")
    engine.store(prompt(1))
    engine.store(prompt(2))
    runtime = engine.stack.runtime
    with runtime.batch() as cache:
        found = cache.lookup({0: GroupKeys(engine.keys(prompt(1)))}, runtime.clock())
    assert found.lease is not None
    said = engine.ask("clear")
    assert said["dropped"][HOST] + said["dropped"][FILE] >= 8
    assert sum(said["left"].values()) >= 4
    with runtime.batch() as cache:
        cache.load(found.lease, {0: range(4)})
    outcome = runtime.wait_load(found.lease, TIMEOUT).outcome
    assert outcome is not None and outcome.num_chunks == 4
    with runtime.batch() as cache:
        cache.release(found.lease)
    assert engine.leading(prompt(2)) == 0
    engine.ask("clear")
    assert engine.leading(prompt(1)) == 0


def test_an_engines_own_reset_ends_pins_without_a_fault(opened: Opened, tmp_path: Path) -> None:
    engine = opened(files=tmp_path / "kv")
    engine.store(prompt(1))
    engine.ask("pin", tokens=prompt(1))
    with engine.stack.runtime.batch() as cache:
        cache.reset(keep=(FILE,))
        cache.check_integrity()
    assert engine.ask("lookup", tokens=prompt(1))["runs"] == [{"tier": FILE, "chunks": 4}]
    with engine.stack.runtime.batch() as cache:
        cache.reset()
    assert engine.ask("stats")["pinned_chunks"] == 0
    engine.store(prompt(2))
    assert engine.ask("pin", tokens=prompt(2))["pinned"] == 4, "the former pins do not count"
    with engine.stack.runtime.locked() as cache:
        assert cache.leases == 1
    assert engine.ask("unpin") == {"unpinned": 4}


def test_stats_are_those_of_the_metrics(opened: Opened) -> None:
    engine = opened()
    engine.store(prompt(1))
    said = engine.ask("stats")
    assert said["pid"] == os.getpid()
    used = {each["labels"]["tier"]: each["value"] for each in said["metrics"]["longshore_used_bytes"]}
    assert used == {HOST: 4 * engine.layout.image_bytes}
    assert "longshore_hit_chunks_total" in said["metrics"]


# ------------------------------------------------------------------ requests that make no sense


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"nonsense", "expected a JSON object"),
        (b"\xff\xfe\x00", "expected a JSON object"),
        (b"[" * 100_000, "expected a JSON object"),
        (b"[]", "expected a command"),
        (b'{"command": 5}', "expected a command"),
        (b'{"command": "reboot"}', "lookup, pin, unpin, clear, stats"),
        (b'{"command": "stats", "more": 1}', "'more'"),
        (b'{"command": "lookup"}', "either tokens"),
        (b'{"command": "lookup", "tokens": [1], "keys": []}', "either tokens"),
        (b'{"command": "lookup", "tokens": "1,2"}', "expected a list"),
        (b'{"command": "lookup", "tokens": [1, true]}', "whole numbers"),
        (b'{"command": "lookup", "tokens": [-1]}', "whole numbers"),
        (b'{"command": "lookup", "tokens": [1e3]}', "whole numbers"),
        (b'{"command": "pin", "tokens": [1, 2, 3]}', "one whole chunk, got 3 tokens"),
        (b'{"command": "pin", "tokens": []}', "one whole chunk"),
        (b'{"command": "lookup", "keys": ["zz"]}', "hexadecimal"),
        (b'{"command": "lookup", "keys": [7]}', "hexadecimal"),
        (b'{"command": "lookup", "keys": ["00ff"]}', "32 bytes"),
        (b'{"command": "lookup", "keys": ["%b", "%b"]}' % (b"0" * 64, b"0" * 64), "different keys"),
        (b'{"command": "clear", "tokens": [1]}', "drops everything"),
        (b'{"command": "stats", "tokens": [1]}', "neither"),
    ],
)
def test_garbage_gets_an_error_and_changes_nothing(opened: Opened, line: bytes, complaint: str) -> None:
    engine = opened()
    engine.store(prompt(1))
    with _connected(engine) as client:
        client.sendall(line + b"\n")
        said = json.loads(_line(client))
        assert said["error"] == "CommandError"
        assert complaint in said["message"]
        client.sendall(b'{"command": "stats"}\n')  # the connection goes on
        assert "ok" in json.loads(_line(client))
    assert engine.leading(prompt(1)) == 4
    assert engine.stack.runtime.fault is None


def test_a_request_without_end_is_cut_off(opened: Opened) -> None:
    engine = opened()
    with _connected(engine) as client, pytest.raises(OSError):  # it is closed amid this
        for _ in range(100):
            client.sendall(bytes(MOST_BYTES // 10))
    assert "pid" in engine.ask("stats")


@pytest.mark.parametrize("sent", [b"", b'{"command": "sta', b'{"command": "stats"}\n' * 50])
def test_clients_that_hang_up_leave_the_engine_serving(opened: Opened, sent: bytes) -> None:
    engine = opened()
    for _ in range(40):
        client = _connected(engine)
        client.sendall(sent)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
    assert "pid" in engine.ask("stats")
    assert engine.server._thread.is_alive()


def test_a_client_that_never_reads_does_not_hold_others_up(opened: Opened) -> None:
    engine = opened()
    with _connected(engine) as client:
        client.setblocking(False)
        with pytest.raises(OSError):
            while True:
                client.send(b'{"command": "stats"}\n' * 100)
        assert "pid" in engine.ask("stats")


def test_answers_wait_for_a_client_that_reads_late(opened: Opened) -> None:
    """All answers together are larger than a socket's buffer, as one of a long prompt's lookup may be."""
    engine = opened()
    with _connected(engine) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(b'{"command": "stats"}\n' * 200)
        assert "pid" in engine.ask("stats")  # another one does not wait
        with client.makefile() as answers:
            assert all("ok" in json.loads(answers.readline()) for _ in range(200))
            client.sendall(b'{"command": "stats"}\n')
            assert "ok" in json.loads(answers.readline())


def test_silent_clients_are_dropped_and_too_many_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened()
    silent = [_connected(engine) for _ in range(16)]
    with _connected(engine) as late:
        assert "at most 16 clients" in json.loads(_line(late))["message"]
    silent[0].sendall(b'{"command": "stats"}\n')
    assert "ok" in json.loads(_line(silent[0]))
    monkeypatch.setattr(control, "_IDLE_SECONDS", 0.0)
    _connected(engine).close()  # something happens, so that it looks
    for each in silent:
        assert _line(each) == b""
        each.close()
    monkeypatch.undo()
    assert "pid" in engine.ask("stats")


def test_clients_are_not_dropped_behind_anothers_long_command(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened()
    answer, begun, go_on, passed = engine.server._commands.answer, threading.Event(), threading.Event(), [0.0]

    def slow(line: bytearray) -> dict[str, Any]:
        if b"clear" in line:
            begun.set()
            go_on.wait(TIMEOUT)
            passed[0] += 10 * control._IDLE_SECONDS
        return answer(line)

    monkeypatch.setattr(
        control, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0], sleep=time.sleep)
    )
    monkeypatch.setattr(engine.server._commands, "answer", slow)
    with _connected(engine) as first, _connected(engine) as second:
        for client in (first, second):
            client.sendall(b'{"command": "stats"}\n')
            assert "ok" in json.loads(_line(client))
        first.sendall(b'{"command": "clear"}\n')
        assert begun.wait(TIMEOUT)
        second.sendall(b'{"command": "stats"}\n')
        go_on.set()
        assert "ok" in json.loads(_line(second))
    assert passed[0] > 0


def test_commands_at_once_are_carried_out_one_by_one(opened: Opened) -> None:
    engine = opened(slots=64)
    for number in range(1, 9):
        engine.store(prompt(number, 1))

    def work(number: int) -> int:
        done = 0
        for _ in range(20):
            done += engine.ask("pin", tokens=prompt(number, 1))["pinned"]
            assert engine.leading(prompt(number, 1)) == 1
            done -= engine.ask("unpin", tokens=prompt(number, 1))["unpinned"]
        return done

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(work, range(1, 9))) == 0
    with engine.stack.runtime.locked() as cache:
        assert (cache.leases, cache.protected) == (0, 0)


# ------------------------------------------------------------------ engines that do not answer


def test_without_free_descriptors_a_client_waits(
    opened: Opened, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = opened()
    tried = threading.Event()
    sleep, pauses = time.sleep, list[float]()

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)
        if len(pauses) == 3:
            tried.set()

    monkeypatch.setattr(control.time, "sleep", pause)
    with socket.socket(socket.AF_UNIX) as client:
        used = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        plugs = [os.dup(client.fileno()) for _ in range(used)]  # those below the highest, too
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(plugs) + 1, hard))
        try:
            client.connect(str(path))
            assert tried.wait(TIMEOUT), "it pauses, and does not spin"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for plug in plugs:
                os.close(plug)
        client.settimeout(TIMEOUT)
        client.sendall(b'{"command": "stats"}\n')
        assert json.loads(client.makefile().readline())["ok"]["pid"] == os.getpid()
    assert caplog.text.count("no connection could be accepted") == 1
    assert engine.leading(prompt(1)) == 0


def test_an_engine_without_tiers_says_so() -> None:
    commands = Commands(ControlledEngine(list, lambda _: [], list))
    assert "no tiers now" in commands.answer(bytearray(b'{"command": "lookup", "tokens": [1]}'))["message"]
    assert commands.answer(bytearray(b'{"command": "stats"}'))["ok"]["metrics"] == {}


def test_a_path_that_is_no_socket_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(CommandError, match=f"^{path}: not a socket: expected the engine's setting control"):
            ask(path, {"command": "stats"}, TIMEOUT)


def test_next_engine_takes_the_socket_of_a_killed_one(
    process: subprocess.Popen[str], opened: Opened, path: Path
) -> None:
    assert ask(path, {"command": "stats"}, TIMEOUT)["pid"] == process.pid
    process.kill()
    process.wait()
    assert path.exists()
    with pytest.raises(CommandError, match="nobody listens: the engine was killed"):
        ask(path, {"command": "stats"}, TIMEOUT)
    engine = opened()
    assert engine.server.path == path
    assert engine.ask("stats")["pid"] == os.getpid()
    engine.close()
    assert not path.exists()
    with pytest.raises(CommandError, match=r"no such socket\. Engines with one: none"):
        ask(path, {"command": "stats"}, TIMEOUT)


def test_a_stopped_engine_is_an_error_after_the_timeout(process: subprocess.Popen[str], path: Path) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with pytest.raises(CommandError, match=r"no answer within 0\.2 s: the engine is stopped or very busy"):
        ask(path, {"command": "clear"}, 0.2)
    process.send_signal(signal.SIGCONT)
    assert ask(path, {"command": "lookup", "tokens": prompt(1)}, TIMEOUT)["chunks"] == 4


def test_an_engine_that_dies_amid_a_command_is_an_error(process: subprocess.Popen[str], path: Path) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, path, {"command": "stats"}, TIMEOUT)
        while not _has_unread(path):
            time.sleep(0.01)
        process.kill()
        with pytest.raises(CommandError, match=r"closed the connection|Connection reset"):
            asked.result()


def test_a_busy_engine_answers_once_its_lock_is_free(opened: Opened) -> None:
    engine = opened()
    with engine.stack.runtime.batch(), pytest.raises(CommandError, match="very busy"):
        ask(engine.server.path, {"command": "lookup", "tokens": prompt(1)}, 0.2)
    assert engine.leading(prompt(1)) == 0


def test_after_a_fault_of_the_control_plane_commands_are_refused(opened: Opened) -> None:
    engine = opened()
    engine.stack.runtime.fail(RuntimeError("for a test"))
    for command in ({"command": "lookup", "tokens": prompt(1)}, {"command": "clear"}):
        with pytest.raises(CommandError, match="TierClosedError: all tiers disabled"):
            ask(engine.server.path, command, TIMEOUT)
    (faults,) = engine.ask("stats")["metrics"]["longshore_control_plane_faults_total"]
    assert faults["value"] == 1


def test_a_closed_engine_refuses_commands(opened: Opened) -> None:
    engine = opened()
    engine.stack.close()
    with pytest.raises(CommandError, match="TierClosedError"):
        engine.ask("lookup", tokens=prompt(1))


# ------------------------------------------------------------------ whose socket it is


def test_the_socket_is_its_owners_alone(opened: Opened, path: Path) -> None:
    engine = opened()
    assert stat.S_IMODE(engine.server.path.stat().st_mode) == 0o600
    path.parent.chmod(0o755)
    with pytest.raises(EngineError, match="expected an own directory of mode 0700: chmod 700 it, or name another"):
        opened()
    assert socket_path("one").parent.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_is_refused_even_where_modes_allow(opened: Opened, path: Path) -> None:
    engine = opened()
    for each in (path, path.parent, *path.parents):
        if each.name.startswith(("pytest-", "popen-", "test_", "own", "one")):
            each.chmod(0o777)
    script = """
import os, socket, sys
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.connect(sys.argv[1])
print(client.recv(1000).decode(), end="")
try:
    client.sendall(b'{"command": "stats"}' + bytes([10]))
    print(client.recv(10))
except OSError:
    print(b"")
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    first, rest = done.stdout.splitlines()
    assert "expected the engine's user, 0, got 65534" in json.loads(first)["message"]
    assert rest == "b''"
    path.parent.chmod(0o700)
    assert "pid" in engine.ask("stats")


def test_a_second_engine_of_the_same_name_adds_its_number(opened: Opened, path: Path) -> None:
    first, second = opened(), opened()
    assert first.server.path == path
    assert second.server.path == path.with_stem(f"one-{os.getpid()}")
    with pytest.raises(EngineError, match="in use by other engines"):
        opened()
    second.store(prompt(1))
    assert (first.leading(prompt(1)), second.leading(prompt(1))) == (0, 4)


def test_a_forked_process_does_not_keep_the_socket(opened: Opened, path: Path) -> None:
    engine = opened()
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(writes)
        os.read(reads, 1)
        os._exit(0)
    os.close(reads)
    try:
        engine.close()
        assert opened().server.path == path
    finally:
        os.close(writes)
        os.waitpid(child, 0)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "/" + "x" * 120, "/nowhere/at/all.ctl"])
def test_a_socket_that_cannot_be_made_is_an_error(name: str) -> None:
    with pytest.raises((ConfigError, EngineError)):
        Engine(name)


def _connected(engine: Engine) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(engine.server.path))
    client.settimeout(TIMEOUT)
    return client


def _line(client: socket.socket) -> bytes:
    """A line, or nothing if the connection was closed."""
    line = b""
    while not line.endswith(b"\n"):
        try:
            more = client.recv(1 << 16)
        except ConnectionResetError:
            return b""
        if not more:
            return b""
        line += more
    return line


def _has_unread(path: Path) -> bool:
    """Whether a client is connected to the socket, or waits for that."""
    return sum(str(path) in line for line in Path("/proc/net/unix").read_text().splitlines()) > 1
