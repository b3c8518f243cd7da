"""What a plan is made for: a model with its batch, or a trial; the batch cut to a micro-batch, and
the loss of a model that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from zero_trial.ds_config.table import DsConfig
from zero_trial.engine import Engine
from zero_trial.planning.blueprint import Blueprint
from zero_trial.planning.dry_run import Role, dry_run_any
from zero_trial.planning.memory_plan import Figures

Loss = Callable[[Any, Any], torch.Tensor]


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

    def dry_run(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        """Return the figures with ``settings`` (all batch sizes solved) on ``ranks`` ranks, all on
        one host or not, and the way of the dry run.
        """


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
        self._loss = loss if loss is not None else _call_and_reduce
        self._rows = rows_of(batch)

    @property
    def parameters(self) -> int:
        return self._blueprint.parameters

    @property
    def device(self) -> torch.device:
        return self._blueprint.device

    @property
    def samples(self) -> int | None:
        return self._rows

    def dry_run(self, settings: DsConfig, ranks: int, micro_batch: int, one_host: bool = True) -> tuple[Figures, str]:
        batch = self._batch if self._rows is None else first_rows(self._batch, self._rows, micro_batch)

        def micro(engines: Sequence[Engine], batches: Sequence[Any]) -> None:
            engines[0].backward(self._loss(engines[0], batches[0]))
            engines[0].step()

        calls = settings.gradient_accumulation_steps or 1
        known = micro if self._batch is not None else None
        return dry_run_any([Role(self._blueprint, settings)], ranks, known, [batch], calls=calls, one_host=one_host)


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
