"""Make the pictures of docs/images again: python -m tests.report.screenshots [FOLDER]

Every page of the board and of the reports, as a desk (1280 pixels) and a phone (390) show it.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import closing
from pathlib import Path

from tests.report import samples
from tests.report.browser import Browser
from tests.report.conftest import served_master, served_runs
from zero_trial.report.master_reader import from_master_store
from zero_trial.report.run_page import render_run
from zero_trial.report.run_reader import from_run_folder
from zero_trial.report.sweep_page import render_sweep

HEIGHTS = {1280: 1500, 390: 1700}


def main(folder: Path) -> None:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name, closing(Browser(Path(name))) as browser:
        work = Path(name)
        samples.runs(work / "runs")
        store = samples.store(work / "master")
        with served_runs(work / "runs") as runs, served_master(store) as master:
            for board, anchor, there, shown in (
                (runs, "#/", "#list", "board-runs"),
                (runs, "#/run/0004", "#log .lines > div", "board-run"),
                (runs, "#/compare/0001,0002,0004", "#differences", "board-compare"),
                (master, "#/", "#list", "board-experiments"),
                (master, "#/experiment/1", "#trials", "board-experiment"),
                (master, "#/trial/5", "#log .lines > div", "board-trial"),
            ):
                _take(browser, board, anchor, there, folder / shown)
        for shown, page in (
            ("report-run", render_run(from_run_folder(work / "runs" / "0001"))),
            ("report-sweep", render_sweep(from_master_store(store.database, 1))),
        ):
            path = work / f"{shown}.html"
            path.write_text(page, encoding="utf-8")
            _take(browser, path.as_uri(), "", "section", folder / shown)


def _take(browser: Browser, address: str, anchor: str, there: str, path: Path) -> None:
    for width, height in HEIGHTS.items():
        browser.size(width, dark=width == 390 and "trial" in path.name)
        browser.open("about:blank")
        browser.open(address)
        if anchor:
            browser.wait("document.querySelector('.link.good')")
            browser.ask(f"location.hash = '{anchor}'")
        browser.wait(f"document.querySelector('{there}')")
        browser.picture(path.with_name(f"{path.name}-{width}.png"), height)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images"))
