"""What a plan is made for: engines that train together, and one call of their training; the batch
cut to a micro-batch, and the loss of a model that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.ds_config.keys_zero import OffloadOptimizerSection
from zero_trial.ds_config.table import DsConfig
from zero_trial.planning.memory_plan import Figures
from zero_trial.planning.pass_trace import PassTrace, Traced, Train, trace
from zero_trial.planning.state_bytes import PlannedStates, TrainedModel, total
from zero_trial.planning.step_peak import play

Loss = Callable[[Any, Any], torch.Tensor]
MOST_ACCUMULATION = 2  # a third micro-batch of a step needs what the second needs


class Subject:
    """What a plan is made for: engines that train together (several for a GAN).

    Args:
        train: runs a micro-batch, or ``whole_steps``; None: only what outlives a step is planned.
        batches: real ones, which ``train`` gets at the size of the plan.
    """

    def __init__(
        self,
        engines: Sequence[TrainedModel],
        train: Train | None = None,
        batches: Sequence[Any] = (),
        *,
        whole_steps: bool = False,
    ) -> None:
        self.parameters = sum(engine.blueprint.parameters for engine in engines)
        self.device = engines[0].blueprint.device
        self.samples = rows_of(batches)  # None without a batch
        self._engines = engines
        self._train = train
        self._batches = batches
        self._whole_steps = whole_steps
        self._traces: dict[tuple[Any, ...], PassTrace] = {}

    def figures(self, settings: DsConfig, ranks: int, one_host: bool = True) -> tuple[Figures, str]:
        """Return what rank 0 needs with the stage, the offloaded state and the (solved) batch sizes
        of ``settings`` on ``ranks`` ranks, all on one host or not, and the kind of tensors on which
        activations were counted."""
        zero, accumulation = settings.zero_optimization, settings.gradient_accumulation_steps or 1
        micro_batch = settings.train_micro_batch_size_per_gpu or 1
        states = []
        for engine in self._engines:
            own = with_state_at(engine.settings, zero.offload_optimizer)
            own = variant(own, stage=zero.stage, micro_batch=micro_batch, accumulation=accumulation)
            states.append(PlannedStates(engine, own, ranks, self.device))
        kept = total([each.bytes for each in states])
        on_cpu = self.device.type == "cpu"
        found = Figures(
            kept.parameters,
            kept.gradients,
            kept.optimizer,
            host=kept.host + (0 if on_cpu else kept.snapshot),
            disk=kept.disk,
            snapshot=kept.snapshot if on_cpu else 0,
        )
        if self._train is None:
            return found, "none"
        traced = self._trace(self._train, states, micro_batch, accumulation)
        peak = play(traced, states, 1 if self._whole_steps else accumulation, one_host=one_host)
        return replace(found, activations=traced.activations, peak=found.states + peak), traced.how

    def _trace(self, train: Train, states: Sequence[PlannedStates], micro_batch: int, accumulation: int) -> PassTrace:
        """Return the trace of a micro-batch; each is made once for all that it depends on."""
        dtypes = repr([(each.resolved.policy, each.resolved.autocast) for each in states])
        key = (micro_batch, dtypes, self._whole_steps and accumulation)
        if key not in self._traces:
            parts = [
                Traced(engine.blueprint, each.settings, each.resolved)
                for engine, each in zip(self._engines, states, strict=True)
            ]
            batches = [first_rows(batch, rows_of(batch), micro_batch) for batch in self._batches]
            self._traces[key] = trace(parts, train, batches)
        return self._traces[key]


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


def model_subject(model: TrainedModel, batch: Any = None, loss: Loss | None = None) -> Subject:
    """Return the subject of a model alone.

    Args:
        batch: what its forward takes (a tuple of arguments, a dict of keyword arguments, or one
            tensor); None: states only.
        loss: ``loss(engine, batch)`` returns the scalar to differentiate; without it the model is
            called, and its own loss used, or one made of its outputs.
    """

    def micro(engines: Sequence[Any], batches: Sequence[Any]) -> None:
        engines[0].backward((loss or _call_and_reduce)(engines[0], batches[0]))
        engines[0].step()

    return Subject([model]) if batch is None else Subject([model], micro, [batch])


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


def first_rows(batch: Any, rows: int | None, wanted: int) -> Any:
    """Cut or repeat the batch to ``wanted`` samples: every tensor whose first dimension is
    ``rows``; the rest stays as it is.
    """

    def fit(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != rows or rows == wanted:
            return leaf  # also where rows is None
        if wanted < rows:
            return leaf[:wanted].clone()
        return leaf[torch.arange(wanted) % rows]

    return tree_map(fit, batch)
