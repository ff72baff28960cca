"""A headless Chromium, spoken to through a pipe: any screen, light, dark or print, and what it says went wrong."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run --remote-debugging-pipe"
SETTLED = "new Promise(done => requestAnimationFrame(() => setTimeout(done, 300)))"


class Page:
    """The page of a browser."""

    def __init__(self, requests: int, answers: int):
        """``requests`` and ``answers``: file descriptors that the browser reads and writes."""
        self._out, self._in, self._read = requests, answers, b""
        self._number, self._session = 0, ""
        self.events: list[dict[str, Any]] = []
        """What happened: errors of scripts, messages of the console, files that were asked for."""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._ask(f"{domain}.enable")

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Show a file on a screen of this size in CSS pixels, and wait until it is drawn."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._ask("Emulation.setEmulatedMedia", features=scheme)
        self.events.clear()
        self._ask("Page.navigate", url=path.absolute().as_uri())
        self.value("new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))")
        self.value(SETTLED)

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives, as JSON."""
        answer = self._ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse there."""
        for step in (-2, 0):
            self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
        self.value(SETTLED)

    def tap(self, x: float, y: float) -> None:
        """Touch the screen there."""
        self._ask("Emulation.setTouchEmulationEnabled", enabled=True)
        for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
            self._ask("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        self.value(SETTLED)

    def picture(self, whole: bool = False) -> bytes:
        """The screen as PNG; ``whole``: all of the page."""
        return base64.b64decode(self._ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._ask("Page.printToPDF", printBackground=False, preferCSSPageSize=True)["data"])

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        request = {"id": self._number, "method": method, "params": params}
        request |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(request).encode() + b"\0")
        while True:
            message = json.loads(self._message())
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _message(self) -> bytes:
        while b"\0" not in self._read:
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError("the browser has exited")
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return message


@contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A page of a browser with a fresh ``profile`` folder."""
    theirs, requests = os.pipe()
    answers, theirs_too = os.pipe()
    words = [str(PROGRAM), *OPTIONS.split(), f"--user-data-dir={profile}"]
    # Chromium reads requests from descriptor 3 and answers to 4
    shell = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{theirs_too}', "bash", *words]
    process = subprocess.Popen(
        shell, pass_fds=(theirs, theirs_too), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs)
    os.close(theirs_too)
    try:
        yield Page(requests, answers)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
