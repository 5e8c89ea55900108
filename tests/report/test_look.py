"""Pages in a real browser: nothing on the console, nothing too wide, every figure drawn, every text legible.

`make look` installs Chromium and runs these tests; elsewhere they are skipped, and say so.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from browser import Browser, PageView

from longshore.errors import ReportError
from longshore.report import RUNS, SOURCES, Curve, Page, Points, TierSeries, curves, levels, paired_points, stacked_bars
from longshore.report.images import export_figures, find_browser

if os.environ.get("LONGSHORE_LOOK") and find_browser() is None:
    raise RuntimeError("LONGSHORE_LOOK is set, but there is no Chromium")
pytestmark = pytest.mark.skipif("LONGSHORE_LOOK" not in os.environ, reason="pages NOT looked at: run make look")

EXCERPT = str(resources.files("longshore.trace").joinpath("data", "conversation_excerpt.jsonl"))
MODEL = ("--model", "llama-3.1-8b")
COMMANDS = {
    "replay": ("replay", EXCERPT, *MODEL, "--host", "2GiB", "--file", "8GiB", "--prefill-rate", "600"),
    "plan": ("plan", EXCERPT, *MODEL, "--ttft-p95", "600ms", "--file-write", "1GB/s"),
    "demo": ("demo", "--requests", "10"),
}
LOOKS = [(width, dark) for width in (1280, 390) for dark in (False, True)]

FACTS = """(() => {
  const luminance = (colour) => {
    const part = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    return 0.2126 * part(colour[0]) + 0.7152 * part(colour[1]) + 0.0722 * part(colour[2]);
  };
  const rgba = (text) => { const found = text.match(/[0-9.]+/g).map(Number); return [...found, 1].slice(0, 4); };
  const over = (top, below) => below.map((value, at) => top[at] * top[3] + value * (1 - top[3])).slice(0, 3);
  const behind = (element) => {
    let layers = [];
    for (let at = element; at instanceof HTMLElement || at instanceof SVGElement; at = at.parentElement)
      layers.push(rgba(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const weak = [];
  for (const element of document.querySelectorAll("body *:not(script):not(style):not(noscript)")) {
    const nodes = Array.from(element.childNodes).filter((node) => node.nodeType === 3);
    const own = nodes.map((node) => node.data).join("").trim();
    const box = element.getBoundingClientRect();
    if (!own || !box.width || element.closest("noscript")) continue;
    const style = getComputedStyle(element), below = behind(element);
    const front = rgba(element instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(over(front, below)), luminance(below)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) weak.push([own.slice(0, 40), ratio.toFixed(2)]);
  }
  const wide = Array.from(document.querySelectorAll("body *")).filter((element) => !element.closest(".plot, .scroll"))
    .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5).map((element) => element.tagName);
  const plots = Array.from(document.querySelectorAll(".plot"));
  return {
    width: document.documentElement.scrollWidth, viewport: innerWidth, wide, weak,
    paper: getComputedStyle(document.documentElement).backgroundColor,
    figures: plots.length,
    drawn: plots.filter((plot) => plot.querySelector(".trace path, .trace .point")).length,
    narrow: plots.filter((plot) => Math.abs(plot.querySelector(".main-svg").clientWidth - plot.clientWidth) > 1).length,
  };
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


def parts_page() -> Page:
    """A page with every kind of part and of figure."""
    page = Page("Every part of a page", "What a reader sees of each")
    page.verdict(True, "All of it is here.")
    page.verdict(False, "More prefill arrives than engines can compute: --engines 4 would suffice.", word="Overload")
    page.facts([("TTFT p50", "210 ms", "347 ms without tiers"), ("Cost", "1,284,000", "units of a GiB of NVMe")])
    page.text("Results", "To reproduce: longshore replay " + "/a/long/path/without/any/blank" * 6)
    lines = [
        Curve("a", [0.02, 1, 40], [1, 2, 3], RUNS["tiered"], ["1", "2", "3"], "dot"),
        Curve("b", [0.02, 1, 40], [3, 2, 1], RUNS["recompute"]),
    ]
    page.figure("Curves", "x", curves(lines, x_title="x", y_title="y", logarithmic=True, bands=[(1, 2)]))
    page.figure("Bars", "x", stacked_bars([0.5, 1.5], {"host": [3, 4]}, SOURCES, x_title="x", y_title="y"))
    before, after = Points("old", [10, 20], RUNS["recompute"]), Points("new", [1, 2], RUNS["tiered"])
    marks = {"old": 15.0, "new": 1.5}
    paired = paired_points([0, 1], before, after, [True, False], x_title="x", y_title="y", rest="rest", marks=marks)
    page.figure("Pairs", "x", paired)
    rows = [TierSeries(name, [1, 8], 10, SOURCES[name]) for name in ("device", "file")]
    page.figure("Levels", "x", levels([0, 1], rows, x_title="x", unit="MiB"))
    page.table("Wide", [f"column {n}" for n in range(12)], [["1,234,567"] * 12], "Scrolls within itself.")
    page.table("Facts", ("", "", ""), [("moved per hit", "48.5 MiB file->host", "blocks have 64.0 MiB " * 3)])
    page.provenance = ["longshore 0.1.0, 2026-11-24", "a machine", "longshore replay " + "x" * 300]
    return page


def check(view: PageView, name: str) -> None:
    """Look at a page at each width and in each scheme; leaves pictures in LONGSHORE_LOOK_AT, if that is set."""
    papers = set()
    for width, dark in LOOKS:
        view.look(width, dark=dark)
        found = view.evaluate(FACTS)
        if folder := os.environ.get("LONGSHORE_LOOK_AT"):
            picture = Path(folder) / f"{name}-{width}-{'dark' if dark else 'light'}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(view.screenshot())
        where = (name, width, dark)
        assert (found["width"], found["viewport"], found["wide"]) == (width, width, []), where
        assert found["figures"] == found["drawn"] > 0, where
        assert found["narrow"] == 0, where
        assert found["weak"] == [], where
        papers.add((dark, found["paper"]))
    assert papers == {(False, "rgb(255, 255, 255)"), (True, "rgb(20, 23, 27)")}
    assert view.complaints == []


def test_every_part_is_legible_and_fits(browser: Browser, tmp_path: Path) -> None:
    view = browser.open(parts_page().write(tmp_path / "index.html"), width=1280)
    check(view, "parts")
    view.close()


def test_faults_of_a_page_are_noticed(browser: Browser, tmp_path: Path) -> None:
    """What the look is for: a page that fails, is too wide, hardly legible, and asks for the network."""
    page = parts_page().html()
    faulty = "<p style='width: 2000px; color: #bbb'>pale</p><img src='https://example.invalid/x.png'>"
    path = tmp_path / "index.html"
    path.write_text(page.replace("<main>", f"<main>{faulty}<script>nowhere()</script>"))
    view = browser.open(path, width=390)
    found = view.evaluate(FACTS)
    assert found["width"] > 390
    assert found["wide"] == ["P"]
    assert found["weak"] == [["pale", "1.92"]]
    assert any("nowhere is not defined" in each for each in view.complaints)
    assert any("Content Security Policy" in each for each in view.complaints)
    view.close()


def test_figures_are_exported_with_how_they_were_made(tmp_path: Path) -> None:
    page = parts_page()
    folders = {"svg": tmp_path / "svg", "png": tmp_path / "a" / "png"}
    written = list(export_figures(page, folders))
    assert [path.name for path in written if path.suffix == ".svg"] == [
        "curves.svg", "bars.svg", "pairs.svg", "levels.svg",
    ]  # fmt: skip
    for path in written:
        data = path.read_bytes()
        if path.suffix == ".svg":
            texts = ["".join(each.itertext()) for each in ET.fromstring(data).iter("{http://www.w3.org/2000/svg}text")]  # noqa: S314
            assert {"longshore 0.1.0, 2026-11-24", "a machine", path.stem.capitalize()} <= set(texts)
        else:
            assert data.startswith(b"\x89PNG")
            assert struct.unpack(">I", data[16:20]) == (1920,)


def test_a_browser_that_does_not_start_is_a_typed_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = parts_page()
    monkeypatch.setenv("LONGSHORE_BROWSER", "/bin/false")
    with pytest.raises(ReportError, match="ended with 1 and drew nothing"):
        list(export_figures(page, {"svg": tmp_path}))
    monkeypatch.setenv("LONGSHORE_BROWSER", "/nowhere/chromium")
    with pytest.raises(ReportError, match="apt-get install chromium"):
        list(export_figures(page, {"svg": tmp_path}))
    assert list(tmp_path.iterdir()) == []


def test_a_figure_that_cannot_be_drawn_is_a_typed_error(tmp_path: Path) -> None:
    page = parts_page()
    page.figures[0] = ("figure-99", "Curves")
    with pytest.raises(ReportError, match="the page failed: TypeError"):
        list(export_figures(page, {"svg": tmp_path}))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_the_page_of_a_command_is_legible_and_fits(name: str, browser: Browser, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from longshore.cli import main; main()", *COMMANDS[name]]
    outputs = ["--report", str(tmp_path / "page"), "--svg", str(tmp_path / "svg"), "--json"]
    done = subprocess.run([*command, *outputs], capture_output=True, text=True, check=True)
    about: dict[str, Any] = json.loads(done.stdout)["provenance"]
    assert about["command"].startswith(f"longshore {name} ")
    page = (tmp_path / "page" / "index.html").read_text().replace("\u00a0", " ")
    assert str(about["machine"]) in page
    view = browser.open(tmp_path / "page" / "index.html", width=1280)
    check(view, name)
    assert len(list((tmp_path / "svg").glob("*.svg"))) == view.evaluate("document.querySelectorAll('.plot').length")
    view.close()
