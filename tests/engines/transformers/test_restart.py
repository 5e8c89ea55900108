"""Restarts, resets and changed weights: what may be served afterwards, and what never."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving import make_demo

from longshore.cli.demo_report import DemoResult, RunRecord
from longshore.cli.demo_runs import Demo, _engine, run_resident, run_tiered
from longshore.config import Config
from longshore.engines.transformers import Tiers, replaying, tiered
from longshore.errors import CacheError, ConfigError, EngineError, TierError, TierInUseError


def equal(ours: RunRecord, theirs: RunRecord) -> bool:
    return DemoResult({}, ours, theirs, theirs, {}).bit_exact


def assert_equal_twice(demo: Demo, run: RunRecord, hits: list[int]) -> None:
    """A device cache that never evicts, asked everything twice, gives the second time what `run` gave."""
    with replaying(hits), _engine(demo, 4 * demo.workload.total_blocks) as ask:
        for request in demo.workload:
            ask(request)
        answers = [ask(request) for request in demo.workload]
    assert [tuple(answer.generated_tokens) for answer in answers] == [request.tokens for request in run.requests]
    assert [tuple(answer.logprobs) for answer in answers] == [request.logprobs for request in run.requests]


def test_a_restart_serves_what_the_first_engine_stored(tmp_path: Path) -> None:
    demo = make_demo(tmp_path)
    config = demo.config(tmp_path)
    with tiered(demo.model, config) as tiers:
        _, before = run_tiered(demo, tiers, lambda: None)
    with tiered(demo.model, config) as tiers:
        run, after = run_tiered(demo, tiers, lambda: None)
    assert run.requests[0].file_tokens > 0
    assert run.restored_blocks["file"] > run.restored_blocks["host"]
    assert_equal_twice(demo, run, [*before, *after[1:]])  # one warm-up only


def test_changed_weights_are_never_served_the_old_blocks(tmp_path: Path) -> None:
    demo = make_demo(tmp_path)
    config = demo.config(tmp_path)
    original = {name: tensor.clone() for name, tensor in demo.model.state_dict().items()}
    with tiered(demo.model, config) as tiers:
        _, before = run_tiered(demo, tiers, lambda: None)
    with torch.no_grad():
        demo.model.model.layers[0].mlp.up_proj.weight[3, 5] += 0.5
    with tiered(demo.model, config) as tiers:
        run, hits = run_tiered(demo, tiers, lambda: None)
        assert run.requests[0].file_tokens == 0
    assert equal(run, run_resident(demo, hits, lambda: None))
    demo.model.load_state_dict(original)
    with tiered(demo.model, config) as tiers:
        run, hits = run_tiered(demo, tiers, lambda: None)
    assert_equal_twice(demo, run, [*before, *hits[1:]])  # what is left of the first run is this model's


def test_reset_forgets_on_device_in_memory_and_on_disk(tmp_path: Path) -> None:
    demo = make_demo(tmp_path)
    first, second = demo.workload.requests[0], demo.workload.requests[8]
    with tiered(demo.model, demo.config(tmp_path)) as tiers, _engine(demo, demo.device_blocks) as ask:
        ask(first)
        ask(second)
        assert len(tiers.records[-1].sources) > 1
        with torch.no_grad():
            demo.model.model.layers[0].mlp.up_proj.weight[3, 5] += 0.5
        tiers.reset()
        ask(second)
        assert tiers.records[-1].sources == ()
        ask(second)
        assert len(tiers.records[-1].sources) > 1
    with tiered(demo.model, demo.config(tmp_path)) as tiers, _engine(demo, demo.device_blocks) as ask:
        ask(second)
        assert set(tiers.records[-1].sources) == {"file"}


def test_two_engines_in_one_directory(tmp_path: Path) -> None:
    demo = make_demo(tmp_path)
    config = demo.config(tmp_path)
    with tiered(demo.model, config) as tiers, _engine(demo, demo.device_blocks):
        other = Tiers(demo.model, config)
        assert tiers._allocator is not None
        with pytest.raises(TierInUseError, match="sub-directory"):
            other.open(tiers._allocator)
        other._allocator = None


def test_one_block_of_tiers_at_a_time(tmp_path: Path) -> None:
    demo = make_demo(tmp_path)
    config = Config.make(host_size="16MiB")
    with (
        tiered(demo.model, config),
        pytest.raises(EngineError, match="replaced already"),
        tiered(demo.model, config),
    ):
        pass


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    demo = make_demo(tmp_path)
    with pytest.raises(ConfigError, match="host_size"), tiered(demo.model, Config.make(host_size="900TiB")):
        pass


def test_a_failed_self_test_turns_the_tiers_off_loudly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longshore.engines.tensors import RowBlocks

    honest = RowBlocks.read

    def dishonest(self: RowBlocks, blocks: list[int]) -> object:
        data = honest(self, blocks).copy()
        data[0, 0] ^= 1
        return data

    demo = make_demo(tmp_path)
    monkeypatch.setattr(RowBlocks, "read", dishonest)
    with tiered(demo.model, demo.config(tmp_path)) as tiers, _engine(demo, demo.device_blocks) as ask:
        ask(demo.workload.requests[0])
        assert tiers.stack is None
        assert "of the test block were wrong when read back" in str(tiers.failure)
        assert "all tiers disabled" in caplog.text


def test_reset_keeps_files_while_weights_are_the_same(tmp_path: Path) -> None:
    demo = make_demo(tmp_path)
    first, second = demo.workload.requests[0], demo.workload.requests[8]
    with tiered(demo.model, demo.config(tmp_path)) as tiers, _engine(demo, demo.device_blocks) as ask:
        ask(first)
        before = ask(second)
        assert tiers.stack.runtime.flush(30.0)
        with pytest.raises(CacheError, match="only the coldest"):
            tiers.reset(keep=("host",))
        tiers.reset(keep=("file",))
        again = ask(second)
        assert set(tiers.records[-1].sources) == {"file"}
        assert again.generated_tokens == before.generated_tokens
        with torch.no_grad():
            demo.model.model.layers[0].mlp.up_proj.weight[3, 5] += 0.5
        tiers.reset(keep=("host", "file"))
        ask(second)
        assert tiers.records[-1].sources == ()


def test_a_reset_between_engines_keeps_host_memory(tmp_path: Path) -> None:
    """Eager attention has another name outside an engine's loop."""
    demo = make_demo(tmp_path)
    assert demo.model.config._attn_implementation == "eager"
    request = demo.workload.requests[0]
    with tiered(demo.model, demo.config(tmp_path)) as tiers:
        with _engine(demo, demo.device_blocks) as ask:
            ask(request)
        stack = tiers.stack
        assert stack is not None
        before = tiers.occupancy()["host"]
        tiers.reset(keep=("host", "file"))
        assert tiers.stack is stack
        assert tiers.occupancy()["host"] == before > 0
        with _engine(demo, demo.device_blocks) as ask:
            ask(request)
        assert set(tiers.records[-1].sources) == {"host"}


def resident(tiers: Tiers) -> int:
    """Bytes of the host arena that the system has allocated."""
    begin = tiers.stack.arena.address
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{begin:x}-")]
    return next(1024 * int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))


@pytest.mark.parametrize(
    ("keep", "found"),
    [(("host", "file"), {"host"}), (("file",), {"file"}), ((), set[str]())],
    ids=["all", "files", "nothing"],
)
def test_sleep_keeps_named_tiers_and_frees_host_memory(tmp_path: Path, keep: tuple[str, ...], found: set[str]) -> None:
    demo = make_demo(tmp_path, settings={"gate": False, "host_size": "64MiB"})
    request = demo.workload.requests[0]
    with tiered(demo.model, demo.config(tmp_path)) as tiers:
        with _engine(demo, demo.device_blocks) as ask:
            before = ask(request)
            with pytest.raises(EngineError, match="stop its manager"):
                tiers.sleep(keep=keep)
        with pytest.raises(CacheError, match="only the coldest"):
            tiers.sleep(keep=("disk",))
        tiers.sleep(keep=keep)
        tiers.sleep(keep=keep)
        assert (resident(tiers) > 0) == ("host" in keep)
        with _engine(demo, demo.device_blocks) as ask:
            assert ask(request).generated_tokens == before.generated_tokens
        assert tiers.records[-1].sources == ()
        tiers.wake()
        tiers.wake()
        with _engine(demo, demo.device_blocks) as ask:
            assert ask(request).generated_tokens == before.generated_tokens
            assert set(tiers.records[-1].sources) == found
            ask(request)
        with _engine(demo, demo.device_blocks) as ask:
            ask(request)
        assert set(tiers.records[-1].sources) == {"host"}
        with tiers.stack.runtime.batch() as cache:
            cache.check_integrity()


def test_without_memory_after_a_sleep_engines_are_served_without_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = make_demo(tmp_path, settings={"gate": False, "host_size": "64MiB"})
    request = demo.workload.requests[0]
    with tiered(demo.model, demo.config(tmp_path)) as tiers:
        with _engine(demo, demo.device_blocks) as ask:
            before = ask(request)
        tiers.sleep(keep=("file",))
        with monkeypatch.context() as patch:
            for module in ("longshore.config", "longshore.runtime.stack"):
                patch.setattr(f"{module}.available_memory", lambda: 4096)
            tiers.wake()
            assert isinstance(tiers.failure, TierError)
            with _engine(demo, demo.device_blocks) as ask:
                assert ask(request).generated_tokens == before.generated_tokens
            assert tiers.stack is None
        with _engine(demo, demo.device_blocks) as ask:
            assert ask(request).generated_tokens == before.generated_tokens
        assert set(tiers.records[-1].sources) == {"file"}
