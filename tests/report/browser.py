"""Pages in a real browser, without a network: what they look like, and what they do when they are
used."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT = 90  # seconds; one second is usual

needs_browser = pytest.mark.skipif(
    CHROMIUM is None,
    reason="no chromium on this machine: reports are not looked at in a browser (apt-get install chromium)",
)

QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--virtual-time-budget=4000",
]

# The page stands in a frame of a given width, and SCRIPT, which sees it as `page`, says what it
# found.
FRAME = """<!DOCTYPE html><body style="margin:0"><iframe id="frame" width="{width}" height="{height}" style="border:0" srcdoc="{page}"></iframe>
<pre id="found"></pre><script>
document.getElementById("frame").addEventListener("load", () => {{
  const frame = document.getElementById("frame"), page = frame.contentDocument, view = frame.contentWindow;
  const all = (selector) => [...page.querySelectorAll(selector)];
  // What sticks out to the right, except from what scrolls by itself.
  const outside = () => all("body *").filter((e) => e.getBoundingClientRect().right > view.innerWidth + 1)
    .filter((e) => !e.closest(".wide, pre, svg")).map((e) => e.outerHTML.slice(0, 80));
  let found;
  try {{ found = (() => {{ {script} }})(); }} catch (error) {{ found = {{ error: String(error) }}; }}
  document.getElementById("found").textContent = "FOUND" + btoa(unescape(encodeURIComponent(JSON.stringify(found)))) + "END";
}});
</script></body>"""


def ask(folder: Path, html: str, script: str, *, width: int = 1280, height: int = 6000) -> Any:
    """What ``script`` returns, run beside the page ``html`` that is shown ``width`` pixels wide."""
    path = folder / "asked.html"
    path.write_text(FRAME.format(width=width, height=height, page=escape(html), script=script), encoding="utf-8")
    done = run(folder, "--dump-dom", path.as_uri())
    encoded = re.search(r'<pre id="found">FOUND(.*?)END</pre>', done)
    assert encoded is not None, "the script did not run"
    found = json.loads(base64.b64decode(encoded.group(1)))
    if isinstance(found, dict) and "error" in found:
        raise AssertionError(found["error"])
    return found


def screenshot(folder: Path, html: str, height: int = 3000) -> Path:
    """A picture of the page as a phone (390 pixels) and a desk (1280 pixels) show it, beside each
    other."""
    path, picture = folder / "shown.html", folder / "shown.png"
    frames = "".join(
        f'<iframe width="{width}" height="{height}" style="border:0" srcdoc="{escape(html)}"></iframe>'
        for width in (390, 1280)
    )
    path.write_text(f'<!DOCTYPE html><body style="margin:0;white-space:nowrap">{frames}</body>', encoding="utf-8")
    run(folder, f"--window-size=1670,{height}", f"--screenshot={picture}", path.as_uri())
    return picture


def run(folder: Path, *arguments: str) -> str:
    """The browser with a fresh profile; its standard output."""
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={folder / 'profile'}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
