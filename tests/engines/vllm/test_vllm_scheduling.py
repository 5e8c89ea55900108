"""vLLM's own scheduler part over our manager and worker: groups of any kind, real bytes, no model.

Each block's bytes are made up of its group, its place and its prompt, so that whatever is loaded can be checked.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from plain_spec import PlainSpec
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm_kit import TOKENS, Group, Rig, vllm_config

PAGE = 5000


class Scheduling:
    """One request at a time, whose blocks the device forgets at once."""

    def __init__(self, rig: Rig, drafts: tuple[int, ...] = (), *, plain: bool = False, retention: int = 0) -> None:
        """Over the manager and worker of `rig`; or over plain ones, which say what vLLM makes of such groups.

        `retention` is vLLM's `prefix_cache_retention_interval`, 0 by default as there.
        """
        self.rig = rig
        groups = rig.groups
        spec: Any = PlainSpec(rig.specs[0].config) if plain else rig.specs[0]
        self.worker: Any = spec.get_worker(rig.caches[0]) if plain else rig.workers[0]
        if not plain:
            spec.get_manager = lambda: rig.manager
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(TOKENS, sha256)
        config = KVCacheConfig(
            num_blocks=len(rig.tensors[0][0]),
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec(
                    list(group.names), group.get_kv_cache_spec(None), is_eagle_group=group.number in drafts
                )
                for group in groups
            ],
        )
        self.scheduler = OffloadingConnectorScheduler(
            spec, vllm_config(groups, {"vllm": {"cache_config.prefix_cache_retention_interval": retention}}), config
        )
        self.free = itertools.count(1)
        self.checked = 0

    def ask(self, name: str, tokens: list[int]) -> int:
        """Serve a prompt; says how many of its tokens came from the tiers. What came is checked."""
        request = Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        self.scheduler.on_new_request(request)
        hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert hit is not None
        blocks = [self._allocate(group, len(tokens), hit) for group in self.rig.groups]
        if hit:
            self.scheduler.update_state_after_alloc(request, KVCacheBlocks(tuple(blocks)), hit)
            self._run(self._meta())
            self._check(tokens, blocks, hit)
        self._compute(tokens, blocks, hit)
        new = SimpleNamespace(req_id=name, block_ids=tuple([block.block_id for block in mine] for mine in blocks))
        request.num_computed_tokens = hit
        self._run(self._meta(new=[new], scheduled={name: len(tokens) - hit}))
        request.num_computed_tokens = len(tokens)
        request.status = RequestStatus.FINISHED_STOPPED
        self.scheduler.request_finished(request)
        self._run(self._meta(finished={name}))
        return int(hit)

    def converse(self, name: str, inputs: list[list[int]]) -> None:
        """Serve a session of streaming input: each time vLLM schedules it as a new request, with all of its blocks."""
        request = Request(name, [], SamplingParams(max_tokens=1), None, block_hasher=self.hasher, resumable=True)
        self.scheduler.on_new_request(request)
        tokens: list[int] = []
        blocks: list[list[KVCacheBlock]] = [[] for _ in self.rig.groups]
        for each in inputs:
            before, tokens = len(tokens), tokens + each
            request.prompt_token_ids.extend(each)
            request._all_token_ids.extend(each)
            request.num_prompt_tokens = len(tokens)
            request.update_block_hashes()
            if not before:
                assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
            for group, mine in zip(self.rig.groups, blocks, strict=True):
                mine += [KVCacheBlock(next(self.free)) for _ in range(len(mine), -(-len(tokens) // group.tokens))]
            self._compute(tokens, blocks, before)
            new = SimpleNamespace(req_id=name, block_ids=tuple([block.block_id for block in mine] for mine in blocks))
            self._run(self._meta(new=[new], scheduled={name: len(each)}))
            request.num_computed_tokens = len(tokens)
        request.status = RequestStatus.FINISHED_STOPPED
        self.scheduler.request_finished(request)
        self._run(self._meta(finished={name}))

    def _allocate(self, group: Group, tokens: int, hit: int) -> list[KVCacheBlock]:
        """Fresh blocks, but for those that a window has slid past already."""
        first = 0 if group.window is None else max(0, hit - group.window + 1) // group.tokens
        count = -(-tokens // group.tokens)
        blocks = [KVCacheBlock(0 if at < first else next(self.free)) for at in range(count)]
        for block in blocks[:first]:
            block.is_null = True
        return blocks

    def _compute(self, tokens: list[int], blocks: list[list[KVCacheBlock]], hit: int) -> None:
        for group, at, block in self._each(blocks):
            if (at + 1) * group.tokens > hit:
                for layer, tensor in enumerate(self.rig.tensors[0][: group.layers]):
                    tensor[block, : PAGE - 8] = content(tokens, group, at, layer)

    def _check(self, tokens: list[int], blocks: list[list[KVCacheBlock]], hit: int) -> None:
        for group, at, block in self._each(blocks):
            if (at + 1) * group.tokens <= hit:
                for layer, tensor in enumerate(self.rig.tensors[0][: group.layers]):
                    assert torch.equal(tensor[block, : PAGE - 8], content(tokens, group, at, layer))
                    self.checked += 1

    def _each(self, blocks: list[list[KVCacheBlock]]) -> list[tuple[Group, int, int]]:
        return [
            (group, at, block.block_id)
            for group, mine in zip(self.rig.groups, blocks, strict=True)
            for at, block in enumerate(mine)
            if not block.is_null
        ]

    def load_after_preemption(self, name: str, tokens: list[int]) -> Any:
        """What the workers are told where a reset has preempted a request, which the same step has load its blocks."""
        request = Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=self.hasher)
        self.scheduler.on_new_request(request)
        hit, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        blocks = tuple(self._allocate(group, len(tokens), hit) for group in self.rig.groups)
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks(blocks), hit)
        return self._meta(preempted={name})

    def _meta(self, new: Any = (), scheduled: Any = None, finished: Any = (), preempted: Any = None) -> Any:
        """What the workers are told at the end of a step."""
        return self.scheduler.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], resumed_req_ids=set()),
                num_scheduled_tokens=scheduled or {},
                finished_req_ids=finished,
                preempted_req_ids=preempted,
                kv_cache_block_copies=None,
                kv_connector_block_state=None,
            )
        )

    def _run(self, meta: Any) -> None:
        for job, each in meta.store_jobs.items():
            self.worker.submit_store(job, each.src_spec, each.dst_spec)
        for job, each in meta.load_jobs.items():
            self.worker.submit_load(job, each.src_spec, each.dst_spec)
        jobs = {*meta.store_jobs, *meta.load_jobs}
        self.worker.wait(jobs)
        done = {result.job_id: 1 for result in self.worker.get_finished()}
        assert set(done) == jobs
        said = OffloadingWorkerMetadata(completed_jobs=done)
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))


def content(tokens: list[int], group: Group, at: int, layer: int) -> torch.Tensor:
    """What a layer has of a block: all tokens up to its end decide it."""
    seed = [group.number, layer, *tokens[: (at + 1) * group.tokens]]
    numbers = np.random.default_rng(seed).integers(-128, 127, PAGE - 8, dtype=np.int8)
    return torch.from_numpy(numbers)


FULL = Group(0)
COARSE = Group(0, tokens=64)
WINDOW = Group(1, window=40)
DRAFT = Group(2, layers=1)


PROMPT = list(range(5, 218))
PROMPTS = [PROMPT, [*PROMPT, *[7] * 40], [*PROMPT[:100], *[9] * 60]]
"""The second goes on where the first ends, the third begins alike. Lengths are no multiples of a block."""


@pytest.mark.parametrize(
    ("groups", "drafts", "per_chunk"),
    [
        pytest.param([FULL], (), 1, id="full attention"),
        pytest.param([FULL], (), 4, id="four blocks in a chunk"),
        pytest.param([FULL, WINDOW], (), 1, id="a window"),
        pytest.param([FULL, WINDOW], (), 2, id="a window, two blocks in a chunk"),
        pytest.param([FULL, Group(1, layers=1)], (1,), 1, id="a draft group"),
        pytest.param([FULL, Group(1, layers=1)], (1,), 2, id="a draft group, two blocks in a chunk"),
        pytest.param([COARSE, WINDOW], (), 1, id="blocks of two sizes"),
        pytest.param([COARSE, WINDOW, DRAFT], (2,), 1, id="all of them"),
    ],
)
def test_what_is_loaded_is_what_was_computed(
    rigs: Any, groups: list[Group], drafts: tuple[int, ...], per_chunk: int
) -> None:
    rig = rigs(groups=groups, per_chunk=per_chunk, page=PAGE, blocks=200, host_size="4MiB")
    plain, ours = Scheduling(rig, drafts, plain=True), Scheduling(rig, drafts)
    hits = [plain.ask(f"plain {at}", tokens) for at, tokens in enumerate(PROMPTS)]
    assert hits[0] == 0 < hits[1]
    assert [ours.ask(f"ours {at}", tokens) for at, tokens in enumerate(PROMPTS)] == hits
    assert ours.checked == plain.checked > 0
    assert rig.cache.leases == rig.cache.protected == 0
    assert rig.cache.jobs_in_flight == 0
    rig.cache.check_integrity()


@pytest.mark.parametrize("groups", [[FULL], [FULL, WINDOW]])
def test_blocks_of_a_session_are_its_own(rigs: Any, groups: list[Group]) -> None:
    """vLLM 0.32 appends the table of a request that is scheduled as a new one again, and takes blocks of before."""
    each = Scheduling(rigs(groups=groups, page=PAGE, blocks=200, host_size="4MiB"))
    each.converse("session", [PROMPT[:96], PROMPT[96:150], PROMPT[150:]])
    assert each.ask("reader", PROMPTS[1]) == 208
    assert each.checked > 0


def test_a_request_that_a_reset_preempted_may_load_at_once(rigs: Any) -> None:
    """vLLM 0.32 asserts that whoever was preempted has stores alone, and the engine stops."""
    each = Scheduling(rigs(page=PAGE, blocks=200, host_size="4MiB"))
    each.ask("writer", PROMPT)
    told = each.load_after_preemption("reader", PROMPT)
    assert len(told.load_jobs) == 1
    assert not told.jobs_to_flush


@pytest.mark.parametrize("per_chunk", [1, 2])
@pytest.mark.parametrize(("retention", "is_found"), [(0, False), (32, True)])
def test_window_with_draft_group_hits_only_with_retention_interval(
    rigs: Any, per_chunk: int, retention: int, is_found: bool
) -> None:
    """By default vLLM stores only the window before a prompt's end, and a draft group gives up the chunk there."""
    rig = rigs(groups=[FULL, WINDOW, DRAFT], per_chunk=per_chunk, page=PAGE, blocks=200, host_size="4MiB")
    sides = [Scheduling(rig, (DRAFT.number,), plain=plain, retention=retention) for plain in (True, False)]
    plain, ours = ([each.ask(f"{at} of {each}", tokens) for at, tokens in enumerate(PROMPTS)] for each in sides)
    assert ours == plain
    assert [hit > 0 for hit in plain] == [False, is_found, is_found]


def test_a_bit_that_flips_is_seen(rigs: Any) -> None:
    """The control: what is checked above must fail where bytes are wrong."""
    rig = rigs(page=PAGE, blocks=200, host_size="4MiB")
    each = Scheduling(rig)
    each.ask("first", list(range(5, 105)))
    rig.manager._tiers.arena.array[::4096] ^= 1
    with pytest.raises(AssertionError):
        each.ask("second", list(range(5, 105)))
