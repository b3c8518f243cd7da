"""Run commands with a time limit, and return their output.

A command is a process group: when it ends or is killed, so are its children, which would otherwise
keep the GPU. Its output goes into a file, so that nothing printed before a crash or a hang is
lost. Programs with several tasks print a row of JSON for each.
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
# exit code: the last printed row has the error, and the process could not continue
BROKEN = 3
FRUITLESS = 2  # consecutive starts without a row
TICK = 0.1  # seconds
Row = dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """``code``: as in subprocess; None if the time limit ended it."""

    code: int | None
    said: str
    seconds: float

    @property
    def rows(self) -> list[Row]:
        """Return the lines that are JSON objects."""
        found = []
        for line in self.said.splitlines():
            try:
                row = json.loads(line) if line.startswith("{") else None
            except ValueError:
                continue
            found += [row] if isinstance(row, dict) else []
        return found

    def tail(self, lines: int = 16) -> list[str]:
        """Return the end of the output without rows and paths of this machine."""
        clean = self.said.replace(f"{ROOT}/", "").replace(str(Path.home()), "~").splitlines()
        return [line[:400] for line in clean if line.strip() and not line.startswith("{")][-lines:]

    def why(self) -> str:
        """Return how it ended, in one line."""
        how = f"not done within {self.seconds:.0f} s" if self.code is None else f"ended with {self.code}"
        last = self.tail(1)
        return f"{how}: {last[0]}" if last else how


def run(
    command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None, silence: float = float("inf")
) -> Ended:
    """Run in the repository's root, with its sources importable. End the command after ``seconds``,
    or after ``silence`` seconds without output."""
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
    """Return the exit code, or None if the time is up."""
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
    """Kill the process and its remaining children."""
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
    """Return one row per name, each with its ``name``, from a program that is passed the names and
    prints a row for each.

    If it crashes or stops printing, the current name gets a row with ``why``, and the program
    starts again with the names that follow.
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
