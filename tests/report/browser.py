"""Chromium without a window: opens pages in both colour schemes and at any width.

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
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from longshore.errors import ReportError
from longshore.report.images import check_browser

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

    def close(self) -> None:
        """Close the page."""
        self.call("Page.close")


def _thrown(details: dict[str, Any]) -> str:
    exception = details.get("exception", {})
    return str(exception.get("description") or exception.get("value") or details.get("text"))
