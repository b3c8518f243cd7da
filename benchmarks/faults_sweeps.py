"""Faults of sweeps: trials that crash or cannot be trained, under a master that is killed; and
whether the search decides the same as an uninterrupted one.

One trial runs at a time, on one slot, so that an uninterrupted search has a single order of events,
which is known without running it.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import time
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.faults_runs import Result, Workbench
from benchmarks.master import Bench
from benchmarks.search_kills import (
    Unbroken,
    kill_meanwhile,
    rungs,
    stored,
    stored_rungs,
    stored_stops,
    stored_trials,
    submit,
)
from zero_trial.master.search.searcher import ExitReason, build

TRIALS, STEPS = 8, 4
ENDED_SECONDS = 300.0

# A hyperparameter selects a trial's fault: three of ten values have one.
FAULTS = {0: "crash at once", 1: "crash", 2: "invalid"}
TRAIN = f"""
import sys
import time
import determined
from determined import core
x = determined.get_cluster_info().trial.hparams["x"]
fault = {FAULTS}.get(int(x * 1000) % 10)
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    for step in range(1, {STEPS} + 1):
        if fault == "crash at once" or fault == "crash" and step == 2:
            sys.exit(7)
        if fault == "invalid" and step == 2:
            context.train.report_early_exit(core.EarlyExitReason.INVALID_HP)
            break
        context.train.report_validation_metrics(
            steps_completed=step, metrics={{"validation_loss": (x * 7.3 + step) % 5, "batches": step}}
        )
        time.sleep(0.2)  # the master's wish to stop comes by another connection
        if context.preempt.should_preempt():
            break
"""


def unbroken(section: Mapping[str, Any], space: Mapping[str, Any], seed: int) -> tuple[Unbroken, list[Any]]:
    """Run the search over trials with these faults, one after the other, without a master; also
    return the state it may have at its end. The master does not store the change made by the last
    trial's end, since nothing is left to decide."""
    search = Unbroken(build(section, space, seed))
    search.take(search.search.start())
    ended, notes = 0, []
    while ended < len(search.created):
        trial = search.created[ended]
        reason = played(search, trial.request_id, trial.hparams["x"])
        before = json.loads(json.dumps(search.search.snapshot()))
        search.take(search.search.on_exited(trial.request_id, reason))
        notes = [rungs(before), rungs(json.loads(json.dumps(search.search.snapshot())))]
        ended += 1
    return search, notes


def played(search: Unbroken, name: str, x: float) -> ExitReason:
    """Report the trial's metrics to the search, and return how the trial ends."""
    fault = FAULTS.get(int(x * 1000) % 10)
    for step in range(1, STEPS + 1):
        if fault == "crash at once" or (fault == "crash" and step == 2):
            return ExitReason.ERRORED
        if fault == "invalid" and step == 2:
            return ExitReason.COMPLETED
        search.take(search.search.on_validation(name, {"validation_loss": (x * 7.3 + step) % 5, "batches": step}))
        if name in search.stopped:
            return ExitReason.COMPLETED
    return ExitReason.COMPLETED


def sweeps(workbench: Workbench, count: int) -> Iterator[Result]:
    """F16: sweeps in which three of ten trials fail; in three of four sweeps the master is
    killed."""
    for number in range(count):
        seed, kills = workbench.chance.randrange(10_000), number % 4
        bench = Bench(workbench.folder / f"sweep-{number}", 1)
        bench.folder.mkdir()
        bench.up()
        try:
            begin = time.monotonic()
            why = run(workbench, bench, seed, kills)
            seconds = time.monotonic() - begin
        finally:
            bench.down()
        with contextlib.closing(stored(bench.folder)) as rows:
            why = why or differences(rows, seed)
        yield Result(f"the master killed {kills} times", not why, seconds, f"seed {seed}: {why}" if why else "")


def run(workbench: Workbench, bench: Bench, seed: int, kills: int) -> str:
    """Run one sweep to its end; return what is wrong."""
    searcher = {"max_time": STEPS, "max_trials": TRIALS, "max_concurrent_trials": 4, "mode": "aggressive"}
    submit(bench, TRAIN, seed=seed, max_restarts=0, **searcher)
    at = sorted(workbench.chance.sample(range(1, 4), kills))  # there are at least four trials
    state = kill_meanwhile(bench, at, lambda: workbench.chance.uniform(0, 1.5), ENDED_SECONDS)
    if state in ("ACTIVE", "STOPPING_COMPLETED"):
        return f"the sweep has not ended after {ENDED_SECONDS:.0f} s"
    return "" if state == "COMPLETED" and not at else f"the sweep is {state}, {len(at)} kills are left"


def differences(rows: sqlite3.Connection, seed: int) -> str:
    """Return what differs from the uninterrupted search, or was done twice."""
    (text,) = rows.execute("SELECT config FROM experiments").fetchone()
    section = json.loads(text)
    wanted, notes = unbroken(section["searcher"], section["hyperparameters"], seed)
    if (found := stored_trials(rows)) != wanted.trials:
        return f"other trials than those of the unbroken search: {found}, not {wanted.trials}"
    if stored_stops(rows) != wanted.stopped:
        return "other trials were stopped"
    if (filled := stored_rungs(rows)) not in notes:
        return f"other rungs: {filled}, not {notes[-1]}"
    query = "SELECT trial_id, count(*) FROM allocations GROUP BY trial_id HAVING count(*) != 1"
    if twice := rows.execute(query).fetchall():
        return f"trials that ran twice: {twice}"
    query = "SELECT trial_id, steps FROM metrics WHERE grp = 'validation' GROUP BY trial_id, steps HAVING count(*) != 1"
    if twice := rows.execute(query).fetchall():
        return f"validations that are there twice: {twice}"
    return ""
