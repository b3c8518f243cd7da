"""``zero-trial simulate`` and ``schedule``: simulate a search with synthetic learning curves
(trials created, stopped, training spent); show a pipeline schedule and its costs."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_trial.cli.output import say
from zero_trial.util.text import table

if TYPE_CHECKING:
    from zero_trial.master.search.simulation import Setup, Simulated
    from zero_trial.pipeline.lowering import ZeroPolicy
    from zero_trial.pipeline.schedule import Schedule
    from zero_trial.pipeline.simulator import SimulationReport

_REASONS_SHOWN = 5


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a search without training",
        description="Run the experiment's searcher against synthetic learning curves: its brackets and rungs, how many trials reach each rung, "
        "how much is spent compared with training every trial to its end, and how many points are pruned because their ds_config "
        "cannot be reconciled. Trains nothing, writes nothing, and prints the same result for the same seed.",
    )
    parser.add_argument("experiment_path", type=Path, metavar="EXPERIMENT.yaml", help="the experiment")
    parser.add_argument(
        "model_dir", nargs="?", type=Path, metavar="MODEL_DIR", help="another folder to search for the ds_config file"
    )
    parser.add_argument(
        "--trials-seed", type=int, metavar="N", help="seed of the samples (default: reproducibility.experiment_seed)"
    )
    parser.add_argument(
        "--metric-curve",
        choices=("power", "crossing", "noise"),
        default="power",
        help="power: early leaders mostly win (default); crossing: slow starters win; noise: random",
    )
    parser.add_argument(
        "--length", type=int, metavar="N", help="length of a training, if the searcher does not set one"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
    from zero_trial.master.search.searcher import build
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
    anywhere = {"type": "directory", "container_path": "/"}  # any valid storage: nothing is stored
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
        raise ConfigError("the experiment does not set the length of a trial", where="searcher", fix=fix)
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
    """Return the base ds_config's file by name, from the model folder or the YAML's folder."""
    from zero_trial.errors import ConfigError
    from zero_trial.master.search.pruning import ds_config_file

    named = ds_config_file(config, config["hyperparameters"])
    if named is None:
        return {}
    folders = [*([options.model_dir] if options.model_dir else []), options.experiment_path.parent]
    for folder in folders:
        if (folder / named).is_file():
            return {str(Path(named)): (folder / named).read_bytes()}
    fix = "Add the model's folder after the experiment." if options.model_dir is None else None
    raise ConfigError(
        f"{named} is not in {' or in '.join(str(folder) for folder in folders)}", where="data.ds_config", fix=fix
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
    lines.append(
        f"spent   {found.spent} of {found.whole} {setup.unit} that training all trials to their end would take{share}"
    )
    pruned = sum(found.pruned.values())
    lines.append(f"pruned  {pruned} points" + (", whose ds_config cannot be reconciled" if pruned else ""))
    for why, count in list(found.pruned.items())[:_REASONS_SHOWN]:
        lines.append(f"        {count} x {why}")
    if len(found.pruned) > _REASONS_SHOWN:
        lines.append(f"        and {len(found.pruned) - _REASONS_SHOWN} other reasons")
    return lines


# --- schedule -------------------------------------------------------------------------------------

_SCHEDULES = "gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_v"

_LEGEND = """\
activations  peak number of micro-batches whose activations a rank holds, in units of all its layers
parameters   peak of full parameters, as a fraction of the rank's parameters
gradients    peak of full gradients, as a fraction of the rank's parameters
volume       elements that sharding moves per step, in units of the rank's parameters x (D-1)/D (D data-parallel ranks)
messages     sent to other pipeline ranks per step"""


def add_schedule_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "schedule",
        help="draw a pipeline schedule with its bubble and its memory",
        description="Build a pipeline schedule, add messages and the sharding of a ZeRO stage, simulate all ranks and print the result: a "
        "row per rank and a column per unit of time, the bubble, and what each rank holds and moves. Starts nothing and needs no model.",
    )
    parser.add_argument("name", metavar="NAME", help=_SCHEDULES)
    parser.add_argument("--stages", type=int, required=True, metavar="P", help="pipeline stages, one per rank")
    parser.add_argument("--micro-batches", type=int, required=True, metavar="M", help="micro-batches per step")
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="chunks of the model per rank (default: the schedule's)"
    )
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="the ZeRO stage (default: 0)")
    parser.add_argument(
        "--policy",
        choices=("hold", "chunk", "free"),
        help="at ZeRO stage 3, how long gathered parameters live (default: hold)",
    )
    parser.add_argument(
        "--reduce",
        choices=("boundary", "micro"),
        help="when gradients are reduced (default: boundary; micro with free)",
    )
    parser.add_argument("--tied", action="store_true", help="the first and the last chunk share a weight")
    parser.add_argument(
        "--costs",
        type=_cost,
        nargs=3,
        default=(1, 1, 1),
        metavar=("F", "I", "W"),
        help="time of forward, input gradient and weight gradient of a chunk, as whole numbers (default: 1 1 1)",
    )
    parser.add_argument("--actions", action="store_true", help="also print every action of every rank")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_schedule)


def _schedule(options: argparse.Namespace) -> int:
    from zero_trial.pipeline.lowering import Sharding, choose, lower
    from zero_trial.pipeline.schedule import ParameterLifetime, ReductionTiming, build
    from zero_trial.pipeline.simulator import Costs, grid, rows_as_text, validate
    from zero_trial.sharding.plan import plan_for_stage

    policy = choose(
        Sharding(*plan_for_stage(options.zero).cuts),
        ParameterLifetime(options.policy) if options.policy else None,
        ReductionTiming(options.reduce) if options.reduce else None,
    )
    computed = build(options.name, options.stages, options.micro_batches, options.chunks)
    ties = [(0, computed.placement.last)] if options.tied else []
    schedule = lower(computed, parameters=policy.parameters, reduction=policy.reduction, ties=ties)
    report = validate(schedule, Costs(*options.costs))
    if options.json:
        print(json.dumps(_schedule_as_dict(schedule, report, policy, options.zero)))
        return 0
    print(_schedule_head(schedule, report, policy, options.zero))
    print(f"\n{grid(report)}\n")
    if options.actions:
        print(f"{rows_as_text(schedule)}\n")
    print(f"{_schedule_table(schedule, report, policy)}\n\n{_LEGEND}")
    return 0


def _cost(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _schedule_head(schedule: Schedule, report: SimulationReport, policy: ZeroPolicy, zero_stage: int) -> str:
    chunks = len(schedule.placement.of(0))
    words = [
        f"{schedule.stages} pipeline stages",
        f"{schedule.micro_batches} micro-batches",
        f"{chunks} chunk{'s' * (chunks > 1)} per rank",
        f"ZeRO stage {zero_stage}",
        f"reduce: {policy.reduction.value}",
    ]
    if policy.parameters is not None:
        words.append(f"parameters: {policy.parameters.value}")
    return (
        f"schedule  {schedule.name} · {' · '.join(words)}\nbubble    {report.bubble:.1%}: {report.makespan:g} units of time, of which a rank is "
        f"busy {report.ranks[0].busy:g}"
    )


def _schedule_table(schedule: Schedule, report: SimulationReport, policy: ZeroPolicy) -> str:
    head = "rank chunks idle activations parameters gradients gathers reductions volume messages"
    rows: list[tuple[str, ...]] = [tuple(head.split())]
    for index, rank in enumerate(report.ranks):
        chunks = schedule.placement.of(index)
        count = len(chunks)
        parameters = 1.0 if policy.parameters is None else rank.peak_parameters / count
        numbers: tuple[float, ...] = (
            report.idle(index),
            rank.peak_activations / count,
            parameters,
            rank.peak_gradients / count,
        )
        counts: tuple[float, ...] = (rank.gathers, rank.reductions, policy.volume(rank, count), rank.messages)
        rows.append((str(index), ",".join(map(str, chunks)), *(f"{number:.4g}" for number in (*numbers, *counts))))
    return table(rows, right=range(len(rows[0])))


def _schedule_as_dict(
    schedule: Schedule, report: SimulationReport, policy: ZeroPolicy, zero_stage: int
) -> dict[str, Any]:
    measured = report.as_dict()
    for index, rank in enumerate(measured["ranks"]):
        chunks = schedule.placement.of(index)
        rank["chunks"] = list(chunks)
        rank["volume"] = policy.volume(report.ranks[index], len(chunks))
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "chunks": len(schedule.placement.of(0)),
        "zero_stage": zero_stage,
        "parameters": policy.parameters,
        "reduction": schedule.reduction,
        **measured,
        "actions": [[str(action) for action in row] for row in schedule.rows],
    }
