"""Type every command of the guides and compare what it prints: python -m
tests.docs.check [PAGE ...]

Each page has a folder of its own with copies of experiments and model_defs, a home folder and a
shell, in which its commands are typed in their order. `tests/docs/pages.py` says how a page is
written. Exits with 1 where a page shows what does not work.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.pages import Command, Fence, PageError, first_difference, read_page

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "experiments/README.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
]
_LIMIT = 600.0  # seconds for one command; a sweep takes five minutes beside ten busy processes
_END = "docs-check-end"


@dataclass
class PageReport:
    """What became of a page's commands and programs."""

    path: Path
    faults: list[str] = field(default_factory=list)
    typed: int = 0
    programs: int = 0
    left: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def line(self) -> str:
        """Return the page's line of the result."""
        left = ", ".join(f"{count} need {what}" for what, count in sorted(self.left.items()))
        parts = [f"{self.typed} commands", f"{self.programs} programs" if self.programs else "", left]
        verdict = f"{len(self.faults)} WRONG" if self.faults else "as shown"
        where = name_of(self.path)
        return f"{where:<44} {verdict:<9} {self.seconds:5.0f} s  {', '.join(filter(None, parts))}"


def name_of(path: Path) -> str:
    """Return the page's path as seen from the repository."""
    return os.path.relpath(path, ROOT)


class Shell:
    """A shell that keeps its variables and folder from one command to the next."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, command: str) -> tuple[list[str], int]:
        """Type a command and return the lines that it prints and its exit status.

        Raises:
            TimeoutError: the command has not ended in time; the shell is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{{ {command}\n}} </dev/null\nprintf '\\n{_END} %d\\n' $?\n".encode())
        self._process.stdin.flush()
        until, text = time.monotonic() + _LIMIT, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while f"\n{_END} ".encode() not in text or not text.endswith(b"\n"):
                chunk = (
                    os.read(self._process.stdout.fileno(), 65536) if selector.select(until - time.monotonic()) else b""
                )
                if not chunk:
                    self.close()
                    raise TimeoutError(f"no end after {_LIMIT:.0f} s")
                text += chunk
        printed, _, status = text.decode(errors="replace").rpartition(f"\n{_END} ")
        return [line.rpartition("\r")[2] for line in printed.split("\n")], int(status)

    def close(self) -> None:
        """End the shell and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def check_page(path: Path) -> PageReport:
    """Type the commands of one page in a folder of their own."""
    report, started = PageReport(path), time.monotonic()
    try:
        fences = read_page(path)
    except PageError as error:
        report.faults.append(str(error))
        return report
    if any(fence.run or any(fence.commands()) for fence in fences):
        with tempfile.TemporaryDirectory(prefix="zt-docs-") as place:
            _type_page(fences, Path(place), report)
    report.seconds = time.monotonic() - started
    return report


def _type_page(fences: list[Fence], place: Path, report: PageReport) -> None:
    folder, home = place / "work", place / "home"
    home.mkdir()
    for name in ("experiments", "model_defs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    shell = Shell(folder, _environment(home))
    try:
        programs: list[str] = []
        for fence in fences:
            _type_fence(fence, folder, shell, report, programs)
    except TimeoutError as error:
        report.faults.append(f"{name_of(report.path)}: {error}; the rest of the page was not typed")
    finally:
        shell.close()
        subprocess.run(
            ["bash", "-c", "zero-trial master down"],
            env=_environment(home),
            cwd=folder,
            capture_output=True,
            timeout=120,
        )


def _environment(home: Path) -> dict[str, str]:
    """Return a new user's environment, in which the kernels need not be compiled again."""
    cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    kept = {name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH", "TMPDIR") if name in os.environ}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "HOME": str(home), "XDG_CACHE_HOME": cache, "REPOSITORY": str(ROOT)}


def _type_fence(fence: Fence, folder: Path, shell: Shell, report: PageReport, programs: list[str]) -> None:
    """Do what a fence asks for. ``programs`` are those of the page so far, which the next one goes
    on from."""
    for command in fence.first:
        _type(Command(fence.line, command), shell, report)
    if fence.file is not None:
        (folder / fence.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / fence.file).write_text(fence.text + "\n", encoding="utf-8")
    if fence.run:
        if fence.needs:
            report.left[fence.needs[0][0]] += 1
            return
        programs.append(fence.text)
        program = folder / f"program_{fence.line}.py"
        program.write_text("\n".join(programs) + "\n", encoding="utf-8")
        _type(Command(fence.line, f"python {program}"), shell, report)
        report.programs += 1
    for command in fence.commands():
        if command.needs is not None:
            report.left[command.needs] += 1
        else:
            _type(command, shell, report)
            report.typed += 1


def _type(command: Command, shell: Shell, report: PageReport) -> None:
    where = f"{name_of(report.path)}:{command.line}: $ {command.text}"
    try:
        printed, status = shell.run(command.text)
    except TimeoutError:
        report.faults.append(f"{where}\n    did not end in {_LIMIT:.0f} s")
        raise
    if command.shown is not None:
        difference = first_difference(command.shown, printed)
        if difference is not None:
            shown, got = difference
            everything = "\n".join(f"      | {line}" for line in printed if line.strip())
            report.faults.append(f"{where}\n    expected  {shown}\n    got       {got}\n{everything}")
    elif bool(status) is not command.fails:
        tail = "\n".join(f"      | {line}" for line in printed[-15:] if line.strip())
        report.faults.append(
            f"{where}\n    expected  {'failure' if command.fails else 'success'}\n    got       exit code {status}\n{tail}"
        )


def page_of(name: str) -> Path:
    """Return the page at a path, or of that name among all pages: "offload". Raises PageError."""
    if Path(name).is_file():
        return Path(name).resolve()
    named = [page for page in PAGES if name in (page.stem, page.name)]
    if len(named) != 1:
        raise PageError(f"{name}: {len(named)} pages have this name; write a path, as docs/guide/offload.md")
    return named[0]


def main(arguments: list[str]) -> int:
    """Check the pages, two at a time, and print a line for each."""
    started = time.monotonic()
    try:
        pages = [page_of(name) for name in arguments] or PAGES
    except PageError as error:
        print(error, file=sys.stderr)
        return 2
    reports: list[PageReport] = []
    with ThreadPoolExecutor(max_workers=2) as pool:
        for report in pool.map(check_page, pages):
            print("\n".join([report.line(), *report.faults]), flush=True)
            reports.append(report)
    left = sum((report.left for report in reports), Counter[str]())
    wrong = sum(len(report.faults) for report in reports)
    said = ", ".join(f"{count} need {what}" for what, count in sorted(left.items())) or "none"
    print(
        f"{sum(report.typed for report in reports)} commands and {sum(report.programs for report in reports)} programs"
        f" of {len(reports)} pages typed in {time.monotonic() - started:.0f} s: {wrong} wrong; not typed here: {said}"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
