"""Keep a sample of a session's mutants, the same for the same seed; of those without a result, which have none yet.

python tests/mutation/sample.py SESSION --count 100 --seed 1      all with --count 0
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from cosmic_ray.tools.filters.filter_app import FilterApp
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import WorkItem


class Sample(FilterApp):
    """A filter of cosmic-ray's that leaves mutants out altogether, so that no report counts them."""

    def add_args(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--count", type=int, default=100)
        parser.add_argument("--seed", type=int, default=1)

    def filter(self, work_db: WorkDB, args: Any) -> None:
        items = sorted(work_db.pending_work_items, key=_place)
        chosen = random.Random(args.seed).sample(items, min(args.count or len(items), len(items)))
        work_db.clear()
        work_db.add_work_items(chosen)
        print(f"{len(chosen)} of {len(items)} mutants, seed {args.seed}")


def _place(item: WorkItem) -> tuple[str, tuple[int, int], str, str]:
    (mutation,) = item.mutations
    return str(mutation.module_path), mutation.start_pos, mutation.operator_name, str(mutation.operator_args)


if __name__ == "__main__":
    raise SystemExit(Sample().main())
