"""Replay in virtual time: a model of the machine around the control plane that runs in production."""

from __future__ import annotations

import gc
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from longshore.boundary import Cancel, Items, Route, Status, Transfer, TransferResult
from longshore.cache import DropReason
from longshore.cache.eviction_policies import DEFAULT_POLICY, LRU
from longshore.errors import TraceError
from longshore.trace import TraceRequest, read_excerpt
from longshore.trace.machine import (
    MODELS,
    PROFILES,
    Profile,
    Timing,
    VirtualMovers,
    geometry_of,
    profile_named,
    with_bench,
    with_changes,
)
from longshore.trace.replay import TieredReplay
from longshore.trace.result import Replayed
from longshore.trace.tally import Loss
from traffic import synthesize

BLOCK = 512
TIMING = Timing(geometry_of("llama-3.1-8b"), PROFILES["h100"])
IMAGE = BLOCK * TIMING.geometry.kv_bytes_per_token


def ask(seconds: float, blocks: list[int], extra: int = 10) -> TraceRequest:
    """A prompt of whole `blocks`, and a few tokens behind them."""
    length = len(blocks) * BLOCK + extra
    return TraceRequest(1000 * seconds, length, 1, (*blocks, 10**9 + int(seconds)) if extra else tuple(blocks))


def serve(
    requests: list[TraceRequest], *, host: int = 64, file: int = 0, gated: bool = False, engines: int = 1
) -> TieredReplay:
    tiers = {"host": host * IMAGE} | ({"file": file * IMAGE} if file else {})
    replay = TieredReplay(TIMING, BLOCK, tiers, DEFAULT_POLICY, engines=engines, gated=gated)
    assert list(replay.run(requests)) == requests
    replay.replicas[0].cache.check_integrity()
    return replay


def test_returning_blocks_load_in_the_links_time() -> None:
    replay = serve([ask(0, [1, 2, 3, 4]), ask(10, [1, 2, 3, 4]), ask(20, [1, 2, 9])])
    assert replay.tally.hits == {"host": 4 + 2}
    assert replay.tally.block_refs == 11
    first, second, third = replay.tally.ttft
    assert first == pytest.approx(TIMING.prefill(0, 4 * BLOCK + 10))
    load = TIMING.profile.fixed + 4 * IMAGE / TIMING.profile.link
    assert second == pytest.approx(load + TIMING.prefill(4 * BLOCK, 10))
    assert third == pytest.approx(load - 2 * IMAGE / TIMING.profile.link + TIMING.prefill(2 * BLOCK, BLOCK + 10))
    assert list(replay.tally.recompute)[:2] == pytest.approx([first, first])


def test_fully_cached_prompt_still_computes_its_last_block() -> None:
    replay = serve([ask(0, [1, 2], extra=0), ask(10, [1, 2], extra=0)])
    assert replay.tally.hits == {"host": 1}


def test_engine_computes_one_prompt_and_two_compute_two() -> None:
    each = TIMING.prefill(0, 2 * BLOCK + 10)
    requests = [ask(0, [1, 2]), ask(0, [3, 4]), ask(0, [5, 6])]
    assert list(serve(requests).tally.ttft) == pytest.approx([each, 2 * each, 3 * each])
    assert list(serve(requests, engines=2).tally.ttft) == pytest.approx([each, each, 2 * each])
    assert list(serve(requests, engines=2).tally.recompute) == pytest.approx([each, each, 2 * each])


def test_file_serves_host_evictions_and_is_written_once() -> None:
    requests = [ask(10.0 * i, [100 * (i % 5) + j for j in range(4)]) for i in range(15)]
    replay = serve(requests, host=16, file=40)
    assert replay.tally.hits["file"] > 0
    assert sum(replay.tally.hits.values()) == 10 * 4
    written = replay.counters.routes["host->file"].bytes
    assert 0 < written <= 20 * IMAGE
    assert Replayed(replay, "x", 20, None).write_bytes_per_day("file") == pytest.approx(written * 86_400 / 140)


def test_a_slow_disk_is_left_alone_by_the_gate() -> None:
    slow = Timing(TIMING.geometry, with_changes(TIMING.profile, {"file_read": 0.2e9}, "for a test"))
    requests = [ask(20.0 * i, [100 * (i % 5) + j for j in range(8)]) for i in range(60)]
    tiers = {"host": 12 * IMAGE, "file": 100 * IMAGE}
    mean = {}
    for gated in (False, True):
        replay = TieredReplay(slow, BLOCK, tiers, LRU, gated=gated)
        assert len(list(replay.run(requests))) == 60
        mean[gated] = sum(replay.tally.ttft) / 60
        assert (replay.tally.computed_by_choice > 0) is gated
    without = sum(replay.tally.recompute) / 60
    assert mean[False] > 2 * without
    assert mean[True] < 1.3 * without  # the first load, of which nothing was known, is in it


def test_virtual_time_is_deterministic() -> None:
    def once() -> tuple[object, list[float]]:
        replay = serve(list(synthesize("mixed", requests=300, seed=3)), host=200, file=900, gated=True, engines=2)
        return Replayed(replay, "x", 0, None).as_json(), list(replay.tally.ttft)

    first = once()
    assert first == once()
    assert json.loads(json.dumps(first[0])) == first[0]


def test_excerpt_with_plenty_of_room_hits_everything_possible() -> None:
    requests = list(read_excerpt())
    seen: set[int] = set()
    possible = 0
    for request in requests:
        usable = request.hash_ids[: (request.input_length - 1) // BLOCK]
        possible += sum(block in seen for block in usable)
        seen.update(request.hash_ids[: request.input_length // BLOCK])
    spread = [TraceRequest(60_000.0 * i, r.input_length, r.output_length, r.hash_ids) for i, r in enumerate(requests)]
    replay = serve(spread, host=4 * len(seen))
    assert sum(replay.tally.hits.values()) == possible > 0
    assert replay.tally.requests == len(requests)


def test_memory_grows_with_the_blocks_and_not_with_the_requests() -> None:
    stream = (ask(float(i), [10 * (i % 40) + j for j in range(5)]) for i in range(3000))
    replay = TieredReplay(TIMING, BLOCK, {"host": 100 * IMAGE, "file": 150 * IMAGE}, LRU)
    for number, _ in enumerate(replay.run(stream)):
        if number == 1799:  # what remembers a bounded number of things is full, and made anew until the next look
            tracemalloc.start()
        elif number == 2399:
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used < 64 * 600 + 4096  # times and hits of 600 requests, 44 bytes each, and room to grow


@pytest.mark.parametrize("tiers", [{}, {"host": 1}, {"file": 10 * IMAGE}, {"host": 10 * IMAGE, "file": 1}])
def test_tiers_without_room_are_refused(tiers: dict[str, int]) -> None:
    with pytest.raises(TraceError):
        TieredReplay(TIMING, BLOCK, tiers, LRU)


def test_a_request_whose_ids_do_not_cover_it_is_refused() -> None:
    replay = TieredReplay(TIMING, BLOCK, {"host": 10 * IMAGE}, LRU)
    with pytest.raises(TraceError, match="expected 2 hash ids for 1024 tokens"):
        list(replay.run([TraceRequest(0.0, 1024, 1, (1,))]))


# -------------------------------------------------------------------- movers


def transfer(job: int, source: str, destination: str, **changes: object) -> Transfer:
    items = Items((bytes(32),) * 2, (None,) * 2, None, None)
    return Transfer(job=job, route=Route(source, destination), items=items, **changes)  # type: ignore[arg-type]


def test_route_serves_in_turn_and_routes_run_in_parallel() -> None:
    movers = VirtualMovers(TIMING, IMAGE)
    movers.submit([transfer(1, "file", "host"), transfer(2, "file", "host"), transfer(3, "host", "device")], 5.0)
    read, link = (TIMING.paces[Route(*r)].seconds(2 * IMAGE) for r in (("file", "host"), ("host", "device")))
    ends = []
    while (end := movers.next_end) is not None:
        _, result = movers.pop()
        assert isinstance(result, TransferResult)
        ends.append((result.job, end, result.queued_seconds))
    assert [job for job, _, _ in ends] == [3, 1, 2]
    assert [end for _, end, _ in ends] == pytest.approx([5 + link, 5 + read, 5 + 2 * read])
    assert [queued for _, _, queued in ends] == pytest.approx([0, 0, read])


def test_what_comes_after_another_job_begins_when_that_has_ended() -> None:
    movers = VirtualMovers(TIMING, IMAGE)
    movers.submit([transfer(1, "file", "host"), transfer(2, "host", "device", after=(1,))], 0.0)
    first, second = movers.pop()[1], movers.pop()[1]
    assert isinstance(first, TransferResult)
    assert isinstance(second, TransferResult)
    assert (first.job, second.job, second.statuses) == (1, 2, (Status.OK,) * 2)


def test_unstarted_cancelled_or_late_transfers_move_no_byte() -> None:
    movers = VirtualMovers(TIMING, IMAGE)
    jobs = [
        transfer(1, "file", "host"),
        transfer(2, "host", "device", after=(1,)),
        transfer(3, "file", "host", deadline=0.001),
    ]
    movers.submit([*jobs, Cancel(2)], 0.0)
    results = {}
    while movers.next_end is not None:
        _, result = movers.pop()
        assert isinstance(result, TransferResult)
        results[result.job] = (result.statuses[0], result.bytes)
    assert results == {1: (Status.OK, 2 * IMAGE), 2: (Status.CANCELLED, 0), 3: (Status.DEADLINE, 0)}


# -------------------------------------------------------------------- models and machines

LLAMA = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14_336, "vocab_size": 128_256, "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK = {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


def config(directory: Path, content: object) -> str:
    directory.joinpath("config.json").write_text(json.dumps(content))
    return str(directory)


def test_a_config_gives_what_the_table_says(tmp_path: Path) -> None:
    ours, table = geometry_of(config(tmp_path, LLAMA)), geometry_of("Llama-3.1-8B")
    assert ours.kv_bytes_per_token == table.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert ours.attention_width == table.attention_width
    assert ours.parameters == pytest.approx(table.parameters, rel=0.1)
    nested = geometry_of(config(tmp_path, {"text_config": {**LLAMA, "torch_dtype": "float32"}}))
    assert nested.kv_bytes_per_token == 2 * ours.kv_bytes_per_token
    latent = geometry_of(config(tmp_path, DEEPSEEK)).kv_bytes_per_token
    assert latent == geometry_of("deepseek-v3").kv_bytes_per_token == 61 * 576 * 2


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_table_has_a_geometry(name: str) -> None:
    geometry = geometry_of(name)
    assert min(geometry.kv_bytes_per_token, geometry.parameters, geometry.attention_width) > 0


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {**LLAMA, "num_hidden_layers": 0},
        {**LLAMA, "num_hidden_layers": True},
        {**LLAMA, "hidden_size": "4096"},
        {**LLAMA, "torch_dtype": "float3"},
        {**LLAMA, "num_key_value_heads": -8},
    ],
)
def test_a_config_that_is_none_is_refused(tmp_path: Path, content: object) -> None:
    with pytest.raises(TraceError, match=r"config\.json: expected"):
        geometry_of(config(tmp_path, content))


def test_unknown_names_are_refused_and_the_known_are_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"llama-3\.1-8b"):
        geometry_of("gpt-unknown")
    with pytest.raises(TraceError, match=r"h100, a100, got 'abacus'$"):
        profile_named("abacus")
    with pytest.raises(TraceError, match=r"did you mean h100\?"):
        profile_named("H-100")
    with pytest.raises(TraceError, match=r"did you mean llama-3\.1-70b\?"):
        geometry_of("llama3.1-70b")
    tmp_path.joinpath("config.json").write_text("{")
    with pytest.raises(TraceError, match="JSON object"):
        geometry_of(str(tmp_path))


FILES = [
    {"name": "read/256KiB", "value": 1.5, "unit": "GB/s"},
    {"name": "read/2MiB", "value": 2.5, "unit": "GB/s"},
    {"name": "write/2MiB", "value": 3.5, "unit": "GB/s"},
    {"name": "cpu/2MiB", "value": 9, "unit": "core-s/GB"},
]


def test_benchmarks_give_speeds_of_files_link_and_prefill(tmp_path: Path) -> None:
    usual, path = PROFILES["h100"], tmp_path / "bench.json"

    def found(report: object) -> Profile:
        path.write_text(json.dumps(report))
        return with_bench(usual, path)

    files = found({"machine": {}, "cases": FILES})
    assert (files.file_read, files.file_write, files.link) == (2.5e9, 3.5e9, usual.link)
    assert "file_read, file_write by bench.json" in files.source
    copies = [{"name": f"{way}/2MiB", "value": 11.0, "unit": "GB/s"} for way in ("offload", "onboard")]
    assert found({"cases": copies}) == with_changes(usual, {"link": 11e9}, "by bench.json")
    prefill = [{"name": f"prefill/{n}", "value": rate, "unit": "TFLOPS"} for n, rate in ((512, 90.0), (8192, 300.0))]
    assert found({"cases": prefill}).flops == 300e12
    chosen = [
        {"direction": "onboard", "page_bytes": 4096, "bytes": 1 << 25, "way": "staged", "gb_per_s": 44.0},
        {"direction": "onboard", "page_bytes": 1 << 21, "bytes": 1 << 25, "way": "direct", "gb_per_s": 52.0},
        {"direction": "offload", "page_bytes": 1 << 21, "bytes": 1 << 25, "way": "direct", "gb_per_s": 60.0},
    ]
    assert found({"chosen": chosen}).link == 52e9


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"cases": []}', '{"chosen": []}', '{"cases": [{"name": 3}]}', '{"cases": [{"name": "read/2MiB"}]}',
        '{"cases": [{"name": "read/2MiB", "value": "fast", "unit": "GB/s"}]}',
        '{"cases": [{"name": "read/2MiB", "value": 2, "unit": "miles"}]}',
    ],
)  # fmt: skip
def test_what_is_no_benchmark_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"bench\.json"):
        with_bench(PROFILES["h100"], path)


def test_a_speed_of_nothing_is_refused() -> None:
    with pytest.raises(TraceError, match="link: expected a positive number, got 0"):
        with_changes(PROFILES["h100"], {"link": 0.0}, "as given")


@pytest.mark.parametrize("gated", [True, False])
def test_every_request_is_computed_where_host_memory_refuses_loads(gated: bool) -> None:
    prompts = list(read_excerpt())
    requests = [replace(prompt, timestamp_ms=at) for at in (0.0, 1.0) for prompt in prompts]
    replay = serve(requests, host=32, file=15_000, gated=gated)
    assert min(replay.tally.ttft) > 0


def test_each_block_that_was_not_loaded_has_one_cause() -> None:
    requests = list(synthesize("mixed", requests=400, seed=3))
    for host, file, gated in ((60, 0, True), (60, 300, True), (60, 300, False)):
        replay = serve(requests, host=host, file=file, gated=gated, engines=4)
        losses = replay.losses
        assert sum(losses.values()) + sum(replay.tally.hits.values()) == replay.tally.block_refs
        assert losses[Loss.CHOICE] == replay.tally.computed_by_choice
        first_used = len({block for r in requests for block in r.hash_ids[: r.input_length // BLOCK]})
        assert losses[Loss.FIRST_USE] == first_used
        assert losses[Loss.EVICTED] > 0
        assert (losses[Loss.FORGOTTEN] > 0) <= (file > 0)
        found = Replayed(replay, "x", 0, None)
        assert found.as_json()["losses"] == {cause.value: count for cause, count in losses.items()}
        assert sum(f"{losses[Loss.EVICTED]:,} evicted" in note for _, _, note in found.rows()) == 1
        assert ("file->host" in found.bytes_per_hit) is (file > 0)


def test_block_is_lost_for_its_latest_cause() -> None:
    """Sixteen blocks in a host tier of eight: the tail is not stored; what is forgotten had no copy."""
    replay = serve([ask(0, list(range(16))), ask(20, list(range(16)))], host=8)
    assert (replay.losses[Loss.NOT_STORED], replay.losses[Loss.FIRST_USE]) == (8, 16)
    replay = serve([ask(0, [1, 2, 3]), ask(0, [1, 2, 3])], engines=2)
    assert replay.losses[Loss.PENDING] == 3
    replay = serve([ask(0, [1, 2], extra=0), ask(10, [1, 2], extra=0)])
    assert replay.losses[Loss.LAST_TOKEN] == 1


def test_bursts_that_lacked_room_find_it_later() -> None:
    """Each minute 42 new blocks at once, in host memory of 64, a quarter of which is kept clean at first."""
    requests = [
        ask(60.0 * burst, list(range(1000 * burst + 20 * each, 1000 * burst + 20 * each + 14)))
        for burst in range(12)
        for each in range(3)
    ]
    replay = serve(requests, host=64, file=600, engines=3)
    dropped = replay.counters.drops["host"][DropReason.BACKPRESSURE]
    assert replay.counters.routes["device->host"].chunks == 12 * 42 - dropped
    assert dropped < 2 * 42
