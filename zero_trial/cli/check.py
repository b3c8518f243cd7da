"""``zero-trial check CONST.yaml MODEL_DIR``: everything that is wrong with an experiment, before a
rank is started.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from zero_trial.cli.run import add_words, given_words
from zero_trial.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "check",
        help="find mistakes in an experiment without starting it",
        description="Check the experiment's YAML, every point of its search, its ds_config, entrypoint, loaders and folder. All faults are "
        "shown together. Starts no ranks. The trial is built once, trains one step and evaluates one batch, on the CPU, with the engine that a rank "
        "has and without its callbacks. Nothing is written but what the trial's own code writes; what it prints goes to the standard error.",
        allow_abbrev=False,
    )
    add_words(parser)
    parser.add_argument("--slots", type=int, metavar="N", help="ranks (default: resources.slots_per_trial)")
    parser.add_argument(
        "--points", type=int, default=128, metavar="N", help="points of a search to look at, at most (default: 128)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train and evaluate also where that is much work, which otherwise takes fewer samples, ends after 10 s, or is left out",
    )
    parser.add_argument("--no-build", action="store_true", help="read files only: do not import the model definition")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    """Run the verb."""
    from zero_trial.experiment.changes import read_words
    from zero_trial.preflight.check import CheckRequest, check_as_json, check_experiment, render_check

    words = read_words(given_words(options))
    if words.experiment_path is None:
        raise ConfigError("there is no experiment to check", where="check", fix="Write zero-trial check CONST.yaml.")
    request = CheckRequest(
        words.experiment_path,
        words.model_dir,
        words.changes,
        slots=options.slots,
        points=options.points,
        build=not options.no_build,
        dry_run=options.dry_run,
    )
    report = check_experiment(request, os.environ)
    if options.json:
        print(json.dumps(check_as_json(report), indent=1, default=str))
    else:
        print("\n".join(render_check(report)))
    return report.exit_code
