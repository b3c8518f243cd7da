"""`zero-trial tune` compared with an exhaustive search: the speed of what it finds, and its runs.

    python benchmarks/tune.py                        # three models; minutes on two quiet cores
    python benchmarks/tune.py gpt                    # one of them, at most 6 minutes
    python benchmarks/tune.py gpt --steps 2 --quick  # quick: three configurations only

The exhaustive search runs every configuration that the plan does not refuse to its last step, also
those that save memory although there is enough. The tuner may use a quarter of these runs. Both
start each trial as `zero-trial run` does. Then the tuner's configuration and the best one of the
exhaustive search run again in pairs, in alternating order. `of the best` is the median of the
pairs' ratios, with the lowest and the highest: a machine's speed may change by a fifth within
minutes, and less within a pair.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import record
from zero_trial.experiment.experiment import read_words
from zero_trial.launch.hosts import PlacementRequest
from zero_trial.launch.run_experiment import RunRequest, check_run
from zero_trial.launch.screen import Screen
from zero_trial.planning.lone_task import PlannedMachine
from zero_trial.planning.tune import (
    STAGE,
    Margin,
    TrainingWay,
    TuneFacts,
    facts_of,
    own_way,
    run_trial,
    select,
    ways_to_train,
    weigh_way,
)
from zero_trial.trial.metrics import WARM_UP

ROOT = Path(__file__).parents[1]
SIZES = 3  # of the micro-batch
MODELS: dict[str, tuple[str, ...]] = {
    "gpt": ("experiments/gpt_zero2/const.yaml", "model_defs/gpt", "hyperparameters.model.width=64"),
    "bert": ("experiments/bert_zero1/const.yaml", "model_defs/bert_mlm"),
    "pipeline": ("experiments/gpt_pipeline_zero1/const.yaml", "model_defs/gpt"),
}
COLUMNS: list[record.Column] = [
    ("model", lambda row: row["model"]),
    ("ways", record.number("ways", 0)),
    ("runs of the tuner", record.number("runs", 0)),
    ("exhaustive best", lambda row: row["best"]),
    ("steps/s", record.number("best_speed", 2)),
    ("tuned", lambda row: row["tuned"]),
    ("steps/s", record.number("tuned_speed", 2)),
    ("of the best", record.number("ratio", 3)),
    ("pairs", lambda row: row.get("pairs", "")),
    ("slowest way", record.number("slowest_speed", 2)),
    ("as configured", record.number("own_speed", 2)),
    ("exhaustive s", record.number("exhaustive_seconds", 0)),
    ("tuner s", record.number("tuner_seconds", 0)),
]
NOTE = """What `zero-trial tune` finds in a quarter of the runs of an exhaustive search over stage, micro-batch,
schedule and ways to save memory, on two CPU ranks. `of the best`: steps/s of what it found over
those of the exhaustive best, the median of pairs of runs, and the lowest and highest pair. Seconds of
the tuner include its plans."""


def main() -> int:
    """Measure the requested models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    parser.add_argument("--again", type=int, default=8, help="pairs of further runs of the two winners")
    parser.add_argument("--quick", action="store_true", help="the first three ways only; nothing is saved")
    given = parser.parse_args()
    unknown = [name for name in given.models if name not in MODELS]
    if unknown:
        parser.error(f"there is no model {unknown[0]}; there are {', '.join(MODELS)}")
    rows = [_compare(name, given.steps, given.again, quick=given.quick) for name in given.models or MODELS]
    if given.quick:
        print(json.dumps(rows, indent=1))
        return 0
    kept = [row for row in record.earlier("tune") if row["model"] not in [each["model"] for each in rows]]
    rows = sorted([*kept, *rows], key=lambda row: list(MODELS).index(row["model"]))
    record.save("tune", {"steps": given.steps, "again": given.again, "ranks": 2}, rows, COLUMNS, NOTE)
    return 0


def _compare(name: str, steps: int, again: int, *, quick: bool) -> dict[str, Any]:
    """Return the row of one model."""
    words = read_words(str(ROOT / word) if "/" in word else word for word in MODELS[name])
    request = RunRequest(
        words.experiment_path, words.model_dir, changes=words.changes, placement=PlacementRequest(slots=2)
    )
    # the stages of a pipeline differ little on the CPU, and its schedules much
    facts = facts_of(check_run(request, os.environ), keep=(STAGE,) if name == "pipeline" else (), accelerator=False)
    own, machine = own_way(facts), PlannedMachine("cpu", None, one_host=True)
    began = time.monotonic()
    weighed = {way: weigh_way(request, way, machine, os.environ) for way in _space(facts)}
    planned = time.monotonic() - began
    legal = tuple(way for way, found in weighed.items() if not found.refusal)[: 3 if quick else None]
    if own not in legal:
        own = legal[0]
    print(f"{name}: {len(legal)} ways planned in {planned:.0f} s", file=sys.stderr)
    began = time.monotonic()
    length = steps + WARM_UP
    speeds = _measured(request, legal, length)
    exhaustive = time.monotonic() - began
    best = max(speeds, key=lambda way: speeds[way])

    began = time.monotonic()
    chosen = select(legal, weighed.__getitem__, Margin(0, 0), None, sizes=SIZES, own=own)
    trials = _measured(request, chosen.ways[: max(len(legal) // 4, 1)], length)
    tuner = planned + time.monotonic() - began
    tuned = max(trials, key=lambda way: trials[way])
    pairs = [(speeds[best], speeds[tuned])]
    if tuned != best:
        pairs = [_pair(request, (best, tuned), length, turn) for turn in range(again)]
    ratios = [tuned_speed / best_speed for best_speed, tuned_speed in pairs]
    return {
        "model": name,
        "ways": len(legal),
        "runs": len(trials),
        "best": best.name,
        "best_speed": median(pair[0] for pair in pairs),
        "tuned": tuned.name,
        "tuned_speed": median(pair[1] for pair in pairs),
        "ratio": median(ratios),
        "pairs": f"{min(ratios):.2f} to {max(ratios):.2f}" if len(ratios) > 1 else "the same way",
        "slowest_speed": min(speeds.values()),
        "own_speed": speeds.get(own),
        "exhaustive_seconds": exhaustive,
        "tuner_seconds": tuner,
        "speeds": {way.name: speed for way, speed in speeds.items()},
    }


def _space(facts: TuneFacts) -> list[TrainingWay]:
    """Return all configurations with the largest micro-batches."""
    ways = ways_to_train(facts)
    sizes = sorted({way.micro_batch for way in ways}, reverse=True)[:SIZES]
    return [way for way in ways if way.micro_batch in sizes]


def _measured(request: RunRequest, ways: Sequence[TrainingWay], steps: int) -> dict[TrainingWay, float]:
    """Run these configurations; return the speed of each that was measured."""
    found = {}
    for way in ways:
        trial = run_trial(request, way, steps, Screen(sys.stderr, quiet=True), os.environ)
        print(f"  {way.name}: {trial.why or trial.speed} {trial.seconds:.1f} s", file=sys.stderr)
        if trial.speed is not None:
            found[way] = trial.speed
    return found


def _pair(request: RunRequest, ways: tuple[TrainingWay, TrainingWay], steps: int, turn: int) -> tuple[float, float]:
    """Return the speeds of two configurations, measured one after the other; the second first in
    odd turns."""
    speeds = _measured(request, ways if turn % 2 == 0 else ways[::-1], steps)
    return speeds[ways[0]], speeds[ways[1]]


if __name__ == "__main__":
    sys.exit(main())
