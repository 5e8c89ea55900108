"""KV events: which chunks tiers have got and given up, by vLLM's own keys, for routers that listen to them.

Our keys lack the first bytes of vLLM's. So the keys of what is stored are remembered as long as a tier has it; what an
earlier process has stored has no name, and is in no event, until it is stored anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

from longshore.boundary import FILE, HOST, Key
from longshore.cache import Event, EventKind

LIMIT = 1 << 17
"""Events of the cache that are kept until somebody asks: vLLM does at each step."""

_MEDIA = {HOST: Medium.CPU, FILE: Medium.STORAGE}


class Announcer:
    """The names of what the tiers of one engine have."""

    def __init__(self) -> None:
        self._names: dict[Key, OffloadKey] = {}
        self._copies: dict[Key, set[str]] = {}

    def name(self, theirs: Sequence[OffloadKey], ours: Sequence[Key]) -> None:
        """vLLM calls these chunks so."""
        self._names.update(zip(ours, theirs, strict=True))

    def translate(self, events: Iterable[Event]) -> Iterator[OffloadingEvent]:
        """What vLLM is to be told of what has happened, in order."""
        told = [about for event in events if (about := self._about(event)) is not None]
        for (tier, removed), some in groupby(told, key=lambda each: each[:2]):
            keys = [key for _, _, key in some]
            yield OffloadingEvent(keys, _MEDIA[tier], removed, Locality.LOCAL, removal_expected=True)

    def _about(self, event: Event) -> tuple[str, bool, OffloadKey] | None:
        """Tier, whether it was removed there, and the name of a chunk; nothing of what nobody knows a name for."""
        if event.kind is EventKind.RESET:
            self._names.clear()
            self._copies.clear()
        if event.key is None or event.kind not in (EventKind.STORED, EventKind.MOVED, EventKind.REMOVED):
            return None
        name, copies = self._names.get(event.key), self._copies.setdefault(event.key, set())
        removed = event.kind is EventKind.REMOVED
        (copies.discard if removed else copies.add)(event.tier)
        if not copies:
            del self._copies[event.key]
            self._names.pop(event.key, None)
        return None if name is None else (event.tier, removed, name)
