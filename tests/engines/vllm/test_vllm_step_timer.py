"""What the scheduler's side learns of how long steps take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from longshore.engines.vllm.connector import StepTimer, tokens_of


class Seen(list[tuple[int, int, float]]):
    """What was told."""

    def __init__(self) -> None:
        self.steps = StepTimer(lambda *told: self.append(told), least=16)


def test_a_step_takes_from_its_plan_to_its_end() -> None:
    seen = Seen()
    seen.steps.planned([(64, 32)], 10.0)
    seen.steps.ended(10.5)
    assert seen == [(32, 64, 0.5)]


def test_step_planned_early_begins_when_the_previous_one_ends() -> None:
    seen = Seen()
    seen.steps.planned([(64, 0)], 10.0)
    seen.steps.planned([(32, 64)], 10.1)
    seen.steps.ended(11.0)
    seen.steps.ended(11.25)
    assert seen == [(0, 64, 1.0), (64, 32, 0.25)]


def test_answers_alone_teach_nothing() -> None:
    seen = Seen()
    for at in range(5):
        seen.steps.planned([(1, 100)] * 64, at)
        seen.steps.ended(at + 0.5)
    assert seen == []


def test_the_context_of_a_batch_takes_as_much_attention() -> None:
    seen = Seen()
    requests = [(100, 40), (60, 500), (1, 900)]
    seen.steps.planned(requests, 0.0)
    seen.steps.ended(1.0)
    ((context, tokens, _),) = seen
    pairs = sum(new * (2 * behind + new) / 2 for new, behind in requests)
    assert tokens == 161
    assert tokens * (2 * context + tokens) / 2 == pytest.approx(pairs, rel=0.005)


def test_an_end_that_nobody_planned_is_nothing() -> None:
    seen = Seen()
    seen.steps.ended(1.0)
    assert seen == []


def test_steps_without_reported_end_look_slower_never_faster() -> None:
    seen = Seen()
    for at in range(10):
        seen.steps.planned([(64, 0)], at)
    seen.steps.ended(9.5)
    seen.steps.planned([(64, 0)], 9.6)
    seen.steps.ended(10.0)
    assert [seconds for _, _, seconds in seen] == [1.5, 0.5]


def test_what_the_scheduler_planned() -> None:
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 64, "b": 1},
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=32)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["b"], num_computed_tokens=[77]),
    )
    assert tokens_of(output) == [(64, 32), (1, 77)]
