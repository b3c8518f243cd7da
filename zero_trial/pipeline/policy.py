"""A policy: which sharding actions a ZeRO plan puts into a schedule, what they move, and what they need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zero_trial.errors import ConfigError
from zero_trial.pipeline.report import RankReport
from zero_trial.pipeline.schedule import Parameters, Reduction


@dataclass(frozen=True)
class Sharding:
    """What a ZeRO plan cuts into shards and frees, as far as a schedule has to know it.

    ``optimizer``: each rank updates a shard. ``gradients``: full ones are freed once they are reduced. ``parameters``: full ones are freed
    between uses.
    """

    optimizer: bool = False
    gradients: bool = False
    parameters: bool = False

    @classmethod
    def of_stage(cls, stage: int) -> Sharding:
        """By the ZeRO stage's number, where there is no plan: each stage cuts one thing more."""
        if stage not in (0, 1, 2, 3):
            raise ConfigError("no such ZeRO stage", where="zero_optimization.stage", got=stage, expected="0, 1, 2 or 3")
        return cls(stage > 0, stage > 1, stage > 2)


@dataclass(frozen=True)
class Policy:
    """``parameters`` is None where parameters are never freed.

    | sharded | parameters | reduction | volume per step and rank, in the rank's parameters x (D-1)/D |
    |---|---|---|---|
    | nothing | stay | boundary | 2, an all-reduce |
    | optimizer (and gradients) | stay | boundary | 2, a reduce-scatter and an all-gather of what was updated |
    | optimizer and gradients | stay | micro | M + 1 |
    | all | hold | boundary | 2, a gather and a reduce-scatter |
    | all | hold | micro | M + 1 |
    | all | chunk | boundary | u + 1, with u runs of a chunk |
    | all | free | micro | 3M; 4M where input and weight gradients are apart |
    """

    sharding: Sharding
    parameters: Parameters | None
    reduction: Reduction

    @property
    def zero_stage(self) -> int:
        """As people call it."""
        return sum((self.sharding.optimizer, self.sharding.gradients, self.sharding.parameters))

    def volume(self, rank: RankReport, chunks: int) -> float:
        """Elements that a rank with ``chunks`` alike chunks moves per step among its D data-parallel ranks, as in the table."""
        if not self.sharding.optimizer:
            return 2 * rank.reductions / chunks
        gathers = chunks if self.parameters is None and rank.reductions else rank.gathers
        return (gathers + rank.reductions) / chunks

    def describe(self) -> str:
        """``parameters hold, gradients reduced at the boundary``"""
        held = "parameters stay" if self.parameters is None else f"parameters {self.parameters.value}"
        when = "at the boundary" if self.reduction is Reduction.BOUNDARY else "per micro-batch"
        return f"{held}, gradients reduced {when}"


def choose(sharding: Sharding, parameters: Parameters | None = None, reduction: Reduction | None = None) -> Policy:
    """The policy that is asked for, where nothing is asked the one that moves least. Raises ConfigError for what the plan cannot do."""
    if not sharding.parameters and parameters is not None:
        raise ConfigError(
            "parameters are freed at ZeRO stage 3 only",
            where="pipeline.zero_policy",
            got=parameters.value,
            fix="Leave the policy out, or use ZeRO stage 3.",
        )
    if not sharding.gradients and reduction is Reduction.MICRO:
        raise ConfigError(
            "full gradients live at ZeRO stages 0 and 1, so reducing them per micro-batch saves nothing",
            where="pipeline.zero_policy",
            got=reduction.value,
            expected="boundary",
        )
    if sharding.parameters and parameters is None:
        parameters = Parameters.HOLD
    if reduction is None:
        reduction = Reduction.MICRO if parameters is Parameters.FREE else Reduction.BOUNDARY
    return Policy(sharding, parameters, reduction)


def candidates(
    sharding: Sharding, parameters: Parameters | None = None, reduction: Reduction | None = None, *, chunks: int = 1
) -> list[Policy]:
    """All policies that agree with what is asked, those that move less before those that need less. ``chunks`` are per rank."""
    first = choose(sharding, parameters, reduction)
    pairs: list[tuple[Parameters | None, Reduction]] = [(first.parameters, first.reduction)]
    if sharding.parameters:
        several = [(Parameters.CHUNK, Reduction.BOUNDARY)] if chunks > 1 else []
        pairs += [*several, (Parameters.HOLD, Reduction.MICRO), (Parameters.FREE, Reduction.MICRO)]
    elif sharding.gradients:
        pairs += [(None, Reduction.MICRO)]
    fitting = [(held, when) for held, when in pairs if parameters in (None, held) and reduction in (None, when)]
    return [choose(sharding, held, when) for held, when in dict.fromkeys(fitting)]


@dataclass(frozen=True)
class Weights:
    """Bytes of one rank's part of the model: whole parameters, whole gradients, whole optimizer state, over ``ranks`` that share them."""

    parameters: int
    gradients: int
    optimizer: int
    ranks: int


def needed(policy: Policy, weights: Weights, rank: RankReport, chunks: int) -> int:
    """Bytes that a rank holds at most in a step, activations and buffers of messages aside: shards, and what its schedule has whole at once."""
    sharding, ranks = policy.sharding, weights.ranks
    optimizer = weights.optimizer // ranks if sharding.optimizer else weights.optimizer
    parameters = weights.parameters
    if sharding.parameters:
        parameters = parameters // ranks + parameters * rank.peak_parameters // chunks
    gradients = weights.gradients
    if sharding.gradients:
        gradients = gradients // ranks + gradients * rank.peak_gradients // chunks
    return optimizer + parameters + gradients


@dataclass(frozen=True)
class Choice:
    """A policy with its price on the rank that needs most: bytes without activations, and elements moved as ``Policy.volume`` has them."""

    policy: Policy
    bytes: int
    volume: float
    fits: bool = True


def choose_fitting(
    policies: Sequence[Policy], price: Callable[[Policy], tuple[int, float]], limit: int | None
) -> Choice:
    """The first policy that needs at most ``limit`` bytes; where none does, the one that needs least. ``price`` gives bytes and volume."""
    choices = [Choice(policy, *price(policy)) for policy in policies]
    fitting = next((choice for choice in choices if limit is None or choice.bytes <= limit), None)
    if fitting is not None:
        return fitting
    least = min(choices, key=lambda choice: choice.bytes)
    return Choice(least.policy, least.bytes, least.volume, fits=False)
