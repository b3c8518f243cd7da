"""``zero-trial plan CONST.yaml MODEL_DIR``: what each rank will need in memory, before any is
started.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zero_trial.cli.cmd_run import add_words, given_words
from zero_trial.cli.output import say
from zero_trial.util.text import strip_control

if TYPE_CHECKING:
    from zero_trial.launch.run_experiment import CheckedRun, RunRequest
    from zero_trial.planning.lone_task import PlannedMachine


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "plan",
        help="say what a trial will need in memory",
        description="Plan the memory of each rank: states from the layouts that the engine would build, activations from one micro-batch "
        "of the trial without values. The plans of every ZeRO stage and of smaller micro-batches are shown. Starts no ranks and writes nothing; the "
        "trial is built once, and its train_batch is called. Exit code 3 if it does not fit.",
        allow_abbrev=False,
    )
    add_planned(parser)
    parser.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), help="plan for this ZeRO stage instead of ds_config's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def add_planned(parser: argparse.ArgumentParser) -> None:
    """Add what is planned, and for which ranks; ``planned_request`` and ``planned_gpus`` return
    it."""
    add_words(parser)
    parser.add_argument("--slots", "--ranks", type=int, metavar="N", help="ranks (default: resources.slots_per_trial)")
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument(
        "--memory",
        "--limit",
        metavar="SIZE",
        help="memory of one rank, such as 16GiB (default: of the GPU, or of this machine by ranks)",
    )
    limits.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="plan for GPUs of this size, such as 80GiB, which need not be in this machine; the model is built without values",
    )


def planned_request(options: argparse.Namespace) -> RunRequest:
    """Return the trial that ``add_planned`` names."""
    from zero_trial.experiment.experiment import read_words
    from zero_trial.launch.hosts import PlacementRequest
    from zero_trial.launch.run_experiment import RunRequest

    words = read_words(given_words(options))
    return RunRequest(
        experiment_path=words.experiment_path,
        model_dir=words.model_dir,
        changes=words.changes,
        placement=PlacementRequest(slots=options.slots),
    )


def planned_gpus(options: argparse.Namespace) -> PlannedMachine | None:
    """Return the GPUs of ``--gpu-memory``; None where it is not given."""
    from zero_trial.planning.lone_task import PlannedMachine
    from zero_trial.util.text import parse_size

    if options.gpu_memory is None:
        return None
    return PlannedMachine("cuda", parse_size(options.gpu_memory, "--gpu-memory"), one_host=False, elsewhere=True)


def _handle(options: argparse.Namespace) -> int:
    """Run the verb. Until the trial is built the garbage collector rests, and then it does not go
    through torch's modules and the model again and again: a sixth of the CPU time."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        return _plan(options)
    finally:
        if not frozen:  # else the caller has frozen something, which would be set free as well
            gc.unfreeze()
        if enabled:
            gc.enable()


def _plan(options: argparse.Namespace) -> int:
    from zero_trial.launch.run_experiment import check_run
    from zero_trial.planning.lone_task import DryRunRequest, trial_planner

    checked = check_run(planned_request(options), os.environ)
    machine = _machine(options, checked)
    limit = machine.limit
    gc.freeze()  # torch and what it has imported
    with trial_planner(DryRunRequest.of(checked), machine, options.stage) as planner:
        gc.collect()  # what the trial's __init__ left in cycles would stay, its tensors too
        gc.freeze()
        gc.enable()
        own, rows, comparison = planner.plan(), planner.compare(), planner.comparison(limit)
        error = None if own.fits(limit) or limit is None else planner.does_not_fit(limit)
        warnings = planner.settings.warnings
    for warning in warnings:
        print(strip_control(f"warn    {warning}"), file=sys.stderr)
    if options.json:
        compared = [
            {"name": row.name, "plan": row.plan.as_dict() if row.plan else None, "refusal": row.refusal} for row in rows
        ]
        print(
            json.dumps(
                {
                    "plan": own.as_dict(),
                    "limit": limit,
                    "fits": error is None,
                    "compared": compared,
                    "error": str(error or "") or None,
                }
            )
        )
        return 0 if error is None else error.exit_code
    say(f"plan    {own.line(limit)}")
    say(own.table(limit))
    say(comparison)
    if error is not None:
        raise error
    return 0


def _machine(options: argparse.Namespace, checked: CheckedRun) -> PlannedMachine:
    from zero_trial.planning.lone_task import this_machine
    from zero_trial.util.text import parse_size

    if (elsewhere := planned_gpus(options)) is not None:
        return elsewhere
    here = this_machine(checked.own.ranks, one_host=checked.ranks == checked.own.ranks)
    if options.memory is not None:
        return replace(here, limit=parse_size(options.memory, "--memory"), sharers=0)
    return here
