"""The figures of reports, and their colours. Plotly is imported for the first figure.

Every colour has a light and a dark form. Figures are built in light colours; the script of the page swaps them when the
reader prefers dark, and swaps them back for print. Series colours are from Okabe and Ito's palette, which readers
with any colour vision can distinguish, and differ in lightness too.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from longshore.errors import ReportError, with_extra
from longshore.report.units import quantity


class Colour(NamedTuple):
    """A colour on light paper and on dark, as `#rrggbb`."""

    light: str
    dark: str

    def wash(self) -> Colour:
        """The same colour, transparent, for areas."""
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


class Figure(Protocol):
    """The method of a figure that the page calls; Plotly's `Figure` has it."""

    def to_json(self) -> str | None:
        """Data and layout as JSON."""


@dataclass(frozen=True, slots=True)
class Points:
    """One series of a `paired_points` figure: a value per x, in x order."""

    name: str
    values: Sequence[float]
    colour: Colour
    symbol: str = "circle"


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a `curves` figure; with `texts`, one per point, its points are marked, and show their text.

    `dash` is a style of Plotly's, such as `dot`, or empty for points without a line; `symbol` is that of the points;
    `shape` is `linear`, or that of steps.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: Colour
    texts: Sequence[str] = ()
    dash: str = "solid"
    symbol: str = "circle"
    size: int = 7
    shape: str = "linear"


@dataclass(frozen=True, slots=True)
class TierSeries:
    """One row of a `levels` figure: a quantity over time, and the limit it must keep."""

    name: str
    values: Sequence[float]
    limit: float
    colour: Colour


def stacked_bars(
    x: Sequence[float] | Sequence[str],
    parts: Mapping[str, Sequence[float]],
    colours: Mapping[str, Colour],
    *,
    x_title: str,
    y_title: str,
) -> Any:
    """A bar per x, which is a position, a time or a name, made of `parts` from the bottom up."""
    figure = _figure(x_title=x_title, y_title=y_title, height=400)
    for name, values in parts.items():
        _same_length(name, values, x)
        figure.add_bar(
            x=list(x),
            y=list(values),
            name=name,
            marker={"color": colours[name].light, "line": {"width": 0}},
            hovertemplate="%{y:,.3~g}" if isinstance(next(iter(values), 0), float) else "%{y:,}",
        )
    figure.update_layout(barmode="stack", bargap=0.18, legend_traceorder="normal")
    _span(figure, [at for at in x if isinstance(at, int)])
    return figure


def paired_points(
    x: Sequence[int],
    before: Points,
    after: Points,
    emphasised: Sequence[bool],
    *,
    x_title: str,
    y_title: str,
    rest: str,
    marks: Mapping[str, float],
) -> Any:
    """Two values per x, joined by a line where `emphasised`, pale where not.

    Args:
        x: Positions.
        before: The values to compare with.
        after: The values of interest.
        emphasised: Per x, whether the pair is what the figure is about.
        x_title: Of the axis.
        y_title: Of the axis.
        rest: What the pale pairs are, for the legend.
        marks: By the name of a series, a level to draw across in its colour.
    """
    for points in (before, after):
        _same_length(points.name, points.values, x)
    _same_length("emphasised", emphasised, x)
    figure = _figure(x_title=x_title, y_title=y_title, height=430)
    strong = [i for i, flag in enumerate(emphasised) if flag]
    pale = [i for i, flag in enumerate(emphasised) if not flag]
    figure.add_scatter(
        x=[at for i in strong for at in (x[i], x[i], None)],
        y=[value for i in strong for value in (before.values[i], after.values[i], None)],
        mode="lines",
        line={"color": MUTED.light, "width": 1},
        opacity=0.45,
        showlegend=False,
        hoverinfo="skip",
    )
    for points in (before, after):
        for chosen, opacity, size, name, rank in (
            (pale, 0.4, 6, f"{points.name}, {rest}", 2),
            (strong, 1.0, 9, points.name, 1),
        ):
            figure.add_scatter(
                x=[x[i] for i in chosen],
                y=[points.values[i] for i in chosen],
                mode="markers",
                name=name,
                legendrank=rank,
                marker={"color": points.colour.light, "size": size, "symbol": points.symbol, "opacity": opacity},
                hovertemplate="%{y:,.1f}",
            )
        if points.name in marks:
            level, text = marks[points.name], f"p50 {quantity(marks[points.name])}"
            figure.add_hline(y=level, line={"color": points.colour.light, "width": 1.3, "dash": "dot"}, layer="below")
            right = {"xref": "x domain", "x": 1, "xanchor": "left", "xshift": 6, "yanchor": "middle"}
            figure.add_annotation(text=text, font={"size": 13}, y=level, showarrow=False, **right)
    figure.update_layout(margin_r=80)
    _span(figure, x)
    return figure


def curves(
    lines: Sequence[Curve],
    *,
    x_title: str,
    y_title: str,
    logarithmic: bool = False,
    bands: Sequence[tuple[float, float]] = (),
) -> Any:
    """Lines over a common axis, which may be `logarithmic`; `bands` are shaded ranges of it."""
    figure = _figure(x_title=x_title, y_title=y_title, height=400)
    for line in lines:
        _same_length(line.name, line.y, line.x)
        if line.texts:
            _same_length(line.name, line.texts, line.x)
        figure.add_scatter(
            x=list(line.x),
            y=list(line.y),
            name=line.name,
            mode="+".join(("lines",) * bool(line.dash) + ("markers",) * bool(line.texts)),
            line={"color": line.colour.light, "width": 2, "dash": line.dash or "solid", "shape": line.shape},
            marker={"symbol": line.symbol, "size": line.size, "color": line.colour.light},
            text=list(line.texts) or None,
            hovertemplate="%{text}" if line.texts else "%{y:,.3~g}",
        )
    for start, end in bands:
        shade = RUNS["recompute"].wash().light
        figure.add_vrect(x0=start, x1=end, fillcolor=shade, opacity=0.45, line_width=0, layer="below")
    if logarithmic:
        ticks = _log_ticks([x for line in lines for x in line.x if x > 0])
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,.10g}" for tick in ticks])
    return figure


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Powers of ten over the range of `values`; over two decades or less, also twice and five times each."""
    low, high = (math.log10(each(values, default=1.0)) for each in (min, max))
    steps = (1, 2, 5) if high - low <= 2 else (1,)
    return [float(f"{step}e{power}") for power in range(math.floor(low), math.ceil(high) + 1) for step in steps]


def levels(x: Sequence[float], rows: Sequence[TierSeries], *, x_title: str, unit: str) -> Any:
    """One panel per row: the quantity filled from zero, its limit dashed."""
    subplots = _plotly("plotly.subplots")
    figure = subplots.make_subplots(rows=len(rows), cols=1, shared_xaxes=True, vertical_spacing=0.09)
    _lay_out(figure, height=110 + 125 * len(rows))
    for number, row in enumerate(rows, start=1):
        _same_length(row.name, row.values, x)
        figure.add_scatter(
            x=list(x),
            y=list(row.values),
            name=row.name,
            mode="lines",
            line={"color": row.colour.light, "width": 1.8, "shape": "hv"},
            fill="tozeroy",
            fillcolor=row.colour.wash().light,
            hovertemplate=f"%{{y:,.1f}} {unit}",
            row=number,
            col=1,
        )
        highest, note = max(row.values, default=0.0), f"capacity {row.limit:,.1f} {unit}"
        near = row.limit <= 3 * highest  # if it is far above all values, it is only printed, so that these stay visible
        if near:
            line = {"color": MUTED.light, "width": 1.3, "dash": "dash"}
            figure.add_hline(y=row.limit, line=line, row=number, col=1)
        top = 1.22 * row.limit if near else 1.3 * highest or 1.0
        figure.update_yaxes(title=_title(unit), range=[0, top], row=number, col=1)
        figure.add_annotation(
            text=f"<b>{row.name}</b>   {note}{'' if near else ' (above the scale)'}",
            xref="paper",
            yref=f"y{'' if number == 1 else number} domain",
            x=0,
            y=1.02,
            xanchor="left",
            yanchor="bottom",
            showarrow=False,
        )
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_xaxes(title=_title(x_title), row=len(rows), col=1)
    figure.update_yaxes(rangemode="tozero", nticks=4)
    figure.update_layout(showlegend=False, margin_l=64)
    return figure


def plotly_javascript() -> str:
    """Plotly's own script, to put into a page."""
    return str(_plotly("plotly.offline").get_plotlyjs())


def _plotly(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ReportError(
            f"figures need plotly 6, which cannot be imported ({error}): {with_extra('report')}"
        ) from error


def _figure(*, x_title: str, y_title: str, height: int) -> Any:
    figure = _plotly("plotly.graph_objects").Figure()
    _lay_out(figure, height=height)
    figure.update_xaxes(title=_title(x_title), showgrid=False, zeroline=False)
    figure.update_yaxes(title=_title(y_title), rangemode="tozero", nticks=7)
    return figure


def _span(figure: Any, x: Sequence[int]) -> None:
    """Show all positions, with the same margin in every figure."""
    if x:
        figure.update_xaxes(range=[min(x) - 0.8, max(x) + 0.8])


def _lay_out(figure: Any, *, height: int) -> None:
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 36, "b": 48},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 13},
        hovermode="x unified",
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        separators=".\u2009",
    )


def _title(text: str) -> dict[str, Any]:
    return {"text": text, "font": {"size": 13, "color": MUTED.light}, "standoff": 8}


def _same_length(name: str, values: Sequence[Any], x: Sequence[Any]) -> None:
    if len(values) != len(x):
        raise ReportError(f"{name}: expected {len(x)} values, one per x position, got {len(values)}")
