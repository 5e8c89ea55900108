"""Figures of a page as images: Chromium draws the page once, without a window or network, and says what it drew."""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import wrap
from typing import Final
from urllib.parse import unquote_to_bytes

from longshore.errors import ReportError
from longshore.report.page import Page, write_whole

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS: Final = 120.0
"""The longest wait for Chromium."""

_FLAGS: Final = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions",
    "--virtual-time-budget=100000000", "--dump-dom",
)  # fmt: skip

_SCRIPT: Final = """<script>(async () => {
  const made = [], notes = NOTES, below = 6 + 14 * notes.length;
  for (const [id, text] of FIGURES) {
    const from = document.getElementById(id), layout = structuredClone(from.layout), margin = layout.margin;
    const [width, height] = [960, layout.height + 40 + below], holder = document.createElement("div");
    document.body.append(holder);
    Object.assign(layout, { width, height, autosize: false, paper_bgcolor: "#ffffff" });
    margin.t += 40;
    margin.b += below;
    layout.title = { text, x: 0, xref: "container", xanchor: "left", pad: { l: 16 },
                     y: 1 - 24 / height, yref: "container", font: { size: 18 } };
    layout.annotations = [...(layout.annotations || []), ...notes.map((text, at, all) => ({
      text, showarrow: false, xref: "paper", x: 0, xanchor: "left", xshift: 16 - margin.l, align: "left",
      yref: "paper", y: 0, yanchor: "bottom", yshift: 6 - margin.b + 14 * (all.length - 1 - at),
      font: { size: 10, color: "#606872" } }))];
    await Plotly.newPlot(holder, structuredClone(from.data), layout, { staticPlot: true });
    for (const format of KINDS)
      made.push(await Plotly.toImage(holder, { format, width, height, scale: format === "png" ? 2 : 1 }));
    Plotly.purge(holder);
    holder.remove();
  }
  return made;
})().catch(String).then((made) => {
  document.body.replaceChildren(Object.assign(document.createElement("pre"), { textContent: JSON.stringify(made) }));
})</script>"""


def find_browser() -> str | None:
    """The path of Chromium or Chrome, or of what `LONGSHORE_BROWSER` names; `None` if there is none."""
    named = os.environ.get("LONGSHORE_BROWSER")
    return next((path for name in ((named,) if named else _NAMES) if (path := shutil.which(name))), None)


def check_browser() -> str:
    """The path of Chromium; raises `ReportError` without it."""
    found = find_browser()
    if found is None:
        raise ReportError(
            "images of figures are drawn by Chromium, which was not found: apt-get install chromium, or set "
            "LONGSHORE_BROWSER to the path of Chromium or Chrome"
        )
    return found


def export_figures(page: Page, folders: Mapping[str, Path]) -> Iterator[Path]:
    """Write the figures of `page` as images, by kind (`svg`, `png`) into `folders`; yields their paths.

    Each has its title above, and the provenance of the page below. A PNG has twice the size. Raises `ReportError`.
    """
    wanted = [(title, kind) for _, title in page.figures for kind in folders]
    for (title, kind), image in zip(wanted, _drawn(page, list(folders)) if wanted else (), strict=True):
        path = folders[kind] / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.{kind}"
        write_whole(path, image, "figure")
        yield path


def _drawn(page: Page, kinds: list[str]) -> list[bytes]:
    """The images of all figures of `page`, in all `kinds` of each."""
    notes = [line for note in page.provenance for line in wrap(note, 150)]
    values = {"NOTES": notes, "FIGURES": page.figures, "KINDS": kinds}
    plain = {name: json.dumps(value).replace("<", "\\u003c") for name, value in values.items()}
    script = re.sub("|".join(plain), lambda name: plain[name[0]], _SCRIPT)
    browser = check_browser()
    with tempfile.TemporaryDirectory(prefix="longshore-browser-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch, "page.html")
        path.write_text(page.html().replace("</body>", f"{script}</body>"), "utf-8")
        command = [browser, *_FLAGS, f"--user-data-dir={scratch}/profile", path.as_uri()]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
        except subprocess.TimeoutExpired as error:
            raise ReportError(f"{browser} has not drawn the figures within {_SECONDS:.0f} s") from error
        except OSError as error:
            raise ReportError(f"cannot start {browser}: {error.strerror or error}") from error
    found = re.search(r"<pre>(.*)</pre>", done.stdout.decode("utf-8", "replace"), re.DOTALL)
    if found is None:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise ReportError(f"{browser} ended with {done.returncode} and drew nothing: {said}")
    urls = json.loads(html.unescape(found[1]))
    if not isinstance(urls, list):
        raise ReportError(f"the page failed: {urls}")
    return [_content(url) for url in urls]


def _content(url: str) -> bytes:
    head, _, data = url.partition(",")
    return base64.b64decode(data) if head.endswith(";base64") else unquote_to_bytes(data)
