"""Calls of `TieredCache` for blocks: what is complete is committed or offered, what is found is kept or lent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from longshore.boundary import DEVICE, Key, Slot
from longshore.cache.beginnings import Text
from longshore.cache.columns import has_twins, marks
from longshore.cache.core import Core
from longshore.cache.jobs import Held
from longshore.cache.nodes import ROOT
from longshore.cache.retention import Retention
from longshore.cache.retention import check as check_retention
from longshore.cache.sight import At, Sight, nodes_of
from longshore.cache.types import (
    Hold,
    Loan,
    Offload,
)
from longshore.errors import CacheError


class Offering(Core):
    """What an engine hands over, and what it moves by itself."""

    def copy_inside(
        self, sources: Sequence[Slot], blocks: Sequence[int], *, tokens: int | None = None, group: int = 0
    ) -> int:
        """Order copies of device blocks into other device `blocks`, layer by layer; returns the job.

        For partial reuse: `tokens` are the leading tokens to copy of the last block, `None` all. `sources` are slots
        of the group's device pool, one for each block. The tiers have no part in it; the job keeps its place and its
        deadline among all others, and whether it succeeded is known to the mover's `wait_layer`.
        """
        if len(sources) != len(blocks) or not blocks or any(source.tier != DEVICE for source in sources):
            raise CacheError(f"expected a device slot to copy from for each of {len(blocks)} blocks, got {sources}")
        self._device.check(blocks)
        self._device.check(list({source.index for source in sources}))
        self._check_tokens(tokens, group)
        return self._flow.copy_inside(sources, blocks, tokens, group)

    def commit(
        self,
        keys: Sequence[Key],
        blocks: Sequence[int],
        *,
        first: int = 0,
        evicting: bool = False,
        prompt: int | None = None,
        retention: Sequence[Retention] = (),
        group: int = 0,
        text: Text | None = None,
        turn: int | None = None,
    ) -> Offload:
        """Chunks `keys[first:]` are complete on the device, in `blocks`, or about to be evicted from it.

        The write policy decides whether they are offloaded now; their blocks must stay unchanged until the job has
        ended. `keys` is the path from the first chunk of the prompt; what a tier has already is not written again.
        Chunks from position `prompt` on are of the answer. `retention` says what is worth keeping, and `text` which
        tokens the chunks have, for partial matches (`settings.partial`). `turn` is that of the request, from
        `Match.turn`; without one it is that of the last request that began.
        """
        check_retention(retention)
        self._check_first(keys, first)
        expected = (len(keys) - first) * self.settings.blocks_per_chunk
        if len(blocks) != expected:
            raise CacheError(f"{len(keys) - first} chunks have {expected} blocks, got {len(blocks)}")
        self._device.check(blocks)
        return self._storing.store(
            keys,
            first,
            blocks,
            evicting=evicting,
            prompt=prompt,
            retention=retention,
            group=group,
            text=text,
            turn=turn,
        )

    def offer(
        self,
        keys: Sequence[Key],
        *,
        first: int = 0,
        retention: Sequence[Retention] = (),
        group: int = 0,
        patient: bool = False,
        turn: int | None = None,
    ) -> Offload:
        """Which of the chunks `keys[first:]` to store, and where; the host moves the bytes, and reports the job.

        A host that will not move them after all must say so, by `withdraw`. `keys` is the path from the first chunk of
        the prompt. With `patient`, chunks of a path are taken together, or not yet (`Offload.again`), as long as room
        is being made that all of them fit into.
        `turn` is that of the request, as for all calls from `begin` on.
        """
        check_retention(retention)
        self._check_first(keys, first)
        self._device.check(())
        return self._storing.store(
            keys, first, None, evicting=True, retention=retention, group=group, patient=patient, turn=turn
        )

    def slide(self, keys: Sequence[Key], *, group: int = 0) -> None:
        """The window of a request has slid past `keys`, for hosts that do not offer whole paths.

        They go first from now on, unless a match was served from them; what no tier has is ignored.
        """
        if not self.settings.stands_alone(group):
            raise CacheError(f"no window slides past chunks of group {group}: they do not stand alone")
        self._store.sliding.slide([node for node in self._store.index.find_alone(keys) if node])

    def keep(
        self, keys: Sequence[Key] | Sight, *, group: int = 0, request: str | None = None, turn: int | None = None
    ) -> Hold:
        """A hold on chunks that a host has found by `peek`.

        Raises `CacheError` unless a tier has each of them ready.
        """
        self._store.check_turn(turn)
        mine, at = self._asked(keys, group)
        self._store.serve(turn)
        pins = [self._store.pin(node) for node in at.tolist()]
        held = Held(mine, range(len(mine)), pins, group, alone=True)
        return self._holds.take(self._flow.new_id(), [held], request)

    def lend(self, keys: Sequence[Key] | Sight, *, group: int = 0, turn: int | None = None) -> Loan:
        """The host reads chunks from the warmest tier itself, and reports the job.

        Their slots stay as they are until every rank has. One that will not be read is given back by `withdraw`.
        Raises `CacheError` unless each of them is ready there.
        """
        self._device.check(())
        return self._loading.lend(*self._asked(keys, group), turn)

    def _asked(self, keys: Sequence[Key] | Sight, group: int) -> tuple[Sequence[Key], At]:
        """Keys and nodes of chunks of `group` that can be read from some tier; or `CacheError`."""
        index = self._store.index
        mine, at = nodes_of(index, keys)
        if not len(at):
            raise CacheError(f"expected chunks of group {group}, got none")
        lacking = np.flatnonzero((at == ROOT) | (marks(index.reachable)[at] == 0)).tolist()
        if lacking:
            name = mine[lacking[0]].hex()[:12]
            raise CacheError(f"{len(lacking)} of {len(at)} chunks are not ready in any tier: {name} ...")
        if has_twins(at):
            raise CacheError(f"the {len(at)} chunks differ, only {len(np.unique(at))} do")
        if self.settings.stands_alone(group):
            index.check_alone(at)
        self._store.check_pool(at.tolist() if self._store.several_sizes else (), self.settings.pool_of(group))
        return mine, at

    def withdraw(self, job: int) -> None:
        """The host will not move what it was offered or lent, on any rank that has not reported."""
        self._flow.withdraw(job)

    def discard(self, keys: Iterable[Key], tier: str) -> int:
        """Remove the copies of a path in `tier` that nothing holds, reads or needs to be reached; says how many."""
        return self._store.discard(list(keys), self._tier(tier))

    def flush(self) -> bool:
        """Order backups of all that only the host tier has; says whether there is nothing left to order or wait for."""
        self._storing.clean(all_of_host=True)
        return not self._flow.jobs
