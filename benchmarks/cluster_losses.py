"""A node of a real cluster is lost in the middle of a step, several times; the trial must go on
elsewhere.

    python benchmarks/cluster_losses.py                          # five times on Slurm and on Ray
    python benchmarks/cluster_losses.py --on slurm --losses 1    # quick

Each cluster has two nodes with two slots on this machine: Slurm's own daemons, Ray's own processes.
A trial of two ranks is in its seventh step when SIGKILL ends all processes of its node at once. The
trial must continue on the other node from its last checkpoint, report exactly what an undisturbed
trial reports, each value once, and end with the same checksums of the last checkpoint's model. Then
the node comes back. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest

from benchmarks.record import Column, number, save
from tests.master.det import running
from tests.master.engines import ENGINES, lose_one

NOTE = """Losses of a node in the middle of a step. `noticed`: seconds from the SIGKILL until the master knows; `again`: until the trial runs
on the other node; `ended`: until it has ended, with the bits of an undisturbed one. Medians; `worst` is the longest `ended`. Slurm's timeouts
(`SlurmdTimeout=4`, `MessageTimeout=4`) and Ray's health checks are those of tests/master/engines.py."""


def losses(name: str, count: int) -> dict[str, Any]:
    """Lose a node of a new cluster the given number of times; it comes back after each loss."""
    held: list[dict[str, float]] = []
    why = ""
    with tempfile.TemporaryDirectory(prefix="losses-") as folder, ENGINES[name](Path(folder) / "cluster") as cluster:
        Path(folder, "master").mkdir()
        with running(Path(folder) / "master", "--on", cluster.on, "--cpu") as det:
            whole: dict[str, Any] = {}
            for time in range(count):
                try:
                    held.append(lose_one(det, cluster, f"gate {time}", 2, whole))
                except AssertionError as error:
                    why = str(error)
                    print(f"{name}: loss {time + 1} did not hold: {why}", flush=True)
                    break
                print(f"{name}: {time + 1} of {count}: {held[-1]}", flush=True)
    row: dict[str, Any] = {"engine": name, "losses": count, "held": len(held), "why": why, "each": held}
    for key in ("noticed", "again", "ended"):
        row[key] = statistics.median(each[key] for each in held) if held else None
    return {**row, "worst": max((each["ended"] for each in held), default=None)}


def main() -> int:
    """Measure, print and save the table in results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--losses", type=int, default=5)
    options = parser.parse_args()
    settings = {**vars(options), "load": f"{os.getloadavg()[0]:.1f} before the start"}
    try:
        rows = [losses(name, options.losses) for name in options.on]
    except pytest.skip.Exception as missing:
        sys.exit(str(missing))
    columns: list[Column] = [("engine", itemgetter("engine"))]
    columns += [(key, number(key, 0)) for key in ("losses", "held")]
    columns += [(f"{key}, s", number(key)) for key in ("noticed", "again", "ended", "worst")]
    save("cluster_losses", settings, rows, columns, NOTE)
    return int(any(row["held"] < options.losses for row in rows))


if __name__ == "__main__":
    sys.exit(main())
