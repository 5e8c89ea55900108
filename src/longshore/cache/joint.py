"""One match, and one transfer, for all KV cache groups of a request.

    match     how far are all of them served?         what each needs from the tiers is held, by one hold
    onboard   into these device blocks                one job with a section for each run of chunks, so that with
                                                      `by_layer` the groups' layers travel in the model's order

A prefix is of use to all groups or to none: when one chunk cannot be had, nothing is ordered.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key, Section
from longshore.cache.events import EventKind
from longshore.cache.flow import Flow
from longshore.cache.groups import Need, Path, Wanted, longest_served, runs_of
from longshore.cache.holds import Holds
from longshore.cache.jobs import Held
from longshore.cache.jobs import Hold as Record
from longshore.cache.store import Pin
from longshore.cache.types import GroupMatch
from longshore.errors import CacheError


class Joint:
    """Matches and loads of several groups on one `Flow`."""

    def __init__(self, flow: Flow, holds: Holds) -> None:
        self._flow = flow
        self._store = flow.store
        self._holds = holds

    def paths(self, wanted: Sequence[Wanted]) -> list[Path]:
        """What is wanted of each group. Raises `CacheError` unless it is one for each."""
        store, settings = self._store, self._flow.settings
        if not wanted or len(wanted) != len(settings.groups):
            raise CacheError(f"a match is for each of the {len(settings.groups)} groups, got {len(wanted)}")
        return [Path(store.index, store.beginnings, *settings.group(group), each) for group, each in enumerate(wanted)]

    def match(self, paths: Sequence[Path], request: str | None) -> GroupMatch:
        """The longest prefix at which all of `paths` are served, and a hold on what they need."""
        tokens = longest_served(paths)
        needs = tuple(path.need(tokens) for path in paths)
        self._check(paths, needs)
        for group, (path, need) in enumerate(zip(paths, needs, strict=True)):
            self._note(request and f"{request}/{group}", path, need)
        parts = [
            self._hold(group, path, need)
            for group, (path, need) in enumerate(zip(paths, needs, strict=True))
            if need.load or (need.partial and not need.partial.device)
        ]
        hold = self._holds.take(self._flow.new_id(), parts, request, joint=True) if parts else None
        return GroupMatch(tokens, needs, hold)

    def sections(self, record: Record, blocks: Sequence[Sequence[int]]) -> list[Section]:
        """`blocks`, in order of group, as they belong to the held chunks. Raises `CacheError` if they do not fit."""
        per_chunk, held = self._flow.settings.blocks_per_chunk, {part.group: part.blocks for part in record.parts}
        counts = [held.get(group, 0) for group in range(len(self._flow.settings.groups))]
        if [len(each) for each in blocks] != counts:
            raise CacheError(f"the held chunks of each group have {counts} blocks, got {[len(b) for b in blocks]}")
        return [
            Section(
                part.group,
                part.positions[start] * per_chunk,
                tuple(blocks[part.group][start * per_chunk : end * per_chunk]),
            )
            for part in record.parts
            for start, end in runs_of(part.positions)
        ]

    def _check(self, paths: Sequence[Path], needs: Sequence[Need]) -> None:
        """Raise `CacheError` where what is to be loaded is not what it should be, before anything has changed."""
        index = self._store.index
        for path, need in zip(paths, needs, strict=True):
            if path.group.alone:
                index.find_alone([path.keys[at] for at in need.load])
            else:
                for at in {*need.load[:1], *need.load[-1:]}:
                    index.check_link(path.keys, at)
        keys = [path.keys[at] for path, need in zip(paths, needs, strict=True) for at in need.load]
        keys += [need.partial.key for need in needs if need.partial and not need.partial.device]
        if len(set(keys)) != len(keys):
            raise CacheError(f"the groups of a request have different keys, only {len(set(keys))} of {len(keys)} are")

    def _hold(self, group: int, path: Path, need: Need) -> Held:
        store, positions = self._store, list(need.load)
        in_a_row = bool(positions) and positions[-1] - positions[0] < len(positions)
        keys = list(path.keys[positions[0] : positions[-1] + 1]) if in_a_row else [path.keys[at] for at in positions]
        blocks = len(keys) * self._flow.settings.blocks_per_chunk
        if need.partial and not need.partial.device:
            keys.append(need.partial.key)
            positions.append(need.end)
            blocks += -(-need.partial.tokens // path.group.block_size)
        pinned = keys if path.group.alone else keys[-1:]
        pins: list[Pin] = [store.pin(store.index.get(key)) for key in pinned]
        return Held(keys, positions, pins, group, alone=path.group.alone, blocks=blocks)

    def _note(self, request: str | None, path: Path, need: Need) -> None:
        """Count what is missing, and record the request."""
        store = self._store
        if path.group.alone:
            for key in path.keys[max(need.end, path.last_window) :]:
                store.counters.misses[store.watching.miss(key)] += 1
        else:
            store.watching.count_misses(path.keys, need.end)
        if store.log.on:
            asked: tuple[Key, ...] = tuple(path.keys[need.first :])
            store.log.record(EventKind.REQUEST, request=request, keys=asked, length=need.end - need.first)
