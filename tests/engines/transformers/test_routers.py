"""What a router knows of a model under transformers, from its KV events alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_calls import generate
from test_stores import BLOCK, PROMPT, make_model, prefill

from longshore.boundary import FILE as IN_FILE
from longshore.boundary import HOST as IN_HOST
from longshore.boundary import REMOTE
from longshore.cache import TieredCache
from longshore.config import Config
from longshore.engines.transformers import PrefixStore, tiered
from longshore.keys import chain
from longshore.runtime.kv_events import block_hash
from residents import residents_of
from router import FILE, HOST, Router, Subscriber, store

pytest.importorskip("zmq", reason="the extra 'events' is not installed")
pytest.importorskip("msgspec", reason="the extra 'events' is not installed")

TIMEOUT = 60.0


@pytest.fixture(params=[1, 2])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    (tmp_path / "shared").mkdir()
    return Config.make(
        host_size="4MiB",
        file_path=tmp_path / "tier",
        file_size="8MiB",
        remote=f"file://{tmp_path}/shared?probe_timeout=20s&fetch_timeout=20s&write_timeout=20s",
        gate=False,
        blocks_per_chunk=request.param,
        load_timeout=60,
        kv_events=f"ipc://{tmp_path}/events",
        kv_events_replay=f"ipc://{tmp_path}/replay",
        kv_events_remote=True,
    )


@pytest.fixture
def subscriber(config: Config) -> Iterator[Subscriber]:
    made = Subscriber(config.kv_events, config.kv_events_replay)
    yield made
    made.close()


def router_of(subscriber: Subscriber) -> Router:
    """A router that has read everything so far."""
    router = Router()
    subscriber.ask(0)
    for frames in subscriber.replayed(TIMEOUT):
        router.read(frames)
    return router


def agreed(subscriber: Subscriber, runtime: Any) -> Router:
    """A router that agrees with own tiers. Raises if none does in time."""
    give_up = time.monotonic() + TIMEOUT
    while True:
        router = router_of(subscriber)
        with runtime.locked() as cache:
            assert isinstance(cache, TieredCache)
            residents = residents_of(cache)
        there = {
            place: {block_hash(each.key) for each in residents if each.slot.tier == tier}
            for tier, place in ((IN_HOST, HOST), (IN_FILE, FILE))
        }
        if all(router.blocks[place] == hashes for place, hashes in there.items()):
            return router
        assert time.monotonic() < give_up, f"the router has {router.blocks}, the tiers have {there}"


def test_a_router_knows_the_prefixes_of_a_store(config: Config, subscriber: Subscriber) -> None:
    model, chunk = make_model(1), BLOCK * config.blocks_per_chunk
    with PrefixStore(model, config, block_size=BLOCK, staging_blocks=8) as kept:
        assert kept.store_prefix(PROMPT, prefill(model, PROMPT)) == 192
        assert kept._stack.runtime.flush(TIMEOUT)
        router = agreed(subscriber, kept._stack.runtime)
        keys = chain(kept._stack.scope.digest, PROMPT, chunk)
        hashes = {block_hash(key) for key in keys}
        assert router.blocks[HOST] == router.blocks[FILE] == router.blocks[store(REMOTE)] == hashes
        for at, key in enumerate(keys):
            parent = block_hash(keys[at - 1]) if at else None
            assert router.tokens[block_hash(key)] == (parent, PROMPT[at * chunk : (at + 1) * chunk])
    with PrefixStore(model, config, block_size=BLOCK, staging_blocks=8) as kept:  # files of an earlier process
        assert not router_of(subscriber).blocks[FILE]
        assert kept.restore_prefix(PROMPT[:-1])[1] == 192
        assert kept._stack.runtime.flush(TIMEOUT)
        router = agreed(subscriber, kept._stack.runtime)
        assert router.blocks[HOST] == router.blocks[FILE] == hashes
        with kept._stack.runtime.batch() as cache:
            cache.reset()
        router = agreed(subscriber, kept._stack.runtime)
        assert not router.blocks[HOST] and not router.blocks[FILE] and not router.blocks[store(REMOTE)]


def test_a_router_knows_the_blocks_of_continuous_batching(config: Config, subscriber: Subscriber) -> None:
    """Also those that the device evicts, or that return when the tiers have lost them."""
    model = make_model(1)
    with tiered(model, config) as tiers:
        generate(model, [PROMPT])
        stack = tiers.stack
        assert stack is not None
        assert stack.runtime.flush(TIMEOUT)
        router = agreed(subscriber, stack.runtime)
        keys = chain(stack.scope.digest, PROMPT, BLOCK * config.blocks_per_chunk)
        assert len(router.blocks[HOST]) >= len(keys) > 0
        assert {block_hash(key) for key in keys} <= router.blocks[HOST]
        assert router.blocks[store(REMOTE)] == router.blocks[HOST]
        with stack.runtime.batch() as cache:
            cache.reset()
        generate(model, [PROMPT])
        assert stack.runtime.flush(TIMEOUT)
        router = agreed(subscriber, stack.runtime)
        assert {block_hash(key) for key in keys} <= router.blocks[HOST]
