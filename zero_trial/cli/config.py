"""``zero-trial config CONST.yaml MODEL_DIR``: every value of the ds_config as a run would use it, where it came from, and what has no effect."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "config",
        help="show every value of the ds_config and where it came from",
        description="Resolve the ds_config of an experiment as a run would: the batch sizes and the mesh, every value with its source, and "
        "what has no effect. Of a search, its first point that can be trained. Starts nothing and imports no model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "experiment", type=Path, metavar="CONST.yaml", help="the experiment, or a run's config.lock.yaml"
    )
    parser.add_argument("model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="the folder of the trial's module")
    parser.add_argument("--slots", type=int, metavar="N", help="ranks (default: resources.slots_per_trial)")
    parser.add_argument("--given", action="store_true", help="leave out defaults that need no remark")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; its ds_config repeats the run on any release"
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Run the verb."""
    from zero_trial.checking.ds_configs import first_legal
    from zero_trial.config.experiment_reader import read_experiment
    from zero_trial.config.report import render_report, report_json
    from zero_trial.launch.lock import locked_model_dir

    experiment = read_experiment(options.experiment)
    model_dir = options.model_dir or locked_model_dir(experiment) or Path()
    slots = options.slots if options.slots is not None else experiment.slots_per_trial
    found = first_legal(experiment, model_dir, slots)
    if options.json:
        print(report_json(found.config, found.batch.rows))
        return 0
    if found.point.values:
        sys.stderr.write(f"point   {found.point.describe()}\n")
    print(f"{found.batch}\n\n{render_report(found.config, everything=not options.given)}")
    return 0
