"""Bugs of order that others shipped, each a story told in every order, and again without what guards against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from order_kit import Tale, tale

from longshore.boundary import DEVICE, Status, Transfer, Urgency
from longshore.testing.simulated_device import PlannerRing, SimulatedCopy, SimulatedDevice, SimulatedStream
from longshore.testing.simulation import WrongError, explore
from longshore.transfer import D2H
from longshore.transfer.engine import TransferEngine
from longshore.transfer.ordering import Access, EngineState, Hazards, Lane, QueuePosition, TierPool
from longshore.transfer.pieces import Pieces

Patch = pytest.MonkeyPatch
Script = Callable[[Tale], None]


def goes_wrong(script: Script, how: str, **options: Any) -> None:
    """In some order, `how`."""
    with pytest.raises(WrongError, match=how):
        explore(tale(script, **options))


# Copies against compute


def store(told: Tale) -> None:
    told.writes(0)
    told.begin_step()
    told.offload([0], [0])


def load(told: Tale) -> None:
    told.reads(0)
    told.begin_step()
    told.onboard([0], [0])


def no_fence(patch: Patch) -> None:
    copy = SimulatedStream.copy
    patch.setattr(SimulatedStream, "copy", lambda self, batch, after: copy(self, batch, ()))


@pytest.mark.parametrize(("script", "how"), [(store, "RAW: copy"), (load, "WAR: copy")], ids=["store", "load"])
def test_a_copy_waits_for_the_compute_before_it(script: Script, how: str, monkeypatch: Patch) -> None:
    explore(tale(script))
    no_fence(monkeypatch)
    goes_wrong(script, how)


def two_streams_compute(told: Tale) -> None:
    other = told.world.queue("compute 2")
    told.writes(0)
    told.begin_step()
    told.writes(1, queue=other)
    told.begin_step(other)
    told.offload([0, 1], [0, 1])


def test_two_begin_steps_are_both_waited_for(monkeypatch: Patch) -> None:
    explore(tale(two_streams_compute))
    begin_step = TransferEngine.begin_step

    def only_the_last(self: TransferEngine, compute: object = None) -> None:
        begin_step(self, compute)
        self._step = self._step[-1:]

    monkeypatch.setattr(TransferEngine, "begin_step", only_the_last)
    goes_wrong(two_streams_compute, "RAW: copy")


def another_stream_computes(told: Tale) -> None:
    other = told.world.queue("compute 2")
    told.writes(0, queue=other)
    told.begin_step(other)
    told.offload([0], [0])


def test_the_event_is_on_the_stream_that_computes(monkeypatch: Patch) -> None:
    explore(tale(another_stream_computes))
    mark = SimulatedDevice.record_event
    monkeypatch.setattr(SimulatedDevice, "record_event", lambda self, compute: mark(self, None))
    goes_wrong(another_stream_computes, "RAW: copy")


def layers_for_another_stream(told: Tale) -> None:
    other = told.world.queue("compute 2")
    told.begin_step(other)
    job = told.onboard([0], [0], by_layer=True)
    assert told.wait_layer(job, 0) is Status.OK
    told.reads(0, layers=[0], queue=other)


def copies_between_steps_of_another_stream(told: Tale) -> None:
    other = told.world.queue("compute 2")
    told.begin_step()
    told.end_step(queue=other)
    told.writes(0, queue=other)
    told.offload([0], [0])


def a_step_begun_and_never_ended(told: Tale) -> None:
    told.end_step(queue=told.world.queue("compute 2"))
    told.begin_step()
    job = told.onboard([0], [0], by_layer=True)
    assert told.wait_layer(job, 0) is Status.OK
    told.reads(0, layers=[0])


@pytest.mark.parametrize(
    "script", [layers_for_another_stream, copies_between_steps_of_another_stream, a_step_begun_and_never_ended]
)
def test_stream_of_the_last_step_is_what_counts(script: Script) -> None:
    explore(tale(script))


# Compute against copies


def compute_reads_what_it_named(told: Tale) -> None:
    told.begin_step()
    told.end_step([told.onboard([0], [0])])
    told.reads(0)


def compute_reads_what_comes(told: Tale) -> None:
    told.begin_step()
    told.onboard([0], [0])
    told.end_step()
    told.reads(0)


def compute_writes_what_leaves(told: Tale) -> None:
    told.begin_step()
    told.offload([0], [0])
    told.end_step()
    told.writes(0)


def layer_by_layer(told: Tale) -> None:
    told.begin_step()
    job = told.onboard([0], [0], by_layer=True)
    for layer in range(2):
        assert told.wait_layer(job, layer) is Status.OK
        told.reads(0, layers=[layer])


@pytest.mark.parametrize(
    ("script", "how"),
    [
        (compute_reads_what_comes, "RAW: compute"),
        (compute_reads_what_it_named, "RAW: compute"),
        (compute_writes_what_leaves, "WAR: compute"),
        (layer_by_layer, "RAW: compute"),
    ],
)
def test_compute_waits_for_the_copies_before_it(script: Script, how: str, monkeypatch: Patch) -> None:
    explore(tale(script))
    monkeypatch.setattr(SimulatedDevice, "wait_event", lambda self, compute, event: None)
    goes_wrong(script, how)


def test_a_layer_is_waited_for_not_the_whole_job() -> None:
    """In some order compute reads layer 0 before layer 1 has been given to the device."""
    early: set[int] = set()

    def script(told: Tale) -> None:
        job = told.onboard([0, 1], [0, 1], by_layer=True)
        told.wait_layer(job, 0)
        told.reads(0, layers=[0])
        early.add(len(told.device.log))
        told.end_step()

    explore(tale(script, depth=1))
    assert early == {1, 2}


# Results


def block_is_used_when_its_result_has_come(told: Tale) -> None:
    job = told.onboard([0], [0])
    told.wait(job)
    told.reads(0)


def block_is_given_away_when_its_result_has_come(told: Tale) -> None:
    told.offload([0], [0])
    told.world.wait_for(lambda: bool(told.engine._state.results))
    told.poll()
    told.writes(0)


@pytest.mark.parametrize(
    ("script", "how"),
    [
        (block_is_used_when_its_result_has_come, "RAW: compute"),
        (block_is_given_away_when_its_result_has_come, "WAR: compute"),
    ],
)
def test_result_is_reported_at_copy_end_not_at_submission(script: Script, how: str, monkeypatch: Patch) -> None:
    explore(tale(script))
    monkeypatch.setattr(SimulatedCopy, "query", lambda self: True)
    monkeypatch.setattr(SimulatedCopy, "finish", lambda self: 0.0)
    goes_wrong(script, how)


def nothing_moves(told: Tale) -> None:
    told.engine.submit(Transfer(told._number(), D2H, ()))
    told.tickets[1] = told._hazards().newest or QueuePosition(0, 0, ())
    told.wait(1)


def test_a_transfer_of_nothing_ends() -> None:
    explore(tale(nothing_moves))


def a_layer_fails(told: Tale) -> None:
    def fault(batch: Any) -> None:
        if batch.parts[0].first_ref == 1:
            raise RuntimeError("the device fell off the bus")

    told.device.fault = fault
    job = told.onboard([0], [0], by_layer=True)
    told.forget(blocks=[0])
    assert told.wait_layer(job, 1) is Status.DEVICE_ERROR
    told.wait(job)
    assert told.wait_layer(job, 1) is Status.DEVICE_ERROR
    told.poll()
    assert told.results[job].statuses == (Status.DEVICE_ERROR,)


@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_failed_is_never_reported_as_done(monkeypatch: Patch) -> None:
    explore(tale(a_layer_fails))
    take_step = Lane._submit_slice

    def all_is_well(self: Lane, job: Any, stopped: Status | None) -> None:
        take_step(self, job, stopped)
        job.layers |= {0: None, 1: None}
        job.early_status = None

    monkeypatch.setattr(Lane, "_submit_slice", all_is_well)
    goes_wrong(a_layer_fails, "AssertionError")


def a_copy_fails_half_way(told: Tale) -> None:
    """Some of it was given to the device, and is still under way."""

    def fault(batch: Any) -> None:
        raise RuntimeError("the device fell off the bus")

    told.device.late_fault = fault
    job = told.offload([0], [0])
    told.forget(slots=[0])
    told.wait(job)
    told.writes(0)


@pytest.mark.filterwarnings("ignore")
def test_failed_job_ends_when_nothing_is_in_flight(monkeypatch: Patch) -> None:
    explore(tale(a_copy_fails_half_way))
    monkeypatch.setattr(SimulatedStream, "drain", lambda self: None)
    goes_wrong(a_copy_fails_half_way, "WAR: compute")


# Copies against copies


def two_readers_then_a_writer(told: Tale) -> None:
    told.offload([0], [0], urgency=Urgency.WRITE)
    told.inside(0, 1)
    told.onboard([0], [1], urgency=Urgency.PREFETCH)


def test_all_readers_are_waited_for(monkeypatch: Patch) -> None:
    explore(tale(two_readers_then_a_writer))
    add = Hazards.add

    def keep_the_last(self: Hazards, lane: int, accesses: Sequence[Access]) -> QueuePosition:
        ticket = add(self, lane, accesses)
        for pool, slots, is_written in accesses:
            if not is_written:
                others = [other for other in range(6) if other != lane]
                self._readers[pool][np.ix_(others, slots)] = 0
        return ticket

    monkeypatch.setattr(Hazards, "add", keep_the_last)
    goes_wrong(two_readers_then_a_writer, "WAR: copy")


def block_2_is_not_slot_2(told: Tale) -> None:
    told.offload([2], [1])
    told.onboard([1], [2])
    assert told._hazards().waits == 0


def test_a_slot_is_its_tier_too(monkeypatch: Patch) -> None:
    explore(tale(block_2_is_not_slot_2))
    add = Hazards.add

    def forget_the_tier(self: Hazards, lane: int, accesses: Sequence[Access]) -> QueuePosition:
        return add(self, lane, [access._replace(pool=TierPool(DEVICE, 0)) for access in accesses])

    monkeypatch.setattr(Hazards, "add", forget_the_tier)
    goes_wrong(block_2_is_not_slot_2, "AssertionError")


CONFLICTS: list[Script] = [
    lambda told: (told.offload([0], [0]), told.onboard([0], [1])),  # type: ignore[list-item]
    lambda told: (told.onboard([0], [0]), told.offload([0], [1])),  # type: ignore[list-item]
    lambda told: (told.onboard([0], [0]), told.offload([1], [0])),  # type: ignore[list-item]
    lambda told: (told.offload([0], [0]), told.onboard([1], [0])),  # type: ignore[list-item]
    lambda told: (told.onboard([0], [0]), told.inside(0, 1, tokens=1), told.offload([1], [1])),  # type: ignore[list-item]
    lambda told: (told.onboard([0], [0], urgency=Urgency.WRITE), told.onboard([0], [1])),  # type: ignore[list-item]
    lambda told: (told.offload([0], [0], urgency=Urgency.WRITE), told.offload([1], [0])),  # type: ignore[list-item]
]


@pytest.mark.parametrize("script", CONFLICTS)
def test_a_job_waits_for_what_it_conflicts_with(script: Script, monkeypatch: Patch) -> None:
    explore(tale(script))
    monkeypatch.setattr(EngineState, "may_begin", lambda self, job: True)
    goes_wrong(script, "RAW|WAR|WAW|is wrong at")


def two_copies_in_flight(told: Tale) -> None:
    told.offload([0], [0])
    told.offload([1], [1])


def test_descriptors_are_not_rewritten_while_a_copy_reads_them(monkeypatch: Patch) -> None:
    explore(tale(two_copies_in_flight))
    monkeypatch.setattr(PlannerRing, "take", lambda self: (0, self._planners[0]))
    goes_wrong(two_copies_in_flight, "WAR: descriptors|is wrong at")


def ids_that_differ_on_both_sides(told: Tale) -> None:
    told.onboard([3, 1], [0, 2])
    told.offload([0, 2], [3, 1])
    told.inside(1, 2)


def test_source_and_destination_are_not_exchanged(monkeypatch: Patch) -> None:
    explore(tale(ids_that_differ_on_both_sides))
    directed = Pieces.directed

    def exchanged(self: Pieces, written: str) -> Any:
        destination, source, size = directed(self, written)
        return (source, destination, size) if written == DEVICE else (destination, source, size)

    monkeypatch.setattr(Pieces, "directed", exchanged)
    goes_wrong(ids_that_differ_on_both_sides, "is wrong at|RAW|WAR|WAW")


# Threads and queues


def test_a_stream_is_bound_by_the_thread_that_uses_it(monkeypatch: Patch) -> None:
    def script(told: Tale) -> None:
        job = told.offload([0], [0])
        told.forget(slots=[0])
        told.wait(job)
        told.poll()
        assert told.results[job].statuses == (Status.OK,)

    explore(tale(script))
    start = Lane.__init__

    def bound_at_start(self: Lane, *arguments: Any) -> None:
        start(self, *arguments)
        self._stream.bind()
        self._bound = True

    monkeypatch.setattr(Lane, "__init__", bound_at_start)
    goes_wrong(script, "AssertionError")


def urgent_behind_large(told: Tale) -> None:
    """How much of a large job is copied between the urgent job's submission and its own copy."""
    told.offload([0, 1, 2], [0, 1, 2], urgency=Urgency.WRITE)
    told.offload([3], [3], urgency=Urgency.DEMAND)
    copies = next(queue for queue in told.world.queues if queue.name == "copies into host")
    ended = copies.ended
    told.end_step()
    given = [blocks for _, blocks in told.device.log]
    behind = sum(map(len, given[ended : given.index((3,))]))
    assert behind <= 1, f"{behind} blocks of the large job went first"


def test_a_large_job_does_not_keep_an_urgent_one_waiting() -> None:
    explore(tale(urgent_behind_large, max_batch_bytes=32, depth=1))
    goes_wrong(urgent_behind_large, "blocks of the large job went first")


def urgent_job_needs_a_queued_one(told: Tale) -> None:
    told.offload([0], [0], urgency=Urgency.WRITE)
    told.offload([1], [1], urgency=Urgency.WRITE)
    told.onboard([2], [1], urgency=Urgency.DEMAND)


def test_an_urgent_job_does_not_overtake_what_it_needs(monkeypatch: Patch) -> None:
    explore(tale(urgent_job_needs_a_queued_one))
    monkeypatch.setattr(EngineState, "may_begin", lambda self, job: True)
    goes_wrong(urgent_job_needs_a_queued_one, "RAW: copy|WAR: copy")


def cancelled_while_it_waits(told: Tale) -> None:
    told.offload([0], [0])
    told.cancel(told.onboard([0], [1]))
    told.onboard([0], [2])


def test_a_cancelled_job_keeps_its_place_in_line() -> None:
    explore(tale(cancelled_while_it_waits))


def closed_in_the_middle(told: Tale) -> None:
    told.offload([0, 1], [0, 1])
    told.forget(slots=[0, 1])
    job = told.onboard([0], [2], by_layer=True)
    told.forget(blocks=[0])
    told.engine.close()
    assert told.wait_layer(job, 1) in {Status.OK, Status.TIER_OFF}


def test_closing_in_the_middle_ends_every_job() -> None:
    explore(tale(closed_in_the_middle, max_batch_bytes=32))


def test_a_wait_for_a_layer_has_an_end() -> None:
    """It may end before the job does; and a job that is late ends too, begun or not."""
    seen: set[tuple[Status, Status]] = set()

    def script(told: Tale) -> None:
        job = told.onboard([0, 1], [0, 1], by_layer=True, deadline=1.0)
        told.forget(blocks=[0, 1])
        told.later(2.0)
        status = told.wait_layer(job, 1, timeout=1.0)
        told.wait(job)
        told.poll()
        seen.add((status, told.results[job].statuses[0]))

    explore(tale(script, max_batch_bytes=32))
    assert seen == {(Status.OK, Status.OK), (Status.DEADLINE, Status.DEADLINE)}
