"""A policy: which sharding actions a ZeRO stage puts into a schedule, and what they move. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from zero_trial.errors import ConfigError
from zero_trial.pipeline.report import RankReport
from zero_trial.pipeline.schedule import Parameters, Reduction


@dataclass(frozen=True)
class Policy:
    """``parameters`` is None where parameters are never freed.

    | ZeRO stage | parameters | reduction | volume per step and rank, in the rank's parameters x (D-1)/D |
    |---|---|---|---|
    | 0 | stay | boundary | 2, an all-reduce |
    | 1, 2 | stay | boundary | 2, a reduce-scatter and an all-gather of what was updated |
    | 2 | stay | micro | M + 1 |
    | 3 | hold | boundary | 2, a gather and a reduce-scatter |
    | 3 | chunk | boundary | u + 1, with u runs of a chunk |
    | 3 | free | micro | 3M; 4M where input and weight gradients are apart |
    """

    zero_stage: int
    parameters: Parameters | None
    reduction: Reduction

    def volume(self, rank: RankReport, chunks: int) -> float:
        """Elements that a rank with ``chunks`` alike chunks moves per step among its D data-parallel ranks, as in the table."""
        if self.zero_stage == 0:
            return 2 * rank.reductions / chunks
        gathers = chunks if self.parameters is None and rank.reductions else rank.gathers
        return (gathers + rank.reductions) / chunks


def choose(zero_stage: int, parameters: Parameters | None = None, reduction: Reduction | None = None) -> Policy:
    """The policy of a ZeRO stage: what is asked for, else what moves least. Raises ConfigError for what a stage cannot do."""
    if zero_stage not in (0, 1, 2, 3):
        raise ConfigError(
            "no such ZeRO stage", where="zero_optimization.stage", got=zero_stage, expected="0, 1, 2 or 3"
        )
    if zero_stage < 3 and parameters is not None:
        raise ConfigError(
            "parameters are freed at ZeRO stage 3 only",
            where="pipeline.zero_policy",
            got=f"{parameters.value} at ZeRO stage {zero_stage}",
            fix="Leave the policy out, or use ZeRO stage 3.",
        )
    if zero_stage < 2 and reduction is Reduction.MICRO:
        raise ConfigError(
            "full gradients live at ZeRO stages 0 and 1, so reducing them per micro-batch saves nothing",
            where="pipeline.zero_policy",
            got=f"micro at ZeRO stage {zero_stage}",
            expected="boundary",
        )
    if zero_stage == 3 and parameters is None:
        parameters = Parameters.HOLD
    if reduction is None:
        reduction = Reduction.MICRO if parameters is Parameters.FREE else Reduction.BOUNDARY
    return Policy(zero_stage, parameters, reduction)
