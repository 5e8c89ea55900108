"""Who must wait for whom: slots of another tier never, readers only for writers, writers for all."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from longshore.transfer.ordering import Access, Hazards, QueuePosition, TierPool

DEVICE = TierPool("device", 0)
HOST = TierPool("host", 0)
PLACES = (DEVICE, HOST, TierPool("device", 1))


def reads(place: TierPool, *slots: int) -> Access:
    return Access(place, np.array(slots, dtype=np.int64), writes=False)


def writes(place: TierPool, *slots: int) -> Access:
    return Access(place, np.array(slots, dtype=np.int64), writes=True)


def hazards(lanes: int = 2) -> Hazards:
    return Hazards(dict.fromkeys(PLACES, 16), lanes)


JOB = st.tuples(
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(PLACES), st.integers(0, 3), st.booleans()), max_size=4),
)


@examples(200)
@given(st.lists(JOB, max_size=14))
def test_it_agrees_with_comparing_every_pair_of_jobs(jobs: list[tuple[int, list[tuple[TierPool, int, bool]]]]) -> None:
    records = hazards(lanes=3)
    tickets = [0, 0, 0]
    earlier: list[tuple[int, int, list[tuple[TierPool, int, bool]]]] = []
    for lane, touched in jobs:
        accesses = [Access(place, np.array([slot], dtype=np.int64), write) for place, slot, write in touched]
        expected = [0, 0, 0]
        for other_lane, ticket, others in earlier:
            for place, slot, write in touched:
                if any((place, slot) == (p, s) and (write or w) for p, s, w in others):
                    expected[other_lane] = max(expected[other_lane], ticket)
        tickets[lane] += 1
        assert records.add(lane, accesses) == QueuePosition(lane, tickets[lane], tuple(expected))
        earlier.append((lane, tickets[lane], touched))


def test_job_begins_only_after_its_dependencies_have_ended() -> None:
    records = hazards(lanes=3)
    first = records.add(0, [reads(HOST, 3)])
    second = records.add(0, [reads(HOST, 3)])
    other = records.add(1, [reads(HOST, 3)])
    last = records.add(2, [writes(HOST, 3)])
    for ended in (first, other, second):
        assert not records.is_clear(last)
        records.end(ended)
    assert records.is_clear(last)
