"""``zero-trial tune CONST.yaml MODEL_DIR``: the fastest ds_config that fits, by plan and short
trials."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.cmd_plan import add_planned, planned_gpus, planned_request
from zero_trial.cli.cmd_run import given_words
from zero_trial.cli.output import say, shown
from zero_trial.errors import ConfigError, DoesNotFit, ExitStatus, TrialError
from zero_trial.util.text import format_bytes, format_duration

if TYPE_CHECKING:
    from zero_trial.launch.run_experiment import CheckedRun
    from zero_trial.planning.lone_task import PlannedMachine
    from zero_trial.planning.tune import Margin, Selection, TrainingWay, TuneTrial

_MARGIN = 0.1  # of the planned tensors, for allocators and what no plan knows
_GPU_PROCESS = 1 << 30  # a CUDA context, kernels, NCCL's buffers


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "tune",
        help="find the fastest ds_config that fits",
        description="Find the fastest ZeRO stage, micro-batch and accumulation, schedule and way to save memory at the same global batch: "
        "the plan prunes what cannot fit, and short trials on this host measure steps per second, those with the best estimate first. "
        "ds_config's autotuning section sets the defaults. Exit code 3 if nothing fits.",
        allow_abbrev=False,
    )
    add_planned(parser)
    parser.add_argument(
        "--trials", type=int, metavar="N", help="the most trials (default: a quarter of what fits, at least 3)"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="measured steps of a trial (default: 16)")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help="leave this key or section of the ds_config as it is (may be repeated)",
    )
    parser.add_argument("--write", action="store_true", help="write the winner's values into the ds_config's file")
    parser.add_argument("--dry-run", action="store_true", help="plan, show what would be tried, and start nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end and nothing else")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
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
        raise ConfigError(
            "trials run on this host, with the GPUs that are here", where="--gpu-memory", fix="Give --memory."
        )
    checked = check_run(request, os.environ)
    facts = facts_of(checked, keep=options.keep, accelerator=options.gpu_memory is not None or checked.devices.gpus > 0)
    tuning = checked.ds_config.autotuning  # type: ignore[union-attr]  # facts_of has refused None
    refuse_autotuning(tuning, facts.samples * checked.batch.axes.data_parallel)  # type: ignore[union-attr]
    search_budget(tuning, 1, options.trials, options.steps)  # refuses wrong numbers before the plans
    target = _file_to_write(checked) if options.write else None
    own, ways = own_way(facts), ways_to_train(facts)
    ways += [own] if own not in ways else []
    tell = (lambda line: None) if options.json else say
    with _planning(checked.devices.gpus > 0) as call:
        machine, margin = _machine(options, checked, call)
        limit = machine.limit
        tell(f"plan    {len(ways)} ways to train {own.name}; limit {format_bytes(limit)} per rank")
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
        print(json.dumps(_selection_json(found, limit)))
    if not found.ways:
        raise _nothing_fits(found, margin, limit)
    if options.dry_run:
        return 0
    most, steps = search_budget(tuning, len(found.ways), options.trials, options.steps)
    tell(f"search  {most} trials of {len(found.ways)} ways that fit, {steps} steps each")
    trials: list[TuneTrial] = []
    interrupted = False
    try:
        for way in found.ways[:most]:
            trials.append(run_trial(request, way, steps, Screen(sys.stderr, quiet=True), os.environ))
            tell(_trial_line(trials[-1], len(trials), most, own))
    except KeyboardInterrupt:
        if not any(trial.speed for trial in trials):
            raise
        interrupted, target = True, None
        tell("stopped the search; what follows is of the trials so far, and no file is written")
    _conclude(options, checked, own, trials, target)
    return ExitStatus.INTERRUPTED if interrupted else 0


@contextlib.contextmanager
def _planning(accelerator: bool) -> Iterator[Callable[..., Any]]:
    """Yield what calls a function with arguments; with GPUs in a process of its own, which ends
    with the block: a plan makes a CUDA context on the first GPU, whose memory the trials need."""
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
                "the process that plans was killed, perhaps by the kernel's out-of-memory killer", where="tune"
            ) from None


def _machine(
    options: argparse.Namespace, checked: CheckedRun, call: Callable[..., Any]
) -> tuple[PlannedMachine, Margin]:
    """Return what is planned for, and what a rank needs in addition to its tensors.

    On the CPU these are its processes; this one, which has loaded the same libraries, starts those
    of each trial. ``call`` calls what asks a GPU.
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
    lines += [f"pruned  {spared} more, which save memory that is there or have smaller micro-batches"] if spared else []
    return lines + [f"fits    {way.name}: planned {format_bytes(found.weighed[way].bytes)}" for way in found.ways]


def _selection_json(found: Selection, limit: int | None) -> dict[str, Any]:
    return {
        "limit": limit,
        "fits": [{"way": way.mapping, "bytes": found.weighed[way].bytes} for way in found.ways],
        "pruned": [{"way": way.mapping, "why": why} for way, why in found.pruned],
    }


def _nothing_fits(found: Selection, margin: Margin, limit: int | None) -> Exception:
    sizes = [weighed.bytes for weighed in found.weighed.values() if not weighed.refusal]
    if not sizes:
        first = next(iter(found.weighed.values()), None)
        return TrialError("no way to train can be planned", where="tune", got=first.refusal if first else None)
    return DoesNotFit(
        f"the least of {len(sizes)} ways needs {format_bytes(margin.needed(min(sizes)))}, has {format_bytes(limit)}",
        fix="Use more ranks, a shorter input, activation checkpointing, offload or a smaller model.",
    )


def _trial_line(trial: TuneTrial, number: int, total: int, own: TrainingWay) -> str:
    result = trial.why or f"{trial.speed:.3g} steps/s"
    mark = " (as configured)" if trial.way == own else ""
    return f"trial   {number}/{total} {trial.way.name}{mark}: {result}  {format_duration(trial.seconds)}"


def _conclude(
    options: argparse.Namespace, checked: CheckedRun, own: TrainingWay, trials: list[TuneTrial], target: Path | None
) -> None:
    """Print the winner and, if asked for, write the ds_config. Raises TrialError if there is no
    winner."""
    from zero_trial.ds_config.overlay import overwrite_ds_config
    from zero_trial.util.files import write_atomic

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
    before = dict(checked.experiment.ds_config(checked.model_dir).value)
    texts = [json.dumps(each, indent=2) + "\n" for each in (before, overwrite_ds_config(before, changes))]
    slots = [] if options.slots is None else ["--slots", str(options.slots)]
    settings = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    if not options.json:
        say(f"best    {best.way.name}: {best.speed:.3g} steps/s")
        was, now = (text.splitlines() for text in texts)
        lines = difflib.unified_diff(was, now, "ds_config", "ds_config, tuned", lineterm="")
        print("\n".join(lines) or "the ds_config stays as it is")
        say(f"train   {shlex.join(['zero-trial', 'run', *given_words(options), *settings, *slots])}")
    if target is not None and changes:
        write_atomic(target, texts[1])
        if not options.json:
            say(f"wrote   {shown(target)}")


def _file_to_write(checked: CheckedRun) -> Path:
    """Return the JSON file of the ds_config. Raises ConfigError where there is none, where it has
    what JSON does not (comments would be lost), and where the experiment lays values over it."""
    from zero_trial.ds_config.overlay import TRAINER, named_ds_config

    experiment = checked.experiment
    named = named_ds_config(experiment.plain().get("data"), experiment.hyperparameters)[1]
    path = checked.model_dir / named if isinstance(named, str) else None
    if path is None or path.suffix != ".json" or not path.is_file():
        raise ConfigError(
            "there is no JSON file of the ds_config to write",
            where="--write",
            got="a ds_config inside the experiment" if not isinstance(named, str) else named,
            fix="Leave --write out: the values are shown at the end.",
        )
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ConfigError(
            "the file has comments, bare words or commas that are not JSON, and they would be lost",
            where="--write",
            got=str(path),
            fix="Leave --write out: the values are shown at the end.",
        ) from None
    over = {
        "hyperparameters.ds_config": isinstance(experiment.hyperparameters.get("ds_config"), Mapping),
        f"hyperparameters.{TRAINER}": experiment.hyperparameters.get(TRAINER) is not None,
    }
    if any(over.values()):
        raise ConfigError(
            "the experiment lays values over the file, which would win over what is written there",
            where=next(key for key, there in over.items() if there),
            fix="Move them into the file, or leave --write out: the values are shown at the end.",
        )
    return path
