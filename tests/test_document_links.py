"""What documents say of others and of the code: links, anchors, paths, commands, log messages, metrics, the index."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from commands_page import page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*/README.md"))]
FENCE = re.compile(r"^```\w*\n.*?^```$", re.DOTALL | re.MULTILINE)
OPERATIONS = DOCS / "operations.md"

every_document = pytest.mark.parametrize("document", [*PAGES, *OTHERS], ids=lambda path: str(path.relative_to(ROOT)))


def prose(document: Path) -> str:
    """The text outside of fences."""
    return FENCE.sub("", document.read_text())


def anchors(document: Path) -> set[str]:
    """Of all headings, as GitHub and MkDocs make them."""
    titles = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles]
    twice = [slug for slug, count in Counter(slugs).items() if count > 1]
    assert not twice, f"{document.name}: anchors of GitHub and MkDocs differ for {twice}"
    return set(slugs)


@every_document
def test_relative_links_and_anchors_exist(document: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "", prose(document))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), target
        if document.parent == DOCS:
            assert linked.is_relative_to(DOCS), f"{target}: the site has docs/ only; write the path in backticks"
        if anchor:
            assert anchor in anchors(linked), target


@every_document
def test_paths_in_backticks_exist(document: Path) -> None:
    for path in re.findall(r"`((?:docs|deploy|examples|src|tests|benchmarks)/[\w./@-]+)`", prose(document)):
        assert (ROOT / path).exists(), path


def test_every_page_is_in_the_index_and_on_the_site() -> None:
    index = set(re.findall(r"\]\(([\w-]+\.md)", (DOCS / "README.md").read_text()))
    assert index == {path.name for path in PAGES} - {"README.md"}
    listed: list[str] = []

    def collect(entry: object) -> None:
        match entry:
            case str():
                listed.append(entry)
            case dict():
                for each in entry.values():
                    collect(each)
            case list():
                for each in entry:
                    collect(each)

    collect(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(path.name for path in PAGES)


def test_the_page_of_commands_is_what_the_code_says() -> None:
    assert (DOCS / "commands.md").read_text() == page(), "docs/commands.md is stale: run `make commands`"


def test_decisions_are_numbered_in_order() -> None:
    numbers = re.findall(r"^## (\d+)\. ", (DOCS / "decisions.md").read_text(), re.MULTILINE)
    titles = re.findall(r"^## ", (DOCS / "decisions.md").read_text(), re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, len(titles) + 1))


# ---------------------------------------------------------------------- log messages


@functools.cache
def texts_in_code() -> list[str]:
    """Every string of the package without line breaks, so no docstring; values that are filled in are `\\0`."""
    found = []
    for module in sorted((ROOT / "src").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(module.read_text())))
        inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = [str(each.value) if isinstance(each, ast.Constant) else "\0" for each in node.values]
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
                found.append(re.sub(r"%[.\d]*[sdfgrxo]", "\0", node.value))
    return [text for text in found if "\n" not in text]


def messages() -> list[str]:
    """Those of the table in operations.md."""
    table = OPERATIONS.read_text().partition("## Log messages")[2]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def as_pattern(message: str) -> re.Pattern[str]:
    """`...` stands for values, and at the end for whatever follows."""
    parts = [re.escape(part) for part in re.sub(r"^\.\.\. ?|:? ?\.\.\.$", "", message).split("...")]
    return re.compile(r"[^\0]{0,3}\0[^\0]{0,3}(?:.*?)".join(parts), re.DOTALL)


def test_log_messages_of_the_manual_are_in_the_code() -> None:
    texts, listed = texts_in_code(), messages()
    assert len(listed) > 30
    for message in listed:
        pattern = as_pattern(message)
        assert any(pattern.search(text) for text in texts), message


def test_every_message_that_disables_tiers_is_in_the_manual() -> None:
    logged = [
        text for text in texts_in_code() if re.search(r"^((all|remote|host|file) tiers?|\0 tier) disabled: ", text)
    ]
    assert len(logged) > 6
    patterns = [as_pattern(message) for message in messages()]
    for text in logged:
        assert any(pattern.search(text) for pattern in patterns), text


# ---------------------------------------------------------------------- metrics


@pytest.mark.parametrize("name", ["operations", "deployment", "quickstart-vllm", "quickstart-sglang", "vllm", "sglang"])
def test_metrics_in_the_pages_exist(name: str) -> None:
    names = {text for text in texts_in_code() if re.fullmatch(r"longshore_[a-z_]+", text)}
    known = names | {f"{each}_total" for each in names}
    named = set(re.findall(r"\blongshore_[a-z_]+\b", (DOCS / f"{name}.md").read_text()))
    assert named <= known, named - known
