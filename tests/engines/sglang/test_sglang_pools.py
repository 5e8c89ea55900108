"""Host pools beside that of the keys and values, as SGLang's threads call for them, without a server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.utils import get_hash_str
from storage_kit import PAGE, Rig, eventually, indices, names

from longshore.engines.sglang import identity
from longshore.engines.sglang.storage import restorable
from longshore.errors import CommandError, EngineError
from longshore.runtime.control import ask

Rigs = Callable[..., Rig]
KEYS = names(12)
LAST = 4
"""Pages of a window."""


def windows(
    keys: list[str], pages: list[int] | None = None, policy: PoolHitPolicy = PoolHitPolicy.TRAILING_PAGES
) -> PoolTransfer:
    return PoolTransfer(PoolName.SWA, None if pages is None else indices(pages), keys=keys, hit_policy=policy)


@pytest.fixture
def rig(rigs: Rigs) -> Rig:
    return rigs(windows=32)


def ends(rig: Rig, keys: list[str]) -> list[int]:
    """At which pages of `keys` a prompt can be continued."""
    found = rig.storage.batch_exists_v2(keys, [windows(keys[-LAST:])])
    assert found.kv_hit_pages == max(found.restorable_prefix_pages or [0])
    return list(found.restorable_prefix_pages or [])


def store_windows(rig: Rig, keys: list[str], pages: list[int], seed: int) -> torch.Tensor:
    held = rig.fill(pages, seed, rig.windows)
    assert rig.storage.batch_set_v2([windows(keys, pages)]) == {"swa": [True] * len(keys)}
    assert rig.storage.flush(30)
    return held


def test_windows_come_back_as_they_went_also_after_a_restart(rigs: Rigs) -> None:
    rig = rigs(windows=32)
    whole = rig.store(KEYS, range(12))
    held = store_windows(rig, KEYS[8:], [3, 1, 30, 9], seed=2)
    rig.close()
    rig = rigs(windows=32)
    assert ends(rig, KEYS) == [12]
    rig.fill(range(32), 99, rig.windows)
    assert rig.get(KEYS, range(12)) == [True] * 12
    assert rig.storage.batch_get_v2([windows(KEYS[8:], [5, 6, 7, 8])]) == {"swa": [True] * 4}
    assert torch.equal(rig.read([5, 6, 7, 8], rig.windows), held)
    assert torch.equal(rig.read(range(12)), whole)


def test_a_prompt_is_continued_only_where_its_window_is_stored(rig: Rig) -> None:
    rig.store(KEYS, range(12))
    assert ends(rig, KEYS) == []
    store_windows(rig, KEYS[2:6], [0, 1, 2, 3], seed=2)
    assert ends(rig, KEYS) == [6]
    store_windows(rig, KEYS[6:7], [4], seed=3)
    assert ends(rig, KEYS) == [6, 7]
    assert ends(rig, KEYS[2:]) == [1, 2, 3, 4, 5]  # the device has what is before
    assert ends(rig, [*KEYS[:6], *names(1, seed=9)]) == [6]


def test_windows_without_keys_and_values_are_of_no_use(rig: Rig) -> None:
    store_windows(rig, KEYS[8:], [0, 1, 2, 3], seed=2)
    assert ends(rig, KEYS) == []
    rig.store(KEYS[:10], range(10))
    assert ends(rig, KEYS) == []


@pytest.mark.parametrize(
    ("policy", "there", "last", "expected"),
    [
        (PoolHitPolicy.ALL_PAGES, "111011", 1, [1, 2, 3]),
        (PoolHitPolicy.ALL_PAGES, "011111", 1, []),
        (PoolHitPolicy.TRAILING_PAGES, "010111", 1, [2, 4, 5, 6]),
        (PoolHitPolicy.TRAILING_PAGES, "010111", 2, [5, 6]),
        (PoolHitPolicy.TRAILING_PAGES, "110111", 9, [1, 2]),
        (PoolHitPolicy.BLOCK_GROUPS, "000000", 1, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_where_all_pools_can_be_continued(policy: PoolHitPolicy, there: str, last: int, expected: list[int]) -> None:
    other = windows(KEYS[:last], policy=policy)
    found = restorable(6, [other], {PoolName.SWA: [each == "1" for each in there]})
    assert found.restorable_prefix_pages == expected
    assert found.kv_hit_pages == max(expected, default=0)


def test_a_lost_page_of_a_window_ends_its_run(rigs: Rigs) -> None:
    rig = rigs(windows=32)
    rig.store(KEYS, range(12))
    held = store_windows(rig, KEYS[8:], [0, 1, 2, 3], seed=2)
    rig.close()
    rig = rigs(windows=32)
    path = Path(rig.storage._tiers["swa"].settings.file_path or "") / "segment"
    page = bytes(held[2].flatten().view(torch.uint8).tolist())
    data = path.read_bytes()
    at = data.find(page[: len(page) // 2])
    assert at > 0
    with path.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([data[at + 100] ^ 1]))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert rig.storage.batch_get_v2([windows(KEYS[8:], [4, 5, 6, 7])]) == {"swa": [True, True, False, False]}
    assert torch.equal(rig.read([4, 5], rig.windows), held[:2])
    assert ends(rig, KEYS) == []


def test_a_stopped_tier_host_of_windows_holds_no_call_up(rigs: Rigs) -> None:
    rig = rigs(windows=32)
    rig.store(KEYS, range(12))
    held = store_windows(rig, KEYS[8:], [0, 1, 2, 3], seed=2)
    rig.close()
    rig = rigs(windows=32, load_timeout=0.5)
    pid = rig.storage._tiers["swa"].stack.file._supervisor.process.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert rig.storage.batch_get_v2([windows(KEYS[8:], [4, 5, 6, 7])]) == {"swa": [False] * 4}
        other = rig.fill([4, 5, 6, 7], 77, rig.windows)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert rig.storage._tiers["swa"].runtime.wait_idle(30)
    assert torch.equal(rig.read([4, 5, 6, 7], rig.windows), other)  # nothing came late
    eventually(lambda: rig.storage.batch_get_v2([windows(KEYS[8:], [4, 5, 6, 7])]), {"swa": [True] * 4})
    assert torch.equal(rig.read([4, 5, 6, 7], rig.windows), held)
    with rig.storage._tiers["swa"].runtime.batch() as cache:
        cache.check_integrity()
        assert cache.leases == cache.protected == 0


def test_changed_weights_and_clear_concern_windows_too(rig: Rig) -> None:
    rig.store(KEYS, range(12))
    store_windows(rig, KEYS[8:], [0, 1, 2, 3], seed=2)
    rig.storage.weights_change()
    assert rig.storage.batch_get_v2([windows(KEYS[8:], [4, 5, 6, 7])]) == {"swa": [False] * 4}
    assert rig.storage.batch_set_v2([windows(KEYS[8:], [4, 5, 6, 7])]) == {"swa": [False] * 4}
    rig.storage.caches_flushed()
    assert rig.storage.batch_get_v2([windows(KEYS[8:], [4, 5, 6, 7])]) == {"swa": [False] * 4}
    rig.store(KEYS, range(12))
    store_windows(rig, KEYS[8:], [0, 1, 2, 3], seed=2)
    assert ends(rig, KEYS) == [12]
    rig.storage.clear()
    assert rig.storage.batch_get_v2([windows(KEYS[8:], [4, 5, 6, 7])]) == {"swa": [False] * 4}


def test_calls_that_are_none_raise_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for bad in (windows(KEYS[:2], [1]), windows(["no digits"], [1]), windows(KEYS[:1], [32])):
        assert rig.storage.batch_set_v2([bad]) == {"swa": [False] * len(bad.keys)}
        assert rig.storage.batch_get_v2([bad]) == {"swa": [False] * len(bad.keys)}
    other = PoolTransfer(PoolName.MAMBA, indices([1]), keys=KEYS[:1])
    assert rig.storage.batch_get_v2([other]) == {"mamba": [False]}
    assert caplog.text.count("EngineError") >= 7


def test_pools_share_the_files_by_their_size(rig: Rig) -> None:
    sizes = {name: tiers.settings.file_size for name, tiers in rig.storage._tiers.items()}
    assert sizes["kv"] == 2 * sizes["swa"] == (16 << 20) * 2 // 3  # of 64 and of 32 pages
    scopes = {tiers.stack.scope.digest for tiers in rig.storage._tiers.values()}
    assert len(scopes) == 2


def windowed(read: Callable[[], Any]) -> Callable[[], Any]:
    """A model whose windows are those of the pool of these tests."""

    def config() -> Any:
        found = read()
        found.sliding_window_size = LAST * PAGE
        return found

    return config


def test_commands_concern_both_pools(rigs: Rigs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(identity, "model_config", windowed(identity.model_config))
    tokens, name = list(range(12 * PAGE)), tmp_path / "one.ctl"
    rig = rigs(windows=32, control=str(name))
    keys = get_hash_str(tokens, None, PAGE)
    rig.store(keys, range(12))
    store_windows(rig, keys[6:10], [0, 1, 2, 3], seed=2)

    def command(what: str, **more: object) -> dict[str, Any]:
        return ask(name, {"command": what, **more}, 60.0)

    found = command("lookup", tokens=tokens)
    assert (found["tokens"], found["leading_tokens"]) == (12 * PAGE, 10 * PAGE)
    runs = [{"tier": tier, "chunks": count} for tier, count in (("none", 6), ("file", 4), ("none", 2))]
    assert [each["runs"] for each in found["groups"]] == [[{"tier": "file", "chunks": 12}], runs]
    assert ends(rig, keys) == [10]
    assert command("pin", tokens=tokens) == {"chunks": 16, "pinned": 14}
    used = command("stats")["metrics"]["longshore_used_bytes"]
    assert {each["labels"]["pool"] for each in used if each["value"]} == {"kv", "swa"}
    for tiers in rig.storage._tiers.values():
        with tiers.runtime.batch() as cache:
            cache.evict("file", 100)
    assert ends(rig, keys) == [10]
    assert command("clear") == {"dropped": {"file": 14}, "left": {"file": 0}}
    assert ends(rig, keys) == []
    rig.storage.weights_change()
    with pytest.raises(CommandError, match="no tiers now"):
        command("lookup", tokens=tokens)
    rig.close()
    assert not name.exists()


def test_other_pools_and_stores_beside_windows_are_refused(rigs: Rigs, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="mamba"):
        rigs(under="a", beside={PoolName.MAMBA: 8})
    with pytest.raises(EngineError, match="remote is not served for models with a host pool swa"):
        rigs(under="b", windows=8, remote=tmp_path.as_uri(), host_size="4MiB")
    rig = rigs(under="c", windows=8)
    with pytest.raises(EngineError, match="before the tiers were opened"):
        rig.storage.register_mem_host_pool_v2(rig.windows, PoolName.SWA)
    assert rig.exists(KEYS) == 0
