"""A circuit breaker for one server: a server that does not answer is left alone, and asked again in the background.

    closed ──3 failures in a row──► open ──the check answers, and the pause is over──► closed

While it is open, requests end at once and a check runs each second. A server that fails again soon after it has come
back is flapping: then requests pause for at least 1 s, 2 s, 4 s ... 30 s, whatever the checks say. It is not the first
failure that costs a pause, so a server that restarts is used again within about a second of its return.
"""

from __future__ import annotations

FAILURES = 3
"""Failures in a row that open the breaker."""

CHECK_SECONDS = 1.0
"""Between two checks of a server while the breaker is open."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds for which requests of a server that flaps pause: first, and at most."""

STABLE = 60.0
"""Seconds without opening after which a server does not count as flapping any more."""


class CircuitBreaker:
    """Decides on clock readings that its caller passes, in seconds. Not thread-safe.

    Attributes:
        is_open: Whether requests must end at once.
        opened: How often it has opened.
    """

    __slots__ = ("_check_at", "_closed_at", "_failures", "_pause", "_threshold", "_until", "is_open", "opened")

    def __init__(self, failures: int = FAILURES) -> None:
        self.is_open = False
        self.opened = 0
        self._threshold = failures
        self._failures = 0
        self._pause = 0.0
        self._closed_at: float | None = None
        self._check_at = self._until = 0.0

    def succeeded(self) -> None:
        """A request was answered. It changes nothing while the breaker is open: that request is an old one."""
        self._failures = 0

    def failed(self, now: float, times: int = 1) -> bool:
        """Requests failed; returns whether this opens the breaker."""
        self._failures += times
        if self.is_open or self._failures < self._threshold:
            return False
        self.is_open = True
        self.opened += 1
        flaps = self._closed_at is not None and now - self._closed_at < STABLE
        self._pause = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE) if flaps else 0.0
        self._until = now + self._pause
        self._check_at = now + CHECK_SECONDS
        return True

    def check_due(self, now: float) -> float:
        """Seconds until the next check of an open breaker; at most 0: it is due."""
        return self._check_at - now

    def checked(self, now: float, *, answers: bool) -> bool:
        """A check has ended; returns whether this closes the breaker."""
        self._check_at = now + CHECK_SECONDS
        if not self.is_open or not answers or now < self._until:
            return False
        self.is_open = False
        self._failures = 0
        self._closed_at = now
        return True
