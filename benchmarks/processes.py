"""Commands that end in time whatever they do, and what they said until then.

A command is a process group: when it ends, or is ended, so do its children, which would otherwise
keep the GPU. Its output goes into a file, so that what was said before a crash or a hang is not
lost. Programs that do one thing after the other print a row of JSON for each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
# exit code: the last row that was printed says what went wrong, and the process could not go on
BROKEN = 3
FRUITLESS = 2  # starts in a row that bring no row
TICK = 0.1  # seconds
Row = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """``code``: as of subprocess; None where it was ended because of the time."""

    code: int | None
    said: str
    seconds: float

    @property
    def rows(self) -> list[Row]:
        """The lines that are JSON objects."""
        found = []
        for line in self.said.splitlines():
            try:
                row = json.loads(line) if line.startswith("{") else None
            except ValueError:
                continue
            found += [row] if isinstance(row, dict) else []
        return found

    def tail(self, lines: int = 16) -> list[str]:
        """The end of what was said, rows left out, without paths of this machine."""
        clean = self.said.replace(f"{ROOT}/", "").replace(str(Path.home()), "~").splitlines()
        return [line[:400] for line in clean if line.strip() and not line.startswith("{")][-lines:]

    def why(self) -> str:
        """How it ended, in a line."""
        how = f"not done within {self.seconds:.0f} s" if self.code is None else f"ended with {self.code}"
        last = self.tail(1)
        return f"{how}: {last[0]}" if last else how


def run(
    command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None, silence: float = float("inf")
) -> Ended:
    """In the repository's root, with its sources importable. Ended after ``seconds``, or after
    ``silence`` without a word."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    given = {**os.environ, "PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", **(env or {})}
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=given, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = _watch(process, output, begin + seconds, silence)
        finally:
            _end(process)
        output.seek(0)
        return Ended(code, output.read(), time.monotonic() - begin)


def _watch(process: subprocess.Popen[Any], output: IO[str], deadline: float, silence: float) -> int | None:
    """Its exit code, or None when time is up."""
    heard, size = time.monotonic(), 0
    while process.poll() is None:
        now, grown = time.monotonic(), os.fstat(output.fileno()).st_size
        heard, size = (now, grown) if grown != size else (heard, size)
        if now >= deadline or now - heard >= silence:
            return None
        try:
            process.wait(max(0.0, min(TICK, deadline - now)))
        except subprocess.TimeoutExpired:
            continue
    return process.returncode


def _end(process: subprocess.Popen[Any]) -> None:
    """With all that it started and that is still there."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def rows(
    command: Sequence[str],
    names: Sequence[str],
    deadline: float,
    env: Mapping[str, str] | None = None,
    silence: float = float("inf"),
) -> list[Row]:
    """One row per name, each with its ``name``, from a program that gets the names and prints a row
    when it is done with one.

    Where it crashes or falls silent, the name that it was at gets a row with ``why``, and it is
    started again with those that follow.
    """
    left, found, fruitless = list(names), list[Row](), 0
    while left:
        seconds = deadline - time.monotonic()
        if seconds < 1 or fruitless >= FRUITLESS:
            reason = "no time left" if seconds < 1 else "not tried: nothing came of the starts before"
            return found + [{"name": name, "why": reason} for name in left]
        ended = run([*command, *left], seconds, env, silence)
        got = [row for row in ended.rows if row.get("name") in left]
        fruitless = 0 if got else fruitless + 1
        found += got
        left = [name for name in left if name not in {row["name"] for row in got}]
        if left and not (ended.code == BROKEN and got):
            found.append({"name": left.pop(0), "why": ended.why(), "said": ended.tail(8)})
    return found


def free_port() -> int:
    """Return a port of this host that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
