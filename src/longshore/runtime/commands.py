"""Commands of `longshore ctl` to a running engine: `lookup`, `pin`, `unpin`, `clear`, `stats` over all KV cache groups.

    engine with one cache       group 0 ─┬─ Runtime ── TieredCache       vLLM, transformers
                                group 1 ─┘
    engine with host pools      group 0 ─── Runtime ── TieredCache       SGLang
                                group 1 ─── Runtime ── TieredCache

A prefix is of use where all groups have what they need of it. A command holds the lock of each runtime, as any other
caller does, for as long as one call of the cache takes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, takewhile
from typing import TYPE_CHECKING, Any

from longshore.boundary import Key
from longshore.cache import GroupKeys, Lease, LookupResult, Presence, Protection, TieredCache
from longshore.errors import CommandError, LongshoreError, PinLimitError
from longshore.runtime.loop import Runtime

if TYPE_CHECKING:
    from prometheus_client import Metric

_log = logging.getLogger(__name__)

PIN_SHARE = 0.25
"""Of the slots of the host tier."""

_AT_ONCE = 1024
"""Chunks that `clear` evicts before it lets others have the cache."""

_KEY_BYTES = 32
_MOST_TOKEN = 2**32 - 1


@dataclass(frozen=True, slots=True)
class ControlledGroup:
    """A KV cache group of an engine.

    Attributes:
        runtime: Its runtime at present. Several groups may have one, or each its own.
        chunk_tokens: Tokens of a chunk.
        window: How many tokens before the end of a prefix are needed of this group; `None` for all of them.
        number: Its number in the cache of `runtime`.
    """

    runtime: Runtime
    chunk_tokens: int = 1
    window: int | None = None
    number: int = 0

    def needed(self, tokens: int) -> range:
        """The chunks that a prefix of so many tokens needs."""
        first = 0 if self.window is None else max(0, tokens - self.window)
        return range(first // self.chunk_tokens, tokens // self.chunk_tokens)


@dataclass(frozen=True, slots=True)
class ControlledEngine:
    """What commands need of an engine.

    Attributes:
        groups: Its KV cache groups at present; none while it has no tiers.
        keys: For the token ids of a prompt, the keys of its whole chunks in each group.
        metrics: Its metrics.
    """

    groups: Callable[[], Sequence[ControlledGroup]]
    keys: Callable[[Sequence[int]], Sequence[Sequence[Key]]]
    metrics: Callable[[], Iterable[Metric]]


@dataclass(slots=True)
class _PinnedPrompt:
    """A prefix whose last key in the first group is `last`, and its leased `chunks`, each with the group's position."""

    leases: list[tuple[Runtime, Lease | None]]
    last: Key
    chunks: frozenset[tuple[int, Key]]

    @property
    def exists(self) -> bool:
        """Whether the tiers still have any of it; a reset may have removed it."""
        for runtime, lease in self.leases:
            with runtime.locked() as cache:  # after a fault, it cannot be asked
                if lease is not None and (runtime.fault is not None or cache.progress(lease).runs):
                    return True
        return False


class Commands:
    """Carries out the commands of one engine, one at a time."""

    def __init__(self, engine: ControlledEngine) -> None:
        self._engine = engine
        self._groups: Sequence[ControlledGroup] = ()
        self._pins: list[_PinnedPrompt] = []
        self._known: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "lookup": self._lookup,
            "pin": self._pin,
            "unpin": self._unpin,
            "clear": self._clear,
            "stats": self._stats,
        }

    def answer(self, line: bytearray) -> dict[str, Any]:
        """The answer to a request. Raises nothing."""
        try:
            return {"ok": self._carry_out(line)}
        except LongshoreError as error:
            return {"error": type(error).__name__, "message": str(error)}
        except Exception as error:  # noqa: BLE001 - the thread goes on
            _log.exception("control: the command %s failed; report this", json.loads(line)["command"])  # it was parsed
            return {"error": type(error).__name__, "message": "the command failed, see the engine's log"}

    def _carry_out(self, line: bytearray) -> dict[str, Any]:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise CommandError("expected a JSON object in one line") from None
        command = request.get("command") if isinstance(request, dict) else None
        if not isinstance(command, str) or command not in self._known:
            raise CommandError(f"expected a command of {', '.join(self._known)}, got {str(command)[:40]!r}")
        if extra := set(request) - {"command", "tokens", "keys"}:
            raise CommandError(f"expected tokens or keys, got {str(sorted(extra)[0])[:40]!r}, too")
        self._groups = self._engine.groups()
        if not self._groups and command != "stats":
            raise CommandError("the engine has no tiers now: it has not begun yet, sleeps, or its log says why")
        self._pins = [pin for pin in self._pins if self._runtimes.issuperset(runtime for runtime, _ in pin.leases)]
        return self._known[command](request)  # pins of other runtimes went with their tiers

    @property
    def _runtimes(self) -> set[Runtime]:
        return {group.runtime for group in self._groups}

    @contextlib.contextmanager
    def _caches(self) -> Iterator[dict[Runtime, TieredCache]]:
        """The caches of all groups, to be used together."""
        with contextlib.ExitStack() as held:
            runtimes = dict.fromkeys(group.runtime for group in self._groups)
            yield {runtime: held.enter_context(runtime.batch()) for runtime in runtimes}

    def _keys(self, request: dict[str, Any]) -> Sequence[Sequence[Key]]:
        """The keys of the whole chunks of a prompt in each group."""
        if ("tokens" in request) == ("keys" in request):
            raise CommandError("expected either tokens, the token ids of a prompt, or keys, those of its chunks")
        given = request["tokens"] if "tokens" in request else request["keys"]
        if not isinstance(given, list):
            raise CommandError("expected a list of token ids or of keys")
        if "tokens" in request:
            if not all(type(each) is int and 0 <= each <= _MOST_TOKEN for each in given):
                raise CommandError(f"tokens: expected whole numbers from 0 to {_MOST_TOKEN}")
            paths = self._engine.keys(given)
        else:
            if (count := len(self._groups)) > 1:
                raise CommandError(f"keys are of one KV cache group, and this engine has {count}: use tokens")
            try:
                paths = [[bytes.fromhex(each) for each in given]]
            except (TypeError, ValueError):
                raise CommandError("keys: expected hexadecimal text") from None
            if any(len(key) != _KEY_BYTES for key in paths[0]) or len(set(paths[0])) < len(paths[0]):
                raise CommandError(f"keys: expected different keys of {_KEY_BYTES} bytes, 64 hexadecimal digits each")
        if not min(map(len, paths)):
            what = "tokens" if "tokens" in request else "keys"
            raise CommandError(f"expected a prompt of at least one whole chunk, got {len(given)} {what}")
        return paths

    def _served(self, there: Sequence[Sequence[bool]]) -> int:
        """The longest prefix, in tokens, that all groups serve; `there` says by group which chunks there are."""
        missing = [list(accumulate((not each for each in group), initial=0)) for group in there]
        both, unit = list(zip(self._groups, missing, strict=True)), self._unit
        for tokens in range(self._whole(there), 0, -unit):
            needed = [(count, group.needed(tokens)) for group, count in both]
            if all(count[need.stop] == count[need.start] for count, need in needed):
                return tokens
        return 0

    @property
    def _unit(self) -> int:
        return math.lcm(*(group.chunk_tokens for group in self._groups))

    def _whole(self, paths: Sequence[Sequence[Any]]) -> int:
        """Tokens of the longest prefix of which `paths`, by group, have whole chunks."""
        most = min(len(path) * group.chunk_tokens for group, path in zip(self._groups, paths, strict=True))
        return most // self._unit * self._unit

    def _lookup(self, request: dict[str, Any]) -> dict[str, Any]:
        paths, answers, there = self._keys(request), list[dict[str, Any]](), list[list[bool]]()
        with self._caches() as caches:
            for group, keys in zip(self._groups, paths, strict=True):
                cache = caches[group.runtime]
                found = _residency(cache, group, keys)
                names = [tier.name for tier in cache.stats()]
                stores = found.remote_sources.get(group.number) or [""] * len(keys)
                colder = names[1] if len(names) == 2 else "colder"
                place = {Presence.HOST: names[0], Presence.COLDER: colder, Presence.IN_FLIGHT: "in flight"}
                presences = found.residency[group.number].presences
                where = [place.get(each, store) for each, store in zip(presences, stores, strict=True)]
                leading = list(takewhile(bool, where))
                shown = leading if group.window is None else [each or "none" for each in where]
                runs = [{"tier": tier, "chunks": sum(1 for _ in same)} for tier, same in groupby(shown)]
                there.append(list(map(bool, where)))
                answers.append({"chunks": len(keys), "leading": len(leading), "runs": runs})
        if len(answers) == 1:
            return answers[0]
        return {"tokens": self._whole(paths), "leading_tokens": self._served(there), "groups": answers}

    def _pin(self, request: dict[str, Any]) -> dict[str, Any]:
        paths = self._keys(request)
        asked = sum(len(group.needed(self._whole(paths))) for group in self._groups)
        self._forget_lost()
        with self._caches() as caches:
            there = list[list[bool]]()
            for group, keys in zip(self._groups, paths, strict=True):
                found = _residency(caches[group.runtime], group, keys).residency[group.number]
                there.append([each in (Presence.HOST, Presence.COLDER) for each in found.presences])
            tokens = self._served(there)
            if not tokens:
                return {"chunks": asked, "pinned": 0}
            both = enumerate(zip(self._groups, paths, strict=True))
            chunks = frozenset((at, keys[each]) for at, (group, keys) in both for each in group.needed(tokens))
            begin = paths[0][: tokens // self._groups[0].chunk_tokens]
            replaced = [pin for pin in self._pins if pin.last in begin]
            kept = [pin for pin in self._pins if pin not in replaced]
            leases = list[tuple[Runtime, Lease | None]]()
            for runtime, cache in caches.items():
                self._check_limit(runtime, cache, chunks.union(*(pin.chunks for pin in kept)), len(chunks))
            for runtime, cache in caches.items():
                mine = {
                    group.number: GroupKeys([keys[each] for each in group.needed(tokens)])
                    for group, keys in zip(self._groups, paths, strict=True)
                    if group.runtime is runtime
                }
                leases.append((runtime, cache.lookup(mine, runtime.clock(), independent=True).lease))
        self._release(replaced)
        self._pins = [*kept, _PinnedPrompt(leases, begin[-1], chunks)]
        return {"chunks": asked, "pinned": len(chunks)}

    def _check_limit(self, runtime: Runtime, cache: TieredCache, wanted: Collection[tuple[int, Key]], new: int) -> None:
        """Raise `PinLimitError` if too many of the `wanted` chunks, `new` ones among them, are in this `cache`."""
        tier, mine = cache.stats()[0], [at for at, _ in wanted if self._groups[at].runtime is runtime]
        sizes = [-(-size.image_bytes // min(tier.sizes).image_bytes) for size in tier.sizes]  # in slots
        slots = sum(sizes[cache.settings.size_class_of(self._groups[at].number)] for at in mine)
        most = int(PIN_SHARE * tier.slots)
        if slots > most:
            raise PinLimitError(
                f"expected at most {most} pinned chunks, {PIN_SHARE:.0%} of the tier {tier.name}, got {slots} with "
                f"these {new}; unpin others, or make the tier larger"
            )

    def _unpin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Without tokens and keys, all; else those that are the beginning of this prompt."""
        path = set(self._keys(request)[0]) if {"tokens", "keys"} & request.keys() else None
        self._forget_lost()
        gone = [pin for pin in self._pins if path is None or pin.last in path]
        self._release(gone)
        self._pins = [pin for pin in self._pins if pin not in gone]
        return {"unpinned": sum(len(pin.chunks) for pin in gone)}

    def _forget_lost(self) -> None:
        """Release pins whose chunks have gone from all tiers, as by a reset."""
        lost = [pin for pin in self._pins if not pin.exists]
        self._release(lost)
        self._pins = [pin for pin in self._pins if pin not in lost]

    def _clear(self, request: dict[str, Any]) -> dict[str, Any]:
        if len(request) > 1:
            raise CommandError("clear: expected neither tokens nor keys: it drops everything")
        self._unpin({})
        dropped, left = Counter[str](), Counter[str]()
        for runtime in self._runtimes:
            with runtime.batch() as cache:
                tiers = [tier.name for tier in cache.stats()]
            for tier in tiers:
                more = True
                while more:
                    with runtime.batch() as cache:
                        more = bool(count := cache.evict(tier, _AT_ONCE))
                        dropped[tier] += count
            with runtime.locked() as cache:
                left.update({tier.name: tier.used for tier in cache.stats()})
        return {"dropped": dropped, "left": left}

    def _stats(self, request: dict[str, Any]) -> dict[str, Any]:
        if len(request) > 1:
            raise CommandError("stats: expected neither tokens nor keys")
        metrics: dict[str, list[dict[str, Any]]] = {}
        for metric in self._engine.metrics():
            for sample in metric.samples:
                values = metrics.setdefault(sample.name, [])
                values.append({"labels": dict(sample.labels), "value": sample.value})
        pinned = len({chunk for pin in self._pins if pin.exists for chunk in pin.chunks})
        return {"pid": os.getpid(), "pinned_chunks": pinned, "metrics": metrics}

    @staticmethod
    def _release(pins: Iterable[_PinnedPrompt]) -> None:
        for pin in pins:
            for runtime, lease in pin.leases:
                if lease is not None:
                    with runtime.batch() as cache:
                        cache.release(lease)


def _residency(cache: TieredCache, group: ControlledGroup, keys: Sequence[Key]) -> LookupResult:
    """Where each chunk of `group` is. Keeps nothing, and counts for nothing."""
    now = group.runtime.clock()
    return cache.lookup({group.number: GroupKeys(keys)}, now, protect=Protection.NONE, independent=True)
