"""The tiers' books: slots, index, eviction orders and backlog, changed together so that they never disagree.

Everything above (`transfers`, `manager`) goes through these few verbs; each leaves the books whole:

    place    slots for chunks that a job will fill            FREE    -> FILLING
    arrive   the job filled it                                FILLING -> READY
    fail, lose  its bytes are no good                         any -> FREE or DRAINING, its descendants too
    unread   a reader has let go of it                        DRAINING -> FREE when it was the last

A chunk is a node of the index here, a copy is (node, tier), and jobs know slots. Views of the books are in
`inspect`, evictions in `evict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

import numpy as np
import numpy.typing as npt

from longshore.boundary import DEVICE, Key, Slot, Status, addresses
from longshore.cache.backlog import Backlog
from longshore.cache.columns import column, marks, numbers, once
from longshore.cache.events import EVICTED, RESET, EventKind, EventLog
from longshore.cache.eviction import EvictionPolicy
from longshore.cache.eviction.hit_rates import Return, Returns
from longshore.cache.eviction.partitioned import Sized
from longshore.cache.index import Index
from longshore.cache.nodes import ORPHANS, ROOT
from longshore.cache.partial import PartialPrefixes
from longshore.cache.pool import DRAINING, FILLING, FREE, READY, SlotPool
from longshore.cache.priorities import Priorities, WindowMarks
from longshore.cache.types import Counters, MissReason, Run
from longshore.errors import CacheError

_NOWHERE = 255
"""No tier has this number."""


@dataclass(slots=True)
class Level:
    """One owned tier, as the control plane sees it; warmer levels have lower numbers."""

    name: str
    pool: SlotPool
    make_policy: type[EvictionPolicy]


class Pin:
    """Keeps a node, and with it all its ancestors, from eviction. `node` is `ROOT` once it was lost all the same."""

    __slots__ = ("node",)

    def __init__(self, node: int) -> None:
        self.node = node


class Store:
    """Slots, index, eviction orders and backlog of all tiers."""

    def __init__(
        self,
        levels: Sequence[Level],
        counters: Counters,
        *,
        thresholds: Sequence[int],
        events: int,
        token_width: int,
    ) -> None:
        self.levels = list(levels)
        self.counters = counters
        self.pools = [level.pool for level in levels]
        self.several_sizes = len(self.pools[0].slabs.image_bytes) > 1
        self.pins: dict[int, set[Pin]] = {}
        self.thresholds = thresholds
        self.last = len(levels) - 1
        """The coldest tier."""
        self.log = EventLog(events)
        self._token_width = token_width
        self.returns = Returns()
        self.turn = self.served = 0
        """The last turn that was drawn, and that of the request that is served."""
        self.changes = 0
        """Grows with all that may let a copy be evicted, or copied down, that could not be before, or frees slots."""
        self._begin()

    def _begin(self) -> None:
        """Empty books over the pools as they are."""
        self.index = Index(self.pools)
        self.policies = [self._make_policy(level) for level in self.levels]
        self.backlog = Backlog(self.index, self.thresholds)
        self.priorities = Priorities(
            self.index,
            self.policies,
            [level.make_policy for level in self.levels],
            self._serving,
        )
        self.windows = WindowMarks(self.index, self.policies)
        self.partials = PartialPrefixes(self.index, self._token_width)
        self.seen = bytearray()
        """1 for nodes that were peeked at in this step."""
        self._condemned: list[tuple[int, int]] = []
        """Tiers and slots of unusable copies that are lost when the step ends."""
        self.warm: set[int] = set()
        """Nodes whose copies stay in the warmest tier, for a prefetch that room is short for."""
        self.fit()
        for policy in self.policies:
            policy.begin(self.turn)

    def _serving(self) -> tuple[int, int]:
        return self.served, self.returns.of(self.served)

    def _make_policy(self, level: Level) -> EvictionPolicy:
        names, slabs = self.index.key, level.pool.slabs
        if not self.several_sizes:
            return level.make_policy(level.pool.capacity, names)
        parts = [level.make_policy(slabs.slabs * images, names) for images in slabs.images]
        return Sized(level.pool.capacity, names, parts, self.index.pools_of)

    def order(self, tier: int, pool: int) -> EvictionPolicy:
        """The eviction policy of one image size of a tier."""
        policy = self.policies[tier]
        return policy.part(pool) if isinstance(policy, Sized) else policy

    def fit(self) -> None:
        """Give all books room for the nodes that the index has now."""
        for policy in self.policies:
            policy.grow(self.index.size)
        self.backlog.grow(self.index.size)
        self.windows.grow(self.index.size)
        self.partials.grow(self.index.size)
        self.priorities.grow(self.index.size)
        self.seen.extend(bytes(self.index.size - len(self.seen)))

    def slot(self, tier: int, index: int) -> Slot:
        """The address of a slot."""
        return Slot(self.levels[tier].name, self.pools[tier].pool_of(index), index)

    def addresses(self, tier: int, slots: Sequence[int]) -> list[Slot]:
        """The addresses of many slots of one tier."""
        name, pool_of = self.levels[tier].name, self.pools[tier].pool_of
        if self.several_sizes:
            return [Slot(name, pool_of(slot), slot) for slot in slots]
        return list(addresses(name, 0, slots))

    def is_of_one_pool(self, tier: int, slots: Sequence[int]) -> bool:
        """Whether no two of these slots are of different pools."""
        return not self.several_sizes or len(set(map(self.pools[tier].pool_of, slots))) < 2

    def runs(self, nodes: Sequence[int]) -> tuple[Run, ...]:
        """Where `nodes` are, as runs by the warmest tier that has them ready."""
        at = np.array(nodes, np.int32)
        if len(at) and np.count_nonzero(self.index.are_ready(at, 0)) == len(at):
            return (Run(self.levels[0].name, len(at)),)
        warmest = np.full(len(at), _NOWHERE, np.uint8)
        for tier in reversed(self.index.tiers):
            slots = column(self.index.slot[tier])[at]
            there = slots >= 0
            there[there] = marks(self.pools[tier].state)[slots[there]] == READY
            warmest[there] = tier
        runs = ((tier, len(list(run))) for tier, run in groupby(warmest.tobytes()))
        return tuple(Run(self.levels[tier].name, chunks) for tier, chunks in runs if tier != _NOWHERE)

    def miss(self, key: Key) -> MissReason:
        """Why a request that got no further than to some chunk before `key` does without it."""
        index = self.index
        node = index.get(key)
        if not node:
            return MissReason.ABSENT
        return MissReason.IN_FLIGHT if index.warmest_ready(node) < 0 else MissReason.BEHIND

    def count_misses(self, keys: Sequence[Key], end: int, known: int, foreign: int = 0) -> None:
        """A request got no further than to before `keys[end]`; a tier will have what leads to before `keys[known]`.

        So many of the rest a foreign tier is known to have. Orphans may be among it.
        """
        misses = self.counters.misses
        if self.index.orphans:
            known = len(keys)
        for key in keys[end:known]:
            misses[self.miss(key)] += 1
        misses[MissReason.ABSENT] += len(keys) - known - foreign
        misses[MissReason.FOREIGN] += foreign

    # ------------------------------------------------------------------ arrivals

    def place(self, keys: Sequence[Key], before: Key | None, job: int, pool: int) -> list[int]:
        """Slots of the warmest tier for `keys`, which follow the key `before` and are in no tier, for `job` to fill.

        The caller has made room in `pool`, and asked `Index.follow` about the keys.
        """
        slots, index = self.pools[0].allocate(len(keys), pool), self.index
        parent = ROOT if before is None else index.get(before) or ORPHANS
        nodes = index.link(parent, keys, 0, slots)
        if before is not None and parent == ORPHANS:
            index.wait(nodes[0], before)
        if index.depth[nodes[0]] < 0:
            self.priorities.sink(nodes)
        if self.windows.used:
            self.windows.enter(nodes)
        self.pools[0].writer.update(zip(slots, repeat(job), strict=False))
        return slots

    def place_alone(self, keys: Sequence[Key], job: int, pool: int) -> list[int]:
        """The same for `keys` that stand alone, of which the caller has asked `Index.find_alone`."""
        slots = self.pools[0].allocate(len(keys), pool)
        self.windows.enter(self.index.link_alone(keys, 0, slots))
        self.pools[0].writer.update(zip(slots, repeat(job), strict=False))
        return slots

    def place_copies(self, nodes: Sequence[int], tier: int, job: int) -> list[int]:
        """Slots in `tier` for other copies of `nodes`, parents first, for `job` to fill. The caller has made room."""
        pool, slots = self.pools[tier], self._slots_for(nodes, tier)
        try:
            self.index.add_copies(nodes, tier, slots)
        except CacheError:
            for slot in slots:
                pool.free(slot)
            raise
        pool.writer.update(zip(slots, repeat(job), strict=False))
        if clean := self.backlog.note_all(nodes):
            self.reconsider(np.array(clean, np.int32))
        return slots

    def _slots_for(self, nodes: Sequence[int], tier: int) -> list[int]:
        """A slot in `tier` for each of `nodes`, of the pool that it is in."""
        pool = self.pools[tier]
        if not self.several_sizes:
            return pool.allocate(len(nodes))
        return [slot for node in nodes for slot in pool.allocate(1, self.index.pool_of(node))]

    def arrive(self, tier: int, slots: Sequence[int]) -> list[int]:
        """The writer put all bytes in place in these slots, of which the last is to go first; as `land`."""
        pool, writer = self.pools[tier], self.pools[tier].writer
        for slot in slots:
            del writer[slot]
        at = numbers(slots)
        draining = marks(pool.state)[at] == DRAINING
        wanted = at[~draining]
        pool.move_all(wanted, FILLING, READY)
        landed = self.settle_in(column(pool.node)[wanted].tolist(), tier)
        for slot in at[draining].tolist():
            self._settle(tier, slot)
        return landed

    def settle_in(self, nodes: Sequence[int], tier: int) -> list[int]:
        """Copies have become ready; parents come before children. As `land`."""
        if self.log.on:
            self.log_arrivals(nodes, tier)
        leaf = bool(nodes) and not any(self.index.children(nodes[-1]))
        if tier:
            self.policies[tier].insert_copies(nodes[::-1], leaf=leaf)
        else:
            self.policies[0].insert(nodes[::-1], leaf=leaf)
            self._note_elsewhere(numbers(nodes)[::-1], leaf=leaf)
        if self.several_sizes:
            slots = self.index.slot[tier]
            self.pools[tier].note_use([slots[node] for node in reversed(nodes)])
        news = self.index.reveal(nodes)
        if self.windows.used:
            self.windows.settle(nodes, tier)
        if self.last:
            self.tell_backlog(nodes, tier)
            self.reconsider(np.array(nodes, np.int32), apart_from=tier)
        return self.land(news)

    def land(self, nodes: Sequence[int]) -> list[int]:
        """Orphans that wait for one of `nodes` follow it, as far as they may; those that were orphans until now."""
        landed = self.index.attach_orphans(nodes)
        if landed:
            self.priorities.land(landed)
            self.backlog.arrived(landed)
        return landed

    def tell_backlog(self, nodes: Sequence[int], tier: int) -> None:
        """Copies have become ready: what is dirty, and what may be copied down, may have changed."""
        self.backlog.arrived(nodes)
        if tier and nodes:
            self.backlog.backed_up(nodes, tier)

    # ------------------------------------------------------------------ losses

    def fail(self, tier: int, slot: int, fault: Status) -> None:
        """The writer has ended without putting the bytes in place."""
        pool = self.pools[tier]
        del pool.writer[slot]
        pool.fault[slot] = fault
        if pool.state[slot] == DRAINING:
            self._settle(tier, slot)
        else:
            self.lose(pool.node[slot], tier, fault.value)

    def backup_failed(self, node: int) -> None:
        """A copy of `node` to a colder tier has ended without success: it is not tried again until `node` is used."""
        if self.backlog.fail(node):
            self._reconsider(node)

    def refuse(self, nodes: Sequence[int]) -> int:
        """The tier below takes no copy of `nodes`, nor of what waits for them, until they are used again; how many."""
        refused = self.backlog.refuse(nodes)
        self.reconsider(numbers(refused))
        return len(refused)

    def unread(self, tier: int, slots: Sequence[int]) -> None:
        """Readers have let go of these slots, which are distinct."""
        pool = self.pools[tier]
        at, readers = numbers(slots), column(pool.readers)
        readers[at] -= 1
        idle = at[readers[at] == 0]
        state = marks(pool.state)[idle]
        self.policies[tier].release(column(pool.node)[idle[state == READY]].tolist())
        for slot in idle[state == DRAINING].tolist():
            self._settle(tier, slot)

    def condemn(self, tier: int, slot: int, fault: Status) -> None:
        """A reader has let go of a slot, whose bytes it found unusable.

        A copy in a colder tier is lost at the end of the step if host memory has chunks behind it that were looked at
        in this step: what was promised can still be read.
        """
        pool = self.pools[tier]
        pool.readers[slot] -= 1
        pool.fault.setdefault(slot, fault)
        if pool.state[slot] == DRAINING:
            self._settle(tier, slot)
        elif tier and any(not where and self.seen[each] for each, where in self.index.orphaned_by(pool.node[slot], -1)):
            self._condemned.append((tier, slot))
        else:
            self.lose(pool.node[slot], tier, fault.value)

    def lose_condemned(self) -> None:
        """The step is over: lose the copies that were found unusable in it and kept for what is behind them."""
        condemned, self._condemned = self._condemned, []
        for tier, slot in condemned:
            pool = self.pools[tier]
            if pool.state[slot] == READY and slot in pool.fault:
                self.lose(pool.node[slot], tier, pool.fault[slot].value)

    def lose(self, node: int, tier: int, cause: str) -> None:
        """Take a copy, and what would be out of reach without it, out of the index.

        A copy that is being filled from the one that is lost cannot become good, and goes too.
        """
        for where in self._take_out(node, tier, cause):
            self.counters.lost[self.levels[where].name] += 1

    def _take_out(self, node: int, tier: int, cause: str) -> list[int]:
        """The same, uncounted; the tiers of the copies that went."""
        index = self.index
        others = [t for t in index.tiers if t != tier and index.slot[t][node] >= 0]
        if not any(index.is_ready(node, t) for t in others):
            doomed, left = [*others, tier], -1
        else:
            doomed, left = [tier], others[-1]
        copies = [*reversed(index.orphaned_by(node, left)), *((node, t) for t in doomed)]
        for each, where in copies:
            self.detach(each, where, cause=cause)
        return [where for _, where in copies]

    def clear(self) -> None:
        """Forget every chunk. Slots that jobs still touch drain."""
        if self.log.on:
            self.log.record(EventKind.RESET)
        for pool in self.pools:
            pool.clear()
        for pins in self.pins.values():
            for pin in pins:
                pin.node = ROOT
        self.pins.clear()
        self.index.gone = -1  # nothing that was seen in it is there any more
        self._begin()

    def keep_from(self, first: int) -> None:
        """Forget what is in tiers warmer than tier `first`, and what is on its way into any tier."""
        self.keep_warm(())
        for tier, pool in enumerate(self.pools):
            for slot in list(pool.writer):
                if pool.state[slot] == FILLING:
                    self._take_out(pool.node[slot], tier, RESET)
        for tier, pool in enumerate(self.pools[:first]):
            for node in sorted(filter(None, pool.node), key=lambda node: -self.index.depth[node]):
                self.detach(node, tier, cause=RESET)

    # ------------------------------------------------------------------ use

    def pin(self, node: int) -> Pin:
        """Keep `node` from eviction until `unpin`."""
        pin = Pin(node)
        self.pins.setdefault(node, set()).add(pin)
        return pin

    def is_kept(self, node: int) -> bool:
        """Whether a hold, or a look at it in this step, keeps the last copy of `node`."""
        return node in self.pins or bool(self.seen[node])

    def unpin(self, pin: Pin) -> None:
        """Let go of a node; one that was lost meanwhile has been let go of."""
        node = pin.node
        if node == ROOT:
            return
        pin.node = ROOT
        pins = self.pins[node]
        pins.discard(pin)
        if not pins:
            del self.pins[node]
            self._reconsider(node)

    def keep_warm(self, nodes: Iterable[int]) -> None:
        """From now on the copies of `nodes` in the warmest tier are not evicted, and those kept before may be."""
        before, self.warm = self.warm, set(nodes)
        self.reconsider(np.array(sorted(before - self.warm), np.int32))

    def check_pool(self, nodes: Sequence[int], pool: int) -> None:
        """Raise `CacheError` if one of `nodes` (0 is nobody) is of another pool."""
        if self.several_sizes:
            for node in nodes:
                if node and self.index.pool_of(node) != pool:
                    key = self.index.key[node].hex()[:12]
                    raise CacheError(f"chunk {key} has images of pool {self.index.pool_of(node)}, not {pool}")

    def room_in_all(self, tier: int) -> int:
        """How many chunks `tier` has room for, with those that it has; more are of the largest size, if there are any.

        What is being filled counts as had.
        """
        pool = self.pools[tier]
        if not self.several_sizes:
            return pool.capacity
        largest = pool.slabs.images.index(min(pool.slabs.images))
        return len(self.policies[tier]) + len(pool.writer) + pool.room(largest)

    def begin(self, keys: Sequence[Key], known: int, said: Return | None = None) -> int:
        """A request for the path `keys`, of which the first `known` are in some tier, begins; it draws this turn.

        Its host has `said` this about its return.
        """
        self.turn = self.served = self.turn + 1
        last = self.index.get(keys[known - 1]) if known else ROOT
        hint = self.returns.begin(self.turn, self.log.now, said)
        for policy in self.policies:
            policy.begin(self.turn, len(keys), last, keys[known:], hint)
        return self.turn

    def check_turn(self, turn: int | None) -> None:
        """Raise `CacheError` for a turn that was not drawn."""
        if turn is not None and not (isinstance(turn, int) and 0 < turn <= self.turn):
            raise CacheError(f"expected a turn that a lookup has said, of which {self.turn} were drawn, got {turn!r}")

    def serve(self, turn: int | None) -> None:
        """What follows is done for the request of this turn, or for the last one that began."""
        turn = self.turn if turn is None else turn
        if turn != self.served:
            self.served = turn
            for policy in self.policies:
                policy.begin(turn, hint=self.returns.of(turn))

    def touch(self, nodes: Sequence[int]) -> None:
        """The chunks of a path, tail first, were used by the request that is served: heads stay longest."""
        if not nodes:
            return
        used = numbers(nodes)
        for pool, policy, slots in zip(self.pools, self.policies, self.index.slot, strict=True):
            at = column(slots)[used]
            live = at >= 0
            ready = marks(pool.state)[at[live]] == READY
            policy.touch(used[live][ready].tolist())
            if self.several_sizes:
                pool.note_use(at[live][ready].tolist())
        self._note_elsewhere(used)
        if self.last:
            dirty = sum(self.backlog.counts)
            self.backlog.use(nodes)
            self.changes += self.several_sizes or sum(self.backlog.counts) != dirty

    # ------------------------------------------------------------------ events

    def log_arrivals(self, nodes: Sequence[int], tier: int) -> None:
        """Record that copies have become ready."""
        index, names = self.index, [level.name for level in self.levels]
        for node in nodes:
            others = [t for t in index.tiers if t != tier and index.is_ready(node, t)]
            kind = EventKind.MOVED if others else EventKind.STORED
            # A copy goes down from the tier above, and comes up from the warmest that had it.
            source = names[max((t for t in others if t < tier), default=others[0])] if others else ""
            (parent,) = index.before((node,))
            self.log.record(kind, [index.key[node]], tier=names[tier], parent=parent, source=source)

    def log_loss(self, node: int, tier: int, cause: str) -> None:
        """Record that a copy leaves, or will not come."""
        kind = EventKind.REMOVED if self.index.is_ready(node, tier) else EventKind.FAILED
        by = self.log.by if cause == EVICTED else None
        self.log.record(kind, [self.index.key[node]], tier=self.levels[tier].name, cause=cause, by=by)

    def log_device(self, came: Sequence[tuple[Key, Key | None]], gone: Sequence[Key], cause: str) -> None:
        """Record what somebody else's books say of the device."""
        warmest = [self.index.warmest_ready(self.index.get(key)) for key, _ in came]
        for key in gone:
            self.index.get(key)
        if not self.log.on:
            return
        for (key, parent), tier in zip(came, warmest, strict=True):
            source = self.levels[tier].name if tier >= 0 else ""
            kind = EventKind.MOVED if source else EventKind.STORED
            self.log.record(kind, [key], tier=DEVICE, parent=parent, source=source)
        self.log.record(EventKind.REMOVED, gone, tier=DEVICE, cause=cause)

    # ------------------------------------------------------------------ inside

    def _note_elsewhere(self, used: npt.NDArray[np.int32], *, leaf: bool = False) -> None:
        """Tell the tiers below the warmest of uses, tail first, of what they have not; a `leaf` ends a prompt."""
        for tier in self.index.tiers[1:]:
            slots = column(self.index.slot[tier])[used]
            there = slots >= 0
            there[there] = marks(self.pools[tier].state)[slots[there]] == READY
            if not there.all():
                self.policies[tier].record_uses(once(used[~there]).tolist(), leaf=leaf and not there[0])

    def reconsider(self, at: npt.NDArray[np.int32], *, apart_from: int = -1) -> None:
        """Something that kept nodes from going may have changed, in all tiers but one."""
        at = once(at)
        self.changes += bool(len(at))
        for tier, policy in enumerate(self.policies):
            if tier != apart_from:
                slots = column(self.index.slot[tier])[at]
                live = at[slots >= 0]
                policy.release(live[marks(self.pools[tier].state)[slots[slots >= 0]] == READY].tolist())

    def _reconsider(self, node: int) -> None:
        """The same for one node."""
        self.changes += 1
        for tier, policy in enumerate(self.policies):
            if self.index.is_ready(node, tier) and policy.is_held(node):
                policy.release((node,))

    def _note(self, node: int) -> None:
        """The copies of `node` have changed: it may be dirty now, or clean."""
        if self.backlog.note(node):
            self._reconsider(node)

    def detach(self, node: int, tier: int, *, cause: str) -> None:
        """Take a copy out of all books, and give its slot back."""
        index, pool = self.index, self.pools[tier]
        slot, parent = index.slot[tier][node], index.parent[node]
        if self.log.on:
            self.log_loss(node, tier, cause)
        if pool.state[slot] == READY:
            self.policies[tier].remove(node, evicted=index.key[node] if cause == EVICTED else None)
        gone = index.drop_copy(node, tier)
        pool.move(slot, DRAINING if pool.is_busy(slot) else FREE)
        if gone:
            self.forget((node,))
        if gone and self.pins:
            for pin in self.pins.pop(node, ()):
                pin.node = ROOT
        if gone:
            self.seen[node] = 0
            self.warm.discard(node)
            self.backlog.forget(node)
        else:
            if cause == EVICTED:
                self.counters.demotions[self.levels[tier].name] += 1
            self.backlog.exposed(node)
            self._note(node)
            self._reconsider(node)
            if before := index.orphans.get(node):  # which may lie warmer now
                self.land((index.get(before),))
        if parent > ORPHANS and not index.reach[tier][parent]:
            self._reconsider(parent)

    def forget(self, nodes: Sequence[int]) -> None:
        """`nodes` are in no tier any more: what is known of them beside the index is known no longer."""
        self.changes += 1
        if self.priorities.used:
            self.priorities.forget(nodes)
        if self.partials.on:
            self.partials.forget(nodes)

    def _settle(self, tier: int, slot: int) -> None:
        """Free a slot that drains, once no job touches it any more."""
        if not self.pools[tier].is_busy(slot):
            self.pools[tier].move(slot, FREE)
