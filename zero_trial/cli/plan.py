"""``zero-trial plan CONST.yaml MODEL_DIR``: what each rank will need in memory, before any is
started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_trial.ds_config.table import DsConfig
    from zero_trial.errors import DoesNotFit
    from zero_trial.launch.experiment import CheckedRun
    from zero_trial.preflight.compare import Planner
    from zero_trial.preflight.pipeline_plan import PipelinePlanner


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "plan",
        help="say what a trial will need in memory",
        description="Plan the memory of each rank: states from the layouts that the engine would build, activations from one micro-batch "
        "of the trial in a dry run. The plans of every ZeRO stage and of smaller micro-batches are shown. Starts no ranks and writes nothing; the "
        "trial is built once, and its train_batch is called. Exit code 3 if it does not fit.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "experiment_path", type=Path, metavar="CONST.yaml", help="the experiment, or a run's config.lock.yaml"
    )
    parser.add_argument("model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="the folder of the trial's module")
    parser.add_argument("--slots", type=int, metavar="N", help="ranks (default: resources.slots_per_trial)")
    parser.add_argument(
        "--limit",
        metavar="SIZE",
        help="memory of one rank, such as 16GiB (default: of the GPU, or of this machine by ranks)",
    )
    parser.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), help="plan for this ZeRO stage instead of ds_config's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    """Run the verb."""
    from zero_trial.launch.experiment import RunRequest, check_run
    from zero_trial.launch.placement import PlacementRequest

    placement = PlacementRequest(slots=options.slots)
    request = RunRequest(
        experiment_path=options.experiment_path, model_dir=options.model_dir, slots=options.slots, placement=placement
    )
    checked = check_run(request, os.environ)
    limit = _limit(options.limit, checked)
    # A host's memory is all ranks' together, so a run on it takes the policy that moves least; a
    # limit that is asked for is another machine's.
    asked = limit if options.limit is not None or _device() == "cuda" else None
    with _trial_planner(checked, options.stage, asked) as planner:
        own, rows = planner.plan(), planner.compare()
        error = None if own.fits(limit) or limit is None else _does_not_fit(planner, limit)
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
    print(f"plan    {own.line(limit)}")
    print(own.table(limit))
    print(_compared(rows, limit))
    if error is not None:
        raise error
    return 0


def _does_not_fit(planner: Planner | PipelinePlanner, limit: int) -> DoesNotFit:
    from zero_trial.preflight.compare import Planner, does_not_fit

    return does_not_fit(planner, limit) if isinstance(planner, Planner) else planner.does_not_fit(limit)


def _compared(rows: Any, limit: int | None) -> str:
    from zero_trial.preflight.compare import comparison_table
    from zero_trial.preflight.pipeline_plan import PipelineCandidate, pipeline_table

    of_pipelines = isinstance(rows[0], PipelineCandidate)
    return pipeline_table(rows, limit) if of_pipelines else comparison_table(rows, limit)


def _limit(text: str | None, checked: CheckedRun) -> int | None:
    import torch

    from zero_trial.preflight.plan import rank_limit
    from zero_trial.util.text import parse_size

    if text is not None:
        return parse_size(text, "--limit")
    return rank_limit(torch.device(_device()), checked.own.ranks)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@contextlib.contextmanager
def _trial_planner(
    checked: CheckedRun, stage: int | None = None, limit: int | None = None
) -> Iterator[Planner | PipelinePlanner]:
    """Yield the planner of an experiment's trial, which is built here as rank 0. Raises what the
    trial raises.

    ``limit``: bytes of one rank, by which the policy of a pipeline is chosen if ds_config leaves it
    open.
    """
    from zero_trial.preflight.compare import Planner
    from zero_trial.preflight.fake_engine import TrialSubject
    from zero_trial.preflight.pipeline_plan import PipelinePlanner
    from zero_trial.preflight.trial_dry_run import DryRunRequest, fake_task, raised_by_trial
    from zero_trial.trial.data import Resume, open_train_data
    from zero_trial.trial.trial import fitted

    ranks, experiment, device = checked.ranks, checked.experiment, _device()
    request = DryRunRequest(
        experiment, checked.entrypoint, experiment.hyperparameters, checked.model_dir, ranks, checked.seed
    )
    subject = TrialSubject(ranks, device)
    with fake_task(request, subject.factory) as task:
        with raised_by_trial(checked.model_dir, "building the trial"):
            kind = task.import_class()
            context = task.seeded_context()
            trial = kind(context)
            feed = open_train_data(trial, context, Resume()).feed
        one_host = ranks == checked.own.ranks
        if subject.pipeline is not None:
            model, settings = subject.pipeline
            batch = _pair(next(feed)) if feed is not None else (None, None)
            yield PipelinePlanner(
                model, _at_stage(settings, stage), ranks, batch, device=device, one_host=one_host, limit=limit
            )
            return
        if feed is not None:
            whole = None if context.auto_accumulation else 1
            train = fitted(trial.train_batch)
            subject.perform(lambda batches: train(batches, 0, 0), [next(feed)], calls_per_step=whole)
        yield Planner(subject, _at_stage(subject.settings, stage), ranks, one_host=one_host)


def _at_stage(settings: DsConfig, stage: int | None) -> DsConfig:
    from dataclasses import replace

    if stage is None:
        return settings
    return replace(settings, zero_optimization=replace(settings.zero_optimization, stage=stage))


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return a micro-batch of a pipeline: inputs and labels."""
    from zero_trial.errors import DataError

    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        "a pipeline's micro-batch is a pair", where="plan", got=type(batch).__name__, expected="(inputs, labels)"
    )
