"""Tiers that are not ours: addressed by key, known only from what they answer, and free to lose what they had.

    unknown ──ask──► asked ──answer──► present or absent ──some seconds later──► unknown
                       └──no answer in time──► unknown, and counted

Nobody waits for an answer: who asks looks at what is known, and may look again when the probe has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from longshore.boundary import Key, Probe, ProbeResult, Status
from longshore.cache.transfers import Flow
from longshore.cache.types import Answer
from longshore.errors import JobError

KNOWN = 1 << 16
"""Keys of one foreign tier whose last answer is remembered; the oldest answers are forgotten first."""


class Foreign:
    """What is known of the tier `name`, and what it was asked."""

    def __init__(self, name: str, flow: Flow) -> None:
        self.name = name
        self._flow = flow
        self._known: dict[Key, tuple[bool, float]] = {}
        """Whether a key was there, and until when that counts."""
        self._sent: dict[Key, None] = {}
        """Keys of which a store was ordered, or is to be: once is enough, as long as nobody finds that one has gone."""
        self._asked: dict[Key, int] = {}
        """Keys under way, by probe."""
        self._probes: dict[int, _UnderWay] = {}

    def has(self, key: Key) -> bool | None:
        """What the last answer said of `key`; `None` without one that still counts."""
        answer = self._known.get(key)
        return answer[0] if answer is not None and self._flow.now < answer[1] else None

    def ask(self, keys: Sequence[Key]) -> list[int]:
        """Have the tier asked for those of `keys` that nothing is known of; the probes that are about one of these.

        It is asked for so many at a time only; keys beyond that are counted, and stay unknown.
        """
        settings, unknown = self._flow.settings, [key for key in keys if self.has(key) is None]
        new = [key for key in unknown if key not in self._asked]
        room = max(0, settings.max_probes - len(self._asked))
        self._flow.store.counters.probes[self.name][Answer.UNASKED] += len(new) - len(new[:room])
        if asked := tuple(new[:room]):
            number, deadline = self._flow.new_id(), self._flow.now + settings.probe_timeout
            probe = Probe(number, self.name, asked, deadline, self._flow.generation, settings.ranks)
            self._flow.outbox.append(probe)
            self._probes[number] = _UnderWay(probe)
            self._asked.update(dict.fromkeys(asked, number))
        return sorted({self._asked[key] for key in unknown if key in self._asked})

    def is_asking(self, probe: int) -> bool:
        """Whether `probe` has not ended."""
        return probe in self._probes

    def check(self, result: ProbeResult) -> None:
        """Raise `JobError` unless `result` is one that is waited for."""
        asked = self._probes[result.probe]
        if result.rank not in asked.waiting:
            raise JobError(f"probe {result.probe} does not wait for rank {result.rank}, only for {asked.waiting}")
        if len(result.present) != len(asked.probe.keys):
            raise JobError(f"probe {result.probe} has {len(asked.probe.keys)} keys, its result {len(result.present)}")

    def hear(self, result: ProbeResult) -> None:
        """One rank has answered. A key is there when all ranks' parts are."""
        asked = self._probes[result.probe]
        asked.waiting.discard(result.rank)
        asked.answered &= result.status is Status.OK
        asked.present = [before and now for before, now in zip(asked.present, result.present, strict=True)]
        if not asked.waiting:
            self._end(self._probes.pop(result.probe))

    def learn(self, key: Key, *, present: bool) -> None:
        """`key` is there, or not, as of now."""
        self._known.pop(key, None)
        self._known[key] = present, self._flow.now + self._flow.settings.probe_life
        if not present:
            self._sent.pop(key, None)
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]

    def was_sent(self, key: Key) -> bool:
        """Whether `key` need not be stored: it is there, or was sent before."""
        return key in self._sent or bool(self.has(key))

    def sending(self, keys: Sequence[Key]) -> None:
        """A store of `keys` is to be ordered."""
        self._sent.update(dict.fromkeys(keys))
        while len(self._sent) > KNOWN:
            del self._sent[next(iter(self._sent))]

    def not_sending(self, keys: Sequence[Key]) -> None:
        """A store of `keys` is not to be ordered after all."""
        for key in keys:
            self._sent.pop(key, None)

    def forget(self, key: Key) -> None:
        """What was known of `key`, or thought of it, has turned out not to be so."""
        self._known.pop(key, None)
        self._sent.pop(key, None)

    def clear(self) -> None:
        """Nothing of what was known counts any more, nor what is still to be answered."""
        self._known.clear()
        self._sent.clear()
        self._asked.clear()

    def check_integrity(self) -> None:
        """Raise `JobError` where a key waits for a probe that does not ask for it."""
        for key, number in self._asked.items():
            if number not in self._probes or key not in self._probes[number].probe.keys:
                raise JobError(f"probe {number} is waited for, and does not ask for chunk {key.hex()[:12]}")

    def _end(self, asked: _UnderWay) -> None:
        if asked.probe.generation != self._flow.generation:
            return
        counts = self._flow.store.counters.probes[self.name]
        for key, present in zip(asked.probe.keys, asked.present, strict=True):
            del self._asked[key]
            if asked.answered:
                self.learn(key, present=present)
            answer = (Answer.PRESENT if present else Answer.ABSENT) if asked.answered else Answer.NONE
            counts[answer] += 1


class _UnderWay:
    """A probe under way: the ranks that have not answered, and what the others said."""

    __slots__ = ("answered", "present", "probe", "waiting")

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.waiting = set(range(probe.ranks))
        self.present = [True] * len(probe.keys)
        self.answered = True
