"""What ds_config says about a pipeline, as the values that its parts take: schedule, chunks, policy, cut, checkpointing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zero_trial.config.pipeline_words import LIFETIMES, REDUCTIONS, RESHARDS
from zero_trial.config.sections import DsConfig
from zero_trial.errors import ConfigError
from zero_trial.pipeline.passes import lower
from zero_trial.pipeline.policy import Choice, Policy, Sharding, Weights, candidates, choose_fitting, needed
from zero_trial.pipeline.schedule import Parameters, Reduction, Schedule
from zero_trial.pipeline.schedules import RECIPES, build
from zero_trial.pipeline.validate import validate
from zero_trial.precision.policy import DtypePolicy
from zero_trial.zero.plan import Lifetime, ZeroPlan, plan_for_stage

ROOM = 0.75
"""The part of a rank's memory that states and full copies may take where the policy is open; the rest is for activations."""


@dataclass(frozen=True)
class PipelineSettings:
    """``parameters`` and ``reduction`` are None where the policy is open; ``partition_method`` None and an interval of 0 are the module's own."""

    stages: int = 1
    schedule: str = "1f1b"
    chunks_per_rank: int = 1
    parameters: Parameters | None = None
    reduction: Reduction | None = None
    partition_method: str | None = None
    activation_checkpoint_interval: int = 0


def pipeline_settings(config: DsConfig) -> PipelineSettings:
    """The settings of ``pipeline`` and ``mesh.pipe``; where the policy says nothing, ``reduce_every`` and ``reshard_after`` do."""
    section, zero = config.pipeline, config.zero_optimization
    words = (section.zero_policy, RESHARDS.get(zero.reshard_after), zero.reduce_every)
    held = next((word for word in words if word in LIFETIMES), None)
    when = next((word for word in words if word in REDUCTIONS), None)
    chunks = section.chunks_per_rank
    return PipelineSettings(
        stages=config.mesh.pipe,
        schedule=section.schedule,
        chunks_per_rank=chunks if isinstance(chunks, int) else RECIPES[section.schedule].chunks,
        parameters=Parameters(held) if held is not None and plan_for_stage(zero.stage).frees_parameters else None,
        reduction=Reduction(when) if when is not None else None,
        partition_method=section.partition_method,
        activation_checkpoint_interval=section.activation_checkpoint_interval,
    )


def sharding_of(plan: ZeroPlan) -> Sharding:
    """What the plan cuts and frees."""
    return Sharding(
        optimizer=plan.shard_optimizer,
        gradients=plan.grads is Lifetime.USE,
        parameters=plan.frees_parameters,
    )


def training_schedule(
    settings: PipelineSettings, policy: Policy, micro_batches: int, ties: Sequence[Sequence[int]] = ()
) -> Schedule:
    """The schedule of one step under a policy, with messages, sharding and the step in it. Raises ConfigError for what the recipe cannot do."""
    computed = build(settings.schedule, settings.stages, micro_batches, settings.chunks_per_rank)
    return lower(computed, parameters=policy.parameters, reduction=policy.reduction, ties=ties)


def weigh(elements: int, dtypes: DtypePolicy, ranks: int) -> Weights:
    """The weights of one pipeline rank's ``elements`` among ``ranks`` that share them, with two moments per element, as Adam has."""
    master = dtypes.master.itemsize
    return Weights(
        parameters=elements * dtypes.param.itemsize,
        gradients=elements * dtypes.grad.itemsize,
        optimizer=elements * (2 * master + (master if dtypes.has_separate_master else 0)),
        ranks=ranks,
    )


def choose_policy(
    settings: PipelineSettings, plan: ZeroPlan, weights: Sequence[Weights], micro_batches: int, limit: int | None
) -> Choice:
    """The policy that is asked for, or of those that are open the one that moves least and fits into ``limit`` bytes on every pipeline rank.

    ``weights``: of each pipeline rank. The price is that of the rank that needs most. All ranks must pass the same values.
    """
    if len(weights) != settings.stages:
        raise ConfigError(
            "one weight for each pipeline stage", where="choose_policy", got=len(weights), expected=settings.stages
        )

    def price(policy: Policy) -> tuple[int, float]:
        report = validate(training_schedule(settings, policy, micro_batches))
        chunks = settings.chunks_per_rank
        return max(
            (needed(policy, weight, rank, chunks), policy.volume(rank, chunks))
            for weight, rank in zip(weights, report.ranks, strict=True)
        )

    options = candidates(sharding_of(plan), settings.parameters, settings.reduction, chunks=settings.chunks_per_rank)
    return choose_fitting(options, price, None if limit is None else int(limit * ROOM))


def price_line(settings: PipelineSettings, choice: Choice, micro_batches: int, ranks: int) -> str:
    """One line for the start of a run: schedule with its bubble, policy with its price among ``ranks`` data-parallel ranks."""
    report = validate(training_schedule(settings, choice.policy, micro_batches))
    chunks = settings.chunks_per_rank
    text = (
        f"pipeline: {settings.schedule}, {settings.stages} stages x {chunks} chunk{'s' * (chunks > 1)}, {micro_batches} micro-batches, "
        f"bubble {report.bubble:.1%}; ZeRO-{choice.policy.zero_stage}, {choice.policy.describe()}: "
        f"{choice.bytes / 2**20:.1f} MiB before activations"
    )
    if ranks > 1:
        text += f", {choice.volume:g} x (D-1)/D of a stage's parameters moved per step, D = {ranks}"
    return text if choice.fits else f"{text}; more than fits, and no other policy needs less"
