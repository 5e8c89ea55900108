"""The page is whole, needs nobody, and takes nothing for HTML."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from longshore.cli.output import ReportOptions
from longshore.errors import LongshoreError, ReportError
from longshore.report import RUNS, SOURCES, Page, Points, levels, paired_points, stacked_bars
from longshore.report.page import theme
from longshore.report.plots import TierSeries, plotly_javascript

NASTY = "<script>alert(1)</script> & \"quotes\" 'and' </script><!-- \u2028"


class Reader(HTMLParser):
    """What a browser would make of the page: elements, text outside scripts, the contents of scripts."""

    def __init__(self, page: Page) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._script: dict[str, str | None] | None = None
        self.source = page.html()
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self._script = dict(attrs)
            self.scripts.append((self._script, ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is None:
            self.text += data
        else:
            attributes, content = self.scripts[-1]
            self.scripts[-1] = (attributes, content + data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def bars(label: str = "device") -> Any:
    return stacked_bars([0, 1], {label: [3, 4]}, {label: SOURCES["device"]}, x_title="x", y_title="y")


def test_everything_is_escaped() -> None:
    page = Page(NASTY, NASTY, footer=NASTY)
    page.facts([(NASTY, NASTY, NASTY)])
    page.verdict(False, NASTY, word=NASTY)
    page.text(NASTY, NASTY)
    page.table(NASTY, (NASTY, NASTY), [(NASTY, 5)], NASTY)
    page.figure(NASTY, NASTY, bars(NASTY))
    reader = Reader(page)
    assert reader.text.count(NASTY) == 18  # each one above, the figure's data aside, and the title twice
    assert [attributes.get("type") for attributes, _ in reader.scripts] == ["application/json", None, None]
    assert json.loads(reader.scripts[0][1])["data"][0]["name"] == NASTY


def test_figure_data_cannot_end_its_script() -> None:
    class Raw:
        """A figure whose JSON is valid, and hostile as part of a page."""

        def to_json(self) -> str:
            return json.dumps({"data": [], "layout": {"title": NASTY, "height": 300}})

    page = Page("t")
    page.figure("a", "b", Raw())
    reader = Reader(page)
    assert json.loads(reader.scripts[0][1])["layout"]["title"] == NASTY
    assert reader.count("script") == 3


def test_page_is_one_file_that_asks_for_nothing() -> None:
    page = Page("t")
    page.figure("a", "b", bars())
    page.figure("c", "d", bars())
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag not in {"link", "img", "iframe", "object", "base"}
        assert not {"src", "href", "srcset"} & set(attributes)
        assert not any(value and "url(" in value for value in attributes.values())
    (policy,) = [a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy
    style = reader.source.split("<style>")[1].split("</style>")[0]
    assert not re.search(r"url\(|@import", style)


def test_plotly_is_inlined_once_and_only_for_figures() -> None:
    library = plotly_javascript()
    two = Page("t")
    two.figure("a", "b", bars())
    two.figure("c", "d", bars())
    assert two.html().count(library) == 1
    assert [a["id"] for t, a in Reader(two).tags if t == "div" and "id" in a] == ["figure-1", "figure-2"]
    none = Page("t")
    none.facts([("a", "b", "")])
    assert Reader(none).count("script") == 0
    assert len(none.html()) < 20_000


def test_parts_keep_their_order_and_tables_stand_together() -> None:
    page = Page("t")
    page.text("first", "x")
    page.table("second", ("a",), [("1",)])
    page.table("third", ("a",), [("1",)])
    page.text("fourth", "x")
    page.table("fifth", ("a",), [("1",)])
    source = page.html()
    places = [source.index(f"<h2>{name}</h2>") for name in ("first", "second", "third", "fourth", "fifth")]
    assert places == sorted(places)
    assert source.count('<div class="tables">') == 2


def test_table_columns() -> None:
    page = Page("t")
    page.table("x", ("name", "count"), [("a", 5), ("b", "1,024")])
    page.table("y", ("name", "mixed"), [("a", "5"), ("b", "\u2013")])
    page.table("z", ("", ""), [("a", "b")])
    source = page.html()
    assert '<th>name</th><th class="number">count</th>' in source
    assert '<td>a</td><td class="number">5</td>' in source
    assert '<th class="number">mixed</th>' in source
    assert source.count("<thead>") == 2


def test_a_ragged_table_is_refused() -> None:
    page = Page("t")
    with pytest.raises(ReportError, match="expected 2 cells in a row, got 1"):
        page.table("x", ("a", "b"), [("1", "2"), ("1",)])
    assert "<table>" not in page.html()


def test_verdict_says_it_in_words_too() -> None:
    page = Page("t")
    page.verdict(True, "good")
    page.verdict(False, "bad")
    text = Reader(page).text
    assert "\u2713 Passedgood" in text
    assert "\u2717 Failedbad" in text


def test_write_makes_the_directory(tmp_path: Path) -> None:
    page = Page("na\u00efve")
    path = tmp_path / "a" / "b" / "index.html"
    assert page.write(path) == path
    assert path.read_text(encoding="utf-8") == page.html()


def test_write_into_a_file_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="cannot write report"):
        Page("t").write(tmp_path / "file" / "index.html")


def test_import_alone_does_not_import_plotly() -> None:
    code = "import sys, longshore.report, longshore.cli.demo_report; sys.exit(any('plotly' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_plotly_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ReportError, match=r"pip install '\.\[report\]'"):
        bars()
    assert issubclass(ReportError, LongshoreError)
    assert "<h1>t</h1>" in Page("t").html()  # a page without figures does without


def test_every_series_colour_has_its_dark_form_in_the_script() -> None:
    for colour in (*SOURCES.values(), *RUNS.values()):
        for form in (colour, colour.wash()):
            assert f'"{form.light}": "{form.dark}"' in theme()
    figures = [
        bars().to_json(),
        levels([0], [TierSeries("a", [1], 2, SOURCES["file"])], x_title="x", unit="B").to_json(),
    ]
    used = set(
        re.findall(r'"(#[0-9a-f]{6}|rgba\([^"]*0\.45\))"', "".join(json.dumps(json.loads(f)["data"]) for f in figures))
    )
    assert used
    assert all(f'"{colour}": ' in theme() for colour in used)


def test_stacked_bars_hold_their_values() -> None:
    parts = {"device": [1, 2], "file": [3, 4]}
    figure = json.loads(stacked_bars([5, 6], parts, SOURCES, x_title="x", y_title="y").to_json())
    assert [(trace["name"], trace["x"], trace["y"]) for trace in figure["data"]] == [
        ("device", [5, 6], [1, 2]),
        ("file", [5, 6], [3, 4]),
    ]
    assert figure["layout"]["barmode"] == "stack"
    with pytest.raises(ReportError, match="file: expected 2 values"):
        stacked_bars([5, 6], {"file": [1]}, SOURCES, x_title="x", y_title="y")


def test_paired_points_tell_the_emphasised_from_the_rest() -> None:
    before = Points("old", [10, 20, 30], RUNS["recompute"])
    after = Points("new", [1, 2, 3], RUNS["tiered"])
    figure = json.loads(
        paired_points(
            [0, 1, 2], before, after, [True, False, True], x_title="x", y_title="y", rest="rest", marks={"old": 20}
        ).to_json()
    )
    series = {trace.get("name"): (trace["x"], trace["y"]) for trace in figure["data"]}
    assert series["old"] == ([0, 2], [10, 30])
    assert series["new"] == ([0, 2], [1, 3])
    assert series["old, rest"] == ([1], [20])
    assert series["new, rest"] == ([1], [2])
    assert series[None] == ([0, 0, None, 2, 2, None], [10, 1, None, 30, 3, None])
    assert [note["text"] for note in figure["layout"]["annotations"]] == ["p50 20.0"]


def test_limit_far_above_the_scale_is_text_not_line() -> None:
    rows = [TierSeries("near", [1, 8], 10, SOURCES["host"]), TierSeries("far", [1, 8], 1000, SOURCES["file"])]
    layout = json.loads(levels([0, 1], rows, x_title="x", unit="MiB").to_json())["layout"]
    assert [shape["y0"] for shape in layout["shapes"]] == [10]
    near, far = (note["text"] for note in layout["annotations"])
    assert "capacity 10.0 MiB" in near
    assert "above" not in near
    assert "capacity 1,000.0 MiB (above the scale)" in far
    assert layout["yaxis"]["range"][1] > 10
    assert 8 < layout["yaxis2"]["range"][1] < 20


def test_what_reports_lack_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ReportError, match=r"jinja2.*pip install"):
        ReportOptions(report=tmp_path / "report").check()
