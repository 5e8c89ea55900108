"""Reports as one self-contained HTML page. Figures need the `report` extra."""

from longshore.report.page import Page
from longshore.report.plots import (
    REASONS,
    RUNS,
    SOURCES,
    Colour,
    Curve,
    Figure,
    Points,
    TierSeries,
    curves,
    levels,
    paired_points,
    plotly_javascript,
    stacked_bars,
)

__all__ = [
    "REASONS",
    "RUNS",
    "SOURCES",
    "Colour",
    "Curve",
    "Figure",
    "Page",
    "Points",
    "TierSeries",
    "curves",
    "levels",
    "paired_points",
    "plotly_javascript",
    "stacked_bars",
]
