"""KV events of a real engine, as vLLM's own publisher sends them: a router knows from them what the tiers hold."""

from __future__ import annotations

import json
import os
from pathlib import Path

from engine_runs import CONNECTOR, Serve, asked, prompts, tiers
from msgspec import msgpack
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from longshore.boundary import FILE as IN_FILE
from longshore.boundary import HOST as IN_HOST
from longshore.boundary import REMOTE
from longshore.cache.events import Event, EventKind
from longshore.keys import chain
from longshore.runtime.kv_events import KVEventPublisher, block_hash
from router import DEVICE, FILE, HOST, Router, Subscriber, store

GOLDEN = Path(__file__).parents[2] / "runtime" / "vllm_kv_events.json"
"""The stream of this engine, for tests where no vLLM is: written anew with LONGSHORE_WRITE_GOLDEN=1."""


def served(
    serve: Serve, directory: Path, *, remote: bool
) -> tuple[Router, list[list[bytes]], dict[str, list[int]], set[int]]:
    """A router's index, all frames, what own tiers had at the end, and what the store had."""
    (directory / "shared").mkdir(parents=True)
    patient = "probe_timeout=20s&fetch_timeout=20s&write_timeout=20s"
    extra = {
        **tiers(directory / "tier"),
        "remote": f"file://{directory}/shared?{patient}",
        "kv_events_remote": remote,
        "self_describing_kv_events": True,
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "topic": "kv",
        "endpoint": f"ipc://{directory}/events",
    }
    ask, publish = (
        asked([prompt[:130] for prompt in prompts()[:2]]),
        ["ask", [7] * 40],
    )  # events are published with the next step
    lost = [["lose", IN_HOST], ["lose", IN_FILE], ["reset"], ["empty", f"{directory}/shared"]]
    steps = [
        *ask,
        ["settle"],
        publish,
        *lost,
        *ask,
        ["settle"],
        publish,
        ["reset"],
        publish,
        ["settle"],
        publish,
        ["residents"],
    ]
    subscriber = Subscriber(events["endpoint"], topic="kv")
    try:
        answers = serve("llama", steps, extra, 160, connector=CONNECTOR, options={"kv_events_config": events}).answers
        frames = subscriber.batches(10.0)
    finally:
        subscriber.close()
    router = Router()
    for batch in frames:
        router.read(batch, b"kv")
    names = [path.name for path in (directory / "shared").rglob("*") if path.is_file()]
    return router, frames, answers[-1], {int(name[-24:-8], 16) for name in names}


def test_router_knows_what_a_real_engines_tiers_hold(serve: Serve, tmp_path: Path) -> None:
    router, frames, residents, shared = served(serve, tmp_path / "all", remote=True)
    assert router.blocks[HOST] == {*residents[IN_HOST]} != set()
    assert router.blocks[FILE] == {*residents[IN_FILE]} != set()
    assert router.blocks[store(REMOTE)] == shared != set()
    assert router.blocks[DEVICE]
    gone = [event for event in router.events if event["type"] == "BlockRemoved" and event.get("locality") == "REMOTE"]
    assert gone, "the store was emptied, and nobody saw it"
    assert [event["type"] for event in router.events].count("AllBlocksCleared") >= 2  # the tiers' blocks came again
    told = {hashed for event in router.events if event["type"] == "BlockStored" for hashed in event["block_hashes"]}
    assert router.tokens.keys() == told, "some events have no tokens"
    decoder = msgpack.Decoder(KVEventBatch)
    for batch in frames:
        assert isinstance(decoder.decode(batch[2]).events, list)
    if os.environ.get("LONGSHORE_WRITE_GOLDEN"):
        how = "captured from vLLM's publisher: LONGSHORE_WRITE_GOLDEN=1 with tests/engines/vllm/test_vllm_events.py"
        lines = ",\n".join(json.dumps([frame.hex() for frame in batch]) for batch in frames)
        GOLDEN.write_text(f'{{"how": "{how}", "topic": "kv", "frames": [\n{lines}\n]}}\n')


def test_stores_are_not_announced_unless_asked_for(serve: Serve, tmp_path: Path) -> None:
    router, _, residents, shared = served(serve, tmp_path / "own", remote=False)
    assert shared
    assert router.blocks[HOST] == {*residents[IN_HOST]}
    assert not [event for event in router.events if event.get("locality") == "REMOTE" or event.get("ownership")]


def test_what_our_publisher_sends_is_what_vllm_reads(tmp_path: Path) -> None:
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", 4, replay=f"ipc://{tmp_path}/replay")
    subscriber = Subscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        tokens = list(range(8))
        keys = chain(bytes(32), tokens, 4)
        publisher.record_tokens(keys, 0, tokens)
        kinds = ((EventKind.STORED, IN_HOST), (EventKind.MOVED, IN_FILE), (EventKind.SHARED, REMOTE))
        events = [Event(1, kind, tier=tier, key=key) for kind, tier in kinds for key in keys]
        publisher.publish(events)
        publisher.publish([Event(2, EventKind.REMOVED, tier=IN_HOST, key=key) for key in keys])
        publisher.publish([Event(2, EventKind.LAPSED, tier=REMOTE, key=keys[1]), Event(3, EventKind.RESET)])
        subscriber.ask(0)
        while not subscriber._ask.poll(100):
            publisher.serve_replays()
        decoder = msgpack.Decoder(KVEventBatch)
        batches = [decoder.decode(body) for _, _, body in subscriber.replayed()]
    finally:
        subscriber.close()
        publisher.close()
    assert [batch.data_parallel_rank for batch in batches] == [0] * 4
    first, second = map(block_hash, keys)
    stored = [each for each in batches[1].events if isinstance(each, BlockStored)]
    assert [(each.block_hashes, each.parent_block_hash, each.token_ids, each.block_size) for each in stored] == [
        ([first, second], None, list(range(8)), 4)
    ] * 3
    places = [(each.medium, each.locality, each.ownership) for each in stored]
    assert places == [("CPU", "LOCAL", None), ("STORAGE", "LOCAL", None), ("STORAGE", "REMOTE", "remote")]
    (removed,) = batches[2].events
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.locality) == ([first, second], "CPU", "LOCAL")
    assert [type(each) for each in batches[0].events + batches[3].events] == [AllBlocksCleared] * 2
