"""A report page: one HTML file that needs no network, readable on screen, on paper, in light and in dark.

    page = Page("Title", "What this is about")
    page.facts([("label", "value", "note")])
    page.figure("Title", "What to see in it", figure)
    page.table("Title", ("column", ...), rows)
    page.write(path)

All arguments are text and are escaped.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from longshore.errors import ReportError
from longshore.report.plots import Figure, plotly_javascript
from longshore.report.theme import script, style_sheet

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""Makes the browser block all network access."""

Cell = str | int


class Page:
    """Collects parts in order; `write` or `html` gives the whole."""

    def __init__(self, title: str, subtitle: str = "", *, footer: str = "Made by Longshore.") -> None:
        self._title = title
        self._subtitle = subtitle
        self._footer = footer
        self._parts: list[tuple[str, str]] = []
        self._figures = 0

    def facts(self, facts: Iterable[tuple[str, str, str]]) -> None:
        """Headline tiles: label, value, note (which may be empty)."""
        tiles = (
            f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd>'
            + (f'<dd class="note">{escape(note)}</dd>' if note else "")
            + "</div>"
            for label, value, note in facts
        )
        self._add("facts", f'<dl class="facts">{"".join(tiles)}</dl>')

    def verdict(self, passed: bool, text: str, *, word: str = "") -> None:
        """One sentence on whether the expected result was reached."""
        word = word or ("Passed" if passed else "Failed")
        mark = "\u2713" if passed else "\u2717"
        tone = "passed" if passed else "failed"
        self._add("verdict", f'<p class="verdict {tone}"><b>{mark} {escape(word)}</b><span>{escape(text)}</span></p>')

    def text(self, title: str, *paragraphs: str) -> None:
        """A section of plain paragraphs."""
        body = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in paragraphs)
        self._add("text", f"<section><h2>{escape(title)}</h2>{body}</section>")

    def figure(self, title: str, caption: str, figure: Figure) -> None:
        """A Plotly figure; `caption` says in plain words what to see in it."""
        content = figure.to_json()
        if content is None:
            raise ReportError(f"figure {title!r}: expected JSON with data and layout")
        self._figures += 1
        name = f"figure-{self._figures}"
        height = int(json.loads(content).get("layout", {}).get("height", 400))
        data = content.replace("<", "\\u003c")  # a script element ends at the first "</script", wherever it stands
        self._add(
            "figure",
            f"<section><figure><h2>{escape(title)}</h2><figcaption>{escape(caption)}</figcaption>"
            f'<div class="plot" id="{name}" role="img" aria-label="{escape(title)}" style="height: {height}px"></div>'
            f'<script type="application/json" id="{name}-data">{data}</script></figure></section>',
        )

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> None:
        """A table; columns whose cells all begin with a digit are right-aligned; an empty header is omitted."""
        cells = [[str(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(header):
                raise ReportError(f"table {title!r}: expected {len(header)} cells in a row, got {len(row)}")
        numeric = [bool(cells) and all(row[i][:1].isdigit() for row in cells) for i in range(len(header))]
        head = "".join(_cell("th", text, right) for text, right in zip(header, numeric, strict=True))
        head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
        body = "".join(
            f"<tr>{''.join(_cell('td', text, right) for text, right in zip(row, numeric, strict=True))}</tr>"
            for row in cells
        )
        note = f'<p class="caption">{escape(caption)}</p>' if caption else ""
        self._add(
            "table",
            f'<section><h2>{escape(title)}</h2>{note}<div class="scroll"><table>'
            f"{head}<tbody>{body}</tbody></table></div></section>",
        )

    def html(self) -> str:
        """The whole page."""
        drawing = f"<script>{plotly_javascript()}</script>\n<script>{script()}</script>\n" if self._figures else ""
        silent = "<noscript><p>The figures on this page are drawn by JavaScript.</p></noscript>\n" if drawing else ""
        subtitle = f"<p>{escape(self._subtitle)}</p>" if self._subtitle else ""
        body = "\n".join(_group(kind, parts) for kind, parts in itertools.groupby(self._parts, lambda part: part[0]))
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self._title)}</title>\n<style>\n{style_sheet()}</style>\n</head>\n<body>\n"
            f"<header><h1>{escape(self._title)}</h1>{subtitle}</header>\n<main>\n{silent}{body}\n</main>\n"
            f"<footer>{escape(self._footer)}</footer>\n{drawing}</body>\n</html>\n"
        )

    def write(self, path: Path) -> Path:
        """Write the page to `path` atomically, creating its directory; returns `path`.

        Raises `ReportError`; an existing page is then unchanged.
        """
        content = self.html()
        half = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                half.write_text(content, encoding="utf-8")
                half.replace(path)
            finally:
                half.unlink(missing_ok=True)
        except OSError as error:
            raise ReportError(f"cannot write report {path}: {error.strerror or error}") from error
        return path

    def _add(self, kind: str, markup: str) -> None:
        self._parts.append((kind, markup))


def _group(kind: str, parts: Iterable[tuple[str, str]]) -> str:
    """Neighbours of one kind; tables stand side by side where there is room."""
    markup = "\n".join(part for _, part in parts)
    return f'<div class="tables">{markup}</div>' if kind == "table" else markup


def _cell(tag: str, text: str, right: bool) -> str:
    return f'<{tag} class="number">{escape(text)}</{tag}>' if right else f"<{tag}>{escape(text)}</{tag}>"
