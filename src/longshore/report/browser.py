"""Chromium without a window: opens pages in both colour schemes and at any width, and exports their figures.

    with Browser() as browser:
        view = browser.open(path, width=390, dark=True)
        view.evaluate("document.title"), view.complaints, view.screenshot()

It is spoken to over two pipes, in the DevTools protocol: one JSON object per message, each ended by a zero byte. It
needs no driver and no package of Python; the page's own security policy keeps it from the network.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import unquote_to_bytes

from longshore.errors import ReportError
from longshore.report.page import write_whole

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS: Final = 120.0
"""The longest wait for an answer."""

_FLAGS: Final = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio",
    "--remote-debugging-pipe",
)  # fmt: skip


_START: Final = """
import os, sys
for theirs, number in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(theirs), number)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts the browser, which reads from descriptor 3 and writes to 4."""


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


class Browser:
    """A running Chromium with a profile of its own, which is removed at the end. Raises `ReportError`."""

    def __init__(self) -> None:
        program = check_browser()
        self._profile = tempfile.TemporaryDirectory(prefix="longshore-browser-", ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        theirs = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (theirs_in, theirs_out)]
        command = [program, *_FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, *map(str, theirs), *command],
                pass_fds=theirs,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            os.close(ours_in)
            os.close(ours_out)
            self._profile.cleanup()
            raise ReportError(f"cannot start {program}: {error.strerror or error}") from error
        finally:
            for each in (theirs_in, theirs_out, *theirs):
                os.close(each)
        self._in, self._out = ours_in, ours_out
        self._rest = b""
        self._number = 0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        os.close(self._out)  # which ends it
        os.close(self._in)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> PageView:
        """The page at `path` in a viewport of `width` x `height` CSS pixels."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        view = PageView(self, session)
        for domain in ("Page", "Runtime", "Log"):
            view.call(f"{domain}.enable")
        view.look(width, height=height, dark=dark)
        found = view.call("Page.navigate", {"url": path.resolve().as_uri()})
        if "errorText" in found:
            raise ReportError(f"{path}: {found['errorText']}")
        view.evaluate(_DRAWN)
        return view

    def call(self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None) -> Any:
        """The result of a DevTools method. Raises `ReportError` if it fails, or if the browser is gone or silent."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters or {}}
        message |= {} if session is None else {"sessionId": session}
        data = json.dumps(message).encode() + b"\0"
        try:
            while data:
                data = data[os.write(self._out, data) :]
        except OSError as error:
            raise ReportError(f"the browser ended: {error.strerror}") from error
        until = time.monotonic() + _SECONDS
        while True:
            answer = self._message(until)
            if answer.get("id") == self._number:
                break
            self._events.append(answer)
        if "error" in answer:
            raise ReportError(f"{method}: {answer['error'].get('message')}")
        return answer["result"]

    def events_of(self, session: str) -> list[dict[str, Any]]:
        """What a page has reported so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise ReportError(f"the browser has not answered for {_SECONDS:.0f} s")
            more = os.read(self._in, 1 << 20)
            if not more:
                raise ReportError("the browser ended without an answer")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


_DRAWN: Final = """new Promise((done) => {
  const ready = () => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 0);
  if (document.readyState === "complete") ready(); else addEventListener("load", ready);
})"""

_SETTLED: Final = """(async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 20)));
  const wide = (plot) => plot._fullLayout && Math.abs(plot._fullLayout.width - plot.clientWidth) > 1;
  for (let tries = 0; tries < 500; tries++) {
    await frame();
    await frame();
    if (!Array.from(document.querySelectorAll(".plot")).some(wide)) return;
  }
})()"""

_IMAGE: Final = """(async () => {
  const from = document.getElementById(%s), holder = document.createElement("div");
  holder.style = "position: absolute; left: -10000px; top: 0";
  document.body.append(holder);
  const layout = structuredClone(from.layout), notes = %s, below = 6 + 14 * notes.length;
  const [width, height] = [960, layout.height + 40 + below];
  Object.assign(layout, { width, height, autosize: false, paper_bgcolor: "#ffffff" });
  const margin = layout.margin;
  margin.t += 40;
  margin.b += below;
  layout.title = { text: %s, x: 0, xref: "container", xanchor: "left", pad: { l: 16 },
                   y: 1 - 24 / height, yref: "container", font: { size: 18 } };
  const annotations = notes.map((text, at, all) => ({
    text, showarrow: false, xref: "paper", x: 0, xanchor: "left", xshift: 16 - margin.l, align: "left",
    yref: "paper", y: 0, yanchor: "bottom", yshift: 6 - margin.b + 14 * (all.length - 1 - at),
    font: { size: 10, color: "#606872" } }));
  layout.annotations = [...(layout.annotations || []), ...annotations];
  await Plotly.newPlot(holder, structuredClone(from.data), layout, { staticPlot: true });
  const url = await Plotly.toImage(holder, { format: %s, width, height, scale: %s });
  Plotly.purge(holder);
  holder.remove();
  return url;
})()"""


class PageView:
    """An open page."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, parameters: dict[str, Any] | None = None) -> Any:
        """As `Browser.call`, for this page."""
        return self._browser.call(method, parameters, self._session)

    def look(self, width: int, *, height: int = 900, dark: bool = False) -> None:
        """Change the viewport and the colour scheme, and wait until the page has been drawn again."""
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.evaluate(_SETTLED)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited; raises `ReportError` for an exception in it."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", asked)
        if "exceptionDetails" in found:
            raise ReportError(f"the page failed: {_thrown(found['exceptionDetails'])}")
        return found["result"].get("value")

    @property
    def complaints(self) -> list[str]:
        """Exceptions, and errors and warnings on the console."""
        found = []
        for event in self._browser.events_of(self._session):
            about = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(_thrown(about["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                    found.append(" ".join(str(each.get("value", each.get("description"))) for each in about["args"]))
                case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                    found.append(about["entry"]["text"])
        return found

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        asked = {"format": "png", "captureBeyondViewport": True, "clip": clip}
        return base64.b64decode(self.call("Page.captureScreenshot", asked)["data"])

    def image(self, figure: str, kind: str, title: str, notes: Sequence[str]) -> bytes:
        """A figure of the page, by its id, as an image: `kind` is `svg` or `png`, with `title` above, `notes` below."""
        scale, notes = 2 if kind == "png" else 1, [line for note in notes for line in wrap(note, 150)]
        url = self.evaluate(_IMAGE % tuple(json.dumps(each) for each in (figure, notes, title, kind, scale)))
        head, _, data = url.partition(",")
        if head.endswith(";base64"):
            return base64.b64decode(data)
        return unquote_to_bytes(data)

    def close(self) -> None:
        """Close the page."""
        self.call("Page.close")


def export_figures(
    path: Path, figures: Iterable[tuple[str, str]], notes: Sequence[str], folders: Mapping[str, Path]
) -> Iterator[Path]:
    """Write the `figures`, ids and titles, of the page at `path` as images, by kind into `folders`; yields their paths.

    `notes` are the lines below each figure. Raises `ReportError`.
    """
    if not folders:
        return
    with Browser() as browser:
        view = browser.open(path, width=1280)
        for figure, title in figures:
            for kind, folder in folders.items():
                image = folder / f"{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.{kind}"
                write_whole(image, view.image(figure, kind, title, notes), "figure")
                yield image


def _thrown(details: dict[str, Any]) -> str:
    exception = details.get("exception", {})
    return str(exception.get("description") or exception.get("value") or details.get("text"))
