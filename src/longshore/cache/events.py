"""Events of chunks, in order, in a bounded log: for routers, which are told what tiers have, and for diagnosis.

    ordered ──► stored ──► moved (copied to another tier) ──► removed (from one tier; cause, and for which chunk)
         └───► failed                                         reset (from all)
    shared (a store that replicas share has confirmed it) ──► lapsed (an answer of that store says that it is gone)
    request: keys that a lookup requested and found ──► loaded: those that arrived on the device

Nothing is recorded without a limit. A reader that is too slow gets a `GAP` in place of the oldest events, with their
number; what is there then is found batch by batch, by `TieredCache.reconcile`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from longshore.boundary import Key, StoredChunks
from longshore.cache.columns import LISTS, as_i32
from longshore.cache.nodes import Nodes
from longshore.cache.types import MissReason
from longshore.errors import TraceError

EVICTED = "evicted"
"""The cause of evictions."""

RESET = "reset"
"""The cause of removals by a reset that keeps tiers."""

WEIGHTS = "weights"
"""The cause of a reset because weights have changed."""

STEP = 1024
"""Chunks that are compared in one call of the control plane, after events were missing."""

_PARTS = 256


class EventKind(enum.Enum):
    """Kind of an event. Complete: there is no "other"."""

    ORDERED = "ordered"  # a chunk is being written to `tier`
    STORED = "stored"  # it is ready in `tier`, and in no other
    MOVED = "moved"  # it is ready in `tier` too, copied from `source`
    REMOVED = "removed"  # it was removed from `tier` for `cause`; if evicted, to make room for `by`
    FAILED = "failed"  # writing it to `tier` failed for `cause`
    RESET = "reset"  # all chunks were removed from all tiers
    REQUEST = "request"  # `request` asked for `keys` from position `start` on, and found `length` of them
    LOADED = "loaded"  # the first `length` of `keys` were loaded; the next was not, for `cause`
    SHARED = "shared"  # the remote tier `tier` has confirmed that it has it
    LAPSED = "lapsed"  # it is not announced as being in the remote tier `tier` any more, for `cause`
    GAP = "gap"  # `length` events are missing here


STORING = frozenset({EventKind.STORED, EventKind.MOVED, EventKind.SHARED})
"""A tier has the chunk from here on."""

_LAST = 253_402_300_799.0  # the end of the year 9999
_KINDS = [kind.value for kind in EventKind]


class Event(NamedTuple):
    """One event. Which fields mean something depends on `kind`; `number` counts from 1, gaps excepted."""

    number: int
    kind: EventKind
    at: float = 0.0
    tier: str = ""
    key: Key | None = None
    parent: Key | None = None
    source: str = ""
    cause: str = ""
    by: Key | None = None
    request: str | None = None
    keys: tuple[Key, ...] = ()
    start: int = 0
    length: int = 0

    def as_json(self, key_bytes: int | None = None) -> dict[str, Any]:
        """Plain data, without what is empty; keys are hexadecimal, their first `key_bytes` or all."""
        plain = {name: value for name, value in self._asdict().items() if value not in ("", None, (), 0)}
        for name in ("key", "parent", "by"):
            if name in plain:
                plain[name] = plain[name][:key_bytes].hex()
        if self.keys:
            plain["keys"] = [key[:key_bytes].hex() for key in self.keys]
        return {**plain, "kind": self.kind.value}

    @classmethod
    def from_json(cls, plain: Any) -> Event:
        """The event that `as_json` made this of. Raises `TraceError` for anything else."""
        if not isinstance(plain, dict) or plain.get("kind") not in _KINDS:
            raise TraceError("expected an event, a JSON object whose field 'kind' is one of " + ", ".join(_KINDS))
        try:
            fields = dict(plain)
            fields["kind"] = EventKind(fields["kind"])
            for name in ("key", "parent", "by"):
                if name in fields:
                    fields[name] = bytes.fromhex(fields[name])
            fields["keys"] = tuple(bytes.fromhex(key) for key in fields.get("keys", ()))
            event = cls(**{"number": 0, **fields})
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"expected an event, got an unknown or invalid field: {error}") from error
        if type(event.at) not in (int, float) or not 0 <= event.at <= _LAST:
            raise TraceError(f"expected 'at' to be seconds since 1970, got {str(event.at)[:80]!r}")
        if any(type(count) is not int or count < 0 for count in (event.start, event.length)):
            raise TraceError("expected 'start' and 'length' of an event to be numbers of chunks")
        if any(not isinstance(each, str) for each in (event.tier, event.source, event.cause, event.request or "")):
            raise TraceError("expected 'tier', 'source', 'cause' and 'request' of an event to be names")
        return event


class _Recovered(NamedTuple):
    """Chunks that `tier` had at start: one `STORED` event each, from number `first` on, made when they are pulled.

    Their keys and parents are columns, as in `StoredChunks`: a tier may have millions of chunks.
    """

    first: int
    at: float
    tier: str
    chunks: StoredChunks

    def take(self, count: int) -> tuple[list[Event], _Recovered | None]:
        """The first `count` events, and what is left."""
        some, rest = (self.chunks.where(each) for each in (slice(count), slice(count, None)))
        made = [
            Event(number, EventKind.STORED, self.at, self.tier, chunk.key, chunk.parent)
            for number, chunk in enumerate(some, self.first)
        ]
        return made, self._replace(first=self.first + count, chunks=rest) if len(rest) else None


class EventLog:
    """The last `limit` events that nobody has pulled yet, and all that tell what tiers had at start."""

    def __init__(self, limit: int) -> None:
        self.on = limit > 0
        """Whether anything is recorded."""
        self.now = 0.0
        self.evicted_for: Key | None = None
        """The chunk that room is being made for."""
        self.hidden: Key | None = None
        """A chunk of which nothing is recorded."""
        self._events: deque[Event] = deque()
        self._recovered: deque[_Recovered] = deque()
        self._limit = limit
        self._last = 0
        self._missed = 0

    def record(self, kind: EventKind, about: Iterable[Key | None] = (None,), **fields: Any) -> None:
        """One event of `kind` about each of some keys; `fields` are those of `Event`."""
        for key in about:
            if self.hidden is not None and (key == self.hidden or fields.get("keys", ()) == (self.hidden,)):
                continue
            self._last += 1
            self._events.append(Event(self._last, kind, self.now, key=key, **fields))
            if len(self._events) > self._limit:
                dropped = self._events.popleft().number
                self._missed += 1
                while self._recovered and self._recovered[0].first < dropped:  # what is dropped may take it back
                    self._missed += len(self._recovered.popleft().chunks)

    def recovered(self, tier: str, chunks: StoredChunks) -> None:
        """`tier` had `chunks` at start, parents first, which no other tier has."""
        if len(chunks):
            self._recovered.append(_Recovered(self._last + 1, self.now, tier, chunks))
            self._last += len(chunks)

    def arrived(self, index: Nodes, names: Sequence[str], nodes: Sequence[int], tier: int) -> None:
        """Copies of `nodes` have become ready in `tier`; `names` are those of all tiers."""
        for node, parent in zip(nodes, index.parent_keys(nodes), strict=True):
            others = [each for each in index.tiers if each != tier and index.is_ready(node, each)]
            kind = EventKind.MOVED if others else EventKind.STORED
            # A copy goes down from the tier above, and comes up from the warmest that had it.
            source = names[max((each for each in others if each < tier), default=others[0])] if others else ""
            self.record(kind, [index.key[node]], tier=names[tier], parent=parent, source=source)

    def lost(self, index: Nodes, names: Sequence[str], node: int, tier: int, cause: str) -> None:
        """A copy of `node` is being removed from `tier` for `cause`, or failed to be written."""
        kind = EventKind.REMOVED if index.is_ready(node, tier) else EventKind.FAILED
        by = self.evicted_for if cause == EVICTED else None
        self.record(kind, [index.key[node]], tier=names[tier], cause=cause, by=by)

    def loaded(
        self, asked: Iterable[tuple[str | None, Sequence[Key]]], loaded_chunks: int, misses: Sequence[MissReason]
    ) -> None:
        """How far what requests `asked` for came onto the device: the first `loaded_chunks` of all their keys."""
        causes = iter(misses)
        for request, keys in asked:
            length = min(loaded_chunks, len(keys))
            loaded_chunks -= length
            cause = next(causes, MissReason.AFTER_MISS).value if length < len(keys) else ""
            self.record(EventKind.LOADED, request=request, keys=tuple(keys), length=length, cause=cause)
            if length < len(keys):
                causes = iter(())

    @property
    def has_events(self) -> bool:
        """Whether there are events that nobody has pulled."""
        return bool(self._events or self._recovered or self._missed)

    def pull(self, limit: int | None = None) -> list[Event]:
        """The oldest events that nobody has pulled, at most `limit`; before them a `GAP` if some had to be dropped.

        Without a `limit`, what tiers had at start is missing, too: it may be millions of chunks.
        """
        while limit is None and self._recovered:
            self._missed += len(self._recovered.popleft().chunks)
        events = [Event(0, EventKind.GAP, self.now, length=self._missed)] if self._missed else []
        self._missed = 0
        left = self._last if limit is None else limit
        while left > 0 and (self._events or self._recovered):
            until = self._recovered[0].first if self._recovered else self._last + 1
            if self._events and (before := until - self._events[0].number) > 0:  # their numbers have no gaps
                some = [self._events.popleft() for _ in range(min(left, before, len(self._events)))]
            else:
                some, rest = self._recovered.popleft().take(left)
                if rest is not None:
                    self._recovered.appendleft(rest)
            events += some
            left -= len(some)
        return events


N = TypeVar("N")


class Change(NamedTuple, Generic[N]):
    """What routers are to be told: `tier` has got the chunk that they know as `name`, or does not have it any more."""

    tier: str
    removed: bool
    key: Key
    name: N


@dataclass(frozen=True, slots=True)
class Contents:
    """What a cache holds now, for readers that have missed events."""

    log: EventLog
    index: Nodes
    tiers: Sequence[str]
    """Names of the tiers of `index`, warmest first."""
    stores: Mapping[str, Collection[Key]]
    """The chunks of which events say that they are in remote tiers, by tier."""

    def keys(self) -> Iterator[Key]:
        """The keys of all chunks. The cache may change meanwhile: what it holds all the time is among them."""
        index, begin = self.index, LISTS
        while begin < index.size:
            end = begin + STEP
            yield from index.key[index.key.nodes(begin, end)].tolist()
            begin = end
        for keys in self.stores.values():
            yield from list(keys)

    def tiers_of(self, keys: Sequence[Key]) -> list[tuple[str, ...]]:
        """The tiers that have a copy of each of `keys` that is ready, and the remote ones that events tell of."""
        nodes = as_i32(self.index.find(keys))
        held = [self.index.are_ready(nodes, tier) for tier in self.index.tiers]
        held += [np.fromiter((key in stored for key in keys), bool, len(keys)) for stored in self.stores.values()]
        names = (*self.tiers, *self.stores)
        codes = np.bitwise_or.reduce([each.astype(np.int64) << at for at, each in enumerate(held)]).tolist()
        tiers = {code: tuple(name for at, name in enumerate(names) if code >> at & 1) for code in {*codes}}
        return [tiers[code] for code in codes]


class Announcements(Generic[N]):
    """Which copies of chunks routers were told of, and the names by which they know chunks.

    A name is kept for as long as a tier has its chunk. Nothing is told of chunks without one.

    Where events do not say what routers have to be told, it is found batch by batch: after a `GAP`, after a `RESET` of
    which nobody tells routers, and when routers have dropped all they knew. Each step compares `STEP` chunks with what
    the cache holds at that moment, when all events have been read. Events go on meanwhile, and keep what was compared
    up to date: a chunk that is not reached yet is compared later.

        restart ──► chunks that routers dropped ──► chunks that routers know ──► chunks of the cache ──► done
           ▲                                                                            │
           └───────────────────────── another `GAP`, `RESET` or drop ───────────────────┘
    """

    def __init__(self) -> None:
        self.names: dict[Key, N] = {}
        self._copies: list[dict[Key, int]] = [{} for _ in range(_PARTS)]
        """Which tiers have a chunk, a bit for each of `_tiers`: a set would take 200 bytes. In parts by hash: each is
        small enough to be listed, or to grow, in one batch."""
        self._dropped: list[dict[Key, int]] = []
        """Parts that routers have dropped: what is not held any more loses its name."""
        self._tiers: list[str] = []
        self.is_current = True
        """Whether routers know what the events read so far amount to."""
        self._walk: Iterator[Key] | None = None

    def has(self, key: Key) -> bool:
        """Whether a tier has `key`."""
        return self._part(key).get(key, 0) > 0

    def name(self, key: Key, name: N) -> list[Change[N]]:
        """`key` is known as `name` from now on; what is to be told of copies that tiers had before."""
        is_new, self.names[key] = key not in self.names, name
        copies = self._part(key).setdefault(key, 0)
        return [Change(tier, False, key, name) for tier in self._tiers_of(copies)] if is_new else []

    def changes(self, event: Event) -> list[Change[N]]:
        """What `event` means for routers, as far as it says."""
        key = event.key
        if event.kind in (EventKind.RESET, EventKind.GAP):
            self.restart()
        if key is None:
            return []
        if event.kind in STORING:
            return self._add(key, event.tier)
        if event.kind in (EventKind.REMOVED, EventKind.LAPSED):
            return self._remove(key, event.tier)
        return []

    def restart(self, *, dropped: bool = False) -> None:
        """Compare all chunks with what the cache holds: events do not say what changed, or routers `dropped` all."""
        self.is_current, self._walk = False, None
        if dropped:
            self._dropped += [part for part in self._copies if part]
            self._copies = [{} for _ in range(_PARTS)]

    def compare(self, contents: Contents) -> list[tuple[Key, tuple[str, ...]]]:
        """The next `STEP` chunks to compare, and the tiers that have them, for `settle`. Empty while events wait."""
        if self.is_current or contents.log.has_events:
            return []
        if self._walk is None:
            self._walk = self._keys(contents)
        keys = list(islice(self._walk, STEP))
        if len(keys) < STEP:
            self.is_current, self._walk = True, None
        return list(zip(keys, contents.tiers_of(keys), strict=True))

    def settle(self, compared: Iterable[tuple[Key, tuple[str, ...]]]) -> list[Change[N]]:
        """What is to be told of chunks that were `compared`, once all events before that were."""
        changes: list[Change[N]] = []
        for key, tiers in compared:
            copies, held = self._part(key).get(key, 0), self._bits(tiers)
            if copies != held:  # what is new first: the last copy takes the name along
                changes += [change for tier in tiers for change in self._add(key, tier)]
                changes += [change for tier in self._tiers_of(copies & ~held) for change in self._remove(key, tier)]
            if not held:
                self._part(key).pop(key, None)
                self.names.pop(key, None)
        return sorted(changes, key=itemgetter(0, 1))

    # ------------------------------------------------------------------ inside

    def _keys(self, contents: Contents) -> Iterator[Key]:
        """The chunks to compare."""
        while self._dropped:
            yield from list(self._dropped[-1])
            self._dropped.pop()
        for part in self._copies:
            yield from list(part)
        yield from contents.keys()

    def _part(self, key: Key) -> dict[Key, int]:
        return self._copies[hash(key) >> 40 & _PARTS - 1]  # not the bits by which the part finds it

    def _add(self, key: Key, tier: str) -> list[Change[N]]:
        part, bit = self._part(key), self._bit(tier)
        copies = part.get(key, 0)
        if copies & bit:  # routers may count: nothing is told twice
            return []
        part[key] = copies | bit
        return [Change(tier, False, key, self.names[key])] if key in self.names else []

    def _remove(self, key: Key, tier: str) -> list[Change[N]]:
        part, bit = self._part(key), self._bit(tier)
        copies = part.get(key, 0)
        if not copies & bit:
            return []
        changes = [Change(tier, True, key, self.names[key])] if key in self.names else []
        if copies == bit:
            del part[key]
            self.names.pop(key, None)
        else:
            part[key] = copies & ~bit
        return changes

    def _bit(self, tier: str) -> int:
        if tier not in self._tiers:
            self._tiers.append(tier)
        return 1 << self._tiers.index(tier)

    def _bits(self, tiers: Iterable[str]) -> int:
        return sum(map(self._bit, tiers))

    def _tiers_of(self, copies: int) -> list[str]:
        """The tiers whose bits `copies` has."""
        return [tier for at, tier in enumerate(self._tiers) if copies >> at & 1]
