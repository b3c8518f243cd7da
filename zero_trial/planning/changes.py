"""What to change when a plan does not fit: the smallest change that does, and the error that names it."""

from __future__ import annotations

from collections.abc import Sequence

from zero_trial.errors import ConfigError, DoesNotFit, TrialError
from zero_trial.planning.plan import MemoryPlan, size_text
from zero_trial.planning.planner import Choice, Planner


def smallest_change(planner: Planner, limit: int) -> MemoryPlan | None:
    """The plan nearest to the run's own that needs at most ``limit`` bytes; the run's own if it fits; None if none does.

    Near means few changes: a halving of the micro-batch and a stage up count one each, and of equals the one with fewer stages up is nearer,
    because a halved micro-batch with doubled accumulation trains exactly the same.
    """
    micro_batches = [planner.micro_batch, *planner.halvings()]
    candidates = [
        (halvings + stage - planner.stage, stage - planner.stage, stage, size)
        for halvings, size in enumerate(micro_batches)
        for stage in range(planner.stage, 4)
    ]
    for _, _, stage, size in sorted(candidates):
        plan = _plan_or_none(planner, stage, size)
        if plan is not None and plan.fits(limit):
            return plan
    return None


def does_not_fit(planner: Planner, limit: int) -> DoesNotFit:
    """The error for a run whose plan needs more than ``limit``: how much, the smallest change that fits, and what a stage up would save."""
    own = planner.plan()
    figures = own.figures
    detail = f" (activations {size_text(figures.activations)})" if figures.activations is not None else ""
    found = smallest_change(planner, limit)
    fix = (
        f"Smallest change that fits: {describe_change(own, found)}."
        if found is not None
        else nothing_fits(planner, limit)
    )
    more = _stage_up(planner) if found is not None and found.stage == own.stage else ""
    return DoesNotFit(f"rank 0 needs {size_text(figures.total)}, has {size_text(limit)}{detail}", fix=fix + more)


def describe_change(own: MemoryPlan, other: MemoryPlan) -> str:
    """``micro batch 4→2 with accumulation 1→2 (same global batch)``, ``stage 2→3``, or both."""
    parts = []
    if other.micro_batch != own.micro_batch:
        parts.append(
            f"micro batch {own.micro_batch}→{other.micro_batch} with accumulation {own.accumulation}→{other.accumulation} (same global batch)"
        )
    if other.stage != own.stage:
        parts.append(f"stage {own.stage}→{other.stage}")
    return " and ".join(parts) or "none"


def nothing_fits(planner: Planner, limit: int) -> str:
    """What is said when no stage and no micro-batch fits."""
    rows = [choice.plan for choice in planner.compare() if choice.plan is not None]
    least = min(rows, key=lambda plan: plan.figures.total)
    return (
        f"No stage and no micro-batch fits; the least of those compared is {size_text(least.figures.total)} at ZeRO-{least.stage} with micro batch "
        f"{least.micro_batch}. Use more ranks, a shorter input, activation checkpointing or a smaller model."
    )


def comparison_table(rows: Sequence[Choice], limit: int | None = None) -> str:
    """The rows side by side: states, activations, temporary, peak, and whether it fits."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':<{width}}  {'states':>10}{'activations':>13}{'temporary':>12}{'peak':>12}{'exchange':>12}"]
    for row in rows:
        if row.plan is None:
            lines.append(f"{row.name:<{width}}  {row.refusal}")
            continue
        figures = row.plan.figures
        sizes = (figures.states, figures.activations, figures.temporary, figures.peak, figures.exchange)
        cells = "".join(
            f"{size_text(value):>{column}}" for value, column in zip(sizes, (10, 13, 12, 12, 12), strict=True)
        )
        verdict = "" if limit is None else "  fits" if row.plan.fits(limit) else "  does not fit"
        lines.append(f"{row.name:<{width}}  {cells}{verdict}")
    return "\n".join(lines)


def _stage_up(planner: Planner) -> str:
    own = planner.plan()
    higher = [
        plan
        for stage in range(own.stage + 1, 4)
        if (plan := _plan_or_none(planner, stage, own.micro_batch)) is not None
    ]
    best = min(higher, key=lambda plan: plan.figures.total, default=None)
    saved = own.figures.total - best.figures.total if best is not None else 0
    return f" Also: stage {own.stage}→{best.stage} saves {size_text(saved)}." if best is not None and saved > 0 else ""


def _plan_or_none(planner: Planner, stage: int, micro_batch: int) -> MemoryPlan | None:
    try:
        return planner.plan(stage, micro_batch)
    except (ConfigError, TrialError):
        if (stage, micro_batch) == (planner.stage, planner.micro_batch):
            raise
        return None
