"""Figures of the source tree: size, repeated names, import cycles, and how much code one request passes through.

    python benchmarks/house.py [--no-request]

Only the figures of a request need torch and transformers. A hop is a call from a function in one file of
`src/longshore` to a function in another one; calls through a library count from the last file of Longshore.
"""

from __future__ import annotations

import argparse
import ast
import statistics
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
SOURCE = ROOT / "src" / "longshore"
LONGEST_MODULE = 600
REPEATS = 9
TOKENS = 600
BLOCK = 16


def trees() -> dict[str, ast.Module]:
    """The syntax tree of each module, by its dotted name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = ["longshore", *path.relative_to(SOURCE).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


def imports_of(name: str, tree: ast.Module, known: Callable[[str], bool]) -> Iterator[str]:
    """Modules that `name` imports anywhere: in functions and under `TYPE_CHECKING`, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if known(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if known(inner):
                    yield inner
                elif known(node.module):
                    yield node.module


def cycles(modules: dict[str, ast.Module]) -> list[list[str]]:
    """Strongly connected components of more than one module; Tarjan's algorithm."""
    edges = {n: sorted(set(imports_of(n, tree, modules.__contains__)) - {n}) for n, tree in modules.items()}
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = low[name] = len(number)
        stack.append(name)
        for other in edges[name]:
            if other not in number:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], number[other])
        if low[name] == number[name]:
            at = stack.index(name)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for name in modules:
        if name not in number:
            visit(name)
    return sorted(found)


def repeated_classes(modules: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Class names, without leading underscores, that more than one module defines."""
    places: dict[str, list[str]] = defaultdict(list)
    for name, tree in modules.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(name.removeprefix("longshore."))
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def lines(folder: Path) -> dict[str, tuple[int, int]]:
    """Modules and lines of each package directly in `folder`; single modules count under `.`."""
    found: dict[str, list[int]] = defaultdict(list)
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).parts
        found[parts[0] if len(parts) > 1 else "."].append(len(path.read_text().splitlines()))
    return {name: (len(each), sum(each)) for name, each in sorted(found.items())}


class Hops:
    """Counts files and hops of the calling thread while it is entered."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.pairs: Counter[tuple[str, str]] = Counter()
        self.calls = 0
        self._names: dict[str, str | None] = {}

    def __enter__(self) -> Hops:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def hops(self) -> int:
        return sum(self.pairs.values())

    def _ours(self, frame: FrameType) -> str | None:
        path = frame.f_code.co_filename
        if path not in self._names:
            inside = Path(path).is_relative_to(SOURCE)
            self._names[path] = str(Path(path).relative_to(SOURCE)) if inside else None
        return self._names[path]

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (here := self._ours(frame)) is None:
            return
        self.files.add(here)
        self.calls += 1
        caller = frame.f_back
        while caller is not None and (above := self._ours(caller)) is None:
            caller = caller.f_back
        if caller is not None and above != here:
            self.pairs[above, here] += 1


def request(with_files: bool) -> list[tuple[Hops, Hops]]:
    """A store and a restore of `PrefixStore`, for each of `REPEATS` prompts."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

    from longshore.config import Config
    from longshore.engines.transformers import PrefixStore

    torch.manual_seed(0)
    torch.set_num_threads(1)
    settings = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(settings).eval()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        files = {"file_path": Path(folder) / "kv", "file_size": "64MiB"} if with_files else {}
        config = Config.make(host_size="16MiB", fixed_weights=True, **files)
        with PrefixStore(model, config, block_size=BLOCK) as store:
            for seed in range(REPEATS + 1):
                torch.manual_seed(seed)
                tokens = [int(token) for token in torch.randint(0, 256, (TOKENS,))]
                with torch.no_grad():
                    cache = model(torch.tensor([tokens]), past_key_values=DynamicCache()).past_key_values
                with Hops() as stored:
                    kept = store.store_prefix(tokens, cache)
                with Hops() as restored:
                    _, length = store.restore_prefix(tokens)
                if kept != length or kept != TOKENS // BLOCK * BLOCK:
                    raise SystemExit(f"{kept} tokens were stored, and {length} restored, of {TOKENS}")
                if seed:  # the first one imports and warms up
                    found.append((stored, restored))
    return found


def report_request(with_files: bool, verbose: bool) -> None:
    runs = request(with_files)
    both = statistics.median(len(stored.files | restored.files) for stored, restored in runs)
    print(f"one request of {TOKENS} tokens, {'host and file tier' if with_files else 'host tier'}: {both:.0f} files")
    for name, hops in zip(("store", "restore"), zip(*runs, strict=True), strict=True):
        files = statistics.median(len(each.files) for each in hops)
        crossed = statistics.median(each.hops for each in hops)
        calls = statistics.median(each.calls for each in hops)
        print(f"  {name:8} {files:4.0f} files {crossed:6.0f} hops {calls:6.0f} calls")
        if verbose:
            one = sorted(hops, key=lambda each: each.hops)[len(hops) // 2]
            for (above, here), count in one.pairs.most_common():
                print(f"    {count:5} {above} -> {here}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-request", action="store_true", help="only the figures that need no torch")
    parser.add_argument("--verbose", action="store_true", help="the hops between each two files")
    given = parser.parse_args()
    modules = trees()
    if not given.no_request:
        report_request(False, given.verbose)
        report_request(True, given.verbose)
    knots = cycles(modules)
    print(f"import cycles: {len(knots)}")
    for knot in knots:
        print("  " + " ".join(knot))
    repeated = repeated_classes(modules)
    print(f"class names used more than once: {len(repeated)}")
    for name, where in repeated.items():
        print(f"  {name}: {', '.join(where)}")
    for folder in ("src/longshore", "tests", "benchmarks", "examples"):
        found = lines(ROOT / folder)
        count, total = (sum(column) for column in zip(*found.values(), strict=True))
        print(f"{folder}: {count} modules, {total} lines")
        print("  " + ", ".join(f"{name} {each[1]} ({each[0]})" for name, each in found.items()))
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (length := len(path.read_text().splitlines())) > LONGEST_MODULE:
                print(f"  over {LONGEST_MODULE} lines: {path.relative_to(ROOT)} ({length})")


if __name__ == "__main__":
    main()
