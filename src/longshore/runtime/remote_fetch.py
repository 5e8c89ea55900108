"""Probe remote stores if that may be faster than computing; fetch what is faster to fetch.

    ready prefix ─┬─ what no tier has: worth probing? ─► probe ─► worth loading? ─► fetch into host memory
                  └─ all of the prompt: nothing is asked

`fetch` never waits, for engines that ask again in each step; `fetch_and_wait` waits, for those that have nothing else
to do. A lookup after either passes `remote_tiers=()`: else it would probe the stores that are not worth it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

from longshore.boundary import Key
from longshore.cache import GroupKeys, Protection, Run, TieredCache
from longshore.runtime.loop import Runtime


class Fetch(NamedTuple):
    """What is under way for a prompt: probes, jobs, and the stores of the chunks that were ordered now."""

    probes: tuple[int, ...] = ()
    jobs: tuple[int, ...] = ()
    names: Mapping[Key, str] = {}


def worth_probing(runtime: Runtime, context: int, chunks: int, *, for_prefetch: bool = False) -> list[str]:
    """The stores that may be quicker than computing `chunks` after `context` tokens, if they have them."""
    if runtime.gate is None:
        return list(runtime.remote_tiers)
    now = runtime.clock()
    return [
        name
        for name in runtime.remote_tiers
        if runtime.gate.worth_probing(context, Run(name, chunks), now, for_prefetch=for_prefetch)
    ]


def fetch_timeout(runtime: Runtime, cache: TieredCache, runs: Sequence[Run], now: float) -> float | None:
    """Seconds after which a fetch of `runs` is late: twice what the gate expects, and time for an answer at least.

    At most the cache's `load_timeout`, which `None` stands for; a store's own `fetch_timeout` may be sooner. These are
    the limits after a fetch that was late, too: the gate cannot measure what does not arrive.
    """
    expected = None if runtime.gate is None or not runs else runtime.gate.load_seconds(runs, now)
    if expected is None or runtime.gate is None or any(runtime.gate.is_late(run.tier) for run in runs):
        return None
    return min(max(2 * expected, cache.settings.probe_timeout), cache.settings.load_timeout)


def count_fetchable(runtime: Runtime, path: GroupKeys, context: int, chunk_tokens: int, timeout: float) -> int:
    """How many chunks `fetch_and_wait`, with `is_agreed`, would order: it probes in the same way, and fetches nothing.

    The gate counts them as ordered now, so it must not be asked again: it would queue them behind themselves.
    """
    with runtime.batch() as cache:
        found = _known_after(
            runtime, cache, path, context, chunk_tokens, probe=True, for_prefetch=False, is_agreed=True
        )
    runtime.wait_jobs(found.probes, timeout)
    with runtime.batch() as cache:
        return _known_after(runtime, cache, path, context, chunk_tokens, probe=False, for_prefetch=False).num_chunks


def fetch_and_wait(
    runtime: Runtime, path: GroupKeys, context: int, chunk_tokens: int, timeout: float, *, is_agreed: bool = False
) -> Mapping[Key, str]:
    """Fetch what stores have of `path`, after what other tiers have, into host memory, and wait for it.

    Only chunks that the gate says are quicker to fetch than to compute. Answers come by the cache's `probe_timeout`;
    what has not arrived after `timeout` seconds is not waited for. `context` are the tokens before `path.start`.
    Returns the store of each chunk that was ordered. `is_agreed`: the gate has said that all of `path` is to be
    fetched.
    """
    deadline = runtime.clock() + timeout
    with runtime.batch() as cache:
        under_way = fetch(runtime, cache, path, context, chunk_tokens, is_agreed=is_agreed)
    names = under_way.names
    if under_way.probes and runtime.wait_jobs(under_way.probes, timeout):
        with runtime.batch() as cache:
            more = fetch(runtime, cache, path, context, chunk_tokens, probe=False, is_agreed=is_agreed)
        under_way, names = (more if more.jobs else under_way), {**names, **more.names}
    runtime.wait_jobs(under_way.jobs, deadline - runtime.clock())
    return names


def fetch(
    runtime: Runtime,
    cache: TieredCache,
    path: GroupKeys,
    context: int,
    chunk_tokens: int,
    *,
    probe: bool = True,
    for_prefetch: bool = False,
    is_agreed: bool = False,
) -> Fetch:
    """What `fetch_and_wait` does, without waiting, inside `Runtime.batch`. `for_prefetch` is as for the gate."""
    found = _known_after(
        runtime, cache, path, context, chunk_tokens, probe=probe, for_prefetch=for_prefetch, is_agreed=is_agreed
    )
    if not found.num_chunks:
        return Fetch(found.probes)
    end = found.begin + found.num_chunks
    wanted = path._replace(chunks=path.keys[:end], prompt_tokens=None)
    jobs = cache.prefetch({0: wanted}, runtime.clock(), timeout=found.timeout)
    return Fetch(found.probes, jobs, dict(zip(path.keys[found.begin : end], found.stores, strict=False)))


class _Fetchable(NamedTuple):
    """What stores have of a path after its ready chunks, from `begin` on: the first `num_chunks` are worth fetching."""

    probes: tuple[int, ...]
    begin: int
    stores: Sequence[str] = ()
    num_chunks: int = 0
    timeout: float | None = None


def _known_after(
    runtime: Runtime,
    cache: TieredCache,
    path: GroupKeys,
    context: int,
    chunk_tokens: int,
    *,
    probe: bool,
    for_prefetch: bool,
    is_agreed: bool = False,
) -> _Fetchable:
    now = runtime.clock()
    ready = cache.lookup({0: path}, now, protect=Protection.NONE, count=False).num_chunks
    begin, context = path.start + ready, context + ready * chunk_tokens
    rest = path.keys[begin:]
    if not rest:
        return _Fetchable((), begin)
    asked = worth_probing(runtime, context, len(rest), for_prefetch=for_prefetch) if probe else ()
    known = cache.lookup({0: GroupKeys(rest)}, now, protect=Protection.NONE, independent=True, remote_tiers=asked)
    stores = list(takewhile(bool, known.remote_sources.get(0, ())))
    runs = [Run(name, len(list(same))) for name, same in groupby(stores)]
    count, timeout = sum(run.num_chunks for run in runs), fetch_timeout(runtime, cache, runs, now)
    if count and runtime.gate is not None and not is_agreed:
        count = runtime.gate.worth_loading(context, runs, now, for_prefetch=for_prefetch)
    return _Fetchable(known.probes, begin, stores, count, timeout)
