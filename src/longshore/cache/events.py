"""Events of chunks, in order, in a bounded log: for routers, which are told what tiers have, and for diagnosis.

    ordered ──► stored ──► moved (copied to another tier) ──► removed (from one tier; cause, and for which chunk)
         └───► failed                                         reset (from all)
    shared (a store that replicas share has confirmed it) ──► lapsed (an answer of that store says that it is gone)
    request: keys that a lookup requested and found ──► loaded: those that arrived on the device

Nothing is recorded without a limit. A reader that is too slow gets a `GAP` in place of the oldest events, with their
number; what is there then is told by `TieredCache.ready`.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

from longshore.boundary import Key, StoredChunks
from longshore.cache.counters import MissReason
from longshore.cache.nodes import Nodes
from longshore.errors import TraceError

EVICTED = "evicted"
"""The cause of evictions."""

RESET = "reset"
"""The cause of removals by a reset that keeps tiers."""

WEIGHTS = "weights"
"""The cause of a reset because weights have changed."""


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
        self.by: Key | None = None
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
        by = self.by if cause == EVICTED else None
        self.record(kind, [index.key[node]], tier=names[tier], cause=cause, by=by)

    def loaded(
        self, asked: Iterable[tuple[str | None, Sequence[Key]]], arrived: int, misses: Sequence[MissReason]
    ) -> None:
        """How far what requests `asked` for came onto the device: the first `arrived` of all their keys."""
        causes = iter(misses)
        for request, keys in asked:
            length = min(arrived, len(keys))
            arrived -= length
            cause = next(causes, MissReason.AFTER_MISS).value if length < len(keys) else ""
            self.record(EventKind.LOADED, request=request, keys=tuple(keys), length=length, cause=cause)
            if length < len(keys):
                causes = iter(())

    def pull(self, limit: int | None = None) -> list[Event]:
        """The oldest events that nobody has pulled, at most `limit`; before them a `GAP` if some had to be dropped."""
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


class Announcements(Generic[N]):
    """Which tiers have which of the chunks that have a name outside.

    A name is kept for as long as a tier has its chunk. Nothing is told of chunks without one.
    """

    def __init__(self) -> None:
        self.names: dict[Key, N] = {}
        self._copies: dict[Key, int] = {}
        """Which tiers have a chunk, a bit for each of `_tiers`: a set would take 200 bytes."""
        self._tiers: list[str] = []

    def has(self, key: Key) -> bool:
        """Whether a tier has `key`."""
        return key in self._copies

    def name(self, key: Key, name: N) -> list[Change[N]]:
        """`key` is known as `name` from now on; what is to be told of copies that tiers had before."""
        is_new, self.names[key] = key not in self.names, name
        return [Change(tier, False, key, name) for tier in self._having(key)] if is_new else []

    def changes(self, event: Event) -> list[Change[N]]:
        """What `event` means for routers. A reset removes everything."""
        key = event.key
        if event.kind is EventKind.RESET:
            return self.clear()
        if key is None:
            return []
        if event.kind in (EventKind.STORED, EventKind.MOVED, EventKind.SHARED):
            return self._add(key, event.tier)
        if event.kind in (EventKind.REMOVED, EventKind.LAPSED):
            return self._remove(key, event.tier)
        return []

    def again(self) -> list[Change[N]]:
        """All that was announced, for routers that have dropped it."""
        named = [(key, tier) for key in self._copies if key in self.names for tier in self._having(key)]
        return [Change(tier, False, key, self.names[key]) for key, tier in sorted(named, key=itemgetter(1))]

    def reconcile(self, ready: Iterable[tuple[str, Key]]) -> list[Change[N]]:
        """Events are missing, and these copies are `TieredCache.ready`: what has changed.

        Copies in stores are withdrawn.
        """
        there = {(key, tier): None for tier, key in ready}
        known = {(key, tier): None for key in self._copies for tier in self._having(key)}
        changes = [change for key, tier in known if (key, tier) not in there for change in self._remove(key, tier)]
        return changes + [change for key, tier in there if (key, tier) not in known for change in self._add(key, tier)]

    def clear(self) -> list[Change[N]]:
        """Forget everything, names included; the removals of what was announced."""
        known = [(key, tier) for key in self._copies for tier in self._having(key)]
        removals = [change for key, tier in known for change in self._remove(key, tier)]
        self.names.clear()
        return removals

    def _add(self, key: Key, tier: str) -> list[Change[N]]:
        copies, bit = self._copies.get(key, 0), self._bit(tier)
        if copies & bit:  # routers may count: nothing is told twice
            return []
        self._copies[key] = copies | bit
        return [Change(tier, False, key, self.names[key])] if key in self.names else []

    def _remove(self, key: Key, tier: str) -> list[Change[N]]:
        copies, bit = self._copies.get(key, 0), self._bit(tier)
        if not copies & bit:
            return []
        changes = [Change(tier, True, key, self.names[key])] if key in self.names else []
        if copies == bit:
            del self._copies[key]
            self.names.pop(key, None)
        else:
            self._copies[key] = copies & ~bit
        return changes

    def _bit(self, tier: str) -> int:
        if tier not in self._tiers:
            self._tiers.append(tier)
        return 1 << self._tiers.index(tier)

    def _having(self, key: Key) -> list[str]:
        """The tiers that have `key`, in alphabetical order."""
        copies = self._copies.get(key, 0)
        return sorted(tier for at, tier in enumerate(self._tiers) if copies >> at & 1)
