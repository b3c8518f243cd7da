"""The engine of a pipeline: DeepSpeed's verbs over schedules; being written, only its signatures stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from zero_trial.engine.engine import Engine
from zero_trial.engine.grid import PipelineParallelGrid


class PipelineEngine(Engine):
    """Trains a :class:`PipelineModule`, a whole batch at a time."""

    is_pipe_parallel = True
    grid: PipelineParallelGrid  # engine.mpu is the same object

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """One optimizer step over ``gradient_accumulation_steps()`` micro-batches: the mean loss, a scalar, the same on all ranks.

        A micro-batch is ``(inputs, labels)``. Raises StopIteration on all ranks when the data has ended. Collective over the world.
        """
        raise NotImplementedError

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Forwards only: the mean loss (``reduce_output`` None: a list of them), the same on all ranks.

        ``return_logits``: ``(loss, logits)``, logits a list with every micro-batch's output where the last layer is, None elsewhere.
        ``compute_loss=False``: the list of outputs where the last layer is, None elsewhere. Collective over the world.
        """
        raise NotImplementedError

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        raise NotImplementedError

    def set_dataloader(self, loader: Iterable[Any] | None) -> None:
        raise NotImplementedError

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """``fn(batch)`` gives ``(inputs, labels)``."""
        raise NotImplementedError

    def is_first_stage(self) -> bool:
        """This rank holds the first layer: it reads inputs."""
        raise NotImplementedError

    def is_last_stage(self) -> bool:
        """This rank holds the last layer: losses and logits are made here (with ``zb_v`` that is pipeline rank 0)."""
        raise NotImplementedError
