"""Tests against real servers. `make remote` installs them and sets LONGSHORE_SERVERS; else nothing here is collected.

A server that cannot be had is a failure, and never a skipped test.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from remotes import IMAGE, PLACES

from longshore.testing import TierHarness
from longshore.testing.local_server import LocalCluster, LocalMooncake, LocalS3, LocalServer
from longshore.testing.tier_harness import span
from longshore.tiers.arena import Arena
from longshore.tiers.remote import open_store

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


@pytest.fixture(scope="session", params=["seaweedfs", "moto"])
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """A server of S3 that all tests share; tests take namespaces of their own."""
    if request.param == "seaweedfs":
        yield request.getfixturevalue("weed")
        return
    with LocalS3(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalS3]:
    """SeaweedFS, which checks access keys."""
    with LocalS3("seaweedfs", tmp_path_factory.mktemp("weed")) as running:
        yield running


@pytest.fixture
def opened() -> Iterator[Callable[..., TierHarness]]:
    """Opens tiers, and closes them at the end."""
    harnesses = []

    def open_harness(url: str, namespace: bytes | None = None, **options: object) -> TierHarness:
        arena, name = Arena(PLACES * span(IMAGE)), namespace or os.urandom(32)
        harness = TierHarness(
            lambda: open_store(url, arena=arena, image_bytes=IMAGE, namespace=name, **options),
            arena,
            by_key=True,
        )
        harnesses.append(harness)
        return harness

    yield open_harness
    for each in harnesses:
        each.tier.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster that tests share which leave it as it was."""
    with LocalCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A cluster of the test's own, whose nodes are stopped and killed, and whose slots move."""
    with LocalCluster(tmp_path / "cluster") as running:
        yield running


@pytest.fixture(scope="session")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMooncake]:
    """A store that tests share which leave it as it was."""
    with LocalMooncake(tmp_path_factory.mktemp("mooncake")) as running:
        yield running


@pytest.fixture
def own_mooncake(tmp_path: Path) -> Iterator[LocalMooncake]:
    """A store of the test's own, to be stopped and killed."""
    with LocalMooncake(tmp_path / "mooncake") as running:
        yield running
