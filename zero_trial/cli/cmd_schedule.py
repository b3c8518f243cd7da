"""``zero-trial schedule NAME --stages P --micro-batches M``: what a pipeline schedule does, and
what it costs.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from zero_trial.util.text import table

if TYPE_CHECKING:
    from zero_trial.pipeline.lowering import ZeroPolicy
    from zero_trial.pipeline.schedule import Schedule
    from zero_trial.pipeline.simulator import SimulationReport

_NAMES = "gpipe, 1f1b, interleaved, looped_bfs, zb_h1, zb_v"

_LEGEND = """\
activations  the most at once, each of one micro-batch through all of the rank's layers
parameters   the most full parameters at once, as a part of the rank's
gradients    the most full gradients at once, as a part of the rank's
volume       what sharding moves per step, in the rank's parameters x (D-1)/D for D data-parallel ranks
messages     sent to other pipeline ranks per step"""


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "schedule",
        help="draw a pipeline schedule with its bubble and its memory",
        description="Build a pipeline schedule, add messages and the sharding of a ZeRO stage, simulate all ranks and print what comes out: a "
        "row per rank and a column per unit of time, the bubble, and what each rank holds and moves. Starts nothing and needs no model.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help=_NAMES)
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
        help="time of forward, input gradient and weight gradient of a chunk, in whole numbers (default: 1 1 1)",
    )
    parser.add_argument("--actions", action="store_true", help="print every action of every rank too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(handler=_handle)


def _handle(options: argparse.Namespace) -> int:
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
        print(json.dumps(_as_dict(schedule, report, policy, options.zero)))
        return 0
    print(_head(schedule, report, policy, options.zero))
    print(f"\n{grid(report)}\n")
    if options.actions:
        print(f"{rows_as_text(schedule)}\n")
    print(f"{_table(schedule, report, policy)}\n\n{_LEGEND}")
    return 0


def _cost(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _head(schedule: Schedule, report: SimulationReport, policy: ZeroPolicy, zero_stage: int) -> str:
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
        f"schedule  {schedule.name} · {' · '.join(words)}\n"
        f"bubble    {report.bubble:.1%}: {report.makespan:g} units of time, of which a rank computes {report.ranks[0].busy:g}"
    )


def _table(schedule: Schedule, report: SimulationReport, policy: ZeroPolicy) -> str:
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


def _as_dict(schedule: Schedule, report: SimulationReport, policy: ZeroPolicy, zero_stage: int) -> dict[str, Any]:
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
