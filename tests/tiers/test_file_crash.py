"""Crashes: every state that a simulated disk can be left in, at every point of a story, is opened and read.

After the end of a process: what was reported is listed, and what is listed is served. After a crash of the machine:
what is served is right. `crash_kit.Story.judge` compares every byte that is served with what was written.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from random import Random

import pytest
from crash_kit import APART, TWO_SIZES, Distinct, Judged, Shape, Story, WrongBytesError, after, one_size

from depth import NIGHTLY, deep
from longshore.boundary import Status
from longshore.testing.disk import Image, Moment
from longshore.tiers.file import FileTier
from longshore.tiers.file.index import RecordIndex
from longshore.tiers.file.record_verifier import RecordVerifier

ALL = NIGHTLY or os.environ.get("STATES") == "all"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Thousands of tiers are opened on damaged disks, and each says so."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def short_story(kind: type[FileTier] = FileTier) -> Story:
    """A record, a checkpoint, another record in its place."""
    story = Story(kind=kind)
    story.write(0, 1)
    story.checkpoint()
    story.write(0, 2)
    return story


def long_story() -> Story:
    """Two slots, overwritten before and after checkpoints, a reset, a close; journals change places twice."""
    story = Story()
    story.write(0, 1)
    story.write(1, 2)
    story.checkpoint()
    story.write(0, 3)
    story.reset()
    story.write(1, 4)
    story.checkpoint()
    story.write(0, 5)
    story.write(1, 1)
    return story


def pair_story(shape: Shape | None, how: Callable[[Story, dict[int, int]], None]) -> Story:
    """Two records, written `how`, twice."""
    story = Story(shape=shape)
    how(story, {0: 1, 1: 2})
    story.checkpoint()
    how(story, {0: 3, 1: 4})
    return story


def joint_story() -> Story:
    """Two records that lie one behind the other, written in one call."""
    return pair_story(None, Story.write_together)


def apart_story() -> Story:
    """Two records that lie apart, written at once through the queue."""
    return pair_story(APART, Story.write_together)


def side_by_side_story() -> Story:
    """Two records that are written by turns of their own, struck and in the disk together."""
    return pair_story(APART, Story.write_side_by_side)


def given_story() -> Story:
    """A slab changes its image size twice; records are dropped, and a checkpoint is made, in between."""
    story = Story(shape=TWO_SIZES)
    story.write(0, 1)
    story.write(1, 2)
    story.checkpoint()
    story.write(2, 3)
    story.write(2, 4)
    story.checkpoint()
    story.drop(2)
    story.write(1, 5)
    story.write(0, 2)
    story.drop(0)
    return story


def handed_over(first: int, then: int, *, safe: bool) -> Story:
    """A record in place `first`, a checkpoint, a record of another size over it; `safe`: the first is on the medium."""
    story = Story(shape=TWO_SIZES)
    story.write(first, 1)
    story.checkpoint()
    if safe:
        story.close()
        story = Story(story.disk.moments[-1].killed(), shape=TWO_SIZES)
    story.write(then, 2)
    return story


def finished(story: Story) -> list[Moment]:
    """The moments of a story, also those of its close."""
    story.close()
    return story.disk.moments


def most_important(moment: Moment, random: Random) -> list[Image]:
    """The states of each file by itself, and some of all of them by chance."""
    return [*moment.one_file_at_a_time(deep(12, 40)), *moment.sample(deep(4, 12), random)]


def all_of(moment: Moment, random: Random) -> Iterable[Image]:
    """Every state at night, and with STATES=all in the environment (`make crash`); else some: there are too many."""
    return moment.states(fixed=("lock",)) if ALL else most_important(moment, random)


@pytest.mark.parametrize("story", [short_story, long_story, joint_story, apart_story, side_by_side_story, given_story])
def test_kill_at_any_point_loses_no_reported_record(
    story: Callable[[], Story],
) -> None:
    told = story()
    moments = finished(told)
    for number, moment in enumerate(moments, 1):
        holds, generation = next(
            ((holds, generation) for count, holds, generation in reversed(told.reported) if count <= number), ({}, 0)
        )
        upcoming = next((holds for count, holds, _ in told.reported if count > number), holds)
        judged = after(moment.killed(), shape=told.shape)
        assert judged.listed <= judged.served, moment.call
        assert judged.generation >= generation
        if judged.generation == generation:
            kept = {pair for pair in holds.items() if pair in upcoming.items()}
            assert kept <= judged.listed, f"{moment.call}: {kept} was reported, {judged.listed} listed"
            assert judged.listed <= holds.items() | upcoming.items(), f"{moment.call}: {judged.listed} listed"


def test_every_crash_state_serves_no_wrong_byte() -> None:
    """Every one, at every point: torn records, torn notes, torn checkpoints, in all combinations."""
    story = short_story()
    distinct, random = Distinct(), Random(6)
    judged: list[Judged] = [after(image) for moment in story.disk.moments for image in distinct(all_of(moment, random))]
    story.close()
    assert len(judged) > (4000 if ALL else 200)
    served = [each.served for each in judged]
    assert sum(pairs == {(0, 1)} for pairs in served) > 10
    assert sum(pairs == {(0, 2)} for pairs in served) > 0
    assert set(itertools.chain(*served)) == {(0, 1), (0, 2)}
    assert {pair for each in judged for pair in each.listed} == {(0, 1), (0, 2)}


def test_records_of_one_call_tear_apart_and_none_is_wrong() -> None:
    before = finished(joint_story())[-1].killed()
    story = Story(before)
    story.write_together({0: 5, 1: 1})
    (write,) = [moment for moment in story.disk.moments if moment.call == "write segment"]
    served = [after(image).served for image in Distinct()(write.one_file_at_a_time(2**8))]
    story.close()
    assert {(0, 3), (1, 1)} in served
    assert {(0, 5), (1, 4)} in served
    assert set(itertools.chain(*served)) == {(0, 3), (1, 4), (0, 5), (1, 1)}


@pytest.mark.parametrize("write", [Story.write_together, Story.write_side_by_side])
def test_records_written_in_parallel_tear_independently_and_none_is_wrong(
    write: Callable[[Story, dict[int, int]], None],
) -> None:
    before = finished(apart_story())[-1].killed()
    story = Story(before, shape=APART)
    write(story, {0: 5, 1: 1})
    calls = [moment.call for moment in story.disk.moments]
    first = calls.index("write segment")
    assert calls[first : first + 2] == ["write segment"] * 2, "both were under way when the first one moved"
    writes = story.disk.moments[first : first + 2]
    served = [
        after(image, shape=APART).served for write in writes for image in Distinct()(write.one_file_at_a_time(2**8))
    ]
    story.close()
    assert {(0, 3), (1, 1)} in served
    assert {(0, 5), (1, 4)} in served
    assert set(itertools.chain(*served)) == {(0, 3), (1, 4), (0, 5), (1, 1)}


def test_crash_states_of_slab_change_before_checkpoint_are_correct() -> None:
    """Of the machine's crashes, too: nothing of the first record need be on the medium."""
    story = handed_over(0, 2, safe=False)
    distinct, random = Distinct(), Random(5)
    judged = [
        after(image, shape=TWO_SIZES) for moment in story.disk.moments for image in distinct(all_of(moment, random))
    ]
    story.close()
    assert len(judged) > (10_000 if ALL else 200)
    assert set().union(*(each.served for each in judged)) == {(0, 1), (2, 2)}


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (2, 0)])
def test_every_crash_state_of_a_slab_change_is_right(first: int, then: int) -> None:
    """Of the machine's crashes, too: a record of either size may be torn by one of the other."""
    story = handed_over(first, then, safe=True)
    distinct, random = Distinct(), Random(8)
    judged = [
        after(image, shape=TWO_SIZES) for moment in story.disk.moments for image in distinct(all_of(moment, random))
    ]
    story.close()
    assert len(judged) > (150 if ALL else 50)
    served = {each.served for each in judged}
    assert served - {frozenset()} == {frozenset({(first, 1)}), frozenset({(then, 2)})}
    assert {pair for each in judged for pair in each.listed} == {(first, 1), (then, 2)}


def test_without_checksums_some_of_these_states_serve_wrong_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordVerifier, "check_image", lambda self, header, computed: Status.OK)
    story = short_story()
    wrong = 0
    for image in Distinct()(story.disk.moments[-1].sample(deep(150, 400), Random(0))):
        try:
            after(image)
        except WrongBytesError:
            wrong += 1
    story.close()
    assert wrong > deep(3, 10)


def test_killed_process_without_invalidations_leaves_overwritten_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecordIndex, "invalidate", lambda self, places: None)
    story = short_story()
    listed_only = [judged for moment in finished(story) if (judged := after(moment.killed())).listed - judged.served]
    assert listed_only


def test_a_longer_story() -> None:
    story = long_story()
    random, distinct = Random(1), Distinct()
    served: set[tuple[int, int]] = set()
    for number, moment in list(enumerate(finished(story), 1))[:: deep(2, 1)]:
        reported = max((generation for count, _, generation in story.reported if count <= number), default=0)
        for image in distinct(most_important(moment, random)):
            judged = after(image)
            assert judged.generation >= reported, "a reset that was reported is durable"
            served |= judged.served
    assert len(distinct.seen) > deep(100, 400)
    assert served == {(0, 1), (1, 2), (0, 3), (1, 4), (0, 5), (1, 1)}


def test_a_longer_story_of_two_image_sizes() -> None:
    story = given_story()
    random, distinct = Random(4), Distinct()
    judged = [
        after(image, shape=TWO_SIZES)
        for moment in finished(story)[:: deep(2, 1)]
        for image in distinct(most_important(moment, random))
    ]
    assert len(judged) > deep(100, 400)
    assert set().union(*(each.served for each in judged)) == {(0, 1), (1, 2), (2, 3), (2, 4), (1, 5), (0, 2)}


def test_a_crash_while_opening_after_a_crash() -> None:
    random, distinct = Random(2), Distinct()
    first = long_story()
    served = 0
    for moment in finished(first)[-60 :: deep(12, 6)]:
        for image in moment.sample(3, random):
            second = Story(image)
            second.write(0, 3)
            for later in finished(second)[::2]:
                for again in distinct([later.killed(), *later.sample(2, random)]):
                    served += len(after(again).served)
    assert len(distinct.seen) > deep(50, 100)
    assert served > deep(30, 60)


def test_a_crash_while_the_image_size_changes() -> None:
    story = Story()
    story.write(0, 1)
    story.write(1, 2)
    story.close()
    larger = Story(story.disk.moments[-1].killed(), shape=one_size(2))
    larger.write(0, 3)
    random, distinct = Random(3), Distinct()
    served: set[tuple[int, tuple[int, int]]] = set()
    for moment in finished(larger):
        for image in distinct(most_important(moment, random)):
            for pages in (1, 2):
                served |= {(pages, pair) for pair in after(image, shape=one_size(pages)).served}
    assert served == {(1, (0, 1)), (1, (1, 2)), (2, (0, 3))}
