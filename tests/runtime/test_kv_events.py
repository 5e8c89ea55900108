"""KV events for routers: a router that has nothing but the published bytes knows what the tiers have."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from longshore.boundary import DEVICE as ON_DEVICE
from longshore.boundary import FILE as IN_FILE
from longshore.boundary import HOST as IN_HOST
from longshore.boundary import REMOTE, Key, Probe, ProbeResult, Route, Status, StoredChunk, Transfer, TransferResult
from longshore.cache import CacheSettings, GroupKeys, SlotState, TieredCache, TierSpec, WritePolicy, remote
from longshore.cache import events as log
from longshore.cache.events import Event, EventKind
from longshore.cache.eviction_policies import LRU
from longshore.config import Config
from longshore.errors import ConfigError
from longshore.keys import chain
from longshore.runtime import EventRecorder, Runtime
from longshore.runtime import kv_events as wire
from longshore.runtime.kv_events import KVEventPublisher, block_hash
from longshore.runtime.recorder import open_recorder
from residents import residents_of
from router import FILE, HOST, Router, Subscriber, store
from scripted import Scripted

pytest.importorskip("zmq", reason="the extra 'events' is not installed")
pytest.importorskip("msgspec", reason="the extra 'events' is not installed")

CHUNK = 4
ROOT = bytes(32)
GOLDEN = Path(__file__).parent / "vllm_kv_events.json"

Open = Callable[..., KVEventPublisher]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[KVEventPublisher] = []

    def make(endpoint: str = f"ipc://{tmp_path}/events", **how: Any) -> KVEventPublisher:
        made.append(KVEventPublisher(endpoint, CHUNK, **how))
        return made[-1]

    yield make
    for publisher in made:
        publisher.close()


class Taps:
    """Every batch that a publisher sends, in order, as from a network that loses nothing."""

    def __init__(self, publisher: KVEventPublisher) -> None:
        self.frames: list[tuple[bytes, bytes, bytes]] = []
        self._sockets = publisher._publisher
        publisher._publisher = self

    def send_multipart(self, frames: tuple[bytes, bytes, bytes]) -> None:
        self.frames.append(frames)
        self._sockets.send_multipart(frames)


# ---------------------------------------------------------------------- what the index of a router is worth


class Storm:
    """A cache over host memory, files and a store; copies, answers and losses come by chance, and late."""

    def __init__(self, seed: int, events: int, publisher: KVEventPublisher) -> None:
        self.draw = random.Random(seed)
        tiers = [TierSpec(IN_HOST, 12, 4096, LRU), TierSpec(IN_FILE, 30, 4096, LRU)]
        settings = CacheSettings(events=events, remote_events=True, backup=WritePolicy.THROUGH, probe_life=1.0)
        self.cache = TieredCache(tiers, settings, remote=[REMOTE])
        self.publisher = publisher
        self.now = 0.0
        self.there: set[Key] = set()
        """What the store has."""
        self.confirmed: set[Key] = set()
        """What the cache was told that the store has taken, since the last reset."""
        self.evicted: set[Key] = set()
        """What the store has evicted, which nobody tells."""
        self.waiting: list[Transfer | Probe] = []
        self.done: list[TransferResult | ProbeResult] = []
        """Results of what has been executed, to be delivered."""
        self.stores: dict[int, tuple[Key, ...]] = {}
        self.paths = [self.path() for _ in range(6)]

    def path(self) -> list[int]:
        return [self.draw.randrange(1000) for _ in range(CHUNK * self.draw.randint(1, 8))]

    def step(self) -> None:
        verbs = (self.ask, self.ask, self.offer, self.offer, self.execute, self.execute, self.execute, self.deliver)
        self.draw.choice((*verbs, self.deliver, self.deliver, self.fetch, self.evict, self.evict, self.rare))()
        for command in self.cache.take_commands():
            if isinstance(command, Transfer | Probe):
                self.waiting.append(command)
        self.cache.check_integrity()

    def keys(self) -> list[Key]:
        at = self.draw.randrange(len(self.paths))
        if self.draw.random() < 0.1:
            self.paths[at] = self.path()
        tokens, keys = self.paths[at], chain(ROOT, self.paths[at], CHUNK)
        self.publisher.record_tokens(keys, 0, tokens)
        return keys

    def ask(self) -> None:
        found = self.cache.lookup({0: GroupKeys(self.keys())}, self.now)
        if found.lease is not None:
            self.cache.release(found.lease)

    def offer(self) -> None:
        keys = self.keys()
        self.cache.store({0: GroupKeys(keys)}, {0: range(len(keys))})

    def fetch(self) -> None:
        self.cache.prefetch({0: GroupKeys(self.keys())}, self.now)

    def evict(self) -> None:
        """The store evicts some of what it has."""
        gone = self.draw.sample(sorted(self.there), min(len(self.there), self.draw.randint(0, 3)))
        self.there.difference_update(gone)
        self.evicted.update(gone)

    def execute(self) -> None:
        if not self.waiting:
            return
        command = self.waiting.pop(self.draw.randrange(len(self.waiting)))
        if isinstance(command, Probe):
            status = Status.OK if self.draw.random() < 0.9 else Status.UNAVAILABLE
            self.done.append(ProbeResult(command.probe, tuple(key in self.there for key in command.keys), status))
            return
        statuses, bad = [], (Status.IO_ERROR, Status.DEADLINE, Status.UNAVAILABLE)
        for item in command.items:
            status = Status.OK if self.draw.random() < 0.93 else self.draw.choice(bad)
            if command.route.source == REMOTE and item.key not in self.there:
                status = Status.NOT_FOUND
            if command.route.destination == REMOTE and status is Status.OK:
                self.there.add(item.key)
            statuses.append(status)
        if command.route.destination == REMOTE:
            taken = zip(command.items, statuses, strict=True)
            self.stores[command.job] = tuple(item.key for item, status in taken if status is Status.OK)
        self.done.append(TransferResult(command.job, tuple(statuses)))

    def deliver(self) -> None:
        self.now += self.draw.random() / 4
        told = self.draw.sample(self.done, self.draw.randint(0, len(self.done)))
        self.done = [each for each in self.done if each not in told]
        for each in told:
            if isinstance(each, TransferResult):
                self.confirmed.update(self.stores.pop(each.job, ()))
        self.cache.apply_results(told, self.now)

    def rare(self) -> None:
        match self.draw.randrange(40):
            case 0:
                self.cache.reset(weights=self.draw.random() < 0.5)
                self.confirmed.clear()
                self.stores.clear()
            case 1:
                self.cache.reset(keep=[IN_FILE])
            case 2:
                self.cache.discard(self.keys(), IN_HOST)
            case _:
                self.publish()

    def publish(self) -> None:
        """As the recorder does, of which `pump` is tested apart."""
        events = self.cache.events(self.draw.choice((None, 5, 100)))
        self.publisher.publish(events, self.cache.reconcile(self.publisher.announced))

    def settle(self) -> None:
        """Nothing is in flight, and all events are published."""
        while self.waiting or self.done:
            self.execute()
            self.deliver()
            self.waiting += [each for each in self.cache.take_commands() if isinstance(each, Transfer | Probe)]
        self.publisher.publish(self.cache.events())
        while not self.publisher.announced.is_current:
            self.publisher.publish((), self.cache.reconcile(self.publisher.announced))

    def check(self, router: Router) -> tuple[int, int]:
        """How many copies in the store the router knows, and how many of them the store has evicted unseen."""
        residents = [each for each in residents_of(self.cache) if each.state is SlotState.READY]
        for tier, place in ((IN_HOST, HOST), (IN_FILE, FILE)):
            assert router.blocks[place] == {block_hash(each.key) for each in residents if each.slot.tier == tier}
        known = router.blocks[store(REMOTE)]
        unseen = known - {block_hash(key) for key in self.there}
        assert unseen <= {block_hash(key) for key in self.evicted}
        assert known <= {block_hash(key) for key in self.confirmed}
        assert known - unseen == {block_hash(key) for key in self.there & self.confirmed}
        return len(known), len(unseen)


@pytest.mark.parametrize("events", [100_000, 150])
def test_after_random_operations_a_router_knows_what_the_tiers_hold(
    opened: Open, events: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 of them; evictions that nobody sees are counted. With 150 events kept some are missing now and then, and
    many steps are needed to compare all chunks."""
    monkeypatch.setattr(log, "STEP", 3)
    publisher = opened()
    taps, router = Taps(publisher), Router()
    storm, counted = Storm(11, events, publisher), [0, 0]
    for number in range(10_000):
        storm.step()
        if number % 500 == 499:
            storm.settle()
            for frames in taps.frames:
                router.read((frames[0], (int.from_bytes(frames[1], "big") - 1).to_bytes(8, "big"), frames[2]))
            taps.frames.clear()
            known, unseen = storm.check(router)
            counted = [counted[0] + known, counted[1] + unseen]
    assert counted[0] > 100
    assert 0 < counted[1] < counted[0]
    kinds = {(each["type"], each.get("locality")) for each in router.events}
    assert {("BlockRemoved", "REMOTE"), ("BlockStored", "REMOTE"), ("AllBlocksCleared", None)} <= kinds
    spread = [each for path in storm.paths for each in zip(chain(ROOT, path, CHUNK), chunks_of(path), strict=True)]
    assert any(block_hash(key) in router.tokens for key, _ in spread)
    for key, tokens in spread:
        if block_hash(key) in router.tokens:
            assert router.tokens[block_hash(key)][1] == tokens


def chunks_of(tokens: list[int]) -> list[list[int]]:
    return [tokens[at : at + CHUNK] for at in range(0, len(tokens), CHUNK)]


# ---------------------------------------------------------------------- the wire


class Rig:
    """A runtime whose copies end when the test says so, and a recorder that works when it says so."""

    def __init__(self, publisher: KVEventPublisher | None, *, path: Path | None = None, **settings: Any) -> None:
        self.mover = Scripted(Route(ON_DEVICE, IN_HOST), Route(IN_HOST, ON_DEVICE))
        cache = TieredCache([TierSpec(IN_HOST, 8, 4096)], CacheSettings(**{"events": 100, **settings}))
        self.runtime = Runtime(cache, [self.mover])
        self.recorder = EventRecorder(self.runtime, path, 1 << 20, publisher=publisher, start=False)

    def store(self, tokens: list[int], *, describe: bool = True) -> list[Key]:
        keys = chain(ROOT, tokens, CHUNK)
        if describe and (publisher := self.recorder.publisher) is not None:
            publisher.record_tokens(keys, 0, tokens)
        with self.runtime.batch() as cache:
            cache.store({0: GroupKeys(keys)}, {0: range(len(keys))})
        self.mover.end()
        self.runtime.pump()
        return keys


def batches(subscriber: Subscriber, count: int) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    while len(found) < count:
        more = subscriber.batches(30.0)
        assert more, f"expected {count} batches, got {len(found)}"
        found += more
    return found


@pytest.mark.parametrize("endpoint", ["ipc://{tmp}/events", "tcp://127.0.0.1:0", "tcp://[::1]:0", "tcp://*:0"])
def test_a_subscriber_gets_what_it_has_missed_from_the_replay(opened: Open, tmp_path: Path, endpoint: str) -> None:
    """vLLM connects where an address names no wildcard. This publisher binds always: it is heard at 127.0.0.1, too."""
    replay = endpoint.format(tmp=tmp_path).replace("events", "replay")
    publisher = opened(endpoint.format(tmp=tmp_path), replay=replay, topic="kv")
    done_event = [each.replace("0.0.0.0", "127.0.0.1") for each in (publisher.endpoint, publisher.replay_endpoint)]  # noqa: S104
    rig, subscriber = Rig(publisher), Subscriber(*done_event, topic="kv")
    try:
        tokens = list(range(3 * CHUNK))
        keys = rig.store(tokens)
        rig.recorder.pump()
        subscriber.send_garbage(b"what?")
        subscriber.send_garbage(b"", b"too long a sequence")
        subscriber.ask(0)
        replayed: list[list[bytes]] = []
        while not replayed:
            rig.recorder.pump()
            replayed = subscriber.replayed(30.0) if subscriber._ask.poll(100) else []
        router = Router()
        for frames in replayed:
            router.read(frames, b"kv")
        assert router.events[0] == {"type": "AllBlocksCleared"}
        assert router.blocks[HOST] == {block_hash(key) for key in keys}
        assert [router.tokens[block_hash(key)][1] for key in keys] == chunks_of(tokens)
        assert [router.tokens[block_hash(key)][0] for key in keys] == [None, *map(block_hash, keys[:2])]
        subscriber.batches(1.0)  # by now it is subscribed
        with rig.runtime.batch() as cache:
            cache.discard(keys, IN_HOST)
        rig.recorder.pump()
        rig.recorder.close()
        later = [frames for frames in batches(subscriber, 2) if int.from_bytes(frames[1], "big") >= router.batches]
        for frames in later:
            router.read(frames, b"kv")
        assert [each["type"] for each in router.events[-2:]] == ["BlockRemoved", "AllBlocksCleared"]
        assert not router.blocks[HOST]
    finally:
        subscriber.close()


def test_a_replay_begins_where_it_was_asked_to(opened: Open, tmp_path: Path) -> None:
    publisher = opened(replay=f"ipc://{tmp_path}/replay")
    rig, subscriber = Rig(publisher), Subscriber(publisher.endpoint, publisher.replay_endpoint)
    try:
        for number in range(4):
            rig.store([number] * CHUNK)
            rig.recorder.pump()
        subscriber.ask(3)
        while not subscriber._ask.poll(100):
            rig.recorder.pump()
        assert [int.from_bytes(frames[1], "big") for frames in subscriber.replayed()] == [3, 4]
    finally:
        subscriber.close()


@pytest.mark.parametrize(("limit", "value"), [("KEPT_BATCHES", 2), ("KEPT_BYTES", 400)])
def test_what_is_kept_for_replays_is_bounded(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(wire, limit, value)
    publisher = opened(replay=f"ipc://{tmp_path}/replay")
    rig = Rig(publisher)
    for number in range(6):
        rig.store([number] * CHUNK)
        rig.recorder.pump()
    kept = [int.from_bytes(sequence, "big") for sequence, _ in publisher._kept]
    assert publisher.batches == 7
    assert 1 <= len(kept) <= 3
    assert kept[-1] == 6


def test_chunks_are_told_as_soon_as_their_tokens_are_known(opened: Open) -> None:
    """What an earlier process has left in files, for example, when a prompt asks for it."""
    publisher = opened()
    taps, router, rig = Taps(publisher), Router(), Rig(publisher)
    router.batches = 1
    keys = rig.store([1, 2, 3, 4], describe=False)
    rig.recorder.pump()
    assert not taps.frames
    publisher.record_tokens(keys, 0, [1, 2, 3, 4])
    rig.recorder.pump()
    publisher.record_tokens(keys, 0, [1, 2, 3, 4])
    rig.recorder.pump()
    for frames in taps.frames:
        router.read(frames)
    assert len(router.events) == 1
    assert router.blocks[HOST] == {block_hash(keys[0])}


def test_a_path_that_files_had_at_start_is_one_event(opened: Open) -> None:
    """More chunks than events are kept: a router still learns all of them, and which tokens they have."""
    count = 2000
    tokens = [number % 5003 for number in range(count * CHUNK)]
    keys = chain(ROOT, tokens, CHUNK)
    tiers = [TierSpec(IN_HOST, 8, 4096), TierSpec(IN_FILE, count, 4096, outlives=True)]
    cache = TieredCache(tiers, CacheSettings(events=100))
    cache.adopt(IN_FILE, [StoredChunk(at, key, keys[at - 1] if at else None) for at, key in enumerate(keys)])
    publisher = opened()
    taps, router = Taps(publisher), Router()
    recorder = EventRecorder(Runtime(cache, []), None, 1 << 20, publisher=publisher, start=False)
    while recorder.pump():
        pass
    publisher.record_tokens(keys, 0, tokens)
    recorder.pump()
    assert recorder.missed == 0
    router.batches = 1
    for frames in taps.frames:
        router.read(frames)
    assert len(router.events) == 1
    assert router.blocks[FILE] == {block_hash(key) for key in keys}
    parents = [None, *map(block_hash, keys)]
    for key, parent, mine in zip(keys, parents, chunks_of(tokens), strict=False):
        assert router.tokens[block_hash(key)] == (parent, mine)


def test_a_batch_after_a_gap_has_bounded_chunks(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "STEP", 8)
    publisher = opened()
    taps, router, count = Taps(publisher), Router(), 50
    router.batches = 1
    cache = TieredCache([TierSpec(IN_HOST, count, 4096)], CacheSettings(events=2))
    rig = Rig(publisher)
    rig.runtime._cache = cache
    tokens = list(range(count * CHUNK))
    keys = chain(ROOT, tokens, CHUNK)
    publisher.record_tokens(keys, 0, tokens)
    cache.adopt(IN_HOST, [StoredChunk(at, key, keys[at - 1] if at else None) for at, key in enumerate(keys)])
    cache.discard(keys[-3:], IN_HOST)  # more events than are kept: those of the start are missing
    while not taps.frames or not publisher.announced.is_current:
        rig.recorder.pump()
    for frames in taps.frames:
        before = len(router.events)
        router.read(frames)
        assert sum(len(event["block_hashes"]) for event in router.events[before:]) <= 8
    assert router.blocks[HOST] == {block_hash(key) for key in keys[:-3]}
    assert len([event for event in router.events if event["type"] == "BlockStored"]) == len(taps.frames)


def test_a_named_chunk_takes_few_bytes(opened: Open) -> None:
    """Key, name and the tiers that have it, in all tables of the publisher; 800 bytes with objects for each token."""
    count, size = 20_000, 16
    publisher = KVEventPublisher("inproc://few", size)
    paths = [chain(ROOT, [number] * (8 * size), size) for number in range(count // 8)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, keys in enumerate(paths):
            publisher.record_tokens(keys, 0, [100_000 + number + at for at in range(8 * size)])
            stored = [Event(0, EventKind.STORED, tier=tier, key=key) for key in keys for tier in (IN_HOST, REMOTE)]
            publisher.publish(stored)
        publisher._kept.clear()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        publisher.close()
    assert len(publisher.announced.names) == count
    assert used / count < 500


def test_tokens_of_unstored_blocks_are_not_kept_for_ever(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_DESCRIBED", 10)
    publisher = opened()
    for number in range(50):
        publisher.record_tokens([bytes([number]) * 32], 0, [1, 2, 3, 4])
        publisher.publish([])
    assert len(publisher._lately) == 10


def test_a_waiting_request_is_described_once(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_DESCRIBED", 100)
    publisher = opened()
    first, others = ([bytes([each]) * 32 for each in some] for some in (range(1), range(1, 51)))
    for _ in range(9):
        publisher.record_tokens(others, 0, [0] * 200)
    publisher.record_tokens(first, 0, [0] * 4)
    publisher.publish([])
    assert {first[0], *others} <= set(publisher._lately)
    assert not publisher._pending


def test_address_in_use_is_an_error_closed_one_free(opened: Open, tmp_path: Path) -> None:
    one = opened("tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"kv_events is tcp://127.0.0.1:\d+, which cannot be bound: Address already"):
        opened(one.endpoint)
    with pytest.raises(ConfigError, match="kv_events_replay is"):
        opened(replay=one.endpoint)
    one.close()
    one.close()
    again = opened(one.endpoint)
    assert again.endpoint == one.endpoint
    with pytest.raises(ConfigError, match="which cannot be bound"):
        opened("tcp://192.0.2.1:5557")  # an address of no interface here: vLLM would connect to it


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "expected an address such as tcp://"),
        ({"kv_events": "inproc://events"}, "expected an address such as tcp://"),
        ({"kv_events": "tcp://127.0.0.1"}, "expected an address such as tcp://"),
        ({"kv_events_replay": "ipc:///tmp/x"}, "kv_events is not set"),
        ({"kv_events": "ipc:///tmp/x", "kv_events_remote": True}, "there is no store"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Config.make(**settings)


def test_stores_are_announced_only_where_events_are(tmp_path: Path) -> None:
    config = Config.make(remote="valkey://localhost:6379", kv_events_remote=True)
    with pytest.raises(ConfigError, match="kv_events is not"):
        open_recorder(Rig(None).runtime, config, CHUNK)


def test_events_go_into_the_file_and_to_routers(opened: Open, tmp_path: Path) -> None:
    publisher = opened()
    taps, rig = Taps(publisher), Rig(publisher, path=tmp_path / "file")
    rig.store([1, 2, 3, 4])
    rig.recorder.pump()
    rig.recorder.close()
    assert len(taps.frames) == 2  # what was stored, and that all is cleared
    assert [json.loads(line)["kind"] for line in (tmp_path / "file").read_text().splitlines()] == [
        *("reset", "ordered", "stored")
    ]


def test_what_was_announced_longest_ago_is_withdrawn_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_ANNOUNCED", 2)
    cache = TieredCache([TierSpec(IN_HOST, 8, 4096)], CacheSettings(events=100, remote_events=True), remote=[REMOTE])
    for number in range(4):
        cache.store({0: GroupKeys([bytes([number]) * 32])}, {0: [number]})
        while ordered := [each for each in cache.take_commands() if isinstance(each, Transfer)]:
            cache.apply_results([TransferResult(each.job, (Status.OK,) * len(each.items)) for each in ordered], 0.0)
    told = [(each.kind.value, each.key[0]) for each in cache.events() if each.tier == REMOTE and each.key is not None]
    assert told == [("shared", 0), ("shared", 1), ("shared", 2), ("lapsed", 0), ("shared", 3), ("lapsed", 1)]


# ---------------------------------------------------------------------- against vLLM's own stream


def test_the_stream_of_a_real_engine_has_the_same_form(opened: Open) -> None:
    """`vllm_kv_events.json` was captured by `test_vllm_events.py`, which says how, from vLLM's own publisher."""
    golden = json.loads(GOLDEN.read_text())
    theirs, ours = Router(), Router()
    for frames in golden["frames"]:
        theirs.read([bytes.fromhex(frame) for frame in frames], golden["topic"].encode())
    assert theirs.blocks[HOST] and theirs.blocks[FILE] and theirs.blocks[store(REMOTE)]
    publisher = opened()
    taps, storm = Taps(publisher), Storm(3, 10_000, publisher)
    for _ in range(1500):
        storm.step()
    storm.settle()
    ours.batches = 1
    for frames in taps.frames:
        ours.read(frames)
    for kind in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        for locality in ("LOCAL", "REMOTE", None):
            forms = [
                {
                    tuple((name, type(value)) for name, value in each.items() if value is not None)
                    for each in router.events
                    if each["type"] == kind and each.get("locality") == locality and each.get("parent_block_hash", 1)
                }
                for router in (theirs, ours)
            ]
            if forms[0] and forms[1]:
                assert forms[0] == forms[1], kind
