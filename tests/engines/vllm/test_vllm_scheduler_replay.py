"""Requests of a trace through vLLM's offloading interface, beside vLLM's own scheduler part."""

from __future__ import annotations

import json
from importlib import resources
from types import SimpleNamespace
from typing import Any

import pytest
from test_vllm_scheduling import PAGE, Scheduling
from typer.testing import CliRunner
from vllm_kit import TOKENS

from longshore.cli.app import app
from longshore.config import Config
from longshore.engines.vllm import LongshoreManager
from longshore.engines.vllm.scheduler_replay import VllmReplay, open_replay, open_tiers
from longshore.errors import ConfigError, IntegrityError
from longshore.trace.readers import read_excerpt

EXCERPT = str(resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl"))
PATHS = [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6), (1, 2, 7), (1, 2, 3, 4), (8,), tuple(range(20, 34)), (1, 2, 3, 4, 5, 6)]
"""Nothing, a part or all of a request is found; one is longer than the tier."""
SLOTS = 9


class Recorder:
    """A manager whose calls are written down: the verb, and the positions of keys in the request or new requests."""

    def __init__(self, manager: LongshoreManager) -> None:
        self.manager = manager
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, verb: str) -> Any:
        def call(*arguments: Any) -> Any:
            said = []
            for each in arguments:
                if hasattr(each, "new_req_ids"):
                    said.append((len(each.new_req_ids), tuple(each.preempted_req_ids)))
                elif not hasattr(each, "req_id"):
                    keys = [each] if isinstance(each, bytes) else each
                    told = list(arguments[1]._offload_key_positions.items())
                    at = [[key for key, _ in told].index(key) for key in keys]
                    said.append(type(each)(at) if isinstance(each, list | set) else at)
            self.calls.append((verb, *said))
            return getattr(self.manager, verb)(*arguments)

        return call


def test_the_manager_is_called_as_by_vllms_scheduler(rigs: Any) -> None:
    rig = rigs(page=PAGE, blocks=400, host_size=SLOTS * 12 * 1024)
    rig.manager = theirs = Recorder(rig.manager)
    slots = rig.cache.stats()[0].slots
    assert slots < 14, "a prompt is longer than the tier"
    engine = Scheduling(rig)
    store = open_tiers(slots, Config.make())
    ours = Recorder(LongshoreManager(store, [0], 60.0))
    replay = VllmReplay(store, ours)  # type: ignore[arg-type]
    hits = []
    for number, path in enumerate(PATHS):
        hits.append(replay.serve(path))
        found = engine.ask(str(number), [block for block in path for _ in range(TOKENS)])
        assert ours.calls == theirs.calls, path
        assert hits[-1] == found // TOKENS
    assert 0 in hits
    assert len(PATHS[3]) == hits[3]
    verbs = {call[0] for call in ours.calls}
    assert verbs >= {"on_new_request", "lookup", "prepare_load", "complete_load", "prepare_store", "complete_store"}
    assert verbs >= {"on_schedule_end", "on_request_finished"}
    replay.close()


def test_a_store_that_was_put_off_is_offered_once_more(rigs: Any) -> None:
    store = open_tiers(SLOTS, Config.make())
    manager = LongshoreManager(store, [0], 60.0)
    refused = []
    prepare = manager.prepare_store

    def later(keys: Any, context: Any) -> Any:
        refused.append(keys)
        return None if len(refused) == 1 else prepare(keys, context)

    manager.prepare_store = later
    replay = VllmReplay(store, manager)
    assert [replay.serve((1, 2)), replay.serve((1, 2))] == [0, 2]
    assert len(refused) == 3, "refused, offered once more, and by the second request, with what it has loaded"
    replay.close()


def test_the_command_prints_a_hit_ratio() -> None:
    options = ["replay", EXCERPT, "--capacity-blocks", "300", "--policy", "lru", "--json"]
    done = CliRunner().invoke(app, [*options, "--through", "vllm"], catch_exceptions=False)
    found = json.loads(done.stdout)
    replay = open_replay(300, "lru")
    paths = [request.hash_ids for request in read_excerpt()]
    hits = sum(map(replay.serve, paths))
    replay.close()
    assert found["hit_ratio"] == hits / sum(map(len, paths)) > 0
    assert (found["through"], found["policy"]) == ("vllm", "lru")


def test_a_policy_that_is_no_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="eviction = 's3-fifo'"):
        open_replay(5, "s3-fifo")


def test_a_fault_of_the_control_plane_ends_the_replay() -> None:
    replay = open_replay(SLOTS, "gittins")
    replay.serve((1, 2))
    replay._tiers.runtime._cache.lookup = lambda *_, **__: SimpleNamespace()  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(IntegrityError, match="the control plane failed in request 2"):
        replay.serve((1, 2))
    replay.close()
