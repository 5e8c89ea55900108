"""`HostedRemoteTier`: a store that replicas share, whose connections are in a tier host, a process beside the engine.

    scheduler                                        tier host
    KeyedMover ─ HostedRemoteTier ══ SUBMIT, ASK ══►    RemoteTier ── threads ── server, or shared directory
                               ◄═ RESULT, ANSWER ═       │
                  arena ═══════ shared memory ═══════════╧     bytes go between socket and arena

Nothing here waits for the store or for the process, but the start and `close`. While the process is dead or silent,
operations end as `Status.UNAVAILABLE`, and questions without an answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longshore.boundary import Key, Status
from longshore.runtime.tier_host import wire
from longshore.runtime.tier_host.supervisor import PROGRAM
from longshore.runtime.tier_host.tier import HostedTier, TierHostError
from longshore.runtime.tier_host.wire import AWAY, Kind, WireError
from longshore.tiers.arena import Arena
from longshore.tiers.base import KeyedTier, check_question
from longshore.tiers.remote import FAILURE_REASONS, parse_url
from longshore.tiers.remote.format import Namespace

_log = logging.getLogger(__name__)


class HostedRemoteTier(HostedTier, KeyedTier):
    """A `RemoteTier` in a tier host.

    Attributes:
        settings: What the URL says.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        image_bytes: int | Sequence[int],
        arena: Arena,
        namespace: bytes,
        generation: int = 0,
        fixed_weights: bool = False,
        program: Sequence[str] = PROGRAM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """As for `RemoteTier`, with its errors. A process that cannot be started is no error: it is tried again.

        `arena` must be shared. `program` runs as the tier host, for tests.
        """
        self.settings = parse_url(url)
        self._namespace = Namespace(namespace, generation, fixed_weights=fixed_weights)
        super().__init__(name, image_bytes, arena, program, clock, url=url)
        self._asked: dict[int, int] = {}
        """Number of keys of each question without an answer."""
        self._answers: list[tuple[int, tuple[bool, ...] | None]] = []
        self._failures = dict.fromkeys((*FAILURE_REASONS, AWAY), 0)
        try:
            self._open_first()
        except TierHostError as error:
            until = "its blocks are misses until a restarted tier host opens the store"
            _log.error("%s: %s; %s", self.settings, error, until)

    @property
    def generation(self) -> int:
        """The generation last given to `reset`, or to the constructor."""
        return self._namespace.generation

    @property
    def namespace(self) -> bytes:
        """Under which images are stored now."""
        return self._namespace.current

    @property
    def is_unavailable(self) -> bool:
        """Whether the store is left alone, or no process serves it. All operations are misses then."""
        return bool(self._failures[AWAY]) or super().is_unavailable

    @property
    def failures(self) -> Mapping[str, int]:
        """Failures of the store over all processes, and deaths and failed starts of processes."""
        return {reason: count for reason, count in super().failures.items() if reason != AWAY}

    def ask(self, keys: Sequence[Key], generation: int, deadline: float) -> int:
        """Ask which of `keys` the store has. The answer comes by `deadline`, unless the process dies or is stopped."""
        self._check_open()
        check_question(keys, generation, self.generation)
        ticket = self._new_ticket()
        self._asked[ticket] = len(keys)
        if self.is_unavailable or not self._send(Kind.ASK, wire.pack_ask(ticket, generation, deadline, keys)):
            self._answer(ticket, None)
        return ticket

    def answers(self) -> list[tuple[int, tuple[bool, ...] | None]]:
        """Answers since the last call; `None`: it is not known, because the store or the process is away."""
        self._check_process()
        if not self._closed:
            self._receive()
        answers, self._answers = self._answers, []
        return answers

    def reset(self, generation: int, namespace: bytes | None = None) -> None:
        """As `RemoteTier.reset`. Returns at once: what is sent to the process later is of the new generation."""
        self._check_open()
        if self._namespace.reset(generation, namespace, self.settings):
            self._send_generation()

    def weights_changed(self) -> None:
        """Weights have changed: the next `reset` starts a namespace of its own."""
        self._namespace.weights_changed()

    # ------------------------------------------------------------------ inside

    def _open_fields(self) -> dict[str, Any]:
        return {"scope": self.namespace.hex(), "generation": self.generation, "recover": False}

    def _on_opened(self, body: bytes) -> None:
        if self._is_open:
            raise WireError("OPENED received twice")
        self._failures = wire.parse_counts(body, self._failures)
        self._is_open = True
        self._send_generation()  # it may have been told an earlier one

    def _send_generation(self) -> None:
        self._send(Kind.RESET, wire.RESET.pack(self.generation, self.namespace))

    @property
    def _expects_reply(self) -> bool:
        return super()._expects_reply or bool(self._asked)

    def _handle(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.ANSWER:
            ticket, present = wire.parse_answer(body)
            if ticket not in self._asked or (present is not None and len(present) != self._asked[ticket]):
                got = "no answer" if present is None else f"{len(present)} keys"
                raise WireError(f"ANSWER: ticket {ticket}: expected {self._asked.get(ticket, 0)} keys, got {got}")
            self._answer(ticket, present)
        elif kind is not Kind.RESET_DONE:
            super()._handle(kind, body)

    def _end_all(self, status: Status) -> None:
        super()._end_all(status)
        for ticket in list(self._asked):
            self._answer(ticket, None)

    def _answer(self, ticket: int, present: tuple[bool, ...] | None) -> None:
        del self._asked[ticket]
        self._answers.append((ticket, present))
