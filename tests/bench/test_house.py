"""The tree stays as `make house` shows it: no import cycles, one meaning for a class name, no long modules or names."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("house", ROOT / "benchmarks" / "house.py")
assert spec is not None and spec.loader is not None
house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(house)
TREES = house.trees()

TIDY = ("bench", "cli", "layout", "report", "runtime", "testing", "tiers", "transfer")
"""Packages without import cycles."""

TEST = re.compile(r"\bdef test_(\w+)\(")
LONGEST_NAME = 10
"""Words of the name of a test: what it shows, and nothing of how."""


def of_tidy(modules: list[str]) -> list[str]:
    return [name for name in modules if name.removeprefix("longshore.").partition(".")[0] in TIDY]


def test_no_import_cycles() -> None:
    assert [knot for knot in house.cycles(TREES) if of_tidy(knot)] == []


def test_a_class_name_has_one_meaning() -> None:
    assert house.repeated_classes(TREES) == {}


def test_no_module_over_600_lines() -> None:
    paths = sorted(house.SOURCE.rglob("*.py"))
    assert [path.name for path in paths if len(path.read_text().splitlines()) > house.LONGEST_MODULE] == []


def test_names_of_tests_have_at_most_ten_words() -> None:
    names = (name for path in (ROOT / "tests").rglob("test_*.py") for name in TEST.findall(path.read_text()))
    assert [name for name in names if len(name.split("_")) > LONGEST_NAME] == []


def test_cycles_and_names_are_found() -> None:
    sources = {
        "a.x": "def later():\n    from a import y\n",
        "a.y": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.x import later\nclass Job: ...\n",
        "a.z": "import a.y\nclass _Job: ...\n",
    }
    modules = {name: ast.parse(source) for name, source in sources.items()}
    assert house.cycles(modules) == [["a.x", "a.y"]]
    assert house.repeated_classes(modules) == {"Job": ["a.y", "a.z"]}


def test_benchmarks_import_what_there_is() -> None:
    missing = []
    for path in sorted((ROOT / "benchmarks").glob("*.py")):
        for found in ast.walk(ast.parse(path.read_text())):
            if isinstance(found, ast.ImportFrom) and (found.module or "").startswith("longshore"):
                with contextlib.suppress(ImportError):  # an engine that is not installed here
                    there = importlib.import_module(str(found.module))
                    names = (each.name for each in found.names if not hasattr(there, each.name))
                    missing += [f"{path.name}: {found.module}.{name}" for name in names]
    assert [name for name in missing if importlib.util.find_spec(name.split(": ")[1]) is None] == []
