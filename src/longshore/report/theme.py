"""One look for all reports: colours that stay what they mean, a style sheet, the script that draws the figures.

Every colour has a light and a dark form. Figures are built in light colours; the page's script swaps them when the
reader prefers dark, and swaps them back for print. Series colours are from Okabe and Ito's palette, which readers
with any colour vision can tell apart, and differ in lightness too.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple


class Colour(NamedTuple):
    """A colour on light paper and on dark, as `#rrggbb`."""

    light: str
    dark: str

    def wash(self) -> Colour:
        """The same colour thinned, for areas."""
        return Colour(_thin(self.light), _thin(self.dark))


def _thin(colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return f"rgba({red},{green},{blue},0.45)"


SOURCES: Final[dict[str, Colour]] = {
    "device": Colour("#0072b2", "#2f93d0"),
    "host": Colour("#56b4e9", "#8ccdf3"),
    "file": Colour("#e69f00", "#f0b429"),
    "remote": Colour("#cc79a7", "#dd9abf"),
    "computed": Colour("#b9bec5", "#59616c"),
}
"""Colours of sources of tokens, and of tiers."""

REASONS: Final[dict[str, Colour]] = {
    "demoted": Colour("#b9bec5", "#59616c"),
    "forgotten": Colour("#d55e00", "#f0803c"),
    "unusable": Colour("#6f4e9c", "#a98bd6"),
    "moving": Colour("#56b4e9", "#8ccdf3"),
    "waiting": Colour("#d55e00", "#f0803c"),
}
"""Colours of eviction reasons, and of times."""

RUNS: Final[dict[str, Colour]] = {
    "tiered": Colour("#009e73", "#22b88c"),
    "recompute": Colour("#d55e00", "#f0803c"),
    "resident": Colour("#6f4e9c", "#a98bd6"),
}
"""Colours of runs."""

INK: Final = Colour("#1b1f24", "#e6e8eb")
MUTED: Final = Colour("#606872", "#9aa3ad")
RULE: Final = Colour("#dfe2e6", "#333a43")
PAPER: Final = Colour("#ffffff", "#14171b")
PANEL: Final = Colour("#f5f6f8", "#1c2127")
PASS: Final = Colour("#006d4f", "#39c79b")
FAIL: Final = Colour("#b3261e", "#ff8a80")

FONT: Final = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

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
p { margin: 0 0 12px; max-width: 74ch; }
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
@media (max-width: 640px) { body { padding: 24px 16px 40px; } h1 { font-size: 25px; } }
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
