"""Faults injected into real runs of a tiny model on CPU ranks, and whether each promise held.

    python benchmarks/faults.py                       # all, in the counts below: most of an hour
    python benchmarks/faults.py --short               # about a tenth: some minutes
    python benchmarks/faults.py --only F1 F3          # some; --seed chooses others
    python benchmarks/faults.py --only F1 --count 1   # quick

Exits with 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import faults_checkpoints, faults_mesh, faults_runs, faults_sweeps, record
from benchmarks.faults_runs import Result, Workbench
from benchmarks.record import Column, markdown, number


@dataclass(frozen=True)
class Fault:
    """``inject(workbench, count)`` yields one result per injection: ``count``, or ``short``, of
    them."""

    name: str
    what: str
    promise: str
    inject: Callable[[Workbench, int], Iterator[Result]]
    count: int
    short: int


FAULTS = (
    Fault("F1", "a rank is killed at a random time", "goes on from at most one period before, same bits", faults_runs.kill_one, 200, 8),
    Fault("F2", "all ranks are killed inside a save", "the checkpoint before or the new one is whole; same bits", faults_runs.kill_in_save, 10, 1),
    Fault("F17", "so while training goes on", "the checkpoint before or the new one is whole; same bits", faults_runs.kill_in_background, 10, 1),
    Fault("F3", "the disk takes no more", "exit 5 on all ranks, the checkpoint before is whole, nothing is left", faults_runs.full_disk, 50, 5),
    Fault("F4", "a flipped bit", "found and said; an older checkpoint is taken", faults_checkpoints.flipped_bits, 500, 50),
    Fault("F5", "a file cut short or gone", "found and said; an older checkpoint is taken", faults_checkpoints.lost_files, 100, 10),
    Fault("F6", "other ranks and stages", "same tensors; the next 20 losses within one part in a million", faults_checkpoints.resharded, 256, 16),
    Fault("F7", "stopped and resumed: samples", "none twice, none left out", faults_runs.same_samples, 100, 4),
    Fault("F8", "a loss or gradient that is not finite", "all ranks stop in that step or skip it; none is saved", faults_runs.not_finite, 50, 5),
    Fault("F9", "a rank five times as slow", "named within 20 steps; a clean run at most once in 20", faults_runs.straggler, 40, 4),
    Fault("F10", "ranks in different collectives", "an error with rank, operation and step on all ranks in 30 s", faults_mesh.mismatched, 30, 6),
    Fault("F11", "a rank that never starts", "an error that names it, in time", faults_mesh.never_started, 10, 2),
    Fault("F12", "asked to stop", "saved after that step, exit 75; same bits when resumed", faults_runs.asked_to_stop, 50, 3),
    Fault("F13", "loaders of different lengths", "no hang; the shortest counts, and that is said", faults_runs.uneven, 20, 3),
    Fault("F14", "out of memory in a forward", "exit 3 with a suggestion; same bits when resumed", faults_runs.out_of_memory, 10, 1),
    Fault("F15", "two writers of one run", "the second is refused; a dead one's lock is free", faults_mesh.two_writers, 10, 2),
    Fault("F16", "failing trials of a sweep, a killed master", "ends; decides as an unbroken one; no trial runs twice", faults_sweeps.sweeps, 20, 2),
)  # fmt: skip

COLUMNS: list[Column] = [
    ("", lambda row: row["fault"]),
    ("injected", lambda row: row["what"]),
    ("must hold", lambda row: row["promise"]),
    ("runs", lambda row: str(row["runs"])),
    ("held", lambda row: str(row["held"])),
    ("worst time, s", number("worst_seconds")),
]
NOTE = """Each row injects one kind of fault into real runs (two gloo ranks, an MLP with dropout, ZeRO-2, AdamW, twelve steps with a
checkpoint every four) and counts how often what is promised held. "Same bits" compares the files of the last checkpoint and the last
validation with those of an unbroken run. The time is from the fault to the end of the last rank, or to the answer; where it is empty there
is nothing to wait for."""


def measure(fault: Fault, count: int, seed: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run all injections of one fault, and count them by kind."""
    begin = time.monotonic()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        workbench = Workbench(Path(folder), seed)
        for result in fault.inject(workbench, count):
            results.append(result)
            if not result.held:
                say(f"{fault.name} not held: {result.kind}: {result.why}")
    return {
        "fault": fault.name,
        "what": fault.what,
        "promise": fault.promise,
        **counted(results),
        "kinds": {kind: counted([r for r in results if r.kind == kind]) for kind in sorted({r.kind for r in results})},
        "faults": [f"{result.kind}: {result.why}" for result in results if not result.held],
        "seconds": round(time.monotonic() - begin, 1),
    }


def counted(results: Sequence[Result]) -> dict[str, Any]:
    """Return how many there are, how many held, and the worst time."""
    worst = max((result.seconds for result in results), default=0.0)
    held = sum(result.held for result in results)
    return {"runs": len(results), "held": held, "worst_seconds": round(worst, 3) if worst > 0 else None}


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and return the exit code."""
    names = [fault.name for fault in FAULTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=names, metavar="F", help="some of the faults")
    parser.add_argument("--short", action="store_true", help="about a tenth of the injections")
    parser.add_argument("--count", type=int, help="so many injections of each kind of fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--save", action="store_true", help="write results/faults.json and faults.md")
    options = parser.parse_args(argv)
    rows = []
    for fault in FAULTS:
        if options.only and fault.name not in options.only:
            continue
        count = options.count or (fault.short if options.short else fault.count)
        rows.append(measure(fault, count, options.seed))
        print(f"{fault.name}: {rows[-1]['held']} of {rows[-1]['runs']} in {rows[-1]['seconds']} s", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"seed": options.seed, "rows": rows}, indent=1) + "\n")
    if options.save:
        record.save("faults", {"seed": options.seed, "short": options.short}, rows, COLUMNS, NOTE)
    else:
        print(markdown(rows, COLUMNS))
    return 0 if all(row["held"] == row["runs"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
