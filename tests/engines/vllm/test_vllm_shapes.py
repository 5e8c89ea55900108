"""Groups of every shape through vLLM's abstract interface: images, windows, states, chunks, replicated ranks."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult
from vllm_kit import BLOCKS, Group, Rig, keys_of

from longshore.engines.vllm.rendezvous import memory_info_path
from longshore.errors import SelfTestError
from longshore.runtime.selftest import copy_test
from longshore.transfer.device.base import copy_pieces

HIT, MISS = LookupResult.HIT, LookupResult.MISS
PAGE = 5000
"""Of one layer: an image of one takes two pages of memory, one of both layers three."""


def test_images_of_each_group_have_its_size(rigs: Any) -> None:
    """A draft model's layers are fewer than those of the model it drafts for."""
    rig = rigs(groups=(Group(0, layers=2), Group(3, layers=1)), page=PAGE, host_size=20 * 4096)
    before = [rig.bytes_of(0, block) for block in range(BLOCKS)]
    for number, blocks in ((0, [1, 2]), (3, [3, 4, 5])):
        keys = keys_of(len(blocks), number)
        assert rig.store(keys, blocks, rig.request(f"of {number}", keys)) == keys
    (host,) = rig.cache.stats()
    assert [(each.image_bytes, each.used) for each in host.sizes] == [(8192, 3), (12288, 2)]
    for number, layers, blocks, others in ((0, 2, [1, 2], [8, 9]), (3, 1, [3, 4, 5], [11, 12, 13])):
        keys = keys_of(len(blocks), number)
        reader = rig.request(f"again {number}", keys)
        assert rig.lookup(keys, reader) == [HIT] * len(keys)
        rig.load(keys, others, reader)
        for block, other in zip(blocks, others, strict=True):
            assert all(map(torch.equal, rig.bytes_of(0, other)[:layers], before[block][:layers]))
            assert all(map(torch.equal, rig.bytes_of(0, other)[layers:], before[other][layers:]))
    rig.cache.check_integrity()


def test_groups_of_different_block_sizes_share_one_job(rigs: Any) -> None:
    rig = rigs(groups=(Group(0, tokens=64), Group(1, tokens=16, layers=1)), page=PAGE, per_chunk=2)
    coarse, fine = keys_of(1, 0), keys_of(4, 1)
    context = rig.request("one", [*coarse, *fine])
    before = [rig.bytes_of(0, block) for block in range(BLOCKS)]
    output = rig.manager.prepare_store([*coarse, *fine], context)
    assert output.keys_to_store == [*coarse, *fine]
    rig.run("submit_store", GPULoadStoreSpec(list(range(1, 11)), [2, 8], [0, 0]), output.store_spec)
    rig.manager.complete_store({*coarse, *fine}, context)
    reader = rig.request("two", [*coarse, *fine])
    assert rig.lookup([*coarse, *fine], reader) == [HIT] * 5
    spec = rig.manager.prepare_load([*coarse, *fine[1:]], reader)
    # The device has the first three blocks of the second group: vLLM loads from the middle of a chunk on.
    rig.run("submit_load", spec, GPULoadStoreSpec([11, 12, 13, 14, 15, 0, 1], [2, 5], [0, 3]))
    assert all(map(torch.equal, rig.bytes_of(0, 11) + rig.bytes_of(0, 12), before[1] + before[2]))
    for at, block in enumerate((13, 14, 15, 0, 1)):
        assert torch.equal(rig.bytes_of(0, block)[0], before[6 + at][0])


def test_what_a_window_has_slid_past_goes_first(rigs: Any) -> None:
    """Two chunks in a window, offered as prefill goes on; then something else wants the room."""
    rig = rigs(eviction="lru", groups=(Group(0), Group(1, window=2 * 16)), host_size=12 * 4096)
    whole, sliding = keys_of(5, 0), keys_of(5, 1)
    context = rig.request("long", [*whole, *sliding])
    assert rig.store(whole, [1, 2, 3, 4, 5], context) == whole
    for step in (slice(0, 3), slice(3, 4), slice(4, 5)):
        assert rig.store(sliding[step], [6, 7, 8][: len(sliding[step])], context) == sliding[step]
    other = keys_of(5, 0, "other")
    assert rig.store(other, range(1, 6), rig.request("other", other)) == other
    back = rig.request("back", [*whole, *sliding])
    assert rig.lookup([*whole, *sliding], back) == [HIT] * 5 + [MISS] * 3 + [HIT] * 2


def test_a_window_that_another_request_was_served_from_stays(rigs: Any) -> None:
    rig = rigs(eviction="lru", groups=(Group(1, window=16),), host_size=5 * 4096)
    keys = keys_of(4, 1)
    writer = rig.request("writer", keys)
    rig.store(keys[:2], [1, 2], writer)
    reader = rig.request("reader", keys)
    assert rig.lookup(keys[1:2], reader) == [HIT]
    rig.load(keys[1:2], [9], reader)
    rig.store(keys[2:], [3, 4], writer)
    other = keys_of(3, 1, "other")
    rig.store(other, [5, 6, 7], rig.request("other", other))
    assert rig.lookup(keys, rig.request("back", keys)) == [MISS, HIT, MISS, HIT]


def test_of_states_the_last_is_the_last_to_go(rigs: Any) -> None:
    """As in Mamba layers: vLLM offers one state after the other."""
    rig = rigs(eviction="lru", groups=(Group(0, is_state=True),), host_size=4 * 4096)
    keys = keys_of(3)
    context = rig.request("one", keys)
    for at, key in enumerate(keys):
        rig.store([key], [at + 1], context)
    other = keys_of(1, name="other")
    rig.store(other + keys_of(2, name="more"), [5, 6, 7], rig.request("other", other + keys_of(2, name="more")))
    assert rig.lookup(keys, rig.request("back", keys)) == [MISS, MISS, HIT]


def test_store_that_begins_inside_a_chunk_skips_that_chunk(rigs: Any) -> None:
    rig = rigs(groups=(Group(0), Group(1, window=100)), per_chunk=2)
    whole, sliding = keys_of(2, 0), keys_of(2, 1)
    context = rig.request("one", [*whole, *sliding])
    before = [rig.bytes_of(0, block) for block in (7, 8)]
    output = rig.manager.prepare_store([*whole, *sliding], context)
    rig.run("submit_store", GPULoadStoreSpec([1, 2, 3, 4, 6, 7, 8], [4, 3], [0, 1]), output.store_spec)
    rig.manager.complete_store({*whole, *sliding}, context)
    reader = rig.request("two", [*whole, *sliding])
    assert rig.lookup([*whole, *sliding], reader) == [HIT, HIT, MISS, HIT]
    assert rig.cache.counters.drops["host"].total() == 1
    rig.load(sliding[1:], [9, 10], reader)
    for block, bytes_before in zip((9, 10), before, strict=True):
        assert all(map(torch.equal, rig.bytes_of(0, block), bytes_before))


def test_the_last_block_of_a_chunk_is_a_state(rigs: Any) -> None:
    """vLLM offers one state at a time, and has no other block of the chunk: not even where a window would."""
    rig = rigs(groups=(Group(0), Group(1, is_state=True), Group(2, window=100)), per_chunk=2)
    states, sliding = keys_of(2, 1), keys_of(1, 2)
    context = rig.request("one", [*states, *sliding])
    before = rig.bytes_of(0, 5)
    for key, sizes, index in ((states[1], [0, 1, 0], 3), (sliding[0], [0, 0, 1], 1)):
        output = rig.manager.prepare_store([key], context)
        indices = [index if size else 0 for size in sizes]
        rig.run("submit_store", GPULoadStoreSpec([5], sizes, indices), output.store_spec)
        rig.manager.complete_store({key}, context)
    reader = rig.request("two", [*states, *sliding])
    assert rig.lookup([*states, *sliding], reader) == [MISS, HIT, MISS]
    spec = rig.manager.prepare_load(states[1:], reader)
    rig.run("submit_load", spec, GPULoadStoreSpec([9], [0, 1, 0], [0, 3, 0]))
    rig.manager.complete_load(set(states[1:]), reader)
    assert all(map(torch.equal, rig.bytes_of(0, 9), before))


def test_a_freed_block_costs_the_chunks_of_its_group_alone(rigs: Any) -> None:
    rig = rigs(groups=(Group(0), Group(1, window=100)), per_chunk=2)
    whole, sliding = keys_of(2, 0), keys_of(2, 1)
    context = rig.request("one", [*whole, *sliding])
    output = rig.manager.prepare_store([*whole, *sliding], context)
    rig.run("submit_store", GPULoadStoreSpec([1, 2, 3, 4, 6, 7, 8], [4, 3], [0, 0]), output.store_spec)
    rig.manager.complete_store({*whole, *sliding}, context)
    assert rig.lookup([*whole, *sliding], rig.request("two", [*whole, *sliding])) == [HIT, HIT, MISS, MISS]
    assert rig.cache.counters.drops["host"].total() == 2


def test_blocks_that_all_ranks_hold_are_stored_once(rigs: Any) -> None:
    """Multi-head latent attention under tensor parallelism."""
    rig, keys = rigs(world=2, replicated=True, page=PAGE), keys_of(2)
    context = rig.request("one", keys)
    before = rig.bytes_of(0, 1) + rig.bytes_of(0, 2)
    for tensor in rig.tensors[1]:
        tensor.zero_()  # which would be seen, if this rank wrote as well
    assert rig.store(keys, [1, 2], context) == keys
    (host,) = rig.cache.stats()
    assert host.used_bytes == 2 * 12288, "one part for both ranks"
    reader = rig.request("two", keys)
    assert rig.lookup(keys, reader) == [HIT, HIT]
    rig.load(keys, [8, 9], reader)
    for rank in (0, 1):
        assert all(map(torch.equal, rig.bytes_of(rank, 8) + rig.bytes_of(rank, 9), before))


def test_parts_of_ranks_lie_side_by_side_in_one_image(rigs: Any) -> None:
    rig, keys = rigs(world=2, page=PAGE), keys_of(1)
    output = rig.manager.prepare_store(keys, rig.request("one", keys))
    rig.copy_in(output.store_spec, [3])
    ((_, pool, (slot,)),) = output.store_spec.group_slots
    slabs = rig.manager._tiers.arena.array
    image = slabs[slot * 2 * 12288 : (slot + 1) * 2 * 12288]
    for rank in (0, 1):
        part = image[rank * 12288 :][: 2 * (PAGE - 8)]
        assert part.tobytes() == b"".join(bytes(page.numpy()) for page in rig.bytes_of(rank, 3))
    assert pool == 0


@pytest.mark.parametrize("size", [1, 2, 4])
def test_block_size_of_the_extra_configuration_is_vllms_own(rigs: Any, size: int) -> None:
    rig, keys = rigs(per_chunk=size, block_size=16 * size), keys_of(2)
    assert rig.store(keys, range(1, 1 + 2 * size), rig.request("one", keys)) == keys
    assert rig.cache.settings.blocks_per_chunk == size


@pytest.mark.parametrize("world", [1, 2])
def test_copies_that_go_wrong_are_found_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, world: int) -> None:
    """Before anybody is told of the memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where other engines leave no notes

    def careless(source: Any, destination: Any, size: Any) -> None:
        copy_pieces(source, destination, size)
        ctypes.c_uint8.from_address(int(destination[0])).value += 1

    monkeypatch.setattr("longshore.transfer.device.base.copy_pieces", careless)
    with pytest.raises(SelfTestError, match="1 of 192 bytes of the test block were wrong when read back"):
        Rig(world=world, groups=(Group(layers=1),), page=200)
    assert list(memory_info_path("any").parent.iterdir()) == []


def test_ranks_without_a_part_are_tested_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[int] = []

    def note(engine: Any, device: Any, section: Any, slot: Any) -> None:
        copy_test(engine, device, section, slot)
        tested.append(slot.index)

    monkeypatch.setattr("longshore.engines.vllm.spec.copy_test", note)
    rig = Rig(world=2, replicated=True, per_chunk=2)
    rig.close()
    assert tested == [0, 1]
