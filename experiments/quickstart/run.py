"""The quickstart: a master of its own, Determined's ``det`` command, one experiment, and what to
try next.

    python experiments/quickstart/run.py           the master ends with it; nothing is left running
    python experiments/quickstart/run.py --keep    the master stays up: try what is printed
    python experiments/quickstart/run.py CONFIG.yaml MODEL_DIR    another experiment

It does no more than what a person would type:

    zero-trial master up --root runs/master
    det experiment create -f experiments/quickstart/const.yaml model_defs/gpt
    zero-trial master down --root runs/master
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]
BIN = Path(sys.executable).parent
CONFIG, MODEL = HERE / "const.yaml", PROJECT / "model_defs" / "gpt"


def main() -> int:
    """Returns the exit code: 0 if the experiment completed."""
    options = _options()
    begun = time.monotonic()
    root = options.root.resolve()
    with _master(root, keep=options.keep) as environ:
        command = ["det", "experiment", "create", "-f", _shown(options.config), _shown(options.model)]
        created = _follow(command, environ)
        if created.experiment is None:
            return created.code or 1
        try:
            code = _run(["det", "experiment", "wait", created.experiment], environ, quiet=True)
        except KeyboardInterrupt:
            _run(["det", "experiment", "kill", created.experiment], environ)
            raise
        _summary(created.experiment, code, time.monotonic() - begun, root, kept=options.keep)
    return code


class Created:
    """What following ``det experiment create`` told: its exit code and, where one was made, the
    experiment's number."""

    def __init__(self, code: int, experiment: str | None) -> None:
        self.code = code
        self.experiment = experiment


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the quickstart experiment on its own master.")
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--root", type=Path, default=PROJECT / "runs" / "master", help="the master's folder")
    parser.add_argument("--keep", action="store_true", help="leave the master running")
    return parser.parse_args()


@contextmanager
def _master(root: Path, *, keep: bool) -> Iterator[dict[str, str]]:
    """The environment in which ``det`` talks to a master that is up."""
    zero_trial = str(BIN / "zero-trial")
    _say("zero-trial master up --root " + _shown(root))
    exports = subprocess.run(
        [zero_trial, "master", "up", "--root", str(root), "--slots", "2", "--env"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    named = dict(line.removeprefix("export ").split("=", 1) for line in exports.splitlines() if "=" in line)
    try:
        yield os.environ | named | {"PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"}
    finally:
        if not keep:
            subprocess.run([zero_trial, "master", "down", "--root", str(root)], check=False, stdout=subprocess.DEVNULL)


def _follow(command: Sequence[str], environ: dict[str, str]) -> Created:
    """Shows what a ``det`` command prints, line by line, without the harness's own chatter."""
    _say(" ".join(command))
    experiment = None
    with subprocess.Popen(
        [str(BIN / command[0]), *command[1:]],
        env=environ,
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        for line in child.stdout or ():
            found = re.match(r"Created experiment (\d+)", line)
            experiment = found.group(1) if found else experiment
            if not _is_chatter(line):
                print(_plain(line), end="", flush=True)
    return Created(child.returncode, experiment)


def _is_chatter(line: str) -> bool:
    return " determined: " in line or line.startswith("Preparing files") or not line.strip()


def _plain(line: str) -> str:
    """A trial's log line without date, container and first rank: ``[2026-01-31T12:00:00.000000Z]
    6a1f02c9 [rank=0] || train ...`` is ``12:00:00 train ...``."""
    return re.sub(r"^\[[\d-]+T([\d:]+)\.\d+Z\] .{8} (?:\[rank=0\] )?(\[rank=\d+\] )?\|\| ", r"\1  \2", line)


def _run(command: Sequence[str], environ: dict[str, str], *, quiet: bool = False) -> int:
    if not quiet:
        _say(" ".join(command))
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]], check=False, env=environ, cwd=PROJECT, stdout=output
    ).returncode


def _summary(experiment: str, code: int, seconds: float, root: Path, *, kept: bool) -> None:
    state = "completed" if code == 0 else "did NOT complete"
    print(f"\nexperiment {experiment} {state}; {seconds:.0f} s from the start of the master")
    page = root / f"experiment-{experiment}.html"
    report = [str(BIN / "zero-trial"), "sweep", "report", experiment, "--root", str(root), "-o", str(page)]
    if subprocess.run(report, check=False, stdout=subprocess.DEVNULL).returncode == 0:
        print(f"report {_shown(page)}")
    print("\nnext:")
    if (BIN / "activate").is_file() and str(BIN) not in os.environ.get("PATH", "").split(os.pathsep):
        print(f"  source {_shown(BIN)}/activate                          # zero-trial and det")
    again = "points det to this master" if kept else "starts this master again, and points det to it"
    print(f'  eval "$(zero-trial master up --root {_shown(root)} --env)"  # {again}')
    print(f"  det experiment describe {experiment}")
    print("  det experiment create -f experiments/adaptive_asha/adaptive.yaml model_defs/gpt   # a search")
    print("  zero-trial run experiments/quickstart/const.yaml model_defs/gpt                   # without any master")
    print(
        "  docs/guide/first_sweep.md                                                         # a trial and a sweep of your own"
    )
    if kept:
        print(f"  zero-trial master down --root {_shown(root)}")


def _shown(path: Path) -> str:
    return str(path.relative_to(PROJECT)) if path.is_relative_to(PROJECT) else str(path)


def _say(command: str) -> None:
    print(f"$ {command}", flush=True)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
