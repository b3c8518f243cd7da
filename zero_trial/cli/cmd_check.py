"""``zero-trial check`` and ``zero-trial config``: what is wrong with an experiment, and every value
of its ds_config as a run would use it. Neither starts a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.cmd_run import add_words, given_words
from zero_trial.cli.output import say
from zero_trial.errors import ConfigError
from zero_trial.util.text import strip_control

if TYPE_CHECKING:
    from zero_trial.ds_config.batch import Reconciliation
    from zero_trial.ds_config.table import DsConfig


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
        help="train and evaluate also if that is much work, or takes much memory: otherwise it ends after 10 s, or is left out",
    )
    parser.add_argument("--no-build", action="store_true", help="read files only: do not import the model definition")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_check)


def _check(options: argparse.Namespace) -> int:
    from zero_trial.experiment.experiment import read_words
    from zero_trial.planning.check import CheckRequest, check_as_json, check_experiment, render_check

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
        say("\n".join(render_check(report)))
    return report.exit_code


def add_config_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "config",
        help="show every value of the ds_config and where it came from",
        description="Resolve the ds_config of an experiment as a run would: the batch sizes and the mesh, every value with its source, and "
        "what has no effect. Of a search, its first point that can be trained. In a ds_config by itself "
        '"auto" stays, with what fills it in. Starts nothing and imports no model.',
        allow_abbrev=False,
    )
    parser.add_argument(
        "experiment_path",
        type=Path,
        metavar="CONST.yaml",
        help="the experiment, a run's config.lock.yaml, or a ds_config by itself",
    )
    parser.add_argument("model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="the folder of the trial's module")
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="ranks (default: resources.slots_per_trial, or what a ds_config's batch sizes and mesh say)",
    )
    parser.add_argument("--given", action="store_true", help="leave out defaults that need no remark")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; its ds_config repeats the run on any release"
    )
    parser.set_defaults(handler=_config)


def _config(options: argparse.Namespace) -> int:
    from zero_trial.ds_config.batch import ranks_of, reconcile
    from zero_trial.ds_config.reader import read_ds_config
    from zero_trial.experiment.experiment import read_experiment
    from zero_trial.planning.check import first_legal
    from zero_trial.trial.runs.provenance import locked_model_dir

    if _is_ds_config(options.experiment_path):
        config = _with_batch(
            read_ds_config(options.experiment_path, name=options.experiment_path.name, allow_open=True)
        )
        _say(config, reconcile(config, options.slots or ranks_of(config)), options)
        return 0
    experiment = read_experiment(options.experiment_path)
    model_dir = options.model_dir or locked_model_dir(experiment) or Path()
    slots = options.slots if options.slots is not None else experiment.slots_per_trial
    found = first_legal(experiment, model_dir, slots)
    if found.point.values and not options.json:
        sys.stderr.write(strip_control(f"point   {found.point.describe()}\n"))
    _say(found.config, found.batch, options)
    return 0


def _is_ds_config(path: Path) -> bool:
    """Return whether the file is a ds_config itself.

    What cannot be read is left to the reader of experiments, which says why.
    """
    from zero_trial.experiment.experiment import looks_like_ds_config
    from zero_trial.schema.config_source import read_file

    try:
        return looks_like_ds_config(read_file(path, path.name).value)
    except ConfigError:
        return False


def _with_batch(config: DsConfig) -> DsConfig:
    """Return the ds_config with one sample per micro-batch where it gives no batch size: an
    experiment gives one then, as global_batch_size."""
    from zero_trial.schema.document import Provenance, ValueSource

    if config.train_batch_size is not None or config.train_micro_batch_size_per_gpu is not None:
        return config
    key, source = "train_micro_batch_size_per_gpu", "derived: no batch size is given, 1 for this report"
    sources = {**config.sources, key: ValueSource(source, Provenance.DERIVED)}
    return replace(config, train_micro_batch_size_per_gpu=1, sources=sources)


def _say(config: DsConfig, batch: Reconciliation, options: argparse.Namespace) -> None:
    """Print the batch sizes and every value, as text or as JSON."""
    from zero_trial.ds_config.config_report import render_report, report_json

    if options.json:
        print(report_json(config, batch.rows))
    else:
        say(f"{batch}\n\n{render_report(config, everything=not options.given)}")
