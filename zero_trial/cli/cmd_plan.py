"""``zero-trial check``, ``config``, ``plan`` and ``tune``: report the errors of an experiment,
every value of its ds_config in a run, the memory of each rank, and the fastest ds_config that fits.
Only ``tune`` starts ranks."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.cmd_run import add_words, given_words
from zero_trial.cli.output import say
from zero_trial.errors import ConfigError, DoesNotFit, ExitStatus, TrialError
from zero_trial.util.text import format_bytes, format_duration, strip_control

if TYPE_CHECKING:
    from zero_trial.ds_config.batch import Reconciliation
    from zero_trial.ds_config.table import DsConfig
    from zero_trial.launch.run_experiment import CheckedRun, RunRequest
    from zero_trial.planning.lone_task import PlannedMachine
    from zero_trial.planning.tune import Margin, Selection, TrainingWay, TuneTrial


# --- check and config -----------------------------------------------------------------------------


def add_check_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "check",
        help="find mistakes in an experiment without starting it",
        description="Check the experiment's YAML, every point of its search, its ds_config, entrypoint, loaders and folder. All errors are shown "
        "together. Starts no ranks. The trial is built once, trains one step and evaluates one batch, on the CPU, with the engine "
        "that a rank uses and without its callbacks. Nothing is written except by the trial's own code, whose output goes to stderr.",
    )
    add_words(parser)
    parser.add_argument("--slots", type=int, metavar="N", help="ranks (default: resources.slots_per_trial)")
    parser.add_argument(
        "--points",
        type=int,
        default=128,
        metavar="N",
        help="maximum number of points of a search to check (default: 128)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train and evaluate even if that takes long or needs much memory; by default this stops after 10 s, or is skipped",
    )
    parser.add_argument("--no-build", action="store_true", help="read files only: do not import the model definition")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_check)


def _check(options: argparse.Namespace) -> int:
    from zero_trial.experiment.experiment import read_words
    from zero_trial.planning.check import CheckRequest, check_as_json, check_experiment, render_check

    words = read_words(given_words(options))
    if words.experiment_path is None:
        raise ConfigError("no experiment was given", where="check", fix="Write zero-trial check CONST.yaml.")
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
        description="Resolve the ds_config of an experiment as a run would: the batch sizes and the mesh, every value with its source, and keys "
        'that have no effect. For a search, use its first point that can be trained. For a ds_config alone, "auto" values stay, '
        "with a note about what fills them in. Starts nothing and imports no model.",
    )
    parser.add_argument(
        "experiment_path",
        type=Path,
        metavar="CONST.yaml",
        help="the experiment, a run's config.lock.yaml, or a ds_config alone",
    )
    parser.add_argument("model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="the folder of the trial's module")
    parser.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="ranks (default: resources.slots_per_trial, or as implied by a ds_config's batch sizes and mesh)",
    )
    parser.add_argument("--given", action="store_true", help="omit defaults that need no remark")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; its ds_config repeats the run on any release"
    )
    parser.set_defaults(handler=_config)


def _config(options: argparse.Namespace) -> int:
    from zero_trial.ds_config.batch import ranks_of, reconcile
    from zero_trial.ds_config.reader import read_ds_config
    from zero_trial.experiment.experiment import read_experiment
    from zero_trial.planning.check import first_legal
    from zero_trial.schema.document import Provenance, ValueSource
    from zero_trial.trial.runs.provenance import locked_model_dir

    if _is_ds_config(options.experiment_path):
        config = read_ds_config(options.experiment_path, name=options.experiment_path.name, allow_open=True)
        if config.train_batch_size is None and config.train_micro_batch_size_per_gpu is None:
            # an experiment sets the batch size as global_batch_size instead
            key, said = "train_micro_batch_size_per_gpu", "derived: no batch size is set, 1 is used for this report"
            sources = {**config.sources, key: ValueSource(said, Provenance.DERIVED)}
            config = replace(config, train_micro_batch_size_per_gpu=1, sources=sources)
        _say_config(config, reconcile(config, options.slots or ranks_of(config)), options)
        return 0
    experiment = read_experiment(options.experiment_path)
    model_dir = options.model_dir or locked_model_dir(experiment) or Path()
    slots = options.slots if options.slots is not None else experiment.slots_per_trial
    found = first_legal(experiment, model_dir, slots)
    if found.point.values and not options.json:
        sys.stderr.write(strip_control(f"point   {found.point.describe()}\n"))
    _say_config(found.config, found.batch, options)
    return 0


def _is_ds_config(path: Path) -> bool:
    """Return whether the file itself is a ds_config.

    Returns False for unreadable files: the reader of experiments reports the reason.
    """
    from zero_trial.experiment.experiment import looks_like_ds_config
    from zero_trial.schema.config_source import read_file

    try:
        return looks_like_ds_config(read_file(path, path.name).value)
    except ConfigError:
        return False


def _say_config(config: DsConfig, batch: Reconciliation, options: argparse.Namespace) -> None:
    """Print the batch sizes and every value, as text or as JSON."""
    from zero_trial.ds_config.config_report import render_report, report_json

    if options.json:
        print(report_json(config, batch.rows))
    else:
        say(f"{batch}\n\n{render_report(config, everything=not options.given)}")


# --- plan -----------------------------------------------------------------------------------------


def add_plan_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "plan",
        help="estimate how much memory a trial will need",
        description="Plan the memory of each rank: states from the layouts that the engine would build, activations from one micro-batch "
        "of the trial without values. The plans of every ZeRO stage and of smaller micro-batches are shown. Starts no ranks and writes nothing; the "
        "trial is built once, and its train_batch is called. Exit code 3 if it does not fit.",
    )
    add_planned(parser)
    parser.add_argument(
        "--stage", type=int, choices=(0, 1, 2, 3), help="plan for this ZeRO stage instead of ds_config's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_plan)


def add_planned(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``planned_request`` and ``planned_gpus`` read."""
    add_words(parser)
    parser.add_argument("--slots", "--ranks", type=int, metavar="N", help="ranks (default: resources.slots_per_trial)")
    limits = parser.add_mutually_exclusive_group()
    limits.add_argument(
        "--memory",
        "--limit",
        metavar="SIZE",
        help="memory of one rank, such as 16GiB (default: of the GPU, or of this machine divided by ranks)",
    )
    limits.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="plan for GPUs of this size, such as 80GiB, that need not be in this machine; the model is built without values",
    )


def planned_request(options: argparse.Namespace) -> RunRequest:
    """Return the request from the options of ``add_planned``."""
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
    """Return the GPUs of ``--gpu-memory``; None if it is not given."""
    from zero_trial.planning.lone_task import PlannedMachine
    from zero_trial.util.text import parse_size

    if options.gpu_memory is None:
        return None
    return PlannedMachine("cuda", parse_size(options.gpu_memory, "--gpu-memory"), one_host=False, elsewhere=True)


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Pause the garbage collector, which would use a fifth of the CPU time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _plan(options: argparse.Namespace) -> int:
    from zero_trial.launch.run_experiment import check_run
    from zero_trial.planning.lone_task import DryRunRequest, trial_planner

    checked = check_run(planned_request(options), os.environ)
    machine = _machine(options, checked)
    limit = machine.limit
    with _no_collector(), trial_planner(DryRunRequest.of(checked), machine, options.stage) as planner:
        own, rows, comparison = planner.plan(), planner.compare(), planner.comparison(limit)
        error = None if own.fits(limit) or limit is None else planner.does_not_fit(limit)
    for warning in planner.settings.warnings:
        print(strip_control(f"warn    {warning}"), file=sys.stderr)
    if options.json:
        compared = [
            {"name": row.name, "plan": row.plan.as_dict() if row.plan else None, "refusal": row.refusal} for row in rows
        ]
        facts = {"plan": own.as_dict(), "limit": limit, "fits": error is None, "compared": compared}
        print(json.dumps({**facts, "error": str(error or "") or None}))
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


# --- tune -----------------------------------------------------------------------------------------

_MARGIN = 0.1  # fraction of the planned tensors, for allocators and unplanned memory
_GPU_PROCESS = 1 << 30  # a CUDA context, kernels, NCCL's buffers


def add_tune_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest ds_config that fits",
        description="Find the fastest ZeRO stage, micro-batch and accumulation, schedule and memory-saving options at the same global batch: the "
        "plan prunes what cannot fit, and short trials on this host measure steps per second, those with the best estimate first. "
        "ds_config's autotuning section sets the defaults. Exit code 3 if nothing fits.",
    )
    add_planned(parser)
    parser.add_argument(
        "--trials",
        type=int,
        metavar="N",
        help="maximum number of trials (default: a quarter of the configurations that fit, at least 3)",
    )
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps per trial (default: 16)")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help="keep this key or section of the ds_config unchanged (may be repeated)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="plan, show which configurations would be tried, and start nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    parser.set_defaults(handler=_tune)


def _tune(options: argparse.Namespace) -> int:
    from zero_trial.launch.run_experiment import check_run
    from zero_trial.launch.screen import Screen
    from zero_trial.planning.tune import (
        facts_of,
        own_way,
        refuse_autotuning,
        run_trial,
        search_budget,
        select,
        ways_to_train,
        weigh_way,
    )

    request = planned_request(options)
    if options.gpu_memory is not None and not options.dry_run:
        raise ConfigError("trials run on this host, with its own GPUs", where="--gpu-memory", fix="Pass --memory.")
    checked = check_run(request, os.environ)
    facts = facts_of(checked, keep=options.keep, accelerator=options.gpu_memory is not None or checked.devices.gpus > 0)
    tuning = checked.ds_config.autotuning  # type: ignore[union-attr]  # facts_of has rejected None
    refuse_autotuning(tuning, facts.samples * checked.batch.axes.data_parallel)  # type: ignore[union-attr]
    search_budget(tuning, 1, options.trials, options.steps)  # raises for invalid numbers before planning starts
    own, ways = own_way(facts), ways_to_train(facts)
    ways += [own] if own not in ways else []
    tell = (lambda line: None) if options.json else say
    with _planning(checked.devices.gpus > 0) as call:
        machine, margin = _tuned_machine(options, checked, call)
        limit = machine.limit
        tell(f"plan    {len(ways)} configurations of {own.name}; limit {format_bytes(limit)} per rank")
        found = select(
            ways,
            lambda way: call(weigh_way, request, way, machine, dict(os.environ)),
            margin,
            limit,
            sizes=tuning.num_tuning_micro_batch_sizes,
            own=own,
        )
    for line in _selection_lines(found):
        tell(line)
    if options.dry_run and options.json:
        fits = [{"way": way.mapping, "bytes": found.weighed[way].bytes} for way in found.ways]
        pruned = [{"way": way.mapping, "why": why} for way, why in found.pruned]
        print(json.dumps({"limit": limit, "fits": fits, "pruned": pruned}))
    if not found.ways:
        raise _nothing_fits(found, margin, limit)
    if options.dry_run:
        return 0
    most, steps = search_budget(tuning, len(found.ways), options.trials, options.steps)
    tell(f"search  {most} trials of {len(found.ways)} configurations that fit, {steps} steps each")
    trials: list[TuneTrial] = []
    interrupted = False
    try:
        for way in found.ways[:most]:
            trials.append(run_trial(request, way, steps, Screen(sys.stderr, quiet=True), os.environ))
            made = trials[-1]
            mark = " (as configured)" if way == own else ""
            result = made.why or f"{made.speed:.3g} steps/s"
            tell(f"trial   {len(trials)}/{most} {way.name}{mark}: {result}  {format_duration(made.seconds)}")
    except KeyboardInterrupt:
        if not any(trial.speed for trial in trials):
            raise
        interrupted = True
        tell("stopped the search; the results below are of the trials so far")
    _conclude(options, checked, own, trials)
    return ExitStatus.INTERRUPTED if interrupted else 0


@contextlib.contextmanager
def _planning(accelerator: bool) -> Iterator[Callable[..., Any]]:
    """Yield a caller of functions. With GPUs it runs them in a separate process that ends with the
    block, because planning creates a CUDA context on the first GPU, and trials need its memory."""
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    if not accelerator:
        yield lambda function, *arguments: function(*arguments)
        return
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            yield lambda function, *arguments: pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise TrialError(
                "the planning process was killed, perhaps by the kernel's out-of-memory killer", where="tune"
            ) from None


def _tuned_machine(
    options: argparse.Namespace, checked: CheckedRun, call: Callable[..., Any]
) -> tuple[PlannedMachine, Margin]:
    """Return the machine to plan for, and a rank's memory in addition to its tensors.

    On the CPU the additional memory is that of the rank's processes; this process, which has loaded
    the same libraries, starts those of each trial. ``call`` runs functions that use a GPU.
    """
    import torch

    from zero_trial.planning.lone_task import PlannedMachine
    from zero_trial.planning.memory_plan import own_process, rank_limit, rank_processes
    from zero_trial.planning.tune import Margin
    from zero_trial.util.text import parse_size

    if (elsewhere := planned_gpus(options)) is not None:
        return elsewhere, Margin(_MARGIN, _GPU_PROCESS)
    device = "cuda" if checked.devices.gpus > 0 and torch.cuda.is_available() else "cpu"
    own = own_process()
    process = rank_processes(own, checked.own.ranks, command=own) if device == "cpu" else _GPU_PROCESS
    limit = (
        parse_size(options.memory, "--memory")
        if options.memory is not None
        else call(rank_limit, torch.device(device), checked.own.ranks)
    )
    return PlannedMachine(device, limit, one_host=True), Margin(_MARGIN, process)


def _selection_lines(found: Selection) -> list[str]:
    refused: dict[str, list[str]] = {}
    for way, why in found.pruned:
        if not why.startswith("not needed"):
            refused.setdefault(why, []).append(way.name)
    lines = []
    for why, names in refused.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"pruned  {names[0]}{more}: {why}")
    spared = len(found.pruned) - sum(map(len, refused.values()))
    lines += [f"pruned  {spared} more, which save memory without need or have smaller micro-batches"] if spared else []
    return lines + [f"fits    {way.name}: planned {format_bytes(found.weighed[way].bytes)}" for way in found.ways]


def _nothing_fits(found: Selection, margin: Margin, limit: int | None) -> Exception:
    sizes = [weighed.bytes for weighed in found.weighed.values() if not weighed.refusal]
    if not sizes:
        first = next(iter(found.weighed.values()), None)
        return TrialError("no configuration can be planned", where="tune", got=first.refusal if first else None)
    return DoesNotFit(
        f"the smallest of {len(sizes)} configurations needs {format_bytes(margin.needed(min(sizes)))}, has {format_bytes(limit)}",
        fix="Use more ranks, a shorter input, activation checkpointing, offload or a smaller model.",
    )


def _conclude(options: argparse.Namespace, checked: CheckedRun, own: TrainingWay, trials: list[TuneTrial]) -> None:
    """Print the winner, its changes to the ds_config and the command that trains with them. Raises
    TrialError if there is no winner."""
    from zero_trial.ds_config.overlay import overwrite_ds_config

    best = max((trial for trial in trials if trial.speed), key=lambda trial: trial.speed or 0.0, default=None)
    mine = own.mapping
    changes = {key: value for key, value in best.way.values if mine.get(key) != value} if best is not None else {}
    if options.json:
        listed = [
            {"way": trial.way.mapping, "steps_per_second": trial.speed, "why": trial.why, "seconds": trial.seconds}
            for trial in trials
        ]
        winner = (
            {"way": best.way.mapping, "steps_per_second": best.speed, "changes": changes} if best is not None else None
        )
        print(json.dumps({"best": winner, "trials": listed}))
    if best is None:
        raise TrialError("no trial could be measured", where="tune", got=trials[0].why)
    if options.json:
        return
    before = dict(checked.experiment.ds_config(checked.model_dir).value)
    was, now = (json.dumps(each, indent=2).splitlines() for each in (before, overwrite_ds_config(before, changes)))
    slots = [] if options.slots is None else ["--slots", str(options.slots)]
    settings = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    say(f"best    {best.way.name}: {best.speed:.3g} steps/s")
    lines = difflib.unified_diff(was, now, "ds_config", "ds_config, tuned", lineterm="")
    print("\n".join(lines) or "no change to the ds_config")
    say(f"train   {shlex.join(['zero-trial', 'run', *given_words(options), *settings, *slots])}")
