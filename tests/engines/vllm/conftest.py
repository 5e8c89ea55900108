"""These tests run where vLLM is installed: `make vllm` sets up such an environment, and fails where it cannot."""

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import pytest

_found = find_spec("vllm")
_is_installed = (
    _found is not None and _found.origin is not None
)  # this very directory looks like a package of that name
collect_ignore_glob = [] if _is_installed else ["test_*"]

if _is_installed:
    from engine_runs import Answers, Serve, Zygote, ask_oracle, once_without_tiers, run_engine
    from parts_kit import Engine, engine_of
    from vllm_kit import Rig

    @pytest.fixture(scope="session", autouse=True)
    def _sockets() -> Iterator[None]:
        """Where engines leave their sockets: a short path, as that of a socket has at most 107 bytes."""
        with (
            tempfile.TemporaryDirectory(prefix="vllm-", dir="/tmp") as directory,
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setenv("VLLM_RPC_BASE_PATH", directory)
            yield

    @pytest.fixture
    def rigs() -> Iterator[Callable[..., Rig]]:
        """Makes rigs, and closes them."""
        made: list[Rig] = []

        def make(**settings: object) -> Rig:
            made.append(Rig(**settings))  # type: ignore[arg-type]
            return made[-1]

        yield make
        for rig in made:
            rig.close()

    @pytest.fixture(scope="session")
    def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
        """Runs one engine in a process of its own."""
        zygote, base = Zygote(), tmp_path_factory.getbasetemp()
        shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # that of a worker lies in that of all
        run = partial(run_engine, zygote, tmp_path_factory.mktemp("engines"))
        yield once_without_tiers(run, shared / "without-tiers")
        zygote.close()

    @pytest.fixture(scope="session")
    def oracles(serve: Serve) -> Callable[[str], Answers]:
        """By model, the answers of an engine that keeps everything."""
        return cache(partial(ask_oracle, serve))

    @pytest.fixture
    def engine(request: pytest.FixtureRequest, rigs: Callable[..., Rig], tmp_path: Path) -> Engine:
        """Whose files have a prompt longer than host memory; of one KV cache group, or as many as asked for."""
        return engine_of(getattr(request, "param", 1), rigs, tmp_path)
