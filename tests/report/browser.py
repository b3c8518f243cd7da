"""A browser that is driven over a pipe with its own protocol: one start for many looks."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SECONDS = 60.0

needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on this machine: reports are not looked at in a browser (apt-get install chromium)",
)

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


class Browser:
    """Chromium without a window; ``closing`` ends it."""

    def __init__(self, folder: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # the browser reads commands from descriptor 3 and answers on 4
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        options = ["--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", shell, str(CHROMIUM), *QUIET, *options],
            pass_fds=[to_browser, from_browser],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._count, self._session = b"", 0, ""
        self.requested: list[str] = []
        self.faults: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.tell(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def tell(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give one command, and return its result."""
        self._count += 1
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": self._count, "method": method, "params": parameters, **session}
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], SECONDS)
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        method, parameters = found.get("method"), found.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(parameters["request"]["url"])
        if method == "Runtime.exceptionThrown":
            self.faults.append(str(parameters["exceptionDetails"].get("exception", {}).get("description")))
        if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.faults.append(str(parameters["entry"].get("text")))
        return found

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Show pages at this size, in the light or the dark."""
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self.tell("Emulation.setEmulatedMedia", features=[scheme, motion])

    def open(self, address: str) -> None:
        """Go to an address."""
        self.tell("Page.navigate", url=address)

    def ask(self, script: str) -> Any:
        """Return the value of an expression, which may be a promise, in the page."""
        found = self.tell("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]["exception"].get("description")
        return found["result"].get("value")

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Wait until an expression is true in the page."""
        until = time.monotonic() + seconds
        while not self.ask(f"Boolean({condition})"):
            assert time.monotonic() < until, (
                f"{condition} never came; the page shows: {self.ask('document.body.innerText')[:2000]}"
            )
            time.sleep(0.02)

    def key(self, name: str) -> None:
        """Press and release one key."""
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39, " ": 32}[name]
        for kind, text in ("keyDown", {"Enter": "\r", " ": " "}.get(name, "")), ("keyUp", ""):
            self.tell("Input.dispatchKeyEvent", type=kind, key=name, windowsVirtualKeyCode=code, text=text)

    def picture(self, path: Path, height: int | None = None) -> None:
        """Write what is shown as a PNG of few colors, whose bytes are few too; ``height`` limits
        it, else it is as high as the page."""
        import io

        from PIL import Image

        full = self.ask("document.documentElement.scrollHeight")
        width = self.ask("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": min(full, height or full), "scale": 1}
        data = self.tell("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)["data"]
        with Image.open(io.BytesIO(base64.b64decode(data))) as shown:
            shown.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(path, optimize=True)
