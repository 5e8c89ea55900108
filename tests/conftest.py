"""Hypothesis profiles, and the coverage of the cache's table of states.

pytest                                 "ci": the same examples on every run
HYPOTHESIS_PROFILE=mutants pytest ...  a few of them, for tests that are run over and over
HYPOTHESIS_PROFILE=nightly pytest ...  new examples by --hypothesis-seed, NIGHTLY_EXAMPLES of them (default 400); and
                                       all that `depth.deep` says
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from longshore.cache import EDGES, SlotState

pytest.register_assert_rewrite(
    "cache_model",
    "cache_movers",
    "cache_model_base",
    "cache_model_lookup",
    "cache_model_store",
    "cache_model_lifecycle",
    "cache_model_groups",
)

Edge = tuple[SlotState, SlotState]

# Read when torch is loaded, here and by the processes that tests start. Bits are compared: oneMKL must not pick its
# kernels by the alignment of its inputs. Tiny models run faster on one thread, far faster beside other processes.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("ci", max_examples=40, derandomize=True, **_COMMON)
settings.register_profile("mutants", max_examples=15, derandomize=True, **_COMMON)
settings.register_profile(
    "nightly", max_examples=int(os.environ.get("NIGHTLY_EXAMPLES", "400")), database=None, **_COMMON
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def every_error_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tests that ran before do not count as repeated."""
    from longshore import errors

    monkeypatch.setattr(errors, "_logged", {})


_EDGES_TAKEN = "edges taken"
_all_taken: Counter[Edge] = Counter()
"""Of all tests that have ended, whichever process they ran in."""


@pytest.fixture
def edges_taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[Edge]]:
    """How often each edge of the table of states is taken in this test; shown at the end of the run."""
    from longshore.cache import pool

    taken: Counter[Edge] = Counter()

    transition = pool.transition

    def counted(state: int, to: int, where: str = "") -> int:
        after = transition(state, to, where)
        taken[pool.STATES[state], pool.STATES[to]] += 1
        return after

    monkeypatch.setattr(pool, "transition", counted)
    yield taken
    told = [(before.value, after.value, count) for (before, after), count in taken.items()]
    request.node.user_properties.append((_EDGES_TAKEN, told))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A test has ended: add up what it has counted."""
    if report.when == "teardown":
        for before, after, count in dict(report.user_properties).get(_EDGES_TAKEN, ()):
            _all_taken[SlotState(before), SlotState(after)] += count


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how often each legal edge was taken."""
    if not _all_taken:
        return
    covered = sum(_all_taken[edge] > 0 for edge in EDGES)
    terminalreporter.section(f"state table: {covered} of {len(EDGES)} legal edges taken")
    for edge, meaning in EDGES.items():
        before, after = edge
        terminalreporter.write_line(f"{before.value:>8} -> {after.value:<8} {_all_taken[edge]:>9,}  {meaning}")
