"""``zero-trial simulate EXPERIMENT.yaml``: what a search would create, stop and spend, played
through with synthetic learning curves.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import say

if TYPE_CHECKING:
    from zero_trial.master.search.simulation import Setup, Simulated

_REASONS_SHOWN = 5


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a search without training",
        description="Run the experiment's searcher against synthetic learning curves: its brackets and rungs, how many trials come to each, "
        "how much is spent beside training every trial to its end, and how many points are pruned because their ds_config cannot be "
        "reconciled. Trains nothing, writes nothing, and gives the same answer for the same seed.",
        allow_abbrev=False,
    )
    parser.add_argument("experiment_path", type=Path, metavar="EXPERIMENT.yaml", help="the experiment")
    parser.add_argument(
        "model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="where else to look for the ds_config file"
    )
    parser.add_argument(
        "--trials-seed", type=int, metavar="N", help="seed of the samples (default: reproducibility.experiment_seed)"
    )
    parser.add_argument(
        "--metric-curve",
        choices=("power", "crossing", "noise"),
        default="power",
        help="power: early leaders mostly win (default); crossing: slow starters win; noise: chance",
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="length of a training, if the searcher does not set one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    from zero_trial.master.search import build
    from zero_trial.master.search.simulation import simulate

    config, warnings = _completed(options.experiment_path)
    seed = config["reproducibility"]["experiment_seed"] if options.trials_seed is None else options.trials_seed
    setup = _setup(config, options)
    found = simulate(build(config["searcher"], config["hyperparameters"], seed), setup)
    if options.json:
        shown = {
            **dataclasses.asdict(found),
            "searcher": config["searcher"]["name"],
            "seed": seed,
            "curve": options.metric_curve,
            "unit": setup.unit,
            "length": setup.length,
            "warnings": warnings,
        }
        print(json.dumps(shown))
    else:
        say("\n".join([*_render(config["searcher"], setup, found), *(f"note    {line}" for line in warnings)]))
    return 0


def _completed(path: Path) -> tuple[dict[str, Any], list[str]]:
    from zero_trial.errors import ConfigError
    from zero_trial.experiment.rules import ClusterDefaults, complete

    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot be read: {getattr(problem, 'strerror', None) or problem}", where=str(path)) from None
    anywhere = {"type": "directory", "container_path": "/"}  # nothing is stored
    completed = complete(text, ClusterDefaults(checkpoint_storage=anywhere, name=path.stem))
    return completed.config, completed.warnings


def _setup(config: Mapping[str, Any], options: argparse.Namespace) -> Setup:
    from zero_trial.errors import ConfigError
    from zero_trial.master.search import pruning
    from zero_trial.master.search.searcher import training_length
    from zero_trial.master.search.simulation import CURVES, Setup

    searcher = config["searcher"]
    if options.length is not None:
        if options.length < 1:
            raise ConfigError("not a length", where="--length", got=options.length, expected="1 or more")
        unit, length = searcher.get("time_metric") or "batches", options.length
    elif isinstance(searcher.get("max_length"), int):
        unit, length = "batches", searcher["max_length"]
    elif searcher.get("max_length") is None and searcher.get("max_time") is None:
        fix = "Write --length 1000, in batches."
        raise ConfigError("the experiment does not say how long a trial is", where="searcher", fix=fix)
    else:
        unit, length = training_length(searcher)
    files = _files(config, options)
    period = config["min_validation_period"].get(unit) or max(length // 64, 1)
    return Setup(
        metric=searcher["metric"],
        unit=unit,
        length=length,
        period=period,
        smaller_is_better=searcher["smaller_is_better"],
        curve=CURVES[options.metric_curve],
        invalid=lambda hparams: pruning.reason(config, hparams, files),
    )


def _files(config: Mapping[str, Any], options: argparse.Namespace) -> dict[str, bytes]:
    """Return the content of the base ds_config's file by name, from the model's folder or from
    beside the YAML."""
    from zero_trial.errors import ConfigError
    from zero_trial.master.search.pruning import ds_config_file

    named = ds_config_file(config, config["hyperparameters"])
    if named is None:
        return {}
    folders = [*([options.model_dir] if options.model_dir else []), options.experiment_path.parent]
    for folder in folders:
        if (folder / named).is_file():
            return {str(Path(named)): (folder / named).read_bytes()}
    fix = "Name the model's folder behind the experiment." if options.model_dir is None else None
    raise ConfigError(
        f"{named} is not in {' nor in '.join(str(folder) for folder in folders)}", where="data.ds_config", fix=fix
    )


def _render(searcher: Mapping[str, Any], setup: Setup, found: Simulated) -> list[str]:
    """Return the table, line by line."""
    lines = [
        f"search  {searcher['name']}: {found.trials} trial{'' if found.trials == 1 else 's'} of {setup.length} {setup.unit}"
    ]
    lines.append(f"{'bracket':>9}{'rung at':>12}{'trials':>9}{'stopped':>9}")
    before = 0
    for rung in found.rungs:
        bracket = str(rung.bracket) if rung.bracket != before else ""
        before = rung.bracket
        lines.append(f"{bracket:>9}{rung.units:>12}{rung.reached:>9}{rung.stopped:>9}")
    share = f" ({found.spent / found.whole:.0%})" if found.whole else ""
    lines.append(f"spent   {found.spent} of {found.whole} {setup.unit} that all trials to their end would take{share}")
    pruned = sum(found.pruned.values())
    lines.append(f"pruned  {pruned} points" + (", whose ds_config cannot be reconciled" if pruned else ""))
    for why, count in list(found.pruned.items())[:_REASONS_SHOWN]:
        lines.append(f"        {count} x {why}")
    if len(found.pruned) > _REASONS_SHOWN:
        lines.append(f"        and {len(found.pruned) - _REASONS_SHOWN} other reasons")
    return lines
