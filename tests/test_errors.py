"""Errors that repeat: each cause is logged, and no cause fills the log."""

from __future__ import annotations

import logging

import pytest

from longshore import errors
from longshore.errors import log_seldom

_log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def _nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_logged", {})


def fail(message: str, *arguments: object, error: Exception | None = None) -> None:
    try:
        raise error or ValueError("a bug")
    except Exception:  # noqa: BLE001 - as those who call it do
        log_seldom(_log, message, *arguments)


def test_errors_of_one_store_do_not_hide_those_of_another(caplog: pytest.LogCaptureFixture) -> None:
    for job, store in enumerate(("a", "a", "b", "a", "b")):
        fail("job %d: store %s failed", job, store)
    fail("job %d: store %s failed", 5, "a", error=KeyError("another"))
    assert caplog.messages == ["job 0: store a failed", "job 2: store b failed", "job 5: store a failed"]


def test_the_memory_of_logged_errors_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(400):
        fail("store %s failed", f"store-{number}")
    fail("store %s failed", "store-399")
    assert len(caplog.messages) == 400
    assert len(errors._logged) == 256
