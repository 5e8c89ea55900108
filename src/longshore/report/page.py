"""A report page: one HTML file that needs no network, readable on screen, on paper, in light and in dark.

    page = Page("Title", "What this is about")
    page.facts([("label", "value", "note")])
    page.figure("Title", "What to see in it", figure)
    page.table("Title", ("column", ...), rows)
    page.provenance = ["longshore 0.1.0", ...]
    page.write(path)

All arguments are text and are escaped. `page.html` beside this module is its template.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Final

from longshore.errors import ReportError, with_extra
from longshore.report.plots import (
    FAIL,
    FONT,
    INK,
    MUTED,
    PANEL,
    PAPER,
    PASS,
    RULE,
    RUNS,
    SOURCES,
    Figure,
    plotly_javascript,
)
from longshore.report.units import escape

_COLOURS: Final = {"ink": INK, "muted": MUTED, "rule": RULE, "paper": PAPER, "panel": PANEL, "pass": PASS, "fail": FAIL}


def page_template() -> Any:
    """The Jinja template of a page. Raises `ReportError` without jinja2."""
    try:
        import jinja2  # noqa: PLC0415 - of the extra `report`
        import markupsafe  # noqa: PLC0415
    except ImportError as error:
        raise ReportError(f"pages need jinja2 ({error}): {with_extra('report')}") from error
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["text"] = lambda text: markupsafe.Markup(escape(text))  # noqa: S704 - it is escaped
    return environment.from_string(resources.files(__package__).joinpath("page.html").read_text("utf-8"))


class Page:
    """Collects parts in order; `write` or `html` returns the page.

    Attributes:
        figures: The id and the title of each figure.
        provenance: How the page was made, a line each, for its end and for images of its figures.
    """

    def __init__(self, title: str, subtitle: str = "", *, footer: str = "Made by Longshore.") -> None:
        self.title, self.subtitle, self.footer = title, subtitle, footer
        self.figures: list[tuple[str, str]] = []
        self.provenance: list[str] = []
        self._parts: list[dict[str, Any]] = []

    def facts(self, facts: Iterable[tuple[str, str, str]]) -> None:
        """Headline tiles: label, value, note (which may be empty)."""
        self._add("facts", facts=list(facts))

    def verdict(self, passed: bool, text: str, *, word: str = "") -> None:
        """One sentence on whether the expected result was reached."""
        self._add("verdict", passed=passed, text=text, word=word or ("Passed" if passed else "Failed"))

    def text(self, title: str, *paragraphs: str) -> None:
        """A section of plain paragraphs."""
        self._add("text", title=title, paragraphs=paragraphs)

    def figure(self, title: str, caption: str, figure: Figure) -> None:
        """A Plotly figure; `caption` explains it."""
        content = figure.to_json()
        if content is None:
            raise ReportError(f"figure {title!r}: expected JSON with data and layout")
        self.figures.append((f"figure-{len(self.figures) + 1}", title))
        height = int(json.loads(content).get("layout", {}).get("height", 400))
        data = content.replace("<", "\\u003c")  # a script element ends at the first "</script"
        self._add("figure", id=self.figures[-1][0], title=title, caption=caption, height=height, data=data)

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[str | int]], caption: str = "") -> None:
        """A table; columns of numbers, and of dashes, are right-aligned; an empty header is omitted."""
        cells = [[str(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(header):
                raise ReportError(f"table {title!r}: expected {len(header)} cells in a row, got {len(row)}")
        numeric = [_is_numeric([row[at] for row in cells]) for at in range(len(header))]
        self._add("table", title=title, header=header, rows=cells, caption=caption, numeric=numeric)

    def html(self) -> str:
        """The whole page."""
        template = page_template()
        groups = [(kind, list(parts)) for kind, parts in itertools.groupby(self._parts, lambda part: part["kind"])]
        plotly = plotly_javascript() if self.figures else ""
        colours = {"colours": _COLOURS, "theme": theme(), "font": FONT}
        page = template.render(page=self, groups=groups, plotly=plotly, **colours)
        return f"{page}\n"

    def write(self, path: Path) -> Path:
        """Write the page to `path` atomically, creating its directory; returns `path`.

        Raises `ReportError`; an existing page is then unchanged.
        """
        write_whole(path, self.html().encode(), "report")
        return path

    def _add(self, kind: str, **part: object) -> None:
        self._parts.append({"kind": kind, **part})


def theme() -> str:
    """The colours of figures, for the script that draws them: JSON, whose `dark_of` maps light ones to dark ones."""
    series = (*SOURCES.values(), *RUNS.values(), MUTED, RULE)
    light = {name: colour.light for name, colour in _COLOURS.items()}
    dark = {name: colour.dark for name, colour in _COLOURS.items()}
    dark_of = {colour.light: colour.dark for full in series for colour in (full, full.wash())}
    return json.dumps({"dark_of": dark_of, "light": light, "dark": dark})


def write_whole(path: Path, data: bytes, what: str) -> None:
    """Write `data` to `path` atomically, creating its directory; `ReportError` names `what` could not be written."""
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            half.write_bytes(data)
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)
    except OSError as error:
        raise ReportError(f"cannot write {what} {path}: {error.strerror or error}") from error


def _is_numeric(column: Sequence[str]) -> bool:
    """Whether all cells begin with a digit, or with a sign and a digit, or are a dash; not all a dash."""
    dashes = ("-", "\u2013")
    return all(cell in dashes or cell.lstrip("-< ")[:1].isdigit() for cell in column) and not {*column} <= {*dashes}
