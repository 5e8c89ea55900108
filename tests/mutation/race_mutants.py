"""Weaken the ordering code at one place after the other, and see that a test notices each time.

python tests/mutation/race_mutants.py            all, the last line is `caught N of N`
python tests/mutation/race_mutants.py --list     what would be tried
python tests/mutation/race_mutants.py --only ordering.py

A mutant is `caught` by a test that fails, or because a test `hung`: it took several times as long as without it.
"""

from __future__ import annotations

import argparse
import compileall
import concurrent.futures
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "longshore"

TIMEOUT = 4.0
"""How many times longer than without a mutant a test may take, after the first `GRACE` seconds; then it has noticed."""
GRACE = 10.0

SUITES: dict[str, tuple[str, ...]] = {
    "transfer": (
        "tests/transfer/test_transfer_hazards.py",
        "tests/transfer/test_transfer_engine.py",
        "tests/transfer/test_transfer_end.py",
        "tests/transfer/test_transfer_layers.py",
        "tests/transfer/test_transfer_order.py",
        "tests/transfer/test_transfer_sizes.py",
        "tests/transfer/test_order_known_bugs.py",
        "tests/transfer/test_order_explore.py",
    ),
    "streams": (
        "tests/transfer/test_transfer_events.py",
        "tests/transfer/test_transfer_torch_streams.py",
    ),
    "cuda": (
        "tests/transfer/test_cuda_streams.py",
        "tests/transfer/test_cuda_order.py",
        "tests/transfer/test_cuda_jobs.py",
        "tests/transfer/test_cuda_device.py",
        "tests/transfer/test_cuda_images.py",
    ),
    "runtime": ("tests/runtime/test_block_guard.py",),
    "cache": (
        "tests/cache/test_pool_states.py",
        "tests/cache/test_pool.py",
        "tests/cache/test_discards.py",
        "tests/cache/test_slab_pool.py",
        "tests/cache/test_image_sizes.py",
        "tests/cache/test_resize.py",
        "tests/cache/test_recovery.py",
        "tests/cache/test_recovery_and_reset.py",
        "tests/cache/test_load.py",
        "tests/cache/test_offload.py",
        "tests/cache/test_state_machine.py",
    ),
}
"""Tests that know the order."""

MODULES: dict[str, str] = {
    "transfer/ordering.py": "transfer",
    "transfer/engine.py": "transfer",
    "transfer/device/torch_streams.py": "streams",
    "transfer/device/cuda/streams.py": "cuda",
    "runtime/block_guard.py": "runtime",
    "cache/pool.py": "cache",
}
"""The ordering code, and the suite that guards it."""


class Case(NamedTuple):
    """One mutant of one module."""

    module: str
    mutant: Mutant

    def __str__(self) -> str:
        return f"{self.module}:{self.mutant.line}: {self.mutant.what}"


class Experience:
    """What is known of one suite's tests: how long each takes without a mutant, and how many mutants it has caught.

    Those that caught most go first, then the quickest: most mutants are caught at once.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.catches: Counter[str] = Counter()

    def patience(self, test: str) -> int:
        """Seconds after which a test has hung."""
        return math.ceil(GRACE + TIMEOUT * self.seconds[test])

    def rank(self, test: str) -> tuple[int, float]:
        """The less, the earlier."""
        return -self.catches[test], self.seconds[test]

    def note(self, ran: dict[str, float], said: str) -> None:
        """What one run of the suite has taught."""
        if not self.seconds:
            self.seconds = ran
        if said == "caught" and ran:
            self.catches[list(ran)[-1]] += 1


class Conduct:
    """A plugin of pytest: the order of tests, and an alarm that ends the process when one of them hangs."""

    def __init__(self, experience: Experience) -> None:
        self.experience = experience
        self.ran: dict[str, float] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.experience.seconds:
            items.sort(key=lambda item: self.experience.rank(item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.experience.seconds:
            signal.alarm(self.experience.patience(item.nodeid))
        begun = time.monotonic()
        try:
            return (yield)
        finally:
            signal.alarm(0)
            self.ran[item.nodeid] = time.monotonic() - begun


def outcome(suite: str, case: Case | None, experience: Experience) -> str:
    """What the suite says to this mutant, in a process of its own: `MISSED`, `caught`, or `hung`."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as overlay:
        package, ran = Path(overlay) / "longshore", Path(overlay) / "ran.json"
        shutil.copytree(PACKAGE, package)
        if case is not None:
            (package / case.module).write_text(case.mutant.source)
        child = os.fork()
        if not child:
            os._exit(_run(overlay, suite, Conduct(experience), ran))
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
            return "hung"
        said = "caught" if status else "MISSED"
        experience.note(json.loads(ran.read_text()) if ran.exists() else {}, said)
        return said


def _run(overlay: str, suite: str, conduct: Conduct, ran: Path) -> int:
    """In the child: the suite against the package in `overlay`."""
    os.setsid()
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    sys.path.insert(0, overlay)
    os.chdir(ROOT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    failed = 1
    with contextlib.suppress(BaseException):
        failed = int(pytest.main([*options, *SUITES[suite]], plugins=[conduct]))
    ran.write_text(json.dumps(conduct.ran))
    return failed


def cases(only: str | None) -> list[Case]:
    """All mutants of all modules, or of those whose name ends in `only`."""
    return [
        Case(module, mutant)
        for module in MODULES
        if only is None or module.endswith(only)
        for mutant in mutants((PACKAGE / module).read_text())
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="mutants of this module alone")
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args()
    todo = cases(given.only)
    if given.list:
        print(*todo, sep="\n")
        return 0
    compileall.compile_dir(PACKAGE, quiet=2)
    experience = {suite: Experience() for suite in sorted({MODULES[case.module] for case in todo})}
    for suite, known in experience.items():
        if outcome(suite, None, known) != "MISSED":
            print(f"the {suite} suite fails without any mutant")
            return 2

    def judge(case: Case) -> str:
        suite = MODULES[case.module]
        return outcome(suite, case, experience[suite])

    missed = []
    with concurrent.futures.ThreadPoolExecutor(given.processes) as pool:
        for number, (case, said) in enumerate(zip(todo, pool.map(judge, todo), strict=True), 1):
            print(f"{number}/{len(todo)} {said} {case}", flush=True)
            if said == "MISSED":
                missed.append(case)
    for case in missed:
        print(f"missed: {case}")
    print(f"caught {len(todo) - len(missed)} of {len(todo)}")
    return 1 if missed else 0


if __name__ == "__main__":
    import hypothesis  # noqa: F401 - loaded once, for all children
    import numpy  # noqa: F401
    import torch

    torch.set_num_threads(1)
    os.environ["STORIES"] = "all"
    sys.exit(main())
