"""Weights that change: in files while no engine runs, and in an engine that runs. Old blocks are never served."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_runs import Serve, asked, prompts, tiers
from serving import rewrite
from tiny_models import save
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import LookupResult
from vllm_kit import Rig, file_settings, keys_of

from longshore.engines.vllm import weight_changes
from longshore.engines.vllm.weight_changes import WeightWatch
from longshore.errors import EngineError
from longshore.runtime.rank_reports import RankReports

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
KEYS = keys_of(2)
Rigs = Callable[..., Rig]
CONNECTOR = {
    "kv_connector": "LongshoreConnector",
    "kv_connector_module_path": "longshore.engines.vllm.connector",
    "kv_load_failure_policy": "recompute",
}


def change(rig: Rig, rank: int = 0) -> None:
    rig.workers[rank]._weight_watch.on_change()


def answers(rig: Rig, name: str) -> list[LookupResult]:
    return rig.lookup(KEYS, rig.request(name, KEYS))


def store(rig: Rig, name: str) -> list[Any]:
    context = rig.request(name, KEYS)
    taken = rig.store(KEYS, [1, 2], context)
    rig.manager.on_request_finished(context)
    return taken


@pytest.mark.parametrize("rank", [0, 1])
def test_changed_weights_of_any_rank_empty_all_tiers(rigs: Rigs, rank: int) -> None:
    rig = rigs(world=2)
    assert store(rig, "writer") == KEYS
    assert answers(rig, "reader") == [HIT] * 2
    change(rig, rank)
    assert answers(rig, "after it") == [MISS] * 2
    assert rig.manager.get_stats().data["data"]["longshore_weight_changes"][()] == 1


def test_blocks_of_old_weights_on_the_device_are_not_stored(rigs: Rigs) -> None:
    rig = rigs()
    store(rig, "writer")
    change(rig)
    assert store(rig, "of the device") == []
    rig.manager.reset_cache()
    assert store(rig, "computed anew") == KEYS
    assert answers(rig, "reader") == [HIT] * 2


def test_a_reset_while_requests_run_does_not_empty_the_device(rigs: Rigs) -> None:
    rig = rigs()
    running = rig.request("running", KEYS)
    assert rig.store(KEYS, [1, 2], running) == KEYS
    change(rig)
    rig.manager.reset_cache()
    assert store(rig, "of the device") == []
    rig.manager.on_request_finished(running)
    rig.manager.reset_cache()
    assert store(rig, "computed anew") == KEYS


@pytest.mark.parametrize("first", ["reset", "change"])
def test_a_device_that_was_emptied_is_trusted_with_new_weights(rigs: Rigs, first: str) -> None:
    rig = rigs()
    store(rig, "writer")
    steps = [rig.manager.device_was_reset, lambda: change(rig)]
    for step in steps if first == "reset" else steps[::-1]:
        step()
    assert answers(rig, "after it") == [MISS] * 2
    assert store(rig, "computed anew") == KEYS


@pytest.mark.parametrize("method", ["list_loras", len])
def test_functions_that_workers_are_given_empty_all_tiers(rigs: Rigs, method: Any) -> None:
    """They may write weights; the methods that may are known by name."""
    called: list[Any] = []
    executor = SimpleNamespace(collective_rpc=lambda *arguments: called.append(arguments))
    rig = rigs(world=2)
    store(rig, "writer")
    EngineCore.collective_rpc(SimpleNamespace(model_executor=executor), method, 3.0)
    assert called[0] == (method, 3.0, (), None)
    assert answers(rig, "reader") == [MISS if method is len else HIT] * 2
    assert store(rig, "of the device") == []


def test_a_store_under_way_when_weights_change_is_dropped(rigs: Rigs) -> None:
    rig = rigs()
    context = rig.request("writer", KEYS)
    output = rig.manager.prepare_store(KEYS, context)
    change(rig)
    rig.copy_in(output.store_spec, [1, 2])
    rig.manager.complete_store(set(KEYS), context)
    rig.end_step()
    assert answers(rig, "after it") == [MISS] * 2
    assert rig.cache.leases == rig.cache.protected == 0
    rig.cache.check_integrity()


def test_report_of_an_old_store_does_not_end_another(rigs: Rigs) -> None:
    rig = rigs()
    old = rig.request("old", KEYS)
    before = rig.manager.prepare_store(KEYS, old)
    change(rig)
    rig.manager.device_was_reset()
    new = rig.request("new", KEYS)
    after = rig.manager.prepare_store(KEYS[:1], new)
    assert after.keys_to_store == KEYS[:1]
    rig.copy_in(before.store_spec, [1, 2])
    rig.manager.complete_store(set(KEYS), old)
    rig.copy_in(after.store_spec, [3])
    rig.manager.complete_store(set(KEYS[:1]), new)
    rig.end_step()
    assert answers(rig, "reader")[0] is HIT
    assert not rig.manager._store_jobs and not rig.manager._unreported and not rig.manager._store_jobs.by_first_key


def test_a_request_that_asks_for_nothing_uses_the_device(rigs: Rigs) -> None:
    rig = rigs()
    short = rig.request("shorter than a chunk")
    rig.manager.on_request_finished(short)
    change(rig)
    assert store(rig, "of the device") == []


def test_a_reset_that_the_device_refused_does_not_empty_it(rigs: Rigs) -> None:
    rig = rigs()
    rig.manager.observes_device_resets = True
    store(rig, "writer")
    change(rig)
    rig.manager.reset_cache()  # the connector's part alone: no request runs, yet the device kept its blocks
    assert store(rig, "of the device") == []
    rig.manager.device_was_reset()
    assert store(rig, "computed anew") == KEYS


def test_a_load_ordered_before_weights_changed_is_reported_as_failed(rigs: Rigs) -> None:
    rig = rigs()
    rig.workers[0].reports_failures = True
    store(rig, "writer")
    reader = rig.request("reader", KEYS)
    assert rig.lookup(KEYS, reader) == [HIT] * 2
    spec = rig.manager.prepare_load(KEYS, reader)
    change(rig)
    rig.run("submit_load", spec, rig._theirs(spec, [3, 4]))
    assert rig.workers[0].take_failed({1}) == {1}
    rig.workers[0].reports_failures = False
    with pytest.raises(EngineError, match="use LongshoreConnector"):
        rig.run("submit_load", spec, rig._theirs(spec, [3, 4]))


@pytest.mark.parametrize("fixed", [False, True])
def test_files_of_old_weights_are_not_served_again(tmp_path: Path, fixed: bool) -> None:
    settings = {**file_settings(tmp_path), "fixed_weights": fixed}
    rig = Rig(**settings)
    store(rig, "writer")
    change(rig)
    rig.manager.reset_cache()
    assert store(rig, "of new weights") == KEYS
    assert rig.manager.flush(30.0)
    rig.close()
    rig = Rig(**settings)
    assert answers(rig, "the next engine") == [MISS] * 2
    rig.close()


class Worker:
    """Has the methods of vLLM's worker."""

    def load_model(self) -> None: ...
    def reset_weights(self) -> None: ...
    def apply_model(self, function: Any) -> None:
        if callable(function):
            function()

    def sleep(self, level: int = 1) -> None: ...
    def discard(self, tags: tuple[str, ...]) -> None: ...
    def wake_up(self, tags: list[str] | None = None) -> None: ...
    def start_weight_update(self) -> None: ...
    def start_draft_weight_update(self) -> None: ...
    def update_weights(self) -> None: ...
    def finish_weight_update(self) -> None: ...

    def reload_weights(self) -> None:
        raise OSError("half of the files are gone")


class Extension:
    """A worker extension, as trainers have."""

    def receive(self) -> str:
        return "received"


class Extended(Worker, Extension):
    """As vLLM puts them together."""


class Device:
    """Who is told of device memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_device_release(self) -> None:
        self.calls.append("goes")

    def after_device_restore(self) -> None:
        self.calls.append("is back")


class Model(torch.nn.Module):
    """A model with one layer, as vLLM's have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(7, 300)
        self.embedding = torch.nn.Embedding(50, 7)

    def load_weights(self) -> None: ...


class Watched:
    """Workers of the class above, whose model and device memory are watched."""

    def __init__(self) -> None:
        self.told: list[None] = []
        self.device, self.model = Device(), Model()
        parallel = SimpleNamespace(worker_cls=f"{__name__}.Extended", worker_extension_cls=f"{__name__}.Extension")
        context = SimpleNamespace(static_forward_context={"layer": self.model.layer})
        vllm = SimpleNamespace(parallel_config=parallel, compilation_config=context)
        self.changes = WeightWatch(vllm, lambda: self.told.append(None), self.device)


@pytest.fixture
def watched() -> Iterator[Watched]:
    each = Watched()
    yield each
    each.changes.close()
    before = len(each.told)
    Extended().apply_model(None)
    assert len(each.told) == before


def test_methods_that_change_weights_tell(watched: Watched) -> None:
    worker, told = Extended(), watched.told
    for name in weight_changes.METHODS:
        before = len(told)
        try:
            getattr(worker, name)(*([2] if name in ("sleep", "apply_model") else []))
        except OSError:
            assert name == "reload_weights"
        assert len(told) == before + 1
    assert worker.receive() == "received"
    assert len(told) == len(weight_changes.METHODS) + 1
    watched.model.load_weights()
    assert len(told) == len(weight_changes.METHODS) + 2


@pytest.mark.parametrize("how", ["method", "sleep", "function", "method after a sleep"])
def test_a_change_that_was_told_is_no_second_one(watched: Watched, how: str) -> None:
    """Else nothing was stored after the reset that follows it, until the next one."""
    worker, reports = Extended(), RankReports.make(4, 1, 1)
    weight_changes.watch_calls(reports)

    def write(*_: Any) -> None:
        watched.model.layer.weight.data *= 2

    if how.startswith("method"):
        if how == "method after a sleep":
            worker.sleep(1)
            worker.wake_up()
        worker.apply_model(write)
    elif how == "sleep":
        worker.sleep(1)
        write()
        worker.wake_up()
    else:
        executor = SimpleNamespace(collective_rpc=lambda method, *_: method(worker))
        EngineCore.collective_rpc(SimpleNamespace(model_executor=executor), write)
    assert len(watched.told) + reports.weight_changes == 1
    watched.changes.check()
    assert len(watched.told) + reports.weight_changes == 1
    write()
    watched.changes.check()
    assert len(watched.told) + reports.weight_changes == 2
    reports.close()


def test_a_change_is_told_though_weights_cannot_be_read(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable() -> None:
        raise RuntimeError("no storage")

    with monkeypatch.context() as broken:
        broken.setattr(watched.changes, "_sampled", unreadable)
        Extended().apply_model(lambda: watched.model.layer.weight.data.mul_(2))
    assert len(watched.told) == 1
    watched.changes.check()
    assert len(watched.told) == 2


def test_sleep_that_keeps_weights_tells_of_device_memory_alone(watched: Watched) -> None:
    worker, calls = Extended(), watched.device.calls
    for sleep in (worker.sleep, lambda: worker.sleep(1), lambda: worker.sleep(level=1)):
        sleep()
        worker.wake_up(["weights"])
        assert calls == ["goes"]
        worker.wake_up(tags=["kv_cache"])
        assert calls == ["goes", "is back"]
        calls.clear()
    worker.discard(("weights",))
    assert calls == []
    worker.discard(("kv_cache",))
    worker.wake_up()
    assert calls == ["goes", "is back"]
    watched.changes.check()
    assert watched.told == []


@pytest.mark.parametrize("first", ["kv_cache", "weights"])
def test_weights_are_not_read_while_they_are_gone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """On a GPU that would be the end of the engine."""
    worker, read, content = Extended(), list[Any](), weight_changes.content
    monkeypatch.setattr(weight_changes, "content", lambda tensor: read.append(tensor) or content(tensor))
    worker.sleep(1)
    assert read
    read.clear()
    watched.changes.check()
    worker.discard(("kv_cache",))
    worker.wake_up([first])
    watched.changes.check()
    assert not read
    assert watched.device.calls[-1] == "goes"
    worker.wake_up(["kv_cache", "weights"])
    assert read
    assert watched.device.calls[-1] == "is back"
    assert not watched.told


@pytest.mark.parametrize("name", ["layer", "embedding"])
@pytest.mark.parametrize("when", ["asleep", "between the tags", "awake"])
def test_unseen_weight_writes_are_found_after_a_sleep(watched: Watched, name: str, when: str) -> None:
    worker, parameter = Extended(), getattr(watched.model, name).weight
    for moment in ("asleep", "between the tags", "awake"):
        if moment == "asleep":
            worker.sleep(1)
        elif moment == "between the tags":
            worker.wake_up(["weights"])
        else:
            worker.wake_up(["kv_cache"])
            assert bool(watched.told) == (when != "awake")
        if moment == when:
            parameter.data.view(-1)[5] += 1.0  # none of the samples
    watched.changes._is_sampled = False  # as on a GPU
    watched.changes.check()
    assert len(watched.told) == 1
    watched.changes.check()
    assert len(watched.told) == 1


@pytest.mark.parametrize("sleeps", [False, True])
def test_replaced_parameters_are_found(watched: Watched, sleeps: bool) -> None:
    if sleeps:
        watched.changes._is_sampled = False  # as on a GPU
        Extended().sleep(1)
    watched.model.layer.weight = torch.nn.Parameter(watched.model.layer.weight.data * 2)
    if sleeps:
        Extended().wake_up()
    watched.changes.check()
    assert len(watched.told) == 1
    watched.model.layer.weight.data *= 2
    watched.changes.check()
    assert len(watched.told) == (1 if sleeps else 2)


def test_weights_that_cannot_be_compared_are_new_ones(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: Any) -> bytes:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(weight_changes, "content", fail)
    Extended().sleep(1)
    Extended().wake_up()
    assert watched.told
    assert watched.device.calls == ["goes", "is back"]


def test_new_weights_in_a_running_engine_get_no_old_blocks(serve: Serve, tmp_path: Path) -> None:
    """By reload, and behind vLLM's back: answers are those of engines that began with these weights."""
    ask, path = asked(prompts()), tmp_path / "tier"
    model = save("llama", tmp_path)
    old = serve("llama", ask, None, 600, saved=model).answers
    served = serve(
        "llama",
        [
            *ask,
            ["settle"],
            ["rewrite_weights"],
            ["reload_weights"],
            ["reset"],
            *ask,
            ["settle"],
            ["reset"],
            *ask,
            ["scale_weights", 0.5],
            ["reset"],
            *ask,
            ["scale_weights", 2.0],
            ["reset"],
            *ask,
        ],
        tiers(path),
        160,
        connector=CONNECTOR,
        saved=model,
    ).answers
    fresh = serve("llama", [*ask, ["scale_weights", 0.5], ["reset"], *ask], None, 600, saved=model).answers
    assert served[:3] == old
    assert [each["logprobs"] for each in served[3:6]] == [each["logprobs"] for each in fresh[:3]]
    assert [each["logprobs"] for each in served[3:6]] != [each["logprobs"] for each in old]
    assert [each["cached"] > 0 for each in served[6:9]] == [True] * 3, "what new weights computed is served"
    assert [each["tokens"] for each in served[9:12]] == [each["tokens"] for each in fresh[3:]]
    assert [each["tokens"] for each in served[12:]] == [each["tokens"] for each in fresh[:3]]


def test_weights_changed_between_engines_get_no_old_blocks(serve: Serve, tmp_path: Path) -> None:
    ask, settings = asked(prompts()), tiers(tmp_path / "tier")
    model = save("llama", tmp_path)
    serve("llama", [*ask, ["settle"]], settings, 160, saved=model)
    again = serve("llama", ask, settings, 160, saved=model)
    assert again.counters["arrived"].get("file->host", 0) > 0
    rewrite(next(model.glob("*.safetensors")))
    changed = serve("llama", ask, settings, 160, saved=model)
    assert changed.counters["arrived"].get("file->host", 0) == 0
    assert changed.answers == serve("llama", ask, None, 600, saved=model).answers
    shutil.rmtree(model)


def test_weights_rewritten_between_loading_and_hashing_leave_nothing(serve: Serve, tmp_path: Path) -> None:
    ask, settings, model = asked(prompts()), tiers(tmp_path / "tier"), save("llama", tmp_path)
    old = serve("llama", [*ask, ["settle"]], settings, 160, saved=model, rewritten=True)
    fresh = serve("llama", ask, None, 600, saved=model)
    served = [serve("llama", [*ask, ["settle"]], settings, 160, saved=model) for _ in range(2)]
    assert old.answers != fresh.answers, "the first engine has loaded what was there before"
    assert [each.counters["arrived"].get("file->host", 0) > 0 for each in served] == [False, True]
    assert [each["tokens"] for each in served[1].answers] == [each["tokens"] for each in fresh.answers]
    assert served[0].answers == fresh.answers
