"""Tests against real servers. `make remote` installs them and sets LONGSHORE_SERVERS; else nothing here is collected.

A server that cannot be had is a failure, and never a skipped test.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from longshore.testing.local_server import LocalServer

if "LONGSHORE_SERVERS" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session", params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """A server that all tests share, on TCP and on a unix socket; tests take namespaces of their own."""
    with LocalServer(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[LocalServer]:
    """A Valkey server of the test's own, to be stopped and killed."""
    with LocalServer("valkey", tmp_path / "server") as running:
        yield running
