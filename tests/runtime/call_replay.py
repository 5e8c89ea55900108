"""Makes the calls of a log that `longshore.runtime.error_handler` has written again: python call_replay.py LOG"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from longshore.cache import TieredCache
from longshore.errors import LongshoreError, TraceError
from longshore.runtime.error_handler import LOOPS_OWN, WrittenCalls, is_fault


def replay(path: Path, cache: TieredCache | None = None) -> TieredCache:
    """Make the calls of a written log again, on a new cache of the same settings unless one is given; returns it.

    Calls that were refused with a typed error are refused again; a fault is raised. Without tokens, partial matches
    find nothing. Raises `TraceError` without `cache` for a log that does not begin with an empty cache.
    The log is a pickle: read only what this process, or one that you trust, has written.
    """
    written = WrittenCalls(*pickle.loads(path.read_bytes()))  # noqa: S301
    if cache is None:
        if not written.is_whole:
            raise TraceError(f"{path}: expected all calls since the cache was empty, got the last {len(written.calls)}")
        tiers, settings, remote, generation = written.constructor_arguments
        cache = TieredCache(tiers, settings, remote=remote, generation=generation)
    for name, args, kwargs in written.calls:
        try:
            getattr(cache, name)(*args, **kwargs)
        except LongshoreError as error:
            if name in LOOPS_OWN or is_fault(error):
                raise
    return cache


if __name__ == "__main__":
    replay(Path(sys.argv[1]))
