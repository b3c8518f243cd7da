"""A long adaptive_asha search under a master that is killed several times, and whether it decides
the same as an uninterrupted search.

    python benchmarks/search_kills.py                        # 1 000 trials, 20 kills
    python benchmarks/search_kills.py --trials 30 --kills 3  # quick

The master is a separate process and is killed by SIGKILL at random times within three seconds after
a trial has ended, while the next ones start; trials are Determined's harness without torch, without
restarts. Afterwards a new searcher receives the validations in the order in which the store has
them: it must create the same trials, with the same hyperparameters and seeds, fill its rungs
equally and stop the same trials. Exits with 1 if anything differs, if a trial ran twice or failed,
or if a report is lost or duplicated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.master import Bench
from benchmarks.record import Column, number, save
from zero_trial.master.search.searcher import Action, Create, ExitReason, Searcher, Stop, build

TRAIN = """
import time
import determined
from determined import core
x = determined.get_cluster_info().trial.hparams["x"]
with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
    for step in range(1, 5):
        metrics = {"validation_loss": (x * 7.3 + step) % 5, "batches": step}
        context.train.report_validation_metrics(steps_completed=step, metrics=metrics)
        time.sleep(0.3)  # the master's wish to stop comes by another connection
        if context.preempt.should_preempt():
            break
"""


def submit(bench: Bench, train: str, *, seed: int, max_restarts: int, **searcher: Any) -> None:
    """Submit an adaptive_asha search of trials that run ``train``, with further keys of its
    searcher."""
    config = {
        "name": "search with kills",
        "entrypoint": "python3 train.py",
        "resources": {"slots_per_trial": 1},
        "searcher": {
            "name": "adaptive_asha",
            "metric": "validation_loss",
            "smaller_is_better": True,
            "time_metric": "batches",
            "divisor": 2,
            **searcher,
        },
        "hyperparameters": {"x": {"type": "double", "minval": 0.0, "maxval": 1.0}},
        "reproducibility": {"experiment_seed": seed},
        "max_restarts": max_restarts,
    }
    context, file = bench.folder / "context", bench.folder / "config.yaml"
    context.mkdir()
    (context / "train.py").write_text(train)
    file.write_text(json.dumps(config))
    bench.submit(file, context)


@dataclass
class Unbroken:
    """The searcher without interruptions: the trials that it created, in order, and stopped."""

    search: Searcher
    created: list[Create] = field(default_factory=list)
    stopped: set[str] = field(default_factory=set)

    @property
    def trials(self) -> list[Any]:
        """Name, hyperparameters and seed of each trial, as :func:`stored_trials` returns them."""
        return [(create.request_id, dict(create.hparams), create.seed) for create in self.created]

    def take(self, actions: Iterable[Action]) -> None:
        """Record the searcher's actions."""
        for action in actions:
            if isinstance(action, Create):
                self.created.append(action)
            elif isinstance(action, Stop):
                self.stopped.add(action.request_id)


def replay(rows: sqlite3.Connection) -> Unbroken:
    """Pass the validations of the store, in their order, to a searcher without interruptions. A
    trial ends for it when another one is needed."""
    (config,) = rows.execute("SELECT config FROM experiments").fetchone()
    section = json.loads(config)
    seed = section["reproducibility"]["experiment_seed"]
    unbroken = Unbroken(build(section["searcher"], section["hyperparameters"], seed))
    unbroken.take(unbroken.search.start())
    ended = iter(
        [name for (name,) in rows.execute("SELECT request_id FROM trials WHERE ended IS NOT NULL ORDER BY ended")]
    )

    def end_next() -> bool:
        name = next(ended, None)
        if name is not None:
            unbroken.take(unbroken.search.on_exited(name, ExitReason.COMPLETED))
        return name is not None

    query = "SELECT request_id, metrics FROM metrics JOIN trials ON trials.id = trial_id WHERE grp = 'validation' ORDER BY metrics.id"
    for name, metrics in rows.execute(query).fetchall():
        while all(create.request_id != name for create in unbroken.created) and end_next():
            pass
        unbroken.take(unbroken.search.on_validation(name, json.loads(metrics)))
    while end_next():
        pass
    return unbroken


def rungs(snapshot: dict[str, Any]) -> list[Any]:
    """Return a searcher's decisions, and how many random numbers it has drawn."""
    return [snapshot["draws"], *([bracket["rungs"], bracket["position"]] for bracket in snapshot["brackets"])]


def differences(rows: sqlite3.Connection, trials: int) -> list[str]:
    """Return how the interrupted search differs from the uninterrupted one."""
    unbroken = replay(rows)
    found = []
    created = stored_trials(rows)
    if len(created) != trials or created != unbroken.trials:
        found.append(f"{len(created)} trials were created, {len(unbroken.created)} by the unbroken search; some differ")
    stopped = stored_stops(rows)
    if stopped != unbroken.stopped:
        found.append(f"{len(stopped ^ unbroken.stopped)} trials were stopped or not stopped unlike the unbroken search")
    if stored_rungs(rows) != rungs(json.loads(json.dumps(unbroken.search.snapshot()))):
        found.append("the rungs that the searcher has filled are others")
    for name, state, runs, why in rows.execute(
        "SELECT request_id, trials.state, count(*), reason FROM trials JOIN allocations ON trial_id = trials.id GROUP BY trial_id"
    ):
        if (state, runs) != ("COMPLETED", 1):
            found.append(f"trial {name} is {state} after {runs} runs: {why}")
    for name, steps in rows.execute(
        "SELECT request_id, group_concat(steps) FROM (SELECT * FROM metrics ORDER BY id) JOIN trials ON trials.id = trial_id "
        "WHERE grp = 'validation' GROUP BY trial_id"
    ):
        if steps not in ("1", "1,2", "1,2,3", "1,2,3,4"):
            found.append(f"trial {name} has reported the steps {steps}")
    return found


def kill(bench: Bench) -> None:
    """Kill the master by SIGKILL, and start it again."""
    pid = int(json.loads((bench.folder / "root" / "master.json").read_text())["pid"])
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
    bench.up()


def stored(folder: Path) -> sqlite3.Connection:
    """Open the master's store, to read it."""
    (file,) = (folder / "root").glob("*.db")
    return sqlite3.connect(f"file:{file}?mode=ro", uri=True)


def stored_trials(rows: sqlite3.Connection) -> list[Any]:
    """Return name, hyperparameters and seed of each trial."""
    query = "SELECT request_id, hparams, seed FROM trials ORDER BY id"
    return [(name, json.loads(hparams), seed) for name, hparams, seed in rows.execute(query)]


def stored_stops(rows: sqlite3.Connection) -> set[str]:
    """Return the names of the trials that the search has stopped."""
    query = "SELECT DISTINCT request_id FROM allocations JOIN trials ON trials.id = trial_id WHERE preempt = 1"
    return {name for (name,) in rows.execute(query)}


def stored_rungs(rows: sqlite3.Connection) -> list[Any]:
    """Return the searcher's decisions."""
    (snapshot,) = rows.execute("SELECT snapshot FROM experiments").fetchone()
    return rungs(json.loads(snapshot))


def progress(folder: Path) -> tuple[str, int]:
    """Return the search's state, and how many of its trials have ended."""
    with contextlib.closing(stored(folder)) as rows:
        (state,) = rows.execute("SELECT state FROM experiments").fetchone()
        (ended,) = rows.execute("SELECT count(*) FROM trials WHERE ended IS NOT NULL").fetchone()
    return str(state), int(ended)


def kill_meanwhile(bench: Bench, at: list[int], wait: Callable[[], float], seconds: float = math.inf) -> str:
    """Follow the search for at most ``seconds``, and kill the master ``wait()`` seconds after the
    number of ended trials reaches the next entry of ``at``. Return the search's last state; ``at``
    keeps the remaining kills."""
    deadline = time.monotonic() + seconds
    while True:
        state, ended = progress(bench.folder)
        if state not in ("ACTIVE", "STOPPING_COMPLETED") or time.monotonic() > deadline:
            return state
        if at and ended >= at[0]:
            at.pop(0)
            time.sleep(wait())
            kill(bench)
            print(f"killed, {len(at)} times more to come: {ended} trials had ended", flush=True)
        time.sleep(0.05)


def search(bench: Bench, trials: int, kills: int, draws: random.Random) -> int:
    """Run one search and kill the master this many times at random. Return how many times it
    was killed."""
    submit(bench, TRAIN, seed=7, max_restarts=0, max_time=4, max_trials=trials)
    at = sorted(draws.sample(range(1, trials), kills))
    kill_meanwhile(bench, at, lambda: draws.uniform(0, 3))
    return kills - len(at)


def main() -> int:
    """Search, kill, compare, and save the table in results/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    settings = {**vars(options), "load": f"{os.getloadavg()[0]:.1f} before the start"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), options.slots)
        bench.up()
        try:
            killed = search(bench, options.trials, options.kills, random.Random(options.seed))
        finally:
            bench.down()
        seconds = time.monotonic() - begin
        with contextlib.closing(stored(Path(folder))) as rows:
            found = differences(rows, options.trials)
            counts = dict(rows.execute("SELECT state, count(*) FROM trials GROUP BY state"))
            stops = rows.execute("SELECT count(DISTINCT trial_id) FROM allocations WHERE preempt = 1").fetchone()[0]
            reports = rows.execute("SELECT count(*) FROM metrics WHERE grp = 'validation'").fetchone()[0]
    row = {"trials": options.trials, "killed": killed, "stopped": stops, "reports": reports, "seconds": seconds}
    row |= {"states": ", ".join(f"{state} {count}" for state, count in counts.items()), "differences": len(found)}
    columns: list[Column] = [("trials", number("trials", 0)), ("killed", number("killed", 0))]
    columns += [("stopped", number("stopped", 0)), ("reports", number("reports", 0)), ("states", itemgetter("states"))]
    columns += [("differences", number("differences", 0)), ("s", number("seconds", 0))]
    note = "One adaptive_asha search whose master was killed, compared with the decisions of a searcher that is never interrupted."
    save("search_kills", settings, [row], columns, note)
    print(*found, sep="\n")
    return bool(found or killed < options.kills)


if __name__ == "__main__":
    sys.exit(main())
