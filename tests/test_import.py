"""Importing Longshore is cheap, and the control plane and the replay need no torch."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from longshore.boundary import Slot

BLOCK = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "triton"):
            raise ImportError(f"{name} is not to be had")
        return None

sys.meta_path.insert(0, NoTorch())
"""

WITHOUT_TORCH = (
    "longshore",
    "longshore.boundary",
    "longshore.cache",
    "longshore.config",
    "longshore.errors",
    "longshore.keys",
    "longshore.metrics",
    "longshore.runtime",
    "longshore.testing",
    "longshore.tiers",
    "longshore.tiers.arena.pinning",
    "longshore.tiers.file",
    "longshore.tiers.host",
    "longshore.tiers.mover",
    "longshore.trace",
)


def python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_a_module_that_needs_no_torch_imports_without_it(module: str) -> None:
    python(f"{BLOCK}\nimport {module}\nassert 'torch' not in sys.modules")


def test_a_cache_works_without_torch() -> None:
    python(
        BLOCK
        + "from longshore.cache import GroupKeys, TieredCache, TierSpec\n"
        + "cache = TieredCache([TierSpec('host', 2, 4096)])\n"
        + "assert cache.store({0: GroupKeys([bytes(32)])}, {0: [0]})[0].job is not None\n"
        + "assert len(cache.take_commands()) == 1\n"
    )


def test_importing_longshore_brings_in_neither_torch_nor_an_engine() -> None:
    python(
        "import sys, longshore\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'plotly', 'typer'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_former_names_return_the_new_ones_with_a_warning() -> None:
    cache = importlib.import_module("longshore.cache")
    with pytest.warns(DeprecationWarning, match="cache.Found was renamed: use LookupResult"):
        assert cache.Found is cache.LookupResult
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = cache.Nothing
    with pytest.warns(DeprecationWarning, match="Slot.pool was renamed: use size_class"):
        assert Slot("host", 3, 1).pool == 3  # type: ignore[attr-defined]
    with pytest.warns(DeprecationWarning, match="LookupResult.before was renamed: use ancestor_keys"):
        assert cache.LookupResult().before == ()
    with pytest.warns(DeprecationWarning, match="CacheSettings.into was renamed: use write_rules"):
        assert cache.CacheSettings().into == {}
