"""What a plan is made for: a model with its batch, or a trial; the batch cut to a micro-batch, and
the loss of a model that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.ds_config.keys_zero import OffloadOptimizerSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.memory_plan import Figures
from zero_trial.planning.pass_trace import PassTrace, Traced, Train, trace
from zero_trial.planning.state_bytes import PlannedStates, TrainedModel, total
from zero_trial.planning.step_peak import play

Loss = Callable[[Any, Any], torch.Tensor]
MOST_ACCUMULATION = 2  # a third micro-batch of a step needs what the second needs


class Subject(Protocol):
    """What a plan is made for: a model with its batch, or a trial."""

    @property
    def parameters(self) -> int:
        """Return the elements of all parameters, each counted once."""

    @property
    def device(self) -> torch.device:
        """Return where the training will be."""

    @property
    def samples(self) -> int | None:
        """Return the samples of the batch as it was given; None without one."""

    def figures(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        """Return the figures with ``settings`` (all batch sizes solved) on ``ranks`` ranks, all on
        one host or not, and the kind of tensors on which activations were counted.
        """


class Passes:
    """Traces of one training function by what they depend on; each is made once.

    ``train`` runs a micro-batch, or ``whole_steps``.
    """

    def __init__(self, train: Train, *, whole_steps: bool = False) -> None:
        self._train = train
        self._whole_steps = whole_steps
        self._known: dict[tuple[Any, ...], PassTrace] = {}

    def trace(
        self, engines: Sequence[TrainedModel], states: Sequence[PlannedStates], batches: Any, key: int
    ) -> PassTrace:
        """Return the trace of a micro-batch of ``key`` samples."""
        parts = [
            Traced(engine.blueprint, each.settings, each.resolved) for engine, each in zip(engines, states, strict=True)
        ]
        dtypes = tuple((part.resolved.policy, part.resolved.autocast) for part in parts)
        own = (
            key,
            repr(dtypes),
            self.calls(states[0].settings) == 1 and states[0].settings.gradient_accumulation_steps,
        )
        if own not in self._known:
            self._known[own] = trace(parts, self._train, batches)
        return self._known[own]

    def calls(self, settings: DsConfig) -> int:
        """Return how often the function is called in a step."""
        return 1 if self._whole_steps else settings.gradient_accumulation_steps or 1


def plan_figures(
    engines: Sequence[TrainedModel],
    settings: Sequence[DsConfig],
    ranks: int,
    passes: Passes | None,
    batches: Any,
    micro_batch: int,
    *,
    one_host: bool,
) -> tuple[Figures, str]:
    """Return what rank 0 needs for ``engines`` together, and on which kind of tensors activations
    were counted; without ``passes``, between steps."""
    device = engines[0].blueprint.device
    states = [PlannedStates(*each, ranks, device) for each in zip(engines, settings, strict=True)]
    kept = total([each.bytes for each in states])
    on_cpu = device.type == "cpu"
    found = Figures(
        kept.parameters,
        kept.gradients,
        kept.optimizer,
        host=kept.host + (0 if on_cpu else kept.snapshot),
        disk=kept.disk,
        snapshot=kept.snapshot if on_cpu else 0,
    )
    if passes is None:
        return found, "none"
    traced = passes.trace(engines, states, batches, micro_batch)
    calls = passes.calls(settings[0])
    peak = play(traced, states, calls, one_host=one_host)
    whole = replace(
        found,
        activations=traced.activations,
        peak=found.states + peak,
    )
    return whole, traced.how


def variant(settings: DsConfig, *, stage: int, micro_batch: int, accumulation: int) -> DsConfig:
    """Return ``settings`` at another ZeRO stage and batch."""
    return replace(
        settings,
        train_batch_size=None,
        train_micro_batch_size_per_gpu=micro_batch,
        gradient_accumulation_steps=accumulation,
        zero_optimization=replace(settings.zero_optimization, stage=stage),
    )


def with_state_at(settings: DsConfig, place: OffloadOptimizerSection | None) -> DsConfig:
    """Return ``settings`` with optimizer state somewhere else."""
    return replace(settings, zero_optimization=replace(settings.zero_optimization, offload_optimizer=place))


class ModelSubject:
    """A model alone, or its blueprint where there is one already.

    ``batch``: what its forward takes (a tuple of arguments, a dict of keyword arguments, or one
    tensor); None: states only.

    ``loss(engine, batch)`` gives the scalar to differentiate; without it the model is called, and
    its own loss taken, or one made of its outputs.
    """

    def __init__(
        self,
        model: nn.Module | Blueprint,
        batch: Any = None,
        loss: Loss | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._blueprint = model if isinstance(model, Blueprint) else Blueprint(model, options, device)
        self._batch = batch
        self._rows = rows_of(batch)
        self._engine: TrainedModel | None = None
        of_batch = loss if loss is not None else _call_and_reduce

        def micro(engines: Sequence[Any], batches: Sequence[Any]) -> None:
            engines[0].backward(of_batch(engines[0], batches[0]))
            engines[0].step()

        self._passes = Passes(micro) if batch is not None else None

    @property
    def parameters(self) -> int:
        return self._blueprint.parameters

    @property
    def device(self) -> torch.device:
        return self._blueprint.device

    @property
    def samples(self) -> int | None:
        return self._rows

    def figures(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        batch = self._batch if self._rows is None else first_rows(self._batch, self._rows, micro_batch)
        engine = self._engine = self._engine or TrainedModel(self._blueprint, settings)
        return plan_figures([engine], [settings], ranks, self._passes, [batch], micro_batch, one_host=one_host)


def _call_and_reduce(engine: Any, batch: Any) -> torch.Tensor:
    """Call the model on ``batch`` and return its loss, or one made of its outputs."""
    if isinstance(batch, Mapping):
        return loss_in(engine(**batch))
    return loss_in(engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch))


def loss_in(output: Any) -> torch.Tensor:
    """Return the first scalar that requires grad in a model's output: its loss, as in the outputs
    of Hugging Face's models.

    Where there is none, the loss is made outside of the model and not known here: a log-softmax
    over the last dimension of each floating output stands for it, which holds as much as a cross
    entropy does.
    """
    floats = [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    single = next((leaf for leaf in floats if leaf.numel() == 1), None)
    if single is not None:
        return single.reshape(())
    return torch.stack([torch.log_softmax(leaf.float(), -1).mean() for leaf in floats]).sum()


def _leaves(output: Any) -> list[Any]:
    """Return the leaves of nested outputs; objects with attributes, such as dataclasses, count as
    dicts.
    """
    found: list[Any] = []
    for leaf in tree_flatten(output)[0]:
        opens = hasattr(leaf, "__dict__") and not isinstance(leaf, torch.Tensor)
        found += tree_flatten(dict(vars(leaf)))[0] if opens else [leaf]
    return found


def rows_of(batch: Any) -> int | None:
    """Return the samples in a batch: the first dimension of its first tensor that has one; None
    where there is none.
    """
    return next(
        (leaf.shape[0] for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()), None
    )


def first_rows(batch: Any, rows: int, wanted: int) -> Any:
    """Cut or repeat the batch to ``wanted`` samples: every tensor whose first dimension is
    ``rows``; the rest stays as it is.
    """

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows or rows == wanted:
            return leaf
        if wanted < rows:
            return leaf[:wanted].clone()
        return leaf[torch.arange(wanted) % rows]

    return tree_map(fit, batch)
