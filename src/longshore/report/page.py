"""A report page: one HTML file that needs no network, readable on screen, on paper, in light and in dark.

    page = Page("Title", "What this is about")
    page.facts([("label", "value", "note")])
    page.figure("Title", "What to see in it", figure)
    page.table("Title", ("column", ...), rows)
    page.made(["longshore 0.1.0", ...])
    page.write(path)

All arguments are text and are escaped. Quantities have one format: `quantity`, `seconds`, `share`, `times`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from longshore.errors import ReportError
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

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
"""Content security policy: the browser blocks all network access."""

Cell = str | int


class Page:
    """Collects parts in order; `write` or `html` returns the page."""

    def __init__(self, title: str, subtitle: str = "", *, footer: str = "Made by Longshore.") -> None:
        self._title = title
        self._subtitle = subtitle
        self._footer = footer
        self._parts: list[tuple[str, str]] = []
        self._figures: list[tuple[str, str]] = []
        self._made: list[str] = []

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The id and the title of each figure."""
        return list(self._figures)

    def made(self, lines: Iterable[str]) -> None:
        """How the page was made: version, command, machine, date, seed; for its end, and for images of its figures."""
        self._made = list(lines)

    @property
    def provenance(self) -> list[str]:
        """The lines of `made`."""
        return list(self._made)

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
        """A Plotly figure; `caption` explains it."""
        content = figure.to_json()
        if content is None:
            raise ReportError(f"figure {title!r}: expected JSON with data and layout")
        name = f"figure-{len(self._figures) + 1}"
        self._figures.append((name, title))
        height = int(json.loads(content).get("layout", {}).get("height", 400))
        data = content.replace("<", "\\u003c")  # a script element ends at the first "</script"
        self._add(
            "figure",
            f"<section><figure><h2>{escape(title)}</h2><figcaption>{escape(caption)}</figcaption>"
            f'<div class="plot" id="{name}" role="img" aria-label="{escape(title)}" style="height: {height}px"></div>'
            f'<script type="application/json" id="{name}-data">{data}</script></figure></section>',
        )

    def table(self, title: str, header: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> None:
        """A table; columns of numbers, and of dashes, are right-aligned; an empty header is omitted."""
        cells = [[str(cell) for cell in row] for row in rows]
        for row in cells:
            if len(row) != len(header):
                raise ReportError(f"table {title!r}: expected {len(header)} cells in a row, got {len(row)}")
        numeric = [_is_numeric([row[i] for row in cells]) for i in range(len(header))]
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
        made = "".join(f"<p>{escape(line)}</p>" for line in self._made)
        subtitle = f"<p>{escape(self._subtitle)}</p>" if self._subtitle else ""
        body = "\n".join(_group(kind, parts) for kind, parts in itertools.groupby(self._parts, lambda part: part[0]))
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self._title)}</title>\n<style>\n{style_sheet()}</style>\n</head>\n<body>\n"
            f"<header><h1>{escape(self._title)}</h1>{subtitle}</header>\n<main>\n{silent}{body}\n</main>\n"
            f"<footer><p>{escape(self._footer)}</p>{made}</footer>\n{drawing}</body>\n</html>\n"
        )

    def write(self, path: Path) -> Path:
        """Write the page to `path` atomically, creating its directory; returns `path`.

        Raises `ReportError`; an existing page is then unchanged.
        """
        write_whole(path, self.html().encode(), "report")
        return path

    def _add(self, kind: str, markup: str) -> None:
        self._parts.append((kind, markup))


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


def _group(kind: str, parts: Iterable[tuple[str, str]]) -> str:
    """Adjacent parts of one kind; tables are side by side if there is room."""
    markup = "\n".join(part for _, part in parts)
    return f'<div class="tables">{markup}</div>' if kind == "table" else markup


def _is_numeric(column: Sequence[str]) -> bool:
    """Whether all cells begin with a digit, or with a sign and a digit, or are a dash; not all a dash."""
    dashes = ("-", "\u2013")
    return all(cell in dashes or cell.lstrip("-< ")[:1].isdigit() for cell in column) and not {*column} <= {*dashes}


def _cell(tag: str, text: str, right: bool) -> str:
    return f'<{tag} class="number">{escape(text)}</{tag}>' if right else f"<{tag}>{escape(text)}</{tag}>"


_VARIABLES: Final = {
    "ink": INK,
    "muted": MUTED,
    "rule": RULE,
    "paper": PAPER,
    "panel": PANEL,
    "pass": PASS,
    "fail": FAIL,
}

_RULES: Final = """
* { box-sizing: border-box; }
html { color-scheme: light dark; background: var(--paper); }
body { margin: 0 auto; max-width: 1120px; padding: 40px 32px 56px; color: var(--ink); font: 16px/1.55 FONT;
       -webkit-text-size-adjust: 100%; }
h1 { margin: 0; font-size: 30px; line-height: 1.2; font-weight: 650; letter-spacing: -0.015em; text-wrap: balance; }
h2 { margin: 0 0 4px; font-size: 19px; line-height: 1.3; font-weight: 620; letter-spacing: -0.005em; }
p { margin: 0 0 12px; max-width: 74ch; overflow-wrap: anywhere; }
header p { margin: 10px 0 0; color: var(--muted); font-size: 17px; }
section { margin-top: 44px; }
figure { margin: 0; }
figcaption, .caption { margin: 0 0 10px; max-width: 84ch; color: var(--muted); font-size: 15px; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 28px 0 0; }
.facts > div { padding: 15px 17px 14px; border-radius: 8px; background: var(--panel); }
dt { color: var(--muted); font-size: 14px; line-height: 1.35; }
dd { margin: 0; }
.value { margin-top: 5px; font-size: 27px; line-height: 1.2; font-weight: 620; letter-spacing: -0.015em;
         font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.note { margin-top: 4px; color: var(--muted); font-size: 13.5px; line-height: 1.4; }
.verdict { display: flex; gap: 11px; align-items: baseline; margin: 24px 0 0; padding: 12px 17px; max-width: none;
           border-radius: 0 8px 8px 0; border-left: 4px solid var(--tone); background: var(--panel); }
.verdict b { color: var(--tone); white-space: nowrap; font-weight: 650; }
.passed { --tone: var(--pass); }
.failed { --tone: var(--fail); }
.plot { width: 100%; }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); column-gap: 56px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin-top: 6px; width: 100%; font-size: 15px; font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 550; font-size: 14px; }
th, td { padding: 7px 20px 7px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
td:first-child { white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
footer { margin-top: 52px; padding-top: 14px; border-top: 1px solid var(--rule); color: var(--muted);
         font-size: 13.5px; }
footer p { margin: 0 0 3px; max-width: none; }
@media (max-width: 640px) {
  body { padding: 24px 16px 40px; }
  h1 { font-size: 25px; }
  .verdict, .verdict b { display: block; }
  table { font-size: 14px; }
  th, td { padding-right: 12px; overflow-wrap: break-word; }
  td:first-child { white-space: normal; }
}
@media print {
  @page { size: A4; margin: 14mm; }
  html { color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  section { margin-top: 22px; }
  section, .facts > div, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .tables { display: block; }
  th, td { padding-top: 3px; padding-bottom: 3px; }
  .facts { grid-template-columns: repeat(4, 1fr); gap: 8px; }
  .facts > div { padding: 9px 11px; }
  .value { font-size: 17pt; }
  .facts > div, .verdict { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""

_SCRIPT: Final = """
(() => {
  "use strict";
  const theme = THEME;
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const figures = Array.from(document.querySelectorAll(".plot"), (element) => ({
    element, source: document.getElementById(element.id + "-data").textContent,
  }));
  const swap = (value, dark) => {
    if (typeof value === "string") return (dark && theme.dark_of[value.toLowerCase()]) || value;
    if (Array.isArray(value)) return value.map((item) => swap(item, dark));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, swap(item, dark)]));
  };
  const draw = (dark, print) => {
    const colours = dark ? theme.dark : theme.light;
    for (const { element, source } of figures) {
      const { data, layout } = swap(JSON.parse(source), dark);
      delete layout.template;
      layout.font = { ...layout.font, color: colours.ink };
      layout.hoverlabel = { bgcolor: colours.paper, bordercolor: colours.rule, font: { color: colours.ink },
                            align: "left", ...layout.hoverlabel };
      for (const key of Object.keys(layout).filter((name) => /^[xy]axis\\d*$/.test(name))) {
        layout[key] = { gridcolor: colours.rule, linecolor: colours.rule, zerolinecolor: colours.rule,
                        ...layout[key], tickfont: { color: colours.muted, ...layout[key].tickfont } };
      }
      layout.autosize = !print;
      if (print) Object.assign(layout, { width: 680, height: 0.78 * layout.height });
      element.style.height = layout.height + "px";
      Plotly.react(element, data, layout, { displayModeBar: false, responsive: true });
    }
  };
  draw(prefersDark.matches, false);
  prefersDark.addEventListener("change", () => draw(prefersDark.matches, false));
  addEventListener("beforeprint", () => draw(false, true));
  addEventListener("afterprint", () => draw(prefersDark.matches, false));
})();
"""


def style_sheet() -> str:
    """The page's CSS."""
    light = " ".join(f"--{name}: {colour.light};" for name, colour in _VARIABLES.items())
    dark = " ".join(f"--{name}: {colour.dark};" for name, colour in _VARIABLES.items())
    schemes = f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return schemes + _RULES.replace("FONT", FONT)


def script() -> str:
    """The JavaScript that draws every figure of the page, in the reader's colours."""
    series = (*SOURCES.values(), *RUNS.values(), MUTED, RULE)
    theme = {
        "dark_of": {colour.light: colour.dark for full in series for colour in (full, full.wash())},
        "light": {name: colour.light for name, colour in _VARIABLES.items()},
        "dark": {name: colour.dark for name, colour in _VARIABLES.items()},
    }
    return _SCRIPT.replace("THEME", json.dumps(theme))
