"""Weaken the control plane at one place at a time, and see whether a test notices.

python tests/mutation/cache_mutants.py --count 100 --seed 1      a sample; all with --count 0

The quick tests are asked first, the state machine only about what they missed. What survives is printed, to be killed
by a test or to be explained.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutants import Mutant, mutants
from operators import operator_mutants

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("src/longshore/cache")
MACHINE = "tests/cache/test_state_machine.py"
TIMEOUT = 400.0


def all_mutants() -> list[tuple[Path, Mutant]]:
    """Every mutant of every module, by path below the root."""
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / PACKAGE).rglob("*.py"))
    made = [(path, each) for path in paths for each in mutants((ROOT / path).read_text())]
    return made + [(path, each) for path in paths for each in operator_mutants((ROOT / path).read_text())]


def fails(root: Path, tests: list[str]) -> bool:
    """Whether a test fails in the copy at `root`; too slow counts as failing."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    """Try mutants, say which survived; the exit status is 1 if the tests fail without any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no other mutant after so long")
    parser.add_argument("--quick", action="store_true", help="leave the state machine out")
    given = parser.parse_args()
    every = all_mutants()
    dice = random.Random(given.seed)
    chosen = dice.sample(every, min(given.count or len(every), len(every)))
    begun, survived, tried = time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "tree"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".git", "*.pyc", ".venv*", "build", "dist"))
        quick = sorted(str(path.relative_to(root)) for path in (root / "tests/cache").glob("test_*.py"))
        quick.remove(MACHINE)
        if fails(root, quick):
            print("the tests fail without a mutant")
            return 1
        for path, mutant in chosen:
            if time.monotonic() - begun > given.seconds:
                break
            tried += 1
            (root / path).write_text(mutant.source)
            if not fails(root, quick) and (given.quick or not fails(root, [MACHINE])):
                survived += 1
                print(f"survived: {path}:{mutant.line}: {mutant.what}", flush=True)
            (root / path).write_text((ROOT / path).read_text())
    print(f"noticed {tried - survived} of {tried}; {len(every)} are possible, seed {given.seed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
