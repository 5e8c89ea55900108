"""These tests run where SGLang is installed: `make sglang` sets up such an environment, and fails where it cannot."""

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

_found = find_spec("sglang")
_is_installed = (
    _found is not None and _found.origin is not None
)  # this very directory looks like a package of that name
collect_ignore_glob = [] if _is_installed else ["test_*"]

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
_MOST_SERVERS = (
    "test_sglang_models.py",
    "test_sglang_lora.py",
    "test_sglang_ranks.py",
    "test_sglang_bench.py",
    "test_sglang_stores.py",
    "test_sglang_server.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose servers take longest go first: else the last process would run alone."""
    items.sort(key=lambda item: item.path.name not in _MOST_SERVERS)


if _is_installed:
    from sglang_kit import write_model
    from storage_kit import Rig

    @pytest.fixture(scope="session")
    def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_model(tmp_path_factory.mktemp("model"))

    @pytest.fixture
    def rigs(model: Path, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
        """Makes rigs over the same files, and closes them."""
        made: list[Rig] = []

        def make(under: str = "tier", **named: object) -> Rig:
            made.append(Rig(model, tmp_path / under, **named))  # type: ignore[arg-type]
            return made[-1]

        make.made = made  # type: ignore[attr-defined]
        yield make
        for rig in made:
            rig.close()
